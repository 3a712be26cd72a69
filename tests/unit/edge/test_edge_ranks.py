"""Requests for one data-parallel rank: who is a candidate, who waits, who is refused (SF-21, EN-04)."""

from __future__ import annotations

import pytest

from iop.core.ids import Generation, ModelId, NodeId, ProviderId, RequestId, RunId
from iop.edge.calls import ProviderKey, Route
from iop.edge.pools import (
    Demand,
    Denied,
    Granted,
    Lease,
    Pools,
    Refusal,
    RefusalReason,
    Settlement,
    Verdict,
    Waiting,
)
from iop.edge.snapshot import EdgeSnapshot
from iop.testing.edge_fleet import adapter_spec, snapshot_of

pytestmark = pytest.mark.clause("SF-21")

FAST = ModelId("fast")
N1 = NodeId("n1")
LEFT, RIGHT, PLAIN = (ProviderId(name) for name in ("left", "right", "plain"))
_count = iter(range(1, 1_000_000))


def demand(rank: int | None = None, *, is_long: bool = False) -> Demand:
    number = next(_count)
    return Demand(
        model=FAST,
        operation="generate_text",
        request_id=RequestId(f"r{number}"),
        run_id=RunId(f"run{number}"),
        is_long=is_long,
        target_rank=rank,
    )


def config(*names: str) -> EdgeSnapshot:
    specs = {f"n1/{name}": adapter_spec(name, capacity=1, route=Route.RUN) for name in names}
    return snapshot_of(specs, {"fast": list(specs)})


def tell(pools: Pools, now: float = 0.0, **ranks: set[int]) -> list[Settlement]:
    told = {ProviderId(name): {f"target-of-n1/{name}": frozenset(each)} for name, each in ranks.items()}
    return pools.set_ranks(N1, Generation(1), told, now=now)


@pytest.fixture
def pools() -> Pools:
    """Three providers with a slot each: ranks 0 and 1, ranks 2 and 3, and one that told of none."""
    made = Pools(config("left", "right", "plain"), now=0.0)
    made.activate(N1, Generation(1), now=0.0)
    tell(made, left={0, 1}, right={2, 3})
    return made


def lease_of(answer: Lease | Waiting | Refusal) -> Lease:
    assert isinstance(answer, Lease), answer
    return answer


def waiter_of(answer: Lease | Waiting | Refusal) -> Waiting:
    assert isinstance(answer, Waiting), answer
    return answer


@pytest.mark.parametrize(("rank", "provider"), [(0, LEFT), (1, LEFT), (2, RIGHT), (3, RIGHT)])
def test_a_rank_is_asked_of_who_has_it(pools: Pools, rank: int, provider: ProviderId) -> None:
    assert lease_of(pools.acquire(demand(rank), now=0.0)).key.provider == provider


def test_who_asks_for_a_rank_waits_for_it_while_others_are_free(pools: Pools) -> None:
    held = lease_of(pools.acquire(demand(3), now=0.0))
    waiting = waiter_of(pools.acquire(demand(2), now=0.0))
    others = {lease_of(pools.acquire(demand(), now=0.0)).key.provider for _ in range(2)}
    assert others == {LEFT, PLAIN}, "others pass by"
    settled = pools.release(held, Verdict.SUCCESS, now=1.0)
    assert [each.waiter for each in settled if isinstance(each, Granted)] == [waiting.waiter]
    assert pools.check(1.0) == []


def test_a_rank_that_nobody_has_is_refused_with_those_there_are(pools: Pools) -> None:
    refusal = pools.acquire(demand(4), now=0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.TARGET_RANK_NOT_SERVED
    assert refusal.details == {"ranks": "0-3"}
    assert pools.roster.ranks_of(FAST) == {0, 1, 2, 3}


@pytest.mark.clause("SF-22")
def test_only_ranks_of_who_offers_the_operation_are_named(pools: Pools) -> None:
    """A rank that an embedding engine of the pool has is none that a generation could be sent to."""
    specs = {
        "n1/left": adapter_spec("left", capacity=1, route=Route.RUN),
        "n1/right": adapter_spec("right", capacity=1, operations=frozenset({"embeddings"}), long_capacity=1),
    }
    pools.apply_snapshot(snapshot_of(specs, {"fast": list(specs)}, revision=2), now=1.0)
    tell(pools, 1.0, left={0, 1}, right={2, 3})
    assert pools.roster.ranks_of(FAST) == {0, 1}, "what is advertised is accepted"
    refused = [pools.acquire(demand(rank), now=1.0) for rank in (2, 3)]
    assert [(each.reason, each.details) for each in refused if isinstance(each, Refusal)] == [
        (RefusalReason.TARGET_RANK_NOT_SERVED, {"ranks": "0-1"})
    ] * 2
    is_long = pools.acquire(demand(2, is_long=True), now=1.0)
    assert isinstance(is_long, Refusal)
    assert is_long.reason is RefusalReason.LONG_CONTEXT_NOT_SUPPORTED


def test_a_waiter_is_refused_once_nobody_has_its_rank_any_more(pools: Pools) -> None:
    lease_of(pools.acquire(demand(2), now=0.0))
    waiting = waiter_of(pools.acquire(demand(3), now=0.0))
    assert tell(pools, 1.0, right={2, 3}) == [], "nothing new"
    settled = tell(pools, 2.0, right={2})
    assert [(each.waiter, each.refusal.reason) for each in settled if isinstance(each, Denied)] == [
        (waiting.waiter, RefusalReason.TARGET_RANK_NOT_SERVED)
    ]


def test_a_waiter_goes_where_its_rank_has_come_up(pools: Pools) -> None:
    lease_of(pools.acquire(demand(2), now=0.0))
    waiting = waiter_of(pools.acquire(demand(3), now=0.0))
    (granted,) = tell(pools, 1.0, plain={3})
    assert isinstance(granted, Granted)
    assert (granted.waiter, granted.lease.key.provider) == (waiting.waiter, PLAIN)


@pytest.mark.clause("EN-110")
def test_a_rank_whose_node_is_away_is_waited_for(pools: Pools) -> None:
    pools.fence(N1, Generation(1), now=1.0)
    waiting = waiter_of(pools.acquire(demand(2), now=2.0))
    settled = pools.activate(N1, Generation(2), now=3.0)
    assert [each.waiter for each in settled if isinstance(each, Granted)] == [waiting.waiter]


@pytest.mark.clause("EN-33")
def test_a_former_generation_tells_nothing(pools: Pools) -> None:
    told = {RIGHT: {"target-of-n1/right": frozenset({9})}}
    assert pools.set_ranks(N1, Generation(7), told, now=1.0) == []
    assert pools.roster.ranks_of(FAST) == {0, 1, 2, 3}


@pytest.mark.clause("EN-114")
def test_a_provider_that_becomes_another_kind_has_no_ranks_until_it_tells(pools: Pools) -> None:
    specs = {
        "n1/left": adapter_spec("left", capacity=1, route=Route.TUNNEL),
        "n1/right": adapter_spec("right", capacity=1, route=Route.RUN),
    }
    pools.apply_snapshot(snapshot_of(specs, {"fast": list(specs)}, revision=2), now=1.0)
    assert pools.roster.ranks_of(FAST) == {2, 3}


def test_the_explanation_names_the_rank(pools: Pools) -> None:
    views = {view.key: view.why for view in pools.explain(demand(2), now=0.0)}
    assert views[ProviderKey(N1, RIGHT)] == "has room"
    assert views[ProviderKey(N1, PLAIN)] == "its engine does not have this data-parallel rank"
