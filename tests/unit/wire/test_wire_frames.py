from __future__ import annotations

import pytest

from iop.core.errors import RemoteProtocolError
from iop.wire.frames import FrameReader, frame


def payloads(reader: FrameReader, data: bytes) -> list[bytes]:
    return [buffer[start:end] for buffer, start, end in reader.feed(data)]


@pytest.mark.clause("EN-100")
def test_a_frame_is_a_big_endian_length_and_its_payload() -> None:
    assert frame(b"abc") == b"\x00\x00\x00\x03abc"


@pytest.mark.clause("EN-100")
def test_frames_come_out_whole_however_the_bytes_are_cut() -> None:
    data = frame(b"one") + frame(b"x" * 300) + frame(b"three")
    for size in range(1, len(data) + 1):
        reader = FrameReader(1000)
        found: list[bytes] = []
        for at in range(0, len(data), size):
            found += payloads(reader, data[at : at + size])
        assert found == [b"one", b"x" * 300, b"three"]
        assert not reader.is_mid_frame


@pytest.mark.clause("EN-100")
def test_a_frame_of_the_limit_passes_and_one_byte_more_is_refused_before_it_is_held() -> None:
    reader = FrameReader(10)
    assert payloads(reader, frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(RemoteProtocolError) as caught:
        payloads(reader, (11).to_bytes(4, "big"))
    assert caught.value.reason == "FRAME_TOO_LARGE"
    assert reader.held_bytes == 0


@pytest.mark.clause("EN-100")
def test_an_empty_frame_is_refused_after_the_frames_before_it() -> None:
    found: list[bytes] = []
    with pytest.raises(RemoteProtocolError) as caught:
        found.extend(
            buffer[start:end] for buffer, start, end in FrameReader(10).feed(frame(b"ok") + bytes(4))
        )
    assert caught.value.reason == "EMPTY_FRAME"
    seen = []
    try:
        for buffer, start, end in FrameReader(10).feed(frame(b"ok") + bytes(4)):
            seen.append(buffer[start:end])
    except RemoteProtocolError:
        pass
    assert seen == [b"ok"]


def test_a_raised_limit_counts_from_the_next_frame_of_the_same_read() -> None:
    reader = FrameReader(4)
    found = []
    for buffer, start, end in reader.feed(frame(b"abcd") + frame(b"x" * 9)):
        found.append(buffer[start:end])
        reader.frame_bytes_max = 9
    assert found == [b"abcd", b"x" * 9]


def test_a_cut_within_the_header_is_mid_frame() -> None:
    reader = FrameReader(10)
    assert payloads(reader, b"\x00\x00") == []
    assert reader.is_mid_frame
    assert payloads(reader, b"\x00\x01z") == [b"z"]
