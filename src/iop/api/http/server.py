"""A listener: accepts connections, owns their tasks, sweeps their deadlines, drains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from email.utils import formatdate
from types import TracebackType
from typing import Any, Final, Self

from iop.api.http.exchange import HttpHandler
from iop.api.http.limits import HttpLimits
from iop.api.http.protocol import HttpConnection
from iop.api.http.tls import RenewedTls
from iop.core.clock import Clock

__all__ = ["HttpCounters", "HttpServer"]

SWEEP_INTERVAL_S: Final = 0.25
"""How late a timeout may be. A sweep over 10,000 connections costs about half a millisecond."""

TLS_REFRESH_S: Final = 5.0
"""How soon a renewed certificate is in use."""

LISTEN_BACKLOG: Final = 1024
"""Connections the kernel may hold for us before it refuses; a burst of clients must fit."""


@dataclass(slots=True)
class HttpCounters:
    """Totals since the start, but ``connections``, which is a gauge."""

    connections: int = 0
    connections_refused: int = 0
    requests: int = 0
    refused: int = 0
    timeouts: int = 0


class HttpServer:
    """One HTTP/1.1 listener. Use as ``async with``; on leaving, open exchanges are cut.

    Args:
        handler: what is served.
        limits: what callers may cost.
        clock: where time comes from.
        tls: certificate files, looked at again now and then; None for plain TCP.
    """

    def __init__(
        self, handler: HttpHandler, *, limits: HttpLimits, clock: Clock, tls: RenewedTls | None = None
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.counters = HttpCounters()
        self.is_draining = False
        self.date_line = b""
        self.now: Callable[[], float] = clock.monotonic
        self.call_soon: Callable[[Callable[[], None]], object] = _at_once
        self._clock = clock
        self._tls = tls
        self._connections: set[HttpConnection] = set()
        self._server: asyncio.Server | None = None
        self._stack = contextlib.AsyncExitStack()
        self._tasks: asyncio.TaskGroup | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.call_soon = asyncio.get_running_loop().call_soon
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._make_date()
        self._sweeper = self._tasks.create_task(self._sweep(), name="http-sweep")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose(drain_s=0.0)
        finally:
            if self._sweeper is not None:
                self._sweeper.cancel()
            await self._stack.aclose()

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Bind and accept. Returns the address bound, so that port 0 can be told.

        Raises:
            OSError: the address is taken or not ours.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpConnection(self),
            host,
            port,
            ssl=None if self._tls is None else self._tls.context,
            backlog=LISTEN_BACKLOG,
            reuse_address=True,
        )
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def aclose(self, *, drain_s: float) -> None:
        """Accept no more, let running exchanges finish for ``drain_s`` seconds, then cut them. Idempotent."""
        self.is_draining = True
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for connection in tuple(self._connections):
            connection.drain()
        if drain_s > 0 and self._connections:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
        if self._connections:
            self._idle.clear()
            for connection in tuple(self._connections):
                connection.abort()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._idle.wait()

    # ---- what connections ask ----

    def admit(self, connection: HttpConnection) -> bool:
        """Count a new connection; False when there are too many (it is still swept, and closed soon)."""
        self._connections.add(connection)
        self.counters.connections = len(self._connections)
        if len(self._connections) > self.limits.connections or self.is_draining:
            self.counters.connections_refused += 1
            return False
        return True

    def forget(self, connection: HttpConnection) -> None:
        """A connection has closed."""
        self._connections.discard(connection)
        self.counters.connections = len(self._connections)
        if not self._connections:
            self._idle.set()

    def start_task(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run a handler's coroutine; the server owns it."""
        assert self._tasks is not None, "the server is not running"
        return self._tasks.create_task(coroutine, name=name)

    # ---- inside ----

    async def _sweep(self) -> None:
        tls_due = self.now() + TLS_REFRESH_S
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._make_date()
            now = self.now()
            for connection in tuple(self._connections):
                if connection.deadline <= now:
                    connection.on_deadline()
            if self._tls is not None and now >= tls_due:
                tls_due = now + TLS_REFRESH_S
                self._tls.refresh()

    def _make_date(self) -> None:
        seconds = self._clock.unix_nanos() // 1_000_000_000
        self.date_line = b"date: " + formatdate(seconds, usegmt=True).encode("ascii") + b"\r\n"


def _at_once(callback: Callable[[], None]) -> None:
    """Until a loop serves, there is no later turn to wait for."""
    callback()
