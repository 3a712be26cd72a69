"""Faults at the Edge: every step, fault and rank, over Nodes, in the words of the wire (AD-30 to AD-39)."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from admin_checks import OPERATIONS, at_rest, check_at_rest, opts, prepare
from edge_admin_world import EdgeWorld
from test_sim_admin_faults import CELLS, STEPS, Cell

from iop.admin.results import OperationCompleted, OperationFailed
from iop.testing.fake_participants import FaultKind
from iop.testing.virtual_loop import run_virtual

RANKS = {"a/0": "n1/main/0", "a/1": "n1/main/1", "b/0": "n2/main/0", "b/1": "n2/main/1"}
EDGE_CELLS = tuple(cell._replace(rank=RANKS[cell.rank]) for cell in CELLS)


async def _rested(world: EdgeWorld) -> None:
    await at_rest(world)
    world.take_gates()
    await check_at_rest(world)


async def _one_fault(cell: Cell) -> None:
    world = EdgeWorld()
    async with asyncio.timeout(100_000), world.server():
        request = await prepare(world, cell.name)
        world.fleet.arm(cell.kind, cell.rank, cell.step, once=cell.is_once)
        operation_id = await world.submit(request)
        await _rested(world)
        ended = (await world.finish(operation_id))[-1].event
        if isinstance(ended, OperationFailed):
            assert set(ended.error.quarantined) == {
                p for q in world.store.desired.quarantines.values() for p in q.participant_ids
            }
        world.heal(cell.rank.rpartition("/")[0])
        await world.settle(
            45
        )  # an engine that restarted behind its Node is noticed by the periodic read-back
        await _rested(world)
        assert world.store.desired.quarantines == {}
        if isinstance(ended, OperationCompleted):
            return
        if cell.name == "update" and world.store.desired.weights["m"].version == "v2":
            return  # it rolled forward: the version is published
        again = (await world.run(dataclasses.replace(request, options=opts("retry"))))[-1].event
        assert isinstance(again, OperationCompleted), again
        await _rested(world)


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-25", "AD-29", "AD-30", "AD-31", "AD-32", "AD-36", "AD-37", "AD-38", "AD-39")
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_at_any_step_under_an_edge_ends_consistent_or_quarantined(name: str, kind: FaultKind) -> None:
    for cell in EDGE_CELLS:
        if (cell.name, cell.kind) == (name, kind):
            try:
                run_virtual(_one_fault(cell))
            except BaseException as exc:
                raise AssertionError(str(cell)) from exc


def test_the_edge_has_every_cell_too() -> None:
    assert len(EDGE_CELLS) == 648
    assert {(cell.name, cell.step) for cell in EDGE_CELLS} == {
        (name, step) for name, steps in STEPS.items() for step in steps
    }
