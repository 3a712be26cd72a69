"""A fault at every step of every operation on a rank: all-old, all-new, or quarantined and named (AD-31, AD-32)."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
from admin_checks import OPERATIONS, at_rest, check_at_rest, opts, prepare

from iop.admin.results import OperationCompleted, OperationFailed
from iop.testing.admin_world import AdminWorld, run_world
from iop.testing.fake_participants import FaultKind

STEPS = {
    "flush": ("FlushStep",),
    "pause": ("PauseStep",),
    "resume": ("ResumeStep",),
    "release": ("PauseStep", "ReleaseStep"),
    "restore": ("RestoreStep",),
    "update": (
        "PrepareWeightsStep",
        "PauseStep",
        "ApplyWeightsStep",
        "VerifyWeightsStep",
        "CommitWeightsStep",
        "FlushStep",
        "ResumeStep",
    ),
    "start_profile": ("StartProfileStep",),
    "stop_profile": ("StopProfileStep",),
    "reconfigure": ("ReconfigureStep",),
}


class Cell(NamedTuple):
    """One fault at one step of one operation on one rank."""

    name: str
    step: str
    kind: FaultKind
    rank: str
    is_once: bool


CELLS = tuple(
    Cell(name, step, kind, rank, is_once)
    for name in OPERATIONS
    for step in STEPS[name]
    for kind in FaultKind
    # A wrong digest is a fault of the step that puts weights in place.
    if kind is not FaultKind.WRONG_DIGEST or step == "ApplyWeightsStep"
    for rank in ("a/0", "a/1", "b/0", "b/1")
    for is_once in (True, False)
)
UNDO = {
    "pause": "ResumeStep",
    "release": "RestoreStep",
    "update": "UndoWeightsStep",
    "start_profile": "StopProfileStep",
}


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-29", "AD-30", "AD-31", "AD-32", "AD-37", "AD-38", "AD-39")
@pytest.mark.parametrize("kind", list(FaultKind))
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_fault_at_any_step_ends_consistent_or_quarantined(name: str, kind: FaultKind) -> None:
    for cell in CELLS:
        if (cell.name, cell.kind) == (name, kind):
            _one_fault(name, kind, cell.step, cell.rank, is_once=cell.is_once)


def test_the_matrix_has_every_step_that_an_operation_sends() -> None:
    async def scenario(world: AdminWorld) -> None:
        for name in OPERATIONS:
            inner = AdminWorld({"a": 2, "b": 2})
            async with inner.server():
                request = await prepare(inner, name)
                inner.fleet.calls.clear()
                await inner.run(request)
                sent = [type(c.body).__name__ for c in inner.fleet.calls if c.group_id == "a"]
                assert tuple(s for s in sent if s != "JudgeReconfigureStep") == STEPS[name]

    run_world(scenario)
    assert {cell.rank for cell in CELLS} == {"a/0", "a/1", "b/0", "b/1"}
    assert len(CELLS) == 648


def _one_fault(name: str, kind: FaultKind, step: str, rank: str, *, is_once: bool) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            request = await prepare(world, name)
            world.fleet.arm(kind, rank, step, once=is_once)
            operation_id = await world.submit(request)
            await at_rest(world)
            await check_at_rest(world)
            ended = (await world.finish(operation_id))[-1].event
            # A running engine refills an emptied cache at once, so only its own word tells there.
            is_told = not (kind is FaultKind.LIE and step == "FlushStep")
            if kind in {FaultKind.ERROR, FaultKind.LIE} and is_told and name != "update":
                assert isinstance(ended, OperationFailed), ended
            if isinstance(ended, OperationFailed):
                assert set(ended.error.quarantined) == {
                    p for q in world.store.desired.quarantines.values() for p in q.participant_ids
                }
            world.fleet.faults.clear()
            world.fleet.release_hangs.set()
            world.fleet.restart(rank[0])
            world.core.participants_changed()
            await at_rest(world)
            await check_at_rest(world)
            assert world.store.desired.quarantines == {}
            if isinstance(ended, OperationCompleted):
                return
            retry = dataclasses.replace(request, options=opts("retry"))
            if name == "update" and world.store.desired.weights["m"].version == "v2":
                return  # it rolled forward: the version is published
            again = (await world.run(retry))[-1].event
            assert isinstance(again, OperationCompleted), again
            await at_rest(world)
            await check_at_rest(world)

    try:
        run_world(scenario)
    except BaseException as exc:
        raise AssertionError(f"{name} {kind.name} at {step} of {rank} once={is_once}") from exc


@pytest.mark.clause("AD-25", "AD-31")
@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.HANG, FaultKind.LIE, FaultKind.DISCONNECT])
@pytest.mark.parametrize("name", sorted(UNDO))
def test_a_failed_undo_quarantines_the_group_and_names_it(name: str, kind: FaultKind) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            request = await prepare(world, name)
            world.fleet.arm(FaultKind.ERROR, "b/1", STEPS[name][-4 if name == "update" else -1])
            world.fleet.arm(kind, "a/0", UNDO[name], once=False)
            operation_id = await world.submit(request)
            await at_rest(world)
            ended = (await world.finish(operation_id))[-1].event
            assert isinstance(ended, OperationFailed)
            if kind is not FaultKind.LIE or name != "start_profile":
                assert ended.error.quarantined == ("a/0", "a/1")
                assert not ended.error.rolled_back
                assert not world.fleet.is_open("a/0")

    run_world(scenario)
