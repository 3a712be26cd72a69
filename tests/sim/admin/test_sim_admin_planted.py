"""Planted bugs: each breaks one promise, and the simulation must notice. A check that never fails proves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from admin_checks import OPERATIONS, at_rest, check_at_rest, pause, prepare, update
from planted_promises import PROMISES

from iop.admin import core as core_module
from iop.admin import crew, executor, planner, recovery, rollback, settle
from iop.admin.enums import AdminErrorCode
from iop.admin.gates import gates_of
from iop.admin.journal import Acceptance, Advance
from iop.admin.results import OperationFailed
from iop.testing.admin_world import AdminWorld, run_world
from iop.testing.fake_participants import FaultKind


async def faulty(world: AdminWorld, name: str, kind: FaultKind, step: str) -> None:
    """One operation under one fault, checked at rest."""
    async with world.server():
        request = await prepare(world, name)
        world.fleet.arm(kind, "b/1", step)
        operation_id = await world.submit(request)
        await at_rest(world)
        ended = (await world.finish(operation_id))[-1].event
        assert isinstance(ended, OperationFailed)
        await check_at_rest(world)


async def quarantining(world: AdminWorld) -> None:
    """A release that fails, and whose undo fails on another group."""
    async with world.server():
        world.fleet.arm(FaultKind.ERROR, "b/1", "ReleaseStep")
        world.fleet.arm(FaultKind.LIE, "a/0", "RestoreStep", once=False)
        operation_id = await world.submit(await prepare(world, "release"))
        await at_rest(world)
        await world.finish(operation_id)
        await check_at_rest(world)


async def crashing(world: AdminWorld, name: str, writes: range) -> None:
    """One operation with a crash at some write, checked after recovery."""
    for after in writes:
        inner = AdminWorld({"a": 2, "b": 2})
        async with inner.server():
            request = await prepare(inner, name)
            inner.crash_at = inner.writes + after
            await inner.submit(request)
            await at_rest(inner)
        inner.crash_at = None
        async with inner.server():
            await at_rest(inner)
            await check_at_rest(inner)
            assert inner.store.desired.quarantines == {}


async def plain(world: AdminWorld) -> None:
    """Two operations that succeed, checked at rest."""
    async with world.server():
        await world.run(pause("one"))
        await world.run(update("two", "v1", quiesce=None))
        await at_rest(world)
        await check_at_rest(world)


def believe_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(crew, "judge", lambda goal, body, outcome, seen, *, phase: outcome.error)


def forget_undo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rollback, "undo_body", lambda *args: None)
    patch.setattr(rollback, "divergence", lambda *args: "")


def never_quarantine(patch: pytest.MonkeyPatch) -> None:
    real = settle.ended_badly

    def bad(snapshot: Any, record: Any, failure: Any, leftover: Any, **more: Any) -> Advance:
        return real(snapshot, record, failure, dataclasses.replace(leftover, quarantine={}), **more)

    patch.setattr(executor.settle, "ended_badly", bad)


def open_quarantines(patch: pytest.MonkeyPatch) -> None:
    def gates(desired: Any, *args: Any, **more: Any) -> Any:
        return gates_of(dataclasses.replace(desired, quarantines={}), *args, **more)

    patch.setattr(core_module, "gates_of", gates)


def forget_revision(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle, "risen", lambda desired: desired)


def leave_pause_after_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle, "without_operation", lambda desired, record: desired)


def accept_twice(patch: pytest.MonkeyPatch) -> None:
    real = planner.accept

    def accept(inp: Any, snapshot: Any) -> Acceptance:
        acceptance = real(inp, snapshot)
        first = dataclasses.replace(acceptance.first, events=acceptance.first.events * 2)
        return dataclasses.replace(acceptance, first=first)

    patch.setattr(planner, "accept", accept)


def resume_updates_blindly(patch: pytest.MonkeyPatch) -> None:
    """After a restart: complete at once, whatever was done."""
    real = executor.Executor._go_forward

    async def go(self: Any) -> Any:
        if self._is_recovery:
            return await self._complete()
        return await real(self)

    patch.setattr(executor.Executor, "_go_forward", go)


def never_recover(patch: pytest.MonkeyPatch) -> None:
    real = core_module.AdminCore._execute

    async def execute(self: Any, operation_id: Any, *, is_recovery: bool) -> None:
        if not is_recovery:
            await real(self, operation_id, is_recovery=False)

    patch.setattr(core_module.AdminCore, "_execute", execute)


def commit_before_verify(patch: pytest.MonkeyPatch) -> None:
    real = planner.accept

    def accept(inp: Any, snapshot: Any) -> Acceptance:
        acceptance = real(inp, snapshot)
        phases = [p for p in acceptance.spec.phases if "compare" not in p.action]
        spec = dataclasses.replace(acceptance.spec, phases=tuple(phases))
        return dataclasses.replace(acceptance, spec=spec)

    patch.setattr(planner, "accept", accept)


def roll_back_after_commit(patch: pytest.MonkeyPatch) -> None:
    real = recovery.plan_recovery

    def plan(record: Any, steps: Any) -> Any:
        if record.moves.committed:
            return recovery.RecoveryPlan(
                direction=recovery.Direction.BACK,
                failure=recovery.AdminError(code=AdminErrorCode.INTERRUPTED, message="planted"),
            )
        return real(record, steps)

    patch.setattr(executor, "plan_recovery", plan)


LIE, ERROR, DISCONNECT = FaultKind.LIE, FaultKind.ERROR, FaultKind.DISCONNECT

PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[AdminWorld], Any]]] = {
    "believes answers": (believe_answers, lambda w: faulty(w, "pause", LIE, "PauseStep")),
    "forgets the undo": (forget_undo, lambda w: faulty(w, "pause", ERROR, "PauseStep")),
    "never quarantines": (never_quarantine, quarantining),
    "opens quarantines": (open_quarantines, quarantining),
    "forgets the revision": (forget_revision, plain),
    "keeps a failed pause": (leave_pause_after_failure, lambda w: faulty(w, "pause", ERROR, "PauseStep")),
    "accepts twice": (accept_twice, plain),
    "completes blindly": (resume_updates_blindly, lambda w: crashing(w, "pause", range(3, 9))),
    "never recovers": (never_recover, lambda w: crashing(w, "pause", range(3, 9))),
    "commits unverified": (
        commit_before_verify,
        lambda w: faulty(w, "update", FaultKind.WRONG_DIGEST, "ApplyWeightsStep"),
    ),
    "rolls back after commit": (roll_back_after_commit, lambda w: crashing(w, "update", range(15, 40))),
    **PROMISES,
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_checks_notice_a_planted_bug(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, scenario = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(BaseException) as noticed:  # noqa: PT011 - assertions arrive in groups
        run_world(scenario)
    assert noticed.value is not None


@pytest.mark.parametrize("name", PLANTED)
def test_the_same_scenario_passes_without_the_bug(name: str) -> None:
    _, scenario = PLANTED[name]
    run_world(scenario)


def test_every_operation_can_be_prepared() -> None:
    async def scenario(world: AdminWorld) -> None:
        for name in OPERATIONS:
            inner = AdminWorld({"a": 2, "b": 2})
            async with inner.server():
                await inner.run(await prepare(inner, name))
                await at_rest(inner)
                await check_at_rest(inner)

    run_world(scenario)
