"""Pools alone: leases, queue, fairness, selection, conditions, figures; with times given."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from iop.core.ids import Generation, ModelId, NodeId, RequestId, RunId
from iop.edge.pools import (
    OPEN_GATE,
    RECONCILE_GATE,
    Demand,
    Denied,
    GateMode,
    Granted,
    Lease,
    LeaseKind,
    Overrides,
    Pools,
    ProviderGate,
    Refusal,
    RefusalReason,
    Verdict,
    Waiting,
)
from iop.edge.snapshot import BreakerSpec, DispatchLimits, QueueSpec
from iop.testing.edge_fleet import adapter_spec, provider_key, snapshot_of

N1, N2 = NodeId("n1"), NodeId("n2")
K1, K2 = provider_key("n1/main"), provider_key("n2/main")
PAUSED = ProviderGate(mode=GateMode.QUEUE, held_by=("epoch 1",))
REJECTING = ProviderGate(mode=GateMode.REJECT, held_by=("epoch 2",))
_count = iter(range(1, 1_000_000))


def demand(
    model="fast", *, is_long=False, priority=0, session="", operation="chat_completions", preferred=""
):
    number = next(_count)
    return Demand(
        model=ModelId(model),
        operation=operation,
        request_id=RequestId(f"r{number}"),
        run_id=RunId(f"run{number}"),
        is_long=is_long,
        priority=priority,
        session=session,
        preferred_provider=preferred,
    )


def one(*, capacity=1, long_capacity=0, **more):
    adapters = {"n1/main": adapter_spec("main", capacity=capacity, long_capacity=long_capacity)}
    return Pools(snapshot_of(adapters, {"fast": ["n1/main"]}, **more), now=0.0)


def two(*, members=("n1/main", "n2/main"), capacity=2, **more):
    adapters = {
        "n1/main": adapter_spec("main", capacity=capacity),
        "n2/main": adapter_spec("main", capacity=capacity),
    }
    pools = Pools(snapshot_of(adapters, {"fast": list(members)}, **more), now=0.0)
    pools.activate(N1, Generation(1), now=0.0)
    pools.activate(N2, Generation(2), now=0.0)
    return pools


def up(pools, generation=1, now=0.0):
    return pools.activate(N1, Generation(generation), now=now)


def take(pools, now=0.0, **wish):
    lease = pools.acquire(demand(**wish), now=now)
    assert isinstance(lease, Lease), lease
    return lease


def wait(pools, now=0.0, **wish):
    answer = pools.acquire(demand(**wish), now=now)
    assert isinstance(answer, Waiting), answer
    return answer.waiter


def granted(settlements):
    return [settlement.waiter for settlement in settlements if isinstance(settlement, Granted)]


@pytest.mark.clause("EN-31")
def test_a_lease_returns_exactly_once():
    pools = one(capacity=2)
    up(pools)
    lease = take(pools)
    pools.release(lease, Verdict.SUCCESS, now=1.0)
    waiters = [take(pools), take(pools), wait(pools)]
    assert pools.release(lease, Verdict.SUCCESS, now=2.0) == [], "a second return frees nothing"
    assert pools.leases.in_flight(K1) == 2
    assert pools.is_waiting(waiters[2])


@pytest.mark.clause("EN-31", "EN-34")
def test_a_fence_takes_offline_first_so_that_freed_slots_go_to_nobody():
    pools = one(capacity=2)
    up(pools)
    leases = [take(pools), take(pools)]
    waiter = wait(pools)
    lost, settled = pools.fence(N1, Generation(1), now=1.0)
    assert lost == leases
    assert settled == []
    assert pools.is_waiting(waiter)
    assert len(pools.leases) == 0
    for lease in leases:
        assert pools.release(lease, Verdict.NEUTRAL, now=2.0) == []
    assert granted(up(pools, 2, now=3.0)) == [waiter]


@pytest.mark.clause("EN-31")
def test_a_fence_re_evaluates_the_queue_against_those_still_alive():
    pools = two(capacity=1)
    on_first = pools.acquire(demand(preferred=pools.roster.name_of(K1)), now=0.0)
    on_second = take(pools)
    assert (on_first.key, on_second.key) == (K1, K2)
    waiter = wait(pools)
    pools.fence(N1, Generation(1), now=1.0)
    assert granted(pools.release(on_second, Verdict.SUCCESS, now=2.0)) == [waiter]


@pytest.mark.clause("EN-33")
def test_a_fence_of_an_old_generation_leaves_the_new_one_alone():
    pools = one()
    up(pools, 1)
    up(pools, 2)
    lease = take(pools)
    lost, _ = pools.fence(N1, Generation(1), now=1.0)
    assert lost == []
    assert lease.id in pools.leases


@pytest.mark.clause("EN-110")
def test_waiters_of_one_priority_are_served_in_the_order_of_their_arrival():
    pools = one()
    up(pools)
    lease = take(pools)
    order = [wait(pools, now=float(number)) for number in range(5)]
    served = []
    for _ in order:
        (grant,) = pools.release(lease, Verdict.SUCCESS, now=9.0)
        served.append(grant.waiter)
        lease = grant.lease
    assert served == order


@pytest.mark.clause("EN-110")
def test_higher_priority_goes_first_and_the_position_says_how_many_stand_ahead():
    pools = one()
    up(pools)
    lease = take(pools)
    low = pools.acquire(demand(priority=-1), now=0.0)
    normal = pools.acquire(demand(), now=0.0)
    high = pools.acquire(demand(priority=99), now=0.0)
    assert (low.position, normal.position, high.position) == (0, 0, 0)
    assert pools.acquire(demand(priority=-1), now=0.0).position == 3
    served = []
    for _ in range(3):
        (grant,) = pools.release(lease, Verdict.SUCCESS, now=1.0)
        served.append(grant.waiter)
        lease = grant.lease
    assert served == [high.waiter, normal.waiter, low.waiter]


@pytest.mark.clause("EN-110")
def test_every_waiter_can_learn_its_place_and_goes_when_it_is_first():
    pools = one()
    up(pools)
    lease = take(pools)
    waiters = [pools.acquire(demand(priority=priority), now=0.0).waiter for priority in (0, 5, 0, -1, 5)]
    waiters.append(pools.acquire_again(demand(priority=0), now=0.0).waiter)
    gone = waiters[2]
    pools.cancel_wait(gone)
    assert pools.ahead_of(gone) is None
    left = [waiter for waiter in waiters if waiter != gone]
    assert sorted(pools.ahead_of(waiter) for waiter in left) == list(range(len(left)))
    while left:
        first = next(waiter for waiter in left if pools.ahead_of(waiter) == 0)
        (settled,) = pools.release(lease, Verdict.SUCCESS, now=0.0)
        assert isinstance(settled, Granted) and settled.waiter == first
        left.remove(first)
        lease = settled.lease


@pytest.mark.clause("EN-112")
def test_a_request_that_returns_from_a_failed_attempt_goes_before_all_others():
    pools = one()
    up(pools)
    lease = take(pools)
    waiting = wait(pools)
    early, late = replace(demand(), number=3), replace(demand(), number=8)
    second = pools.acquire_again(late, now=1.0)
    first = pools.acquire_again(early, now=1.0)
    (grant,) = pools.release(lease, Verdict.NEUTRAL, now=2.0)
    assert grant.waiter == first.waiter, "among the returning, the earlier arrival first"
    assert granted(pools.release(grant.lease, Verdict.NEUTRAL, now=2.0)) == [second.waiter]
    assert pools.is_waiting(waiting)


@pytest.mark.clause("EN-110")
def test_a_full_queue_refuses_and_says_when_to_come_back():
    pools = one(queue=QueueSpec(max_waiters=2))
    up(pools)
    take(pools)
    wait(pools)
    wait(pools)
    refusal = pools.acquire(demand(), now=0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.QUEUE_FULL, 3.0)


@pytest.mark.clause("EN-110")
def test_contended_waiting_ends_at_its_timeout_and_not_before():
    pools = one(queue=QueueSpec(timeout_s=30))
    up(pools)
    take(pools)
    waiter = wait(pools, now=5.0)
    assert pools.next_deadline() == 35.0
    assert pools.handle_deadline(34.9) == []
    (denied,) = pools.handle_deadline(35.0)
    assert isinstance(denied, Denied)
    assert (denied.waiter, denied.refusal.reason) == (waiter, RefusalReason.QUEUE_TIMEOUT)
    assert pools.next_deadline() is None


@pytest.mark.clause("EN-110", "AD-41")
def test_waiting_for_a_pause_does_not_use_up_contended_time_and_has_its_own_limit():
    pools = one(queue=QueueSpec(timeout_s=30, paused_timeout_s=600, no_capacity_grace_s=15))
    up(pools)
    take(pools)
    early = wait(pools, now=0.0)
    pools.set_gates([(K1, PAUSED)], now=20.0)
    late = wait(pools, now=100.0)
    assert pools.next_deadline() == 620.0
    assert pools.handle_deadline(500.0) == []
    pools.set_gates([(K1, OPEN_GATE)], now=510.0)
    assert pools.next_deadline() == 520.0, "10 s of contended time are left to the early one"
    assert [denied.waiter for denied in pools.handle_deadline(520.0)] == [early]
    pools.set_gates([(K1, PAUSED)], now=521.0)
    (denied,) = pools.handle_deadline(521.0 + 600.0 - 410.0)
    assert (denied.waiter, denied.refusal.reason) == (late, RefusalReason.PAUSED)


@pytest.mark.clause("EN-110", "EN-92")
def test_an_empty_pool_holds_waiters_for_the_grace_counted_from_their_arrival_or_the_loss():
    pools = one(queue=QueueSpec(no_capacity_grace_s=15, timeout_s=30))
    up(pools)
    take(pools)
    before = wait(pools, now=10.0)
    pools.fence(N1, Generation(1), now=20.0)
    after = wait(pools, now=30.0)
    assert pools.next_deadline() == 35.0
    (denied,) = pools.handle_deadline(35.0)
    assert (denied.waiter, denied.refusal.reason) == (before, RefusalReason.NO_CAPACITY)
    assert pools.next_deadline() == 45.0
    assert granted(up(pools, 2, now=40.0)) == [after]


@pytest.mark.clause("SF-09", "AD-41")
def test_a_rejecting_pause_refuses_waiters_and_newcomers_at_once():
    pools = one()
    up(pools)
    lease = take(pools)
    waiter = wait(pools)
    (denied,) = pools.set_gates([(K1, REJECTING)], now=1.0)
    assert (denied.waiter, denied.refusal.reason) == (waiter, RefusalReason.PAUSED)
    assert pools.acquire(demand(), now=2.0).reason is RefusalReason.PAUSED
    assert lease.id in pools.leases


def test_over_two_providers_one_that_queues_keeps_the_pool_waiting():
    pools = two()
    pools.set_gates([(K1, REJECTING), (K2, PAUSED)], now=0.0)
    waiter = wait(pools, now=1.0)
    assert granted(pools.set_gates([(K2, OPEN_GATE)], now=2.0)) == [waiter]


@pytest.mark.clause("EN-32", "AD-35")
def test_an_administered_provider_comes_online_behind_a_reconcile_gate():
    adapters = {"n1/main": adapter_spec("main", is_administered=True)}
    pools = Pools(snapshot_of(adapters, {"fast": ["n1/main"]}), now=0.0)
    waiter = wait(pools)
    assert up(pools) == []
    assert pools.roster.gate_of(K1) == RECONCILE_GATE
    assert granted(pools.set_gates([(K1, OPEN_GATE)], now=1.0)) == [waiter]
    pools.fence(N1, Generation(1), now=2.0)
    up(pools, 2, now=3.0)
    assert pools.roster.gate_of(K1) == RECONCILE_GATE, "the next generation is not trusted either"


@pytest.mark.clause("AD-39")
def test_a_pause_gate_outlives_the_reconnect_of_its_node():
    adapters = {"n1/main": adapter_spec("main", is_administered=True)}
    pools = Pools(snapshot_of(adapters, {"fast": ["n1/main"]}), now=0.0)
    up(pools)
    pools.set_gates([(K1, PAUSED)], now=1.0)
    pools.fence(N1, Generation(1), now=2.0)
    up(pools, 2, now=3.0)
    assert pools.roster.gate_of(K1) == PAUSED


@pytest.mark.clause("EN-111", "EN-91")
def test_a_long_request_needs_a_long_slot_and_a_normal_one():
    pools = one(capacity=3, long_capacity=1)
    up(pools)
    long_lease = take(pools, is_long=True)
    assert long_lease.kind is LeaseKind.LONG
    waiting_long = wait(pools, is_long=True)
    short = take(pools)
    figures = pools.provider_figures(K1)
    assert (figures.in_flight, figures.long_in_flight, figures.queued, figures.long_queued) == (2, 1, 1, 1)
    assert pools.release(short, Verdict.SUCCESS, now=1.0) == [], "a normal slot alone is not enough"
    assert granted(pools.release(long_lease, Verdict.SUCCESS, now=2.0)) == [waiting_long]


@pytest.mark.clause("EN-111")
def test_a_long_request_where_nobody_takes_long_ones_is_refused():
    pools = one(capacity=3, long_capacity=0)
    up(pools)
    assert pools.acquire(demand(is_long=True), now=0.0).reason is RefusalReason.LONG_CONTEXT_NOT_SUPPORTED


@pytest.mark.clause("EN-111")
def test_under_contention_every_nth_pick_goes_to_the_other_class():
    pools = one(capacity=1, long_capacity=1, limits=DispatchLimits(fairness_every=3))
    up(pools)
    lease = take(pools)
    long_ones = [wait(pools, is_long=True) for _ in range(6)]
    short_ones = [wait(pools) for _ in range(3)]
    served = []
    for _ in range(9):
        (grant,) = pools.release(lease, Verdict.SUCCESS, now=1.0)
        served.append("long" if grant.waiter in long_ones else "short")
        lease = grant.lease
    assert served == ["long", "long", "short"] * 3
    assert not pools.waiting
    assert short_ones


@pytest.mark.clause("EN-111")
def test_shorts_do_not_starve_a_long_one_that_came_first():
    pools = one(capacity=2, long_capacity=1)
    up(pools)
    leases = [take(pools), take(pools)]
    waiting_long = wait(pools, is_long=True)
    for _ in range(5):
        wait(pools)
    assert granted(pools.release(leases[0], Verdict.SUCCESS, now=1.0)) == [waiting_long]


@pytest.mark.clause("EN-110")
@pytest.mark.parametrize("kind", ["same class", "cannot run"])
def test_the_cost_of_a_released_slot_does_not_grow_with_the_queue(kind):
    costs = []
    for waiters in (100, 10_000):
        pools = one(capacity=2, long_capacity=1, queue=QueueSpec(max_waiters=20_000))
        up(pools)
        take(pools, is_long=True)
        lease = take(pools)
        for _ in range(waiters):
            wait(pools, is_long=kind == "cannot run")
        wait(pools)
        before = pools.steps
        for _ in range(10):
            settled = pools.release(lease, Verdict.SUCCESS, now=1.0)
            if not settled:
                break
            lease = settled[0].lease
        costs.append(pools.steps - before)
    assert costs[1] <= 2 * costs[0]


def test_the_least_loaded_provider_is_chosen_and_weight_counts():
    pools = two(capacity=10)
    assert sorted(str(take(pools).key) for _ in range(4)) == ["n1/main"] * 2 + ["n2/main"] * 2
    weighted = two(members=("n1/main*3", "n2/main*1"), capacity=12)
    keys = [str(take(weighted).key) for _ in range(8)]
    assert keys.count("n1/main") == 6


@pytest.mark.clause("EN-04")
def test_a_session_stays_where_it_was_and_a_hint_is_only_a_hint():
    pools = two(capacity=1)
    first = take(pools, session="s")
    pools.release(first, Verdict.SUCCESS, now=1.0)
    take(pools, session="t")
    pools.release(next(iter(pools.leases)), Verdict.SUCCESS, now=1.0)
    assert take(pools, session="s").key == first.key
    other = take(pools, preferred=pools.roster.name_of(first.key))
    assert other.key != first.key, "the hinted one is full"


@pytest.mark.clause("EN-116")
def test_recent_failures_count_as_load():
    pools = two(capacity=10, breaker=BreakerSpec(failures=5, window_s=10))
    lease = pools.acquire(demand(preferred=pools.roster.name_of(K1)), now=0.0)
    pools.release(lease, Verdict.FAILURE, now=0.0)
    assert [take(pools, now=1.0).key for _ in range(2)] == [K2, K2]
    later = two(capacity=10)
    lease = later.acquire(demand(preferred=later.roster.name_of(K2)), now=0.0)
    later.release(lease, Verdict.FAILURE, now=0.0)
    assert {take(later, now=11.0).key for _ in range(2)} == {K1, K2}, (
        "failures are forgotten after the window"
    )


@pytest.mark.clause("EN-116")
def test_a_breaker_opens_is_tried_once_and_closes_by_success():
    pools = one(capacity=10, breaker=BreakerSpec(failures=2, window_s=10, open_s=10))
    up(pools)
    for _ in range(2):
        pools.release(take(pools, now=1.0), Verdict.FAILURE, now=1.0)
    first, second = wait(pools, now=2.0), wait(pools, now=2.0)
    assert pools.next_deadline() == 11.0
    settled = pools.handle_deadline(11.0)
    assert granted(settled) == [first]
    assert pools.handle_deadline(11.5) == []
    assert granted(pools.release(settled[0].lease, Verdict.SUCCESS, now=12.0)) == [second]
    assert pools.provider_figures(K1).health == "online"


@pytest.mark.clause("EN-116")
def test_a_failed_trial_opens_the_breaker_again_and_a_neutral_one_allows_another():
    pools = one(capacity=10, breaker=BreakerSpec(failures=1, window_s=10, open_s=10))
    up(pools)
    pools.release(take(pools), Verdict.FAILURE, now=0.0)
    trial = take(pools, now=10.0)
    assert isinstance(pools.acquire(demand(), now=10.0), Waiting)
    pools.release(trial, Verdict.NEUTRAL, now=10.5)
    second = next(iter(pools.leases))
    assert second.is_trial
    pools.release(second, Verdict.FAILURE, now=11.0)
    assert isinstance(pools.acquire(demand(), now=20.9), Waiting)


@pytest.mark.clause("EN-116", "EN-110")
def test_a_pool_whose_breakers_are_all_open_answers_no_capacity_after_the_grace():
    pools = one(breaker=BreakerSpec(failures=1, open_s=60), queue=QueueSpec(no_capacity_grace_s=15))
    up(pools)
    pools.release(take(pools), Verdict.FAILURE, now=0.0)
    wait(pools, now=1.0)
    (denied,) = pools.handle_deadline(16.0)
    assert denied.refusal.reason is RefusalReason.NO_CAPACITY


@pytest.mark.clause("EN-92")
def test_a_disconnected_provider_keeps_its_entry_and_shows_zeros():
    pools = one(capacity=7, long_capacity=3)
    figures = pools.provider_figures(K1)
    assert (figures.status, figures.health) == ("unavailable", "offline")
    assert (figures.capacity, figures.long_capacity, figures.in_flight, figures.queued) == (0, 0, 0, 0)
    up(pools)
    figures = pools.provider_figures(K1)
    assert (figures.status, figures.health, figures.capacity) == ("available", "online", 7)


@pytest.mark.clause("EN-91")
def test_one_waiting_request_counts_at_every_live_candidate():
    pools = two(capacity=1)
    take(pools)
    take(pools)
    wait(pools)
    assert [pools.provider_figures(key).queued for key in (K1, K2)] == [1, 1]
    pools.fence(N2, Generation(2), now=1.0)
    assert pools.provider_figures(K2).queued == 0


@pytest.mark.clause("EN-62")
def test_a_model_reaches_only_the_providers_that_its_config_names():
    adapters = {"n1/main": adapter_spec("main"), "n2/main": adapter_spec("main")}
    pools = Pools(snapshot_of(adapters, {"fast": ["n1/main"]}), now=0.0)
    pools.activate(N2, Generation(1), now=0.0)
    assert isinstance(pools.acquire(demand(), now=0.0), Waiting)


@pytest.mark.clause("EN-114")
def test_a_removed_provider_takes_nothing_new_and_goes_with_its_last_run():
    pools = two(capacity=1)
    first = pools.acquire(demand(preferred=pools.roster.name_of(K1)), now=0.0)
    smaller = snapshot_of({"n2/main": adapter_spec("main", capacity=1)}, {"fast": ["n2/main"]}, revision=2)
    pools.apply_snapshot(smaller, now=1.0)
    assert K1 in pools.roster.providers
    assert take(pools, now=1.0).key == K2
    pools.release(first, Verdict.SUCCESS, now=2.0)
    assert K1 not in pools.roster.providers


@pytest.mark.clause("EN-114")
def test_a_provider_that_comes_back_into_the_config_finds_its_node_connected():
    pools = one()
    up(pools)
    pools.apply_snapshot(snapshot_of({}, {}, revision=2), now=1.0)
    again = snapshot_of({"n1/main": adapter_spec("main")}, {"fast": ["n1/main"]}, revision=3)
    pools.apply_snapshot(again, now=2.0)
    assert take(pools).generation == Generation(1)


@pytest.mark.clause("EN-114", "AD-39")
def test_a_gate_does_not_outlive_the_provider_that_it_held():
    pools = one(capacity=2)
    up(pools)
    lease = take(pools)
    pools.set_gates([(K1, PAUSED)], now=0.0)
    pools.apply_snapshot(snapshot_of({}, {}, revision=2), now=1.0)
    again = snapshot_of({"n1/main": adapter_spec("main")}, {"fast": ["n1/main"]}, revision=3)
    pools.apply_snapshot(again, now=2.0)
    assert lease.id in pools.leases, "its last run kept it in the books"
    assert pools.roster.gate_of(K1) == OPEN_GATE


@pytest.mark.clause("EN-114")
def test_waiters_of_a_removed_model_are_refused_and_more_capacity_serves_them():
    pools = one()
    up(pools)
    take(pools)
    first, second = wait(pools), wait(pools)
    bigger = snapshot_of({"n1/main": adapter_spec("main", capacity=2)}, {"fast": ["n1/main"]}, revision=2)
    assert granted(pools.apply_snapshot(bigger, now=1.0)) == [first]
    settled = pools.apply_snapshot(snapshot_of({"n1/main": adapter_spec("main")}, {}, revision=3), now=2.0)
    assert [(s.waiter, s.refusal.reason) for s in settled] == [(second, RefusalReason.MODEL_NOT_FOUND)]


@pytest.mark.clause("AD-47")
def test_a_reconfigured_capacity_holds_until_the_file_changes_that_key():
    pools = one(capacity=1)
    up(pools)
    pools.override(K1, Overrides(capacity=3), now=0.0)
    assert pools.provider_figures(K1).capacity == 3
    same = snapshot_of({"n1/main": adapter_spec("main", capacity=1)}, {"fast": ["n1/main"]}, revision=2)
    pools.apply_snapshot(same, now=1.0)
    assert pools.provider_figures(K1).capacity == 3
    other = snapshot_of({"n1/main": adapter_spec("main", capacity=2)}, {"fast": ["n1/main"]}, revision=3)
    pools.apply_snapshot(other, now=2.0)
    assert pools.provider_figures(K1).capacity == 2


@pytest.mark.clause("EN-117")
def test_a_provider_whose_own_gate_was_full_gets_nothing_for_a_moment():
    pools = one(capacity=2)
    up(pools)
    pools.hold_back(K1, 5.0)
    waiter = wait(pools, now=4.0)
    assert pools.next_deadline() == 5.0
    assert granted(pools.handle_deadline(5.0)) == [waiter]
    assert pools.next_deadline() is None


def test_explain_says_why_each_member_is_or_is_not_eligible():
    pools = two(capacity=1)
    take(pools)
    pools.set_gates([(K2, PAUSED)], now=0.0)
    views = {str(view.key): view for view in pools.explain(demand(), now=1.0)}
    assert views["n1/main"].why == "no free slot"
    assert views["n2/main"].why == "held by epoch 1"
    pools.fence(N1, Generation(1), now=2.0)
    assert pools.explain(demand(), now=2.0)[0].why == "its Node is not connected"


# ---- a Node that stops (EN-109) ----


@pytest.mark.case("P-19")
@pytest.mark.clause("EN-109", "EN-110")
def test_who_waits_for_a_node_that_stops_has_the_grace_and_not_its_whole_drain():
    pools = one(queue=QueueSpec(timeout_s=100, no_capacity_grace_s=5))
    up(pools)
    lease = take(pools)
    first = wait(pools)
    assert pools.set_leaving(N1, Generation(1), now=1.0) == []
    assert pools.next_deadline() == 6.0
    assert pools.release(lease, Verdict.SUCCESS, now=2.0) == [], "its slot goes to nobody"
    assert pools.explain(demand(), now=2.0)[0].why == "its Node is stopping"
    second = wait(pools, now=3.0)
    pools.fence(N1, Generation(1), now=4.0)
    [denied] = pools.handle_deadline(6.0)
    assert (denied.waiter, denied.refusal.reason) == (first, RefusalReason.NO_CAPACITY)
    assert granted(up(pools, 2, now=7.0)) == [second], "it is back, and takes what comes"
    assert pools.check(7.0) == []


@pytest.mark.clause("EN-109", "EN-91")
def test_a_node_that_stops_shows_what_still_runs_and_starts_nothing():
    pools = two()
    lease = pools.acquire(demand(preferred=pools.roster.name_of(K1)), now=0.0)
    assert lease.key == K1
    pools.set_leaving(N1, Generation(1), now=1.0)
    assert not pools.may_start(lease)
    shown = pools.provider_figures(K1)
    assert (shown.status, shown.in_flight, shown.queued) == ("draining", 1, 0)
    assert {take(pools).key for _ in range(2)} == {K2}
    assert isinstance(pools.acquire(demand(), now=1.0), Waiting)
    assert pools.set_leaving(N1, Generation(9), now=1.0) == [], "news of another generation"


@pytest.mark.case("P-19")
@pytest.mark.clause("EN-109", "EN-17")
def test_a_node_that_stops_before_it_is_activated_takes_nothing_when_it_is():
    pools = one(queue=QueueSpec(timeout_s=100, no_capacity_grace_s=5))
    first = wait(pools)
    assert pools.set_leaving(N1, Generation(1), now=1.0) == []
    assert up(pools, 1, now=2.0) == [], "its config came, and it stops all the same"
    assert isinstance(pools.acquire(demand(), now=2.0), Waiting)
    assert pools.explain(demand(), now=2.0)[0].why == "its Node is stopping"
    pools.fence(N1, Generation(1), now=3.0)
    assert first in granted(up(pools, 2, now=4.0)), "its next process does not"
    assert pools.check(4.0) == []


@pytest.mark.case("P-19")
@pytest.mark.clause("EN-109", "EN-114")
def test_a_provider_that_is_configured_on_a_node_that_stops_takes_nothing():
    pools = one()
    up(pools)
    pools.set_leaving(N1, Generation(1), now=1.0)
    adapters = {key: adapter_spec(key.partition("/")[2]) for key in ("n1/main", "n1/other")}
    pools.apply_snapshot(snapshot_of(adapters, {"fast": list(adapters)}), now=2.0)
    assert isinstance(pools.acquire(demand(), now=2.0), Waiting)
    assert {view.why for view in pools.explain(demand(), now=2.0)} == {"its Node is stopping"}


# ---- routes that an engine lacks (EN-51) ----


@pytest.mark.clause("SF-01", "EN-51")
def test_who_lacks_a_route_is_no_candidate_until_its_node_says_otherwise() -> None:
    pools = two()
    lacks = {K1.provider: frozenset({"embeddings"})}
    assert pools.set_missing(N1, Generation(1), lacks, now=0.0) == []
    assert {take(pools, operation="embeddings").key for _ in range(2)} == {K2}
    whys = {view.key: view.why for view in pools.explain(demand(operation="embeddings"), now=0.0)}
    assert whys[K1] == "its engine was found to lack a route for this operation"
    assert isinstance(pools.acquire(demand(operation="embeddings"), now=0.0), Waiting)
    [granted] = pools.set_missing(N1, Generation(1), {K1.provider: frozenset()}, now=1.0)
    assert isinstance(granted, Granted) and granted.lease.key == K1
    assert pools.check(1.0) == []


@pytest.mark.clause("SF-01", "EN-51")
def test_a_route_that_can_be_converted_is_not_lacking() -> None:
    pools = one()
    up(pools)
    pools.set_missing(N1, Generation(1), {K1.provider: frozenset({"messages"})}, now=0.0)
    assert take(pools, operation="messages").key == K1
    assert pools.roster.serves(K1, "generate_chat") and pools.roster.serves(K1, "messages")
    every_chat_but_responses = frozenset({"messages", "chat_completions"})
    pools.set_missing(N1, Generation(1), {K1.provider: every_chat_but_responses}, now=0.0)
    assert pools.roster.serves(K1, "chat_completions") and not pools.roster.serves(K1, "generate_chat")


@pytest.mark.clause("SF-01", "EN-110")
def test_waiters_for_a_route_that_turns_out_to_be_missing_are_refused_at_once() -> None:
    pools = one()
    up(pools)
    take(pools)
    waiting = pools.acquire(demand(operation="embeddings"), now=0.0)
    chat = pools.acquire(demand(), now=0.0)
    assert isinstance(waiting, Waiting) and isinstance(chat, Waiting)
    [denied] = pools.set_missing(N1, Generation(1), {K1.provider: frozenset({"embeddings"})}, now=1.0)
    assert isinstance(denied, Denied) and denied.waiter == waiting.waiter
    assert denied.refusal.reason is RefusalReason.OPERATION_NOT_SUPPORTED
    assert "embeddings" not in denied.refusal.details["offered"]
    assert pools.is_waiting(chat.waiter) and pools.check(1.0) == []


@pytest.mark.clause("EN-33", "EN-51")
def test_what_an_engine_lacks_is_forgotten_with_its_generation() -> None:
    pools = one()
    up(pools)
    lacks = {K1.provider: frozenset({"embeddings"})}
    pools.set_missing(N1, Generation(1), lacks, now=0.0)
    pools.fence(N1, Generation(1), now=1.0)
    assert isinstance(pools.acquire(demand(operation="embeddings"), now=1.0), Waiting), (
        "it may come back with it"
    )
    assert pools.set_missing(N1, Generation(1), lacks, now=2.0) == [], "news of a former generation"
    [granted] = up(pools, generation=2, now=3.0)
    assert isinstance(granted, Granted)


@pytest.mark.clause("SF-01")
def test_a_new_config_without_the_operation_refuses_its_waiters_at_once() -> None:
    pools = one()
    up(pools)
    take(pools)
    assert isinstance(pools.acquire(demand(operation="embeddings"), now=0.0), Waiting)
    narrow = {"n1/main": adapter_spec("main", capacity=1, operations=frozenset({"chat_completions"}))}
    [denied] = pools.apply_snapshot(snapshot_of(narrow, {"fast": ["n1/main"]}, revision=2), now=1.0)
    assert isinstance(denied, Denied)
    assert denied.refusal.reason is RefusalReason.OPERATION_NOT_SUPPORTED
