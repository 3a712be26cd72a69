"""Sentences of the contract that only a second look at odd states shows to be held or not."""

from __future__ import annotations

import pytest
from admin_requests import ABORT, DRAIN, A, B, pause, release, resume

from iop.admin.enums import ResourceKind
from iop.admin.results import OperationCompleted
from iop.core.errors import PreconditionFailed
from iop.testing.admin_world import AdminWorld, run_world


@pytest.mark.clause("AD-42", "AD-48")
@pytest.mark.parametrize("comes_back_as", ["it was", "another process"])
def test_a_pause_cannot_end_while_somebody_who_is_away_has_released_memory_under_it(
    comes_back_as: str,
) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            await world.run(release("give", ResourceKind.KV_CACHE, spec=None, target=B))
            world.fleet.disconnect("b")
            world.core.participants_changed()
            await world.settle()
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(resume(1))
            assert refusal.value.reason == "RESOURCES_RELEASED"
            assert refusal.value.details["participants"] == "b/0,b/1"
            if comes_back_as == "it was":
                world.fleet.reconnect("b")
            else:
                world.fleet.restart("b")
            world.core.participants_changed()
            await world.settle(5.0)
            assert not world.fleet.is_open("b/0"), "it holds memory back, so it takes no inference"
            assert world.fleet.ranks["b/0"].paused  # type: ignore[index]
            # Who left the configuration for good holds nobody up.
            for rank in world.fleet.members("b"):
                del world.fleet.ranks[rank.participant_id]
            assert isinstance((await world.run(resume(1, "again")))[-1].event, OperationCompleted)

    run_world(scenario)
