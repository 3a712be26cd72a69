"""The asyncio shell around a session: reads, feeds, delivers, writes, arms one timer. It makes no protocol choice.

Everything of one loop turn goes out in one write: calls from outside only mark the connection, and a turn of its own
writes what has gathered. No task, future or queue belongs to a chunk.

The transport's buffer limit is one byte, so whatever the kernel does not take at once pauses us; what stands in our own
buffers ahead of a control packet is then at most the one piece that was written last (EN-106).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

from iop.core.limits import CONTROL_AHEAD_BYTES_MAX
from iop.wire.events import Closed, Event, PeerClockSeen
from iop.wire.messages import CloseReason, Readiness
from iop.wire.session_edge import EdgeSession
from iop.wire.session_node import NodeSession

logger = logging.getLogger(__name__)

FLUSH_TIMEOUT_S: Final = 2.0
"""How long a closing connection may take to write what is queued, the Goodbye last. Then it is cut."""

LINGER_TIMEOUT_S: Final = 60.0
"""How long the socket of a Node that was declared dead stays open to count what it still says. Longer holds descriptors
for the dead; shorter answers a Node that stood still with a reset, and its late frames go uncounted.
"""

SessionT = TypeVar("SessionT", EdgeSession, NodeSession)
Deliver = Callable[[Any], None]


class Connection(asyncio.Protocol, Generic[SessionT]):
    """What the two sides' connections share.

    Args:
        session: fresh; this connection owns it.
        loop: the running loop; its clock is the session's.
        unix_nanos: wall clock, for heartbeats and the skew shown.
        on_made: called once the transport is there; behind TLS only after its handshake, or never.
        on_gone: called once the transport is gone.
    """

    def __init__(
        self,
        *,
        session: SessionT,
        loop: asyncio.AbstractEventLoop,
        unix_nanos: Callable[[], int] = time.time_ns,
        on_made: Callable[[], None] | None = None,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        self.session: SessionT = session
        self._loop = loop
        self._unix_nanos = unix_nanos
        self._on_made = on_made
        self._on_gone = on_gone
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._clock_skew_ms: int | None = None
        self._undelivered: list[Event] = []
        self._is_paused = False
        self._is_half_closed = False
        self._in_turn = False
        self._is_turn_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._cut_timer: asyncio.TimerHandle | None = None
        self._deliver: dict[type, Deliver] = {Closed: self._on_closed, PeerClockSeen: self._on_clock}

    # ---- what both sides' handlers see ----

    @property
    def peer(self) -> str:
        """Address of the other side, for our own log only (EN-04)."""
        return self._peer

    @property
    def clock_skew_ms(self) -> int | None:
        """The peer's wall clock less ours as last seen (EN-113)."""
        return self._clock_skew_ms

    @property
    def readiness(self) -> Readiness:
        """How far the handshake has come."""
        readiness: Readiness = self.session.readiness
        return readiness

    def close(self, reason: CloseReason) -> None:
        """Say goodbye, flush and close; ``on_closed`` follows exactly once, from a turn of its own."""
        if self.session.is_lingering:
            self.abort()
            return
        self._undelivered += self.session.close(reason)
        self._mark()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is open."""
        self._transport = cast("asyncio.Transport", transport)
        # Not zero: asyncio's TLS transport pauses at "size >= high", and would so with nothing buffered at all.
        self._transport.set_write_buffer_limits(high=1, low=0)
        address = transport.get_extra_info("peername")
        self._peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address or "")
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None and raw.family in {socket.AF_INET, socket.AF_INET6}:
            # A delayed small frame costs tens of milliseconds of first-token time.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._on_made is not None:
            self._on_made()
            self._on_made = None
        self._arm()
        self._mark()

    def data_received(self, data: bytes) -> None:
        """Bytes came in."""
        self._in_turn = True
        self._undelivered += self.session.receive_data(data, now=self._loop.time())
        self._finish_turn()

    def eof_received(self) -> bool:
        """The peer sends no more: the session ends, the transport closes itself."""
        self._in_turn = True
        self._undelivered += self.session.receive_eof()
        self._finish_turn()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport is gone."""
        self._in_turn = True
        self._undelivered += self.session.connection_lost(_transport_text(exc))
        self._transport = None
        self._finish_turn()
        for timer in (self._timer, self._cut_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._cut_timer = None
        if self._on_gone is not None:
            self._on_gone()
            self._on_gone = None

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The kernel took everything."""
        self._is_paused = False
        if not self._in_turn:
            self._write()

    def abort(self) -> None:
        """Cut the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    # ---- turns ----

    def _mark(self) -> None:
        """Something was queued from outside a turn: have one soon."""
        if not self._in_turn and not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        self._in_turn = True
        self._finish_turn()

    def _finish_turn(self) -> None:
        """Deliver what came, then write what that and everything before it left to send."""
        while True:
            self._undelivered += self.session.take_events()
            if not self._undelivered:
                break
            events, self._undelivered = self._undelivered, []
            for event in events:
                try:
                    self._deliver[type(event)](event)
                except Exception:
                    # One handler's bug must not take the other streams of this connection with it.
                    logger.exception("connection.callback_failed event=%s", type(event).__name__)
                    with contextlib.suppress(Exception):
                        self._on_callback_failed(event)
        self._in_turn = False
        self._write()

    def _write(self) -> None:
        transport = self._transport
        if transport is None:
            return
        session = self.session
        while not self._is_paused:
            data = session.data_to_send(CONTROL_AHEAD_BYTES_MAX)
            if not data:
                break
            transport.write(data)
            if not session.has_output:
                break
        if session.is_closed and not session.has_output and not transport.is_closing():
            if session.is_lingering:
                self._half_close(transport)
            else:
                transport.close()

    def _half_close(self, transport: asyncio.Transport) -> None:
        """Say no more, but read on until the peer has understood or the time is up. TLS cannot: its Goodbye must do."""
        if not self._is_half_closed:
            self._is_half_closed = True
            if transport.can_write_eof():
                transport.write_eof()

    def _arm(self) -> None:
        """Have the timer fire no later than the session's next deadline."""
        at = self.session.next_deadline()
        if at is None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._in_turn = True
        self._undelivered += self.session.handle_deadline(
            now=self._loop.time(), unix_nanos=self._unix_nanos()
        )
        self._finish_turn()
        self._arm()

    # ---- events of both sides ----

    def _on_clock(self, event: PeerClockSeen) -> None:
        self._clock_skew_ms = (event.unix_nanos - self._unix_nanos()) // 1_000_000

    def _on_closed(self, event: Closed) -> None:
        level = logging.WARNING if event.reason is CloseReason.PROTOCOL_ERROR else logging.INFO
        logger.log(
            level,
            "connection.closed peer=%s reason=%s by_peer=%s detail=%s",
            self._peer,
            event.reason.value,
            event.by_peer,
            event.detail,
        )
        patience_s = LINGER_TIMEOUT_S if self.session.is_lingering else FLUSH_TIMEOUT_S
        self._cut_timer = self._loop.call_later(patience_s, self.abort)
        self._tell_closed(event.reason)

    def _tell_closed(self, reason: CloseReason) -> None:
        raise NotImplementedError

    def _on_callback_failed(self, event: Event) -> None:
        """A handler raised: end what it would have answered for, so that nobody waits for it."""
        raise NotImplementedError


def _transport_text(exc: Exception | None) -> str:
    return "The connection was closed." if exc is None else f"The connection was lost ({type(exc).__name__})."
