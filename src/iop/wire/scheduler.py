"""What goes out next: control first, then streams in turns (EN-106).

Streams that just got something to send go before those that had more than one turn's worth: a chunk of a conversation
does not wait for a turn of every upload. One turn in four is the others' in any case.

A lane is one stream's outgoing side; it keeps its own order and answers for its own credit. The scheduler never holds
stream bytes itself, so a cancel can still drop them, and hands out no more than it is asked for, so that whatever comes
next as control waits behind little.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

from iop.core.errors import RemoteProtocolError
from iop.core.limits import KIB, MIB

BODY_FRAME_BYTES_MAX: Final = 32 * KIB
"""Most body bytes in one frame: two fit into what may stand ahead of control. Smaller costs more frames."""

BULK_EVERY: Final = 4
"""Every how many turns the lanes with much to send are served even if others have just woken."""

CONTROL_BYTES_MAX: Final = 64 * MIB
"""Control packets waiting on a peer that does not read. Beyond it the peer is gone for us. Holds several configs."""


class Lane(Protocol):
    """One stream's outgoing side."""

    is_queued: bool
    """Whether the scheduler has it in its ring; only the scheduler writes it."""

    def pull(self, out: list[bytes], budget: int) -> int:
        """Append whole frames to ``out``, at most about ``budget`` bytes; returns how many bytes.

        Appends at least one frame if anything can be sent and either ``out`` is empty or it fits.
        """
        ...

    @property
    def can_send(self) -> bool:
        """Whether something waits that credit allows."""
        ...


class Scheduler:
    """Orders control packets and lanes."""

    __slots__ = ("_bulk", "_bulk_waited", "_control", "_control_bytes", "_fresh")

    def __init__(self) -> None:
        self._control: deque[bytes] = deque()
        self._control_bytes = 0
        self._fresh: deque[Lane] = deque()
        self._bulk: deque[Lane] = deque()
        self._bulk_waited = 0

    @property
    def has_output(self) -> bool:
        """Whether a pull would give anything."""
        return bool(self._control or self._fresh or self._bulk)

    @property
    def control_bytes(self) -> int:
        """Bytes of control packets that wait."""
        return self._control_bytes

    def push_control(self, frame: bytes) -> None:
        """Queue a packet ahead of all stream data, in order among its like.

        Raises:
            RemoteProtocolError: ``NOT_READING``: the peer takes nothing off us any more.
        """
        if self._control_bytes + len(frame) > CONTROL_BYTES_MAX:
            raise RemoteProtocolError("The peer does not read.", reason="NOT_READING")
        self._control.append(frame)
        self._control_bytes += len(frame)

    def wake(self, lane: Lane) -> None:
        """Something changed for this lane; queue it if it can send."""
        if not lane.is_queued and lane.can_send:
            lane.is_queued = True
            self._fresh.append(lane)

    def drop_lanes(self) -> None:
        """Forget all stream data; control stays."""
        for ring in (self._fresh, self._bulk):
            for lane in ring:
                lane.is_queued = False
            ring.clear()

    def pull(self, limit: int) -> bytes:
        """Up to about ``limit`` bytes of whole frames; a single larger frame goes alone."""
        out: list[bytes] = []
        left = limit
        control = self._control
        while control and (left >= len(control[0]) or not out):
            frame = control.popleft()
            self._control_bytes -= len(frame)
            out.append(frame)
            left -= len(frame)
        if not control:
            self._pull_lanes(out, left)
        if len(out) == 1:
            return out[0]
        return b"".join(out)

    def _pull_lanes(self, out: list[bytes], left: int) -> None:
        fresh, bulk = self._fresh, self._bulk
        while left > 0 and (fresh or bulk):
            if not fresh or (bulk and self._bulk_waited >= BULK_EVERY - 1):
                ring = bulk
                self._bulk_waited = 0
            else:
                ring = fresh
                self._bulk_waited = self._bulk_waited + 1 if bulk else 0
            lane = ring[0]
            pulled = lane.pull(out, left) if lane.can_send else 0
            left -= pulled
            if not lane.can_send:
                ring.popleft()
                lane.is_queued = False
            elif pulled:
                ring.popleft()
                bulk.append(lane)
            else:
                return  # its next frame is larger than what is left of the limit
