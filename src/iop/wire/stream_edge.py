"""A stream as the Edge holds it: sends an opening packet and perhaps an upload, receives an ordered answer."""

from __future__ import annotations

from collections import deque
from typing import Any

from iop.core.errors import RemoteProtocolError
from iop.wire import codec
from iop.wire.credit import ReceiveWindow, SendCredit
from iop.wire.messages import (
    RunEventType,
)
from iop.wire.packets import FrameKind
from iop.wire.scheduler import BODY_FRAME_BYTES_MAX
from iop.wire.streams import SMALLEST_CUT_BYTES, StreamKind


class ByteQueue:
    """Bytes that wait to be cut into frames, without copying them until they are joined for the socket."""

    __slots__ = ("_head", "_parts", "size")

    def __init__(self, parts: list[bytes]) -> None:
        self._parts: deque[bytes | memoryview] = deque(part for part in parts if part)
        self._head = 0
        self.size = sum(map(len, self._parts))

    def clear(self) -> None:
        """Drop all."""
        self._parts.clear()
        self._head = 0
        self.size = 0

    def take(self, size: int, out: list[Any]) -> None:
        """Move the first ``size`` bytes, at most all there are, to ``out``."""
        self.size -= size
        parts = self._parts
        while size:
            part = parts[0]
            start = self._head
            end = start + size
            if end >= len(part):
                out.append(memoryview(part)[start:] if start else part)
                size -= len(part) - start
                self._head = 0
                parts.popleft()
            else:
                out.append(memoryview(part)[start:end])
                self._head = end
                size = 0


class EdgeStream:
    """A stream that this Edge opened.

    Attributes:
        stream_id: run id, or what ``step_key`` gives.
        is_handed_over: any part of the opening packet was given to the socket (EN-112).
        is_forgotten: of an admin step: nobody waits for its result now.
        owner: whatever the shell wants to find here.
    """

    __slots__ = (
        "_expected",
        "_started",
        "_upload",
        "_upload_credit",
        "_upload_offset",
        "is_cancelled",
        "is_ended",
        "is_forgotten",
        "is_handed_over",
        "is_queued",
        "key",
        "kind",
        "opening",
        "owner",
        "stream_id",
        "window",
    )

    def __init__(
        self, *, kind: StreamKind, stream_id: str, opening: bytes, upload: list[bytes], window_bytes: int
    ) -> None:
        self.kind = kind
        self.stream_id = stream_id
        self.key = stream_id.encode()
        self.opening: bytes | None = opening
        # Most streams have no upload, and each object costs on the path of every request.
        self._upload = ByteQueue(upload) if upload else None
        self._upload_offset = 0
        self._upload_credit = SendCredit(window_bytes) if upload else None
        self.window = ReceiveWindow(window_bytes)
        self._expected = 1
        self._started = False
        self.is_handed_over = False
        self.is_cancelled = False
        self.is_ended = False
        self.is_forgotten = False
        self.is_queued = False
        self.owner: Any = None

    # -- sending --

    @property
    def can_send(self) -> bool:
        """Whether the opening packet or upload bytes with credit wait."""
        if self.opening is not None:
            return True
        upload, credit = self._upload, self._upload_credit
        return upload is not None and credit is not None and upload.size > 0 and credit.available > 0

    @property
    def upload_bytes_left(self) -> int:
        """Body bytes that were not handed to the socket yet."""
        return 0 if self._upload is None else self._upload.size

    def pull(self, out: list[Any], budget: int) -> int:
        """The opening packet, or one continuation frame."""
        opening = self.opening
        if opening is not None:
            if out and len(opening) > budget:
                return 0
            out.append(opening)
            self.opening = None
            self.is_handed_over = True
            return len(opening)
        upload, credit = self._upload, self._upload_credit
        if upload is None or credit is None or (out and budget < SMALLEST_CUT_BYTES):
            return 0
        size = min(upload.size, credit.available, BODY_FRAME_BYTES_MAX, max(budget, 1))
        prefix = codec.string_field(0x0A, self.stream_id)
        head, tail = codec.chunk_frame_head_and_tail(
            prefix, self._upload_offset, size, last=size == upload.size
        )
        credit.spend(size)
        self._upload_offset += size
        out.append(head)
        upload.take(size, out)
        if tail:
            out.append(tail)
        return len(head) + size + len(tail)

    def grant_upload(self, size_bytes: int) -> None:
        """The Node took continuation bytes. Raises RemoteProtocolError for more than it was sent."""
        if self._upload_credit is None:
            raise RemoteProtocolError(
                "Credit came for a stream without an upload.", reason="CREDIT_OVERGRANTED"
            )
        self._upload_credit.grant(size_bytes)

    def drop_unsent(self) -> None:
        """Forget what was not handed to the socket (EN-106)."""
        self.opening = None
        if self._upload is not None:
            self._upload.clear()

    # -- receiving --

    def check_sequence(self, sequence: int) -> None:
        """One frame of the answer. Raises RemoteProtocolError for a gap or a repetition."""
        if sequence != self._expected:
            raise RemoteProtocolError(
                f"Frame {sequence} came where {self._expected} was due.", reason="SEQUENCE_GAP"
            )
        self._expected = sequence + 1

    def check_tunnel_order(self, kind: FrameKind) -> None:
        """RESPONSE_START once and first; only ERROR and observations may do without (EN-52)."""
        if kind is FrameKind.RESPONSE_START:
            if self._started:
                raise RemoteProtocolError("A second RESPONSE_START came.", reason="DOUBLE_START")
            self._started = True
        elif not self._started and kind in {FrameKind.BODY, FrameKind.END}:
            raise RemoteProtocolError(f"{kind.name} came before RESPONSE_START.", reason="NOT_STARTED")

    def check_run_order(self, kind: RunEventType) -> None:
        """START once and first; only ERROR and CANCELLED may do without (EN-40)."""
        if kind is RunEventType.START:
            if self._started:
                raise RemoteProtocolError("A second START came.", reason="DOUBLE_START")
            self._started = True
        elif not self._started and kind in {RunEventType.DELTA, RunEventType.COMPLETE}:
            raise RemoteProtocolError(f"{kind.name} came before START.", reason="NOT_STARTED")
