"""A scripted HTTP engine that speaks raw bytes: what a provider can do wrong, and a log of who left when.

Each request is handed to the script, which writes the answer byte by byte as it likes: whole, cut, split,
late, or with rubbish after it. The stub notes when its peer closes, so that tests can tell a cancelled
request from a finished one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeAlias

from iop.testing.waiting import PATIENCE_S, eventually

__all__ = ["Script", "StubCall", "StubEngine", "sse_events", "whole_answer"]


class StubCall:
    """One request at the stub, and the connection it came on.

    Attributes:
        head: the request's first line and header fields, as bytes came.
        headers: the fields, names in lower case; a repeated name keeps its last value.
        body: the whole body, chunks joined.
        is_peer_gone: set when the peer has closed or reset the connection.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes
    ) -> None:
        self._reader = reader
        self.writer = writer
        self.head = head
        first, *lines = head.split(b"\r\n")
        self.method, self.path = first.split(b" ")[:2]
        self.headers: dict[bytes, bytes] = {}
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        self.body = body
        self.is_peer_gone = asyncio.Event()
        self.is_answered = False

    @property
    def is_closed(self) -> bool:
        """Whether the peer has closed by now; ``is_peer_gone`` is set a few milliseconds after that."""
        return self._reader.at_eof() or self._reader.exception() is not None

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    async def write(self, *parts: bytes) -> None:
        """Write, and wait for room."""
        for part in parts:
            if self.writer.is_closing():
                # One of the loops says so by an error of another kind.
                raise ConnectionResetError("the peer has left")
            self.writer.write(part)
            await self.writer.drain()

    async def start_events(self, *headers: bytes, status: bytes = b"200 OK") -> None:
        """Begin a chunked event stream."""
        lines = [
            b"HTTP/1.1 " + status,
            b"Content-Type: text/event-stream",
            b"Transfer-Encoding: chunked",
            *headers,
        ]
        await self.write(b"\r\n".join(lines) + b"\r\n\r\n")

    async def chunk(self, *parts: bytes) -> None:
        """Write each part as one chunk."""
        for part in parts:
            await self.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def end_chunks(self) -> None:
        """Write the last chunk."""
        await self.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """End the connection with a reset."""
        peer = self.writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """End the connection after what was written."""
        self.writer.close()

    async def wait_gone(self, *, within_s: float = PATIENCE_S) -> None:
        """Wait until the peer has closed."""
        await eventually(lambda: self.is_closed, within_s=within_s, what="the peer's leaving")


Script: TypeAlias = Callable[[StubCall], Awaitable[None]]
"""Answers one request; when it returns, the connection takes the next one, unless it was closed."""


class StubEngine:
    """The listener. Use as ``async with``; ``script`` may be replaced at any time.

    Attributes:
        calls: every POST, in order of arrival; a GET is a Node's probe and is answered with an empty list.
        script: what answers the next request.
        on_get: makes the answer to a probe's GET, from its path.
    """

    def __init__(
        self, script: Script | None = None, *, on_get: Callable[[bytes], bytes] | None = None
    ) -> None:
        self.script: Script = script or answer_whole
        self.on_get = on_get or _answer_get
        self.calls: list[StubCall] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._stack = contextlib.AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """Its address as a provider's config names it."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._running):
            task.cancel()
        await self._stack.aclose()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._tasks is not None
        task = self._tasks.create_task(self._serve(reader, writer), name="stub-engine")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                try:
                    call = await _read_call(reader, writer)
                except (asyncio.IncompleteReadError, ConnectionError):
                    return
                if call.method == b"GET":  # a Node's probe
                    await call.write(self.on_get(call.path))
                    continue
                self.calls.append(call)
                await self._answer(call)
        finally:
            writer.close()

    async def _answer(self, call: StubCall) -> None:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(_watch(call), name="stub-watch")
            try:
                with contextlib.suppress(ConnectionError):
                    await self.script(call)
                call.is_answered = True
            finally:
                watch.cancel()


async def _watch(call: StubCall) -> None:
    """Look for the peer's leaving while the script writes; nothing is read that belongs to a next request."""
    reader = call._reader
    while not reader.at_eof() and reader.exception() is None:  # noqa: ASYNC110 - a stream reader has no such event
        await asyncio.sleep(0.005)
    call.is_peer_gone.set()


async def _read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> StubCall:
    head = (await reader.readuntil(b"\r\n\r\n"))[:-4]
    fields = head.lower()
    if b"transfer-encoding: chunked" in fields:
        body = b""
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        length = 0
        for line in fields.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line[15:])
        body = await reader.readexactly(length)
    return StubCall(reader, writer, head, body)


def whole_answer(
    body: bytes, *headers: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json"
) -> bytes:
    """An answer with a stated length."""
    lines = [b"HTTP/1.1 " + status, b"Content-Type: " + kind, b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def sse_events(texts: Iterable[str], *, finish: str | None = "stop", is_done: bool = True) -> list[bytes]:
    """Chat events that say ``texts``, then the finish reason and the terminator if wanted."""
    events = [
        {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
        for text in texts
    ]
    if finish is not None:
        events.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    made = [b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events]
    return [*made, b"data: [DONE]\n\n"] if is_done else made


def _answer_get(_path: bytes) -> bytes:
    return whole_answer(b'{"object":"list","data":[]}')


async def answer_whole(call: StubCall) -> None:
    """Answer streams with three events and everything else with one small object."""
    if call.json.get("stream"):
        await call.start_events()
        await call.chunk(*sse_events(["one ", "two ", "three"]))
        await call.end_chunks()
        return
    await call.write(
        whole_answer(b'{"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}')
    )
