"""Edges with their Nodes in this loop, real sockets throughout, and one as the other's provider (SF-24)."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml

from iop.adapters.registry import adapter_types, create_adapter
from iop.admin.core import AdminCore
from iop.api.grpc.edge_port import EdgePort
from iop.api.grpc.listeners import inference_listener
from iop.api.grpc.server import ListenerSettings
from iop.api.http.openai import EdgeHttp
from iop.api.http.server import HttpServer
from iop.app.edge_reload import ConfigKeeper
from iop.app.edge_snapshot import snapshot_of
from iop.app.listening import running_core
from iop.app.translate import api_keys, http_keys, http_limits
from iop.config import EdgeConfig
from iop.core.ids import NodeId, OperationId, RunId
from iop.edge.edge import Edge
from iop.net.admin_steps import AdminStepCodec
from iop.net.dialer import Dialer
from iop.net.listener import Listener
from iop.node.node import Node, NodeIdentity
from iop.node.supervisor import ReconnectPolicy
from iop.pb.openengine.v1 import openengine_pb2_grpc
from iop.testing.http_site import RawCaller, SystemClock
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.waiting import eventually

TARGET = "org/Real-8B"
"""What the last engine calls its model."""

NODE_TOKEN = "node-secret"
KINDS = ("openengine", "openai_compat")
"""How the outer Edge speaks to the inner one."""


@dataclass
class Place:
    """One Edge with one Node; `model` is served by `adapter`."""

    edge: Edge
    http_port: int
    grpc_address: str
    node: Node
    inference: Any
    control: Any
    callers: list[RawCaller] = field(default_factory=list)

    @property
    def leases(self) -> int:
        return len(self.edge.pools.leases)

    def is_ready(self) -> bool:
        """Every Node is there, and the operation core has opened every provider."""
        return all(
            node["step"] == "ready" and provider["status"] == "available"
            for node in self.edge.status.status()["nodes"]
            for provider in node["providers"]
        )

    async def call(self) -> RawCaller:
        caller = RawCaller(*await asyncio.open_connection("127.0.0.1", self.http_port, limit=1 << 26))
        self.callers.append(caller)
        return caller

    async def ask(self, body: object, *headers: str, path: str = "/v1/chat/completions") -> RawCaller:
        """Send a request on a new connection; the test reads the answer."""
        caller = await self.call()
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: edge", "Content-Type: application/json", *headers]
        await caller.send("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
        return caller

    async def answer(self, body: object, *headers: str, **more: Any) -> tuple[int, dict[bytes, bytes], Any]:
        """A whole answer, parsed where it is JSON."""
        caller = await self.ask(body, *headers, **more)
        status, fields, data = await caller.read_answer()
        is_json = fields.get(b"content-type", b"").startswith(b"application/json")
        return status, fields, json.loads(data) if is_json else data

    async def settled(self) -> None:
        await eventually(lambda: self.leases == 0 and self.edge.outcomes.live == 0)


def edge_yaml(adapter: Mapping[str, object], *, target: str, **more: object) -> dict[str, Any]:
    """An edge.yaml with one Node and one adapter; `model` and `edge` hold further keys."""
    model: Any = more.get("model", {})
    sections: Any = more.get("edge", {})
    return {
        "nodes": [
            {"id": "n1", "token": "file:node.token", "adapters": [{"name": "main", "capacity": 4, **adapter}]}
        ],
        "models": [
            {"id": "fast", "providers": [{"node": "n1", "adapter": "main", "target": target}], **model}
        ],
        "breaker": {"failures": 1000},
        **sections,
    }


@asynccontextmanager
async def place(
    directory: Path, config: Mapping[str, Any] | Callable[[int, int], Mapping[str, Any]]
) -> AsyncIterator[Place]:
    """Serve one Edge from its edge.yaml, with a Node for each that the file names.

    Args:
        directory: for the file and the secrets it names.
        config: edge.yaml; or what makes it of the Edge's own HTTP and OpenEngine ports, for circles.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "node.token").write_text(NODE_TOKEN)
    clock = SystemClock()
    instance = secrets.token_hex(8)
    ids = iter(range(1, 1_000_000))
    async with AsyncExitStack() as stack:
        # A circle's own ports are known when it listens; until then the file names one where nobody does.
        settings = _load(directory, config(1, 1) if callable(config) else config)
        edge = Edge(
            snapshot_of(settings, revision=1, now_unix_s=0),
            clock=clock,
            codec=AdminStepCodec(),
            new_run_id=lambda: RunId(f"run-{instance[:4]}-{next(ids)}"),
            instance=instance,
        )
        core = AdminCore(
            journal=MemoryJournal(MemoryStore(), unix_nanos=clock.unix_nanos),
            driver=edge.participants,
            clock=clock,
            new_id=lambda: OperationId(f"op-{next(ids)}"),
            owner="edge",
        )
        edge.participants.attach(core.participants_changed)
        await stack.enter_async_context(edge)
        await stack.enter_async_context(running_core(core))
        wire = await stack.enter_async_context(Listener(handler=edge.nodes, host="127.0.0.1", port=0))
        limits = http_limits(settings.limits)
        keys = http_keys(settings.api_keys, buffered_bytes=limits.key_buffered_bytes, now=clock.monotonic)
        surface = EdgeHttp(
            edge.dispatcher,
            find_snapshot=lambda: edge.snapshot,
            find_keys=lambda: keys,
            limits=limits,
            clock=clock,
            make_id=lambda: f"req-{instance[:4]}-{next(ids)}",
            find_report=edge.nodes.probed,
        )
        server = await stack.enter_async_context(HttpServer(surface, limits=limits, clock=clock))
        _, port = await server.listen("127.0.0.1", 0)
        port_of_pools = EdgePort(
            edge.dispatcher,
            find_snapshot=lambda: edge.snapshot,
            clock=clock,
            instance_id=instance,
            find_report=edge.nodes.probed,
        )
        listener = inference_listener(
            port_of_pools,
            port_of_pools,
            api_keys(settings.api_keys),
            ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.1),
            admit=keys.admit,
        )
        await stack.enter_async_context(listener.serving())
        if callable(config):
            settings = _load(directory, config(port, int(listener.address.rpartition(":")[2])))
            edge.apply_snapshot(snapshot_of(settings, revision=2, now_unix_s=0))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(listener.address))
        nodes = [_node(entry.id, wire.port, clock) for entry in settings.nodes]
        made = Place(
            edge=edge,
            http_port=port,
            grpc_address=listener.address,
            node=nodes[0],
            inference=openengine_pb2_grpc.InferenceStub(channel),
            control=openengine_pb2_grpc.ControlStub(channel),
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        try:
            for node in nodes:
                tasks.create_task(node.run())
            await eventually(lambda: all(shown["step"] == "ready" for shown in edge.status.status()["nodes"]))
            yield made
        finally:
            for caller in made.callers:
                caller.reset()
            for node in nodes:
                node.stop()
                node.stop()


def _load(directory: Path, config: Mapping[str, Any]) -> EdgeConfig:
    file = directory / "edge.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    return ConfigKeeper(file, flags={}).loaded.config


def _node(node_id: str, port: int, clock: SystemClock) -> Node:
    return Node(
        NodeIdentity(
            node_id=NodeId(node_id),
            token=NODE_TOKEN,
            instance_id=secrets.token_hex(4),
            software_version="0",
            protocol_version=1,
            adapter_types=adapter_types(),
        ),
        dialer=Dialer(host="127.0.0.1", port=port),
        policy=ReconnectPolicy(interval_s=0.05, attempts_max=None),
        make_adapter=create_adapter,
        codec=AdminStepCodec(),
        clock=clock,
        rng=random.Random(1),
        stop_grace_s=1.0,
    )


def inner_adapter(kind: str, inner: Place) -> dict[str, object]:
    """The adapter by which an outer Edge speaks to this one."""
    if kind == "openengine":
        return {"type": "openengine", "openengine": inner.grpc_address}
    return {"type": "openai_compat", "endpoint": f"http://127.0.0.1:{inner.http_port}"}


@dataclass
class Chain:
    """A caller's Edge, whose provider is another Edge."""

    outer: Place
    inner: Place
    kind: str

    async def settled(self) -> None:
        await self.outer.settled()
        await self.inner.settled()


@asynccontextmanager
async def chained(
    directory: Path,
    kind: str,
    engine: Mapping[str, object],
    *,
    target: str = "fast",
    outer: Mapping[str, Any] | None = None,
    inner: Mapping[str, Any] | None = None,
) -> AsyncIterator[Chain]:
    """Two Edges around one engine; `outer` and `inner` hold further keys for :func:`edge_yaml`."""
    async with asyncio.timeout(60):
        inside = edge_yaml(engine, target=TARGET, **(inner or {}))
        async with place(directory / "inner", inside) as second:
            outside = edge_yaml(inner_adapter(kind, second), target=target, **(outer or {}))
            async with place(directory / "outer", outside) as first:
                yield Chain(outer=first, inner=second, kind=kind)
