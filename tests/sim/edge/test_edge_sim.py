"""The Edge under random faults on virtual time.

``IOP_SIM_SEEDS=n`` runs seeds 0 to n-1, ``IOP_SIM_SEED=s`` replays one; without them a short representative runs.
"""

from __future__ import annotations

import logging
import os

import pytest
from edge_world import run_seed

SHORT = 40
BLOCK = 250
"""Seeds per test, so that a long run shows progress and names the block that failed."""


def _blocks() -> list[range]:
    one = os.environ.get("IOP_SIM_SEED", "")
    if one:
        return [range(int(one), int(one) + 1)]
    count = int(os.environ.get("IOP_SIM_SEEDS") or SHORT)
    return [range(start, min(start + BLOCK, count)) for start in range(0, count, BLOCK)]


@pytest.fixture(autouse=True)
def _quiet_logs():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.clause(
    "EN-11", "EN-13", "EN-14", "EN-15", "EN-30", "EN-31", "EN-32", "EN-33", "EN-34", "EN-56", "EN-102",
    "EN-110", "EN-111", "EN-112", "EN-114", "EN-115", "EN-116", "EN-118", "AD-39",
)  # fmt: skip
@pytest.mark.parametrize("seeds", _blocks(), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_what_must_always_hold_holds_for_every_seed(seeds):
    for seed in seeds:
        run_seed(seed)


def test_a_seed_replays_the_same_history():
    from edge_world import World

    from iop.testing.virtual_loop import run_virtual

    histories = []
    for _ in range(2):
        world = World(7)
        run_virtual(world.run())
        histories.append((list(world.trace), [(c.number, c.ends, c.body) for c in world.callers]))
    assert histories[0] == histories[1]
