"""kill -9 at every journal write of every operation: settled after restart, one terminal event, the key still works."""

from __future__ import annotations

import dataclasses

import pytest
from admin_checks import OPERATIONS, at_rest, check_at_rest, opts, prepare

from iop.admin.requests import MutationRequest
from iop.admin.results import OperationAccepted, OperationCompleted
from iop.testing.admin_world import AdminWorld, run_world


async def _crash_and_recover(world: AdminWorld, name: str, crash_after: int, *, engines_too: bool) -> bool:
    """Returns whether the crash point was reached at all."""
    request: MutationRequest
    before: set[str] = set()
    async with world.server():
        request = await prepare(world, name)
        before = set(world.store.records)
        world.crash_at = world.writes + crash_after
        await world.submit(request)
        await at_rest(world)
    reached = world.crashed.is_set()
    world.crash_at = None
    if engines_too:
        world.fleet.restart("a")
    async with world.server():
        await at_rest(world)
        await check_at_rest(world)
        new = set(world.store.records) - before
        assert len(new) <= 1
        if new:
            # Accepted, so its key names it and every event is there (AD-12, AD-26).
            events = await world.run(request)
            assert events[0].operation_id in new
            assert isinstance(events[0].event, OperationAccepted)
            assert events[-1].is_terminal
        if name == "update" or not engines_too:
            # Published weights that can be read again come back with a restarted engine too (AD-32, AD-35).
            assert world.store.desired.quarantines == {}
        if new and isinstance(events[-1].event, OperationCompleted):
            return reached
        retry = dataclasses.replace(request, options=opts("retry"))
        again = (await world.run(retry))[-1].event
        assert isinstance(again, OperationCompleted), again
        await at_rest(world)
        await check_at_rest(world)
    return reached


@pytest.mark.case("P-25")
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-26", "AD-36", "AD-39")
@pytest.mark.parametrize("engines_too", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_at_any_write_is_recovered(name: str, engines_too: bool) -> None:
    for crash_after in range(1, 200):

        async def scenario(world: AdminWorld, after: int = crash_after) -> bool:
            return await _crash_and_recover(world, name, after, engines_too=engines_too)

        try:
            reached = run_world(scenario)
        except BaseException as exc:
            raise AssertionError(f"{name}: crash at write {crash_after}") from exc
        if not reached:
            assert crash_after > 5
            return
    pytest.fail("the operation writes without end")
