"""Pause, Resume and Flush through the whole core, on virtual time."""

from __future__ import annotations

import pytest

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    PauseMode,
)
from iop.admin.requests import (
    AllTargets,
    FlushCachesRequest,
    MutationOptions,
    ParticipantTargets,
    PauseRequest,
    PauseSpec,
    ResumeRequest,
)
from iop.admin.results import (
    FlushCachesResult,
    OperationAccepted,
    OperationCompleted,
    OperationFailed,
    PauseResult,
    ResumeResult,
)
from iop.core.errors import PreconditionFailed
from iop.testing.admin_world import ADMIN, AdminWorld, run_world
from iop.testing.fake_participants import FaultKind


def options(key: str, **more: object) -> MutationOptions:
    return MutationOptions(idempotency_key=key, **more)  # type: ignore[arg-type]


def pause(
    key: str = "p",
    mode: PauseMode = PauseMode.DRAIN,
    admission: AdmissionPolicy = AdmissionPolicy.QUEUE,
    target: object = AllTargets(),
    **more: object,
) -> PauseRequest:
    return PauseRequest(
        options=options(key, **more),
        target=target,  # type: ignore[arg-type]
        pause=PauseSpec(mode=mode, admission=admission),
    )


def resume(epoch: int, key: str = "r") -> ResumeRequest:
    return ResumeRequest(options=options(key), pause_epoch=epoch)


def flush(key: str = "f") -> FlushCachesRequest:
    return FlushCachesRequest(
        options=options(key),
        target=AllTargets(),
        kinds=(CacheKind.PREFIX,),
        busy_policy=BusyPolicy.WAIT,
    )


@pytest.mark.clause("AD-21", "AD-41", "AD-42", "AD-39")
def test_pause_closes_gates_and_resume_with_its_epoch_opens_them() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            assert world.fleet.is_open("a/0")
            world.fleet.work["a"] = 3  # type: ignore[index]
            events = await world.run(pause())
            assert [e.sequence for e in events] == list(range(1, len(events) + 1))
            assert isinstance(events[0].event, OperationAccepted)
            assert sum(e.is_terminal for e in events) == 1
            done = events[-1].event
            assert isinstance(done, OperationCompleted)
            result = done.result
            assert isinstance(result, PauseResult)
            assert result.pause_epoch == 1 and result.drained == 3
            assert all(r.paused for r in world.fleet.ranks.values())
            assert not world.fleet.is_open("a/0")
            ended = (await world.run(resume(1)))[-1].event
            assert isinstance(ended, OperationCompleted) and isinstance(ended.result, ResumeResult)
            assert not any(r.paused for r in world.fleet.ranks.values())
            await world.settle()
            assert world.fleet.is_open("a/0")
            assert (await world.core.profile(ADMIN)).revision == 2

    run_world(scenario)


@pytest.mark.clause("AD-14")
def test_a_stale_epoch_is_refused_and_lists_the_active_ones() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(resume(99))
            assert refusal.value.reason == "STALE_EPOCH"
            assert refusal.value.details["active_epochs"] == "1"
            await world.run(resume(1, "r1"))
            with pytest.raises(PreconditionFailed):
                await world.run(resume(1, "r2"))
            assert (await world.run(resume(1, "r1")))[-1].is_terminal

    run_world(scenario)


@pytest.mark.clause("AD-40")
def test_flush_empties_and_says_so_per_participant_and_kind() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            done = (await world.run(flush()))[-1].event
            assert isinstance(done, OperationCompleted) and isinstance(done.result, FlushCachesResult)
            assert len(done.result.caches) == 4
            assert all(r.cached[CacheKind.PREFIX] == 0 for r in world.fleet.ranks.values())

    run_world(scenario)


@pytest.mark.clause("AD-29", "AD-30", "AD-31")
def test_a_failed_pause_is_undone_everywhere_and_names_the_rank() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "b/1", "PauseStep")
            failed = (await world.run(pause()))[-1].event
            assert isinstance(failed, OperationFailed)
            assert failed.error.participants == ("b/1",)
            assert failed.error.rolled_back and not failed.error.quarantined
            assert not any(r.paused for r in world.fleet.ranks.values())
            await world.settle()
            assert all(world.fleet.is_open(p) for p in world.fleet.ranks)
            assert (await world.core.profile(ADMIN)).revision == 0
            assert (await world.core.profile(ADMIN)).pauses == ()

    run_world(scenario)


@pytest.mark.clause("AD-37")
def test_a_rank_that_lies_about_its_pause_fails_the_operation() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.LIE, "a/0", "PauseStep")
            failed = (await world.run(pause()))[-1].event
            assert isinstance(failed, OperationFailed)
            assert failed.error.code is AdminErrorCode.VERIFICATION_FAILED

    run_world(scenario)


@pytest.mark.clause("AD-25", "AD-31")
def test_a_rank_lost_in_a_pause_is_quarantined_and_the_operation_ends() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.DISCONNECT, "b/0", "PauseStep")
            operation_id = await world.submit(pause())
            await world.settle(0.5)
            world.core.participants_changed()
            failed = (await world.finish(operation_id))[-1].event
            assert isinstance(failed, OperationFailed)
            assert failed.error.code is AdminErrorCode.PARTICIPANT_LOST
            assert failed.error.quarantined == ("b/0", "b/1")
            assert 29 < world.clock.monotonic() < 130
            profile = await world.core.profile(ADMIN)
            assert profile.revision == 1
            await world.settle()
            assert not world.fleet.is_open("b/0")
            assert world.fleet.is_open("a/0")

    run_world(scenario)


@pytest.mark.clause("AD-25")
def test_a_deadline_fails_a_hanging_pause_through_its_rollback() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "b/0", "PauseStep")
            failed = (await world.run(pause(deadline_ms=5_000)))[-1].event
            assert isinstance(failed, OperationFailed)
            assert failed.error.code is AdminErrorCode.DEADLINE_EXCEEDED
            assert 5 <= world.clock.monotonic() < 10
            assert failed.error.rolled_back

    run_world(scenario)


@pytest.mark.clause("AD-18")
def test_an_overlapping_operation_is_refused_with_the_running_one() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "b/0", "PauseStep")
            running = await world.submit(pause())
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(flush())
            assert refusal.value.reason == "OPERATION_IN_PROGRESS"
            assert refusal.value.details["operation_id"] == running

    run_world(scenario)


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-18", "AD-39")
def test_a_harder_pause_supersedes_a_running_one_and_keeps_the_gate_closed() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "b/0", "PauseStep")
            older = await world.submit(pause())
            await world.settle()
            assert not world.fleet.is_open("b/0")
            done = (await world.run(pause("p2", PauseMode.ABORT)))[-1].event
            assert isinstance(done, OperationCompleted)
            ended = await world.core.get(ADMIN, older)
            assert ended.state is AdminOperationState.CANCELLED
            assert ended.superseded_by == "op-2"
            assert not world.fleet.is_open("b/0")
            with pytest.raises(PreconditionFailed):
                await world.run(resume(1))
            await world.run(resume(2))
            await world.settle()
            assert world.fleet.is_open("b/0")

    run_world(scenario)


@pytest.mark.clause("AD-18")
def test_being_superseded_is_no_crash(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "b/0", "PauseStep")
            older = await world.submit(pause())
            await world.settle()
            await world.run(pause("p2", PauseMode.ABORT))
            await world.settle()
            assert (await world.core.get(ADMIN, older)).superseded_by == "op-2"

    run_world(scenario)
    assert not [record for record in caplog.records if "operation.crashed" in record.message]


@pytest.mark.clause("AD-19")
def test_a_group_named_in_part_is_refused() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(pause(target=ParticipantTargets(participant_ids=("a/0",))))
            assert refusal.value.reason == "PARTIAL_GROUP"

    run_world(scenario)
