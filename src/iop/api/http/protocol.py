"""One caller's connection: a thin asyncio protocol around llhttp that answers one request at a time.

Theory of operation. Bytes go to the parser; its callbacks build a head, let the handler admit it, then
collect a body whose room was reserved first. Whole requests are started after the parser has returned,
never inside it. While one is being answered, whole requests that came in the same read wait in a short
queue and later bytes in a bounded backlog; reading goes on, because only a socket that is read tells that
the caller has left. Timeouts are one deadline per connection, looked at by the server's sweep, so no timer
is armed per request. After a refusal inside a body the answer is sent at once and the rest is read and
dropped for a while: closing with unread bytes would reset the connection under the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, Final, cast

import httptools

from iop.api.http.exchange import Exchange, no_room
from iop.api.http.head import NO_HEAD, HeaderList, read_head
from iop.api.http.limits import (
    BACKLOG_BYTES_MAX,
    DROPPED_BODY_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    READ_BURST_BYTES,
    RESERVE_STEP_BYTES,
    TARGET_BYTES_MAX,
    WRITE_HIGH_BYTES,
    WRITE_LOW_BYTES,
)
from iop.core.errors import DeadlineExceeded, Internal, InvalidRequest, IopError, Overloaded, Unavailable

if TYPE_CHECKING:
    from iop.api.http.server import HttpServer

__all__ = ["HttpConnection"]

_log: Final = logging.getLogger(__name__)

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_NEVER: Final = float("inf")


@unique
class _Reading(Enum):
    """Where the parser stands."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    LINGER = "linger"  # the last answer is sent; whatever still comes is dropped


class HttpConnection(asyncio.Protocol):
    """One accepted connection; the server creates it and sweeps its ``deadline``.

    ``must_close`` is True once the answer being given is to be the last.
    """

    __slots__ = (
        "_backlog",
        "_body",
        "_body_bytes",
        "_current",
        "_failure",
        "_fed_bytes",
        "_handler",
        "_header_bytes",
        "_headers",
        "_incoming",
        "_is_backlogged",
        "_is_closed",
        "_is_closing",
        "_is_deferred",
        "_is_dropping",
        "_is_paused",
        "_is_pumping",
        "_limits",
        "_parser",
        "_reading",
        "_ready",
        "_server",
        "_target",
        "_task",
        "_transport",
        "deadline",
        "must_close",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._handler = server.handler
        self._limits = server.limits
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser = httptools.HttpRequestParser(self)
        self._reading = _Reading.IDLE
        self._target = b""
        self._headers: HeaderList = []
        self._header_bytes = 0
        self._fed_bytes = 0
        self._incoming: Exchange | None = None  # being read
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._is_deferred = False  # the incoming one was not shown to the handler yet
        self._is_dropping = False  # the incoming one was refused; its body is dropped
        self._ready: deque[tuple[Exchange, list[bytes], bool]] = deque()
        self._current: Exchange | None = None  # being answered
        self._backlog = bytearray()
        self._failure: IopError | None = None  # what came after the requests that are still to be answered
        self._task: asyncio.Task[None] | None = None
        self._is_pumping = False
        self._is_paused = False
        self._is_backlogged = False
        self._is_closing = False
        self._is_closed = False
        self.deadline = _NEVER
        self.must_close = False

    # ---- asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to serve, or say that there is no room."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        self.deadline = self._server.now() + self._limits.head_timeout_s
        if not self._server.admit(self):
            self._refuse(
                Unavailable("Too many connections are open.", reason="OVERLOADED", retry_after_s=1.0)
            )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """The caller is gone, or we closed: tell the exchange in this very turn (SF-07)."""
        self._server.forget(self)
        self._is_closed = self._is_closing = True
        self.deadline = _NEVER
        task, self._task = self._task, None
        exchanges = [self._current, self._incoming, *(entry[0] for entry in self._ready)]
        self._current = self._incoming = None
        self._ready.clear()
        self._body = []
        self._backlog.clear()
        for exchange in exchanges:
            if exchange is not None:
                exchange.caller_gone()
                if not exchange.is_ended:
                    self._handler.on_left(exchange)
        if task is not None:
            task.cancel()

    def eof_received(self) -> bool:
        """A caller that sends no more is taken for gone: a half-closed request cannot be told from one
        given up.
        """
        return False

    def pause_writing(self) -> None:
        """The caller reads slower than we write (SF-08)."""
        self._is_paused = True
        if self._current is not None:
            self._current.caller_slow()

    def resume_writing(self) -> None:
        """The caller has caught up."""
        self._is_paused = False
        if self._current is not None:
            self._current.caller_ready()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, or set bytes aside while an answer is on its way."""
        reading = self._reading
        if reading is _Reading.LINGER:
            return
        if self._current is not None:
            self._backlog += data
            if len(self._backlog) > BACKLOG_BYTES_MAX and not self._is_backlogged:
                self._is_backlogged = True
                self._transport.pause_reading()
            return
        if reading is _Reading.IDLE:
            self.deadline = self._server.now() + self._limits.head_timeout_s
        elif reading is _Reading.BODY and self._incoming is not None:
            # A body may take its time, but not more than a whole request may; a drip feed ends there.
            self.deadline = min(
                self._server.now() + self._limits.body_stall_timeout_s,
                self._incoming.started_at + self._limits.total_timeout_s,
            )
        self._feed(data)
        self._pump()
        if len(data) >= READ_BURST_BYTES and not self._is_closing and not self._is_backlogged:
            # The loop would read such a caller again and again before it turns to others: once a turn is enough.
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._is_closed and not self._is_backlogged and not self._transport.is_closing():
            self._transport.resume_reading()

    # ---- what the server asks ----

    def on_deadline(self) -> None:
        """The sweep found ``deadline`` passed."""
        self.deadline = _NEVER
        if self._current is not None:
            self._current.deadline_passed()
        elif self._reading is _Reading.IDLE or self._reading is _Reading.LINGER:
            self._abort()
        else:
            self._server.counters.timeouts += 1
            self._parse_failed(
                DeadlineExceeded("The request took too long to arrive.", reason="REQUEST_TIMEOUT")
            )

    def peer_address(self) -> str:
        """The network address of the other end; empty where it has none."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) and name else ""

    def drain(self) -> None:
        """Finish what runs, take nothing new."""
        self.must_close = True
        if self._current is None and self._reading is _Reading.IDLE and not self._is_closing:
            self._close()

    def abort(self) -> None:
        """Drop the connection now."""
        if not self._is_closed:
            self._abort()

    # ---- what the exchange asks ----

    def write(self, data: bytes) -> None:
        """Hand bytes to the transport, which gives them to the kernel at once while that takes them."""
        if not self._is_closed:
            self._transport.write(data)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Have it called in the loop's next turn."""
        self._server.call_soon(callback)

    def date_line(self) -> bytes:
        """The Date field, made once a second."""
        return self._server.date_line

    def now(self) -> float:
        """Monotonic seconds of the server's clock."""
        return self._server.now()

    def set_deadline(self, exchange: Exchange, deadline: float) -> None:
        """Arm the current exchange's deadline (monotonic seconds)."""
        if exchange is self._current:
            self.deadline = deadline

    def run_task(
        self, exchange: Exchange, coroutine: Coroutine[Any, Any, None], *, name: str, is_eager: bool
    ) -> None:
        """Run a handler's coroutine under the server's task group; cancelled when the caller leaves."""
        assert self._task is None, "one task per exchange"
        work = self._supervise(exchange, coroutine)
        if is_eager:
            try:
                first = work.send(None)
            except StopIteration:
                return
            work = _Adopted(work, first)
        self._task = self._server.start_task(work, name=name)

    def exchange_ended(self, exchange: Exchange, *, cut: bool) -> None:
        """The answer is written, or given up."""
        if exchange is not self._current:
            return  # refused while it was being read: on_headers_complete or _parse_failed goes on from there
        self._current = None
        self._task = None
        self._server.counters.requests += 1
        if cut or self.must_close:
            self._close()
            return
        self.deadline = self._server.now() + self._limits.idle_timeout_s
        self._pump()

    # ---- requests in turn ----

    def _pump(self) -> None:
        """Start the next whole request; loops instead of recursing when answers are given at once."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._current is None and not self._is_closing:
                if self._ready:
                    self._begin(*self._ready.popleft())
                elif self._failure is not None:
                    self._refuse(self._failure)
                elif self._backlog:
                    data = bytes(self._backlog)
                    self._backlog.clear()
                    if self._is_backlogged:
                        self._is_backlogged = False
                        self._transport.resume_reading()
                    self._feed(data)
                else:
                    return
        finally:
            self._is_pumping = False

    def _begin(self, exchange: Exchange, body: list[bytes], is_deferred: bool) -> None:
        self._current = exchange
        self.deadline = _NEVER
        if not exchange.head.is_keep_alive or self._server.is_draining:
            self.must_close = True
        if self._is_paused:
            exchange.caller_slow()
        try:
            if is_deferred:
                self._handler.on_head(exchange)
                if exchange.is_started or exchange.is_gone:
                    return
                size = sum(map(len, body))
                if size > exchange.body_limit:
                    raise _too_large(exchange.body_limit)
                if not exchange.reserve_body(size):
                    raise no_room()
            self._handler.on_request(exchange, body)
        except IopError as error:
            self._fail(exchange, error)
        except Exception:  # noqa: BLE001 - the supervisor of one request: its bug must not end the others
            _log.exception("http.handler_failed")
            self._fail(exchange, Internal("The server failed on this request."))

    async def _supervise(self, exchange: Exchange, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except IopError as error:
            self._fail(exchange, error)
        except Exception:  # noqa: BLE001 - as in _begin
            _log.exception("http.handler_failed")
            self._fail(exchange, Internal("The server failed on this request."))
        else:
            if not exchange.is_ended and not exchange.is_bound:
                self._fail(exchange, Internal("The request was not answered."))

    def _fail(self, exchange: Exchange, error: IopError) -> None:
        if not exchange.is_started:
            try:
                self._handler.on_error(exchange, error)
            except Exception:  # noqa: BLE001 - nothing better is left to say
                _log.exception("http.error_answer_failed")
        exchange.cut()

    # ---- parsing ----

    def _feed(self, data: bytes) -> None:
        self._fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing else is spoken here: the request is answered as it stands, what follows it is not ours
            # to read.
            self.must_close = True
            self._reading = _Reading.LINGER
        except httptools.HttpParserInvalidMethodError:
            self._parse_failed(InvalidRequest("The request's method is unknown.", reason="METHOD_UNKNOWN"))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, _Refused):
                return
            if not isinstance(cause, IopError):
                _log.error("http.parser_callback_failed", exc_info=error)
                cause = Internal("The server failed on this request.")
            self._parse_failed(cause)
        except httptools.HttpParserError:
            self._parse_failed(
                InvalidRequest("The request is not valid HTTP/1.1.", reason="MALFORMED_REQUEST")
            )
        else:
            # Framing that brings no body (an endless header, chunk extension or trailer) is bounded too.
            overhead = self._fed_bytes - 16 * self._body_bytes
            if overhead > self._limits.header_bytes and self._reading is not _Reading.IDLE:
                self._parse_failed(_header_too_large())

    def on_message_begin(self) -> None:
        """Parser: a request starts."""
        if len(self._ready) >= PIPELINED_MAX:
            raise Overloaded("Too many requests were sent ahead.", reason="PIPELINED")
        self._reading = _Reading.HEAD
        self._target = b""
        self._headers = []
        self._header_bytes = 0
        self._body = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Parser: a part of the target."""
        self._target += url
        if len(self._target) > TARGET_BYTES_MAX:
            raise InvalidRequest("The request's target is too long.", reason="TARGET_TOO_LONG")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Parser: one header field, or a trailer field, which is dropped."""
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._limits.header_bytes:
            raise _header_too_large()
        if self._reading is _Reading.BODY:
            return
        if len(self._headers) >= HEADERS_MAX:
            raise _header_too_large()
        self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Parser: judge the head, let the handler admit or refuse it, and reserve room for its body."""
        parser = self._parser
        self._reading = _Reading.BODY
        head = read_head(
            method=parser.get_method(),
            target=self._target,
            version=parser.get_http_version(),
            headers=self._headers,
            is_keep_alive=parser.should_keep_alive(),
        )
        now = self._server.now()
        self.deadline = now + self._limits.body_stall_timeout_s
        exchange = Exchange(self, head, started_at=now, body_limit=BACKLOG_BYTES_MAX)
        self._incoming = exchange
        self._is_dropping = False
        # A request that came ahead of its turn is shown to the handler when its turn comes: it could be
        # refused only out of order.
        self._is_deferred = self._current is not None or bool(self._ready)
        if self._is_deferred:
            return
        length = head.content_length or 0
        keep = self.must_close
        if (
            head.is_chunked
            or length > DROPPED_BODY_BYTES_MAX
            or head.expects_continue
            or not head.is_keep_alive
        ):
            self.must_close = True  # in case it is refused now: what follows may not be readable to its end
        self._handler.on_head(exchange)
        if exchange.is_started:
            if self.must_close:
                self._linger()
                raise _Refused
            self._is_dropping = True
            return
        self.must_close = keep
        if length > exchange.body_limit:
            raise _too_large(exchange.body_limit)
        if length and not exchange.reserve_body(length):
            raise no_room()
        if head.expects_continue and head.version == "1.1" and (length or head.is_chunked):
            self.write(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        """Parser: body bytes."""
        self._body_bytes += len(data)
        exchange = self._incoming
        if exchange is None or self._is_dropping:
            return
        if self._body_bytes > exchange.body_limit:
            raise _too_large(exchange.body_limit)
        if self._body_bytes > exchange.reserved_bytes and not self._is_deferred:
            step = max(RESERVE_STEP_BYTES, self._body_bytes - exchange.reserved_bytes)
            if not exchange.reserve_body(step):
                raise no_room()
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Parser: the request is whole; it is started when the parser has returned."""
        self._reading = _Reading.IDLE
        exchange, self._incoming = self._incoming, None
        self._fed_bytes = 0
        body, self._body = self._body, []
        self._body_bytes = 0
        if exchange is None:
            return
        if self._is_dropping:
            self._server.counters.requests += 1
            self.deadline = self._server.now() + self._limits.idle_timeout_s
            return
        self._ready.append((exchange, body, self._is_deferred))

    # ---- endings ----

    def _parse_failed(self, error: IopError) -> None:
        """Refuse the request being read and read nothing after it; those before it are answered first."""
        self._server.counters.refused += 1
        self._backlog.clear()
        exchange, self._incoming = self._incoming, None
        self._body = []
        if self._current is not None or self._ready:
            self._reading = _Reading.LINGER
            self._failure = error
            if exchange is not None:
                exchange.release_body()
            return
        self.must_close = True
        if exchange is None:
            exchange = Exchange(self, NO_HEAD, started_at=self._server.now(), body_limit=0)
        self._answer_error(exchange, error)
        self._linger()

    def _refuse(self, error: IopError) -> None:
        self.must_close = True
        self._answer_error(Exchange(self, NO_HEAD, started_at=self._server.now(), body_limit=0), error)
        self._linger()

    def _answer_error(self, exchange: Exchange, error: IopError) -> None:
        if not exchange.is_started:
            try:
                self._handler.on_error(exchange, error)
            except Exception:  # noqa: BLE001 - nothing better is left to say
                _log.exception("http.error_answer_failed")
        exchange.release_body()

    def _linger(self) -> None:
        self._is_closing = True
        self._reading = _Reading.LINGER
        self._incoming = None
        self.deadline = self._server.now() + self._limits.linger_timeout_s
        if not self._is_closed and self._transport.can_write_eof():
            self._transport.write_eof()

    def _close(self) -> None:
        """Flush, then close; a caller that does not take the rest is cut off by the deadline."""
        if self._is_closed:
            return
        self._is_closing = True
        self.deadline = self._server.now() + self._limits.linger_timeout_s
        self._reading = _Reading.LINGER
        self._transport.close()

    def _abort(self) -> None:
        if not self._is_closed:
            self._transport.abort()


class _Adopted(Coroutine[Any, Any, None]):
    """A coroutine that already waits for ``first``, for a task to go on with.

    It is a coroutine of its own, not a native one around the other: a task that is cancelled before its
    first step must throw into the one that waits, or whatever that one holds would never be given back.
    """

    __slots__ = ("_coroutine", "_first")

    def __init__(self, coroutine: Coroutine[Any, Any, None], first: object) -> None:
        self._coroutine = coroutine
        self._first: object = first

    def send(self, value: Any) -> Any:
        first, self._first = self._first, None
        return self._coroutine.send(value) if first is None else first

    def throw(self, *error: Any) -> Any:
        self._first = None
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # which will know this frame

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise NotImplementedError("only a task runs it")


class _Refused(Exception):
    """Stops the parser after the handler has refused a head."""


def _header_too_large() -> InvalidRequest:
    return InvalidRequest("The request's header is too large.", reason="HEADER_TOO_LARGE")


def _too_large(limit_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"The request's body is larger than {limit_bytes} bytes.",
        reason="BODY_TOO_LARGE",
        details={"limit_bytes": str(limit_bytes)},
    )
