"""Ownership of Node ids: the registry alone, with times given."""

from __future__ import annotations

import pytest

from iop.core.ids import NodeId
from iop.edge.registry import (
    Accepted,
    Activated,
    Closed,
    ConnectionId,
    Fenced,
    NodeEvent,
    NodeStep,
    ReadyAnswered,
    RefreshWanted,
    Refused,
    Registry,
)
from iop.testing.edge_fleet import adapter_spec, snapshot_of
from iop.wire.messages import CloseReason, RefreshOutcome

N1 = NodeId("n1")
A, B, C, D = (ConnectionId(number) for number in range(1, 5))


def config(revision: int = 1, capacity: int = 1):
    return snapshot_of(
        {"n1/main": adapter_spec("main", capacity=capacity)}, {"fast": ["n1/main"]}, revision=revision
    )


def register(registry, connection, *, now=0.0, instance="", authentic=True, version=1, node=N1):
    return registry.register(
        connection, node, is_authentic=authentic, protocol_version=version, instance=instance, now=now
    )


def kinds(effects):
    return [type(effect) for effect in effects]


@pytest.fixture
def registry():
    return Registry(config(), now=0.0)


@pytest.mark.clause("EN-10", "EN-11", "EN-13")
def test_an_accepted_registration_is_pending_and_nothing_else(registry):
    effects = register(registry, A)
    assert kinds(effects) == [Accepted]
    assert effects[0].revision == 1
    assert registry.owner_of(N1) is None
    assert registry.generation_of(N1) is None
    view = registry.view(N1, now=1.0)
    assert (view.step, view.connected) == (NodeStep.REGISTERED, False)


@pytest.mark.clause("EN-12", "EN-14", "EN-32")
def test_the_first_ready_activates_once_and_a_duplicate_is_acked_without_effect(registry):
    register(registry, A)
    first = registry.ready(A, N1, now=1.0)
    assert kinds(first) == [ReadyAnswered, Activated, NodeEvent]
    assert (first[0].ready, first[2].name) == (True, "node.connected")
    again = registry.ready(A, N1, now=2.0)
    assert again == [ReadyAnswered(connection=A, ready=True)]
    assert registry.owner_of(N1) == A


@pytest.mark.clause("EN-15", "EN-16")
def test_a_ready_from_anybody_but_the_owner_is_refused(registry):
    register(registry, A)
    register(registry, B)
    (answer,) = registry.ready(A, N1, now=1.0)
    assert (answer.ready, answer.code) == (False, "superseded")
    assert registry.ready(C, N1, now=1.0)[0].ready is False
    assert registry.ready(B, NodeId("n9"), now=1.0)[0].ready is False
    assert registry.owner_of(N1) is None


@pytest.mark.clause("EN-30")
def test_a_takeover_fences_and_closes_the_ready_owner_before_it_claims(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    effects = register(registry, B, now=2.0)
    assert kinds(effects) == [Fenced, NodeEvent, Closed, Accepted]
    assert effects[0].connection == A
    assert effects[2] == Closed(connection=A, reason=CloseReason.SUPERSEDED)


@pytest.mark.clause("EN-17", "EN-30")
def test_a_superseded_pending_owner_has_nothing_to_fence(registry):
    register(registry, A)
    assert kinds(register(registry, B)) == [Closed, Accepted]


@pytest.mark.clause("EN-33")
def test_the_late_close_of_a_former_owner_changes_nothing(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    register(registry, B, now=2.0)
    registry.ready(B, N1, now=3.0)
    assert registry.closed(A, CloseReason.CONNECTION_LOST, now=4.0) == []
    assert registry.owner_of(N1) == B


@pytest.mark.clause("EN-17")
def test_a_pending_owner_that_closes_loses_its_claim_without_any_other_effect(registry):
    register(registry, A)
    assert registry.closed(A, CloseReason.PEER_CLOSED, now=1.0) == []
    assert registry.view(N1, now=1.0).step is NodeStep.ABSENT


@pytest.mark.clause("EN-30")
def test_the_close_of_the_ready_owner_fences_its_generation_once(registry):
    register(registry, A)
    generation = registry.ready(A, N1, now=1.0)[1].generation
    effects = registry.closed(A, CloseReason.HEARTBEAT_TIMEOUT, now=2.0)
    assert kinds(effects) == [Fenced, NodeEvent]
    assert effects[0].generation == generation
    assert registry.closed(A, CloseReason.HEARTBEAT_TIMEOUT, now=2.0) == []


@pytest.mark.clause("EN-17")
def test_a_pending_owner_loses_its_claim_at_the_ready_timeout_and_not_before(registry):
    register(registry, A, now=10.0)
    assert registry.next_deadline() == 70.0
    assert registry.handle_deadline(69.9) == []
    assert registry.handle_deadline(70.0) == [Closed(connection=A, reason=CloseReason.NOT_READY_IN_TIME)]
    assert registry.next_deadline() is None
    assert registry.ready(A, N1, now=71.0)[0].ready is False


@pytest.mark.clause("EN-16")
def test_generations_are_new_for_every_ready_owner(registry):
    seen = set()
    for number, connection in enumerate((A, B, C)):
        register(registry, connection, now=100.0 * number)
        seen.add(registry.ready(connection, N1, now=100.0 * number)[1].generation)
        registry.closed(connection, CloseReason.PEER_CLOSED, now=100.0 * number + 1)
    assert len(seen) == 3


@pytest.mark.clause("EN-104", "EN-105", "EN-22")
@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"authentic": False}, "bad_token"),
        ({"node": NodeId("n9")}, "unknown_node"),
        ({"version": 0}, "unsupported_version"),
        ({"version": 2}, "unsupported_version"),
    ],
)
def test_refusals_name_their_reason_and_touch_no_owner(registry, given, code):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    (refusal,) = register(registry, B, now=2.0, **given)
    assert isinstance(refusal, Refused)
    assert refusal.code.value == code
    assert registry.owner_of(N1) == A
    if code == "unsupported_version":
        assert "1 to 1" in refusal.reason


@pytest.mark.clause("EN-115")
def test_the_third_takeover_within_a_minute_is_refused_for_a_doubling_time(registry):
    register(registry, A, instance="a", now=0.0)
    assert kinds(register(registry, B, instance="b", now=1.0))[-1] is Accepted
    assert kinds(register(registry, C, instance="a", now=2.0))[-1] is Accepted
    (first,) = register(registry, D, instance="b", now=3.0)
    assert (first.code.value, first.retry_after_s) == ("identity_contended", 1.0)
    assert registry.view(N1, now=3.0).step is NodeStep.CONTENDED
    (inside,) = register(registry, ConnectionId(5), instance="b", now=3.5)
    assert inside.retry_after_s == 0.5
    waits, now = [], 4.0
    for number in range(8):
        (refusal,) = register(registry, ConnectionId(10 + number), instance="b", now=now)
        waits.append(refusal.retry_after_s)
        now += refusal.retry_after_s
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert registry.is_owner(C), "never is the owner lost to a refused one"


@pytest.mark.clause("EN-115")
def test_one_process_that_reconnects_is_not_contention_and_an_old_takeover_is_forgotten(registry):
    for number in range(1, 8):
        effects = register(registry, ConnectionId(number), instance="same", now=float(number))
        assert kinds(effects)[-1] is Accepted
    for number in range(10, 14):
        effects = register(registry, ConnectionId(number), instance=f"i{number}", now=31.0 * number)
        assert kinds(effects)[-1] is Accepted


@pytest.mark.clause("EN-17", "EN-114")
def test_activation_waits_for_a_refresh_when_the_config_changed_while_pending(registry):
    register(registry, A)
    assert registry.apply_snapshot(config(2, capacity=5), now=1.0) == [], "no push to a pending owner (EN-13)"
    effects = registry.ready(A, N1, now=2.0)
    assert kinds(effects) == [ReadyAnswered, RefreshWanted]
    assert effects[1].revision == 2
    assert registry.view(N1, now=2.0).step is NodeStep.CONFIGURING
    assert registry.view(N1, now=2.0).connected is False
    done = registry.refreshed(A, N1, revision=2, outcome=RefreshOutcome.APPLIED, reason="", now=3.0)
    assert kinds(done) == [Activated, NodeEvent]
    assert registry.view(N1, now=3.0).revision == 2


@pytest.mark.clause("EN-80", "EN-114")
def test_a_refused_refresh_is_shown_and_the_node_goes_on_with_what_it_has(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    (push,) = registry.apply_snapshot(config(2, capacity=5), now=2.0)
    assert isinstance(push, RefreshWanted)
    effects = registry.refreshed(
        A, N1, revision=2, outcome=RefreshOutcome.FAILED, reason="no such file", now=3.0
    )
    assert kinds(effects) == [NodeEvent]
    view = registry.view(N1, now=3.0)
    assert (view.connected, view.revision, view.refresh) == (True, 1, "failed: no such file")


@pytest.mark.clause("EN-114")
def test_a_config_that_changes_during_a_push_is_pushed_after_it(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    registry.apply_snapshot(config(2, capacity=5), now=2.0)
    assert registry.apply_snapshot(config(3, capacity=6), now=2.0) == []
    (push,) = registry.refreshed(A, N1, revision=2, outcome=RefreshOutcome.APPLIED, reason="", now=3.0)
    assert push.revision == 3
    stale = registry.refreshed(A, N1, revision=2, outcome=RefreshOutcome.FAILED, reason="", now=3.0)
    assert stale == []


@pytest.mark.clause("EN-33", "EN-80")
def test_a_refresh_answer_of_a_former_owner_changes_nothing(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    registry.apply_snapshot(config(2, capacity=5), now=2.0)
    register(registry, B, now=3.0)
    late = registry.refreshed(A, N1, revision=2, outcome=RefreshOutcome.APPLIED, reason="", now=4.0)
    assert late == []
    assert registry.owner_of(N1) is None


@pytest.mark.clause("EN-114")
def test_an_unchanged_node_hears_nothing_of_a_new_config(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    assert registry.apply_snapshot(config(2), now=2.0) == []
    assert registry.view(N1, now=2.0).revision == 2


@pytest.mark.clause("EN-114")
def test_a_removed_node_stays_until_it_is_forgotten(registry):
    register(registry, A)
    registry.ready(A, N1, now=1.0)
    registry.apply_snapshot(snapshot_of({}, {}, revision=2), now=2.0)
    assert [node for node, _ in registry.removed_nodes()] == [N1]
    assert kinds(registry.forget(N1, now=3.0)) == [Fenced, NodeEvent, Closed]
    assert registry.removed_nodes() == []
    assert register(registry, B, now=4.0)[0].code.value == "unknown_node"


@pytest.mark.clause("EN-109")
def test_after_shutdown_began_nobody_registers(registry):
    registry.shut_down()
    assert register(registry, A)[0].code.value == "edge_shutdown"
