"""The two tables: every state by every input, and every participant state by every operation."""

from __future__ import annotations

import itertools

import pytest
from admin_requests import (
    DRAIN,
    B,
    flush,
    pause,
    reconfigure,
    release,
    restore,
    resume,
    start_profile,
    stop_profile,
    update,
)

from iop.admin.enums import (
    AdminOperationKind,
    AdminOperationState,
    ParticipantState,
    ResourceKind,
)
from iop.admin.requests import MutationRequest
from iop.admin.states import (
    LEGALITY,
    NEXT,
    Input,
    Legality,
    legality_of,
    participant_state,
    step,
)
from iop.core.errors import IopError, LocalProtocolError
from iop.testing.admin_world import AdminWorld, run_world
from iop.testing.fake_participants import FaultKind


@pytest.mark.clause("AD-21")
@pytest.mark.parametrize(("state", "event"), list(itertools.product(AdminOperationState, Input)))
def test_every_state_takes_every_input_by_the_table(state: AdminOperationState, event: Input) -> None:
    if (state, event) in NEXT:
        assert not state.is_terminal
        assert step(state, event) is NEXT[state, event]
    else:
        with pytest.raises(LocalProtocolError):
            step(state, event)


@pytest.mark.clause("AD-21")
def test_every_unfinished_state_can_end() -> None:
    for state in AdminOperationState:
        if state.is_terminal:
            continue
        reachable = {state}
        for _ in range(10):
            reachable |= {to for (start, _), to in NEXT.items() if start in reachable}
        assert any(s.is_terminal for s in reachable)


@pytest.mark.clause("AD-48")
def test_the_legality_table_is_total() -> None:
    assert set(LEGALITY) == set(itertools.product(ParticipantState, AdminOperationKind))


@pytest.mark.clause("AD-50")
def test_the_most_restrictive_state_wins() -> None:
    flags = {"connected": True, "quarantined": True, "released": True, "paused": True}
    order = [
        ("connected", ParticipantState.OFFLINE),
        ("quarantined", ParticipantState.QUARANTINED),
        ("released", ParticipantState.RELEASED),
        ("paused", ParticipantState.PAUSED),
    ]
    assert participant_state(**{**flags, "connected": False}) is ParticipantState.OFFLINE
    for name, state in order[1:]:
        assert participant_state(**flags) is state
        flags[name] = False
    assert participant_state(**flags) is ParticipantState.ACTIVE


def _request(kind: AdminOperationKind, state: ParticipantState) -> MutationRequest:
    """A plain request of a kind on group b, without a pause of its own."""
    match kind:
        case AdminOperationKind.FLUSH_CACHES:
            return flush(target=B)
        case AdminOperationKind.PAUSE:
            return pause("op", target=B)
        case AdminOperationKind.RESUME:
            return resume(1)
        case AdminOperationKind.RELEASE_RESOURCES:
            return release("op", ResourceKind.GRAPHS, spec=None, target=B)
        case AdminOperationKind.RESTORE_RESOURCES:
            return restore(2)
        case AdminOperationKind.UPDATE_WEIGHTS:
            return update("v1", quiesce=None)
        case AdminOperationKind.START_PROFILE:
            return start_profile(target=B)
        case AdminOperationKind.STOP_PROFILE:
            return stop_profile("profile-op-1")
        case AdminOperationKind.RECONFIGURE_SERVING:
            return reconfigure(4)


async def _bring(world: AdminWorld, state: ParticipantState) -> None:
    """Bring group b, the only one, to a state. A quarantined one is paused besides."""
    if state in {ParticipantState.PAUSED, ParticipantState.RELEASED, ParticipantState.QUARANTINED}:
        await world.run(pause("before", DRAIN, target=B))
    if state is ParticipantState.RELEASED:
        await world.run(release("released", spec=None, target=B))
    if state is ParticipantState.QUARANTINED:
        await world.run(release("released", spec=None, target=B))
        world.fleet.arm(FaultKind.DISCONNECT, "b/0", "RestoreStep")
        await world.run(restore(2, "fails"))
        assert "b" in world.store.desired.quarantines
        world.fleet.reconnect("b")
        world.core.participants_changed()
        await world.settle(5)
    if state is ParticipantState.OFFLINE:
        world.fleet.disconnect("b")


@pytest.mark.clause("AD-48", "AD-31", "AD-42")
@pytest.mark.parametrize(
    ("state", "kind"), list(itertools.product(ParticipantState, AdminOperationKind)), ids=lambda v: v.name
)
def test_the_core_answers_as_the_table_says(state: ParticipantState, kind: AdminOperationKind) -> None:
    async def scenario(world: AdminWorld) -> None:
        async with world.server():
            if kind is AdminOperationKind.STOP_PROFILE:
                await world.run(start_profile("profile", target=B))
            await _bring(world, state)
            answer = legality_of(state, kind)
            reason = ""
            try:
                await world.run(_request(kind, state))
            except IopError as refusal:
                reason = refusal.reason
            match answer:
                case Legality.LEGAL:
                    # What else holds of it still speaks (AD-31): this one is released besides.
                    is_held = state is ParticipantState.QUARANTINED
                    assert reason == "" or (is_held and reason == "RESOURCES_RELEASED")
                case Legality.SKIPPED:
                    assert reason in {"PARTICIPANT_OFFLINE", "NO_PARTICIPANTS", "STALE_EPOCH"}
                case _:
                    assert reason == answer.value

    run_world(scenario, shape={"b": 2})
