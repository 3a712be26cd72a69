"""Where weights that nobody published can be put back from, and that they were (AD-32, AD-37)."""

from __future__ import annotations

import dataclasses

import pytest
from admin_requests import update

from iop.admin.enums import WeightFormat
from iop.admin.requests import DiskSource
from iop.admin.results import OperationCompleted, OperationFailed
from iop.admin.weight_sources import EXTRA_KEY, read_sources, source_words
from iop.core.errors import IopError
from iop.testing.admin_world import ADMIN, AdminWorld, run_world
from iop.testing.fake_participants import FaultKind

BASE = DiskSource(path="base", format=WeightFormat.SAFETENSORS)
OTHER = DiskSource(path="/elsewhere", format=WeightFormat.SAFETENSORS)


def cannot_hold(world: AdminWorld, source: DiskSource | None = None) -> None:
    """Engines that can put replaced weights back only by reading them again."""
    for rank in world.fleet.ranks.values():
        rank.capabilities = dataclasses.replace(rank.capabilities, holds_previous_weights=False)
        rank.startup_source = source


def contents(world: AdminWorld) -> set[str]:
    return {rank.content for rank in world.fleet.ranks.values()}


@pytest.mark.clause("AD-32")
def test_a_first_update_is_reversible_where_the_engines_tell_what_they_came_with() -> None:
    async def scenario(world: AdminWorld) -> None:
        cannot_hold(world, BASE)
        async with world.server():
            assert (await world.core.profile(ADMIN)).weights[0].reversible
            world.fleet.arm(FaultKind.ERROR, "b/1", "VerifyWeightsStep")
            event = (await world.run(update("v1")))[-1].event
            assert isinstance(event, OperationFailed)
            assert event.error.rolled_back
            assert contents(world) == {"base"}
            assert await world.core.weight_sources() == {"m": ("v0", BASE)}
            assert isinstance((await world.run(update("v1", "again")))[-1].event, OperationCompleted)
            published = DiskSource(path="/weights/v1", format=WeightFormat.SAFETENSORS)
            assert await world.core.weight_sources() == {"m": ("v1", published)}

    run_world(scenario)


@pytest.mark.clause("AD-32")
@pytest.mark.parametrize(
    ("a", "b", "words", "named"),
    [
        (BASE, None, "b/0, b/1 do not tell", "b/0,b/1"),
        (None, None, "write it into the config as weights_source of their adapter", "a/0,a/1,b/0,b/1"),
        (BASE, OTHER, "tell different places", "a/0,a/1,b/0,b/1"),
    ],
)
def test_a_refusal_says_who_does_not_tell_and_what_to_set(
    a: DiskSource | None, b: DiskSource | None, words: str, named: str
) -> None:
    async def scenario(world: AdminWorld) -> None:
        cannot_hold(world)
        for group, source in (("a", a), ("b", b)):
            for rank in world.fleet.members(group):
                rank.startup_source = source
        async with world.server():
            with pytest.raises(IopError) as refusal:
                await world.run(update("v1"))
            assert refusal.value.reason == "IRREVERSIBLE"
            assert words in refusal.value.message
            assert refusal.value.details == {"participants": named, "key": "weights_source"}
            assert isinstance(
                (await world.run(update("v1", irreversible=True)))[-1].event, OperationCompleted
            )

    run_world(scenario)


@pytest.mark.clause("AD-32", "AD-37", "AD-31")
def test_weights_put_back_from_a_place_that_holds_others_are_not_taken_for_the_old_ones() -> None:
    async def scenario(world: AdminWorld) -> None:
        cannot_hold(world, OTHER)  # what the engines serve is not what lies there
        async with world.server():
            world.fleet.arm(FaultKind.ERROR, "b/1", "VerifyWeightsStep")
            event = (await world.run(update("v1")))[-1].event
            assert isinstance(event, OperationFailed)
            assert not event.error.rolled_back
            assert set(event.error.quarantined) == {"a/0", "a/1", "b/0", "b/1"}
            reasons = {q.reason for q in world.store.desired.quarantines.values()}
            assert all("put back to other weights" in reason for reason in reasons), reasons

    run_world(scenario)


@pytest.mark.clause("AD-32", "AD-35")
def test_weights_that_an_engine_comes_with_are_noted_anew_until_somebody_publishes() -> None:
    async def scenario(world: AdminWorld) -> None:
        cannot_hold(world, BASE)
        async with world.server():
            for rank in world.fleet.ranks.values():
                rank.label, rank.content = "v9", "/w/v9"  # by the engines' own port
                rank.startup_source = DiskSource(path="/w/v9", format=WeightFormat.SAFETENSORS)
            await world.settle(40.0)
            assert world.store.desired.weights["m"].version == "v9"
            world.fleet.arm(FaultKind.ERROR, "b/1", "VerifyWeightsStep")
            event = (await world.run(update("v10")))[-1].event
            assert isinstance(event, OperationFailed)
            assert event.error.rolled_back
            assert contents(world) == {"/w/v9"}

    run_world(scenario)


@pytest.mark.clause("AD-32")
def test_what_a_peer_tells_of_sources_is_read_strictly() -> None:
    good = {"m": ("v0", DiskSource(path="/w", format=WeightFormat.SAFETENSORS))}
    words = source_words(good)
    assert read_sources(words) == good
    assert EXTRA_KEY == "iop.weight_sources"
    base = {"weight_version": "v0", "path": "/w", "format": "safetensors"}
    for odd in (
        None,
        "x",
        [],
        {"m": None},
        {"m": {**base, "path": "relative"}},
        {"m": {**base, "path": 3.0}},
        {"m": {**base, "path": "/" + "x" * 5000}},
        {"m": {**base, "format": "no-such"}},
        {"m": {**base, "weight_version": ""}},
        {str(n): base for n in range(2000)},
    ):
        assert read_sources(odd) == {}
