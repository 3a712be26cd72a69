"""The Edge with real sessions over faulty links on virtual time; seeds as in ``test_edge_sim``."""

from __future__ import annotations

import logging
import os

import pytest
from edge_planted import planted
from edge_world import SimulationError
from fleet_world import run_fleet_seed

from iop.edge.attempt import Attempt
from iop.edge.dispatch import Dispatcher
from iop.net.edge_connection import OutboundHandle

SHORT = 15
SHARE = 4
"""A long run has a quarter as many seeds here as over scripted connections, where most decisions are made."""

BLOCK = 250


def _blocks() -> list[range]:
    one = os.environ.get("IOP_SIM_SEED", "")
    if one:
        return [range(int(one), int(one) + 1)]
    wanted = os.environ.get("IOP_SIM_SEEDS")
    count = max(1, int(wanted) // SHARE) if wanted else SHORT
    return [range(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]


@pytest.fixture(autouse=True)
def _quiet_logs():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.clause(
    "EN-30", "EN-31", "EN-33", "EN-56", "EN-57", "EN-102", "EN-103", "EN-106", "EN-112", "EN-113", "EN-117",
)  # fmt: skip
@pytest.mark.parametrize("seeds", _blocks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_fleet_over_faulty_links_executes_once_and_leaves_nothing_behind(seeds):
    for seed in seeds:
        run_fleet_seed(seed)


def _nothing_is_handed_over(patch):
    patch(OutboundHandle, "is_handed_over", property(lambda self: False))


def _credit_is_never_returned(patch):
    patch(Attempt, "consumed", lambda self, size_bytes: None)


def _a_fence_tells_nobody(patch):
    right = Dispatcher.lose
    patch(Dispatcher, "lose", lambda self, leases, settlements: right(self, (), settlements))


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_nothing_is_handed_over, _credit_is_never_returned, _a_fence_tells_nobody])
def test_bugs_that_only_the_wire_shows_are_caught(plant):
    with planted(plant), pytest.raises(SimulationError):
        _run_many()


def _run_many() -> None:
    for seed in range(200):
        run_fleet_seed(seed)
