"""What observers may rely on when they see an operation's end."""

from __future__ import annotations

import asyncio

import pytest
from admin_requests import pause, resume

from iop.admin.results import OperationCompleted
from iop.testing.admin_world import AdminWorld, run_world


@pytest.mark.clause("AD-39", "AD-42")
def test_a_resume_is_complete_only_when_its_gates_are_open():
    async def scenario(world: AdminWorld) -> None:
        world.fleet.gate_delay_s = (
            0.5  # an outer admission that takes its time, as one over many surfaces may
        )
        async with world.server():
            paused = await world.run(pause())
            completed = paused[-1].event
            assert isinstance(completed, OperationCompleted)
            assert not world.fleet.is_open("a/0")
            seen = await world.run(resume(1))
            assert isinstance(seen[-1].event, OperationCompleted)
            assert all(world.fleet.is_open(rank) for rank in ("a/0", "a/1", "b/0", "b/1"))

    run_world(scenario)


@pytest.mark.clause("AD-21")
def test_a_driver_whose_gates_hang_does_not_hide_the_end():
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            world.fleet.gate_delay_s = 3600.0
            async with asyncio.timeout(120.0):
                seen = await world.run(resume(1))
            assert isinstance(seen[-1].event, OperationCompleted)

    run_world(scenario)
