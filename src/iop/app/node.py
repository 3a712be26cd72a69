"""The composition root of the Node."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Callable
from pathlib import Path

from iop import __version__
from iop.adapters.registry import adapter_types, create_adapter
from iop.app.process import Process, ProcessClock, Role
from iop.app.sources import gather
from iop.app.tracing import tracer_of
from iop.config import NodeConfig, load_node
from iop.core.ids import NodeId
from iop.net.admin_steps import AdminStepCodec
from iop.net.dialer import Dialer
from iop.net.tls import ClientTls
from iop.node.node import Node, NodeIdentity
from iop.node.supervisor import ReconnectPolicy
from iop.obs.tracing import Tracer
from iop.wire.handshake import PROTOCOL_VERSION_MAX

__all__ = ["node_role"]


def node_role(file: Path, *, warn: Callable[[str], None]) -> Role:
    """Read node.yaml and make the role.

    Raises:
        ConfigInvalid: with every problem.
    """
    loaded = load_node(gather(file))
    for warning in loaded.warnings:
        warn(warning)
    config = loaded.config

    async def role(process: Process) -> int:
        with tracer_of(config.tracing, process="node", instance=config.node) as tracer:
            return await _serve(_make_node(config, tracer), process)

    return role


async def _serve(node: Node, process: Process) -> int:
    async with asyncio.TaskGroup() as tasks:
        run = tasks.create_task(node.run(), name="node")
        watchers = [
            tasks.create_task(_announce_when_ready(node, process), name="node-ready"),
            tasks.create_task(_stop_when_asked(node, process), name="node-stop"),
        ]
        try:
            return await run
        finally:
            for watcher in watchers:
                watcher.cancel()


def _make_node(config: NodeConfig, tracer: Tracer | None) -> Node:
    assert config.edge.path is None, "the config's rules refuse it"
    tls = None
    if config.tls is not None:
        tls = ClientTls(ca=config.tls.ca, certificate=config.tls.cert, key=config.tls.key)
    return Node(
        NodeIdentity(
            node_id=NodeId(config.node),
            token=config.token.reveal(),
            instance_id=secrets.token_hex(8),
            software_version=__version__,
            protocol_version=PROTOCOL_VERSION_MAX,
            adapter_types=adapter_types(),
        ),
        dialer=Dialer(host=config.edge.host, port=config.edge.port, tls=tls),
        policy=ReconnectPolicy.from_config(config.reconnect.interval_sec, config.reconnect.max_attempts),
        make_adapter=create_adapter,
        codec=AdminStepCodec(),
        clock=ProcessClock(),
        environment=os.environ,
        tracer=tracer,
        # Jitter must differ between Nodes that start at once, so it is seeded by the machine (EN-107).
        rng=random.Random(os.urandom(16)),  # noqa: S311  (no secret depends on it)
    )


async def _announce_when_ready(node: Node, process: Process) -> None:
    """Tell the process once that the Edge has acknowledged readiness: from then on a stop lets work finish."""
    await node.wait_ready()
    process.announce({"node": True, "pid": os.getpid()})


async def _stop_when_asked(node: Node, process: Process) -> None:
    await process.stopping.wait()
    node.stop()
