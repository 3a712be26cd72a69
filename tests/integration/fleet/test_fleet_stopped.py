"""Parts that stop, die and come back in the middle of streams: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from iop.testing.process_fleet import ProcessFleet, eventually, provider
from iop.testing.stub_engine import StubCall, StubEngine, sse_events

pytestmark = pytest.mark.slow

STREAM = {"model": "fast", "stream": True, "messages": []}
HEARTBEAT = (0.4, 2.5)
PATIENCE_S = 20.0
"""Far below every other time that could end these streams."""


async def drip(call: StubCall) -> None:
    """Events until the Node leaves."""
    await call.start_events()
    while not call.is_peer_gone.is_set():
        await call.chunk(*sse_events(["tick "], finish=None, is_done=False))
        await asyncio.sleep(0.02)


@pytest.mark.clause("EN-30", "EN-31", "EN-33", "EN-57", "EN-103", "EN-112", "EN-117")
async def test_a_stopped_node_is_fenced_in_time_and_its_late_frames_have_no_effect(tmp_path: Path) -> None:
    async with (
        StubEngine(drip) as stub,
        ProcessFleet(tmp_path, {"n1": [provider(stub.endpoint, capacity=3)]}, heartbeat=HEARTBEAT) as fleet,
    ):
        await fleet.start()
        callers = [
            await fleet.ask(STREAM, "connection: close", f"x-request-id: stopped-{n}") for n in range(3)
        ]
        for caller in callers:
            await caller.read_until(b"tick")
        assert len((await fleet.status())["leases"]) == 3

        fleet.signal("n1", signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_S):  # outcomes come with the fence, not with somebody's patience
            answers = [await caller.read_to_end() for caller in callers]
        for n, answer in enumerate(answers):
            assert b"node_lost" in answer.split(b"\n\n")[-2], "told in the stream's own dialect"
            assert await fleet.ended(f"stopped-{n}") == "node_lost"
        await fleet.settled()
        status = await fleet.status()
        assert not status["nodes"][0]["connected"]
        granted = status["counters"]["leases_granted"]
        assert status["counters"]["leases_returned"] == granted

        fleet.signal("n1", signal.SIGCONT)
        await fleet.all_ready()
        # Its engine kept talking, so what the Node had read by then went out late.
        await eventually(lambda: counter(fleet, "late_frames"), what="late frames are counted")
        for call in stub.calls:
            await call.wait_gone()
        counters = (await fleet.status())["counters"]
        assert counters["outcome_node_lost"] == 3
        assert counters["leases_granted"] == granted == counters["leases_returned"]
        assert counters["late_settlements"] == 0
        again = await fleet.ask(STREAM)
        await again.read_until(b"tick")


async def counter(fleet: ProcessFleet, name: str) -> int:
    value: int = (await fleet.status())["counters"][name]
    return value


@pytest.mark.clause("EN-25", "EN-31", "EN-112")
async def test_a_killed_node_ends_its_streams_at_once_and_the_other_serves(tmp_path: Path) -> None:
    async with (
        StubEngine(drip) as stub,
        ProcessFleet(
            tmp_path,
            {"n1": [provider(stub.endpoint, capacity=1)], "n2": [provider(stub.endpoint, capacity=1)]},
        ) as fleet,
    ):
        await fleet.start()
        first = await fleet.ask(STREAM, "connection: close", "x-request-id: a")
        second = await fleet.ask(STREAM, "x-request-id: b")
        await first.read_until(b"tick")
        await second.read_until(b"tick")
        lease = next(item for item in (await fleet.status())["leases"] if item["request_id"] == "a")
        fleet.kill(lease["node"])
        async with asyncio.timeout(PATIENCE_S):  # far below the heartbeat timeout
            answer = await first.read_to_end()
        assert b"node_lost" in answer
        assert await fleet.ended("a") == "node_lost"
        await second.read_until(b"tick")
        fleet.start_node(lease["node"])
        await fleet.all_ready()
        third = await fleet.ask(STREAM)
        await third.read_until(b"tick")
        assert {item["request_id"] for item in (await fleet.status())["leases"]} > {"b"}


@pytest.mark.clause("EN-20", "EN-25", "EN-32", "EN-117")
async def test_a_killed_edge_comes_back_and_its_nodes_serve_again_by_themselves(tmp_path: Path) -> None:
    async with (
        StubEngine(drip) as stub,
        ProcessFleet(tmp_path, {name: [provider(stub.endpoint)] for name in ("n1", "n2")}) as fleet,
    ):
        await fleet.start()
        caller = await fleet.ask(STREAM)
        await caller.read_until(b"tick")
        fleet.kill("edge")
        # Work whose Edge is gone is nobody's: the Node calls it off at the engine.
        await stub.calls[0].wait_gone()
        assert [fleet.processes[name].poll() for name in ("n1", "n2")] == [None, None]
        await fleet.start_edge()
        await fleet.all_ready()
        assert (await fleet.status())["leases"] == []
        again = await fleet.ask(STREAM)
        await again.read_until(b"tick")
