"""Calling off a drain that waits costs a fixed number of writes and steps, and no waiting (AD-24)."""

from __future__ import annotations

import asyncio

import pytest
from admin_requests import pause

from iop.admin.results import OperationCancelled
from iop.testing.admin_world import ADMIN, AdminWorld, run_world
from iop.testing.fake_participants import FaultKind


@pytest.mark.clause("AD-24", "AD-41")
@pytest.mark.parametrize("after_s", [0.0, 3.0, 31.0])
def test_a_cancelled_drain_ends_at_once(after_s: float) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            for rank in ("a/0", "b/1"):
                world.fleet.arm(FaultKind.HANG, rank, "PauseStep")  # work in flight that does not end
            operation_id = await world.submit(pause())
            await world.settle(1 + after_s)
            writes, steps, began = world.writes, len(world.fleet.calls), world.clock.monotonic()
            await world.core.cancel(ADMIN, operation_id, reason="changed my mind")
            ended = (await world.finish(operation_id))[-1].event
            assert isinstance(ended, OperationCancelled)
            assert ended.rolled_back
            assert world.clock.monotonic() - began < 0.05, "nothing is waited for"
            assert len(world.fleet.calls) - steps == 2, "one undo for each group"
            # Each write counts before and after: called off, reports, undo begun, its step, its reports, back, ended.
            assert world.writes - writes <= 2 * 8

    run_world(scenario)


@pytest.mark.clause("AD-24", "AD-41")
def test_a_drain_that_is_called_off_while_it_begins_ends_at_once_too() -> None:
    """Between acceptance and the first step nobody waits who could be woken: whoever begins to wait must look first."""

    async def scenario(world: AdminWorld, turns: int) -> None:
        async with world.server():
            for rank in ("a/0", "b/1"):
                world.fleet.arm(FaultKind.HANG, rank, "PauseStep")
            operation_id = await world.submit(pause())
            for _ in range(turns):
                await asyncio.sleep(0)
            began = world.clock.monotonic()
            await world.core.cancel(ADMIN, operation_id, reason="at once")
            ended = (await world.finish(operation_id))[-1].event
            assert isinstance(ended, OperationCancelled)
            assert world.clock.monotonic() - began < 0.5, f"called off after {turns} turns of the loop"

    for turns in range(40):
        run_world(lambda world, turns=turns: scenario(world, turns))
