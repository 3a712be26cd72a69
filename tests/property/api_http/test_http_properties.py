"""Any split of the same bytes is the same request or stream; damaged bytes give refusals and never a false
success.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iop.api.http.errors import Dialect
from iop.api.http.limits import HttpLimits
from iop.api.http.protocol import HttpConnection
from iop.api.http.rename import rename_event_models
from iop.api.http.server import HttpServer
from iop.api.http.splice import JsonWatch, exceeds_depth, read_fields
from iop.api.http.sse import SseEnding, SseWatcher, event_data
from iop.testing.http_site import Recorder, SilentTransport, SystemClock

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


# ---- requests ----

REQUESTS = b"".join(
    [
        b"POST /a?b HTTP/1.1\r\nHost: e\r\nContent-Length: 5\r\n\r\nhello",
        b"GET /b HTTP/1.1\r\nHost: e\r\nX: y\r\n\r\n",
        b"POST /c HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: t\r\n\r\n",
        b"GET /d HTTP/1.0\r\n\r\n",
    ]
)


def feed(parts: list[bytes]) -> tuple[list[tuple[bytes, bytes, bytes]], bytes, Recorder]:
    handler = Recorder(limits=HttpLimits(body_bytes=1000))
    server = HttpServer(handler, limits=HttpLimits(), clock=SystemClock())
    connection = HttpConnection(server)
    transport = SilentTransport()
    connection.connection_made(transport)
    for part in parts:
        if transport.is_closed:
            break
        connection.data_received(part)
    connection.connection_lost(None)
    return handler.requests, b"".join(transport.written), handler


@pytest.mark.clause("SF-12")
@settings(deadline=None)
@given(cuts=st.lists(st.integers(min_value=0, max_value=1000), max_size=30))
def test_any_split_of_requests_is_the_same_requests(cuts: list[int]) -> None:
    requests, _, _ = feed(cut(REQUESTS, cuts))
    assert [(method, path, body) for method, path, body in requests] == [
        (b"POST", b"/a", b"hello"),
        (b"GET", b"/b", b""),
        (b"POST", b"/c", b"abcde"),
        (b"GET", b"/d", b""),
    ]


@pytest.mark.clause("SF-12")
@settings(max_examples=300, deadline=None)
@given(
    cuts=st.lists(st.integers(min_value=0, max_value=1000), max_size=5),
    damage=st.lists(
        st.tuples(st.integers(min_value=0, max_value=1000), st.binary(max_size=3)), min_size=1, max_size=3
    ),
)
def test_damaged_requests_are_refused_or_read_alike_and_leave_nothing(
    cuts: list[int], damage: list[tuple[int, bytes]]
) -> None:
    data = REQUESTS
    for place, put in damage:
        at = place % len(data)
        data = data[:at] + put + data[at + max(1, len(put)) :]
    requests, written, handler = feed(cut(data, cuts))
    whole, whole_written, _ = feed([data])
    assert requests == whole
    assert written.count(b"HTTP/1.1 ") == whole_written.count(b"HTTP/1.1 ")
    assert handler.budget.held_bytes == 0


# ---- bodies ----


@pytest.mark.clause("SF-03")
@settings(deadline=None)
@given(
    before=st.dictionaries(st.text(max_size=8).filter(lambda key: key != "model"), JSON, max_size=3),
    after=st.dictionaries(st.text(max_size=8), JSON, max_size=3),
    model=st.text(min_size=1, max_size=20),
    target=st.text(min_size=1, max_size=20),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
)
@example(before={}, after={"x": '"model":"a"'}, model="a", target='"\\', indent=None, is_ascii=True)
def test_splicing_changes_the_model_and_nothing_else(
    before: dict[str, Any], after: dict[str, Any], model: str, target: str, indent: int | None, is_ascii: bool
) -> None:
    after = {key: value for key, value in after.items() if key not in before and key != "model"}
    value = {**before, "model": model, **after}
    body = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    fields = read_fields(body, depth_max=128)
    spliced = b"".join(fields.with_model(target))
    assert json.loads(spliced) == {**value, "model": target}
    start, end = fields.model_span
    assert json.loads(body[start:end]) == model
    assert spliced.startswith(body[:start])
    assert spliced.endswith(body[end:])


@settings(deadline=None)
@given(value=JSON, depth=st.integers(min_value=0, max_value=6))
def test_depth_is_what_a_walk_says(value: Any, depth: int) -> None:
    def walk(item: Any) -> int:
        if isinstance(item, dict):
            return 1 + max((walk(inner) for inner in item.values()), default=0)
        if isinstance(item, list):
            return 1 + max((walk(inner) for inner in item), default=0)
        return 0

    assert exceeds_depth(json.dumps(value).encode(), depth) == (walk(value) > depth)


@pytest.mark.clause("SF-03")
@settings(deadline=None)
@given(
    value=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    cuts=st.lists(st.integers(min_value=0, max_value=999), max_size=9),
)
def test_a_body_is_complete_exactly_at_its_end(value: dict[str, Any], cuts: list[int]) -> None:
    data = json.dumps(value).encode()
    watch = JsonWatch()
    for part in cut(data, cuts):
        assert not watch.is_complete
        watch.feed(part)
    assert watch.is_complete


# ---- streams ----

EVENT = st.one_of(
    st.text(max_size=12).map(
        lambda text: (
            b"data: "
            + json.dumps(
                {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
            ).encode()
            + b"\n\n"
        )
    ),
    st.sampled_from(
        [
            b": comment\n",
            b": comment\n\n",
            b"\n",
            b"event: x\nid: 7\ndata: a\ndata: b\n\n",
            b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
        ]
    ),
)
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def watch_stream(parts: list[bytes]) -> tuple[bytes, SseEnding]:
    watcher = SseWatcher(Dialect.CHAT, choices=1, event_bytes_max=1 << 20)
    out = b"".join(watcher.feed(part) for part in parts)
    ending, rest = watcher.finish()
    return out + rest, ending


@pytest.mark.case("P-01")
@pytest.mark.clause("SF-03", "SF-05", "SF-14")
@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(EVENT, max_size=6),
    tail=st.sampled_from(
        [b"", FINISH, FINISH + DONE, DONE, FINISH + DONE + b"rubbish\n\n", FINISH[:-1], FINISH[:9]]
    ),
    is_crlf=st.booleans(),
    cuts=st.lists(st.integers(min_value=0, max_value=2000), max_size=40),
)
@example(events=[b"\n"], tail=b"", is_crlf=True, cuts=[1])
def test_any_split_of_a_stream_gives_the_same_bytes_and_the_same_ending(
    events: list[bytes], tail: bytes, is_crlf: bool, cuts: list[int]
) -> None:
    data = b"".join(events) + tail
    if is_crlf:
        data = data.replace(b"\n", b"\r\n")
    whole = watch_stream([data])
    assert watch_stream(cut(data, cuts)) == whole
    out, ending = whole
    if ending is not SseEnding.CUT:
        assert out.count(b"[DONE]") == 1
        assert out.startswith(data[: len(out) - len(DONE) - 2])
    else:
        assert b"[DONE]" not in out
        assert data.startswith(out)


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-14")
@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30), max_size=5),
    at=st.integers(min_value=0, max_value=2000),
    damage=st.binary(max_size=4),
)
def test_a_stream_without_a_finish_reason_is_never_a_success(
    texts: list[str], at: int, damage: bytes
) -> None:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    data = b"".join(
        b"data: " + json.dumps(chunk, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
        for chunk in chunks
    )
    place = at % (len(data) + 1)
    data = data[:place] + damage + data[place + len(damage) :]
    out, ending = watch_stream([data])
    if event_done(out):
        return  # the damage happens to spell the terminator
    assert ending is SseEnding.CUT
    assert data.startswith(out)


def event_done(data: bytes) -> bool:
    return any((event_data(event) or b"").strip() == b"[DONE]" for event in data.split(b"\n\n"))


@pytest.mark.clause("SF-15")
@settings(deadline=None)
@given(text=st.text(max_size=30), name=st.text(min_size=1, max_size=10))
def test_renaming_changes_the_name_of_an_event_and_nothing_else(text: str, name: str) -> None:
    chunk = {"id": "x", "model": "dated", "choices": [{"delta": {"content": text}}]}
    event = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    renamed = rename_event_models(event, json.dumps(name).encode())
    assert json.loads(event_data(renamed) or b"") == {**chunk, "model": name}
