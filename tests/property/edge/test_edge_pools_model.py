"""Pools and registry under any sequence of events: what must hold after each of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from iop.core.ids import Generation, ModelId, NodeId, RequestId, RunId
from iop.edge.pools import (
    OPEN_GATE,
    Breaker,
    Demand,
    Denied,
    GateMode,
    Granted,
    Lease,
    Pools,
    ProviderGate,
    Verdict,
    Waiting,
)
from iop.edge.registry import Accepted, Activated, Closed, ConnectionId, Fenced, Refused, Registry
from iop.edge.snapshot import BreakerSpec, QueueSpec
from iop.testing.edge_fleet import adapter_spec, provider_key, snapshot_of
from iop.wire.messages import CloseReason, RefreshOutcome

NODES = ("n1", "n2")
QUEUE = QueueSpec(max_waiters=8, timeout_s=20, no_capacity_grace_s=7, paused_timeout_s=40)


class PoolsMachine(RuleBasedStateMachine):
    """Leases, waiters, gates and generations in any order, against a plain count of what is out."""

    @initialize(
        capacities=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        longs=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    )
    def begin(self, capacities, longs):
        adapters = {
            f"{node}/main": adapter_spec("main", capacity=capacity, long_capacity=long_capacity)
            for node, capacity, long_capacity in zip(NODES, capacities, longs, strict=True)
        }
        self.capacity = dict(zip(NODES, capacities, strict=True))
        self.pools = Pools(
            snapshot_of(
                adapters,
                {"fast": ["n1/main", "n2/main"], "one": ["n1/main"]},
                queue=QUEUE,
                breaker=BreakerSpec(failures=3, window_s=10, open_s=5),
            ),
            now=0.0,
        )
        self.now = 0.0
        self.generation = 0
        self.alive = {}
        self.out = {}
        self.waiting = {}
        self.arrived = 0
        self.served = {}
        self.ranks = dict.fromkeys(NODES, frozenset())

    def demand(self, model, is_long, priority, rank):
        self.arrived += 1
        return Demand(
            model=ModelId(model),
            operation="chat_completions",
            request_id=RequestId(str(self.arrived)),
            run_id=RunId(str(self.arrived)),
            is_long=is_long,
            priority=priority,
            target_rank=rank,
            number=self.pools.new_number(),
        )

    def take_in(self, settlements):
        for settlement in settlements:
            demand = self.waiting.pop(settlement.waiter)
            if isinstance(settlement, Granted):
                self.hold(settlement.lease, demand)
                older = [
                    other
                    for other in self.waiting.values()
                    if (other.model, other.is_long, other.priority, other.target_rank)
                    == (demand.model, demand.is_long, demand.priority, demand.target_rank)
                    and other.number < demand.number
                ]
                assert not older, "FIFO within a class"
            else:
                assert isinstance(settlement, Denied)

    def hold(self, lease, demand):
        assert lease.id not in self.out
        assert demand.target_rank is None or demand.target_rank in self.ranks[lease.key.node]
        assert self.alive.get(lease.key.node) == lease.generation, "only live generations are leased"
        self.out[lease.id] = lease

    @rule(
        model=st.sampled_from(["fast", "one"]),
        is_long=st.booleans(),
        priority=st.sampled_from([0, 0, 1]),
        rank=st.sampled_from([None, None, 0, 1]),
    )
    def arrive(self, model, is_long, priority, rank):
        demand = self.demand(model, is_long, priority, rank)
        answer = self.pools.acquire(demand, now=self.now)
        if isinstance(answer, Lease):
            self.hold(answer, demand)
        elif isinstance(answer, Waiting):
            self.waiting[answer.waiter] = demand

    @rule(node=st.sampled_from(NODES), ranks=st.frozensets(st.sampled_from([0, 1])))
    def tell_ranks(self, node, ranks):
        if node in self.alive:
            self.ranks[node] = ranks
            key = provider_key(f"{node}/main")
            told = {key.provider: {f"target-of-{node}/main": ranks}}
            self.take_in(self.pools.set_ranks(NodeId(node), self.alive[node], told, now=self.now))
            for demand in self.waiting.values():
                served = {rank for each in self.pools_of(demand.model) for rank in self.ranks[each]}
                assert demand.target_rank is None or demand.target_rank in served, "refused at once"

    def pools_of(self, model):
        return NODES if model == "fast" else NODES[:1]

    @rule(data=st.data(), verdict=st.sampled_from(list(Verdict)))
    def finish(self, data, verdict):
        if self.out:
            lease = self.out.pop(data.draw(st.sampled_from(sorted(self.out))))
            self.take_in(self.pools.release(lease, verdict, now=self.now))
            assert self.pools.release(lease, verdict, now=self.now) == [], "a second return has no effect"

    @rule(data=st.data())
    def leave(self, data):
        if self.waiting:
            waiter = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[waiter]
            assert self.pools.cancel_wait(waiter)
            assert not self.pools.cancel_wait(waiter)

    @rule(node=st.sampled_from(NODES), stops=st.booleans())
    def come(self, node, stops):
        if node not in self.alive:
            self.generation += 1
            self.alive[node] = Generation(self.generation)
            if stops:
                self.take_in(self.pools.set_leaving(NodeId(node), self.alive[node], now=self.now))
            self.take_in(self.pools.activate(NodeId(node), self.alive[node], now=self.now))

    @rule(node=st.sampled_from(NODES))
    def go(self, node):
        if node in self.alive:
            generation = self.alive.pop(node)
            lost, settled = self.pools.fence(NodeId(node), generation, now=self.now)
            assert {lease.id for lease in lost} == {
                lease.id for lease in self.out.values() if lease.key.node == node
            }
            for lease in lost:
                del self.out[lease.id]
            self.take_in(settled)

    @rule(node=st.sampled_from(NODES))
    def stop(self, node):
        if node in self.alive:
            self.take_in(self.pools.set_leaving(NodeId(node), self.alive[node], now=self.now))

    @rule(node=st.sampled_from(NODES), mode=st.sampled_from(list(GateMode)))
    def gate(self, node, mode):
        gate = OPEN_GATE if mode is GateMode.OPEN else ProviderGate(mode=mode, held_by=("epoch 1",))
        self.take_in(self.pools.set_gates([(provider_key(f"{node}/main"), gate)], now=self.now))

    @rule(node=st.sampled_from(NODES), seconds=st.floats(0.1, 3.0))
    def hold_back(self, node, seconds):
        self.pools.hold_back(provider_key(f"{node}/main"), self.now + seconds)

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds):
        end = self.now + seconds
        for _ in range(1000):
            at = self.pools.next_deadline()
            if at is None or at > end:
                break
            self.now = max(self.now, at)
            self.take_in(self.pools.handle_deadline(self.now))
            later = self.pools.next_deadline()
            assert later is None or later > at - 1e-9 or later <= self.now
        else:
            raise AssertionError("deadlines do not move on")
        self.now = max(self.now, end)

    @invariant()
    def leases_are_the_work_and_nobody_waits_for_a_free_slot(self):
        if not hasattr(self, "pools"):
            return
        assert self.pools.check(self.now) == []
        assert {lease.id for lease in self.pools.leases} == set(self.out)
        assert self.pools.waiting == len(self.waiting)
        for node in NODES:
            key = provider_key(f"{node}/main")
            assert self.pools.leases.in_flight(key) <= self.capacity[node]
            figures = self.pools.provider_figures(key)
            assert figures.long_in_flight <= figures.in_flight
            if node not in self.alive:
                assert (figures.capacity, figures.in_flight, figures.queued) == (0, 0, 0)


TestPoolsMachine = PoolsMachine.TestCase
TestPoolsMachine.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolsMachine = pytest.mark.slow(
    pytest.mark.clause("EN-31", "EN-91", "EN-92", "EN-110", "EN-111", "EN-116")(TestPoolsMachine)
)


class RegistryMachine(RuleBasedStateMachine):
    """Connections that register, get ready, close and time out in any order, against who must own what."""

    @initialize()
    def begin(self):
        self.revision = 1
        self.registry = Registry(self.config(1), now=0.0)
        self.now = 0.0
        self.next = 0
        self.open = {}
        self.ready_owner = {}
        self.activated = {}
        self.fenced = set()
        self.pushed = {}

    def config(self, capacity):
        return snapshot_of(
            {f"{node}/main": adapter_spec("main", capacity=capacity) for node in NODES},
            {"fast": ["n1/main", "n2/main"]},
            revision=self.revision,
        )

    def take_in(self, effects):
        for effect in effects:
            match effect:
                case Fenced():
                    assert effect.generation not in self.fenced, "each generation is fenced once"
                    self.fenced.add(effect.generation)
                    assert self.ready_owner.get(effect.node) == effect.connection
                    del self.ready_owner[effect.node]
                    self.activated.pop(effect.node, None)
                case Activated():
                    assert effect.node not in self.activated, "only the first transition activates"
                    assert self.ready_owner[effect.node] == effect.connection
                    self.activated[effect.node] = effect.generation
                case Closed():
                    self.open.pop(effect.connection, None)
                case Accepted() | Refused():
                    if isinstance(effect, Refused):
                        self.open.pop(effect.connection, None)

    @rule(node=st.sampled_from([*NODES, "stranger"]), authentic=st.booleans(), instance=st.sampled_from("ab"))
    def register(self, node, authentic, instance):
        self.next += 1
        connection = ConnectionId(self.next)
        self.open[connection] = node
        self.take_in(
            self.registry.register(
                connection,
                NodeId(node),
                is_authentic=authentic,
                protocol_version=1,
                instance=instance,
                now=self.now,
            )
        )

    @rule(data=st.data(), node=st.sampled_from(NODES))
    def ready(self, data, node):
        connection = data.draw(st.sampled_from(sorted(self.open) or [ConnectionId(0)]))
        is_owner = self.registry.is_owner(connection) and self.open.get(connection) == node
        effects = self.registry.ready(connection, NodeId(node), now=self.now)
        assert effects[0].ready == is_owner
        if is_owner:
            self.ready_owner[node] = connection
        else:
            assert len(effects) == 1
        self.take_in(effects[1:])

    @rule(data=st.data())
    def close(self, data):
        if self.next:
            connection = ConnectionId(data.draw(st.integers(1, self.next)))
            self.open.pop(connection, None)
            self.take_in(self.registry.closed(connection, CloseReason.PEER_CLOSED, now=self.now))

    @rule(capacity=st.integers(1, 3))
    def reconfigure(self, capacity):
        self.revision += 1
        self.take_in(self.registry.apply_snapshot(self.config(capacity), now=self.now))

    @rule(data=st.data(), node=st.sampled_from(NODES), outcome=st.sampled_from(list(RefreshOutcome)))
    def refreshed(self, data, node, outcome):
        connection = data.draw(st.sampled_from(sorted(self.open) or [ConnectionId(0)]))
        revision = data.draw(st.integers(1, self.revision))
        self.take_in(
            self.registry.refreshed(
                connection, NodeId(node), revision=revision, outcome=outcome, reason="", now=self.now
            )
        )

    @rule(seconds=st.floats(0.0, 70.0))
    def time_passes(self, seconds):
        self.now += seconds
        self.take_in(self.registry.handle_deadline(self.now))
        at = self.registry.next_deadline()
        assert at is None or at > self.now

    @invariant()
    def owners_are_who_they_must_be(self):
        if not hasattr(self, "registry"):
            return
        for node in NODES:
            assert self.registry.owner_of(NodeId(node)) == self.ready_owner.get(node)
            view = self.registry.view(NodeId(node), now=self.now)
            assert view.connected == (node in self.activated)


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestRegistryMachine = pytest.mark.slow(
    pytest.mark.clause("EN-11", "EN-13", "EN-14", "EN-15", "EN-16", "EN-17", "EN-30", "EN-33", "EN-115")(
        TestRegistryMachine
    )
)


@pytest.mark.clause("EN-116")
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["ask", "success", "failure", "neutral", "wait"]), st.floats(0, 8)),
        max_size=60,
    )
)
def test_a_breaker_never_has_two_trials_and_never_stays_shut(events):
    breaker = Breaker(BreakerSpec(failures=2, window_s=10, open_s=5))
    now, running, trials = 0.0, [], 0
    for kind, amount in events:
        if kind == "wait":
            now += amount
        elif kind == "ask":
            if breaker.admits(now):
                is_trial = breaker.begin()
                running.append(is_trial)
                trials = sum(running)
                assert trials <= 1
        elif running:
            verdict = {"success": Verdict.SUCCESS, "failure": Verdict.FAILURE}.get(kind, Verdict.NEUTRAL)
            breaker.record(verdict, was_trial=running.pop(), now=now)
    for is_trial in running:
        breaker.record(Verdict.NEUTRAL, was_trial=is_trial, now=now)
    assert breaker.admits(now + 6), "some time after the last failure a request may go"
