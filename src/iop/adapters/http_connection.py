"""One HTTP/1.1 connection to an engine, and the request that it serves: what :mod:`iop.adapters.http_upstream` pools.

The sink of a request is called synchronously from the socket's read turn, once per read. Parser callbacks only take
notes, since an exception in one would lose its type.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

import httptools

from iop.adapters.http_exchange import HttpRequest, ResponseSink, UpstreamError, UpstreamFailure
from iop.wire.messages import BodyFraming

READ_BYTES: Final = 64 * 1024
"""One read. It is also how far a stream may overrun its credit (EN-102); smaller costs system calls."""

HEAD_BYTES_MAX: Final = 64 * 1024
"""Largest response head, and largest run of framing bytes without any body; beyond it the engine is
broken."""

BODY_SLICE_BYTES: Final = 256 * 1024
"""Request bodies are written in slices of this size, each after the socket took the last."""


class Pool(Protocol):
    """Who owns connections."""

    read_view: memoryview
    """Where every connection of it reads to: each read is consumed before the next one begins."""

    def keep(self, connection: Connection) -> None:
        """Take back a clean connection."""
        ...

    def forget(self, connection: Connection) -> None:
        """A connection is going or gone. Idempotent."""
        ...


class HttpExchange:
    """One request under way, in its caller's hands."""

    __slots__ = ("_connection", "_is_sent", "_is_started", "_sink", "_timer", "request")

    def __init__(self, request: HttpRequest, sink: ResponseSink) -> None:
        self.request = request
        self._sink: ResponseSink | None = sink
        self._connection: Connection | None = None
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

    def limit_headers(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to wait for the final response head."""
        self._timer = loop.call_later(self.request.headers_timeout_s, self._on_headers_timeout)

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


class Connection(asyncio.BufferedProtocol):
    """One socket to the origin; serves one exchange at a time. Parser callbacks run inside ``feed_data``."""

    def __init__(self, pool: Pool) -> None:
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
        self._refusal = ""
        self._unsent: deque[memoryview] = deque()
        self._on_dropped: Callable[[], None] | None = None
        self.idle_since = 0.0

    # -- transport callbacks --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open."""
        self._transport = cast("asyncio.Transport", transport)
        self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the transport's interface
        """Where the next read goes."""
        return self._view

    def buffer_updated(self, nbytes: int) -> None:
        """One read, to its end."""
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
            if not self._is_complete and not self._refusal:
                self._deliver(exchange)
                exchange.fail(self._broken(), "the engine's answer is not valid HTTP")
                return
            self._is_poisoned = True
        if self._refusal:
            exchange.fail(UpstreamFailure.UPSTREAM_ERROR, self._refusal)
            return
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
        """Close: an engine that sends no more takes no more requests."""
        return False

    def pause_writing(self) -> None:
        """The socket takes no more of a body."""
        self._is_write_paused = True

    def resume_writing(self) -> None:
        """The socket takes more."""
        self._is_write_paused = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone: a cut, unless its end is the end of the answer."""
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
        """An answer after the answer spoils the connection."""
        if self._is_complete:
            self._is_poisoned = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers are dropped."""
        if not self._is_head_done:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head, to the sink; an interim one is passed over."""
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
        self._refusal = _refusal(status, headers)
        if self._refusal:
            return
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
        """Noted; handed over once per read."""
        if not self._is_complete and self._is_head_done:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Whole, unless it was interim."""
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

    def cancel(self) -> None:
        """Cancel the exchange that it serves, or close it at once."""
        if self._exchange is not None:
            self._exchange.cancel()
        else:
            self.drop()

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


def _refusal(status: int, headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Why an answer cannot be handed on as it is; empty: it can."""
    if not 200 <= status <= 999:
        return "the engine's answer has no valid status"
    for name, value in headers:
        if len(name) == 17 and name.lower() == b"transfer-encoding" and value.lower().strip() != b"chunked":
            # It stops here, so its bytes would no longer say how they are to be read.
            return "the engine's answer is transferred in a coding that was not asked for"
    return ""


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
