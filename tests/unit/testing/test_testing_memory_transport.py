"""The memory link behaves as sockets do, faults included."""

from __future__ import annotations

import asyncio

import pytest

from iop.testing.cancel_sweep import SweepPoint, cancel_at, sweep
from iop.testing.memory_transport import MemoryLink
from iop.testing.virtual_loop import run_virtual


class End(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.pieces: list[bytes] = []
        self.log: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.log.append("made")

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def eof_received(self) -> bool:
        self.log.append("eof")
        return False

    def pause_writing(self) -> None:
        self.log.append("pause")

    def resume_writing(self) -> None:
        self.log.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.log.append(f"lost {type(exc).__name__}")


def link() -> MemoryLink[End, End]:
    return MemoryLink(End, End)


def test_bytes_arrive_in_order_and_a_close_ends_both_sides() -> None:
    async def scenario() -> None:
        subject = link()
        for piece in (b"a", b"b", b"c"):
            subject.left_transport.write(piece)
        subject.left_transport.close()
        await asyncio.sleep(1)
        assert b"".join(subject.right.pieces) == b"abc"
        assert subject.right.log == ["made", "eof", "lost NoneType"]
        assert subject.left.log == ["made", "lost NoneType"]

    run_virtual(scenario())


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_pieces_are_cut_and_delayed_as_asked(piece: int) -> None:
    async def scenario() -> None:
        subject = link()
        subject.to_right.piece_bytes_max = piece
        subject.to_right.delay_s = 0.5
        subject.left_transport.write(b"abcde")
        await asyncio.sleep(0.49)
        assert subject.right.pieces == []
        await asyncio.sleep(10)
        assert subject.right.pieces == [b"abcde"[at : at + piece] for at in range(0, 5, piece)]

    run_virtual(scenario())


def test_a_full_pipe_pauses_its_writer_until_the_reader_reads() -> None:
    async def scenario() -> None:
        subject = link()
        subject.to_right.capacity_bytes = 10
        subject.left_transport.set_write_buffer_limits(high=1, low=0)
        subject.right_transport.pause_reading()
        subject.left_transport.write(bytes(25))
        await asyncio.sleep(1)
        assert subject.left.log == ["made", "pause"]
        assert subject.left_transport.get_write_buffer_size() == 15
        subject.right_transport.resume_reading()
        await asyncio.sleep(1)
        assert subject.left.log == ["made", "pause", "resume"]
        assert sum(map(len, subject.right.pieces)) == 25

    run_virtual(scenario())


def test_a_stall_shows_neither_data_nor_end_until_it_heals() -> None:
    async def scenario() -> None:
        subject = link()
        subject.stall()
        subject.left_transport.write(b"x")
        subject.left_transport.close()
        await asyncio.sleep(100)
        assert (subject.right.pieces, subject.right.log) == ([], ["made"])
        subject.heal()
        await asyncio.sleep(1)
        assert (subject.right.pieces, subject.right.log) == ([b"x"], ["made", "eof", "lost NoneType"])

    run_virtual(scenario())


def test_a_cut_and_an_abort_lose_what_was_under_way() -> None:
    async def scenario() -> None:
        for way in ("cut", "abort"):
            subject = link()
            subject.to_right.delay_s = 1
            subject.left_transport.write(b"x")
            if way == "cut":
                subject.cut()
            else:
                subject.left_transport.abort()
            await asyncio.sleep(2)
            assert subject.right.pieces == []
            assert subject.right.log == ["made", "lost ConnectionResetError"]

    run_virtual(scenario())


async def test_a_sweep_cancels_at_every_suspension_and_finds_what_leaks() -> None:
    held: list[str] = []

    async def leaks() -> None:
        held.append("lease")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        held.remove("lease")

    async def careful() -> None:
        held.append("lease")
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            held.remove("lease")

    async def check(_: SweepPoint) -> None:
        assert held == []

    assert await sweep(careful, check) == 2
    with pytest.raises(AssertionError):
        await sweep(leaks, check)


async def test_a_swallowed_cancellation_is_found() -> None:
    async def swallows() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return

    async def check(_: SweepPoint) -> None: ...

    with pytest.raises(AssertionError, match="swallowed"):
        await sweep(swallows, check)
    point = await cancel_at(swallows(), 1)
    assert point.was_reached
    assert not point.was_cancelled
