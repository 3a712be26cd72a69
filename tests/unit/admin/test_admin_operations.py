"""What each kind of operation does, refuses and leaves (AD-40 to AD-50)."""

from __future__ import annotations

import dataclasses

import pytest
from admin_requests import (
    ABORT,
    DRAIN,
    KEEP,
    A,
    B,
    flush,
    pause,
    reconfigure,
    release,
    restore,
    resume,
    start_profile,
    stop_profile,
    update,
)

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdminOperationState,
    AdmissionPolicy,
    CacheKind,
    CancelDisposition,
    ChangeDisposition,
    ParticipantState,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
    VerificationMethod,
    WeightRetention,
)
from iop.admin.permissions import PRESETS, Principal
from iop.admin.requests import (
    InlineTensor,
    InlineTensorSource,
    MutationRequest,
    PauseSpec,
    TensorSpec,
)
from iop.admin.results import (
    FlushCachesResult,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationResult,
    PauseResult,
    ReconfigureServingResult,
    ReleaseResourcesResult,
    RestoreResourcesResult,
    ResumeResult,
    StartProfileResult,
    StopProfileResult,
    UpdateWeightsResult,
)
from iop.core.errors import (
    Conflict,
    InvalidRequest,
    IopError,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unsupported,
)
from iop.testing.admin_world import (
    ADMIN,
    OPERATOR,
    VIEWER,
    AdminWorld,
    MutationCall,
    digest_of,
    run_world,
)
from iop.testing.fake_participants import FaultKind

OTHER = Principal(name="other", permissions=PRESETS["operator"])


async def done(world: AdminWorld, request: MutationRequest, principal: Principal = ADMIN) -> OperationResult:
    event = (await world.run(request, principal))[-1].event
    assert isinstance(event, OperationCompleted), event
    return event.result


async def failed(world: AdminWorld, request: MutationRequest) -> OperationFailed:
    event = (await world.run(request))[-1].event
    assert isinstance(event, OperationFailed), event
    return event


async def reason(world: AdminWorld, request: MutationRequest, principal: Principal = ADMIN) -> str:
    with pytest.raises(IopError) as refusal:
        await world.run(request, principal)
    return refusal.value.reason


def epoch_of(result: OperationResult) -> int:
    assert isinstance(result, PauseResult)
    return result.pause_epoch


# --- pause and resume -------------------------------------------------------------------------------------------------


@pytest.mark.clause("AD-41")
def test_the_same_pause_by_the_same_principal_gets_the_existing_epoch() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            assert epoch_of(await done(world, pause("p1"), OPERATOR)) == 1
            assert epoch_of(await done(world, pause("p2"), OPERATOR)) == 1
            assert epoch_of(await done(world, pause("p3"), OTHER)) == 2
            rejecting = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.REJECT)
            assert epoch_of(await done(world, pause("p4", rejecting), OPERATOR)) == 3
            assert world.fleet.gates["a/0"].admission is AdmissionPolicy.REJECT  # type: ignore[index]
            for epoch in (1, 2, 3):
                assert not world.fleet.is_open("a/0")
                await done(world, resume(epoch, f"r{epoch}"), OTHER)
            await world.settle()
            assert world.fleet.is_open("a/0")
            assert not world.fleet.ranks["a/0"].paused  # type: ignore[index]

    run_world(scenario)


@pytest.mark.clause("AD-41", "AD-14")
def test_a_harder_pause_makes_ones_own_older_epoch_stale() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, pause("p1", DRAIN))
            assert epoch_of(await done(world, pause("p2", ABORT))) == 2
            assert await reason(world, resume(1)) == "STALE_EPOCH"
            assert await reason(world, pause("p3", DRAIN)) == "PAUSE_MODE"
            assert await reason(world, pause("p4", KEEP)) == "PAUSE_MODE"
            await done(world, resume(2))

    run_world(scenario)


@pytest.mark.clause("AD-41")
def test_keep_freezes_work_that_goes_on_at_resume() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.work["a"] = 2  # type: ignore[index]
            kept = await done(world, pause(spec=KEEP))
            assert isinstance(kept, PauseResult) and kept.kept == 2
            assert await reason(world, pause("d", DRAIN), OTHER) == "PAUSE_MODE"
            assert await reason(world, update("v1", quiesce=None)) == "KEPT_WORK"
            resumed = await done(world, resume(1))
            assert isinstance(resumed, ResumeResult) and resumed.resumed == 2
            assert world.fleet.work["a"] == 2  # type: ignore[index]

    run_world(scenario)


@pytest.mark.clause("AD-29")
def test_a_partly_failed_resume_keeps_the_epoch_for_the_rest() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, pause())
            world.fleet.arm(FaultKind.ERROR, "b/0", "ResumeStep")
            ended = await failed(world, resume(1))
            assert ended.error.participants == ("b/0",)
            assert not ended.error.rolled_back
            profile = await world.core.profile(ADMIN)
            assert set(profile.pauses[0].participant_ids) <= {"b/0", "b/1"}
            await world.settle()
            assert world.fleet.is_open("a/0")
            assert not world.fleet.is_open("b/0")

    run_world(scenario)


@pytest.mark.clause("AD-29", "AD-40")
def test_a_refused_flush_quarantines_nobody() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "b/0", "FlushStep")
            ended = await failed(world, flush())
            assert ended.error.quarantined == ()
            assert not ended.error.rolled_back
            assert all(r.cached[CacheKind.PREFIX] == 0 for r in world.fleet.members("a"))
            await world.settle()
            assert world.fleet.is_open("b/0")
            assert isinstance(await done(world, flush("again")), FlushCachesResult)

    run_world(scenario)


# --- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("AD-24")
def test_a_cancelled_pause_leaves_the_state_before_it() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "b/0", "PauseStep")
            operation_id = await world.submit(pause(), OPERATOR)
            await world.settle(0.5)
            told = await world.core.cancel(OPERATOR, operation_id, reason="oops")
            assert told.disposition is CancelDisposition.CANCELLING
            ended = (await world.finish(operation_id))[-1].event
            assert isinstance(ended, OperationCancelled)
            assert ended.rolled_back
            assert ended.reason == "oops"
            operation = await world.core.get(ADMIN, operation_id)
            assert operation.state is AdminOperationState.CANCELLED
            assert operation.cancel_requested
            await world.settle()
            assert not any(r.paused for r in world.fleet.ranks.values())
            assert all(world.fleet.is_open(p) for p in world.fleet.ranks)
            again = await world.core.cancel(OPERATOR, operation_id, reason="")
            assert again.disposition is CancelDisposition.ALREADY_TERMINAL
            assert world.store.desired.revision == 0

    run_world(scenario)


@pytest.mark.clause("AD-24", "AD-32")
def test_after_the_point_of_no_return_cancel_is_too_late() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "b/0", "CommitWeightsStep")
            operation_id = await world.submit(update("v1"))
            await world.settle(1.0)
            told = await world.core.cancel(ADMIN, operation_id, reason="")
            assert told.disposition is CancelDisposition.TOO_LATE
            assert told.operation.committed
            assert isinstance((await world.finish(operation_id))[-1].event, OperationCompleted)

    run_world(scenario)


@pytest.mark.clause("AD-24", "AD-04")
def test_who_may_cancel_what() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            events = await world.run(flush())
            with pytest.raises(Unsupported):
                await world.core.cancel(ADMIN, events[0].operation_id, reason="")
            with pytest.raises(NotFound):
                await world.core.cancel(OPERATOR, "nope", reason="")
            with pytest.raises(PermissionDenied):
                await world.core.cancel(VIEWER, "nope", reason="")
            updated = await world.run(update("v1"))
            with pytest.raises(PermissionDenied):
                await world.core.cancel(OPERATOR, updated[0].operation_id, reason="")

    run_world(scenario)


# --- resources --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("AD-43", "AD-44", "AD-42")
def test_release_and_restore_by_epoch_in_parts() -> None:
    kinds = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)

    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            assert await reason(world, release("r0", *kinds, spec=None)) == "NOT_PAUSED"
            released = await done(world, release("r1", *kinds))
            assert isinstance(released, ReleaseResourcesResult)
            assert (released.pause_epoch, released.resource_epoch) == (1, 2)
            assert len(released.released) == 8
            assert await reason(world, resume(1)) == "RESOURCES_RELEASED"
            assert await reason(world, release("r2", ResourceKind.KV_CACHE)) == "ALREADY_RELEASED"
            assert await reason(world, restore(2, "x", ResourceKind.GRAPHS)) == "RESOURCE_NOT_RELEASED"
            assert await reason(world, restore(9, "y")) == "STALE_EPOCH"
            part = await done(world, restore(2, "s1", ResourceKind.KV_CACHE))
            assert isinstance(part, RestoreResourcesResult)
            assert part.remaining == (ResourceKind.WEIGHTS,)
            profile = await world.core.profile(ADMIN)
            assert profile.releases[0].kinds == (ResourceKind.WEIGHTS,)
            assert profile.participants[0].state is ParticipantState.RELEASED
            rest = await done(world, restore(2, "s2", ResourceKind.WEIGHTS))
            assert isinstance(rest, RestoreResourcesResult) and rest.remaining == ()
            await done(world, resume(1))

    run_world(scenario)


@pytest.mark.clause("AD-43")
def test_weights_that_cannot_be_reloaded_are_not_discarded() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            request = release("r", ResourceKind.WEIGHTS, retention=WeightRetention.DISCARD)
            assert await reason(world, request) == "IRREVERSIBLE"
            await done(world, update("v1"))
            await done(world, request)
            # They come back from the source that published them.
            await done(world, restore(2, "s", ResourceKind.WEIGHTS))

    run_world(scenario)


@pytest.mark.clause("AD-29", "AD-43")
def test_a_failed_release_undoes_its_pause_too() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "a/1", "ReleaseStep")
            ended = await failed(world, release())
            assert ended.error.rolled_back
            assert not any(r.paused or r.released for r in world.fleet.ranks.values())
            assert world.store.desired.pauses == {}
            assert world.store.desired.releases == {}

    run_world(scenario)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("AD-32", "AD-34", "AD-37", "AD-38", "AD-45", "AD-50")
def test_an_update_swaps_all_ranks_flushes_and_wakes() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.work["a"] = 1  # type: ignore[index]
            result = await done(world, update("v1", quiesce=ABORT))
            assert isinstance(result, UpdateWeightsResult)
            assert (result.previous_weight_version, result.weight_version) == ("v0", "v1")
            assert result.aborted == 1
            for rank in world.fleet.ranks.values():
                assert (rank.content, rank.label, rank.paused) == ("/weights/v1", "v1", False)
                assert set(rank.cached.values()) == {0}
            order = [name for name, p in world.fleet.effects if p == "a/0"]
            assert order == [
                "PrepareWeightsStep",
                "PauseStep",
                "ApplyWeightsStep",
                "VerifyWeightsStep",
                "CommitWeightsStep",
                "FlushStep",
                "ResumeStep",
            ]
            operation = await world.core.get(ADMIN, "op-1")
            assert operation.committed
            assert {s.verified_by for s in operation.participants} == {VerificationMethod.DIGEST}
            assert {s.weight_version for s in operation.participants} == {"v1"}
            weights = (await world.core.profile(ADMIN)).weights[0]
            assert (weights.weight_version, weights.operation_id) == ("v1", "op-1")
            assert weights.reversible

    run_world(scenario)


@pytest.mark.clause("AD-39", "AD-32")
def test_gates_are_closed_from_before_quiesce_until_after_commit() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            opened: list[tuple[str, bool]] = []
            world.fleet.on_call = lambda call: opened.append(
                (type(call.body).__name__, any(world.fleet.is_open(p) for p in call.participant_ids))
            )
            await done(world, update("v1"))
            assert not any(is_open for _, is_open in opened)
            await world.settle()
            assert all(world.fleet.is_open(p) for p in world.fleet.ranks)

    run_world(scenario)


@pytest.mark.clause("AD-45")
def test_versions_are_compared_and_swapped() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            assert await reason(world, update("v1", expected="v9")) == "WEIGHT_VERSION_MISMATCH"
            await done(world, update("v1", expected="v0"))
            assert await reason(world, update("v1", "again")) == "SAME_WEIGHT_VERSION"
            assert await reason(world, update("v2", model="nope")) == "MODEL_NOT_FOUND"
            assert await reason(world, update("v2", quiesce=None)) == "NOT_PAUSED"
            # Labels may recur.
            await done(world, update("v2"))
            await done(world, update("v1", "recurs"))

    run_world(scenario)


@pytest.mark.clause("AD-32")
def test_an_update_that_could_not_be_put_back_is_refused_unless_allowed() -> None:
    async def scenario(world: AdminWorld) -> None:
        for rank in world.fleet.ranks.values():
            rank.capabilities = dataclasses.replace(rank.capabilities, holds_previous_weights=False)
        async with world.server():
            assert await reason(world, update("v1")) == "IRREVERSIBLE"
            assert not (await world.core.profile(ADMIN)).weights[0].reversible
            await done(world, update("v1", irreversible=True))
            # From files now, so it can be put back.
            await done(world, update("v2"))

    run_world(scenario)


def inline(value: int) -> InlineTensorSource:
    spec = TensorSpec(name="w", dtype=TensorDtype.FLOAT32, shape=(2,))
    return InlineTensorSource(tensors=(InlineTensor(spec=spec, data=bytes([value] * 8)),))


@pytest.mark.clause("AD-32", "AD-45")
def test_inline_tensors_are_spooled_and_put_back_after_a_failure() -> None:
    async def scenario(world: AdminWorld) -> None:
        for rank in world.fleet.ranks.values():
            rank.capabilities = dataclasses.replace(rank.capabilities, holds_previous_weights=False)
        async with world.server():
            await done(world, update("v1", source=inline(1), irreversible=True))
            published = {r.content for r in world.fleet.ranks.values()}
            assert len(published) == 1
            world.fleet.arm(FaultKind.WRONG_DIGEST, "b/1", "ApplyWeightsStep")
            ended = await failed(world, update("v2", source=inline(2)))
            assert ended.error.rolled_back
            assert {r.content for r in world.fleet.ranks.values()} == published
            torn = dataclasses.replace(inline(3).tensors[0], sha256=bytes(32))
            with pytest.raises(InvalidRequest):
                await world.run(update("v3", source=InlineTensorSource(tensors=(torn,))))

    run_world(scenario)


@pytest.mark.clause("AD-32", "AD-38")
def test_a_failed_verification_puts_the_old_weights_back_everywhere() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, update("v1"))
            world.fleet.arm(FaultKind.WRONG_DIGEST, "b/0", "ApplyWeightsStep")
            ended = await failed(world, update("v2"))
            assert ended.error.code is AdminErrorCode.VERIFICATION_FAILED
            assert ended.error.rolled_back
            assert {(r.content, r.label) for r in world.fleet.ranks.values()} == {("/weights/v1", "v1")}
            assert (await world.core.profile(ADMIN)).weights[0].weight_version == "v1"

    run_world(scenario)


@pytest.mark.clause("AD-45")
def test_the_reinforcement_learning_loop() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, pause("p"))
            await done(world, release("r", spec=None))
            await done(world, update("v1", quiesce=None))
            await done(world, restore(2))
            await done(world, resume(1))
            assert {(r.label, r.paused) for r in world.fleet.ranks.values()} == {("v1", False)}

    run_world(scenario)


@pytest.mark.clause("AD-45")
def test_an_update_over_released_weights_restores_them() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, release("r", ResourceKind.WEIGHTS))
            await done(world, update("v1", quiesce=None))
            assert world.store.desired.releases == {}
            assert not any(r.released for r in world.fleet.ranks.values())
            await done(world, resume(1))

    run_world(scenario)


@pytest.mark.clause("AD-32", "AD-35")
def test_a_participant_lost_after_commit_is_gated_until_reconciled() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.DISCONNECT, "b/0", "CommitWeightsStep")
            operation_id = await world.submit(update("v1"))
            await world.settle(1.0)
            world.fleet.disconnect("b")
            world.core.participants_changed()
            ended = (await world.finish(operation_id))[-1].event
            assert isinstance(ended, OperationFailed)
            assert ended.error.quarantined == ()
            assert {(r.label, r.paused) for r in world.fleet.members("a")} == {("v1", False)}
            world.fleet.restart("b")
            world.core.participants_changed()
            await world.settle(3.0)
            assert {(r.content, r.label) for r in world.fleet.members("b")} == {("/weights/v1", "v1")}
            assert world.fleet.is_open("b/0")

    run_world(scenario)


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.mark.clause("AD-46", "AD-18")
def test_profiles_start_stop_and_name_their_artifacts_again() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            started = await done(world, start_profile())
            assert isinstance(started, StartProfileResult)
            assert started.participant_ids == ("a/0", "a/1", "b/0", "b/1")
            assert await reason(world, start_profile("s2", target=A)) == "PROFILE_ACTIVE"
            # A running profile blocks nothing else.
            await done(world, flush())
            stopped = await done(world, stop_profile(started.profile_id))
            assert isinstance(stopped, StopProfileResult)
            assert {a.kind for a in stopped.artifacts} == {ProfilerKind.CPU}
            world.fleet.disconnect("b")
            again = await done(world, stop_profile(started.profile_id, "stop2"))
            assert isinstance(again, StopProfileResult)
            assert again.artifacts == stopped.artifacts
            assert await reason(world, stop_profile("nope", "x")) == "PROFILE_NOT_FOUND"

    run_world(scenario)


@pytest.mark.clause("AD-46", "AD-29")
def test_a_failed_profile_start_is_aborted_with_its_operation() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "b/0", "StartProfileStep")
            request = start_profile()
            call = MutationCall(principal=ADMIN, request=request, request_sha256=digest_of(request))
            with pytest.raises(Conflict) as aborted:
                await world.core.run_to_end(call)
            assert aborted.value.reason == "OPERATION_FAILED"
            operation = await world.core.get(ADMIN, aborted.value.details["operation_id"])
            assert operation.state is AdminOperationState.FAILED
            assert not any(r.profiles for r in world.fleet.ranks.values())

    run_world(scenario)


# --- reconfiguration --------------------------------------------------------------------------------------------------


@pytest.mark.clause("AD-47")
def test_a_reconfiguration_is_judged_first_then_made_and_read_back() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            result = await done(world, reconfigure(4))
            assert isinstance(result, ReconfigureServingResult)
            assert {c.disposition for c in result.changes} == {ChangeDisposition.APPLIED}
            assert {c.effective_value for c in result.changes} == {"4"}
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(reconfigure(13, "bad"))
            assert refusal.value.reason == "CHANGE_REJECTED"
            assert "a/0/CAPACITY" in refusal.value.details
            assert await reason(world, reconfigure(1000, "big")) == "LIMIT_EXCEEDED"
            assert {r.serving[ReconfigurableField.CAPACITY] for r in world.fleet.ranks.values()} == {4}
            assert set(world.store.desired.overrides) == {"a", "b"}

    run_world(scenario)


@pytest.mark.clause("AD-47")
def test_half_failed_means_the_old_values_are_in_force() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "b/1", "ReconfigureStep")
            ended = await failed(world, reconfigure(4))
            assert ended.error.rolled_back
            assert {r.serving[ReconfigurableField.CAPACITY] for r in world.fleet.ranks.values()} == {8}

    run_world(scenario)


# --- quarantine, reconciliation, restart ------------------------------------------------------------------------------


async def quarantined(world: AdminWorld) -> None:
    """A world whose group b is quarantined: its resume can neither be done nor read back."""
    await done(world, pause())
    world.fleet.arm(FaultKind.HANG, "b/0", "ResumeStep")
    operation_id = await world.submit(resume(1, deadline_ms=2000))
    await world.settle(1.0)
    world.fleet.disconnect("b")
    world.core.participants_changed()
    ended = (await world.finish(operation_id))[-1].event
    assert isinstance(ended, OperationFailed)
    assert ended.error.quarantined == ("b/0", "b/1")
    world.fleet.reconnect("b")
    world.core.participants_changed()
    await world.settle(3.0)


@pytest.mark.case("P-24")
@pytest.mark.clause("AD-31")
def test_a_quarantine_outlives_restarts_and_ends_with_a_consistent_operation() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await quarantined(world)
        async with world.server():
            await world.settle(3.0)
            profile = await world.core.profile(ADMIN)
            states = {p.info.participant_id: p.state for p in profile.participants}
            assert states["b/0"] is ParticipantState.QUARANTINED
            assert states["a/0"] is ParticipantState.ACTIVE
            assert not world.fleet.is_open("b/0")
            # Resume never opens its gate.
            await done(world, resume(1, "again"))
            await world.settle()
            assert not world.fleet.is_open("b/0")
            # A flush reads it back as desired.
            await done(world, flush(target=B))
            await world.settle()
            assert world.fleet.is_open("b/0")

    run_world(scenario)


@pytest.mark.clause("AD-31", "AD-35")
def test_a_restarted_engine_is_reconciled_out_of_quarantine() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await quarantined(world)
            assert "b" in world.store.desired.quarantines
            world.fleet.restart("b")
            world.core.participants_changed()
            await world.settle(3.0)
            assert world.store.desired.quarantines == {}

    run_world(scenario)


@pytest.mark.clause("AD-35")
def test_drift_is_found_by_the_periodic_read_back_and_undone() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            for rank in world.fleet.members("a"):
                rank.paused = True
            await world.settle(31.0)
            assert not any(r.paused for r in world.fleet.members("a"))
            await done(world, pause())
            for rank in world.fleet.members("b"):
                rank.paused = False
            await world.settle(31.0)
            assert all(r.paused for r in world.fleet.members("b"))

    run_world(scenario)


@pytest.mark.clause("AD-35")
def test_a_newcomer_takes_no_inference_before_it_was_read_back() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, update("v1"))
            opened: list[bool] = []
            world.fleet.restart("b")
            world.fleet.gates.pop("b/0")  # type: ignore[call-overload]
            world.fleet.gates.pop("b/1")  # type: ignore[call-overload]
            world.fleet.on_call = lambda call: opened.append(world.fleet.is_open("b/0"))
            world.core.participants_changed()
            await world.settle(3.0)
            assert opened and not any(opened)
            assert {r.label for r in world.fleet.members("b")} == {"v1"}
            assert world.fleet.is_open("b/0")

    run_world(scenario)


@pytest.mark.clause("AD-26")
def test_pauses_are_in_force_before_the_server_is_ready() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, pause())
        world.fleet.gates.clear()
        world.fleet.restart("b")
        async with world.server():
            assert not any(world.fleet.is_open(p) for p in world.fleet.ranks)
            assert all(r.paused for r in world.fleet.ranks.values())

    run_world(scenario)


@pytest.mark.clause("AD-50")
def test_the_profile_lists_what_is_offered_and_how_things_stand() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, pause())
            profile = await world.core.profile(VIEWER)
            assert profile.profile_revision == 1
            assert profile.capabilities.operations == frozenset(AdminOperationKind)
            assert profile.capabilities.weight_sources == world.fleet.ranks["a/0"].capabilities.weight_sources  # type: ignore[index]
            assert AdminOperationKind.PAUSE in profile.cancellable
            assert profile.revision == 1
            assert profile.pauses[0].participant_ids == ("a/0", "a/1", "b/0", "b/1")
            assert {p.state for p in profile.participants} == {ParticipantState.PAUSED}
            assert {p.weight_version for p in profile.participants} == {"v0"}

    run_world(scenario)


@pytest.mark.clause("AD-01")
def test_operations_are_listed_newest_first_page_by_page() -> None:
    from iop.admin.requests import ListOperationsRequest

    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            for number in range(5):
                await done(world, flush(f"f{number}"))
            await done(world, pause())
            page = await world.core.list_operations(VIEWER, ListOperationsRequest(page_size=4))
            assert [o.operation_id for o in page.operations] == ["op-6", "op-5", "op-4", "op-3"]
            rest = await world.core.list_operations(
                VIEWER, ListOperationsRequest(page_size=4, page_token=page.next_page_token)
            )
            assert [o.operation_id for o in rest.operations] == ["op-2", "op-1"]
            assert rest.next_page_token == ""
            pauses = await world.core.list_operations(
                VIEWER, ListOperationsRequest(kinds=(AdminOperationKind.PAUSE,))
            )
            assert [o.kind for o in pauses.operations] == [AdminOperationKind.PAUSE]
            with pytest.raises(InvalidRequest):
                await world.core.list_operations(VIEWER, ListOperationsRequest(page_token="junk"))

    run_world(scenario)


@pytest.mark.clause("AD-46")
def test_a_profile_whose_engine_is_gone_does_not_block_the_next() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            started = await done(world, start_profile())
            assert isinstance(started, StartProfileResult)
            world.fleet.restart("b")
            world.core.participants_changed()
            await world.settle(2.0)
            world.fleet.arm(FaultKind.ERROR, "b/0", "StopProfileStep")
            await failed(world, stop_profile(started.profile_id))
            kept = world.store.desired.profiles[started.profile_id].artifacts
            assert {a.participant_id for a in kept} >= {"a/0", "a/1"}
            assert isinstance(await done(world, start_profile("next")), StartProfileResult)

    run_world(scenario)


@pytest.mark.clause("AD-31")
def test_a_quarantine_ends_when_its_provider_leaves_the_configuration() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await quarantined(world)
            assert "b" in world.store.desired.quarantines
            for rank in world.fleet.members("b"):
                del world.fleet.ranks[rank.participant_id]
            world.core.participants_changed()
            await world.settle()
            assert world.store.desired.quarantines == {}
            assert world.store.desired.pauses == {}

    run_world(scenario)


@pytest.mark.clause("AD-35")
def test_one_engine_that_hangs_in_reconciliation_delays_no_other() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, pause())
            world.fleet.arm(FaultKind.HANG, "a/0", "PauseStep")
            world.fleet.restart("a")
            world.core.participants_changed()
            await world.settle(2.0)
            world.fleet.restart("b")
            world.core.participants_changed()
            await world.settle(2.0)
            assert all(r.paused for r in world.fleet.members("b"))
            assert world.fleet.gates["b/0"].held_by == ("epoch 1",)  # type: ignore[index]

    run_world(scenario)


@pytest.mark.clause("AD-46")
def test_a_profile_that_reached_its_bound_blocks_no_other_and_keeps_its_artifacts() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            bounded = dataclasses.replace(start_profile(), max_steps=10)
            first = await done(world, bounded)
            assert isinstance(first, StartProfileResult)
            for rank in world.fleet.ranks.values():
                rank.profiles.clear()
            assert isinstance(await done(world, start_profile("next")), StartProfileResult)
            stopped = await done(world, stop_profile(first.profile_id))
            assert isinstance(stopped, StopProfileResult)
            assert len(stopped.artifacts) == 4

    run_world(scenario)
