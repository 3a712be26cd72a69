"""Messages between engine and ranks: the same whatever the chunks, bounded whatever the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.engine.framing import FRAME_BYTES_MAX, HEAD, FrameBuffer, FrameError, encode_frame

MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.lists(st.integers())))


@given(MESSAGES, st.data())
def test_any_chunking_gives_the_same_messages(messages: list[dict[str, object]], data: st.DataObject) -> None:
    raw = b"".join(encode_frame(message) for message in messages)
    buffer, found, at = FrameBuffer(), [], 0
    while at < len(raw):
        size = data.draw(st.integers(1, len(raw) - at))
        found += list(buffer.feed(raw[at : at + size]))
        at += size
    assert found == messages


@pytest.mark.parametrize(
    "raw", [HEAD.pack(FRAME_BYTES_MAX + 1), HEAD.pack(2) + b"[]", HEAD.pack(1) + b"{", HEAD.pack(1) + b"\xff"]
)
def test_bytes_that_are_no_message_are_an_error(raw: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameBuffer().feed(raw))
