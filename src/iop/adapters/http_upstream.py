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
import select
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, cast

import httptools

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

READ_BYTES: Final = 64 * 1024
"""One read. It is also how far a stream may overrun its credit (EN-102); smaller costs system calls."""

HEAD_BYTES_MAX: Final = 64 * 1024
"""Largest response head, and largest run of framing bytes without any body; beyond it the engine is
broken."""

IDLE_TIMEOUT_S: Final = 3.0
"""How long a connection is kept unused. Common engine servers close theirs after 5 s: reusing one later than
that races with its close and would fail a request that cannot be sent again."""

IDLE_CONNECTIONS_MAX: Final = 64
"""Kept-alive connections per origin. More only costs sockets; fewer costs dials after a burst."""

CONNECT_TIMEOUT_S: Final = 10.0
"""Until an engine must have accepted a connection. Engines are near: longer only hides a dead one."""

BODY_SLICE_BYTES: Final = 256 * 1024
"""Request bodies are written in slices of this size, each after the socket took the last."""


class HttpExchange:
    """One request under way, in its caller's hands."""

    __slots__ = ("_connection", "_is_sent", "_is_started", "_sink", "_timer", "request")

    def __init__(self, request: HttpRequest, sink: ResponseSink) -> None:
        self.request = request
        self._sink: ResponseSink | None = sink
        self._connection: _Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_sent = False
        self._is_started = False

    @property
    def is_over(self) -> bool:
        """Whether the sink got its end or error."""
        return self._sink is None

    def cancel(self) -> None:
        """Close the engine connection at once (EN-56); the sink gets ``on_error`` CANCELLED. Idempotent."""
        self.fail(UpstreamFailure.CANCELLED, "the request was cancelled")

    def resume(self) -> None:
        """Read on after ``on_body`` answered False. Harmless at any other time."""
        if self._connection is not None:
            self._connection.resume()

    def fail(self, failure: UpstreamFailure, message: str) -> None:
        """End it as failed, if it has not ended, and drop its connection."""
        sink = self._settle()
        if sink is None:
            return
        connection, self._connection = self._connection, None
        sink.on_error(UpstreamError(failure=failure, message=message, is_unsent=not self._is_sent))
        if connection is None:
            sink.on_closed()
        else:
            connection.drop(sink.on_closed)

    def _settle(self) -> ResponseSink | None:
        """Take the sink away, so that exactly one end reaches it."""
        sink, self._sink = self._sink, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return sink

    def _on_headers_timeout(self) -> None:
        self._timer = None
        self.fail(UpstreamFailure.TIMEOUT, f"no response headers within {self.request.headers_timeout_s:g} s")


class _Connection(asyncio.BufferedProtocol):
    """One socket to the origin; serves one exchange at a time. Parser callbacks run inside ``feed_data``."""

    def __init__(self, pool: HttpUpstream) -> None:
        self._pool = pool
        self._view = pool.read_view
        self._transport: asyncio.Transport | None = None
        self._readable = select.poll()
        self._exchange: HttpExchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        self._framing = BodyFraming.NONE
        self._is_head_done = False
        self._is_complete = False
        self._is_interim = False
        self._is_poisoned = False
        self._is_kept_alive = False
        self._is_paused = False
        self._is_write_paused = False
        self._unframed_bytes = 0
        self._unsent: deque[memoryview] = deque()
        self._on_dropped: Callable[[], None] | None = None
        self.idle_since = 0.0

    # -- transport callbacks --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the transport's interface
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        exchange = self._exchange
        if exchange is None:
            # Bytes that nobody asked for: whatever they are, the next answer could not be told from them.
            self.drop()
            return
        try:
            self._parser.feed_data(self._view[:nbytes])
        except httptools.HttpParserUpgrade:
            exchange.fail(UpstreamFailure.UPSTREAM_ERROR, "the engine switched protocols unasked")
            return
        except httptools.HttpParserError:
            if not self._is_complete:
                self._deliver(exchange)
                exchange.fail(self._broken(), "the engine's answer is not valid HTTP")
                return
            self._is_poisoned = True
        self._deliver(exchange)
        if self._exchange is not exchange:
            return
        if self._is_complete:
            self._finish(exchange)
            return
        self._unframed_bytes += nbytes
        if self._unframed_bytes > HEAD_BYTES_MAX:
            exchange.fail(self._broken(), "the engine's response head is too large")

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._unsent.clear()
        self._pool.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange._connection = None
            if exc is None and self._is_head_done and self._framing is BodyFraming.CLOSE:
                self._end(exchange)
            elif self._is_head_done:
                exchange.fail(UpstreamFailure.TRUNCATED, "the engine closed the connection inside its answer")
            else:
                exchange.fail(
                    UpstreamFailure.UPSTREAM_ERROR, "the engine closed the connection without an answer"
                )
        if self._on_dropped is not None:
            self._on_dropped()
            self._on_dropped = None

    # -- parser callbacks; an exception here would lose its type, so they only take notes --

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._is_poisoned = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_done:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_complete:
            return
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200
        headers, self._headers = self._headers, []
        exchange = self._exchange
        if self._is_interim or exchange is None:
            return
        self._is_head_done = True
        self._unframed_bytes = 0
        self._framing = _framing(exchange.request.method, status, headers)
        sink = exchange._sink
        if sink is None:
            return
        exchange._is_started = True
        if exchange._timer is not None:
            exchange._timer.cancel()
            exchange._timer = None
        sink.on_start(status, headers, self._framing)
        if exchange.request.method == b"HEAD":
            # The parser cannot be told that no body follows: the answer ends here, and so does this
            # connection.
            self._is_complete = True
            self._is_poisoned = True

    def on_body(self, data: bytes) -> None:
        if not self._is_complete and self._is_head_done:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
        elif self._is_head_done:
            self._is_complete = True
            # The parser knows this only now; after the message it judges the next one.
            self._is_kept_alive = self._parser.should_keep_alive()

    # -- for the pool and the exchange --

    def send(self, exchange: HttpExchange, head: bytes) -> None:
        """Write one request; the connection is idle and open."""
        self._exchange = exchange
        exchange._connection = self
        exchange._is_sent = True
        self._is_head_done = False
        self._is_complete = False
        self._unframed_bytes = 0
        transport = self._transport
        assert transport is not None
        body = exchange.request.body
        if len(body) == 1 and len(body[0]) <= READ_BYTES:
            # One write: a second one would wait for the first's acknowledgement on some stacks, and costs a
            # system call.
            transport.write(head + body[0])
            return
        transport.write(head)
        for part in body:
            view = memoryview(part)
            for start in range(0, len(view), BODY_SLICE_BYTES):
                self._unsent.append(view[start : start + BODY_SLICE_BYTES])
        self._pump()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused:
            self._is_paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def drop(self, on_dropped: Callable[[], None] | None = None) -> None:
        """Close at once and forget the exchange; ``on_dropped`` when the socket is gone."""
        self._exchange = None
        self._unsent.clear()
        self._pool.forget(self)
        if self._transport is None:
            if on_dropped is not None:
                on_dropped()
            return
        self._on_dropped = on_dropped
        self._transport.abort()

    @property
    def is_usable(self) -> bool:
        """Whether a request may be written: open, and nothing waits to be read (an end of file would)."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        return not self._readable.poll(0)

    def _deliver(self, exchange: HttpExchange) -> None:
        """Hand over what this read held, as one piece."""
        parts = self._parts
        sink = exchange._sink
        if not parts or sink is None:
            return
        self._parts = []
        self._unframed_bytes = 0
        wants_more = sink.on_body(parts[0] if len(parts) == 1 else b"".join(parts))
        if not wants_more and not self._is_complete and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def _finish(self, exchange: HttpExchange) -> None:
        """The answer is whole: end the exchange, then keep the connection or close it."""
        is_reusable = not self._is_poisoned and not self._unsent and self._is_kept_alive
        self._exchange = None
        exchange._connection = None
        if is_reusable:
            self.resume()
            self._pool.keep(self)
        else:
            self.drop()
        self._end(exchange)

    @staticmethod
    def _end(exchange: HttpExchange) -> None:
        sink = exchange._settle()
        if sink is not None:
            sink.on_end()
            sink.on_closed()

    def _broken(self) -> UpstreamFailure:
        return UpstreamFailure.TRUNCATED if self._is_head_done else UpstreamFailure.UPSTREAM_ERROR

    def _pump(self) -> None:
        """Write body slices while the socket takes them."""
        while self._unsent and not self._is_write_paused and self._transport is not None:
            self._transport.write(self._unsent.popleft())


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
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()
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
            exchange_or_none = connection._exchange
            if exchange_or_none is not None:
                exchange_or_none.cancel()
            else:
                connection.drop()

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
        exchange._timer = self._loop.call_later(
            request.headers_timeout_s,
            exchange._on_headers_timeout,
        )
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

    def keep(self, connection: _Connection) -> None:
        """Take back a clean connection."""
        assert self._loop is not None
        if self._tasks is None or len(self._idle) >= self._idle_connections_max:
            connection.drop()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._idle_timeout_s, self._sweep)

    def forget(self, connection: _Connection) -> None:
        """A connection is going or gone. Idempotent."""
        if connection in self._all:
            self._all.discard(connection)
            try:
                self._idle.remove(connection)
            except ValueError:
                pass

    # -- inside --

    def _checkout(self) -> _Connection | None:
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
                    lambda: _Connection(self),
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


def _framing(method: bytes, status: int, headers: Sequence[tuple[bytes, bytes]]) -> BodyFraming:
    """How the answer's end is told (RFC 9112, section 6.3)."""
    if method == b"HEAD" or status in {204, 304}:
        return BodyFraming.NONE
    framing = BodyFraming.CLOSE
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"transfer-encoding" and value.lower().rstrip().endswith(b"chunked"):
            return BodyFraming.CHUNKED
        if lowered == b"content-length":
            framing = BodyFraming.LENGTH
    return framing


def _os_reason(exc: OSError) -> str:
    """Why, without the address that the system's own text repeats (EN-04)."""
    if isinstance(exc, ConnectionRefusedError):
        return "connection refused"
    if isinstance(exc, ssl.SSLError):
        return "TLS handshake failed"
    return "no route or unknown host"
