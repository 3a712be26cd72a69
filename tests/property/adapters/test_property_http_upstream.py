"""Whatever an engine sends, in whatever pieces: one end, typed, and the same for every cutting."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from iop.adapters.http_connection import READ_BYTES, Connection, HttpExchange
from iop.adapters.http_exchange import HttpRequest, Origin, UpstreamError, UpstreamFailure
from iop.adapters.http_upstream import HttpUpstream
from iop.adapters.ollama_codec import AnswerReader
from iop.core.errors import RemoteProtocolError
from iop.wire.messages import BodyFraming, RunEventType

HEADS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
]
BODIES = [
    b"hello",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"5;x=y\r\nhello\r\n0\r\nT: 1\r\n\r\n",
    b"\r\n",
    b"zz",
    b"",
]

answers = st.lists(st.one_of(st.sampled_from(HEADS + BODIES), st.binary(max_size=20)), max_size=8).map(
    b"".join
)


class Transport:
    """A socket that takes everything."""

    def __init__(self, line: socket.socket) -> None:
        self.is_closed = False
        self.connection: Connection | None = None
        self._line = line

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self._line

    def write(self, data: bytes) -> None:
        assert not self.is_closed

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            assert self.connection is not None
            self.connection.connection_lost(None)

    def pause_reading(self) -> None:
        assert not self.is_closed

    def resume_reading(self) -> None:
        assert not self.is_closed


class Sink:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.body = b""

    def on_start(self, status: int, headers: list[tuple[bytes, bytes]], framing: BodyFraming) -> None:
        assert not self.calls
        self.calls.append(("start", status, tuple(headers), framing))

    def on_body(self, data: bytes) -> bool:
        assert len(self.calls) == 1
        assert data
        self.body += data
        return True

    def on_end(self) -> None:
        assert len(self.calls) == 1
        self.calls.append(("end",))

    def on_error(self, error: UpstreamError) -> None:
        assert self.calls == [] or self.calls[-1][0] == "start"
        self.calls.append(("error", error.failure))

    def on_closed(self) -> None:
        assert self.calls[-1][0] in {"end", "error"}
        self.calls.append(("closed",))


async def outcome(pieces: list[bytes]) -> tuple[Any, ...]:
    """What the sink saw, from these reads and then an end of file."""
    ends = socket.socketpair()
    async with asyncio.TaskGroup() as tasks:
        client = HttpUpstream(Origin.parse("http://h"))
        client.start(tasks)
        connection = Connection(client)
        transport = Transport(ends[0])
        transport.connection = connection
        connection.connection_made(transport)  # type: ignore[arg-type]
        sink = Sink()
        exchange = HttpExchange(HttpRequest(method=b"POST", path=b"/"), sink)
        connection.send(exchange, b"")
        for piece in pieces:
            for start in range(0, len(piece), READ_BYTES):
                part = piece[start : start + READ_BYTES]
                if transport.is_closed or not part:
                    break
                client.read_view[: len(part)] = part
                connection.buffer_updated(len(part))
        if not transport.is_closed:
            transport.is_closed = True
            connection.connection_lost(None)
        await client.aclose()
    for end in ends:
        end.close()
    assert sink.calls[-1] == ("closed",)
    assert sum(call[0] in {"end", "error"} for call in sink.calls) == 1
    return tuple(sink.calls), sink.body


@pytest.mark.clause("EN-52", "EN-57")
@settings(deadline=None)
@given(answers, st.lists(st.integers(0, 400), max_size=6))
@example(HEADS[0] + b"hello" + HEADS[0], [40])
@example(HEADS[1] + BODIES[3], [45])
def test_any_bytes_end_once_and_any_cutting_ends_the_same(answer: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[start:stop] for start, stop in pairwise(places)]
    whole_calls, whole_body = asyncio.run(outcome([answer]))
    cut_calls, cut_body = asyncio.run(outcome(pieces))
    assert cut_calls == whole_calls
    assert cut_body == whole_body
    assert all(isinstance(call[1], UpstreamFailure) for call in whole_calls if call[0] == "error")


LINES = [
    b'{"message":{"content":"a"},"done":false}\n',
    b'{"message":{"content":"","tool_calls":[{"function":{"name":"f","arguments":{}}}]}}\n',
    b'{"done":true,"done_reason":"stop"}\n',
    b'{"error":"x"}\n',
    b"\n",
    b"{",
    b"[1]\n",
]


@given(
    st.lists(st.one_of(st.sampled_from(LINES), st.binary(max_size=8)), max_size=8).map(b"".join),
    st.lists(st.integers(0, 200), max_size=6),
)
@pytest.mark.clause("EN-40")
def test_any_lines_of_a_backend_give_one_terminal_and_any_cutting_gives_the_same(
    answer: bytes, cuts: list[int]
) -> None:
    def read(pieces: list[bytes]) -> tuple[Any, ...]:
        reader = AnswerReader(is_fallback=False)
        events = []
        try:
            for piece in pieces:
                events += reader.feed(piece)
            events += reader.finish()
        except RemoteProtocolError:
            return ("refused",)
        assert sum(event.type.is_terminal for event in events) == 1
        assert events[-1].type.is_terminal
        kinds = [event.type for event in events]
        assert kinds.count(RunEventType.COMPLETE) <= 1
        return tuple(events)

    places = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[start:stop] for start, stop in pairwise(places)]
    assert read([answer]) == read(pieces)
