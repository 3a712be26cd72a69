"""Bugs planted into the Edge on purpose: each must be caught by the simulation, or its checks prove nothing.

A plant is a function that patches classes of the real code; ``patch(owner, name, new)`` undoes itself afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from edge_world import run_seed

from iop.core.ids import Generation
from iop.edge import handle as handle_module
from iop.edge.attempt import Attempt
from iop.edge.dispatch import Dispatcher
from iop.edge.handle import DispatchHandle, Phase
from iop.edge.nodes import Nodes
from iop.edge.outcomes import OutcomeBook
from iop.edge.pools import Breaker, Granted, LeaseBook, Pools, Verdict
from iop.edge.pools.provider import Provider
from iop.edge.pools.queue import WaitClass, _Lane
from iop.edge.registry import Activated, Closed, Fenced, ReadyAnswered, Registry
from iop.wire.messages import CloseReason, StreamErrorCode

Patch = Callable[[Any, str, Any], None]
Plant = Callable[[Patch], None]


def late_close_fences_the_new_owner(patch: Patch) -> None:
    right = Registry.closed

    def closed(self, connection, reason, *, now):
        effects = right(self, connection, reason, now=now)
        if not effects and reason is CloseReason.CONNECTION_LOST:
            for node, entry in self._entries.items():
                if entry.owner is not None and entry.owner.generation is not None:
                    return self._remove_owner(node, entry, reason, now, says_close=False)
        return effects

    patch(Registry, "closed", closed)


def lease_returned_twice_on_cancel_and_close(patch: Patch) -> None:
    right = LeaseBook.give_back

    def give_back(self, lease):
        if not right(self, lease):
            self.returned_total += 1
        return True

    patch(LeaseBook, "give_back", give_back)
    told = DispatchHandle.call_off

    def call_off(self, reason, *, tells_sink):
        done = told(self, reason, tells_sink=tells_sink)
        if done and self.attempt is not None and self.attempt.lease.id in self._shell.pools.leases:
            self._shell.pools.release(self.attempt.lease, Verdict.NEUTRAL, now=self._shell.now())
        return done

    patch(DispatchHandle, "call_off", call_off)


def pump_before_offline(patch: Patch) -> None:
    right = Pools.fence

    def fence(self, node, generation, *, now):
        early = []
        for lease in [
            lease for lease in self.leases if lease.key.node == node and lease.generation == generation
        ]:
            early += self.release(lease, Verdict.NEUTRAL, now=now)
        lost, settled = right(self, node, generation, now=now)
        return lost, early + settled

    patch(Pools, "fence", fence)


def ready_is_true_for_a_stale_owner(patch: Patch) -> None:
    right = Registry.ready

    def ready(self, connection, node_id, *, now):
        effects = right(self, connection, node_id, now=now)
        return [replace(e, ready=True) if isinstance(e, ReadyAnswered) else e for e in effects]

    patch(Registry, "ready", ready)


def cancel_never_reaches_the_node(patch: Patch) -> None:
    patch(Attempt, "call_off", lambda self, reason, *, at_safe_point: self._go_quiet())


def credit_leaked_on_cancel(patch: Patch) -> None:
    patch(Attempt, "_drop", lambda self, data: None)


def a_waiter_lost_at_the_gate(patch: Patch) -> None:
    right = Pools.set_gates

    def set_gates(self, gates, *, now):
        return [s for s in right(self, gates, now=now) if not isinstance(s, Granted)]

    patch(Pools, "set_gates", set_gates)


def an_opened_gate_does_not_pump(patch: Patch) -> None:
    def set_gates(self, gates, *, now):
        for key, gate in gates:
            provider = self._providers.get(key)
            if provider is not None:
                provider.gate = gate
        return []

    patch(Pools, "set_gates", set_gates)


def a_left_waiter_stays_in_the_queue(patch: Patch) -> None:
    patch(Pools, "cancel_wait", lambda self, waiter: self.is_waiting(waiter))


def a_grant_to_somebody_who_left_is_kept(patch: Patch) -> None:
    def drop(self, handle):
        promise, handle.promise = handle.promise, None
        if promise is not None and promise.done() and not promise.cancelled():
            self._granted = {i: h for i, h in self._granted.items() if h is not handle}
        else:
            handle.leave_queue()

    patch(Dispatcher, "_drop_promise", drop)


def a_grant_meets_the_cancelled_promise_of_one_who_leaves(patch: Patch) -> None:
    def deliver(self, settlement):
        handle = self._waiting.pop(settlement.waiter, None)
        if handle is not None:
            handle.waits_no_more()
        answer = settlement.lease if isinstance(settlement, Granted) else settlement.refusal
        if handle is None:
            if isinstance(settlement, Granted):
                self._settlements.extend(
                    self.pools.release(settlement.lease, Verdict.NEUTRAL, now=self._loop.time())
                )
        elif handle.promise is not None:
            self._keep(handle, handle.promise, answer)
        else:
            self._continue(handle, answer)

    patch(Dispatcher, "_deliver", deliver)


def a_grant_that_nobody_fetched_is_lost(patch: Patch) -> None:
    def drop(self, handle):
        promise, handle.promise = handle.promise, None
        if promise is not None and not promise.done():
            handle.leave_queue()

    patch(Dispatcher, "_drop_promise", drop)


def work_starts_at_an_adapter_that_has_just_gone(patch: Patch) -> None:
    def set_absent(self, node, generation, absent):
        self.apply(self.pools.set_absent(node, generation, absent, now=self.now()))

    patch(Dispatcher, "set_absent", set_absent)


def a_newcomer_goes_before_those_whose_moment_has_come(patch: Patch) -> None:
    patch(Dispatcher, "_catch_up", lambda self, now: None)


def work_starts_behind_a_gate_that_has_just_closed(patch: Patch) -> None:
    patch(Pools, "may_start", lambda self, lease: lease.id in self.leases)


def a_fenced_grant_is_used_anyway(patch: Patch) -> None:
    def may_start(self, lease):
        provider = self._providers.get(lease.key)
        return provider is None or provider.gate.is_open

    patch(Pools, "may_start", may_start)
    patch(Nodes, "find_connection", lambda self, node, generation: self.connection_of(node))


def a_lost_stream_returns_its_lease_before_the_fence(patch: Patch) -> None:
    right = DispatchHandle.attempt_ended

    def attempt_ended(self, attempt, error, tell):
        if error is not None and error.code == StreamErrorCode.NODE_LOST and not attempt.is_lost:
            tell()
            self._settle(handle_module.Outcome.NODE_LOST, error.code)
            self._shell.give_back(attempt, Verdict.NEUTRAL)
            return
        right(self, attempt, error, tell)

    patch(DispatchHandle, "attempt_ended", attempt_ended)


def what_was_handed_over_is_sent_again(patch: Patch) -> None:
    right = handle_module.may_repeat
    patch(
        handle_module,
        "may_repeat",
        lambda error, *, has_started, is_handed_over: right(
            error, has_started=has_started, is_handed_over=False
        ),
    )


def what_has_begun_is_sent_again(patch: Patch) -> None:
    right = handle_module.may_repeat
    patch(
        handle_module,
        "may_repeat",
        lambda error, *, has_started, is_handed_over: right(
            error, has_started=False, is_handed_over=is_handed_over
        ),
    )


def a_second_outcome_is_recorded(patch: Patch) -> None:
    def settle(self, record, outcome, *, reason="", now):
        record.outcome, record.reason, record.ended_at = outcome, reason, now
        self._counts[outcome] += 1
        return True

    patch(OutcomeBook, "settle", settle)
    told = DispatchHandle.call_off

    def call_off(self, reason, *, tells_sink):
        if self.phase is Phase.SETTLED:
            self._settle(handle_module.outcome_of_cancel(reason), reason.value)
            return False
        return told(self, reason, tells_sink=tells_sink)

    patch(DispatchHandle, "call_off", call_off)


def the_last_comer_is_served_first(patch: Patch) -> None:
    patch(
        _Lane,
        "head",
        lambda self: self._returning[0] if self._returning else next(reversed(self._fresh.values())),
    )


def the_returning_stand_in_the_wrong_order(patch: Patch) -> None:
    patch(
        _Lane,
        "head",
        lambda self: self._returning[-1] if self._returning else next(iter(self._fresh.values())),
    )


def long_slots_are_not_counted(patch: Patch) -> None:
    right = Provider.has_room
    patch(
        Provider,
        "has_room",
        lambda self, key, leases, now: right(self, key._replace(is_long=False), leases, now),
    )


def capacity_is_exceeded_by_one(patch: Patch) -> None:
    right = LeaseBook.in_flight
    patch(LeaseBook, "in_flight", lambda self, key: max(0, right(self, key) - 1))


def a_trial_that_ends_without_verdict_blocks_the_breaker(patch: Patch) -> None:
    right = Breaker.record

    def record(self, verdict, *, was_trial, now):
        if was_trial and verdict is Verdict.NEUTRAL:
            return
        right(self, verdict, was_trial=was_trial, now=now)

    patch(Breaker, "record", record)
    patch(Breaker, "reset", lambda self: self._failures.clear() if self._trial_out else _reset(self))


def _reset(breaker: Breaker) -> None:
    breaker._failures.clear()
    breaker._open_until = None
    breaker._is_half_open = False
    breaker._trial_out = False


def a_busy_provider_is_forgotten(patch: Patch) -> None:
    right = Pools.hold_back
    patch(Pools, "hold_back", lambda self, key, until: right(self, key, float("inf")))


def a_fence_keeps_the_leases(patch: Patch) -> None:
    patch(LeaseBook, "give_back_all", lambda self, node, generation: [])


def a_fence_tells_nobody(patch: Patch) -> None:
    right = Dispatcher.lose
    patch(Dispatcher, "lose", lambda self, leases, settlements: right(self, (), settlements))


def a_new_generation_does_not_pump(patch: Patch) -> None:
    right = Pools.activate

    def activate(self, node, generation, **more):
        right_pump, self._pump = self._pump, lambda providers, now: []
        try:
            return right(self, node, generation, **more)
        finally:
            self._pump = right_pump

    patch(Pools, "activate", activate)


def nobody_looks_at_deadlines(patch: Patch) -> None:
    patch(Dispatcher, "rearm", lambda self: None)


def a_takeover_leaves_the_old_connection_open(patch: Patch) -> None:
    right = Registry._remove_owner

    def remove(self, node_id, entry, reason, now, *, says_close=True):
        effects = right(self, node_id, entry, reason, now, says_close=says_close)
        return [e for e in effects if not (isinstance(e, Closed) and e.reason is CloseReason.SUPERSEDED)]

    patch(Registry, "_remove_owner", remove)


def a_takeover_does_not_fence(patch: Patch) -> None:
    right = Registry.register

    def register(self, connection, node_id, **more):
        return [e for e in right(self, connection, node_id, **more) if not isinstance(e, Fenced)]

    patch(Registry, "register", register)


def a_pending_owner_is_dispatched_to(patch: Patch) -> None:
    right = Registry.register

    def register(self, connection, node_id, *, now, **more):
        effects = right(self, connection, node_id, now=now, **more)
        entry = self._entries.get(node_id)
        if entry is not None and entry.owner is not None and entry.owner.connection == connection:
            self._generation += 1
            entry.owner.generation = Generation(self._generation)
            entry.owner.is_activated = True
            effects.append(Activated(node=node_id, generation=entry.owner.generation, connection=connection))
        return effects

    patch(Registry, "register", register)


def an_abort_does_not_tell_the_caller(patch: Patch) -> None:
    right = DispatchHandle.call_off
    patch(
        DispatchHandle, "call_off", lambda self, reason, *, tells_sink: right(self, reason, tells_sink=False)
    )


def a_settled_caller_hears_more(patch: Patch) -> None:
    right = Attempt._go_quiet

    def go_quiet(self):
        right(self)
        self.is_draining = False
        if self._tunnel_sink is not None:
            self.on_body = self._tunnel_sink.on_body

    patch(Attempt, "_go_quiet", go_quiet)


def frozen_time_counts(patch: Patch) -> None:
    patch(DispatchHandle, "freeze", lambda self: None)


def an_expired_waiter_is_not_told(patch: Patch) -> None:
    def expire(self, model, queue, now):
        for waiter, _ in queue.expire(model.queue, now):
            del self._where[waiter.id]
        return []

    patch(Pools, "_expire", expire)


def a_condition_is_never_updated(patch: Patch) -> None:
    def set_condition(self, condition, now):
        self._account(now)

    patch(WaitClass, "set_condition", set_condition)


PLANTED: Final[tuple[Plant, ...]] = (
    late_close_fences_the_new_owner,
    lease_returned_twice_on_cancel_and_close,
    pump_before_offline,
    ready_is_true_for_a_stale_owner,
    cancel_never_reaches_the_node,
    credit_leaked_on_cancel,
    a_waiter_lost_at_the_gate,
    an_opened_gate_does_not_pump,
    a_left_waiter_stays_in_the_queue,
    a_grant_to_somebody_who_left_is_kept,
    a_grant_meets_the_cancelled_promise_of_one_who_leaves,
    a_grant_that_nobody_fetched_is_lost,
    work_starts_at_an_adapter_that_has_just_gone,
    a_newcomer_goes_before_those_whose_moment_has_come,
    work_starts_behind_a_gate_that_has_just_closed,
    a_fenced_grant_is_used_anyway,
    a_lost_stream_returns_its_lease_before_the_fence,
    what_was_handed_over_is_sent_again,
    what_has_begun_is_sent_again,
    a_second_outcome_is_recorded,
    the_last_comer_is_served_first,
    the_returning_stand_in_the_wrong_order,
    long_slots_are_not_counted,
    capacity_is_exceeded_by_one,
    a_trial_that_ends_without_verdict_blocks_the_breaker,
    a_busy_provider_is_forgotten,
    a_fence_keeps_the_leases,
    a_fence_tells_nobody,
    a_new_generation_does_not_pump,
    nobody_looks_at_deadlines,
    a_takeover_leaves_the_old_connection_open,
    a_takeover_does_not_fence,
    a_pending_owner_is_dispatched_to,
    an_abort_does_not_tell_the_caller,
    a_settled_caller_hears_more,
    frozen_time_counts,
    an_expired_waiter_is_not_told,
    a_condition_is_never_updated,
)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Plant one bug for the time of the block."""
    undo: list[tuple[Any, str, Any]] = []

    def patch(owner: Any, name: str, new: Any) -> None:
        undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    plant(patch)
    try:
        yield
    finally:
        for owner, name, old in reversed(undo):
            setattr(owner, name, old)


UNFIT = (AttributeError, NameError, TypeError)
"""What a plant raises that does not fit the code it was written for: it proves nothing."""


def seeds_until_caught(plant: Plant, *, seeds: int) -> tuple[int, str] | None:
    """How many seeds it took and what was noticed; ``None`` when the bug got away.

    Raises:
        AttributeError, NameError, TypeError: the plant itself is broken.
    """
    with planted(plant):
        for seed in range(seeds):
            try:
                run_seed(seed)
            except UNFIT:
                raise
            except Exception as caught:  # a bug may show as anything
                told = f"{type(caught).__name__}: {caught}".splitlines()[0]
                if any(f"{unfit.__name__}(" in told for unfit in UNFIT):
                    raise TypeError(f"the plant does not fit: {told}") from caught
                return seed + 1, told
    return None
