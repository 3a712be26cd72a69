"""Side work in the pools: it occupies no slot, has a bound of its own, and comes back like any lease (SF-14)."""

from __future__ import annotations

import pytest

from iop.core.ids import Generation, ModelId, NodeId, RequestId, RunId
from iop.edge.calls import SIDE_WORK_MAX
from iop.edge.pools import Demand, Granted, Lease, LeaseKind, Pools, Verdict, Waiting
from iop.edge.snapshot import BreakerSpec
from iop.testing.edge_fleet import adapter_spec, provider_key, snapshot_of

NODE, KEY = NodeId("n1"), provider_key("n1/main")


def pools_of(**more: object) -> Pools:
    made = Pools(
        snapshot_of({"n1/main": adapter_spec("main", capacity=1)}, {"fast": ["n1/main"]}, **more), now=0.0
    )
    made.activate(NODE, Generation(1), now=0.0)
    return made


def ask(pools: Pools, operation: str) -> object:
    number = pools.new_number()
    demand = Demand(
        model=ModelId("fast"),
        operation=operation,
        request_id=RequestId(f"r{number}"),
        run_id=RunId(f"run{number}"),
    )
    return pools.acquire(demand, now=0.0)


@pytest.mark.clause("SF-14", "EN-91")
def test_counting_is_granted_beside_a_full_engine_and_the_next_waits_for_its_own_bound() -> None:
    pools = pools_of()
    assert isinstance(ask(pools, "chat_completions"), Lease)
    side = [ask(pools, "count_tokens") for _ in range(SIDE_WORK_MAX)]
    assert all(isinstance(lease, Lease) and lease.kind is LeaseKind.SIDE for lease in side)
    assert (pools.leases.in_flight(KEY), pools.leases.side_in_flight(KEY)) == (1, SIDE_WORK_MAX)
    waiting = ask(pools, "count_tokens")
    assert isinstance(waiting, Waiting)
    assert not pools.check(0.0)
    first = side[0]
    assert isinstance(first, Lease)
    (granted,) = pools.release(first, Verdict.SUCCESS, now=1.0)
    assert isinstance(granted, Granted)
    assert granted.waiter == waiting.waiter


@pytest.mark.clause("SF-14", "EN-116")
def test_failed_counts_do_not_open_the_breaker_and_an_open_one_stops_no_count() -> None:
    pools = pools_of(breaker=BreakerSpec(failures=1))
    count = ask(pools, "count_tokens")
    assert isinstance(count, Lease)
    pools.release(count, Verdict.FAILURE, now=0.0)
    chat = ask(pools, "chat_completions")
    assert isinstance(chat, Lease)
    pools.release(chat, Verdict.FAILURE, now=0.0)
    assert isinstance(ask(pools, "chat_completions"), Waiting)
    assert isinstance(ask(pools, "count_tokens"), Lease)
