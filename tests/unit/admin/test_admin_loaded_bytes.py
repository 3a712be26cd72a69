"""How much of the new weights each participant has loaded is told while it loads, and stays with its status (AD-23)."""

from __future__ import annotations

import pytest
from admin_requests import update

from iop.admin.enums import ParticipantPhase
from iop.admin.participant import ProgressSink
from iop.admin.results import OperationCompleted, ParticipantUpdate
from iop.admin.steps import BYTES_UNIT, PrepareWeightsStep, StepCall, StepProgress, StepResult
from iop.testing.admin_world import ADMIN, AdminWorld, run_world


def load_slowly(world: AdminWorld, *, pieces: int) -> None:
    """Every rank loads this many pieces of 100 bytes, one a second."""
    execute = world.fleet.execute

    async def loading(call: StepCall, report: ProgressSink) -> StepResult:
        if isinstance(call.body, PrepareWeightsStep):
            for piece in range(1, pieces + 1):
                for each in call.participant_ids:
                    report(
                        StepProgress(
                            participant_id=each,
                            phase=ParticipantPhase.PREPARING,
                            done=100 * piece,
                            total=100 * pieces,
                            unit=BYTES_UNIT,
                        )
                    )
                if piece < pieces:
                    await world.settle(1.0)
        return await execute(call, report)

    world.fleet.execute = loading  # type: ignore[method-assign]


@pytest.mark.clause("AD-23")
def test_bytes_are_told_while_weights_load_and_stay_with_the_operation() -> None:
    async def scenario(world: AdminWorld) -> None:
        load_slowly(world, pieces=3)
        async with world.server():
            events = await world.run(update("v1"))
            assert isinstance(events[-1].event, OperationCompleted)
            told = [
                (e.event.status.bytes_done, e.event.status.bytes_total)
                for e in events
                if isinstance(e.event, ParticipantUpdate) and e.event.status.participant_id == "a/0"
            ]
            assert (200, 300) in told, "while it loads"
            assert told[-1] == (300, 300)
            operation = await world.core.get(ADMIN, events[0].operation_id)
            assert {(p.bytes_done, p.bytes_total) for p in operation.participants} == {(300, 300)}

    run_world(scenario)


@pytest.mark.clause("AD-23")
def test_a_load_that_takes_no_time_is_told_whole() -> None:
    async def scenario(world: AdminWorld) -> None:
        load_slowly(world, pieces=1)
        async with world.server():
            events = await world.run(update("v1"))
            operation = await world.core.get(ADMIN, events[0].operation_id)
            assert {(p.bytes_done, p.bytes_total) for p in operation.participants} == {(100, 100)}

    run_world(scenario)
