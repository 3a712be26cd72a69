"""Reconfigured values over the file's, for as long as the file says the same (AD-47, AD-35)."""

from __future__ import annotations

import pytest
from admin_requests import reconfigure, release, restore

from iop.admin.desired import Desired, OverrideRecord
from iop.admin.enums import ChangeDisposition, ReconfigurableField
from iop.admin.overrides import following_file, in_force, overridden
from iop.admin.requests import MutationRequest, ServingChange
from iop.admin.results import OperationCompleted
from iop.admin.steps import ReconfigureStep
from iop.core.ids import GroupId, OperationId
from iop.testing.admin_world import AdminWorld, run_world
from iop.testing.fake_participants import FaultKind

CAPACITY = ReconfigurableField.CAPACITY
A, B = GroupId("a"), GroupId("b")


async def done(world: AdminWorld, request: MutationRequest) -> None:
    event = (await world.run(request))[-1].event
    assert isinstance(event, OperationCompleted), event


def capacities(world: AdminWorld) -> dict[str, object]:
    return {p: rank.serving[CAPACITY] for p, rank in world.fleet.ranks.items()}


def values(world: AdminWorld) -> dict[GroupId, object]:
    return {group: dict(fields)[CAPACITY] for group, fields in world.fleet.overrides.items()}


@pytest.mark.clause("AD-47")
def test_a_reconfigured_value_is_in_force_again_after_a_restart_of_the_server() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
            assert values(world) == {A: 4, B: 4}
        world.fleet.overrides = {}
        async with world.server():
            assert values(world) == {A: 4, B: 4}, "before anything is admitted"
            record = (await world.core.overrides())[0]
            assert record.file_values == (ServingChange(field=CAPACITY, value=8),)
            assert record.made_by[CAPACITY] == record.operation_id

    run_world(scenario)


@pytest.mark.clause("AD-47", "AD-35")
def test_a_restarted_engine_is_told_the_reconfigured_value_before_it_takes_inference() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
            world.fleet.calls.clear()
            was_open: list[bool] = []
            world.fleet.on_call = lambda _call: was_open.append(world.fleet.is_open("a/0"))
            world.fleet.restart("a")
            world.core.participants_changed()
            await world.settle(2.0)
            assert set(capacities(world).values()) == {4}
            assert world.fleet.is_open("a/0")
            assert [type(c.body) for c in world.fleet.calls] == [ReconfigureStep]
            assert not any(was_open)

    run_world(scenario)


@pytest.mark.clause("AD-47", "AD-35")
def test_an_engine_that_refuses_the_value_it_must_serve_is_quarantined_by_name() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
            world.fleet.restart("a")
            world.fleet.arm(FaultKind.ERROR, "a/0", "ReconfigureStep")
            world.core.participants_changed()
            await world.settle(2.0)
            assert "a/0" in world.store.desired.quarantines[A].reason
            await done(world, reconfigure(5, "again"))
            assert not world.store.desired.quarantines
            assert world.fleet.is_open("a/0")

    run_world(scenario)


@pytest.mark.clause("AD-47")
def test_a_file_that_changes_the_key_ends_the_override_and_the_engine_is_told() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
            world.fleet.config[A][CAPACITY] = 6
            world.core.participants_changed()
            await world.settle(2.0)
            assert values(world) == {B: 4}
            assert capacities(world) == {"a/0": 6, "a/1": 6, "b/0": 4, "b/1": 4}
            assert set(world.store.desired.overrides) == {B}
            assert [r.group_id for r in await world.core.overrides()] == [B]

    run_world(scenario)


@pytest.mark.clause("AD-47")
def test_a_file_that_changed_while_the_server_was_down_counts_at_the_start() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
        world.fleet.config[A][CAPACITY] = 6
        world.fleet.config[B][ReconfigurableField.ENABLED] = False
        async with world.server():
            assert values(world)[B] == 4, "another key was changed, not this one"
            await world.settle(2.0)
            assert capacities(world) == {"a/0": 6, "a/1": 6, "b/0": 4, "b/1": 4}

    run_world(scenario)


@pytest.mark.clause("AD-47")
def test_an_engine_that_refuses_the_file_value_goes_on_serving() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
            world.fleet.config[A][CAPACITY] = 13  # the fake engine rejects it
            world.core.participants_changed()
            await world.settle(2.0)
            assert set(world.store.desired.overrides) == {B}
            assert not world.store.desired.quarantines
            assert world.fleet.is_open("a/0")

    run_world(scenario)


@pytest.mark.clause("AD-47", "AD-48")
def test_what_holds_memory_back_is_told_after_the_restore_not_before() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            await done(world, reconfigure(4))
            await done(world, release())
            for rank in world.fleet.members("a"):
                rank.serving[CAPACITY] = 8
            await world.settle(40.0)
            assert capacities(world)["a/0"] == 8
            assert not world.store.desired.quarantines
            await done(world, restore(2))
            await world.settle(40.0)
            assert capacities(world)["a/0"] == 4

    run_world(scenario)


@pytest.mark.clause("AD-47")
def test_a_group_that_left_the_config_takes_its_overrides_along() -> None:
    desired = overridden(
        Desired(),
        [A, B],
        [ServingChange(field=CAPACITY, value=4)],
        operation_id=OperationId("op-1"),
        waiting={},
        file_values={A: {CAPACITY: 8}, B: {CAPACITY: 8}},
    )
    followed = following_file(desired, {B: {CAPACITY: 8}})
    assert followed is not None
    assert in_force(followed) == {B: {CAPACITY: 4}}


@pytest.mark.clause("AD-47")
def test_a_record_from_before_file_values_were_kept_stands_over_the_file_as_it_is() -> None:
    old = OverrideRecord(
        group_id=A, changes=(ServingChange(field=CAPACITY, value=4),), operation_id=OperationId("op-1")
    )
    desired = Desired(overrides={A: old})
    followed = following_file(desired, {A: {CAPACITY: 8}})
    assert followed is not None
    assert followed.overrides[A].file_values == (ServingChange(field=CAPACITY, value=8),)
    assert in_force(followed) == {A: {CAPACITY: 4}}
    assert following_file(followed, {A: {CAPACITY: 8}}) is None
    later = following_file(followed, {A: {CAPACITY: 9}})
    assert later is not None
    assert in_force(later) == {}


@pytest.mark.clause("AD-47")
def test_a_field_without_a_key_in_the_file_is_held_and_each_names_its_operation() -> None:
    said = {A: {CAPACITY: 8}}
    aliases = ReconfigurableField.SERVED_ALIASES
    desired = Desired()
    for number, change in enumerate(
        (ServingChange(field=CAPACITY, value=4), ServingChange(field=aliases, value=("x",))), start=1
    ):
        desired = overridden(
            desired,
            [A],
            [change],
            operation_id=OperationId(f"op-{number}"),
            waiting={},
            file_values=said,
        )
    record = desired.overrides[A]
    assert dict(record.made_by) == {CAPACITY: "op-1", aliases: "op-2"}
    followed = following_file(desired, {A: {CAPACITY: 9}})
    assert followed is not None
    assert in_force(followed) == {A: {aliases: ("x",)}}


@pytest.mark.clause("AD-47")
def test_what_an_engine_takes_at_its_next_start_is_not_asked_of_it_again_and_again() -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            world.fleet.disposition = ChangeDisposition.NEEDS_RESTART
            await done(world, reconfigure(4))
            assert set(capacities(world).values()) == {8}
            assert world.store.desired.overrides[A].waiting == {CAPACITY}
            world.fleet.calls.clear()
            await world.settle(100.0)
            assert not world.fleet.calls

    run_world(scenario)
