"""The random histories again: operations select some by name or by model, and callers do not know of each other.

`IOP_SIM_SEEDS=FIRST:COUNT` chooses the seeds here, too.
"""

from __future__ import annotations

import dataclasses

import pytest
from test_sim_admin_random import Run, check_seeds, scenario

from iop.admin.permissions import PRESETS, Principal
from iop.admin.requests import AllTargets, ModelTargets, MutationRequest, ParticipantTargets
from iop.testing.admin_world import ADMIN, run_world

OTHER = Principal(name="other", permissions=PRESETS["admin"])
TARGETS = (
    AllTargets(),
    ModelTargets(models=("m-alias",)),
    ParticipantTargets(participant_ids=("a/0", "a/1")),
    ParticipantTargets(participant_ids=("b/0", "b/1")),
)


class SelectingRun(Run):
    """A run whose requests select anybody, and come from one caller or from another."""

    def request(self) -> MutationRequest:
        request = super().request()
        if not hasattr(request, "target"):
            return request
        return dataclasses.replace(request, target=self.random.choice(TARGETS))  # type: ignore[call-arg]

    def caller(self) -> Principal:
        return self.random.choice([ADMIN, OTHER])


@pytest.mark.clause("AD-18", "AD-19", "AD-29", "AD-35", "AD-39", "AD-41", "AD-42")
def test_histories_of_any_selectors_and_callers_end_consistent() -> None:
    check_seeds(SelectingRun)


FOUND = (133, 3252)
"""Seeds that found a bug once."""


@pytest.mark.clause("AD-42")
@pytest.mark.parametrize("seed", FOUND)
def test_a_history_that_found_a_bug_stays_clean(seed: int) -> None:
    run_world(lambda world: scenario(world, SelectingRun(world, seed)))
