"""What a refusal for an epoch that is over tells (AD-14)."""

from __future__ import annotations

import pytest
from admin_requests import resume

from iop.core.errors import PreconditionFailed
from iop.testing.admin_world import AdminWorld, run_world


@pytest.mark.clause("AD-14")
def test_a_stale_epoch_is_told_with_the_active_ones_also_when_there_are_none() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(resume(7))
            assert refusal.value.details == {"pause_epoch": "7", "active_epochs": "none"}

    run_world(scenario)
