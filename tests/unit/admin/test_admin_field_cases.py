"""Cases from the field at the operation core: one key and many callers, one rank that fails, a server that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from admin_requests import flush, pause, release, update

from iop.admin.enums import AdminErrorCode, AdminOperationState, CancelDisposition, ParticipantPhase
from iop.admin.participant import ProgressSink
from iop.admin.requests import MutationRequest
from iop.admin.results import (
    AdminOperationEvent,
    OperationCompleted,
    OperationFailed,
    ParticipantStatus,
    ParticipantUpdate,
)
from iop.admin.steps import StepCall, StepResult
from iop.core.errors import AlreadyExists, Conflict
from iop.testing.admin_world import ADMIN, AdminWorld, run_world
from iop.testing.fake_participants import FaultKind

FOUR_RANKS = {"a": 4}


def flushes(world: AdminWorld) -> int:
    """How often a rank was emptied."""
    return sum(name == "FlushStep" for name, _ in world.fleet.effects)


# ---- P-22: one id, many callers ----


@pytest.mark.case("P-22")
@pytest.mark.clause("AD-12", "AD-13")
def test_one_key_is_one_operation_while_it_runs_after_it_and_after_a_restart() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
            held = await world.submit(flush("held"))
            await world.settle()
            with pytest.raises(AlreadyExists):  # another body, while the first runs
                await world.run(pause("held"))
            world.fleet.release_hangs.set()
            await world.finish(held)
            world.fleet.effects.clear()
            async with asyncio.TaskGroup() as tasks:
                racing = [tasks.create_task(world.run(flush("one"))) for _ in range(20)]
            ids = {event.operation_id for task in racing for event in task.result()}
            assert len(ids) == 1
            assert all(isinstance(task.result()[-1].event, OperationCompleted) for task in racing)
            assert flushes(world) == 4, "once on each rank"
            with pytest.raises(AlreadyExists):  # and after it ended
                await world.run(pause("one"))
        async with world.server():
            again = await world.run(flush("one"))
            assert {event.operation_id for event in again} == ids
            with pytest.raises(AlreadyExists):
                await world.run(pause("one"))
            with pytest.raises(Conflict) as wrong:
                await world.run(flush("two", expected_revision=9))
            assert wrong.value.details["current_revision"] == str(world.store.desired.revision)
            assert flushes(world) == 4, "a refusal has no effect"
            await world.run(flush("two", expected_revision=world.store.desired.revision))
            assert flushes(world) == 8

    run_world(scenario)


# ---- P-24: one rank fails ----


def errors_of(events: Sequence[AdminOperationEvent]) -> dict[str, ParticipantPhase]:
    """Which participants were told of as failed, and the step of each."""
    return {
        told.event.status.participant_id: told.event.status.error.step
        for told in events
        if isinstance(told.event, ParticipantUpdate) and told.event.status.error is not None
    }


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-23", "AD-29", "AD-30", "AD-31", "AD-32")
@pytest.mark.parametrize(
    ("kind", "step", "phase"),
    [
        (FaultKind.ERROR, "PrepareWeightsStep", ParticipantPhase.PREPARING),
        (FaultKind.ERROR, "ApplyWeightsStep", ParticipantPhase.APPLYING),
        (FaultKind.WRONG_DIGEST, "ApplyWeightsStep", ParticipantPhase.VERIFYING),
        (FaultKind.ERROR, "VerifyWeightsStep", ParticipantPhase.VERIFYING),
        (FaultKind.HANG, "ApplyWeightsStep", ParticipantPhase.APPLYING),
    ],
)
def test_a_rank_that_fails_an_update_is_named_with_its_step_and_a_retry_succeeds(
    kind: FaultKind, step: str, phase: ParticipantPhase
) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(update("v1"))
            world.fleet.arm(kind, "a/2", step)
            begun = asyncio.get_running_loop().time()
            events = await world.run(update("v2", deadline_ms=60_000))
            ended = events[-1].event
            assert isinstance(ended, OperationFailed)
            assert ended.error.participants == ("a/2",)
            assert errors_of(events)["a/2"] is phase
            # A step goes to a whole group: of one that never answered all of its ranks are told.
            assert kind is FaultKind.HANG or set(errors_of(events)) == {"a/2"}
            assert asyncio.get_running_loop().time() - begun < 60 + 120, "nobody waits on for the rank"
            assert world.store.desired.weights["m"].version == "v1"
            labels = {rank.label for rank in world.fleet.members("a")}
            assert labels == {"v1"} or not any(world.fleet.is_open(f"a/{rank}") for rank in range(4))
            world.fleet.release_hangs.set()
            if ended.error.quarantined:
                world.fleet.restart("a")
                world.core.participants_changed()
            await world.settle(100)
            again = (await world.run(update("v2", "again")))[-1].event
            assert isinstance(again, OperationCompleted), again
            await world.settle()
            assert {rank.label for rank in world.fleet.members("a")} == {"v2"}
            assert all(world.fleet.is_open(f"a/{rank}") for rank in range(4))

    run_world(scenario, shape=FOUR_RANKS)


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-23", "AD-25", "AD-31")
def test_who_held_an_operation_up_is_told_when_its_time_is_up_however_long_it_takes_to_let_go() -> None:
    async def scenario(world: AdminWorld) -> None:
        execute = world.fleet.execute

        async def clings(call: StepCall, report: ProgressSink) -> StepResult:
            try:
                return await execute(call, report)
            except asyncio.CancelledError:
                await asyncio.sleep(30)
                raise

        world.fleet.execute = clings  # type: ignore[method-assign]
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/2", "PauseStep")
            begun = asyncio.get_running_loop().time()
            operation = await world.submit(pause(deadline_ms=5000))
            told: dict[str, tuple[AdminErrorCode, float]] = {}
            async for each in world.core.watch(ADMIN, operation, after_sequence=0):
                match each.event:
                    case ParticipantUpdate(status=ParticipantStatus(participant_id=one, error=error)) if (
                        error
                    ):
                        told.setdefault(one, (error.code, asyncio.get_running_loop().time() - begun))
            assert {one: code for one, (code, _) in told.items()} == {
                "a/2": AdminErrorCode.DEADLINE_EXCEEDED,
                **dict.fromkeys(("a/0", "a/1", "a/3"), AdminErrorCode.INTERRUPTED),
            }
            assert all(5 <= at < 6 for _, at in told.values())

    run_world(scenario, shape=FOUR_RANKS)


# ---- P-25: a restart in the middle of an operation ----


@pytest.mark.case("P-25")
@pytest.mark.clause("AD-24", "AD-26", "AD-35")
@pytest.mark.parametrize(
    ("request_", "step"),
    [(pause("op"), "PauseStep"), (release("op"), "ReleaseStep"), (update("v2", "op"), "ApplyWeightsStep")],
    ids=["pause", "release", "update"],
)
def test_an_operation_of_a_dead_server_can_be_cancelled_and_blocks_nothing(
    request_: MutationRequest, step: str
) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", step, once=False)
            operation = await world.submit(request_)
            await world.settle()
        async with world.server():
            await world.settle()
            found = await world.core.get(ADMIN, operation)
            assert found.idempotency_key == "op"
            answer = await world.core.cancel(ADMIN, operation, reason="test")
            world.fleet.faults.clear()
            world.fleet.release_hangs.set()
            await world.finish(operation)
            ended = await world.core.get(ADMIN, operation)
            if answer.disposition is CancelDisposition.ALREADY_TERMINAL:
                assert ended.error is not None and ended.error.code is AdminErrorCode.INTERRUPTED
            else:
                assert answer.disposition is CancelDisposition.CANCELLING
                assert ended.state is AdminOperationState.CANCELLED
            last = (await world.run(flush("new")))[-1].event
            assert isinstance(last, OperationCompleted), last
            told = {
                p.info.participant_id: p.weight_version
                for p in (await world.core.profile(ADMIN)).participants
            }
            assert told == {
                rank.participant_id: rank.label for group in "ab" for rank in world.fleet.members(group)
            }

    run_world(scenario)
