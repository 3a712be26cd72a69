"""The revision rises when an operation left something changed, and only then (AD-13, AD-29)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from admin_requests import flush, pause, release, restore, resume, start_profile, stop_profile

from iop.admin.enums import CacheOutcome
from iop.admin.participant import ProgressSink
from iop.admin.requests import MutationRequest
from iop.admin.results import OperationFailed
from iop.admin.steps import FlushStep, ParticipantReadBack, StepCall, StepResult
from iop.core.ids import ParticipantId
from iop.testing.admin_world import AdminWorld, run_world
from iop.testing.fake_participants import FaultKind


async def failed(world: AdminWorld, request: MutationRequest) -> OperationFailed:
    """Run one that fails; the revision rose by one exactly if it says that it left something."""
    before = world.store.desired.revision
    ended = (await world.run(request))[-1].event
    assert isinstance(ended, OperationFailed), ended
    assert world.store.desired.revision == before + (not ended.error.rolled_back)
    return ended


def refuse_flushes(world: AdminWorld, groups: Sequence[str]) -> None:
    """Engines that are too busy."""
    execute = world.fleet.execute

    async def busy(call: StepCall, report: ProgressSink) -> StepResult:
        result = await execute(call, report)
        if not isinstance(call.body, FlushStep) or call.group_id not in groups:
            return result
        told = tuple(
            dataclasses.replace(
                o, caches=tuple(dataclasses.replace(c, outcome=CacheOutcome.REFUSED) for c in o.caches)
            )
            for o in result.participants
        )
        return dataclasses.replace(result, participants=told)

    world.fleet.execute = busy  # type: ignore[method-assign]


@pytest.mark.clause("AD-13", "AD-29", "AD-40")
@pytest.mark.parametrize(("groups", "is_unchanged"), [("ab", True), ("b", False)])
def test_a_flush_that_everybody_refused_left_nothing(groups: str, is_unchanged: bool) -> None:
    async def scenario(world: AdminWorld) -> None:
        refuse_flushes(world, groups)
        async with world.server():
            ended = await failed(world, flush())
            assert ended.error.rolled_back is is_unchanged
            assert ended.error.quarantined == ()

    run_world(scenario)


@pytest.mark.clause("AD-13", "AD-29")
def test_a_flush_whose_answer_never_came_may_have_left_something() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.arm(FaultKind.HANG, "a/0", "FlushStep")
            world.fleet.arm(FaultKind.HANG, "b/0", "FlushStep")
            ended = await failed(world, flush(deadline_ms=2000))
            assert not ended.error.rolled_back

    run_world(scenario)


def tell_nothing(world: AdminWorld, *, for_s: float) -> None:
    """Engines of group a that tell nothing of themselves for a while after a step of theirs was given up."""
    read_back, execute, silent_until = world.fleet.read_back, world.fleet.execute, -1.0

    async def given_up(call: StepCall, report: ProgressSink) -> StepResult:
        nonlocal silent_until
        try:
            return await execute(call, report)
        except asyncio.CancelledError:
            silent_until = world.clock.monotonic() + for_s
            raise

    async def told(ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        is_silent = world.clock.monotonic() < silent_until
        return [
            dataclasses.replace(each, reachable=False)
            if is_silent and each.participant_id.startswith("a/")
            else each
            for each in await read_back(ids)
        ]

    world.fleet.execute = given_up  # type: ignore[method-assign]
    world.fleet.read_back = told  # type: ignore[method-assign]


@pytest.mark.clause("AD-29", "AD-31")
@pytest.mark.parametrize("kind", ["flush", "pause"])
@pytest.mark.parametrize(("for_s", "quarantined"), [(4.0, ()), (1000.0, ("a/0", "a/1"))])
def test_an_engine_that_tells_nothing_for_a_moment_is_asked_again_before_it_is_quarantined(
    kind: str, for_s: float, quarantined: tuple[str, ...]
) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            tell_nothing(world, for_s=for_s)
            step = "FlushStep" if kind == "flush" else "PauseStep"
            world.fleet.arm(FaultKind.HANG, "a/0", step)
            request = flush(deadline_ms=2000) if kind == "flush" else pause(deadline_ms=2000)
            ended = await failed(world, request)
            assert ended.error.quarantined == quarantined

    run_world(scenario)


@pytest.mark.clause("AD-13", "AD-29")
@pytest.mark.parametrize("kind", ["resume", "restore"])
def test_an_engine_that_refuses_to_go_on_is_as_it_was(kind: str) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause() if kind == "resume" else release())
            for rank in world.fleet.ranks:
                world.fleet.arm(FaultKind.ERROR, rank)
            ended = await failed(world, resume(1) if kind == "resume" else restore(2))
            assert ended.error.rolled_back
            assert ended.error.quarantined == ()
            assert list(world.store.desired.pauses) == [1]

    run_world(scenario)


@pytest.mark.clause("AD-13", "AD-29")
def test_a_resume_that_some_engines_refused_left_the_others_awake() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            for rank in ("a/0", "a/1"):
                world.fleet.arm(FaultKind.ERROR, rank)
            ended = await failed(world, resume(1))
            assert not ended.error.rolled_back
            assert ended.error.quarantined == ()

    run_world(scenario)


@pytest.mark.clause("AD-13", "AD-31")
def test_a_resume_of_an_engine_that_vanished_may_have_left_it_awake() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await world.run(pause())
            world.fleet.arm(FaultKind.DISCONNECT, "a/0", "ResumeStep")
            ended = await failed(world, resume(1))
            assert not ended.error.rolled_back
            assert ended.error.quarantined == ("a/0", "a/1")

    run_world(scenario)


@pytest.mark.clause("AD-13", "AD-46")
def test_a_profile_that_could_not_be_stopped_still_runs() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            started = await world.run(start_profile())
            profile_id = f"profile-{started[0].operation_id}"
            for rank in world.fleet.ranks:
                world.fleet.arm(FaultKind.ERROR, rank)
            ended = await failed(world, stop_profile(profile_id))
            assert ended.error.rolled_back
            assert not world.store.desired.profiles[profile_id].stopped

    run_world(scenario)
