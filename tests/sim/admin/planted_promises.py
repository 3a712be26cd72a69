"""More planted bugs, each with a scenario that states the promise which it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from admin_checks import (
    at_rest,
    check_at_rest,
    flush,
    pause,
    prepare,
    release,
    restore,
    resume,
    update,
)

from iop.admin import core as core_module
from iop.admin import crew, executor, intent, ledger, planner, reconcile, rollback
from iop.admin.enums import AdminErrorCode, CacheKind, CancelDisposition, ResourceKind
from iop.admin.gates import gates_of
from iop.admin.results import OperationCompleted, OperationFailed
from iop.admin.steps import CommitWeightsStep, FlushStep, ResumeStep, StepCall
from iop.core.errors import IopError
from iop.testing.admin_world import ADMIN, AdminWorld
from iop.testing.fake_participants import FaultKind
from iop.testing.memory_journal import MemoryJournal

Plant = Callable[[pytest.MonkeyPatch], None]
Scenario = Callable[[AdminWorld], Any]
WEIGHTS = ResourceKind.WEIGHTS


async def restarted_with_the_server(world: AdminWorld, name: str, writes: range) -> None:
    """The server and all engines die together; it goes on, and nobody is in doubt."""
    for after in writes:
        inner = AdminWorld({"a": 2, "b": 2})
        async with inner.server():
            request = await prepare(inner, name)
            inner.crash_at = inner.writes + after
            operation_id = await inner.submit(request)
            await at_rest(inner)
        inner.crash_at = None
        for group in "ab":
            inner.fleet.restart(group)
        async with inner.server():
            ended = (await inner.finish(operation_id))[-1].event
            if name == "release" or inner.store.records[operation_id].moves.committed:
                assert isinstance(ended, OperationCompleted), ended
            await at_rest(inner)
            await check_at_rest(inner)
            assert inner.store.desired.quarantines == {}


async def one_key_twice(world: AdminWorld) -> None:
    async with world.server():
        first = await world.run(flush("same"))
        assert await world.run(flush("same")) == first


async def closed_while_it_works(world: AdminWorld) -> None:
    def watch(call: StepCall) -> None:
        if isinstance(call.body, CommitWeightsStep | ResumeStep):
            assert not world.fleet.is_open(call.participant_ids[0]), call.body

    async with world.server():
        world.fleet.on_call = watch
        ended = (await world.run(update("op", "v1")))[-1].event
        assert isinstance(ended, OperationCompleted), ended


async def closed_until_reconciled(world: AdminWorld) -> None:
    async with world.server():
        await world.run(update("op", "v1"))
        await world.settle(5)

        def watch(call: StepCall) -> None:
            seen.append(world.fleet.is_open("a/0"))

        seen: list[bool] = []
        world.fleet.on_call = watch
        world.fleet.restart("a")
        world.core.participants_changed()
        await world.settle(5)
        assert seen
        assert not any(seen)


async def one_at_a_time(world: AdminWorld) -> None:
    async with world.server():
        world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
        await world.submit(flush("one"))
        with pytest.raises(IopError) as refused:
            await world.submit(flush("two"))
        assert refused.value.reason == "OPERATION_IN_PROGRESS"
        world.fleet.release_hangs.set()


async def too_late(world: AdminWorld) -> None:
    async with world.server():
        world.fleet.arm(FaultKind.HANG, "a/0", "CommitWeightsStep")
        operation_id = await world.submit(update("op", "v1"))
        await world.settle(1)
        told = await world.core.cancel(ADMIN, operation_id, reason="planted")
        assert told.disposition is CancelDisposition.TOO_LATE
        world.fleet.release_hangs.set()
        await at_rest(world)


async def stale_epoch(world: AdminWorld) -> None:
    async with world.server():
        await world.run(pause("one"))
        await world.run(resume("two", 1))
        with pytest.raises(IopError) as refused:
            await world.run(resume("three", 1))
        assert refused.value.reason == "STALE_EPOCH"


async def lost_in_time(world: AdminWorld) -> None:
    async with world.server():
        world.fleet.arm(FaultKind.DISCONNECT, "a/0", "PauseStep")
        # Whoever waits for the lost does so until the deadline, and busily: with a later one for minutes.
        operation_id = await world.submit(pause("op", deadline_ms=60_000))
        await world.settle(1)
        world.core.participants_changed()
        await world.settle(200)
        ended = (await world.finish(operation_id))[-1].event
        assert isinstance(ended, OperationFailed)
        assert ended.error.code is AdminErrorCode.PARTICIPANT_LOST


async def caches_of_old_weights_are_gone(world: AdminWorld) -> None:
    async with world.server():
        ended = (await world.run(update("op", "v1")))[-1].event
        assert isinstance(ended, OperationCompleted), ended
        assert {rank.cached[CacheKind.PREFIX] for rank in world.fleet.ranks.values()} == {0}


async def same_label_other_weights(world: AdminWorld) -> None:
    async with world.server():
        await world.run(update("op", "v1"))
        for rank in world.fleet.members("a"):
            rank.content = "somebody's own"
        await world.settle(100)
        await check_at_rest(world)


async def released_weights_are_the_published_ones(world: AdminWorld) -> None:
    async with world.server():
        await world.run(update("op", "v1"))
        await world.run(release("release", WEIGHTS))
        world.fleet.restart("a")
        world.core.participants_changed()
        await world.settle(10)
        ended = (await world.run(restore("restore", 2, WEIGHTS)))[-1].event
        assert isinstance(ended, OperationCompleted), ended


async def nothing_left_raises_nothing(world: AdminWorld) -> None:
    async with world.server():
        await world.run(pause("one"))
        revision = world.store.desired.revision
        for rank in world.fleet.ranks:
            world.fleet.arm(FaultKind.ERROR, rank)
        await world.run(resume("two", 1))
        assert world.store.desired.revision == revision


async def drift_is_found(world: AdminWorld) -> None:
    async with world.server():
        await world.run(pause("one"))
        for rank in world.fleet.members("a"):
            rank.paused = False
        await world.settle(100)
        await check_at_rest(world)


async def nobody_there(world: AdminWorld) -> None:
    async with world.server():
        for rank in world.fleet.ranks.values():
            rank.connected = False
        with pytest.raises(IopError) as refused:
            await world.run(flush("op"))
        assert refused.value.reason == "NO_PARTICIPANTS"


def _gates(patch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    patch.setattr(core_module, "gates_of", change)


def _without_flush(patch: pytest.MonkeyPatch) -> None:
    real = intent.update_phases

    def phases(*args: Any) -> Any:
        return tuple(p for p in real(*args) if not isinstance(p.body, FlushStep))

    patch.setattr(intent, "update_phases", phases)


def _released_as_they_come(patch: pytest.MonkeyPatch) -> None:
    real = reconcile._stale_weights

    def stale(desired: Any, members: Any, seen: Any) -> Any:
        held = [m for m in members if WEIGHTS not in reconcile.released_kinds(desired, m.participant_id)]
        return real(desired, held, seen)

    patch.setattr(reconcile, "_stale_weights", stale)


async def _no_revival(self: Any, seen: Any) -> None:
    return None


async def _no_full_look(self: Any, *args: Any, everybody: bool) -> None:
    return None


PROMISES: dict[str, tuple[Plant, Scenario]] = {
    "forgets that engines restarted": (
        lambda p: p.setattr(executor.Executor, "_revive", _no_revival),
        lambda w: restarted_with_the_server(w, "release", range(6, 12)),
    ),
    "reuses a dead process's step": (
        lambda p: p.setattr(ledger.Ledger, "is_open", lambda _self, record: record.result is None),
        lambda w: restarted_with_the_server(w, "release", range(6, 12)),
    ),
    "forgets keys": (lambda p: p.setattr(MemoryJournal, "_find_key", lambda *_: None), one_key_twice),
    "opens while it works": (
        lambda p: _gates(p, lambda desired, _running, *args, **more: gates_of(desired, {}, *args, **more)),
        closed_while_it_works,
    ),
    "opens before it has looked": (
        lambda p: _gates(
            p, lambda *args, unreconciled: gates_of(*args, unreconciled=unreconciled & frozenset())
        ),
        closed_until_reconciled,
    ),
    "lets operations overlap": (
        lambda p: p.setattr(planner, "conflict_refusals", lambda *_, **__: ()),
        one_at_a_time,
    ),
    "cancels after the commit": (
        lambda p: p.setattr(planner, "judge_cancel", lambda _record: CancelDisposition.CANCELLING),
        too_late,
    ),
    "takes any epoch": (lambda p: p.setattr(planner, "epoch_refusals", lambda *_: ()), stale_epoch),
    "waits for the lost": (lambda p: p.setattr(crew.Crew, "_drop_lost", lambda _self: None), lost_in_time),
    "keeps old caches": (_without_flush, caches_of_old_weights_are_gone),
    "trusts labels": (
        lambda p: p.setattr(
            reconcile, "_has_weights", lambda weights, _m, seen: seen.weight_version == weights.version
        ),
        same_label_other_weights,
    ),
    "releases what it finds": (_released_as_they_come, released_weights_are_the_published_ones),
    "says that nothing changed anything": (
        lambda p: p.setattr(rollback.Rollback, "_may_differ", lambda *_: True),
        nothing_left_raises_nothing,
    ),
    "looks at nobody who stays": (
        lambda p: p.setattr(core_module.Reconciler, "_begin", _no_full_look),
        drift_is_found,
    ),
    "takes the offline for there": (
        lambda p: p.setattr(planner, "check_participants", lambda _selection: None),
        nobody_there,
    ),
}
