"""The pools themselves: who waits, who gets which slot, and when, as one state machine over the roster and its leases.

Invariant, after every call: no waiter stands in a queue while a slot that it fits is free. All calls that free a slot
or open a gate therefore pump before they return, and an arrival may take a free slot at once: had anybody who fits it
been waiting, it would not be free. Time makes room without a call; whoever asks for a lease says :meth:`Pools.catch_up`
first when :meth:`Pools.next_deadline` is over.

A pump looks only at the heads of the classes of the models that the touched providers serve.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import ceil

from msgspec.structs import replace

from iop.core.ids import Generation, LeaseId, ModelId, NodeId, ProviderId
from iop.edge.calls import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    SIDE_OPERATIONS,
    ProviderKey,
    Route,
    ServedTarget,
)
from iop.edge.pools import figures
from iop.edge.pools.breaker import Verdict
from iop.edge.pools.gates import GateMode, ProviderGate
from iop.edge.pools.leases import Lease, LeaseBook, LeaseKind
from iop.edge.pools.model import (
    CandidateView,
    Demand,
    Denied,
    Granted,
    ModelFigures,
    ProviderFigures,
    Refusal,
    RefusalReason,
    Settlement,
    WaiterId,
    Waiting,
)
from iop.edge.pools.provider import Overrides, Provider
from iop.edge.pools.queue import ClassKey, Condition, ModelQueue, WaitClass, Waiter, class_of
from iop.edge.pools.roster import Roster
from iop.edge.pools.selection import Affinities, Candidate, choose
from iop.edge.snapshot import EdgeSnapshot, ModelSpec, PoolMember
from iop.wire.data_parallel import write_ranks

COMPARED_MAX = 32
"""Providers with room that are compared for one request. More would make each request of a large fleet pay for all."""

RETRY_AFTER_MAX_S = 60.0
"""Callers are not sent away for longer: the fleet may have changed by then."""


class Pools:
    """All providers and all queues of one Edge.

    Args:
        snapshot: the first configuration; every provider starts away.
        now: monotonic seconds.
    """

    def __init__(self, snapshot: EdgeSnapshot, *, now: float) -> None:
        self.leases = LeaseBook()
        self.steps = 0
        """Heads examined by pumps: the cost that must not grow with waiters that cannot run (EN-110)."""
        self._snapshot = snapshot
        self.roster = Roster()
        self._providers = self.roster.providers
        self._members = self.roster.members
        self._queues: dict[ModelId, ModelQueue] = {}
        self._where: dict[WaiterId, tuple[ModelId, ClassKey]] = {}
        self._affinities = Affinities()
        self._timed: dict[ProviderKey, Provider] = {}
        """Providers for which time alone changes something: a tripped breaker, a full gate on the Node."""
        self._next_waiter = 0
        self._next_number = 0
        self._picks = 0
        self.apply_snapshot(snapshot, now=now)

    # ---- demands ----

    def new_number(self) -> int:
        """The next order of arrival, for a new request's demands."""
        self._next_number += 1
        return self._next_number

    def acquire(self, demand: Demand, *, now: float) -> Lease | Waiting | Refusal:
        """Take a lease at once, or wait, or hear why neither."""
        model = self._snapshot.models.get(demand.model)
        if model is None:
            return Refusal(reason=RefusalReason.MODEL_NOT_FOUND)
        key = class_of(demand)
        queue = self._queues[model.id]
        condition = queue.condition_of(key)
        if condition is None:
            lease = self._take_free(model, key, demand, now)
            if lease is not None:
                return lease
            refusal = self._unservable(model, key)
            if refusal is not None:
                return refusal
            condition = self._condition(model.id, key, now)
            if condition is Condition.REJECTING:
                return self._refusal(model, RefusalReason.PAUSED)
        if queue.depth >= model.queue.max_waiters:
            return self._refusal(model, RefusalReason.QUEUE_FULL)
        return self._enqueue(queue, key, demand, condition, now)

    def acquire_again(self, demand: Demand, *, now: float) -> Lease | Waiting | Refusal:
        """As :meth:`acquire` for a request whose attempt provably never reached its Node (EN-112).

        It goes before all others of its priority and is not refused for a full queue: it had its place already.
        """
        model = self._snapshot.models.get(demand.model)
        if model is None:
            return Refusal(reason=RefusalReason.MODEL_NOT_FOUND)
        key = class_of(demand)
        queue = self._queues[model.id]
        condition = queue.condition_of(key)
        if condition is None:
            lease = self._take_free(model, key, demand, now)
            if lease is not None:
                return lease
            condition = self._condition(model.id, key, now)
            if condition is Condition.REJECTING:
                return self._refusal(model, RefusalReason.PAUSED)
        return self._enqueue(queue, key, demand, condition, now, is_returning=True)

    def cancel_wait(self, waiter: WaiterId) -> bool:
        """A waiter's caller left: it is gone at once (EN-110). False when it was not waiting any more."""
        place = self._where.pop(waiter, None)
        if place is None:
            return False
        model, key = place
        return self._queues[model].remove(key, waiter) is not None

    def release(self, lease: Lease, verdict: Verdict, *, now: float) -> list[Settlement]:
        """Return a lease and give its slot to who is next. A second return changes nothing."""
        if not self.leases.give_back(lease):
            return []
        provider = self._providers.get(lease.key)
        if provider is None:
            return []
        tripped_before = provider.breaker.is_tripped
        if provider.generation == lease.generation:
            if lease.kind is not LeaseKind.SIDE:
                provider.breaker.record(verdict, was_trial=lease.is_trial, now=now)
            if provider.breaker.is_tripped:
                self._timed[provider.key] = provider
        if not provider.is_configured:
            self._drop_if_idle(provider)
            return []
        if provider.breaker.is_tripped != tripped_before or lease.is_trial:
            return self._settle((provider,), now)
        return self._pump((provider,), now)

    def may_start(self, lease: Lease) -> bool:
        """Whether work may begin under a lease that was granted earlier.

        It is still out, no gate has closed since, the adapter has not gone and its Node does not stop.
        """
        if lease.id not in self.leases:
            return False
        provider = self._providers.get(lease.key)
        return (
            provider is not None and provider.gate.is_open and provider.is_started and not provider.is_leaving
        )

    def hold_back(self, key: ProviderKey, until: float) -> None:
        """A provider's own gate was full: nothing new for it until then (EN-117)."""
        provider = self._providers.get(key)
        if provider is not None:
            provider.busy_until = max(provider.busy_until, until)
            self._timed[key] = provider

    # ---- nodes, gates, config ----

    def activate(
        self,
        node: NodeId,
        generation: Generation,
        *,
        now: float,
        absent: Collection[ProviderId] = (),
    ) -> list[Settlement]:
        """A Node is ready: its resources come online in this generation, gates permitting, and waiters move (EN-32).

        ``absent``: those whose adapter did not start.
        """
        return self._settle(self.roster.activate(node, generation, absent), now)

    def set_absent(
        self, node: NodeId, generation: Generation, absent: Collection[ProviderId], *, now: float
    ) -> list[Settlement]:
        """After a refresh: which adapters of this generation run now, and which do not (EN-80)."""
        return self._settle(self.roster.set_absent(node, generation, absent), now)

    def set_leaving(self, node: NodeId, generation: Generation, *, now: float) -> list[Settlement]:
        """A Node said that it stops: it is not there for anybody new, while what runs may finish (EN-109, EN-110).

        It may say so before its generation is activated, as while a changed config is on its way to it (EN-17).
        """
        return self._settle(self.roster.set_leaving(node, generation), now)

    def set_missing(
        self,
        node: NodeId,
        generation: Generation,
        missing: Mapping[ProviderId, frozenset[str]],
        *,
        now: float,
    ) -> list[Settlement]:
        """A Node told which routes its engines lack: nothing is sent there in vain while others have them (EN-51).

        ``missing``: by adapter. Waiters whom nobody of the pool could serve any more are refused at once (SF-01).
        """
        touched = self.roster.set_missing(node, generation, missing)
        return [*self._refuse_unservable(touched), *self._settle(touched, now)]

    def set_ranks(
        self,
        node: NodeId,
        generation: Generation,
        told: Mapping[ProviderId, Mapping[str, frozenset[int]]],
        *,
        now: float,
    ) -> list[Settlement]:
        """A Node told which data-parallel ranks its engines have, by target (SF-21).

        Waiters for a rank that nobody of the pool has any more are refused at once.
        """
        touched = self.roster.set_ranks(node, generation, told)
        return [*self._refuse_unservable(touched), *self._settle(touched, now)] if touched else []

    def fence(
        self, node: NodeId, generation: Generation, *, now: float
    ) -> tuple[list[Lease], list[Settlement]]:
        """A generation ended: first offline, then its leases back, then the queue anew (EN-31).

        Offline first: pumping before would hand the freed slots of a dead Node to waiters.
        """
        mine = self.roster.end(node, generation)
        lost = self.leases.give_back_all(node, generation)
        for provider in mine:
            if not provider.is_configured:
                self._drop_if_idle(provider)
        return lost, self._settle(mine, now)

    def set_gates(self, gates: Iterable[tuple[ProviderKey, ProviderGate]], *, now: float) -> list[Settlement]:
        """Close or open providers; whoever may go then goes, and whoever must be refused is (AD-39, SF-09)."""
        return self._settle(self.roster.set_gates(gates), now)

    def override(self, key: ProviderKey, overrides: Overrides, *, now: float) -> list[Settlement]:
        """Put reconfigured values over the file's; what they do not name goes by the file (AD-47)."""
        provider = self._providers.get(key)
        if provider is None:
            return []
        provider.overrides = overrides
        return self._settle((provider,), now)

    def apply_snapshot(self, snapshot: EdgeSnapshot, *, now: float) -> list[Settlement]:
        """Make a new configuration the running one (EN-114). Waiters of a removed model are refused."""
        self._snapshot = snapshot
        for provider in self.roster.adopt(snapshot):
            self._drop_if_idle(provider)
        settled: list[Settlement] = []
        for model_id in self._queues.keys() - snapshot.models.keys():
            for waiter in self._queues.pop(model_id).clear():
                del self._where[waiter.id]
                settled.append(
                    Denied(waiter=waiter.id, refusal=Refusal(reason=RefusalReason.MODEL_NOT_FOUND))
                )
        for model_id in snapshot.models:
            self._queues.setdefault(model_id, ModelQueue())
            if not self._members[model_id]:
                self._judge(model_id, now)  # no provider leads to it any more
        everybody = list(self._providers.values())
        return [*settled, *self._refuse_unservable(everybody), *self._settle(everybody, now)]

    def deny_all(self, reason: RefusalReason) -> list[Settlement]:
        """Refuse every waiter: the Edge stops (EN-109)."""
        self._where.clear()
        return [
            Denied(waiter=waiter.id, refusal=Refusal(reason=reason, retry_after_s=1.0))
            for queue in self._queues.values()
            for waiter in queue.clear()
        ]

    # ---- time ----

    def next_deadline(self) -> float | None:
        """When :meth:`handle_deadline` has something to do: a waiter's end, a half-open trial, a busy provider."""
        best: float | None = None
        for model_id, queue in self._queues.items():
            if not queue.depth:
                continue
            spec = self._snapshot.models[model_id].queue
            for lane in queue.classes.values():
                at = lane.next_deadline(spec)
                if at is not None and (best is None or at < best):
                    best = at
        if best is None:
            return None  # nobody waits: nothing that could become possible matters
        for provider in self._timed.values():
            for moment in (provider.breaker.next_deadline(), provider.busy_until or None):
                if moment is not None and moment < best:
                    best = moment
        return best

    def catch_up(self, now: float) -> list[Settlement]:
        """Serve those whom only time kept out: a breaker has half opened, a provider is busy no more."""
        due: list[Provider] = []
        for key, provider in list(self._timed.items()):
            is_due = provider.breaker.poll(now)
            if 0.0 < provider.busy_until <= now:
                provider.busy_until = 0.0
                is_due = True
            if is_due:
                due.append(provider)
            if not provider.busy_until and provider.breaker.next_deadline() is None:
                del self._timed[key]
        return self._settle(due, now)

    def handle_deadline(self, now: float) -> list[Settlement]:
        """Serve who can run by now, then refuse whose time is over."""
        settled = self.catch_up(now)
        for model_id, queue in self._queues.items():
            if queue.depth:
                settled += self._expire(self._snapshot.models[model_id], queue, now)
        return settled

    # ---- views ----

    @property
    def waiting(self) -> int:
        """Waiters in all queues."""
        return len(self._where)

    def is_waiting(self, waiter: WaiterId) -> bool:
        """Whether this one still waits."""
        return waiter in self._where

    def ahead_of(self, waiter: WaiterId) -> int | None:
        """How many of its class will go before this waiter, as things stand; ``None`` when it waits no more."""
        place = self._where.get(waiter)
        if place is None:
            return None
        model, key = place
        return self._queues[model].classes[key].ahead_of(waiter)

    def queue_depth(self, model: ModelId) -> int:
        """Waiters of one model."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.depth

    def has_live(self, demand: Demand) -> bool:
        """Whether somebody is there who could serve this demand, however busy."""
        key = class_of(demand)
        return any(p.is_live and p.serves(key) for _, p in self._members.get(demand.model, ()))

    def may_be_told(self, demand: Demand, lease: Lease, *, now: float) -> bool:
        """Whether somebody may take what the adapter behind this lease had no words for.

        One of its own type is asked only if it is free: it will hardly know better, and nobody waits for that.
        """
        key = class_of(demand)
        refused = self._providers.get(lease.key)
        return any(
            p.is_live
            and p.serves(key)
            and (refused is None or p.spec.type != refused.spec.type or p.has_room(key, self.leases, now))
            for _, p in self._members.get(demand.model, ())
        )

    def way_of(self, lease: Lease, operation: str, *, was_put: bool) -> str:
        """In which way the provider of a lease is asked for an operation, as it is known now.

        ``was_put``: it could be put so, and was refused by whoever took it.
        """
        provider = self._providers.get(lease.key)
        if provider is None:
            return ""
        put, taken = provider.ways(operation)
        return taken if was_put else put

    def served_target(self, lease: Lease) -> ServedTarget:
        """What a surface needs to know to build the body under this lease (EN-54)."""
        provider = self._providers[lease.key]
        model = self._snapshot.models.get(lease.model)
        spec = provider.spec
        return ServedTarget(
            model=lease.model,
            key=lease.key,
            target=lease.target,
            route=spec.route,
            adapter_type=spec.type,
            operations=spec.profile_operations if spec.route is Route.TUNNEL else frozenset(),
            response_model="provider" if model is None else model.response_model,
            rewrites=frozenset() if model is None else model.rewrites,
            workspace=spec.workspace,
        )

    def provider_figures(self, key: ProviderKey) -> ProviderFigures:
        """One resource for status (EN-91, EN-92). Zero and offline while its Node is away."""
        provider = self._providers[key]
        return figures.provider_figures(provider, self.leases, [self._queues[m] for m in provider.models])

    def model_figures(self, model_id: ModelId) -> ModelFigures:
        """One model for status."""
        providers = [provider for _, provider in self._members[model_id]]
        return figures.model_figures(self._snapshot.models[model_id], providers, self._queues[model_id])

    def explain(self, demand: Demand, *, now: float) -> list[CandidateView]:
        """Why each member of the pool is eligible or not, at this moment."""
        key = class_of(demand)
        return [
            figures.candidate_view(provider, key, self.leases, now)
            for _, provider in self._members.get(demand.model, ())
        ]

    def check(self, now: float) -> list[str]:
        """Broken invariants in words; empty when all is well. For simulations and property tests."""
        broken: list[str] = []
        for provider in self._providers.values():
            count = self.leases.in_flight(provider.key)
            if provider.generation is None and count:
                broken.append(f"{provider.key} is away and holds {count} leases")
        for model_id, queue in self._queues.items():
            if queue.depth != sum(len(lane) for lane in queue.classes.values()):
                broken.append(f"the depth of {model_id} is off")
            for class_key, lane in queue.classes.items():
                for _, provider in self._members[model_id]:
                    if len(lane) and provider.has_room(class_key, self.leases, now):
                        broken.append(f"{model_id} {class_key} waits while {provider.key} has room")
        if sum(queue.depth for queue in self._queues.values()) != len(self._where):
            broken.append("waiters are lost between the queues and the index")
        return broken

    # ---- inner moves ----

    def _take_free(self, model: ModelSpec, key: ClassKey, demand: Demand, now: float) -> Lease | None:
        """A lease on the best provider with room, if there is one.

        Only asked when nobody of the class waits: were there room, they would not. In a large pool the best of some is
        good enough; where the search begins moves on with every pick, so that all get their turn.
        """
        members = self._members[model.id]
        count = len(members)
        sticky = self._affinities.find(model.id, demand.session)
        candidates: list[Candidate] = []
        start = self._picks % count if count > COMPARED_MAX else 0
        for offset in range(count):
            index = (start + offset) % count
            member, provider = members[index]
            is_wished = provider.key == sticky or provider.name == demand.preferred_provider
            if len(candidates) >= COMPARED_MAX and not is_wished:
                if sticky is None and not demand.preferred_provider:
                    break
                continue
            if provider.has_room(key, self.leases, now):
                candidates.append(
                    Candidate(
                        index=index,
                        key=provider.key,
                        name=provider.name,
                        load=(self.leases.in_flight(provider.key) + 1) / (provider.capacity * member.weight),
                        pressure=provider.breaker.pressure(now),
                        was_tried=provider.key in demand.tried,
                        last_picked=provider.last_picked,
                    )
                )
        if not candidates:
            return None
        best = candidates[0]
        if len(candidates) > 1:
            best = choose(candidates, sticky=sticky, preferred=demand.preferred_provider) or best
        member, provider = members[best.index]
        return self._grant(provider, member, demand, now)

    def _grant(self, provider: Provider, member: PoolMember, demand: Demand, now: float) -> Lease:
        assert provider.generation is not None
        self._picks += 1
        provider.last_picked = self._picks
        self._affinities.note(demand.model, demand.session, provider.key)
        is_side = demand.operation in SIDE_OPERATIONS
        kind = LeaseKind.LONG if demand.is_long else LeaseKind.NORMAL
        return self.leases.grant(
            key=provider.key,
            generation=provider.generation,
            kind=LeaseKind.SIDE if is_side else kind,
            model=demand.model,
            target=member.target,
            request_id=demand.request_id,
            run_id=demand.run_id,
            now=now,
            is_trial=not is_side and provider.breaker.begin(),
        )

    def _enqueue(
        self,
        queue: ModelQueue,
        key: ClassKey,
        demand: Demand,
        condition: Condition,
        now: float,
        *,
        is_returning: bool = False,
    ) -> Waiting:
        self._next_waiter += 1
        waiter_id = WaiterId(self._next_waiter)
        priority = max(PRIORITY_MIN, min(PRIORITY_MAX, demand.priority))
        if priority != demand.priority or not demand.number:
            demand = replace(demand, priority=priority, number=demand.number or self.new_number())
        waiter = Waiter(id=waiter_id, demand=demand, entered_at=now)
        lane, ahead = queue.add(waiter, key, now, is_returning=is_returning)
        lane.set_condition(condition, now)
        self._where[waiter_id] = (demand.model, key)
        return Waiting(waiter=waiter_id, position=ahead)

    def _unservable(self, model: ModelSpec, key: ClassKey) -> Refusal | None:
        """A refusal when nobody in the pool, even with the whole fleet up, could ever serve this class."""
        members = [provider for _, provider in self._members[model.id] if provider.is_enabled]
        if not members or any(provider.serves(key) for provider in members):
            return None
        if key.at is not None:
            able = [p for p in members if p.serves(key._replace(at=None))]
            if able:
                ranks = write_ranks(frozenset().union(*(p.ranks_of(model.id) for p in able)))
                return Refusal(reason=RefusalReason.TARGET_RANK_NOT_SERVED, details={"ranks": ranks})
        if key.is_long and any(provider.serves(key._replace(is_long=False, at=None)) for provider in members):
            return Refusal(reason=RefusalReason.LONG_CONTEXT_NOT_SUPPORTED)
        offered = sorted({operation for provider in members for operation in provider.offered})
        return Refusal(reason=RefusalReason.OPERATION_NOT_SUPPORTED, details={"offered": ", ".join(offered)})

    def _refuse_unservable(self, touched: Iterable[Provider]) -> list[Settlement]:
        """Take out whoever waits for what nobody in the pool can serve since these providers changed."""
        settled: list[Settlement] = []
        for model_id in {model_id for provider in touched for model_id in provider.models}:
            queue = self._queues[model_id]
            for key, lane in list(queue.classes.items()):
                refusal = self._unservable(self._snapshot.models[model_id], key)
                if refusal is None:
                    continue
                for waiter in list(lane):
                    queue.remove(key, waiter.id)
                    del self._where[waiter.id]
                    settled.append(Denied(waiter=waiter.id, refusal=refusal))
        return settled

    def _condition(self, model_id: ModelId, key: ClassKey, now: float) -> Condition:
        """What a class waits for: the most hopeful of what its live providers say."""
        modes: set[GateMode] = set()
        for _, provider in self._members[model_id]:
            if not provider.is_live or not provider.serves(key):
                continue
            if provider.gate.mode is GateMode.OPEN and provider.breaker.is_open(now):
                continue  # nobody is there for as long as the breaker says so
            modes.add(provider.gate.mode)
        if GateMode.OPEN in modes:
            return Condition.CONTENDED
        if GateMode.QUEUE in modes:
            return Condition.PAUSED
        if GateMode.RECONCILING in modes:
            return Condition.RECONCILING
        if GateMode.REJECT in modes:
            return Condition.REJECTING
        return Condition.EMPTY

    def _judge(self, model_id: ModelId, now: float) -> None:
        """Say anew what the classes of a model wait for."""
        for key, lane in self._queues[model_id].classes.items():
            lane.set_condition(self._condition(model_id, key, now), now)

    def _settle(self, touched: Iterable[Provider], now: float) -> list[Settlement]:
        """After a change of what providers are: conditions anew, then pump, then refuse whom a pause rejects."""
        providers = list(touched)
        models = {model_id for provider in providers for model_id in provider.models}
        for model_id in models:
            self._judge(model_id, now)
        settled = self._pump(providers, now)
        for model_id in models:
            queue = self._queues[model_id]
            if any(lane.condition is Condition.REJECTING for lane in queue.classes.values()):
                settled += self._expire(self._snapshot.models[model_id], queue, now)
        return settled

    def _pump(self, providers: Iterable[Provider], now: float) -> list[Settlement]:
        """Hand free slots to heads until nobody who fits is left."""
        settled: list[Settlement] = []
        open_ones = [p for p in providers if p.is_live and p.gate.is_open]
        while open_ones:
            if len(open_ones) > 1:
                open_ones.sort(key=self._load, reverse=True)
            provider = open_ones[-1]
            picked = self._pick(provider, now)
            if picked is None:
                open_ones.pop()
                continue
            member, model_id, key, waiter = picked
            self._queues[model_id].remove(key, waiter.id)
            del self._where[waiter.id]
            settled.append(Granted(waiter=waiter.id, lease=self._grant(provider, member, waiter.demand, now)))
        return settled

    def _load(self, provider: Provider) -> float:
        return self.leases.in_flight(provider.key) / max(provider.capacity, 1)

    def _pick(self, provider: Provider, now: float) -> tuple[PoolMember, ModelId, ClassKey, Waiter] | None:
        """The next waiter for this provider: priority, then age, and every Nth time the other length class (EN-111)."""
        best: dict[bool, tuple[tuple[int, int], ModelId, ClassKey, Waiter]] = {}
        for model_id in provider.models:
            queue = self._queues[model_id]
            if not queue.depth:
                continue
            for key, lane in queue.classes.items():
                self.steps += 1
                head = lane.head()
                if head is None:
                    continue
                rank = (-head.demand.priority, head.demand.number)
                if key.is_long in best and rank >= best[key.is_long][0]:
                    continue
                if provider.has_room(key, self.leases, now):
                    best[key.is_long] = (rank, model_id, key, head)
        if not best:
            return None
        is_long = min(best, key=lambda length: best[length][0])
        passed = provider.passed_over
        if len(best) == 2:
            if passed[not is_long] >= self._snapshot.limits.fairness_every - 1:
                is_long = not is_long
            passed[is_long] = 0
            passed[not is_long] += 1
        else:
            passed[True] = passed[False] = 0
        _, model_id, key, waiter = best[is_long]
        member = next(m for m, p in self._members[model_id] if p is provider)
        return member, model_id, key, waiter

    def _expire(self, model: ModelSpec, queue: ModelQueue, now: float) -> list[Settlement]:
        settled: list[Settlement] = []
        for waiter, reason in queue.expire(model.queue, now):
            del self._where[waiter.id]
            settled.append(Denied(waiter=waiter.id, refusal=self._refusal(model, reason)))
        return settled

    def _refusal(self, model: ModelSpec, reason: RefusalReason) -> Refusal:
        depth = self._queues[model.id].depth
        match reason:
            case RefusalReason.QUEUE_FULL | RefusalReason.QUEUE_TIMEOUT:
                members = self._members[model.id]
                some = members[:COMPARED_MAX]
                slots = sum(p.capacity for _, p in some if p.is_live) * len(members) / max(1, len(some)) or 1
                after = min(RETRY_AFTER_MAX_S, float(1 + ceil(depth / slots)))
            case RefusalReason.NO_CAPACITY:
                after = 10.0
            case _:
                after = 5.0
        return Refusal(
            reason=reason,
            retry_after_s=after,
            details={"model": model.id, "queue_depth": str(depth), "queue_max": str(model.queue.max_waiters)},
        )

    def _drop_if_idle(self, provider: Provider) -> None:
        """A removed provider goes when its last run ended (EN-114)."""
        if not self.leases.is_held(provider.key):
            self._providers.pop(provider.key, None)
            self._timed.pop(provider.key, None)

    def live_work_of_node(self, node: NodeId) -> int:
        """Leases out on a Node."""
        return sum(1 for lease in self.leases if lease.key.node == node)

    def waiting_classes(self, model_id: ModelId) -> Iterator[tuple[ClassKey, WaitClass]]:
        """The classes of one model with somebody in them; for tests and status."""
        yield from self._queues[model_id].classes.items()

    def lease(self, lease_id: LeaseId) -> Lease | None:
        """A lease that is out."""
        return next((lease for lease in self.leases if lease.id == lease_id), None)
