"""Fifty Nodes on one Edge, which is killed and comes back; the form with a thousand is ``make scale``."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iop.testing.node_swarm import node_id
from iop.testing.process_fleet import ProcessFleet, provider
from iop.testing.stub_engine import StubEngine

pytestmark = pytest.mark.slow

COUNT = 50


@contextlib.contextmanager
def swarm(address: str, count: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "iop.testing.node_swarm", address, "0", str(count), "0.5"]
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@pytest.mark.clause("EN-01", "EN-21", "EN-25", "EN-32", "EN-107")
async def test_fifty_nodes_come_ready_and_again_after_their_edge_was_killed(tmp_path: Path) -> None:
    async with StubEngine() as stub:
        adapters = {node_id(0): [provider(stub.endpoint)], **{node_id(n): [] for n in range(1, COUNT)}}
        async with ProcessFleet(tmp_path, adapters) as fleet:
            await fleet.start_edge()
            with swarm(fleet.nodes_address, COUNT):
                await fleet.all_ready()
                fleet.kill("edge")
                await fleet.start_edge()
                await fleet.all_ready()
                status = await fleet.status()
                assert sum(node["connected"] for node in status["nodes"]) == COUNT
                assert status["counters"]["refused_registrations"] == 0
                assert fleet.log("edge").count('"node.connected"') == 2 * COUNT, "each once per Edge"
                caller = await fleet.ask({"model": "fast", "messages": []})
                assert (await caller.read_answer())[0] == 200
