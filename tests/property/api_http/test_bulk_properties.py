"""Large bodies read in steps: any split is the same request, and it is the one that a whole read finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iop.api.http import bulk, long_strings
from iop.api.http.bulk import BulkFields, BulkReader
from iop.api.http.estimate import prompt_bytes
from iop.api.http.long_strings import StringCutter
from iop.api.http.splice import RequestFields, read_fields
from iop.core.errors import InvalidRequest

TEXT = st.text(max_size=40) | st.text(alphabet='a"\\\n\u00e9\u6771\U0001f680{}[],:', max_size=60)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.lists(st.integers(), max_size=30),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["url", "data", "text", "content"]), inner, max_size=5
        )
    ),
    max_leaves=25,
)
MEMBERS = st.sampled_from(
    [
        "messages",
        "prompt",
        "input",
        "system",
        "tools",
        "stream",
        "n",
        "stream_options",
        "user",
        "metadata",
        "x",
    ]
)
BODIES = st.tuples(
    st.dictionaries(MEMBERS, JSON, max_size=8),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
    st.integers(min_value=0, max_value=8),
)


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Make every bound small, so that small bodies meet all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk, "STEP_BYTES", 37)
        patch.setattr(bulk, "SLICE_BYTES", 20)
        patch.setattr(long_strings, "LONG_STRING_BYTES", 30)
        patch.setattr(long_strings, "HEAD_BYTES", 14)
        patch.setattr("iop.api.http.estimate.MORE_BYTES_MIN", 0)
        patch.setattr("iop.api.http.long_strings.MORE_BYTES_MIN", 0)
        yield


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


def encoded(drawn: tuple[Any, ...]) -> bytes:
    members, is_ascii, indent, separators, place = drawn
    items = list(members.items())
    items.insert(min(place, len(items)), ("model", "fast"))
    return json.dumps(dict(items), ensure_ascii=is_ascii, indent=indent, separators=separators).encode()


def read_bulk(parts: list[bytes]) -> BulkFields:
    reader = BulkReader(parts, depth_max=128)
    while not reader.step():
        pass
    return reader.fields()


def told(fields: RequestFields) -> tuple[Any, ...]:
    return (
        fields.model,
        fields.is_stream,
        fields.size,
        fields.integer("n", 1),
        fields.prompts,
        prompt_bytes(fields),
        set(fields.raw),
        b"".join(fields.with_model("org/Other")),
        b"".join(fields.with_model("fast")),
    )


@pytest.mark.clause("SF-03")
@pytest.mark.clause("EN-111")
@settings(deadline=None, max_examples=80)
@given(drawn=BODIES, cuts=st.lists(st.integers(min_value=0, max_value=5000), max_size=30))
@example(
    drawn=({"input": {"a": {"b": None, "c": [-(10**18), -100], "": None}}}, True, None, (",", ":"), 0),
    cuts=[],
)
def test_any_split_of_a_large_body_is_the_request_that_a_whole_read_finds(
    drawn: tuple[Any, ...], cuts: list[int]
) -> None:
    body = encoded(drawn)
    assert told(read_bulk(cut(body, cuts))) == told(read_fields(body, depth_max=128))


@pytest.mark.clause("SF-03")
@settings(deadline=None, max_examples=150)
@given(
    drawn=BODIES,
    cuts=st.lists(st.integers(min_value=0, max_value=5000), max_size=10),
    place=st.integers(min_value=0),
    damage=st.sampled_from(
        [b"", b",", b"]", b"}", b'"', b"\\", b"[", b"{", b":", b"\x01", b"\\ud800", b"1", b" "]
    ),
    size=st.integers(min_value=0, max_value=4),
)
def test_a_damaged_body_is_refused_in_steps_exactly_when_it_is_refused_whole(
    drawn: tuple[Any, ...], cuts: list[int], place: int, damage: bytes, size: int
) -> None:
    body = encoded(drawn)
    place %= len(body) + 1
    body = body[:place] + damage + body[place + size :]
    try:
        whole: tuple[Any, ...] | None = told(read_fields(body, depth_max=128))
    except InvalidRequest:
        whole = None
    try:
        steps: tuple[Any, ...] | None = told(read_bulk(cut(body, cuts)))
    except InvalidRequest:
        steps = None
    assert (steps is None) == (whole is None)
    if whole is not None and steps is not None:
        assert steps[:3] == whole[:3]
        assert steps[6:] == whole[6:]


@pytest.mark.clause("SF-03")
@settings(deadline=None, max_examples=80)
@given(
    text=st.text(alphabet='a"\\\n\u00e9\u6771\U0001f680', min_size=30, max_size=200),
    is_ascii=st.booleans(),
    cuts=st.lists(st.integers(min_value=0, max_value=2000), max_size=60),
)
def test_a_long_string_is_cut_between_characters_wherever_it_is_split(
    text: str, is_ascii: bool, cuts: list[int]
) -> None:
    body = json.dumps({"model": "fast", "prompt": text, "z": 1}, ensure_ascii=is_ascii).encode()
    cutter = StringCutter("m" * 32)
    shortened = b"".join([*(cutter.feed(part)[0] for part in cut(body, cuts)), cutter.finish()])
    fields = read_bulk(cut(body, cuts))
    assert fields.counted_text_bytes == len(text.encode())
    value = json.loads(shortened)
    (found,) = cutter.cuts
    assert text.startswith(value["prompt"].partition("~\x01")[0])
    assert b"".join(fields.strings.slice(found.start, found.end)) in body
    assert fields.strings.restore(json.loads(fields.body)) == {"model": "fast", "prompt": text, "z": 1}
    # However often it is put into JSON again, it comes back as it was.
    value = json.loads(fields.body)
    nested = json.dumps({"deep": json.dumps({"deeper": json.dumps(value)})}).encode()
    whole = json.loads(b"".join(fields.strings.expand(nested)))
    assert json.loads(json.loads(whole["deep"])["deeper"])["prompt"] == text
