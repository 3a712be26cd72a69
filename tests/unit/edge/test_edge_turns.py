"""What meets in one turn of the loop: grants, losses, refreshes, moments that are over. On virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from iop.core.errors import Draining, IopError
from iop.core.ids import Generation, ModelId, NodeId, ProviderId, RequestId, RunId
from iop.edge.dispatch import DispatchHandle
from iop.edge.edge import Edge
from iop.edge.pools import Demand, Denied, Pools, RefusalReason, Waiting
from iop.edge.snapshot import EdgeSnapshot, QueueSpec
from iop.net.admin_steps import AdminStepCodec
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingSink,
    adapter_spec,
    provider_key,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.testing.virtual_loop import VirtualLoop, run_virtual

KEY = provider_key("n1/main")
ONE = {"n1/main": adapter_spec("main", capacity=1)}
FAST = {"fast": ["n1/main"]}


class _StillClock:
    def monotonic(self) -> float:
        return 0.0

    def unix_nanos(self) -> int:
        return 1_800_000_000_000_000_000


class Stage:
    """An Edge with one Node, and callers who are tasks."""

    def __init__(self, edge: Edge, tasks: asyncio.TaskGroup) -> None:
        self.edge = edge
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, VirtualLoop)
        self.node = FakeEdgeConnection(edge.nodes).connect()
        self.tasks = tasks

    def call(self, model: str = "fast", prepare=None) -> asyncio.Task:
        """A request that is on its way; the task's result is its handle, or the refusal."""
        send = prepare or tunnel_to(RecordingSink())

        async def ask() -> DispatchHandle | IopError:
            try:
                return await self.edge.dispatcher.dispatch(request_of(model), send)
            except IopError as refusal:
                return refusal

        return self.tasks.create_task(ask())

    async def settle(self) -> None:
        """Let everything that is ready run."""
        for _ in range(100):
            await asyncio.sleep(0)
            if self.loop.is_quiet():
                return
        raise AssertionError("it does not come to rest")

    def end_all(self, node: FakeEdgeConnection | None = None) -> None:
        """All open streams end well."""
        for stream in list((node or self.node).open_streams):
            stream.end()


def play(snapshot: EdgeSnapshot, script: Callable[[Stage], Awaitable[None]]) -> None:
    """Run a script on an Edge on virtual time."""
    numbers = itertools.count(1)

    async def main() -> None:
        edge = Edge(
            snapshot,
            clock=_StillClock(),
            codec=AdminStepCodec(),
            new_run_id=lambda: RunId(f"run-{next(numbers)}"),
        )
        async with edge, asyncio.TaskGroup() as tasks:
            await script(Stage(edge, tasks))

    run_virtual(main())


@pytest.mark.clause("EN-110", "EN-113", "EN-117")
def test_after_a_stall_who_waited_for_a_moment_goes_before_who_comes_now():
    async def script(stage: Stage) -> None:
        stage.edge.dispatcher.hold_back(KEY)
        waiting = stage.call("fast")
        await stage.settle()
        assert stage.edge.pools.waiting == 1
        stage.loop.stand_still(5.0)
        newcomer = stage.call("slow")
        await stage.settle()
        assert waiting.done()
        assert not newcomer.done()
        stage.end_all()
        await stage.settle()
        assert newcomer.done()
        stage.end_all()

    play(snapshot_of(ONE, {"fast": ["n1/main"], "slow": ["n1/main"]}), script)


@pytest.mark.clause("EN-110", "EN-113")
def test_after_a_stall_a_queue_that_only_looks_full_refuses_nobody():
    async def script(stage: Stage) -> None:
        stage.edge.dispatcher.hold_back(KEY)
        waiting = stage.call()
        await stage.settle()
        stage.loop.stand_still(5.0)
        newcomer = stage.call()
        await stage.settle()
        assert isinstance(waiting.result(), DispatchHandle)
        stage.end_all()
        await stage.settle()
        assert isinstance(newcomer.result(), DispatchHandle)
        stage.end_all()

    play(snapshot_of(ONE, FAST, queue=QueueSpec(max_waiters=1)), script)


@pytest.mark.clause("EN-110")
def test_a_timer_that_fires_early_by_the_clocks_resolution_has_fired():
    async def script(stage: Stage) -> None:
        stage.edge.dispatcher.hold_back(KEY)
        waiting = stage.call()
        await stage.settle()
        due_s = stage.edge.pools.next_deadline() - stage.loop.time()
        await asyncio.sleep(due_s - 5e-10)
        assert stage.edge.pools.waiting == 0
        await stage.settle()
        assert isinstance(waiting.result(), DispatchHandle)
        stage.end_all()

    play(snapshot_of(ONE, FAST), script)


@pytest.mark.clause("EN-80", "AD-39")
def test_nothing_starts_at_an_adapter_that_a_refresh_found_gone_in_the_turn_of_the_grant():
    async def script(stage: Stage) -> None:
        stage.call()
        await stage.settle()
        waiting = stage.call()
        await stage.settle()
        stage.end_all()
        generation = stage.edge.pools.roster.generation_of(KEY)
        stage.edge.dispatcher.set_absent(NodeId("n1"), generation, {ProviderId("main")})
        await stage.settle()
        assert not stage.node.open_streams
        assert len(stage.edge.pools.leases) == 0
        stage.edge.dispatcher.set_absent(NodeId("n1"), generation, ())
        await stage.settle()
        assert isinstance(waiting.result(), DispatchHandle)
        stage.end_all()

    play(snapshot_of(ONE, FAST), script)


@pytest.mark.clause("AD-39", "EN-114")
def test_nothing_starts_behind_the_gate_that_a_config_closes_in_the_turn_of_the_grant():
    administered = {"n1/main": adapter_spec("main", capacity=1, is_administered=True)}

    async def script(stage: Stage) -> None:
        stage.call()
        await stage.settle()
        waiting = stage.call()
        await stage.settle()
        stage.end_all()
        stage.edge.dispatcher.apply_snapshot(snapshot_of(administered, FAST, revision=2))
        await stage.settle()
        assert not stage.node.open_streams
        stage.edge.dispatcher.apply_snapshot(snapshot_of(ONE, FAST, revision=3))
        await stage.settle()
        assert isinstance(waiting.result(), DispatchHandle)
        stage.end_all()

    play(snapshot_of(ONE, FAST), script)


@pytest.mark.clause("EN-81")
def test_a_refresh_is_not_sent_to_a_node_that_is_lost_in_the_turn_of_its_decision():
    async def script(stage: Stage) -> None:
        wider = {"n1/main": adapter_spec("main", capacity=2)}
        stage.edge.apply_snapshot(snapshot_of(wider, FAST, revision=2))
        stage.node.lose()
        await stage.settle()
        assert stage.node.misuses == 0
        assert stage.node.refreshes == []

    play(snapshot_of(ONE, FAST), script)


@pytest.mark.clause("EN-109")
def test_nobody_waits_at_an_edge_that_closes_though_its_lease_was_lost_in_that_turn():
    async def script(stage: Stage) -> None:
        stage.call()
        await stage.settle()
        waiting = stage.call()
        await stage.settle()

        # In this order: the grant is made, the Edge begins to close, the Node goes, the one with the grant would run.
        closing = stage.tasks.create_task(stage.edge.dispatcher.shut_down(deadline_s=5.0))
        stage.loop.call_soon(stage.node.lose)
        stage.end_all()
        await stage.settle()
        assert closing.done()
        assert waiting.done()
        assert isinstance(waiting.result(), Draining)
        assert waiting.result().reason == "edge_shutdown"

    play(snapshot_of(ONE, FAST), script)


@pytest.mark.clause("EN-112")
def test_a_request_whose_builder_breaks_takes_nobody_elses_lease_along():
    async def script(stage: Stage) -> None:
        send = tunnel_to(RecordingSink())
        built = []

        def breaks_the_second_time(target):
            built.append(target)
            if len(built) > 1:
                raise RuntimeError("a bug of ours")
            return send(target)

        stage.node.hands_over = False
        broken = stage.call(prepare=breaks_the_second_time)
        other = stage.call()
        await stage.settle()
        assert len(stage.node.streams) == 2
        stage.node.lose()
        assert stage.edge.pools.waiting == 2
        with pytest.raises(RuntimeError):
            FakeEdgeConnection(stage.edge.nodes).connect()
        await stage.settle()
        assert broken.result().outcome is not None
        assert stage.edge.pools.waiting == 0
        assert [lease.run_id for lease in stage.edge.pools.leases] == [other.result().run_id]
        other.result().cancel()

    play(snapshot_of({"n1/main": adapter_spec("main", capacity=2)}, FAST), script)


@pytest.mark.clause("EN-110")
def test_a_pool_that_a_config_leaves_without_providers_answers_no_capacity():
    queue = QueueSpec(timeout_s=60.0, no_capacity_grace_s=5.0)
    pools = Pools(snapshot_of(ONE, {**FAST, "slow": ["n1/main"]}, queue=queue), now=0.0)
    pools.activate(NodeId("n1"), Generation(1), now=0.0)
    demands = [
        Demand(
            model=ModelId("fast"),
            operation="chat_completions",
            request_id=RequestId(f"r{n}"),
            run_id=RunId(f"run{n}"),
        )
        for n in range(2)
    ]
    pools.acquire(demands[0], now=0.0)
    waiting = pools.acquire(demands[1], now=0.0)
    assert isinstance(waiting, Waiting)
    pools.apply_snapshot(
        snapshot_of(ONE, {"fast": [], "slow": ["n1/main"]}, revision=2, queue=queue), now=10.0
    )
    assert pools.next_deadline() == 15.0
    (denied,) = pools.handle_deadline(15.0)
    assert isinstance(denied, Denied)
    assert denied.refusal.reason is RefusalReason.NO_CAPACITY
