"""The random histories again: operations select some by name or by model, and callers do not know of each other.

`IOP_SIM_SEEDS=FIRST:COUNT` chooses the seeds here, too.
"""

from __future__ import annotations

import dataclasses

import pytest
from admin_checks import at_rest, check_at_rest
from test_sim_admin_random import Run, _seeds

from iop.admin.permissions import PRESETS, Principal
from iop.admin.requests import AllTargets, ModelTargets, MutationRequest, ParticipantTargets
from iop.core.ids import OperationId
from iop.testing.admin_world import ADMIN, AdminWorld, run_world

OTHER = Principal(name="other", permissions=PRESETS["admin"])
TARGETS = (
    AllTargets(),
    ModelTargets(models=("m-alias",)),
    ParticipantTargets(participant_ids=("a/0", "a/1")),
    ParticipantTargets(participant_ids=("b/0", "b/1")),
)


class SelectingRun(Run):
    """A run whose requests select anybody."""

    def request(self) -> MutationRequest:
        request = super().request()
        if not hasattr(request, "target"):
            return request
        return dataclasses.replace(request, target=self.random.choice(TARGETS))  # type: ignore[call-arg]


class ManyCallers(AdminWorld):
    """A world whose submissions are of one caller or of another."""

    run_of: SelectingRun

    async def submit(self, request: MutationRequest, principal: Principal = ADMIN) -> OperationId:
        return await super().submit(request, self.run_of.random.choice([ADMIN, OTHER]))


async def scenario(world: AdminWorld, seed: int) -> None:
    world.__class__ = ManyCallers
    assert isinstance(world, ManyCallers)
    run = world.run_of = SelectingRun(world, seed)
    for _ in range(3):
        await run.serve(may_crash=run.random.random() < 0.7)
    world.crash_at = None
    world.fleet.faults.clear()
    world.fleet.release_hangs.set()
    for group in "ab":
        world.fleet.reconnect(group)
    async with world.server():
        await at_rest(world, within_s=5_000)
        await world.settle(40)
        await check_at_rest(world)
        check_nobody_serves_without_what_was_released(world)
        for group in "ab":
            world.fleet.restart(group)
        world.core.participants_changed()
        await at_rest(world)
        await check_at_rest(world)
        check_nobody_serves_without_what_was_released(world)
        assert world.store.desired.quarantines == {}


def check_nobody_serves_without_what_was_released(world: AdminWorld) -> None:
    """Released memory is released under a pause (AD-42, AD-43)."""
    for participant, rank in world.fleet.ranks.items():
        assert not (rank.released and world.fleet.is_open(participant)), (
            f"{participant} serves without memory"
        )


@pytest.mark.clause("AD-18", "AD-19", "AD-29", "AD-35", "AD-39", "AD-41", "AD-42")
def test_histories_of_any_selectors_and_callers_end_consistent() -> None:
    for seed in _seeds():
        try:
            run_world(lambda world, s=seed: scenario(world, s))  # type: ignore[misc]
        except BaseException as exc:
            raise AssertionError(f"seed {seed}; replay with IOP_SIM_SEEDS={seed}:1") from exc


FOUND = (133,)
"""Seeds that found a bug once."""


@pytest.mark.clause("AD-42")
@pytest.mark.parametrize("seed", FOUND)
def test_a_history_that_found_a_bug_stays_clean(seed: int) -> None:
    run_world(lambda world: scenario(world, seed))
