"""Every planted bug is caught: a few in the ordinary run, all of them under ``IOP_SIM_PLANTED=1``."""

from __future__ import annotations

import logging
import os

import pytest
from edge_planted import PLANTED, seeds_until_caught

SEEDS_MAX = 2000
ORDINARY = {
    "late_close_fences_the_new_owner",
    "lease_returned_twice_on_cancel_and_close",
    "pump_before_offline",
    "ready_is_true_for_a_stale_owner",
    "cancel_never_reaches_the_node",
    "credit_leaked_on_cancel",
    "a_waiter_lost_at_the_gate",
    "a_grant_meets_the_cancelled_promise_of_one_who_leaves",
}
CHOSEN = [p for p in PLANTED if os.environ.get("IOP_SIM_PLANTED") or p.__name__ in ORDINARY]


@pytest.fixture(autouse=True)
def _quiet_logs():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("plant", CHOSEN, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant):
    caught = seeds_until_caught(plant, seeds=SEEDS_MAX)
    assert caught is not None, f"{plant.__name__} got away with {SEEDS_MAX} seeds"


def test_the_list_of_planted_bugs_is_long_enough():
    assert len(PLANTED) >= 20
    assert {p.__name__ for p in PLANTED} >= ORDINARY
