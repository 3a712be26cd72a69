"""A line between Node and Edge that fails and comes back (P-20), through a proxy that fails as networks do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from iop.testing.fault_proxy import FaultProxy
from iop.testing.process_fleet import ProcessFleet, eventually, provider
from iop.testing.stub_engine import StubCall, StubEngine, sse_events

pytestmark = pytest.mark.slow

STREAM = {"model": "fast", "stream": True, "messages": []}
PLAIN = {"model": "fast", "messages": []}


async def drip(call: StubCall) -> None:
    """Streams go on until the Node leaves; what is no stream is answered at once."""
    if not call.json.get("stream"):
        await call.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        return
    await call.start_events()
    while not call.is_peer_gone.is_set():
        await call.chunk(*sse_events(["tick "], finish=None, is_done=False))
        await asyncio.sleep(0.02)


@pytest.mark.case("P-20")
@pytest.mark.clause("EN-14", "EN-25", "EN-31", "EN-32", "EN-103", "EN-110", "EN-112", "EN-117")
async def test_a_partition_ends_each_request_once_and_the_node_is_used_again(tmp_path: Path) -> None:
    async with StubEngine(drip) as stub:
        fleet = ProcessFleet(
            tmp_path,
            {"n1": [provider(stub.endpoint, capacity=1)]},
            model={"queue": {"timeout_sec": 60, "no_capacity_grace_sec": 45}},
            heartbeat=(0.4, 2.5),
        )
        async with FaultProxy(fleet.nodes_address).running() as line, fleet:
            await fleet.start(dial=line.address)
            running = await fleet.ask(STREAM, "x-request-id: running", "connection: close")
            await running.read_until(b"tick")
            queued = await fleet.ask(PLAIN, "x-request-id: queued", "connection: close")
            await eventually(lambda: _waiting(fleet), what="the second request waits")

            line.partition()
            assert b"node_lost" in await running.read_to_end()
            assert not (await fleet.node("n1"))["connected"]
            # The Node finds out by itself, and leaves its engine alone.
            await stub.calls[0].wait_gone()
            line.heal()
            answer = await queued.read_to_end()
            assert answer.startswith(b"HTTP/1.1 200 "), "who waited is served when the Node is back (EN-110)"
            await fleet.settled()
            assert await fleet.ended("running") == "node_lost"
            assert await fleet.ended("queued") == "complete"
            counters = (await fleet.status())["counters"]
            assert counters["leases_granted"] == counters["leases_returned"]
            assert line.opened >= 2


@pytest.mark.case("P-20")
@pytest.mark.clause("EN-103", "EN-113")
async def test_a_lossy_line_and_short_silences_end_nothing(tmp_path: Path) -> None:
    async with StubEngine(drip) as stub:
        fleet = ProcessFleet(tmp_path, {"n1": [provider(stub.endpoint)]}, heartbeat=(0.3, 5.0))
        async with FaultProxy(fleet.nodes_address, rng=random.Random(7)).running() as line, fleet:
            await fleet.start(dial=line.address)
            callers = [await fleet.ask(STREAM) for _ in range(3)]
            line.loss, line.retransmit_s = 0.2, 0.05
            for _ in range(2):
                line.partition()
                await asyncio.sleep(0.6)  # the silence is the subject; it is well below the timeout of 5 s
                line.heal()
                for caller in callers:
                    await caller.read_until(b"tick")
            assert line.opened == 1
            assert len((await fleet.status())["leases"]) == 3


@pytest.mark.case("P-20")
@pytest.mark.clause("EN-113", "EN-103")
async def test_an_edge_process_that_stood_still_evicts_nobody(tmp_path: Path) -> None:
    """SIGSTOP is what a blocked loop looks like from outside."""
    async with (
        StubEngine(drip) as stub,
        ProcessFleet(
            tmp_path, {n: [provider(stub.endpoint)] for n in ("n1", "n2")}, heartbeat=(0.3, 4.0)
        ) as fleet,
    ):
        await fleet.start()
        callers = [await fleet.ask(STREAM) for _ in range(4)]
        for caller in callers:
            await caller.read_until(b"tick")
        before = fleet.log("edge").count("connection.closed")
        # Nodes would rightly give up an Edge that is silent for the timeout, so they stand still with it and are
        # woken first: their heartbeats and events then wait, unread, at an Edge whose deadlines have all passed.
        for name in ("n1", "n2", "edge"):
            fleet.signal(name, signal.SIGSTOP)
        await asyncio.sleep(5.0)  # well over the timeout: the standstill is the subject
        for name in ("n1", "n2", "edge"):
            os.kill(fleet.processes[name].pid, signal.SIGCONT)
        for caller in callers:
            for _ in range(20):
                await caller.read_until(b"tick")
        status = await fleet.status()
        assert all(node["connected"] for node in status["nodes"])
        assert fleet.log("edge").count("connection.closed") == before
        assert "outcome_node_lost" not in status["counters"] or status["counters"]["outcome_node_lost"] == 0


async def _waiting(fleet: ProcessFleet) -> bool:
    return bool((await fleet.status())["counters"]["waiting"])
