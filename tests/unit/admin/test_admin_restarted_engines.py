"""Engines that restart with a server, or under an operation, are brought to where the journal says before anything is
claimed of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from admin_requests import flush, pause, reconfigure, release, restore, update

from iop.admin.enums import ReconfigurableField, ResourceKind
from iop.admin.requests import MutationRequest
from iop.admin.results import OperationCompleted, OperationFailed
from iop.admin.steps import ParticipantReadBack
from iop.core.errors import PreconditionFailed
from iop.core.ids import ParticipantId
from iop.testing.admin_world import AdminWorld, run_world
from iop.testing.fake_participants import FaultKind

WEIGHTS = ResourceKind.WEIGHTS


async def crash_with_engines(world: AdminWorld, request: MutationRequest, *, writes: int) -> str:
    """Let the server die at a write of an operation, and all engines with it; the operation."""
    async with world.server():
        world.crash_at = world.writes + writes
        operation_id = await world.submit(request)
        await world.settle(100)
    assert world.crashed.is_set()
    world.crash_at = None
    for group in "ab":
        world.fleet.restart(group)
    return operation_id


@pytest.mark.clause("AD-26", "AD-35")
@pytest.mark.parametrize("writes", range(6, 12))
def test_a_release_goes_on_forward_over_engines_that_forgot_their_pause(writes: int) -> None:
    async def scenario(world: AdminWorld) -> None:
        operation_id = await crash_with_engines(world, release(), writes=writes)
        async with world.server():
            ended = (await world.finish(operation_id))[-1].event
            assert isinstance(ended, OperationCompleted), ended
            ranks = world.fleet.ranks.values()
            assert {(r.paused, frozenset(r.released)) for r in ranks} == {
                (True, frozenset({ResourceKind.KV_CACHE}))
            }

    run_world(scenario)


@pytest.mark.clause("AD-26", "AD-32")
def test_past_the_point_of_no_return_restarted_engines_get_the_published_weights() -> None:
    async def scenario(world: AdminWorld) -> None:
        for writes in range(20, 40):
            inner = AdminWorld({"a": 2, "b": 2})
            operation_id = await crash_with_engines(inner, update("v1"), writes=writes)
            is_committed = bool(inner.store.records[operation_id].moves.committed)
            async with inner.server():
                ended = (await inner.finish(operation_id))[-1].event
                if is_committed:
                    assert isinstance(ended, OperationCompleted), ended
                    assert {r.content for r in inner.fleet.ranks.values()} == {"/weights/v1"}
                assert inner.store.desired.quarantines == {}
            if is_committed:
                return
        pytest.fail("it never got past the point of no return")

    run_world(scenario)


@pytest.mark.clause("AD-35", "AD-44")
def test_weights_that_are_released_again_are_the_published_ones() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(update("v1"))
            await world.run(release("release", WEIGHTS))
            world.fleet.restart("a")
            world.core.participants_changed()
            await world.settle(10)
            assert {frozenset(r.released) for r in world.fleet.members("a")} == {frozenset({WEIGHTS})}
            ended = (await world.run(restore(2, "restore", WEIGHTS)))[-1].event
            assert isinstance(ended, OperationCompleted), ended
            assert {r.content for r in world.fleet.ranks.values()} == {"/weights/v1"}

    run_world(scenario)


@pytest.mark.clause("AD-29", "AD-31", "AD-35")
def test_an_engine_that_restarts_within_a_restore_is_no_case_for_quarantine() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            await world.run(release("release", spec=None))
            for rank in ("a/0", "a/1"):
                world.fleet.arm(FaultKind.RESTART, rank, "RestoreStep")
            ended = (await world.run(restore(2)))[-1].event
            assert isinstance(ended, OperationFailed)
            assert ended.error.quarantined == ()
            again = (await world.run(restore(2, "again")))[-1].event
            assert isinstance(again, OperationCompleted), again

    run_world(scenario)


@pytest.mark.clause("AD-26", "AD-29", "AD-31", "AD-35")
@pytest.mark.parametrize(
    ("request_", "dies_after_s"),
    [(pause("late", deadline_ms=2000), 15.0), (flush("late", deadline_ms=2000), 5.0)],
    ids=["undone", "kept"],
)
def test_an_engine_that_hung_before_it_died_with_its_server_is_brought_back(
    request_: MutationRequest, dies_after_s: float
) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(update("v1"))
            read_back = world.fleet.read_back

            async def silent(ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
                await asyncio.Event().wait()
                return await read_back(ids)

            world.fleet.read_back = silent  # type: ignore[method-assign]
            world.fleet.arm(FaultKind.HANG, "a/0", once=False)
            operation_id = await world.submit(request_)
            await world.settle(dies_after_s)
            assert world.store.step_records[operation_id]
        world.fleet.read_back = read_back  # type: ignore[method-assign]
        world.fleet.faults.clear()
        for group in "ab":
            world.fleet.restart(group)
        async with world.server():
            await world.finish(operation_id)
            assert world.store.desired.quarantines == {}
            await world.settle(5.0)
            assert {(r.content, r.paused) for r in world.fleet.ranks.values()} == {("/weights/v1", False)}

    run_world(scenario)


@pytest.mark.clause("AD-31", "AD-45")
def test_the_published_version_may_be_put_again_on_whoever_is_quarantined() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(update("v1"))
            world.fleet.arm(FaultKind.ERROR, "a/0", once=False)
            await world.run(pause())
            assert set(world.store.desired.quarantines) == {"a"}
            world.fleet.faults.clear()
            for rank in world.fleet.members("a"):
                rank.content, rank.label, rank.paused = "base", "v0", False
            ended = (await world.run(update("v1", "again")))[-1].event
            assert isinstance(ended, OperationCompleted), ended
            assert {r.content for r in world.fleet.ranks.values()} == {"/weights/v1"}
            assert world.store.desired.quarantines == {}
            with pytest.raises(PreconditionFailed, match="weight version already"):
                await world.run(update("v1", "once more"))

    run_world(scenario)


@pytest.mark.clause("AD-31", "AD-35", "AD-47")
def test_an_operation_ends_the_quarantine_of_an_engine_that_restarted_unseen() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(reconfigure(4))
            world.fleet.arm(FaultKind.ERROR, "a/0", once=False)
            await world.run(pause())
            assert set(world.store.desired.quarantines) == {"a"}
            world.fleet.faults.clear()
            before = world.fleet.participants()
            world.fleet.participants = lambda: before  # type: ignore[method-assign]
            for rank in world.fleet.members("a"):
                rank.restart()
            assert isinstance((await world.run(pause("again")))[-1].event, OperationCompleted)
            assert world.store.desired.quarantines == {}
            capacities = {r.serving[ReconfigurableField.CAPACITY] for r in world.fleet.ranks.values()}
            assert capacities == {4}
            assert {r.paused for r in world.fleet.ranks.values()} == {True}

    run_world(scenario)
