"""What both the memory link and real sockets must do, since code that was tested on one runs on the other."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from iop.testing.waiting import eventually


class RecordingEnd(asyncio.Protocol):
    """One end that remembers what it was told.

    Attributes:
        transport: set once connected.
        data: all bytes so far.
        log: ``made``, ``eof``, ``pause``, ``resume``, ``lost``.
    """

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.data = bytearray()
        self.log: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.log.append("made")

    def data_received(self, data: bytes) -> None:
        """Remember."""
        self.data += data

    def eof_received(self) -> bool:
        """Remember, and let the transport close."""
        self.log.append("eof")
        return False

    def pause_writing(self) -> None:
        """Remember."""
        self.log.append("pause")

    def resume_writing(self) -> None:
        """Remember."""
        self.log.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        """Remember."""
        self.log.append("lost")


class TransportSuite:
    """Subclass it in a test module and say how two ends are joined."""

    def join(self) -> AbstractAsyncContextManager[tuple[RecordingEnd, RecordingEnd]]:
        """Two connected ends; whatever is left is closed at the end of the block."""
        raise NotImplementedError

    async def test_bytes_arrive_in_order_both_ways(self) -> None:
        """Nothing is lost, nothing overtakes."""
        async with self.join() as (left, right):
            for n in range(200):
                left.transport.write(bytes([n]) * n)
                right.transport.write(bytes([n]))
            whole = b"".join(bytes([n]) * n for n in range(200))
            await eventually(lambda: bytes(right.data) == whole)
            await eventually(lambda: bytes(left.data) == bytes(range(200)))

    async def test_a_close_delivers_what_was_written_and_ends_both_sides_once(self) -> None:
        """The other side sees the end of the stream, then the loss; ours sees the loss alone."""
        async with self.join() as (left, right):
            left.transport.write(bytes(300_000))
            left.transport.close()
            await eventually(lambda: "lost" in left.log and "lost" in right.log)
            assert len(right.data) == 300_000
            assert right.log == ["made", "eof", "lost"]
            assert [entry for entry in left.log if entry not in {"pause", "resume"}] == ["made", "lost"]

    async def test_a_reader_that_pauses_pauses_its_writer(self) -> None:
        """Back-pressure reaches the writer's protocol, and goes when the reader goes on."""
        async with self.join() as (left, right):
            left.transport.set_write_buffer_limits(high=1, low=0)
            right.transport.pause_reading()
            written = 0
            while "pause" not in left.log:
                left.transport.write(bytes(1 << 20))
                written += 1 << 20
            await asyncio.sleep(0.05)
            assert left.log == ["made", "pause"]
            assert left.transport.get_write_buffer_size() > 0
            right.transport.resume_reading()
            await eventually(lambda: len(right.data) == written)
            assert left.log == ["made", "pause", "resume"]

    async def test_an_abort_is_lost_on_both_sides_and_writing_afterwards_is_harmless(self) -> None:
        """Nobody waits for the rest."""
        async with self.join() as (left, right):
            left.transport.abort()
            left.transport.write(b"nobody")
            await eventually(lambda: "lost" in left.log and "lost" in right.log)
            assert left.transport.is_closing()
            assert bytes(right.data) == b""
