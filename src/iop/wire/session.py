"""The protocol state of one connection, without I/O; what both sides share.

The shell feeds received bytes and the time, takes events, asks for bytes to send and arms one timer::

    events = session.receive_data(data, now=now)
    data = session.data_to_send(limit)          # as often as the socket takes more
    events = session.handle_deadline(now=now)   # at session.next_deadline()

``EdgeSession`` and ``NodeSession`` add what each side may say and hear. Local misuse raises LocalProtocolError and
changes nothing; whatever a peer does wrong ends the session with a ``Closed`` event of reason PROTOCOL_ERROR (EN-100).

**Liveness** (EN-103, EN-113). Received bytes are a sign of life. When none came for the timeout, the session does not
declare death at the first deadline: it may be this process that stood still, with the peer's frames waiting unread. It
asks to be called again a moment later, so that the shell's loop polls its sockets in between, and declares death only
if that second call came on time and still nothing was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, unique
from typing import Any, Final, Generic, TypeVar

from iop.core import limits
from iop.core.errors import LocalProtocolError, RemoteProtocolError
from iop.wire import codec
from iop.wire.events import Closed, Event, LateFrameDropped, PeerClockSeen
from iop.wire.frames import FrameReader, frame
from iop.wire.handshake import HandshakeInput
from iop.wire.handshake import step as handshake_step
from iop.wire.messages import CloseReason, NodeRuntime, Readiness
from iop.wire.packets import Goodbye, Heartbeat, Message, Unknown
from iop.wire.scheduler import Scheduler
from iop.wire.stream_edge import EdgeStream
from iop.wire.stream_node import NodeStream
from iop.wire.streams import WINDOW_BYTES_MIN

SECOND_LOOK_S: Final = 0.1
"""How long before the heartbeat timeout a silent peer is looked at first; also what counts as our own stall."""

SECOND_LOOKS_MAX: Final = 5
"""How often our own lateness may put off a death; a loop that is always late must not keep the dead alive."""

LINGERING: Final = frozenset({CloseReason.HEARTBEAT_TIMEOUT, CloseReason.SUPERSEDED})
"""Ends that the Edge declares of a Node which may still live and speak; what it then says is counted and dropped."""

REASON_CHARS_MAX: Final = 512
"""Longest text that goes into a Goodbye; it may quote what the peer sent."""

StreamT = TypeVar("StreamT", EdgeStream, NodeStream)


@unique
class Role(Enum):
    """Which side of the wire a session is."""

    EDGE = "edge"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits and times of one session. The Edge's go to the Node with its config, so that both sides have the same."""

    heartbeat_interval_s: float = limits.HEARTBEAT_INTERVAL_S
    heartbeat_timeout_s: float = limits.HEARTBEAT_TIMEOUT_S
    handshake_timeout_s: float = limits.HANDSHAKE_TIMEOUT_S
    ready_timeout_s: float = limits.READY_TIMEOUT_S
    stream_window_bytes: int = limits.STREAM_WINDOW_BYTES
    frame_bytes_max: int = limits.FRAME_BYTES_MAX
    body_bytes_max: int = limits.BODY_BYTES_MAX
    streams_max: int = limits.STREAMS_MAX

    def with_runtime(self, runtime: NodeRuntime) -> SessionSettings:
        """As the config payload says; its zeros leave what is here."""
        return replace(
            self,
            heartbeat_interval_s=runtime.heartbeat_interval_ms / 1000 or self.heartbeat_interval_s,
            heartbeat_timeout_s=runtime.heartbeat_timeout_ms / 1000 or self.heartbeat_timeout_s,
            stream_window_bytes=max(
                runtime.stream_window_bytes or self.stream_window_bytes, WINDOW_BYTES_MIN
            ),
            frame_bytes_max=max(runtime.frame_bytes_max, limits.HANDSHAKE_BYTES_MAX)
            if runtime.frame_bytes_max
            else self.frame_bytes_max,
            body_bytes_max=runtime.body_bytes_max or self.body_bytes_max,
        )


@dataclass(slots=True, kw_only=True)
class SessionCounters:
    """What a session met, for metrics; only ever rises."""

    late_frames: int = 0
    duplicate_packets: int = 0
    unknown_messages: int = 0
    late_local_calls: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0


Handler = Callable[[int, Any], None]


@dataclass(frozen=True, slots=True)
class Legal:
    """Which message a side may hear, from which readiness on, and who handles it."""

    handler: Handler
    since: frozenset[Readiness]


REGISTERED: Final = frozenset({Readiness.PENDING, Readiness.READY_SENT, Readiness.READY})
READY: Final = frozenset({Readiness.READY})
ALWAYS: Final = frozenset(Readiness)


@dataclass(slots=True, kw_only=True)
class _Liveness:
    """When we last heard and what we have in mind about it."""

    heard_at: float
    declare_at: float | None = None
    second_looks: int = field(default=0)

    def hear(self, now: float) -> None:
        self.heard_at = now
        self.declare_at = None
        self.second_looks = 0

    def deadline(self, timeout_s: float) -> float:
        if self.declare_at is not None:
            return self.declare_at
        return self.heard_at + max(timeout_s - SECOND_LOOK_S, timeout_s / 2)

    def is_dead(self, now: float, timeout_s: float) -> bool:
        """To be asked when the deadline has come; puts it off where the silence may be ours."""
        if self.declare_at is None:
            self.declare_at = max(self.heard_at + timeout_s, now + SECOND_LOOK_S)
            return False
        was_late = now > self.declare_at + SECOND_LOOK_S
        if was_late and self.second_looks < SECOND_LOOKS_MAX:
            self.second_looks += 1
            self.declare_at = now + SECOND_LOOK_S
            return False
        return True


class Session(Generic[StreamT]):
    """Framing, handshake, liveness, order of sending and closing. See the module's text.

    Args:
        role: which side this is.
        settings: limits and times.
        now: monotonic seconds; the handshake timeout runs from here.
    """

    role: Role

    def __init__(self, *, settings: SessionSettings, now: float) -> None:
        self.settings = settings
        self.counters = SessionCounters()
        self._readiness = Readiness.CONNECTED
        self._reader = FrameReader(min(limits.HANDSHAKE_BYTES_MAX, settings.frame_bytes_max))
        self._scheduler = Scheduler()
        self._events: list[Event] = []
        self._streams: dict[bytes, StreamT] = {}
        self._steps: dict[bytes, StreamT] = {}
        self._legal: dict[type, Legal] = {
            Heartbeat: Legal(self._on_heartbeat, ALWAYS - {Readiness.CONNECTED}),
            Goodbye: Legal(self._on_goodbye, ALWAYS),
            Unknown: Legal(self._on_unknown, REGISTERED),
        }
        self._liveness = _Liveness(heard_at=now)
        self._handshake_until: float | None = now + settings.handshake_timeout_s
        self._handshake_failure = CloseReason.HANDSHAKE_TIMEOUT
        self._beat_at: float | None = None
        self._beats = 0
        self._farewell = b""
        self._is_lingering = False

    # ---- what the shell sees ----

    @property
    def readiness(self) -> Readiness:
        """How far the handshake has come."""
        return self._readiness

    @property
    def is_closed(self) -> bool:
        """Whether the session is over; what ``data_to_send`` still gives may be flushed."""
        return self._readiness is Readiness.CLOSED

    @property
    def is_lingering(self) -> bool:
        """Whether the session is over, and a peer that does not know it yet should be read from for a while (EN-33)."""
        return self._is_lingering

    @property
    def has_output(self) -> bool:
        """Whether ``data_to_send`` would give anything."""
        return self._scheduler.has_output or bool(self._farewell)

    @property
    def streams_open(self) -> int:
        """Runs, tunnels and admin steps that have no terminal yet."""
        return len(self._streams) + len(self._steps)

    def receive_data(self, data: bytes, *, now: float) -> list[Event]:
        """Take bytes from the peer. Never raises for what they say."""
        if self._readiness is Readiness.CLOSED:
            if self._is_lingering:
                self._count_late(data)
            return self.take_events()
        self._liveness.hear(now)
        self.counters.received_bytes += len(data)
        try:
            for buffer, start, end in self._reader.feed(data):
                self._receive_frame(buffer, start, end)
                if self._readiness is Readiness.CLOSED:
                    break
        except RemoteProtocolError as exc:
            self._break_off(exc)
        return self.take_events()

    def receive_eof(self) -> list[Event]:
        """The peer sends no more; that ends the session in both directions (EN-17)."""
        if self._reader.is_mid_frame and self._readiness is not Readiness.CLOSED:
            self._end(CloseReason.PROTOCOL_ERROR, "The connection ended within a frame.", by_peer=True)
        else:
            self._end(CloseReason.PEER_CLOSED, "The peer closed the connection.", by_peer=True)
        return self.take_events()

    def connection_lost(self, detail: str = "The connection was lost.") -> list[Event]:
        """The transport is gone."""
        self._end(CloseReason.CONNECTION_LOST, detail, by_peer=True)
        return self.take_events()

    def close(self, reason: CloseReason, detail: str = "") -> list[Event]:
        """Say goodbye and end. What was queued before may still be flushed; nothing new can be said. Idempotent."""
        if self._readiness is not Readiness.CLOSED:
            self._say_goodbye(reason, detail)
            self._end(reason, detail, by_peer=False)
        return self.take_events()

    def data_to_send(self, limit: int = limits.CONTROL_AHEAD_BYTES_MAX) -> bytes:
        """Up to about ``limit`` bytes to write now, in order; what is not asked for can still be overtaken or dropped.

        Bytes given out here count as handed to the socket.
        """
        data = self._scheduler.pull(limit)
        if not data and self._farewell:
            data, self._farewell = self._farewell, b""
        self.counters.sent_bytes += len(data)
        return data

    def next_deadline(self) -> float | None:
        """When ``handle_deadline`` wants to be called, monotonic seconds; None: never."""
        if self._readiness is Readiness.CLOSED:
            return None
        candidates = [at for at in (self._handshake_until, self._beat_at) if at is not None]
        if self._beat_at is not None:
            candidates.append(self._liveness.deadline(self.settings.heartbeat_timeout_s))
        return min(candidates, default=None)

    def handle_deadline(self, *, now: float, unix_nanos: int = 0) -> list[Event]:
        """Do what is due: beat, look at a silent peer, give up on a handshake.

        Args:
            now: monotonic seconds.
            unix_nanos: wall clock for the heartbeat; shown as skew on the other side, decides nothing.
        """
        if self._readiness is Readiness.CLOSED:
            return self.take_events()
        if self._handshake_until is not None and now >= self._handshake_until:
            reason = self._handshake_failure
            return self.close(reason, "The handshake took too long.")
        if self._beat_at is not None:
            timeout_s = self.settings.heartbeat_timeout_s
            if now >= self._liveness.deadline(timeout_s) and self._liveness.is_dead(now, timeout_s):
                return self.close(CloseReason.HEARTBEAT_TIMEOUT, f"Nothing was received for {timeout_s:g} s.")
            if now >= self._beat_at:
                self._beats += 1
                self._beat_at = now + self.settings.heartbeat_interval_s
                # One unsent beat says as much as two, and a peer that does not read must not collect them.
                if not self._scheduler.control_bytes:
                    self._send(Heartbeat(sequence=self._beats, clock_unix_nanos=unix_nanos))
        return self.take_events()

    # ---- for the sides ----

    def _receive_frame(self, buffer: bytes, start: int, end: int) -> None:
        request_id, message = codec.decode(memoryview(buffer)[start:end])
        legal = self._legal.get(type(message))
        if legal is None:
            raise RemoteProtocolError(
                f"A {type(message).__name__} must not come to this side.", reason="WRONG_DIRECTION"
            )
        if self._readiness not in legal.since:
            raise RemoteProtocolError(
                f"A {type(message).__name__} came while the connection was {self._readiness.value}.",
                reason="OUT_OF_TURN",
            )
        legal.handler(request_id, message)

    def _send(self, message: Message, request_id: int = 0) -> None:
        """Queue a control packet; a peer that has stopped reading is broken off instead.

        Raises:
            LocalProtocolError: larger than the peer takes; nothing was queued.
        """
        if self._readiness is Readiness.CLOSED:
            return
        payload = codec.encode(message, request_id)
        if len(payload) > self.settings.frame_bytes_max:
            raise LocalProtocolError(
                f"A {type(message).__name__} of {len(payload)} bytes is larger than a frame.",
                reason="FRAME_TOO_LARGE",
            )
        try:
            self._scheduler.push_control(frame(payload))
        except RemoteProtocolError as exc:
            self._break_off(exc)

    def _advance(self, given: HandshakeInput, *, is_local: bool) -> None:
        """Move the handshake, or refuse: the peer's fault or ours."""
        state = handshake_step(self._readiness, given)
        if state is None:
            text = f"{given.value} while the connection was {self._readiness.value}."
            if is_local:
                raise LocalProtocolError(text, reason="OUT_OF_TURN")
            raise RemoteProtocolError(text, reason="OUT_OF_TURN")
        if state is not Readiness.CLOSED:  # closing is _end's business, so that it happens in one place
            self._readiness = state

    def _require_ready(self) -> None:
        if self._readiness is not Readiness.READY:
            raise LocalProtocolError(
                f"The connection is {self._readiness.value}, not ready.", reason="NOT_READY"
            )

    def _start_heart(self, now: float) -> None:
        self._liveness.hear(now)
        self._beat_at = now + self.settings.heartbeat_interval_s

    def _count_late(self, data: bytes) -> None:
        """Frames behind our own end of the session: they change nothing, whatever they say."""
        try:
            for buffer, start, end in self._reader.feed(data):
                _, message = codec.decode(memoryview(buffer)[start:end])
                if not isinstance(message, Heartbeat | Goodbye | Unknown):
                    self._drop_late()
        except RemoteProtocolError:
            self._is_lingering = False

    def _drop_late(self) -> None:
        self.counters.late_frames += 1
        self._events.append(LateFrameDropped())

    def take_events(self) -> list[Event]:
        """What happened since events were last taken; for the shell after local actions."""
        events = self._events
        if events:
            self._events = []
        return events

    def _say_goodbye(self, reason: CloseReason, detail: str) -> None:
        goodbye = Goodbye(reason_code=reason.value, reason=detail[:REASON_CHARS_MAX])
        self._farewell = frame(codec.encode(goodbye))

    def _break_off(self, error: RemoteProtocolError) -> None:
        """The peer broke the contract: nothing of it can be believed any more."""
        if self._readiness is Readiness.CLOSED:
            return
        self._say_goodbye(CloseReason.PROTOCOL_ERROR, error.message)
        self._scheduler.drop_lanes()
        self._end(CloseReason.PROTOCOL_ERROR, f"{error.reason}: {error.message}", by_peer=False)

    def _end(self, reason: CloseReason, detail: str, *, by_peer: bool) -> None:
        """Close once: every stream gets its terminal, then ``Closed``."""
        if self._readiness is Readiness.CLOSED:
            return
        self._is_lingering = (
            self.role is Role.EDGE
            and self._readiness is Readiness.READY
            and not by_peer
            and reason in LINGERING
        )
        self._readiness = Readiness.CLOSED
        self._handshake_until = None
        self._beat_at = None
        self._end_streams()
        self._events.append(Closed(reason, detail, by_peer))

    def _end_streams(self) -> None:
        raise NotImplementedError

    # ---- messages of both sides ----

    def _on_heartbeat(self, _request_id: int, message: Heartbeat) -> None:
        if message.clock_unix_nanos:
            self._events.append(PeerClockSeen(message.clock_unix_nanos))

    def _on_goodbye(self, _request_id: int, message: Goodbye) -> None:
        try:
            reason = CloseReason(message.reason_code)
        except ValueError:
            reason = CloseReason.UNKNOWN
        self._end(reason, message.reason[:REASON_CHARS_MAX], by_peer=True)

    def _on_unknown(self, _request_id: int, _message: Unknown) -> None:
        self.counters.unknown_messages += 1
