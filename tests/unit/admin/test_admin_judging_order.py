"""A judgement never stands in the way of the operation that it is about (AD-36, AD-47)."""

from __future__ import annotations

import pytest
from admin_requests import reconfigure

from iop.admin.steps import JudgeReconfigureStep, ReconfigureStep
from iop.testing.admin_world import AdminWorld, LoopClock, run_world


class TickingClock(LoopClock):
    """A clock on which no two looks give the same time, as on a real machine."""

    def __init__(self) -> None:
        self._looks = 0

    def unix_nanos(self) -> int:
        self._looks += 1
        return super().unix_nanos() + self._looks * 1_000_000


@pytest.mark.clause("AD-47", "AD-36")
def test_the_judgement_is_not_newer_than_the_steps_of_its_operation() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.clock = TickingClock()
        async with world.server():
            await world.run(reconfigure(4))
            judged = [c for c in world.fleet.calls if isinstance(c.body, JudgeReconfigureStep)]
            carried_out = [c for c in world.fleet.calls if isinstance(c.body, ReconfigureStep)]
            assert judged
            assert carried_out
            assert max((c.ordinal, c.step) for c in judged) < min((c.ordinal, c.step) for c in carried_out)

    run_world(scenario)
