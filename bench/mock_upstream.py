"""A small fast OpenAI-compatible upstream: what it answers is read from the request's own text.

Anywhere in the body: ``mock:chunks=100,interval_us=10000,size=200``. Without ``"stream":true`` it gives one short
answer. It parses no JSON and prepares every byte it sends, so that a measurement shows the fleet and not the upstream.

Run: ``python bench/mock_upstream.py PORT`` (0: any free one); prints the port.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import lru_cache
from typing import cast

import uvloop

_DIRECTIVE = re.compile(rb"mock:chunks=(\d+),interval_us=(\d+),size=(\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)

_ANSWER = (
    b'{"id":"chatcmpl-bench","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"A short answer."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}'
)
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"bench"}]}'


def plain(body: bytes) -> bytes:
    """A whole JSON answer."""
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=64)
def event(size: int) -> bytes:
    """One content event of ``size`` bytes, as a chunk."""
    head = b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
    head += b'[{"index":0,"delta":{"content":"'
    tail = b'"},"finish_reason":null}]}\n\n'
    return chunk(head + b"x" * max(1, size - len(head) - len(tail)) + tail)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_TAIL = (
    chunk(
        b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"bench","choices":'
        b'[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    )
    + chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


class Upstream(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[: end + 2]
            length = _LENGTH.search(head)
            if _CHUNKED.search(head):
                stop = self._buffer.find(b"\r\n0\r\n\r\n", end)
                if stop < 0:
                    return
                used = stop + 7
            else:
                used = end + 4 + (int(length[1]) if length else 0)
                if len(self._buffer) < used:
                    return
            body, self._buffer = self._buffer[end + 4 : used], self._buffer[used:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET "):
            self._transport.write(plain(_MODELS))
            return
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(plain(_ANSWER))
            return
        directive = _DIRECTIVE.search(body)
        count, interval_us, size = (int(part) for part in directive.groups()) if directive else (10, 0, 200)
        if interval_us == 0:
            self._transport.write(STREAM_HEAD + event(size) * count + STREAM_TAIL)
            return
        self._transport.write(STREAM_HEAD)
        self._next(event(size), count, interval_us / 1e6, self._loop.time())

    def _next(self, data: bytes, left: int, interval_s: float, due: float) -> None:
        if left == 0:
            self._transport.write(STREAM_TAIL)
            return
        self._transport.write(data)
        due += interval_s
        self._timer = self._loop.call_at(due, self._next, data, left - 1, interval_s, due)


async def serve(port: int) -> None:
    """Listen until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Upstream(loop), "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
