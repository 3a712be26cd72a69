"""A stream as the Node holds it: receives a request and its body, sends an ordered answer under credit."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, cast

from iop.core.errors import LocalProtocolError, RemoteProtocolError
from iop.wire import codec
from iop.wire.credit import ReceiveWindow, SendCredit
from iop.wire.frames import frame
from iop.wire.messages import (
    AdminStep,
    ArtifactRequest,
    BodyFraming,
    CancelReason,
    Header,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
    Usage,
)
from iop.wire.packets import FrameKind, RunFrame, TunnelFrame
from iop.wire.scheduler import BODY_FRAME_BYTES_MAX
from iop.wire.streams import SMALLEST_CUT_BYTES, StreamKind


class NodeStream:
    """A stream that the Edge opened on this Node.

    Attributes:
        body: what the opening packet and its continuation frames carried, in parts.
        is_complete: the whole body is here and the shell knows the stream.
        cancel_reason: set once it is called off.
        cancel_at_safe_point: the engine is frozen and must not be told before it steps again (SF-07).
        owner: whatever the shell wants to find here.
    """

    __slots__ = (
        "_bytes_queued",
        "_credit",
        "_dropped",
        "_finished",
        "_frame_bytes_max",
        "_prefix",
        "_queue",
        "_sequence",
        "_started",
        "body",
        "body_bytes",
        "body_bytes_total",
        "cancel_at_safe_point",
        "cancel_reason",
        "is_complete",
        "is_queued",
        "is_terminated",
        "key",
        "kind",
        "owner",
        "request",
        "session_id",
        "stream_id",
        "window",
    )

    def __init__(
        self,
        *,
        kind: StreamKind,
        stream_id: str,
        request: TunnelRequest | RunRequest | ArtifactRequest | AdminStep,
        body_bytes_total: int,
        window_bytes: int,
        frame_bytes_max: int,
        finished: list[NodeStream],
    ) -> None:
        self.kind = kind
        self.stream_id = stream_id
        self.key = stream_id.encode()
        self.request = request
        self.session_id = request.session_id if isinstance(request, TunnelRequest | RunRequest) else ""
        self.body: list[bytes] = []
        self.body_bytes = 0
        self.body_bytes_total = body_bytes_total
        self.window = ReceiveWindow(window_bytes)
        self.is_complete = False
        self.cancel_reason: CancelReason | None = None
        self.cancel_at_safe_point = False
        self.is_terminated = False
        self.is_queued = False
        self.owner: Any = None
        self._prefix = codec.string_field(0x0A, stream_id)
        self._credit = SendCredit(window_bytes)
        # Body bytes as they are; everything else as the message that is numbered and encoded when its turn comes.
        self._queue: deque[bytes | memoryview | TunnelFrame | RunEvent] = deque()
        self._bytes_queued = 0
        self._sequence = 0
        self._started = False
        self._dropped = False
        self._finished = finished
        self._frame_bytes_max = frame_bytes_max

    # -- the request's body --

    def add_body(self, data: bytes, *, offset: int, last: bool) -> int:
        """Take a continuation frame; returns the credit to return now.

        Raises:
            RemoteProtocolError: a gap, more or less than announced, or more than the credit.
        """
        if offset != self.body_bytes:
            raise RemoteProtocolError(
                f"A body part at {offset} came where {self.body_bytes} was due.", reason="BODY_GAP"
            )
        if self.body_bytes + len(data) > self.body_bytes_total:
            raise RemoteProtocolError("More body came than was announced.", reason="BODY_TOO_LONG")
        self.window.receive(len(data))
        self.body_bytes += len(data)
        if data:
            self.body.append(data)
        if last and self.body_bytes != self.body_bytes_total:
            raise RemoteProtocolError("Less body came than was announced.", reason="BODY_TOO_SHORT")
        return self.window.consume(len(data))

    # -- the answer --

    @property
    def credit_bytes(self) -> int:
        """Credit less what is queued; below zero: stop reading upstream."""
        return self._credit.available - self._bytes_queued

    def grant(self, size_bytes: int) -> bool:
        """Credit came back; returns whether ``credit_bytes`` rose above zero. Raises RemoteProtocolError."""
        before = self.credit_bytes
        self._credit.grant(size_bytes)
        return before <= 0 < self.credit_bytes

    def start(self, *, status: int, headers: tuple[Header, ...], framing: BodyFraming) -> None:
        """Queue RESPONSE_START. Raises LocalProtocolError for a second one."""
        if self._started:
            raise LocalProtocolError("RESPONSE_START was already sent.", reason="DOUBLE_START")
        self._started = True
        self._push_frame(FrameKind.RESPONSE_START, status=status, headers=headers, framing=framing)

    def send_body(self, data: bytes) -> None:
        """Queue body bytes; dropped when the stream is called off, since nobody will read them."""
        if not self._started:
            raise LocalProtocolError("Body bytes before RESPONSE_START.", reason="NOT_STARTED")
        if self.cancel_reason is not None:
            self._dropped = True
        elif data:
            self._queue.append(data)
            self._bytes_queued += len(data)

    def send_usage(self, usage: Usage) -> None:
        """Queue an observation."""
        self._push_frame(FrameKind.USAGE, usage=usage)

    def end(self) -> None:
        """Queue END; a stream that lost bytes to a cancel ends as cancelled instead."""
        if not self._started:
            raise LocalProtocolError("END before RESPONSE_START.", reason="NOT_STARTED")
        if self._dropped:
            self.fail(_CANCELLED)
            return
        self.is_terminated = True
        self._push_frame(FrameKind.END)

    def fail(self, error: StreamError) -> None:
        """Queue ERROR (of a run: an ERROR or CANCELLED event) behind what is queued."""
        self.is_terminated = True
        if self.kind is StreamKind.RUN:
            self._queue.append(_run_failure(error))
        else:
            self._push_frame(FrameKind.ERROR, error=error)

    def emit(self, event: RunEvent) -> None:
        """Queue a run event, long deltas in pieces. Raises LocalProtocolError when it breaks the order of EN-40."""
        kind = event.type
        if kind is RunEventType.START:
            if self._started:
                raise LocalProtocolError("START was already sent.", reason="DOUBLE_START")
            self._started = True
        elif not self._started and kind in {RunEventType.DELTA, RunEventType.COMPLETE}:
            raise LocalProtocolError(f"{kind.name} before START.", reason="NOT_STARTED")
        if kind is RunEventType.UNSPECIFIED:
            raise LocalProtocolError("An event without a type.", reason="NO_TYPE")
        if kind.is_terminal:
            self.is_terminated = True
            if self._dropped and kind is RunEventType.COMPLETE:
                event = _run_failure(_CANCELLED)
        if self.cancel_reason is not None and kind is RunEventType.DELTA:
            self._dropped = True
            return
        size = event.credit_bytes
        if size > self._piece_bytes_max or (size and kind is not RunEventType.DELTA):
            for piece in _split(event, self._piece_bytes_max):
                self._queue.append(piece)
        else:
            self._queue.append(event)
        self._bytes_queued += size

    def cancel(self, reason: CancelReason, *, at_safe_point: bool) -> None:
        """Drop body bytes that wait; a success that was queued behind them becomes a cancellation (EN-102)."""
        self.cancel_reason = reason
        self.cancel_at_safe_point = at_safe_point
        kept = [entry for entry in self._queue if not _costs_credit(entry)]
        if len(kept) != len(self._queue):
            self._dropped = True
            self._bytes_queued = 0
            if kept and _is_success(kept[-1]):
                kept.pop()
                self._queue = deque(kept)
                self.fail(_CANCELLED)
                return
            self._queue = deque(kept)

    @property
    def can_send(self) -> bool:
        """Whether a frame waits that needs no credit or has it."""
        if not self._queue:
            return False
        first = self._queue[0]
        if isinstance(first, RunEvent):
            return first.credit_bytes <= self._credit.available
        return isinstance(first, TunnelFrame) or self._credit.available > 0

    def pull(self, out: list[Any], budget: int) -> int:
        """Frames up to one lane's turn; small answers go whole in one turn."""
        pulled = 0
        room = min(budget, BODY_FRAME_BYTES_MAX)
        while self._queue and room > pulled:
            first = self._queue[0]
            if isinstance(first, TunnelFrame | RunEvent):
                is_covered = isinstance(first, TunnelFrame) or first.credit_bytes <= self._credit.available
                size = self._pull_message(first, out, budget - pulled) if is_covered else 0
            else:
                size = self._pull_body(out, room - pulled) if self._credit.available > 0 else 0
            if not size:
                break
            pulled += size
        return pulled

    def _pull_message(self, entry: TunnelFrame | RunEvent, out: list[Any], budget: int) -> int:
        encoded = self._encode(entry, self._sequence + 1)
        if len(encoded) > self._frame_bytes_max:
            # The peer would end the connection over it; this ends the stream alone.
            self._queue.clear()
            self._bytes_queued = 0
            self.fail(
                StreamError(code=StreamErrorCode.INTERNAL, message="An answer's head is larger than a frame.")
            )
            entry = cast("TunnelFrame | RunEvent", self._queue[0])
            encoded = self._encode(entry, self._sequence + 1)
        if out and len(encoded) > budget:
            return 0
        self._queue.popleft()
        self._sequence += 1
        out.append(encoded)
        if isinstance(entry, RunEvent):
            size = entry.credit_bytes
            self._credit.spend(size)
            self._bytes_queued -= size
        if self.is_terminated and not self._queue:
            self._finished.append(self)
        return len(encoded)

    def _encode(self, entry: TunnelFrame | RunEvent, sequence: int) -> bytes:
        if isinstance(entry, RunEvent):
            return frame(codec.encode(RunFrame(run_id=self.stream_id, sequence=sequence, event=entry)))
        if entry.kind is FrameKind.END:
            return codec.end_frame(self._prefix, sequence)
        return frame(codec.encode(entry._replace(sequence=sequence)))

    def _pull_body(self, out: list[Any], room: int) -> int:
        wanted = min(self._credit.available, self._bytes_queued)
        if out and room < SMALLEST_CUT_BYTES and room < wanted:
            return 0
        room = min(room, wanted)
        queue = self._queue
        parts: list[Any] = []
        size = 0
        while queue and size < room:
            part = queue[0]
            if isinstance(part, TunnelFrame | RunEvent):
                break
            left = room - size
            if len(part) <= left:
                parts.append(part)
                size += len(part)
                queue.popleft()
            else:
                view = memoryview(part)
                parts.append(view[:left])
                size += left
                queue[0] = view[left:]
        self._credit.spend(size)
        self._bytes_queued -= size
        self._sequence += 1
        head = codec.body_frame_head(self._prefix, self._sequence, size)
        out.append(head)
        out.extend(parts)
        return len(head) + size

    @property
    def _piece_bytes_max(self) -> int:
        # A receiver holds back less than half a window of consumed bytes, so half a window always comes free.
        return min(BODY_FRAME_BYTES_MAX, self._credit.window // 2)

    def _push_frame(
        self,
        kind: FrameKind,
        *,
        status: int = 0,
        headers: tuple[Header, ...] = (),
        framing: BodyFraming = BodyFraming.UNSPECIFIED,
        error: StreamError | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._queue.append(
            TunnelFrame(
                run_id=self.stream_id,
                kind=kind,
                sequence=0,
                status=status,
                headers=headers,
                framing=framing,
                error=error,
                usage=usage,
            )
        )


_CANCELLED: Final = StreamError(code=StreamErrorCode.CANCELLED, message="Called off.")


def _run_failure(error: StreamError) -> RunEvent:
    is_cancel = error.code == StreamErrorCode.CANCELLED
    return RunEvent(type=RunEventType.CANCELLED if is_cancel else RunEventType.ERROR, error=error)


def _costs_credit(entry: bytes | memoryview | TunnelFrame | RunEvent) -> bool:
    if isinstance(entry, RunEvent):
        return entry.type is RunEventType.DELTA
    return not isinstance(entry, TunnelFrame)


def _is_success(entry: bytes | memoryview | TunnelFrame | RunEvent) -> bool:
    if isinstance(entry, RunEvent):
        return entry.type is RunEventType.COMPLETE
    return isinstance(entry, TunnelFrame) and entry.kind is FrameKind.END


def _split(event: RunEvent, piece_bytes_max: int) -> list[RunEvent]:
    """Deltas of at most ``piece_bytes_max`` UTF-8 bytes with the text of one; what is not text stays on the last."""
    characters = piece_bytes_max // 4
    pieces = [
        RunEvent(type=RunEventType.DELTA, output_index=event.output_index, reasoning_delta=text)
        for text in _cut(event.reasoning_delta, characters)
    ]
    pieces += [
        RunEvent(type=RunEventType.DELTA, output_index=event.output_index, delta=text)
        for text in _cut(event.delta, characters)
    ]
    if event.type is not RunEventType.DELTA or event.metadata:
        pieces.append(
            RunEvent(
                type=event.type,
                output_index=event.output_index,
                metadata=event.metadata,
                finish_reasons=event.finish_reasons,
                usage=event.usage,
                error=event.error,
            )
        )
    return pieces


def _cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]
