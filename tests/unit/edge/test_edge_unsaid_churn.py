"""Requests that not everybody can be told, while providers come, go and fail: each ends once (SF-10, SF-21)."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from iop.core.errors import InvalidRequest, IopError
from iop.core.ids import RunId
from iop.edge.calls import CannotBeSaidError, Route, RunCall
from iop.edge.edge import Edge
from iop.edge.snapshot import DispatchLimits, QueueSpec
from iop.net.admin_steps import AdminStepCodec
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingRunSink,
    RecordingSink,
    adapter_spec,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.testing.virtual_loop import run_virtual
from iop.wire.messages import CancelReason, RunEvent, RunEventType, RunRequest, StreamErrorCode

OPERATIONS = ("chat_completions", "messages", "responses", "embeddings")
ADAPTERS = {
    "n1/main": adapter_spec("main", operations=frozenset({"chat_completions"})),
    "n2/main": adapter_spec("main", capacity=1, operations=frozenset({"messages", "responses"})),
    "n3/main": adapter_spec("main", route=Route.RUN),
    "n4/main": replace(adapter_spec("main", capacity=1, route=Route.RUN), type="openengine"),
    "n5/main": replace(adapter_spec("main", route=Route.RUN), type="openengine"),
}
FAILURES = (
    (StreamErrorCode.INVALID_REQUEST, True),
    (StreamErrorCode.INVALID_REQUEST, True),
    (StreamErrorCode.BUSY, True),
    (StreamErrorCode.CONNECT_FAILED, True),
    (StreamErrorCode.UPSTREAM_ERROR, False),
)
ENDS = (RunEventType.COMPLETE, RunEventType.ERROR)


class StillClock:
    def monotonic(self):
        return 0.0

    def unix_nanos(self):
        return 1_800_000_000_000_000_000


class Asked:
    """One request, and what came to its caller."""

    def __init__(self, chance):
        self.tunnel, self.run = RecordingSink(), RecordingRunSink()
        self.refused = self.handle = None
        self.is_cancelled = False
        self._chance = chance

    def prepare(self, target):
        if self._chance.random() < 0.3:
            raise CannotBeSaidError(InvalidRequest("not here", reason="UNSUPPORTED_FIELD"))
        if target.route is Route.RUN:
            return RunCall(input=b"{}", sink=self.run)
        return tunnel_to(self.tunnel)(target)

    async def ask(self, edge, request):
        try:
            self.handle = await edge.dispatcher.dispatch(request, self.prepare)
        except IopError as error:
            self.refused = error

    @property
    def ends(self):
        of_run = sum(event.type in ENDS for event in self.run.events)
        return self.tunnel.ends + of_run + (self.refused is not None)


class Fleet:
    """An Edge, its Nodes, and moves that chance makes."""

    def __init__(self, edge, chance, tasks):
        self.edge, self._chance, self._tasks = edge, chance, tasks
        self._nodes = {name: self._node(name) for name in ADAPTERS}
        self._revision = 1
        self.asked = []

    def _node(self, name):
        return FakeEdgeConnection(self.edge.nodes, name[:2]).connect()

    def configure(self, names):
        self._revision += 1
        self.edge.apply_snapshot(config(names, revision=self._revision))

    def move(self):
        chance = self._chance.random()
        live = [stream for node in self._nodes.values() for stream in node.open_streams]
        if chance < 0.4:
            self.ask()
        elif chance < 0.6 and live:
            code, is_before = self._chance.choice(FAILURES)
            is_final = code == StreamErrorCode.INVALID_REQUEST
            self._chance.choice(live).fail(code, before_start=is_before, retryable=not is_final)
        elif chance < 0.8 and live:
            complete(self._chance.choice(live))
        elif chance < 0.85:
            name = self._chance.choice(list(ADAPTERS))
            self._nodes[name].lose()
            self._nodes[name] = self._node(name)
        elif chance < 0.9:
            self.configure(sorted(self._chance.sample(list(ADAPTERS), self._chance.randint(1, 5))))
        elif chance < 0.95:
            self.tell_ranks()
        elif self.asked:
            self.cancel(self._chance.choice(self.asked))

    def ask(self):
        one = Asked(self._chance)
        request = request_of(
            "fast", operation=self._chance.choice(OPERATIONS), priority=self._chance.randint(-2, 2)
        )
        request = structs.replace(request, target_rank=self._chance.choice((None, None, None, 0, 1)))
        self._tasks.create_task(one.ask(self.edge, request))
        self.asked.append(one)

    def tell_ranks(self):
        now = asyncio.get_running_loop().time()
        for name, node in self._nodes.items():
            generation = self.edge.nodes.registry.generation_of(node.node)
            told = {"main": {f"target-of-{name}": frozenset({self._chance.randint(0, 1)})}}
            if generation is not None:
                self.edge.dispatcher.apply(self.edge.pools.set_ranks(node.node, generation, told, now=now))

    def cancel(self, one):
        if one.handle is not None and one.handle.outcome is None:
            one.handle.cancel(CancelReason.CLIENT_GONE)
            one.is_cancelled = True

    def bring_back(self):
        for name, node in list(self._nodes.items()):
            if node.close_reason is not None:
                self._nodes[name] = self._node(name)
            for stream in list(self._nodes[name].open_streams):
                complete(stream)


def config(names, revision=1):
    kept = {name: ADAPTERS[name] for name in names}
    limits, queue = DispatchLimits(attempts_max=4), QueueSpec(max_waiters=6, timeout_s=9.0)
    return snapshot_of(kept, {"fast": list(kept)}, limits=limits, queue=queue, revision=revision)


def complete(stream):
    if isinstance(stream.request, RunRequest):
        stream.emit(RunEvent(type=RunEventType.COMPLETE))
    else:
        stream.start()
        stream.end()


@pytest.mark.clause("SF-10", "SF-21", "EN-112")
@pytest.mark.parametrize("seed", range(10))
def test_each_request_ends_once_while_providers_come_and_go(seed):
    async def main():
        chance, numbers = Random(seed), itertools.count(1)
        edge = Edge(
            config(ADAPTERS),
            clock=StillClock(),
            codec=AdminStepCodec(),
            new_run_id=lambda: RunId(f"run-{next(numbers)}"),
        )
        async with edge:
            async with asyncio.TaskGroup() as tasks:
                fleet = Fleet(edge, chance, tasks)
                for _ in range(200):
                    fleet.move()
                    if chance.random() < 0.7:
                        await asyncio.sleep(chance.choice((0, 0, 0, 0.3)))
                    assert edge.pools.check(asyncio.get_running_loop().time()) == []
                    assert all(one.ends <= 1 for one in fleet.asked)
                fleet.configure(ADAPTERS)
                for _ in range(60):
                    fleet.bring_back()
                    await asyncio.sleep(1.0)
            assert (edge.pools.waiting, len(edge.pools.leases)) == (0, 0)
            assert all(one.ends == 1 for one in fleet.asked if not one.is_cancelled)
            assert all(one.handle is None or one.handle.outcome is not None for one in fleet.asked)
            assert not any(queue.classes for queue in edge.pools._queues.values()), "no class is left behind"

    run_virtual(main())
