"""A listener on a free port, and callers that speak raw bytes to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from iop.api.http.errors import Dialect, error_body, error_headers, error_status
from iop.api.http.exchange import Exchange, HttpHandler
from iop.api.http.limits import ByteBudget, HttpLimits
from iop.api.http.server import HttpServer
from iop.core.errors import IopError
from iop.testing.waiting import PATIENCE_S


class SystemClock:
    """Real time: these tests use real sockets."""

    def monotonic(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def unix_nanos(self) -> int:
        """Wall time."""
        return time.time_ns()


class Recorder:
    """A handler that answers at once with what it got, and remembers it."""

    def __init__(self, *, limits: HttpLimits | None = None) -> None:
        self.limits = limits or HttpLimits()
        self.budget = ByteBudget(self.limits.buffered_bytes)
        self.requests: list[tuple[bytes, bytes, bytes]] = []
        self.errors: list[str] = []
        self.exchanges: list[Exchange] = []
        self.on_exchange: Callable[[Exchange, bytes], None] | None = None

    def on_head(self, exchange: Exchange) -> None:
        """Accept."""
        exchange.accept_body(limit_bytes=self.limits.body_bytes, budgets=(self.budget,))

    def on_request(self, exchange: Exchange, body: Sequence[bytes]) -> None:
        """Remember and answer."""
        data = b"".join(body)
        self.requests.append((exchange.head.method, exchange.head.path, data))
        self.exchanges.append(exchange)
        if self.on_exchange is not None:
            self.on_exchange(exchange, data)
            return
        exchange.respond(200, [(b"content-type", b"text/plain")], exchange.head.path + b"|" + data)

    def on_error(self, exchange: Exchange, error: IopError) -> None:
        """Remember and answer."""
        self.errors.append(error.reason)
        exchange.respond(error_status(error), error_headers(error), error_body(error, Dialect.CHAT, "r"))

    def on_left(self, exchange: Exchange) -> None:
        """Nothing to do."""


class RawCaller:
    """One connection that says exactly what a test tells it to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write and wait for room."""
        self.writer.write(data)
        await self.writer.drain()

    async def read_to_end(self) -> bytes:
        """All bytes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b"<reset>"

    async def read_until(self, mark: bytes) -> bytes:
        """Bytes up to and with ``mark``."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(mark)

    async def read_answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """One answer with a stated or chunked length."""
        head = await self.read_until(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(b": ")
            headers[name.lower()] = value
        status = int(first.split()[1])
        async with asyncio.timeout(PATIENCE_S):
            if headers.get(b"transfer-encoding") == b"chunked":
                body = b""
                while size := int((await self.reader.readuntil(b"\r\n"))[:-2], 16):
                    body += await self.reader.readexactly(size)
                    assert await self.reader.readexactly(2) == b"\r\n"
                assert await self.reader.readexactly(2) == b"\r\n"
            else:
                body = await self.reader.readexactly(int(headers.get(b"content-length", b"0")))
        return status, headers, body

    async def close(self) -> None:
        """Leave politely."""
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, BrokenPipeError):
            pass

    def reset(self) -> None:
        """Leave without a word."""
        self.writer.transport.abort()


class Site:
    """Starts a server for a handler and opens connections to it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.port = 0
        self.server: HttpServer | None = None

    async def serve(self, handler: HttpHandler, *, limits: HttpLimits | None = None) -> HttpServer:
        """Start a listener on a free port."""
        server = HttpServer(handler, limits=limits or HttpLimits(), clock=SystemClock())
        await self._stack.enter_async_context(server)
        _, self.port = await server.listen("127.0.0.1", 0)
        self.server = server
        return server

    async def call(self) -> RawCaller:
        """Open a connection."""
        caller = RawCaller(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24))
        self._stack.push_async_callback(caller.close)
        return caller


class SilentTransport(asyncio.Transport):
    """Takes what is written and never fails."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep it."""
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignored."""

    def can_write_eof(self) -> bool:
        """Yes."""
        return True

    def write_eof(self) -> None:
        """Ignored."""

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    def abort(self) -> None:
        """Note it."""
        self.is_closed = True

    def pause_reading(self) -> None:
        """Ignored."""

    def resume_reading(self) -> None:
        """Ignored."""
