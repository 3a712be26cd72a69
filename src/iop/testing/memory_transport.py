"""Two asyncio transports joined in memory, with the faults of a network on demand.

Each direction is a pipe with a capacity, as a kernel's socket buffer has one: a writer whose reader does not read gets
paused. What a pipe may do is said by its :class:`Faults`, which a test changes while it runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

PIPE_CAPACITY_BYTES: Final = 256 * 1024

LeftT = TypeVar("LeftT", bound=asyncio.Protocol)
RightT = TypeVar("RightT", bound=asyncio.Protocol)


@dataclass(slots=True, kw_only=True)
class Faults:
    """What one direction does to bytes.

    Attributes:
        delay_s: until a piece is delivered; pieces stay in order.
        piece_bytes_max: largest piece delivered at once; absent: as written.
        capacity_bytes: how much it takes before the writer must keep the rest: short writes.
        is_stalled: takes bytes up to its capacity and delivers nothing; the other side sees neither data nor an end.
    """

    delay_s: float = 0.0
    piece_bytes_max: int | None = None
    capacity_bytes: int = PIPE_CAPACITY_BYTES
    is_stalled: bool = False


class _Pipe:
    """One direction."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.faults = Faults()
        self.writer: MemoryTransport
        self.reader: MemoryTransport
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._is_due = False
        self._has_end = False
        self.delivered_bytes = 0

    def offer(self, data: bytes) -> int:
        """Take what fits; returns how much that was."""
        taken = min(len(data), max(self.faults.capacity_bytes - self._size, 0))
        if taken:
            self._pieces.append(data[:taken])
            self._size += taken
            self.look()
        return taken

    def end(self) -> None:
        """After what is in it, the reader sees the end of the stream."""
        self._has_end = True
        self.look()

    def clear(self) -> None:
        self._pieces.clear()
        self._size = 0

    def look(self) -> None:
        """Deliver later, if there is something and the reader may have it."""
        if self._is_due or self.faults.is_stalled or self.reader.is_reading_paused:
            return
        if self._pieces or self._has_end:
            self._is_due = True
            self.loop.call_later(self.faults.delay_s, self._deliver)

    def _deliver(self) -> None:
        self._is_due = False
        if self.faults.is_stalled or self.reader.is_reading_paused:
            return
        if self._pieces:
            piece = self._pieces.popleft()
            limit = self.faults.piece_bytes_max
            if limit is not None and len(piece) > limit:
                self._pieces.appendleft(piece[limit:])
                piece = piece[:limit]
            self._size -= len(piece)
            self.delivered_bytes += len(piece)
            self.reader.receive(piece)
            self.writer.drain()
        elif self._has_end:
            self._has_end = False
            self.reader.receive_end()
        self.look()


class MemoryTransport(asyncio.Transport):
    """One end of a memory link."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, out: _Pipe, into: _Pipe, name: str) -> None:
        super().__init__({"peername": (name, 0), "sockname": ("memory", 0)})
        self._loop = loop
        self._out = out
        self._into = into
        self._protocol: asyncio.Protocol | None = None
        self._kept = bytearray()
        self._high = 64 * 1024
        self._low = 16 * 1024
        self._is_paused = False
        self._is_closing = False
        self._is_lost = False
        self.is_reading_paused = False

    def start(self, protocol: asyncio.Protocol) -> None:
        """Give it its protocol and let it hear of the connection."""
        self._protocol = protocol
        protocol.connection_made(self)

    # ---- asyncio.Transport ----

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._kept)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False
        self._into.look()

    def is_reading(self) -> bool:
        return not self.is_reading_paused and not self._is_closing

    def write(self, data: Any) -> None:
        if self._is_closing or self._is_lost:
            return
        self._kept += data
        self.drain()
        if len(self._kept) > self._high and not self._is_paused and self._protocol is not None:
            self._is_paused = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.drain()

    def abort(self) -> None:
        self._kept.clear()
        self._out.clear()
        self.lose(None)
        peer = self._out.reader
        self._loop.call_soon(peer.lose, ConnectionResetError("reset by peer"))

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    # ---- for pipes and tests ----

    def drain(self) -> None:
        """Push what was kept into the pipe."""
        if self._is_lost:
            return
        if self._kept:
            taken = self._out.offer(bytes(self._kept))
            del self._kept[:taken]
        if self._is_paused and len(self._kept) <= self._low and self._protocol is not None:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing and not self._kept:
            self._out.end()
            self.lose(None)

    def receive(self, data: bytes) -> None:
        """Bytes for the protocol; dropped once it is closing, as a socket does."""
        if self._protocol is not None and not self._is_lost and not self._is_closing:
            self._protocol.data_received(data)

    def receive_end(self) -> None:
        """The other side closed."""
        if self._protocol is not None and not self._is_lost:
            if not self._is_closing:
                self._protocol.eof_received()
            self.close()

    def lose(self, error: Exception | None) -> None:
        """The protocol hears once that the connection is gone."""
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error)


class MemoryLink(Generic[LeftT, RightT]):
    """A connection between two protocols.

    Attributes:
        left: the one that dialled, with its transport.
        right: the one that was dialled, with its transport.
        to_right: faults of the direction from left to right.
        to_left: faults of the other one.
    """

    def __init__(self, left: Callable[[], LeftT], right: Callable[[], RightT]) -> None:
        loop = asyncio.get_running_loop()
        self._to_right = _Pipe(loop)
        self._to_left = _Pipe(loop)
        self.left_transport = MemoryTransport(loop, out=self._to_right, into=self._to_left, name="right")
        self.right_transport = MemoryTransport(loop, out=self._to_left, into=self._to_right, name="left")
        self._to_right.writer = self._to_left.reader = self.left_transport
        self._to_left.writer = self._to_right.reader = self.right_transport
        self.right = right()
        self.left = left()
        self.right_transport.start(self.right)
        self.left_transport.start(self.left)

    @property
    def to_right(self) -> Faults:
        """Change it, then call :meth:`look`."""
        return self._to_right.faults

    @property
    def to_left(self) -> Faults:
        """Change it, then call :meth:`look`."""
        return self._to_left.faults

    @property
    def delivered_bytes(self) -> tuple[int, int]:
        """Bytes that arrived so far: (at the right, at the left)."""
        return self._to_right.delivered_bytes, self._to_left.delivered_bytes

    def look(self) -> None:
        """Faults changed: deliver what may be delivered now."""
        for pipe in (self._to_right, self._to_left):
            pipe.writer.drain()
            pipe.look()

    def stall(self) -> None:
        """Both directions go silent while the connection stays open: a half-open TCP connection."""
        self.to_left.is_stalled = self.to_right.is_stalled = True

    def heal(self) -> None:
        """End a stall; what was under way arrives."""
        self.to_left.is_stalled = self.to_right.is_stalled = False
        self.look()

    def cut(self) -> None:
        """Both sides lose the connection; what was under way is gone."""
        self._to_left.clear()
        self._to_right.clear()
        self.left_transport.lose(ConnectionResetError("cut"))
        self.right_transport.lose(ConnectionResetError("cut"))
