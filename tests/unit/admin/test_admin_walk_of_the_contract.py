"""Sentences of the contract that only a second look at odd states shows to be held or not."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from admin_requests import (
    ABORT,
    ALL,
    DRAIN,
    A,
    B,
    flush,
    options,
    pause,
    reconfigure,
    release,
    resume,
    update,
)

from iop.admin.core import CoreTiming
from iop.admin.desired import PauseRecord
from iop.admin.enums import (
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
)
from iop.admin.profile import AdminLimits, ParticipantInfo
from iop.admin.requests import (
    InlineTensor,
    InlineTensorSource,
    ModelTargets,
    ParticipantTargets,
    ReconfigureServingRequest,
    ServingChange,
    Target,
    TensorSpec,
)
from iop.admin.results import (
    FlushCachesResult,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    PauseResult,
)
from iop.admin.steps import ApplyWeightsStep
from iop.core.errors import InvalidRequest, Overloaded, PreconditionFailed
from iop.core.ids import GroupId, OperationId, ParticipantId
from iop.testing.admin_world import ADMIN, AdminWorld, run_world
from iop.testing.fake_participants import ALL_CAPABILITIES, FaultKind


@pytest.mark.clause("AD-42", "AD-48")
@pytest.mark.parametrize("comes_back_as", ["it was", "another process"])
def test_a_pause_cannot_end_while_somebody_who_is_away_has_released_memory_under_it(
    comes_back_as: str,
) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            await world.run(release("give", ResourceKind.KV_CACHE, spec=None, target=B))
            world.fleet.disconnect("b")
            world.core.participants_changed()
            await world.settle()
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(resume(1))
            assert refusal.value.reason == "RESOURCES_RELEASED"
            assert refusal.value.details["participants"] == "b/0,b/1"
            if comes_back_as == "it was":
                world.fleet.reconnect("b")
            else:
                world.fleet.restart("b")
            world.core.participants_changed()
            await world.settle(5.0)
            assert not world.fleet.is_open("b/0"), "it holds memory back, so it takes no inference"
            assert world.fleet.ranks["b/0"].paused  # type: ignore[index]
            # Who left the configuration for good holds nobody up.
            for rank in world.fleet.members("b"):
                del world.fleet.ranks[rank.participant_id]
            assert isinstance((await world.run(resume(1, "again")))[-1].event, OperationCompleted)

    run_world(scenario)


@pytest.mark.clause("AD-29", "AD-42", "AD-43")
def test_nothing_is_released_under_a_pause_that_may_be_taken_back_yet() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.fleet.disconnect("b")
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "ReleaseStep")
            running = await world.submit(release("all", ResourceKind.KV_CACHE))
            world.fleet.reconnect("b")
            world.core.participants_changed()
            await world.settle(5.0)
            assert world.fleet.ranks["b/0"].paused, "the pause binds who joins"  # type: ignore[index]
            for wanted in (
                release("mine", ResourceKind.WEIGHTS, spec=None, target=B),
                update("v1", quiesce=None),
            ):
                with pytest.raises(PreconditionFailed) as refusal:
                    await world.run(wanted)
                assert refusal.value.reason in {"NOT_PAUSED", "OPERATION_IN_PROGRESS"}
            await world.core.cancel(ADMIN, running, reason="")
            await world.finish(running)
            await world.settle(40.0)
            assert world.fleet.is_open("b/0")
            assert not world.fleet.ranks["b/0"].released  # type: ignore[index]

    run_world(scenario)


@pytest.mark.clause("AD-18")
def test_a_harder_pause_takes_the_place_of_the_one_that_it_ends_also_where_no_other_is_free() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "PauseStep")
            await world.submit(pause("p1"))
            with pytest.raises(PreconditionFailed):
                await world.run(flush("f", target=A))
            assert isinstance((await world.run(pause("p2", ABORT)))[-1].event, OperationCompleted)
            world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
            await world.submit(flush("f1", target=A))
            with pytest.raises(Overloaded):
                await world.run(pause("p3", ABORT, B))

    run_world(scenario, limits=AdminLimits(max_concurrent_operations=1))


@pytest.mark.clause("AD-34")
def test_an_update_empties_what_each_engine_caches_also_what_the_others_do_not() -> None:
    async def scenario(world: AdminWorld) -> None:
        plain = dataclasses.replace(
            ALL_CAPABILITIES,
            cache_kinds=frozenset({CacheKind.PREFIX}),
            busy_policies=frozenset({BusyPolicy.FAIL}),
        )
        bare = dataclasses.replace(ALL_CAPABILITIES, cache_kinds=frozenset(), busy_policies=frozenset())
        for capabilities, group in ((plain, "b"), (bare, "c")):
            for rank in world.fleet.members(group):
                rank.capabilities = capabilities
        async with world.server():
            assert isinstance((await world.run(update("v1")))[-1].event, OperationCompleted)
            assert all(r.cached == dict.fromkeys(CacheKind, 0) for r in world.fleet.members("a"))
            assert all(r.cached[CacheKind.PREFIX] == 0 for r in world.fleet.members("b"))
            assert {
                call.group_id for call in world.fleet.calls if call.body.__class__.__name__ == "FlushStep"
            } == {
                "a",
                "b",
            }

    run_world(scenario, shape={"a": 2, "b": 1, "c": 1})


@pytest.mark.clause("AD-40", "AD-23")
def test_a_flush_that_failed_tells_of_every_cache_what_became_of_it() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "b/0", "FlushStep")
            events = await world.run(flush())
            assert isinstance(events[-1].event, OperationFailed)
            operation = await world.core.get(ADMIN, events[0].operation_id)
            assert isinstance(operation.result, FlushCachesResult)
            told = {(c.participant_id, c.kind): (c.outcome, c.detail) for c in operation.result.caches}
            assert told == {
                ("a/0", CacheKind.PREFIX): (CacheOutcome.CLEARED, ""),
                ("a/1", CacheKind.PREFIX): (CacheOutcome.CLEARED, ""),
                ("b/0", CacheKind.PREFIX): (CacheOutcome.UNKNOWN, "it said no"),
                ("b/1", CacheKind.PREFIX): (CacheOutcome.CLEARED, ""),
            }
            # Who says cleared and still holds something, while it stands still, is not believed.
            await world.run(pause())
            world.fleet.ranks["a/0"].cached[CacheKind.PREFIX] = 3  # type: ignore[index]
            world.fleet.arm(FaultKind.LIE, "a/0", "FlushStep")
            lied = await world.run(flush("lied"))
            operation = await world.core.get(ADMIN, lied[0].operation_id)
            assert isinstance(operation.result, FlushCachesResult)
            assert [c.outcome for c in operation.result.caches].count(CacheOutcome.UNKNOWN) == 1

    run_world(scenario)


@pytest.mark.clause("AD-105", "AD-17")
def test_a_dry_run_compares_the_digests_of_tensors_as_the_real_one_does() -> None:
    async def scenario(world: AdminWorld) -> None:
        tensor = InlineTensor(
            spec=TensorSpec(name="w", dtype=TensorDtype.FLOAT32, shape=(1,)), data=b"1234", sha256=b"?" * 32
        )
        async with world.server():
            for dry in (True, False):
                request = update("v1", source=InlineTensorSource(tensors=(tensor,)), validate_only=dry)
                with pytest.raises(InvalidRequest) as refusal:
                    await world.run(request)
                assert refusal.value.reason == "SOURCE_MISMATCH"
            assert not world.store.blobs

    run_world(scenario)


@pytest.mark.clause("AD-47")
def test_a_value_over_the_limit_is_refused_with_the_judgements_of_all_fields() -> None:
    async def scenario(world: AdminWorld) -> None:
        for rank in world.fleet.ranks.values():
            rank.capabilities = dataclasses.replace(ALL_CAPABILITIES, capacity_max=12)
        request = ReconfigureServingRequest(
            options=options("k"),
            target=ParticipantTargets(participant_ids=("a/0", "a/1")),
            changes=(
                ServingChange(field=ReconfigurableField.CAPACITY, value=13),
                ServingChange(field=ReconfigurableField.ENABLED, value=False),
            ),
        )
        async with world.server():
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(request)
            assert refusal.value.reason == "CHANGE_REJECTED"
            assert refusal.value.details == {
                "a/0/CAPACITY": "REJECTED 13 is bad luck",
                "a/0/ENABLED": "APPLIED",
                "a/1/CAPACITY": "REJECTED 13 is bad luck",
                "a/1/ENABLED": "APPLIED",
            }
            # Engines that do not judge it themselves are kept from it all the same.
            with pytest.raises(PreconditionFailed) as refusal:
                await world.run(reconfigure(14))
            assert refusal.value.reason == "LIMIT_EXCEEDED"
            (planned,) = await world.run(reconfigure(14, validate_only=True))
            assert isinstance(planned.event, OperationPlan)
            assert {b.split(":")[0] for b in planned.event.blockers} == {"LIMIT_EXCEEDED"}

    run_world(scenario)


@pytest.mark.clause("AD-32")
def test_tensors_are_not_forgotten_between_their_spooling_and_the_acceptance() -> None:
    async def scenario(world: AdminWorld) -> None:
        spec = TensorSpec(name="w", dtype=TensorDtype.FLOAT32, shape=(1,))
        source = InlineTensorSource(tensors=(InlineTensor(spec=spec, data=b"1234"),))
        async with world.server():
            put = world.journal.put_blob

            async def slowly(digest: bytes, content: bytes) -> None:
                await put(digest, content)
                await asyncio.sleep(30.0)

            world.journal.put_blob = slowly  # type: ignore[method-assign]
            assert isinstance((await world.run(update("v1", source=source)))[-1].event, OperationCompleted)
            await world.settle(30.0)
            assert list(world.store.blobs.values()) == [b"1234"], "it is put back from here"

    run_world(scenario, timing=CoreTiming(expiry_period_s=10.0))


async def joins(world: AdminWorld, group: str) -> None:
    """A group that was away, or that nobody knew, comes."""
    world.fleet.reconnect(group)
    world.core.participants_changed()
    await world.settle(5.0)


@pytest.mark.clause("AD-19", "AD-41")
@pytest.mark.parametrize("selector", [ALL, ModelTargets(models=("m-alias",))])
def test_a_pause_of_everybody_that_gets_an_existing_epoch_binds_who_joins_later(selector: Target) -> None:
    async def scenario(world: AdminWorld) -> None:
        world.fleet.disconnect("b")
        async with world.server():
            await world.run(pause("named", target=A))
            result = (await world.run(pause("everybody", target=selector)))[-1].event
            assert isinstance(result, OperationCompleted)
            assert isinstance(result.result, PauseResult) and result.result.pause_epoch == 1
            await world.run(pause("named again", target=A))
            await joins(world, "b")
            assert not world.fleet.is_open("b/0")
            assert all(r.paused for r in world.fleet.members("b"))
            await world.run(resume(1))
            await world.settle()
            assert world.fleet.is_open("b/0")

    run_world(scenario)


@pytest.mark.clause("AD-19", "AD-41")
def test_a_harder_pause_of_some_does_not_let_go_whom_the_older_one_binds() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.fleet.disconnect("b")
        async with world.server():
            await world.run(pause("everybody"))
            await world.run(pause("named", ABORT, A))
            await joins(world, "b")
            assert not world.fleet.is_open("b/0"), "nobody ended the pause that binds it"
            assert len((await world.core.profile(ADMIN)).pauses) == 2
            await world.run(pause("harder", ABORT))
            assert [p.pause_epoch for p in (await world.core.profile(ADMIN)).pauses] == [2, 3]

    run_world(scenario)


@pytest.mark.clause("AD-18", "AD-19")
def test_a_pause_that_takes_over_a_running_one_binds_whom_that_one_binds() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.fleet.disconnect("b")
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "PauseStep")
            older = await world.submit(pause("everybody"))
            await world.settle()
            assert isinstance((await world.run(pause("named", ABORT, A)))[-1].event, OperationCompleted)
            assert isinstance((await world.finish(older))[-1].event, OperationCancelled)
            await joins(world, "b")
            assert not world.fleet.is_open("b/0")

    run_world(scenario)


@pytest.mark.clause("AD-29", "AD-19")
def test_the_rest_of_a_pause_holds_a_group_that_nobody_had_told_when_its_members_are_told() -> None:
    rest = PauseRecord(
        epoch=1,
        spec=DRAIN,
        participant_ids=(ParticipantId("n1/a/0"), ParticipantId("n2/b")),
        operation_id=OperationId("op"),
        principal="root",
    )

    def rank(participant: str, group: str) -> ParticipantInfo:
        return ParticipantInfo(
            participant_id=ParticipantId(participant),
            group_id=GroupId(group),
            capabilities=ALL_CAPABILITIES,
        )

    assert rest.covers(rank("n1/a/0", "n1/a"))
    assert not rest.covers(rank("n1/a/1", "n1/a"))
    assert rest.covers(rank("n2/b/0", "n2/b"))


@pytest.mark.clause("AD-45", "AD-42", "AD-35")
def test_an_update_over_released_weights_also_ends_the_release_of_who_is_away() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(release("give", ResourceKind.WEIGHTS))
            world.fleet.disconnect("b")
            world.core.participants_changed()
            await world.settle()
            assert isinstance((await world.run(update("v1", quiesce=None)))[-1].event, OperationCompleted)
            assert not (await world.core.profile(ADMIN)).releases
            assert isinstance((await world.run(resume(1)))[-1].event, OperationCompleted)
            await joins(world, "b")
            for rank in world.fleet.ranks.values():
                assert (rank.label, rank.content, rank.released, rank.paused) == (
                    "v1",
                    "/weights/v1",
                    set(),
                    False,
                )
                assert world.fleet.is_open(rank.participant_id)

    run_world(scenario)


@pytest.mark.clause("AD-35", "AD-37")
def test_who_joins_with_other_weights_under_the_published_label_gets_the_published_ones() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.fleet.disconnect("b")
        async with world.server():
            await world.run(update("v1"))
            for rank in world.fleet.members("b"):
                rank.label, rank.content = "v1", "somebody else's v1"
            await joins(world, "b")
            assert {r.content for r in world.fleet.members("b")} == {"/weights/v1"}
            assert world.fleet.is_open("b/0")
            # Once: from then on its content is known.
            loads = len([c for c in world.fleet.calls if isinstance(c.body, ApplyWeightsStep)])
            await joins(world, "b")
            await world.settle(100.0)
            assert len([c for c in world.fleet.calls if isinstance(c.body, ApplyWeightsStep)]) == loads

    run_world(scenario)
