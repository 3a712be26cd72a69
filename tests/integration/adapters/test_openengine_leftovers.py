"""What an older step left at an engine behind its own admin server, and what that means for the next one.

A step may be given up while its mutation still runs, its process may be gone, its undo may never have come. Whatever
then stands at the engine (a pause, a release, a profile, other weights, a quarantine) must not be taken for its state,
and must not stand in the way of what heals it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest
from openengine_rig import Held
from test_openengine_adapter import DISK, AdminRig, admin, pause, running

from iop.adapters.openengine.admin_rpc import AdminRpc
from iop.admin.core import MutationCall
from iop.admin.enums import (
    AdminErrorCode,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    ChangeDisposition,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
)
from iop.admin.requests import (
    AllTargets,
    MutationOptions,
    PauseSpec,
    ReleaseResourcesRequest,
    ResumeRequest,
    ServingChange,
)
from iop.admin.results import AdminOperation
from iop.admin.steps import (
    ApplyWeightsStep,
    FlushStep,
    JudgeReconfigureStep,
    PauseStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    StartProfileStep,
    Step,
    StopProfileStep,
    profile_id_of,
)
from iop.core.errors import Unsupported
from iop.core.ids import OperationId
from iop.testing.adapter_suite import assert_all_ok, step_call
from iop.testing.fake_participants import FaultKind
from iop.testing.waiting import PATIENCE_S

__all__ = ["admin"]

CPU = StartProfileStep(profile_id=profile_id_of(OperationId("prof")), kinds=(ProfilerKind.CPU,))
FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.WAIT)


async def given_up(rig: AdminRig, held: Held, body: Step, operation: str = "gone") -> None:
    """Begin a step and leave it once the engine is at it."""
    await held.give_up(rig.adapter, step_call(rig.adapter, body, operation=operation))


async def settled(rig: AdminRig) -> None:
    """Wait until no operation runs at the engine."""
    async with asyncio.timeout(PATIENCE_S), rig.other() as other:
        for each in (await other.list_operations()).operations:
            async for _ in other.watch(each.operation_id):
                pass


@pytest.mark.clause("AD-35", "AD-37")
@pytest.mark.parametrize(
    "body",
    [
        pause(),
        FLUSH,
        ApplyWeightsStep(model="public", source=DISK, weight_version="v1"),
        CPU,
    ],
    ids=lambda body: type(body).__name__,
)
async def test_nothing_is_told_of_ranks_that_a_given_up_step_still_changes(
    admin: AdminRig, body: Step
) -> None:
    if isinstance(body, ApplyWeightsStep):
        assert_all_ok(await admin.step(pause(PauseMode.ABORT)))
    held = Held(admin.engine, type(body))
    await given_up(admin, held, body)
    assert [each.reachable for each in await admin.adapter.read_back(admin.ids)] == [False, False]
    held.gate.set()
    await settled(admin)
    assert [each.reachable for each in await admin.adapter.read_back(admin.ids)] == [True, True]


@pytest.mark.clause("AD-36", "AD-47")
async def test_what_a_given_up_step_still_does_is_no_reason_to_reject_a_change(admin: AdminRig) -> None:
    held = Held(admin.engine, FlushStep)
    await given_up(admin, held, FLUSH)
    change = ServingChange(field=ReconfigurableField.CAPACITY, value=3)
    judged = await admin.step(JudgeReconfigureStep(changes=(change,)), operation="new")
    held.gate.set()
    assert {c.disposition for each in judged.participants for c in each.changes} == {
        ChangeDisposition.APPLIED
    }


@pytest.mark.clause("AD-26", "AD-36")
async def test_ranks_under_a_step_that_is_followed_are_told_of(admin: AdminRig) -> None:
    held = Held(admin.engine, FlushStep)
    call = step_call(admin.adapter, FLUSH, operation="mine")
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(admin.adapter.execute_step(call, lambda _: None))
        await held.reached.wait()
        assert [each.reachable for each in await admin.adapter.read_back(admin.ids)] == [True, True]
        held.gate.set()
        assert_all_ok(await task)


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-25", "AD-31")
async def test_a_rank_that_failed_is_named_when_the_time_is_up_before_its_engine_is_done(
    admin: AdminRig,
) -> None:
    good, bad = admin.ids
    world = admin.engine.world
    world.fleet.arm(FaultKind.ERROR, bad, "PauseStep")
    held = Held(admin.engine, ResumeStep)  # the engine's way back
    call = dataclasses.replace(step_call(admin.adapter, pause(), operation="late"), timeout_s=2.0)
    async with asyncio.timeout(PATIENCE_S):
        result = await admin.adapter.execute_step(call, lambda _: None)
    assert held.reached.is_set()
    told = {each.participant_id: each.error for each in result.participants}
    assert told[bad] is not None and told[bad].code is AdminErrorCode.PARTICIPANT_FAILED
    assert told[good] is not None and told[good].code is AdminErrorCode.INTERRUPTED
    assert str(bad) in told[good].message
    held.gate.set()
    await settled(admin)


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-31")
async def test_ranks_that_failed_have_their_own_words_when_the_engine_is_done(admin: AdminRig) -> None:
    for rank in admin.ids:
        admin.engine.world.fleet.arm(FaultKind.ERROR, rank, "PauseStep")
    result = await admin.step(pause())
    told = [each.error.message for each in result.participants if each.error is not None]
    assert told == ["engine: it said no", "engine: it said no"], "and not the engine's sum of both"


@pytest.mark.clause("AD-37", "AD-39", "AD-41")
@pytest.mark.parametrize("left", PauseMode)
@pytest.mark.parametrize("wanted", PauseMode)
async def test_a_pause_that_an_older_step_left_is_in_no_newer_ones_way(
    admin: AdminRig, left: PauseMode, wanted: PauseMode
) -> None:
    assert_all_ok(await admin.step(pause(left), operation="left"))
    assert_all_ok(await admin.step(pause(wanted), operation="newer"))
    assert all(rank.paused for rank in admin.engine.world.fleet.members("g"))
    assert_all_ok(await admin.step(ResumeStep(), operation="newer", step=2))
    assert not any(rank.paused for rank in admin.engine.world.fleet.members("g"))
    assert admin.engine.world.store.desired.pauses == {}


@pytest.mark.clause("AD-33", "AD-41")
async def test_work_that_a_left_pause_froze_goes_on_before_it_is_drained(admin: AdminRig) -> None:
    fleet = admin.engine.world.fleet
    fleet.work["g"] = 2  # type: ignore[index]
    kept = await admin.step(pause(PauseMode.KEEP), operation="left")
    assert kept.work.kept == 2
    assert_all_ok(await admin.step(pause(PauseMode.DRAIN), operation="newer"))
    assert [type(call.body) for call in fleet.calls] == [PauseStep, ResumeStep, PauseStep]
    assert fleet.frozen["g"] == 0  # type: ignore[index]


@pytest.mark.clause("AD-36", "AD-39")
@pytest.mark.parametrize(
    ("body", "undo"), [(pause(), ResumeStep()), (CPU, StopProfileStep(profile_id=CPU.profile_id))]
)
async def test_a_mutation_that_is_given_up_on_its_way_is_found_by_whoever_takes_it_back(
    admin: AdminRig, monkeypatch: pytest.MonkeyPatch, body: Step, undo: Step
) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()
    core = admin.engine.world.core
    accept = core._accept

    async def late(call: MutationCall) -> OperationId:
        arrived.set()
        await go_on.wait()
        return await accept(call)

    monkeypatch.setattr(core, "_accept", late)
    call = step_call(admin.adapter, body, operation="prof")
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        step = tasks.create_task(admin.adapter.execute_step(call, lambda _: None))
        await arrived.wait()
        step.cancel()
        asyncio.get_running_loop().call_later(0.2, go_on.set)  # long after somebody would have looked for it
    monkeypatch.undo()
    assert_all_ok(await admin.step(undo, operation="prof", step=2))
    await go_on.wait()
    await settled(admin)
    assert admin.engine.world.store.records
    assert admin.engine.world.store.desired.pauses == {}
    assert not any(rank.paused or rank.profiles for rank in admin.engine.world.fleet.members("g"))


@pytest.mark.clause("AD-36", "AD-37")
async def test_a_pause_that_ends_by_itself_as_it_is_taken_back_is_no_failure(
    admin: AdminRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_all_ok(await admin.step(pause(), operation="left"))
    unfinished = AdminRpc.unfinished

    async def ends_first(rpc: AdminRpc) -> Sequence[AdminOperation]:
        async with admin.other() as other:
            for epoch in list(admin.engine.world.store.desired.pauses):
                async for _ in other.submit(
                    ResumeRequest(options=MutationOptions(idempotency_key="theirs"), pause_epoch=epoch)
                ):
                    pass
        return await unfinished(rpc)

    monkeypatch.setattr(AdminRpc, "unfinished", ends_first)
    assert_all_ok(await admin.step(ResumeStep(), operation="left", step=2))


@pytest.mark.clause("AD-37", "AD-44")
async def test_a_release_that_somebody_else_made_is_not_ended(admin: AdminRig) -> None:
    assert_all_ok(await admin.step(pause()))
    assert_all_ok(await admin.step(ReleaseStep(kinds=(ResourceKind.KV_CACHE,))))
    async with admin.other() as other:
        theirs = ReleaseResourcesRequest(
            options=MutationOptions(idempotency_key="theirs"),
            target=AllTargets(),
            kinds=(ResourceKind.GRAPHS,),
        )
        async for _ in other.submit(theirs):
            pass
    both = RestoreStep(kinds=(ResourceKind.KV_CACHE, ResourceKind.GRAPHS))
    result = await admin.step(both)
    assert all(each.error is not None for each in result.participants)
    held = {kind for each in admin.engine.world.store.desired.releases.values() for kind in each.kinds}
    assert held == {ResourceKind.GRAPHS}


@pytest.mark.clause("AD-29", "AD-46")
async def test_a_profile_whose_start_was_given_up_is_stopped_by_its_undo(admin: AdminRig) -> None:
    held = Held(admin.engine, StartProfileStep)
    await given_up(admin, held, CPU, operation="prof")
    held.gate.set()
    await settled(admin)
    assert any(rank.profiles for rank in admin.engine.world.fleet.members("g"))
    undo = StopProfileStep(profile_id=CPU.profile_id)
    assert_all_ok(await admin.step(undo, operation="prof", step=2))
    assert not any(rank.profiles for rank in admin.engine.world.fleet.members("g"))


@pytest.mark.clause("AD-29", "AD-46")
async def test_the_undo_of_a_profile_that_never_started_has_nothing_to_do(admin: AdminRig) -> None:
    undo = StopProfileStep(profile_id=CPU.profile_id)
    result = await admin.step(undo, operation="prof", step=2)
    assert_all_ok(result)
    assert not any(each.changed for each in result.participants)
    elsewhere = await admin.step(undo, operation="another")
    assert all(each.error is not None for each in elsewhere.participants)


@pytest.fixture
async def profiled(admin: AdminRig) -> AsyncIterator[AdminRig]:
    """A profile runs, and the process that started it is gone."""
    assert_all_ok(await admin.step(CPU, operation="prof"))
    async with running(admin.settings) as adapter:
        await adapter.probe()
        admin.adapter = adapter
        yield admin


@pytest.mark.clause("AD-46")
async def test_a_profile_that_an_earlier_process_started_still_runs_and_can_be_stopped(
    profiled: AdminRig,
) -> None:
    told = await profiled.adapter.read_back(profiled.ids)
    assert [each.profiles for each in told] == [frozenset({CPU.profile_id})] * 2
    stopped = await profiled.step(StopProfileStep(profile_id=CPU.profile_id), operation="stop")
    assert_all_ok(stopped)
    assert all(each.artifacts for each in stopped.participants)
    assert [each.profiles for each in await profiled.adapter.read_back(profiled.ids)] == [frozenset()] * 2


@pytest.mark.clause("AD-46")
async def test_a_profile_of_an_earlier_process_that_the_engine_does_not_stop_is_over(
    profiled: AdminRig,
) -> None:
    profiled.engine.world.fleet.restart("g")
    for rank in ("g/0", "g/1"):
        profiled.engine.world.fleet.arm(FaultKind.ERROR, rank, "StopProfileStep")
    refused = await profiled.step(StopProfileStep(profile_id=CPU.profile_id), operation="stop")
    assert all(each.error is not None for each in refused.participants)
    assert [each.profiles for each in await profiled.adapter.read_back(profiled.ids)] == [frozenset()] * 2


@pytest.mark.clause("AD-18", "AD-46")
@pytest.mark.parametrize("is_bounded", [True, False])
async def test_a_profile_with_a_bound_that_ended_by_itself_records_no_more(
    admin: AdminRig, is_bounded: bool
) -> None:
    body = dataclasses.replace(CPU, max_duration_ms=60_000) if is_bounded else CPU
    assert_all_ok(await admin.step(body, operation="prof"))
    told = await admin.adapter.read_back(admin.ids)
    assert [each.profiles for each in told] == [frozenset({CPU.profile_id})] * 2
    for rank in admin.engine.world.fleet.members("g"):
        rank.profiles.clear()
    told = await admin.adapter.read_back(admin.ids)
    assert [each.profiles for each in told] == [frozenset() if is_bounded else {CPU.profile_id}] * 2


@pytest.mark.clause("AD-31", "AD-35")
async def test_an_engines_own_quarantine_is_never_taken_for_being_as_desired(
    admin: AdminRig, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = admin.engine.world.fleet
    assert_all_ok(await admin.step(pause(), operation="up", step=1))
    new = ApplyWeightsStep(model="public", source=DISK, weight_version="v1")
    assert_all_ok(await admin.step(new, operation="up", step=2))
    assert_all_ok(await admin.step(ResumeStep(), operation="up", step=3))
    fleet.arm(FaultKind.ERROR, "g/0", once=False)
    refused = await admin.step(pause(), operation="ill")
    assert any(each.error is not None for each in refused.participants)
    assert set(admin.engine.world.store.desired.quarantines) == {"g"}
    fleet.faults.clear()
    told = await admin.adapter.read_back(admin.ids)
    assert [(each.reachable, each.released, each.weight_version) for each in told] == [
        (True, None, None),
        (True, None, None),
    ]

    assert [
        record.message.split()[:2] for record in caplog.records if "engine.quarantined" in record.message
    ] == [["engine.quarantined", f"participant=g/{rank}"] for rank in (0, 1)]

    # The published version is what heals it, also where the engine says that it has it.
    for rank in fleet.members("g"):
        rank.content, rank.label, rank.paused = "base", "v0", False
    hard = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.QUEUE))
    assert_all_ok(await admin.step(hard, operation="heal", step=1))
    again = ApplyWeightsStep(model="public", source=DISK, weight_version="v1")
    assert_all_ok(await admin.step(again, operation="heal", step=2))
    assert_all_ok(await admin.step(ResumeStep(), operation="heal", step=3))
    assert admin.engine.world.store.desired.quarantines == {}
    assert {rank.content for rank in fleet.members("g")} == {DISK.path}
    told = await admin.adapter.read_back(admin.ids)
    assert [(each.released, each.weight_version) for each in told] == [(frozenset(), "v1")] * 2


@pytest.mark.clause("AD-37")
async def test_a_server_that_lists_no_operations_is_operated_all_the_same(
    admin: AdminRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unlisted(*_: object) -> None:
        raise Unsupported("not here", reason="UNIMPLEMENTED")

    monkeypatch.setattr(admin.engine.world.core, "list_operations", unlisted)
    async with running(admin.settings) as adapter:
        await adapter.probe()
        admin.adapter = adapter
        assert [each.reachable for each in await adapter.read_back(admin.ids)] == [True, True]
        assert_all_ok(await admin.step(pause()))
        assert_all_ok(await admin.step(ResumeStep()))
