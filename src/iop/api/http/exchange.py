"""One request and its answer, as a handler sees them.

Everything runs on the event loop and nothing here waits: a handler writes bytes when it has them and is
told when the caller is slow (``is_writable``, ``on_writable``) or gone (``on_gone``, in the loop turn in
which the connection was lost, SF-07). That keeps the relay path free of a task, a queue or a wake-up per
chunk.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from iop.api.http.head import RequestHead
from iop.api.http.limits import MADE_BYTES_FREE, ByteBudget
from iop.core.errors import IopError, Unavailable

if TYPE_CHECKING:
    from iop.api.http.protocol import HttpConnection

__all__ = ["Exchange", "HttpHandler", "no_room"]

_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode("ascii"))
    for status in HTTPStatus
}
_BAD_VALUE: Final = re.compile(rb"[\x00\r\n]")
_BODILESS: Final = frozenset({204, 304})

LATE_BYTES_MAX: Final = 64 * 1024
"""Most of an answer that is kept where only an error event can be made of it."""


def no_room() -> Unavailable:
    """The budget of request bytes is exhausted (SF-12)."""
    return Unavailable(
        "Too many request bytes are held at the moment.", reason="OVERLOADED", retry_after_s=1.0
    )


class HttpHandler(Protocol):
    """What a listener serves. Calls come on the event loop; an exception becomes ``on_error`` with
    ``Internal``.
    """

    def on_head(self, exchange: Exchange) -> None:
        """A head has come. Refuse by answering at once, or set limits with ``accept_body``; the body is
        read after.
        """
        ...

    def on_request(self, exchange: Exchange, body: Sequence[bytes]) -> None:
        """The whole request is here; ``body`` in parts as received. Answer now or later."""
        ...

    def on_error(self, exchange: Exchange, error: IopError) -> None:
        """The request cannot go on. Answer with the surface's own error shape; called only before an answer
        began.
        """
        ...

    def on_left(self, exchange: Exchange) -> None:
        """The caller left before its answer ended; whoever was bound to the exchange knows already."""
        ...


class Exchange:
    """One request and its answer.

    Attributes:
        head: the request's head.
        data: whatever the handler wants to keep with the request.
        started_at: monotonic seconds at which the head was complete.
        is_writable: False while the caller is slow: more bytes may be written, but whoever makes them
            should stop.
        is_gone: the caller has left; writes do nothing.
        is_started: the answer has begun, so its status can no longer change.
        is_ended: the answer is whole or cut.
        is_early: an event stream was begun before the answer was there (:meth:`start_early`).
        trailers: asked when a chunked answer ends well, for fields that were not known when it began.
    """

    __slots__ = (
        "_budgets",
        "_chunked",
        "_connection",
        "_head",
        "_late",
        "_late_bytes",
        "_late_parts",
        "_late_status",
        "_made",
        "_on_deadline",
        "_on_done",
        "_on_gone",
        "_on_writable",
        "_remaining",
        "_reserved",
        "_silent",
        "body_limit",
        "bytes_written",
        "data",
        "head",
        "is_early",
        "is_ended",
        "is_gone",
        "is_started",
        "is_writable",
        "started_at",
        "trailers",
    )

    def __init__(
        self, connection: HttpConnection, head: RequestHead, *, started_at: float, body_limit: int
    ) -> None:
        self._connection = connection
        self.head = head
        self.data: Any = None  # foreign: belongs to the handler
        self.started_at = started_at
        self.body_limit = body_limit
        self.is_writable = True
        self.is_gone = False
        self.is_started = False
        self.is_ended = False
        self.bytes_written = 0
        self.trailers: Callable[[], Sequence[tuple[bytes, bytes]]] | None = None
        self._budgets: tuple[ByteBudget, ...] = ()
        self._reserved = 0
        self._made = 0
        self._head: bytes | None = None
        """The answer's head while it waits, for the rest of this loop turn, to be sent with the body's first bytes."""
        self.is_early = False
        self._late: Callable[[int, bytes], bytes] | None = None
        self._late_status = 0
        self._late_parts: list[bytes] | None = None
        """An answer that does not fit the event stream that had begun, as it comes."""
        self._late_bytes = 0
        self._chunked = False
        self._silent = False
        self._remaining: int | None = None
        self._on_deadline: Callable[[], None] | None = None
        self._on_done: Callable[[], None] | None = None
        self._on_gone: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None

    # ---- the request ----

    @property
    def peer_address(self) -> str:
        """The network address that the connection comes from; empty where there is none."""
        return self._connection.peer_address()

    def close_after(self) -> None:
        """Let this answer be the connection's last."""
        self._connection.must_close = True

    def accept_body(self, *, limit_bytes: int, budgets: tuple[ByteBudget, ...]) -> None:
        """Set what this request's body may weigh and whose budgets hold it, the listener's first; only inside
        ``on_head``.

        The bytes stay reserved until ``release_body`` or the end of the exchange.
        """
        self.body_limit = limit_bytes
        self._budgets = budgets

    def reserve_body(self, size_bytes: int) -> bool:
        """Take budget for ``size_bytes`` more of body; False when one is exhausted (then nothing is taken)."""
        for taken, budget in enumerate(self._budgets):
            if not budget.reserve(size_bytes):
                for earlier in self._budgets[:taken]:
                    earlier.release(size_bytes)
                return False
        self._reserved += size_bytes
        return True

    def hold_made(self, size_bytes: int) -> None:
        """Count what was made of the body and is held beside it, in place of what was made before (SF-12).

        It counts in total, not for the caller's key: one largest body must always fit there. What is
        smaller than ``MADE_BYTES_FREE`` counts as overhead.

        Raises:
            Unavailable: the budget is exhausted.
        """
        more = max(0, size_bytes - MADE_BYTES_FREE) - self._made
        if more > 0 and self._budgets:
            if not self._budgets[0].reserve(more):
                raise no_room()
            self._made += more

    @property
    def reserved_bytes(self) -> int:
        """Budget this exchange holds."""
        return self._reserved

    def release_body(self) -> None:
        """Say that the body's bytes are no longer held; idempotent."""
        size, self._reserved = self._reserved, 0
        if self._made:
            self._budgets[0].release(self._made)
            self._made = 0
        if size:
            for budget in self._budgets:
                budget.release(size)

    def bind(
        self, *, on_gone: Callable[[], None] | None, on_writable: Callable[[], None] | None = None
    ) -> None:
        """Install callbacks: ``on_gone`` at most once and never after the answer's end; ``on_writable`` as
        a level.
        """
        self._on_gone = on_gone
        self._on_writable = on_writable

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` exactly once when the exchange is over: answered, cut or abandoned."""
        self._on_done = callback

    @property
    def is_bound(self) -> bool:
        """Whether somebody watches over this exchange by callbacks."""
        return self._on_gone is not None

    def set_deadline(self, deadline: float, on_deadline: Callable[[], None]) -> None:
        """Call ``on_deadline`` once when ``deadline`` (monotonic seconds) has passed; replaces the one set
        before.
        """
        self._on_deadline = on_deadline
        self._connection.set_deadline(self, deadline)

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when so many seconds have passed; replaces what :meth:`set_deadline` set."""
        self.set_deadline(self._connection.now() + delay_s, callback)

    def run(self, coroutine: Coroutine[Any, Any, None], *, name: str, is_eager: bool = False) -> None:
        """Answer from a task: it is cancelled when the caller leaves, and an error it raises becomes
        ``on_error``.

        When the coroutine returns, the answer must have ended, or somebody be bound who ends it.

        Args:
            coroutine: what to run.
            name: of the task.
            is_eager: run it at once up to its first wait; a task is made only if there is one. Until that
                wait the coroutine must not ask for its task, as timeouts and task groups do.
        """
        self._connection.run_task(self, coroutine, name=name, is_eager=is_eager)

    # ---- the answer ----

    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes = b"") -> None:
        """Send a whole answer; its length is stated."""
        if self.is_gone or self.is_ended:
            return
        if self.is_early:
            self.start(status, headers)
            self.write(body)
            self.end()
            return
        connection = self._connection
        lines = self._head_lines(status, headers)
        if status not in _BODILESS and status >= 200:
            lines.append(b"content-length: %d\r\n" % len(body))
        if connection.must_close:
            lines.append(b"connection: close\r\n")
        elif self.head.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        if body and self.head.method != b"HEAD" and status not in _BODILESS:
            lines.append(body)
            self.bytes_written += len(body)
        self.is_started = self.is_ended = True
        connection.write(b"".join(lines))
        self._finish(cut=False)

    def start(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], *, length: int | None = None
    ) -> None:
        """Begin an answer whose body comes later; ``length`` None when it is not known."""
        if self.is_gone or self.is_started:
            return
        self.is_started = True
        if not self.is_early:
            self._begin(status, headers, length)
        elif not (200 <= status < 300 and _is_event_stream(headers)):
            self._late_status = status
            self._late_parts = []

    def start_early(
        self, headers: Sequence[tuple[bytes, bytes]], *, late: Callable[[int, bytes], bytes]
    ) -> None:
        """Begin an event stream before the answer is there, so that its caller can be told to wait.

        The answer's own head comes too late then: an event stream goes on with its body alone. Of any other answer,
        one that fails above all, ``late`` makes the stream's one last event, from its status and body.
        """
        if self.is_gone or self.is_started or self.is_early:
            return
        self.is_early = True
        self._late = late
        self._begin(200, headers, None)

    def comment(self, line: bytes) -> None:
        """A comment line on an event stream, also on one that was only begun early."""
        if not (self.is_gone or self.is_ended):
            self._send(line)

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]], length: int | None) -> None:
        connection = self._connection
        lines = self._head_lines(status, headers)
        self._silent = self.head.method == b"HEAD" or status in _BODILESS
        if length is not None:
            self._remaining = length
            if status not in _BODILESS:
                lines.append(b"content-length: %d\r\n" % length)
        elif self._silent:
            pass
        elif self.head.version == "1.1":
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            connection.must_close = True  # HTTP/1.0 knows no other end of a body whose length is unknown
        if connection.must_close:
            lines.append(b"connection: close\r\n")
        elif self.head.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        # A head that is not alone costs no system call of its own: what one read of the wire brings of an answer
        # is mostly its head and its first bytes.
        self._head = b"".join(lines)
        connection.call_soon(self._send_head)

    def _send_head(self) -> None:
        """Nothing else came in the turn in which the answer began."""
        head, self._head = self._head, None
        if head is not None:
            self._connection.write(head)

    def write(self, data: bytes) -> None:
        """Send body bytes. Never waits; look at ``is_writable`` afterwards."""
        if self.is_gone or self.is_ended or self._silent or not data:
            return
        if self._late_parts is not None:
            if self._late_bytes < LATE_BYTES_MAX:
                self._late_parts.append(data)
                self._late_bytes += len(data)
            return
        self._send(data)

    def _send(self, data: bytes) -> None:
        size = len(data)
        self.bytes_written += size
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (size, data)
        elif self._remaining is not None:
            assert size <= self._remaining, "an answer must not exceed its stated length"
            self._remaining -= size
        self._put(data)

    def _put(self, data: bytes) -> None:
        if self._head is not None:
            data = self._head + data
            self._head = None
        self._connection.write(data)

    def end(self) -> None:
        """The answer is whole. With a stated length that was not reached this is a cut."""
        if self.is_gone or self.is_ended:
            return
        if self._remaining and not self._silent:
            self.cut()
            return
        if self._late_parts is not None and self._late is not None:
            self._send(self._late(self._late_status, b"".join(self._late_parts)))
        self.is_ended = True
        if self._chunked:
            self._put(b"0\r\n%b\r\n" % self._trailer_lines())
        self._finish(cut=False)

    def _trailer_lines(self) -> bytes:
        fields = () if self.trailers is None else self.trailers()
        return b"".join(b"%b: %b\r\n" % field for field in fields if _BAD_VALUE.search(field[1]) is None)

    def cut(self) -> None:
        """Close without the answer's proper end, so that no caller takes it for whole (SF-03, SF-06)."""
        if self.is_gone or self.is_ended:
            return
        if self._late_parts is not None:
            self.end()  # nothing of that answer was shown: the event that stands for it is whole
            return
        self.is_ended = True
        self._finish(cut=True)

    async def wait_writable(self) -> None:
        """Wait until the caller has caught up; for answers made by a task, which is cancelled when it
        leaves.
        """
        if self.is_writable or self.is_gone:
            return
        caught_up = asyncio.Event()
        self._on_writable = caught_up.set
        await caught_up.wait()
        self._on_writable = None

    # ---- the connection's side ----

    def caller_gone(self) -> None:
        """The connection was lost; called once by it."""
        if self.is_gone:
            return
        self.is_gone = True
        self._head = None
        self.trailers = self._late = self._late_parts = None
        self.release_body()
        callback, self._on_gone = self._on_gone, None
        self._on_writable = self._on_deadline = None
        try:
            if callback is not None and not self.is_ended:
                callback()
        finally:
            self._tell_done()

    def caller_slow(self) -> None:
        """The connection's write buffer is full."""
        self.is_writable = False

    def caller_ready(self) -> None:
        """The connection's write buffer has drained."""
        self.is_writable = True
        if self._on_writable is not None and not self.is_ended:
            self._on_writable()

    def deadline_passed(self) -> None:
        """The connection's deadline has passed while this exchange was being answered."""
        callback, self._on_deadline = self._on_deadline, None
        if callback is not None and not self.is_ended:
            callback()

    def _finish(self, *, cut: bool) -> None:
        self._send_head()
        self.trailers = self._late = self._late_parts = None
        self.release_body()
        self._on_gone = self._on_writable = self._on_deadline = None
        self._tell_done()
        self._connection.exchange_ended(self, cut=cut)

    def _tell_done(self) -> None:
        callback, self._on_done = self._on_done, None
        if callback is not None:
            callback()

    def _head_lines(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
        lines = [
            _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status,
            self._connection.date_line(),
        ]
        lines += [b"%b: %b\r\n" % field for field in headers]
        # A value with a line break would let a provider write our header for us. One count over all finds
        # that; only then is it worth looking which field to drop.
        text = b"".join(lines)
        if text.count(b"\n") != len(lines) or text.count(b"\r") != len(lines) or b"\0" in text:
            lines[2:] = [
                b"%b: %b\r\n" % (name, value)
                for name, value in headers
                if _BAD_VALUE.search(value) is None and _BAD_VALUE.search(name) is None
            ]
        return lines


def _is_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether these name an event stream in clear."""
    kind = coding = b""
    for name, value in headers:
        if name == b"content-type":
            kind = value.lower()
        elif name == b"content-encoding":
            coding = value.strip().lower()
    return kind.startswith(b"text/event-stream") and coding in (b"", b"identity")
