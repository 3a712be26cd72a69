"""Many whole Nodes in one process, for tests and benchmarks of an Edge with a large fleet.

    python -m iop.testing.node_swarm HOST:PORT FIRST COUNT [INTERVAL_S]

Node ids are ``n00000`` and so on, tokens ``secret-of-ID`` as ``iop.testing.process_fleet`` writes them. Runs until
SIGTERM.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Sequence

import uvloop

from iop.adapters.registry import adapter_types, create_adapter
from iop.config.tree import Reconnect
from iop.core.ids import NodeId
from iop.net.admin_steps import AdminStepCodec
from iop.net.dialer import Dialer
from iop.node.node import Node, NodeIdentity
from iop.node.supervisor import ReconnectPolicy
from iop.testing.http_site import SystemClock

__all__ = ["node_id", "run_swarm"]


def node_id(number: int) -> str:
    """The id of one of them."""
    return f"n{number:05}"


def _make(address: str, number: int, interval_s: float) -> Node:
    host, _, port = address.rpartition(":")
    return Node(
        NodeIdentity(
            node_id=NodeId(node_id(number)),
            token=f"secret-of-{node_id(number)}",
            instance_id=f"swarm-{number}",
            software_version="0",
            protocol_version=1,
            adapter_types=adapter_types(),
        ),
        dialer=Dialer(host=host, port=int(port)),
        policy=ReconnectPolicy(interval_s=interval_s, attempts_max=None),
        make_adapter=create_adapter,
        codec=AdminStepCodec(),
        clock=SystemClock(),
        rng=random.Random(),
        stop_grace_s=0.5,
    )


async def run_swarm(address: str, *, first: int, count: int, interval_s: float) -> None:
    """Run the Nodes until the process is told to end."""
    nodes = [_make(address, number, interval_s) for number in range(first, first + count)]
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        for node in nodes:
            tasks.create_task(node.run(), name="swarm node")
        await stopping.wait()
        for node in nodes:
            node.stop()


def main(arguments: Sequence[str]) -> None:
    """Parse and run."""
    address, first, count, *interval = arguments
    interval_s = float(interval[0]) if interval else Reconnect().interval_sec
    uvloop.run(run_swarm(address, first=int(first), count=int(count), interval_s=interval_s))


if __name__ == "__main__":
    main(sys.argv[1:])
