"""A lean streaming HTTP/1.1 client for the relay path: engine bytes go from socket callback to sink, nothing
in between.

Theory of operation. A :class:`HttpUpstream` is one origin with a pool of kept-alive connections. A request
is one :class:`HttpExchange`; its :class:`ResponseSink` is called synchronously from the socket's read turn,
once per read however many HTTP chunks the read held. There is no task per request once a connection exists,
none per chunk ever; only dialling is a task. The sink stops the reading of its own connection by answering
``False`` from ``on_body`` and starts it again by ``HttpExchange.resume`` (EN-102).

Strictness. A connection goes back into the pool only after a whole answer to a whole request with nothing
behind it. Nothing is ever sent twice: a pooled connection is tested for readability (end of file, stray
bytes) before its use, and a request of which a byte was written fails rather than moves to another
connection (EN-112). Everything a peer can grow is bounded: the head, trailers and chunk extensions, idle
connections, every wait before the first byte.

The choice of httptools over a full client library is measured in
``docs/decisions/0301-node-upstream-http.md``.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Final

from iop.adapters.http_connection import READ_BYTES, Connection, HttpExchange
from iop.adapters.http_exchange import (
    FetchedResponse,
    HttpRequest,
    Origin,
    ResponseSink,
    UpstreamError,
    UpstreamFailure,
)
from iop.core.errors import DeadlineExceeded, Overloaded, RemoteProtocolError, Unavailable
from iop.wire.messages import BodyFraming

IDLE_TIMEOUT_S: Final = 3.0
"""How long a connection is kept unused. Common engine servers close theirs after 5 s: reusing one later than
that races with its close and would fail a request that cannot be sent again."""

IDLE_CONNECTIONS_MAX: Final = 64
"""Kept-alive connections per origin. More only costs sockets; fewer costs dials after a burst."""

CONNECT_TIMEOUT_S: Final = 10.0
"""Until an engine must have accepted a connection. Engines are near: longer only hides a dead one."""


class HttpUpstream:
    """One origin and its connections. Used on one event loop.

    Args:
        origin: where to.
        ssl_context: required exactly when the origin is TLS.
        connect_timeout_s: covers name look-up, TCP and TLS.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        idle_connections_max: int = IDLE_CONNECTIONS_MAX,
    ) -> None:
        self._origin = origin
        self._ssl_context = ssl_context
        self._connect_timeout_s = connect_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._idle_connections_max = idle_connections_max
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._dials: dict[HttpExchange, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        # Shared by all connections: each read is consumed before the next one begins.
        self.read_view = memoryview(bytearray(READ_BYTES))

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to serve; dials are born in ``tasks`` and never raise out of it."""
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()

    async def aclose(self) -> None:
        """Close every connection; exchanges under way fail as cancelled. Idempotent."""
        self._tasks = None
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        for exchange, dial in tuple(self._dials.items()):
            exchange.cancel()
            dial.cancel()
        for connection in tuple(self._all):
            connection.cancel()

    @property
    def idle_count(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    @property
    def connection_count(self) -> int:
        """Open connections, idle ones included."""
        return len(self._all)

    def request(self, request: HttpRequest, sink: ResponseSink) -> HttpExchange:
        """Send one request. Returns at once; all that follows comes to ``sink``, never before this returns.

        Raises:
            Unavailable: not started, or closed.
        """
        if self._tasks is None or self._loop is None:
            raise Unavailable("the adapter is closed")
        exchange = HttpExchange(request, sink)
        exchange.limit_headers(self._loop)
        connection = self._checkout()
        if connection is not None:
            connection.send(exchange, self._head(request))
        else:
            self._dials[exchange] = self._tasks.create_task(self._dial(exchange), name="upstream.dial")
        return exchange

    async def fetch(self, request: HttpRequest, *, body_bytes_max: int) -> FetchedResponse:
        """Send one request and wait for its whole answer; for probes and engine control, not for the relay.

        Waits at most ``request.headers_timeout_s`` in all.

        Raises:
            Unavailable: not reachable, or cut.
            DeadlineExceeded: out of time.
            Overloaded: the answer is larger than ``body_bytes_max``.
            RemoteProtocolError: the answer is not HTTP.
        Cancellation: safe; the connection is closed.
        """
        collector = _Collector(body_bytes_max)
        exchange = self.request(request, collector)
        collector.exchange = exchange
        try:
            async with asyncio.timeout(request.headers_timeout_s):
                return await collector.answer
        except TimeoutError as exc:
            raise DeadlineExceeded("the engine did not answer in time", reason="ENGINE_TIMEOUT") from exc
        finally:
            exchange.cancel()

    # -- for connections --

    def keep(self, connection: Connection) -> None:
        """Take back a clean connection."""
        assert self._loop is not None
        if self._tasks is None or len(self._idle) >= self._idle_connections_max:
            connection.drop()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._idle_timeout_s, self._sweep)

    def forget(self, connection: Connection) -> None:
        """A connection is going or gone. Idempotent."""
        if connection in self._all:
            self._all.discard(connection)
            try:
                self._idle.remove(connection)
            except ValueError:
                pass

    # -- inside --

    def _checkout(self) -> Connection | None:
        """The most recently used connection that is still good: the others may then time out."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.drop()
        return None

    def _sweep(self) -> None:
        assert self._loop is not None
        self._sweep_timer = None
        oldest_kept = self._loop.time() - self._idle_timeout_s
        while self._idle and self._idle[0].idle_since <= oldest_kept:
            self._idle[0].drop()
        if self._idle:
            delay_s = max(0.05, self._idle[0].idle_since - oldest_kept)
            self._sweep_timer = self._loop.call_later(delay_s, self._sweep)

    async def _dial(self, exchange: HttpExchange) -> None:
        assert self._loop is not None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self),
                    self._origin.host,
                    self._origin.port,
                    ssl=self._ssl_context,
                    server_hostname=self._origin.host if self._ssl_context is not None else None,
                )
        except TimeoutError:
            exchange.fail(
                UpstreamFailure.CONNECT_FAILED,
                f"the engine accepted no connection within {self._connect_timeout_s:g} s",
            )
            return
        except ssl.SSLCertVerificationError:
            exchange.fail(UpstreamFailure.CONNECT_FAILED, "the engine's TLS certificate is not trusted")
            return
        except OSError as exc:
            exchange.fail(UpstreamFailure.CONNECT_FAILED, f"the engine cannot be reached: {_os_reason(exc)}")
            return
        except asyncio.CancelledError:
            exchange.cancel()
            raise
        finally:
            self._dials.pop(exchange, None)
        self._all.add(connection)
        if self._tasks is None:
            connection.drop()
            exchange.cancel()
        elif exchange.is_over:
            self.keep(connection)
        elif not connection.is_usable:
            connection.drop()
            exchange.fail(UpstreamFailure.CONNECT_FAILED, "the engine closed the connection as it opened")
        else:
            connection.send(exchange, self._head(exchange.request))

    def _head(self, request: HttpRequest) -> bytes:
        """The request head as it goes out."""
        origin = self._origin
        lines = [
            b"%b %b%b HTTP/1.1\r\nHost: %b\r\n"
            % (
                request.method,
                origin.base_path.encode("ascii", "surrogateescape"),
                request.path,
                origin.host_header,
            )
        ]
        lines += [b"%b: %b\r\n" % header for header in request.headers]
        size = sum(map(len, request.body))
        if size or request.method in {b"POST", b"PUT", b"PATCH"}:
            lines.append(b"Content-Length: %d\r\n" % size)
        lines.append(b"\r\n")
        return b"".join(lines)


class _Collector:
    """Sink of :meth:`HttpUpstream.fetch`."""

    def __init__(self, body_bytes_max: int) -> None:
        self.answer: asyncio.Future[FetchedResponse] = asyncio.get_running_loop().create_future()
        self.exchange: HttpExchange | None = None
        self._body_bytes_max = body_bytes_max
        self._status = 0
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._parts: list[bytes] = []
        self._size = 0

    def on_start(self, status: int, headers: list[tuple[bytes, bytes]], framing: BodyFraming) -> None:  # noqa: ARG002
        self._status = status
        self._headers = tuple(headers)

    def on_body(self, data: bytes) -> bool:
        self._size += len(data)
        if self._size > self._body_bytes_max:
            self._settle(Overloaded("the engine's answer is too large", reason="ENGINE_ANSWER_TOO_LARGE"))
            return False
        self._parts.append(data)
        return True

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(
                FetchedResponse(status=self._status, headers=self._headers, body=b"".join(self._parts))
            )

    def on_error(self, error: UpstreamError) -> None:
        if error.failure is UpstreamFailure.TIMEOUT:
            self._settle(DeadlineExceeded(error.message, reason="ENGINE_TIMEOUT"))
        elif error.failure is UpstreamFailure.UPSTREAM_ERROR and "HTTP" in error.message:
            self._settle(RemoteProtocolError(error.message, reason="ENGINE_NOT_HTTP"))
        else:
            self._settle(Unavailable(error.message, reason="ENGINE_UNREACHABLE"))

    def on_closed(self) -> None:
        pass

    def _settle(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            # Read by the waiter, or by nobody when it was cancelled in the same turn.
            self.answer.exception()


def _os_reason(exc: OSError) -> str:
    """Why, without the address that the system's own text repeats (EN-04)."""
    if isinstance(exc, ConnectionRefusedError):
        return "connection refused"
    if isinstance(exc, ssl.SSLError):
        return "TLS handshake failed"
    return "no route or unknown host"
