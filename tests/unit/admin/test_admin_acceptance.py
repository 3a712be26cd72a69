"""Acceptance: keys, revisions, targets, conflicts, order of checks, dry runs."""

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
    update,
)

from iop.admin.enums import (
    AdminOperationKind,
    CacheKind,
    ParticipantPhase,
    PauseMode,
)
from iop.admin.permissions import PRESETS, Principal
from iop.admin.profile import AdminLimits
from iop.admin.requests import ModelTargets, MutationRequest, ParticipantTargets
from iop.admin.results import OperationCompleted, OperationPlan, PauseResult
from iop.core.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    IopError,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from iop.testing.admin_world import ADMIN, OPERATOR, VIEWER, AdminWorld, run_world
from iop.testing.fake_participants import FaultKind


async def refused(world: AdminWorld, request: MutationRequest, principal: Principal = ADMIN) -> IopError:
    with pytest.raises(IopError) as refusal:
        await world.run(request, principal)
    return refusal.value


@pytest.mark.case("P-22")
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-22")
def test_a_repeated_key_replays_identical_events() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            first = await world.run(pause())
            again = await world.run(pause())
            assert list(first) == list(again)
            assert sum(name == "PauseStep" for name, _ in world.fleet.effects) == 4
            other = await refused(world, pause(spec=ABORT))
            assert isinstance(other, AlreadyExists)
            # Keys are the principal's own.
            operator = (await world.run(pause(), OPERATOR))[0]
            assert operator.operation_id != first[0].operation_id

    run_world(scenario)


@pytest.mark.clause("AD-12")
def test_a_retry_of_a_success_is_not_refused_by_its_own_effects() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            first = await world.run(resume(1, expected_revision=1))
            again = await world.run(resume(1, expected_revision=1))
            assert list(first) == list(again)

    run_world(scenario)


@pytest.mark.clause("AD-12")
def test_a_refusal_does_not_burn_the_key() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await refused(world, pause(expected_revision=7))
            await world.run(flush("other"))
            assert (await world.run(pause(expected_revision=1)))[-1].is_terminal

    run_world(scenario)


@pytest.mark.clause("AD-12")
def test_64_callers_racing_one_key_see_one_operation() -> None:
    import asyncio

    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            streams: list[list[object]] = []

            async def race() -> None:
                streams.append(list(await world.run(pause())))

            async with asyncio.TaskGroup() as tasks:
                for _ in range(64):
                    tasks.create_task(race())
            assert all(s == streams[0] for s in streams)
            assert sum(name == "PauseStep" for name, _ in world.fleet.effects) == 4

    run_world(scenario)


@pytest.mark.case("P-22")
@pytest.mark.clause("AD-13")
def test_the_revision_is_compared_and_zero_is_a_value() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            wrong = await refused(world, flush(expected_revision=3))
            assert isinstance(wrong, Conflict)
            assert wrong.reason == "REVISION_MISMATCH"
            assert wrong.details["current_revision"] == "0"
            await world.run(flush(expected_revision=0))
            stale = await refused(world, flush("f2", expected_revision=0))
            assert stale.details["current_revision"] == "1"

    run_world(scenario)


@pytest.mark.clause("AD-13")
def test_an_unfinished_operation_makes_expected_revisions_wait() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
            await world.submit(flush("f1", target=A))
            pending = await refused(world, flush("f2", target=B, expected_revision=0))
            assert pending.reason == "REVISION_PENDING"
            assert (await world.run(flush("f3", target=B)))[-1].is_terminal

    run_world(scenario)


@pytest.mark.clause("AD-13")
def test_a_rolled_back_failure_leaves_the_revision() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "a/0", "PauseStep")
            await world.run(pause())
            assert world.store.desired.revision == 0

    run_world(scenario)


@pytest.mark.clause("AD-15")
def test_unknown_names_and_unsupported_wishes_are_told_apart() -> None:
    async def scenario(world: AdminWorld) -> None:
        rank = world.fleet.ranks["b/1"]  # type: ignore[index]
        rank.capabilities = dataclasses.replace(
            rank.capabilities,
            pause_modes=frozenset({PauseMode.DRAIN}),
            cache_kinds=frozenset(),
        )
        async with world.server():
            model = await refused(world, pause(target=ModelTargets(models=("m", "nope"))))
            assert isinstance(model, NotFound)
            assert model.details["models"] == "nope"
            nobody = await refused(world, pause(target=ParticipantTargets(participant_ids=("z/9",))))
            assert isinstance(nobody, NotFound)
            keep = await refused(world, pause(spec=KEEP))
            assert isinstance(keep, Unsupported)
            assert keep.details["participants"] == "b/1"
            assert isinstance(await refused(world, flush()), Unsupported)
            assert (await world.run(pause(spec=KEEP, target=A)))[-1].is_terminal

    run_world(scenario)


@pytest.mark.clause("AD-15")
def test_models_are_named_by_alias_too() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            done = (await world.run(pause(target=ModelTargets(models=("m-alias",)))))[-1].event
            assert isinstance(done, OperationCompleted)

    run_world(scenario)


@pytest.mark.clause("AD-17")
def test_checks_come_in_their_order() -> None:
    """One request that is wrong in every way; each repair uncovers the next check."""

    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause("held", target=A))
            await world.run(release("r", target=A, spec=None))
            world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
            await world.submit(flush("running", target=A))
            world.fleet.disconnect("b")
            world.core.participants_changed()
            await world.settle(2.0)
            rank = world.fleet.ranks["b/0"]  # type: ignore[index]
            rank.capabilities = dataclasses.replace(
                rank.capabilities, cache_kinds=frozenset({CacheKind.PREFIX})
            )

            bad = dataclasses.replace(flush("", target=B, expected_revision=9), kinds=())
            reasons = []
            steps = [
                (bad, VIEWER),
                (bad, ADMIN),
                (dataclasses.replace(bad, options=pause("held").options), ADMIN),
                (dataclasses.replace(flush("held", target=B, expected_revision=9)), ADMIN),
                (
                    dataclasses.replace(
                        flush("k", target=B, expected_revision=9),
                        kinds=(CacheKind.PREFIX, CacheKind.ENCODER),
                    ),
                    ADMIN,
                ),
                (flush("k", target=B, expected_revision=9), ADMIN),
                (flush("k", target=A, expected_revision=9), ADMIN),
                (resume(55, "k"), ADMIN),
                (resume(1, "k"), ADMIN),
                (flush("k", target=A), ADMIN),
            ]
            for request, principal in steps:
                reasons.append((await refused(world, request, principal)).reason)
            assert reasons == [
                "PERMISSION_DENIED",
                "INVALID_FIELD",
                "INVALID_FIELD",
                "IDEMPOTENCY_KEY_REUSED",
                "UNSUPPORTED_BY_PARTICIPANT",
                "PARTICIPANT_OFFLINE",
                "REVISION_MISMATCH",
                "STALE_EPOCH",
                "RESOURCES_RELEASED",
                "OPERATION_IN_PROGRESS",
            ]

    run_world(scenario)


@pytest.mark.clause("AD-18")
def test_too_many_operations_at_once_are_refused() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
            await world.submit(flush("f1", target=A))
            many = await refused(world, flush("f2", target=B))
            assert isinstance(many, Overloaded)
            assert many.reason == "TOO_MANY_OPERATIONS"

    run_world(scenario, limits=AdminLimits(max_concurrent_operations=1))


@pytest.mark.clause("AD-18")
def test_somebody_else_may_not_supersede_a_running_pause() -> None:
    other = Principal(name="other", permissions=PRESETS["operator"])

    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "PauseStep")
            await world.submit(pause("p1"), OPERATOR)
            assert (await refused(world, pause("p2", ABORT), other)).reason == "OPERATION_IN_PROGRESS"
            done = (await world.run(pause("p3", ABORT), ADMIN))[-1].event
            assert isinstance(done, OperationCompleted)

    run_world(scenario)


@pytest.mark.clause("AD-19")
def test_offline_participants_are_skipped_by_all_and_refused_by_name() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.fleet.disconnect("b")
        async with world.server():
            assert (await refused(world, pause(target=B))).reason == "PARTICIPANT_OFFLINE"
            operation_id = await world.submit(pause())
            await world.finish(operation_id)
            operation = await world.core.get(ADMIN, operation_id)
            assert operation.skipped == ("b/0", "b/1")
            assert operation.affected_models == ("m",)
            # The pause by `all` also binds who comes later (AD-35).
            world.fleet.reconnect("b")
            world.core.participants_changed()
            await world.settle(2.0)
            assert all(r.paused for r in world.fleet.members("b"))
            assert not world.fleet.is_open("b/0")
            await world.run(resume(1))
            await world.settle(1.0)
            assert all(world.fleet.is_open(p) for p in world.fleet.ranks)
            world.fleet.disconnect("a")
            world.fleet.disconnect("b")
            assert (await refused(world, flush())).reason == "NO_PARTICIPANTS"

    run_world(scenario)


@pytest.mark.clause("AD-22")
def test_an_observer_that_leaves_detaches_only_itself() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            operation_id = await world.submit(pause())
            events = await world.finish(operation_id)
            assert isinstance(events[-1].event, OperationCompleted)
            later = [e async for e in world.core.watch(ADMIN, operation_id, after_sequence=3)]
            assert [e.sequence for e in later] == list(range(4, len(events) + 1))
            over = [e async for e in world.core.watch(ADMIN, operation_id, after_sequence=10_000)]
            assert over == []

    run_world(scenario)


@pytest.mark.clause("AD-23")
def test_get_tells_the_whole_state() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            events = await world.run(pause(reason="because"))
            operation = await world.core.get(ADMIN, events[0].operation_id)
            assert operation.kind is AdminOperationKind.PAUSE
            assert operation.revision_before == 0
            assert operation.revision_after == 1
            assert operation.last_sequence == len(events)
            assert {s.phase for s in operation.participants} == {ParticipantPhase.COMMITTED}
            assert isinstance(operation.result, PauseResult)
            assert operation.started_at_unix_nanos is not None
            assert operation.deadline_at_unix_nanos is not None
            with pytest.raises(NotFound):
                await world.core.get(ADMIN, "op-unknown")

    run_world(scenario)


@pytest.mark.clause("AD-04")
def test_key_and_reason_are_shown_only_to_their_principal_and_admins() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            events = await world.run(pause(reason="secret plan"), OPERATOR)
            for principal, is_shown in ((VIEWER, False), (OPERATOR, True), (ADMIN, True)):
                operation = await world.core.get(principal, events[0].operation_id)
                assert bool(operation.reason and operation.idempotency_key) is is_shown
                seen = [e async for e in world.core.watch(principal, operation.operation_id)]
                assert bool(seen[0].event.operation.reason) is is_shown  # type: ignore[union-attr]
            with pytest.raises(PermissionDenied):
                await world.run(update("v1"), OPERATOR)

    run_world(scenario)


@pytest.mark.clause("AD-105")
def test_a_dry_run_lists_steps_and_blockers_and_changes_nothing() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause("held", spec=KEEP))
            before = dataclasses.replace(world.store.desired)
            (event,) = await world.run(pause("dry", validate_only=True, expected_revision=5))
            plan = event.event
            assert isinstance(plan, OperationPlan)
            assert event.operation_id == "" and event.sequence == 0
            assert [s.phase for s in plan.steps] == [ParticipantPhase.QUIESCING]
            assert [b.split(":")[0] for b in plan.blockers] == ["REVISION_MISMATCH", "PAUSE_MODE"]
            assert plan.pauses_inference
            assert plan.participant_ids == ("a/0", "a/1", "b/0", "b/1")
            assert world.store.desired == before
            assert len(world.store.records) == 1
            # No key is needed or burnt.
            (event,) = await world.run(flush("", validate_only=True))
            assert isinstance(event.event, OperationPlan)
            assert event.event.blockers == ()
            with pytest.raises(PermissionDenied):
                await world.run(flush("", validate_only=True), VIEWER)
            with pytest.raises(InvalidRequest):
                await world.run(dataclasses.replace(flush("", validate_only=True), kinds=()))

    run_world(scenario)


@pytest.mark.clause("AD-105")
@pytest.mark.parametrize(
    "request_",
    [
        flush(),
        pause(),
        resume(1),
        release(),
        restore(2),
        update("v1"),
        start_profile(),
        reconfigure(4),
    ],
    ids=lambda r: type(r).__name__,
)
def test_every_kind_can_be_planned(request_: MutationRequest) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            dry = dataclasses.replace(
                request_, options=dataclasses.replace(request_.options, validate_only=True)
            )
            (event,) = await world.run(dry)
            assert isinstance(event.event, OperationPlan)
            assert not world.store.records

    run_world(scenario)


@pytest.mark.clause("AD-100", "AD-06")
def test_an_unwritable_store_refuses_mutations_and_runs_none() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.journal.writable = False
            no_store = await refused(world, pause())
            assert isinstance(no_store, Unavailable)
            assert not world.core.is_serving
            assert not world.fleet.effects
            world.journal.writable = True
            await world.settle(10.0)
            assert world.core.is_serving
            await world.run(pause())

    run_world(scenario)


@pytest.mark.clause("AD-100")
def test_an_operation_waits_for_a_store_that_comes_back() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.on_call = lambda _call: setattr(world.journal, "writable", False)
            operation_id = await world.submit(pause(target=A))
            await world.settle(5.0)
            assert world.store.records[operation_id].moves.state.name == "RUNNING"
            world.fleet.on_call = lambda _call: None
            world.journal.writable = True
            done = (await world.finish(operation_id))[-1].event
            assert isinstance(done, OperationCompleted)

    run_world(scenario)


@pytest.mark.clause("AD-101")
def test_every_call_is_audited_allowed_or_refused() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            await refused(world, pause("p2"), VIEWER)
            await world.run(pause("dry", validate_only=True))
            await world.core.profile(VIEWER)
            rows = [(r.entry.principal, r.entry.method, r.entry.outcome) for r in world.store.audit]
            assert rows == [
                ("root", "PAUSE", "ACCEPTED"),
                ("guest", "PAUSE", "PERMISSION_DENIED"),
                ("root", "PAUSE", "PLANNED"),
                ("guest", "GET_ADMIN_PROFILE", "ALLOWED"),
            ]

    run_world(scenario)


@pytest.mark.clause("AD-104")
def test_1000_participants_pause_and_resume_as_one_operation() -> None:
    shape = {f"g{n}": 1 for n in range(1000)}

    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            events = await world.run(pause(spec=DRAIN))
            assert isinstance(events[-1].event, OperationCompleted)
            assert len(world.fleet.calls) == 1000
            assert len(events) < 4 * 1000
            await world.run(resume(1))
            assert len(world.fleet.calls) == 2000

    run_world(scenario, shape=shape)
