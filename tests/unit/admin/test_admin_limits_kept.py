"""Limits that a server advertises are those that it keeps: default deadline, retention, length of a history (AD-50)."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from admin_requests import flush, pause, start_profile, stop_profile, update

from iop.admin.enums import AdminErrorCode
from iop.admin.participant import ProgressSink
from iop.admin.profile import AdminLimits
from iop.admin.requests import ParticipantTargets, StartProfileRequest
from iop.admin.results import OperationCompleted, OperationFailed, StartProfileResult, is_terminal
from iop.admin.steps import PauseStep, StepCall, StepResult
from iop.core.errors import NotFound
from iop.testing.admin_world import ADMIN, AdminWorld, run_world

HOUR_MS = 3_600_000


@pytest.mark.clause("AD-25", "AD-50")
def test_an_operation_without_a_deadline_gets_the_advertised_one() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.limits = AdminLimits(default_deadline_ms=7_000)
        execute = world.fleet.execute

        async def endless(call: StepCall, report: ProgressSink) -> StepResult:
            if isinstance(call.body, PauseStep):
                await asyncio.Event().wait()
            return await execute(call, report)

        world.fleet.execute = endless  # type: ignore[method-assign]
        async with world.server() as core:
            assert (await core.profile(ADMIN)).limits.default_deadline_ms == 7_000
            begun = world.clock.monotonic()
            events = await world.run(pause())
            ended = events[-1].event
            assert isinstance(ended, OperationFailed)
            assert ended.error.code is AdminErrorCode.DEADLINE_EXCEEDED
            assert 7.0 <= world.clock.monotonic() - begun < 7.5
            operation = await core.get(ADMIN, events[0].operation_id)
            assert operation.deadline_at_unix_nanos is not None
            assert operation.deadline_at_unix_nanos - operation.accepted_at_unix_nanos == 7_000_000_000

    run_world(scenario)


@pytest.mark.clause("AD-12", "AD-50")
def test_keys_and_operations_are_kept_as_long_as_advertised_and_then_forgotten() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.limits = AdminLimits(idempotency_retention_ms=5 * HOUR_MS, operation_retention_ms=2 * HOUR_MS)
        async with world.server() as core:
            first = (await world.run(flush()))[0].operation_id
            await world.settle(5 * 3600 - 1)
            assert (await world.run(flush()))[0].operation_id == first
            assert (await core.get(ADMIN, first)).operation_id == first
            await world.settle(2 * 3600)
            with pytest.raises(NotFound):
                await core.get(ADMIN, first)
            assert (await world.run(flush()))[0].operation_id != first

    run_world(scenario)


@pytest.mark.clause("AD-46", "AD-50")
def test_profiles_are_forgotten_with_the_operations_that_made_them_unless_they_still_run() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.limits = AdminLimits(idempotency_retention_ms=5 * HOUR_MS, operation_retention_ms=2 * HOUR_MS)

        def on(group: str, key: str) -> StartProfileRequest:
            members = ParticipantTargets(participant_ids=(f"{group}/0", f"{group}/1"))  # type: ignore[arg-type]
            return dataclasses.replace(start_profile(key), target=members)

        async with world.server():
            stopped = (await world.run(on("a", "one")))[-1].event
            await world.settle(3600)
            assert isinstance(stopped, OperationCompleted)
            assert isinstance(stopped.result, StartProfileResult)
            await world.run(stop_profile(stopped.result.profile_id, "two"))
            over = await world.submit(dataclasses.replace(on("a", "three"), max_duration_ms=1000))
            runs = await world.submit(on("b", "four"))
            await world.settle(1)
            for rank in world.fleet.members("a"):
                rank.profiles.clear()
            await world.settle(4.5 * 3600)
            assert len(world.store.desired.profiles) == 3
            await world.settle(2 * 3600)
            assert {p.operation_id for p in world.store.desired.profiles.values()} == {runs}, over

    run_world(scenario)


@pytest.mark.clause("AD-21", "AD-50")
def test_a_history_that_is_full_takes_its_end_and_nothing_else() -> None:
    async def scenario(world: AdminWorld) -> None:
        world.limits = dataclasses.replace(world.limits or AdminLimits(), max_event_history=6)
        async with world.server() as core:
            events = await world.run(update("v1"))
            assert [e.sequence for e in events] == list(range(1, len(events) + 1))
            assert len(events) == 7
            assert [is_terminal(e.event) for e in events] == [False] * 6 + [True]
            again = [e async for e in core.watch(ADMIN, events[0].operation_id)]
            assert again == list(events)

    run_world(scenario)
