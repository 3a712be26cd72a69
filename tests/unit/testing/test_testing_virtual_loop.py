"""The loop on virtual time: what the simulations rely on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from iop.testing.virtual_loop import CLOCK_RESOLUTION_S, LoopStalledError, VirtualLoop, run_virtual


def test_time_jumps_to_the_next_timer_and_stands_still_on_request():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await asyncio.sleep(3600.0)
        assert loop.time() == 3600.0
        fired = []
        loop.call_later(5.0, fired.append, True)
        cancelled = loop.call_later(1.0, fired.append, False)
        cancelled.cancel()
        assert loop.next_timer() == 3605.0
        loop.stand_still(10.0)
        assert not fired
        assert not loop.is_quiet()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert fired == [True]
        assert loop.is_quiet()
        assert loop.next_timer() is None

    run_virtual(main())


def test_a_callback_that_is_ready_is_no_quiet():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert loop.is_quiet()
        loop.call_soon(int)
        assert not loop.is_quiet()

    run_virtual(main())


def test_a_timer_that_sets_itself_again_until_its_moment_comes_to_it():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + 1.0
        turns = []

        def look() -> None:
            turns.append(loop.time())
            if loop.time() < at:
                loop.call_at(at, look)

        loop.call_at(at, look)
        await asyncio.sleep(1.0 - CLOCK_RESOLUTION_S / 2)
        for _ in range(10):
            await asyncio.sleep(0)  # always something ready: the clock does not move by itself
        assert turns[-1] == at
        assert len(turns) <= 2

    run_virtual(main())


def test_a_file_is_looked_at_though_something_is_always_ready():
    async def main() -> int:
        loop = asyncio.get_running_loop()
        seen = asyncio.Event()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop.add_reader(ours, seen.set)
            theirs.send(b"x")
            turns = 0
            while not seen.is_set() and turns < 1000:
                await asyncio.sleep(0)
                turns += 1
            loop.remove_reader(ours)
        return turns

    assert run_virtual(main()) < 1000


def test_a_wait_for_nothing_is_told():
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(LoopStalledError):
        run_virtual(main())
