"""The whole admin path over a real channel: client, interceptors, service, the operation core and a fake fleet."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_admin_rig import TOKENS, bearer

from iop.admin.enums import (
    AdminOperationKind,
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    CancelDisposition,
    PauseMode,
    ProfilerKind,
)
from iop.admin.profile import Capabilities
from iop.admin.requests import (
    AllTargets,
    FlushCachesRequest,
    ListOperationsRequest,
    MutationOptions,
    ParticipantTargets,
    PauseRequest,
    PauseSpec,
    ResumeRequest,
    StartProfileRequest,
    StopProfileRequest,
)
from iop.admin.results import (
    AdminOperationEvent,
    FlushCachesResult,
    OperationAccepted,
    OperationCompleted,
    OperationPlan,
    PauseResult,
    StartProfileResult,
    StopProfileResult,
)
from iop.api.grpc.auth import PrincipalDirectory
from iop.api.grpc.listeners import admin_listener
from iop.api.grpc.server import ListenerSettings
from iop.client.admin import AdminClient, AdminTarget
from iop.core.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unsupported,
)
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc
from iop.testing.admin_world import AdminWorld


@dataclasses.dataclass
class Site:
    world: AdminWorld
    address: str

    def client(self, role: str = "admin") -> AdminClient:
        return AdminClient(AdminTarget(address=self.address, token=TOKENS[role], timeout_s=60))


@contextlib.asynccontextmanager
async def site_of(principals: PrincipalDirectory) -> AsyncIterator[Site]:
    world = AdminWorld({"g": 2})
    async with world.server() as core:
        settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
        listener = admin_listener(core, principals, settings)
        async with listener.serving():
            yield Site(world=world, address=listener.address)


def flush(key: str = "f", **options: Any) -> FlushCachesRequest:
    return FlushCachesRequest(
        options=MutationOptions(idempotency_key=key, **options),
        target=AllTargets(),
        kinds=(CacheKind.PREFIX,),
        busy_policy=BusyPolicy.WAIT,
    )


def pause(key: str = "p", **options: Any) -> PauseRequest:
    return PauseRequest(
        options=MutationOptions(idempotency_key=key, **options),
        target=AllTargets(),
        pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE),
    )


async def run(admin: AdminClient, request: Any) -> list[AdminOperationEvent]:
    return [event async for event in admin.submit(request)]


def result_of(events: list[AdminOperationEvent]) -> Any:
    done = events[-1].event
    assert isinstance(done, OperationCompleted), done
    return done.result


@pytest.mark.clause("AD-20", "AD-21", "AD-40")
async def test_a_flush_reaches_every_rank_and_its_events_are_gap_free(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        events = await run(admin, flush())
        assert isinstance(events[0].event, OperationAccepted)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert len({event.operation_id for event in events}) == 1
        assert sum(event.is_terminal for event in events) == 1
        result = result_of(events)
        assert isinstance(result, FlushCachesResult)
        assert {(c.participant_id, c.outcome) for c in result.caches} == {
            ("g/0", CacheOutcome.CLEARED),
            ("g/1", CacheOutcome.CLEARED),
        }
        assert all(rank.cached[CacheKind.PREFIX] == 0 for rank in site.world.fleet.members("g"))


@pytest.mark.clause("AD-14", "AD-41", "AD-42")
async def test_pause_then_resume_by_epoch_and_a_stale_epoch_is_refused(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        paused = result_of(await run(admin, pause()))
        assert isinstance(paused, PauseResult)
        assert not site.world.fleet.is_open("g/0")
        profile = await admin.profile()
        assert [active.pause_epoch for active in profile.pauses] == [paused.pause_epoch]
        stale = ResumeRequest(
            options=MutationOptions(idempotency_key="stale"), pause_epoch=paused.pause_epoch + 1
        )
        with pytest.raises(PreconditionFailed) as caught:
            await run(admin, stale)
        assert caught.value.reason == "STALE_EPOCH"
        resume = ResumeRequest(options=MutationOptions(idempotency_key="r"), pause_epoch=paused.pause_epoch)
        await run(admin, resume)
        assert site.world.fleet.is_open("g/0")
        assert (await admin.profile()).pauses == ()


@pytest.mark.case("P-22")
@pytest.mark.clause("AD-12")
async def test_the_same_key_replays_the_same_events_and_another_payload_is_refused(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        first = await run(admin, pause())
        steps = len(site.world.fleet.calls)
        assert await run(admin, pause()) == first
        assert len(site.world.fleet.calls) == steps
        with pytest.raises(AlreadyExists):
            await run(admin, pause(reason="another payload"))
        async with site.client("admin") as other:
            assert (await run(other, flush(key="p")))[0].operation_id != first[0].operation_id


@pytest.mark.case("P-22")
@pytest.mark.slow
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-22")
async def test_64_callers_that_race_one_key_cause_one_effect_and_see_one_history(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site, contextlib.AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(site.client("operator")) for _ in range(64)]
        seen: list[list[AdminOperationEvent]] = []

        async def call(admin: AdminClient, number: int) -> None:
            events = admin.submit(pause())
            if number % 4:
                seen.append([event async for event in events])
                return
            # These leave after their first event and come back for the rest.
            first = await anext(events)
            await events.aclose()  # type: ignore[attr-defined]
            rest = admin.watch(first.operation_id, after_sequence=first.sequence)
            seen.append([first, *[event async for event in rest]])

        async with asyncio.TaskGroup() as tasks:
            for number, admin in enumerate(callers):
                tasks.create_task(call(admin, number))
        assert len(seen) == 64
        assert all(events == seen[0] for events in seen)
        assert [event.sequence for event in seen[0]] == list(range(1, len(seen[0]) + 1))
        assert [event.is_terminal for event in seen[0]] == [False] * (len(seen[0]) - 1) + [True]
        assert len(site.world.fleet.calls) == 1, "one group, one step, once"
        profile = await callers[0].profile()
        assert len(profile.pauses) == 1
        page = await callers[0].list_operations()
        assert len(page.operations) == 1


@pytest.mark.clause("AD-11")
@pytest.mark.parametrize("key", ["", "x" * 129, "caf\u00e9", "tab\t", "line\n"])
async def test_a_missing_or_malformed_idempotency_key_is_refused(
    principals: PrincipalDirectory, key: str
) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        with pytest.raises(InvalidRequest) as caught:
            await run(admin, flush(key=key))
        assert caught.value.details["field"] == "options.idempotency_key"
        assert (await admin.list_operations()).operations == ()


@pytest.mark.clause("AD-11")
async def test_a_key_of_128_printable_characters_is_taken(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        await run(admin, flush(key="~" * 128))


@pytest.mark.clause("AD-13")
async def test_zero_is_an_expected_revision_and_a_mismatch_names_the_current_one(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        await run(admin, flush("one", expected_revision=0))
        with pytest.raises(Conflict) as caught:
            await run(admin, flush("two", expected_revision=0))
        assert caught.value.reason == "REVISION_MISMATCH"
        assert "1" in caught.value.details.values()
        assert (await admin.profile()).revision == 1


@pytest.mark.clause("AD-15")
async def test_a_kind_that_a_participant_cannot_do_is_unimplemented_and_names_it(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        can_pause = Capabilities(operations=frozenset({AdminOperationKind.PAUSE}))
        for rank in site.world.fleet.members("g"):
            rank.capabilities = can_pause
        with pytest.raises(Unsupported) as caught:
            await run(admin, flush())
        assert "g/0" in str(dict(caught.value.details))


@pytest.mark.clause("AD-19")
async def test_a_group_named_in_part_is_refused(principals: PrincipalDirectory) -> None:
    part = dataclasses.replace(flush(), target=ParticipantTargets(participant_ids=("g/0",)))
    async with site_of(principals) as site, site.client("operator") as admin:
        with pytest.raises(PreconditionFailed) as caught:
            await run(admin, part)
        assert caught.value.reason == "PARTIAL_GROUP"


@pytest.mark.clause("AD-22", "AD-26")
async def test_a_broken_stream_leaves_the_operation_running_and_watch_attaches_again(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site:
        # The step waits until the group is back, so the observer is surely gone before the operation ends.
        site.world.fleet.on_call = lambda _call: site.world.fleet.disconnect("g")
        async with grpc.aio.insecure_channel(site.address) as channel:
            stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
            stream = stub.FlushCaches(
                pb.FlushCachesRequest(
                    options=pb.MutationOptions(idempotency_key="cut"),
                    target=pb.TargetSelector(all=pb.AllTargets()),
                    kinds=[pb.CACHE_KIND_PREFIX],
                    busy_policy=pb.BUSY_POLICY_WAIT,
                ),
                metadata=bearer("operator"),
                timeout=10,
            )
            first = await stream.read()
            stream.cancel()
        async with site.client("viewer") as viewer:
            running = await viewer.get(first.operation_id)
            assert not running.state.is_terminal
            site.world.fleet.on_call = lambda _call: None
            site.world.fleet.reconnect("g")
            events = [event async for event in viewer.watch(first.operation_id, after_sequence=1)]
            assert events[0].sequence == 2
            assert isinstance(events[-1].event, OperationCompleted)
            assert (await viewer.get(first.operation_id)).state is AdminOperationState.SUCCEEDED


@pytest.mark.clause("AD-04", "AD-23")
async def test_key_and_reason_are_shown_to_their_principal_and_admins_only(
    principals: PrincipalDirectory,
) -> None:
    async with site_of(principals) as site, site.client("operator") as operator:
        events = await run(operator, flush("hidden", reason="because"))
        operation_id = events[0].operation_id
        seen = {}
        for role in ("viewer", "operator", "admin"):
            async with site.client(role) as client:
                operation = await client.get(operation_id)
                listed = (await client.list_operations()).operations[0]
                assert (listed.idempotency_key, listed.reason) == (
                    operation.idempotency_key,
                    operation.reason,
                )
                watched = [event async for event in client.watch(operation_id)]
                accepted = watched[0].event
                assert isinstance(accepted, OperationAccepted)
                assert accepted.operation.idempotency_key == operation.idempotency_key
                seen[role] = (operation.idempotency_key, operation.reason)
        assert seen == {
            "viewer": ("", ""),
            "operator": ("hidden", "because"),
            "admin": ("hidden", "because"),
        }


@pytest.mark.clause("AD-04", "AD-24")
async def test_cancelling_needs_the_permission_of_the_cancelled_kind(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site, site.client("operator") as operator:
        operation_id = (await run(operator, pause()))[0].operation_id
        answer = await operator.cancel(operation_id)
        assert answer.disposition is CancelDisposition.ALREADY_TERMINAL
        with pytest.raises(NotFound):
            await operator.cancel("op-unknown")
        async with site.client("viewer") as viewer:
            for operation in (operation_id, "op-unknown"):
                with pytest.raises(PermissionDenied):
                    await viewer.cancel(operation)


@pytest.mark.clause("AD-105")
async def test_a_dry_run_answers_one_plan_and_leaves_nothing(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        (event,) = await run(admin, pause(validate_only=True))
        assert isinstance(event.event, OperationPlan)
        assert (event.operation_id, event.event.pauses_inference) == ("", True)
        assert (await admin.list_operations()).operations == ()
        assert site.world.fleet.calls == []


@pytest.mark.clause("AD-46")
async def test_profiles_start_and_stop_as_unary_calls(principals: PrincipalDirectory) -> None:
    start = StartProfileRequest(
        options=MutationOptions(idempotency_key="s"), target=AllTargets(), kinds=(ProfilerKind.CPU,)
    )
    async with site_of(principals) as site, site.client("operator") as admin:
        started = await admin.start_profile(start)
        assert isinstance(started, StartProfileResult)
        assert await admin.start_profile(start) == started
        stop = StopProfileRequest(options=MutationOptions(idempotency_key="t"), profile_id=started.profile_id)
        stopped = await admin.stop_profile(stop)
        assert isinstance(stopped, StopProfileResult)
        assert {artifact.participant_id for artifact in stopped.artifacts} == {"g/0", "g/1"}
        unknown = StopProfileRequest(options=MutationOptions(idempotency_key="u"), profile_id="never")
        with pytest.raises(NotFound):
            await admin.stop_profile(unknown)


@pytest.mark.clause("AD-01")
async def test_operations_are_listed_newest_first_in_pages(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        ids = [(await run(admin, flush(f"k{n}")))[0].operation_id for n in range(3)]
        page = await admin.list_operations(ListOperationsRequest(page_size=2))
        assert [operation.operation_id for operation in page.operations] == ids[:0:-1]
        rest = await admin.list_operations(
            ListOperationsRequest(page_size=2, page_token=page.next_page_token)
        )
        assert [operation.operation_id for operation in rest.operations] == ids[:1]
        assert rest.next_page_token == ""
        with pytest.raises(InvalidRequest):
            await admin.list_operations(ListOperationsRequest(page_token="not ours"))


@pytest.mark.clause("AD-101")
async def test_refused_calls_stand_in_the_audit_chain(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site:
        async with site.client("viewer") as viewer:
            with pytest.raises(PermissionDenied):
                await run(viewer, flush())
        rows = [(row.entry.principal, row.entry.method, row.entry.outcome) for row in site.world.store.audit]
        assert ("viewer", "FLUSH_CACHES", "PERMISSION_DENIED") in rows


async def test_two_observers_of_one_operation_see_the_same_events(principals: PrincipalDirectory) -> None:
    async with site_of(principals) as site, site.client("operator") as admin:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(run(admin, pause()), name="first")
            second = tasks.create_task(run(admin, pause()), name="second")
        assert first.result() == second.result()
