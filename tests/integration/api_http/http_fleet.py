"""A whole fleet in one loop: public listener, Edge, wire, Node, scripted engine; real sockets throughout."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256

from prometheus_client import CollectorRegistry, generate_latest

from iop.adapters.profiles import DEFAULT_PROFILE, VLLM_PROFILE
from iop.adapters.registry import adapter_types, create_adapter
from iop.api.http.keys import ApiKeys, ApiKeySpec
from iop.api.http.limits import HttpLimits
from iop.api.http.metrics import HttpCollector
from iop.api.http.openai import EdgeHttp
from iop.api.http.server import HttpServer
from iop.api.strangers import Strangers
from iop.core.ids import ModelId, NodeId, ProviderId, RunId
from iop.edge.calls import Outcome, ProviderKey, Route
from iop.edge.edge import Edge
from iop.edge.snapshot import (
    AdapterSpec,
    BreakerSpec,
    DispatchLimits,
    EdgeSnapshot,
    ModelSpec,
    NodeSpec,
    PoolMember,
    QueueSpec,
)
from iop.net.admin_steps import AdminStepCodec
from iop.net.dialer import Dialer
from iop.net.listener import Listener
from iop.node.node import Node, NodeIdentity
from iop.node.supervisor import ReconnectPolicy
from iop.obs.tracing import Tracer
from iop.testing.http_site import RawCaller, SystemClock
from iop.testing.stub_engine import StubEngine
from iop.testing.waiting import eventually
from iop.wire.messages import AdapterConfig, NodeConfig, OllamaSettings, OpenAICompatSettings

TOKEN = "node-secret"
KEY = ProviderKey(node=NodeId("gpu-1"), provider=ProviderId("main"))
SECOND = ProviderKey(node=NodeId("gpu-1"), provider=ProviderId("second"))


class HttpFleet:
    """What tests hold: the stub, the Edge, the surface and a port."""

    def __init__(
        self, edge: Edge, surface: EdgeHttp, server: HttpServer, stub: StubEngine, port: int
    ) -> None:
        self.edge = edge
        self.surface = surface
        self.server = server
        self.stub = stub
        self.port = port
        self.node: Node | None = None
        self._callers: list[RawCaller] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def leases(self) -> int:
        return len(self.edge.pools.leases)

    async def call(self) -> RawCaller:
        caller = RawCaller(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))
        self._callers.append(caller)
        return caller

    async def post(
        self,
        body: bytes,
        *headers: bytes,
        path: str = "/v1/chat/completions",
        caller: RawCaller | None = None,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        caller = caller or await self.call()
        await caller.send(post(body, *headers, path=path))
        return await caller.read_answer()

    async def settled(self) -> None:
        """Wait until no lease is out and every request has its outcome."""
        await eventually(lambda: self.leases == 0 and self.edge.outcomes.live == 0)

    def outcome(self, request_id: str) -> Outcome | None:
        record = self.edge.outcomes.find(request_id)
        return None if record is None else record.outcome

    def metrics(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(HttpCollector(self.surface, self.server))
        return generate_latest(registry)

    async def stop_node(self) -> None:
        assert self.node is not None
        self.node.stop()
        await eventually(lambda: not self.edge.status.status()["nodes"][0]["connected"])

    async def close_callers(self) -> None:
        for caller in self._callers:
            await caller.close()


def post(body: bytes, *headers: bytes, path: str = "/v1/chat/completions") -> bytes:
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: edge", b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def snapshot(
    endpoint: str,
    *,
    capacity: int,
    is_ollama: bool,
    operations: frozenset[str] | None = None,
    **model: object,
) -> EdgeSnapshot:
    kind = "ollama" if is_ollama else "openai_compat"
    profile = DEFAULT_PROFILE
    if operations is not None:
        named = {name: each for name, each in VLLM_PROFILE.operations.items() if name in operations}
        profile = replace(profile, operations=named)
    adapter = AdapterConfig(
        name="main",
        type=kind,
        capacity=capacity,
        targets=("org/Real-8B-Instruct",),
        settings=OllamaSettings(endpoint=endpoint)
        if is_ollama
        else OpenAICompatSettings(endpoint=endpoint, api_key="upstream-secret", protocol_profile=profile),
    )
    spec = AdapterSpec(
        provider=ProviderId("main"),
        type=kind,
        category="api",
        route=Route.RUN if is_ollama else Route.TUNNEL,
        capacity=capacity,
        operations=operations,
        profile_operations=frozenset() if is_ollama else frozenset(profile.operations),
    )
    fast = ModelSpec(
        id=ModelId("fast"),
        aliases=("fast-latest",),
        members=(PoolMember(key=KEY, target="org/Real-8B-Instruct"),),
        queue=QueueSpec(max_waiters=2, timeout_s=0.5, no_capacity_grace_s=0.3, paused_timeout_s=1.0),
    )
    return EdgeSnapshot(
        revision=1,
        nodes={
            KEY.node: NodeSpec(
                id=KEY.node,
                token_sha256=(sha256(TOKEN.encode()).digest(),),
                adapters={KEY.provider: spec},
                wire=NodeConfig(config_revision=0, adapters=(adapter,)),
            )
        },
        models={ModelId("fast"): replace(fast, **model)},  # type: ignore[arg-type]  # fields by name
        limits=DispatchLimits(first_byte_timeout_s=5.0, total_timeout_s=30.0),
        breaker=BreakerSpec(failures=10_000),  # providers fail on purpose here
    )


def with_second(config: EdgeSnapshot, endpoint: str, *, capacity: int) -> EdgeSnapshot:
    """The same with another provider of the kind `openai_compat` in the pool, on the same Node."""
    node = config.nodes[KEY.node]
    fast = config.models[ModelId("fast")]
    adapter = AdapterConfig(
        name="second",
        type="openai_compat",
        capacity=capacity,
        targets=("org/Real-8B-Instruct",),
        settings=OpenAICompatSettings(endpoint=endpoint),
    )
    spec = AdapterSpec(
        provider=SECOND.provider,
        type="openai_compat",
        category="api",
        route=Route.TUNNEL,
        capacity=capacity,
        profile_operations=frozenset(DEFAULT_PROFILE.operations),
    )
    wire = replace(node.wire, adapters=(*node.wire.adapters, adapter))
    node = replace(node, adapters={**node.adapters, SECOND.provider: spec}, wire=wire)
    members = (*fast.members, PoolMember(key=SECOND, target="org/Real-8B-Instruct"))
    return replace(config, nodes={KEY.node: node}, models={fast.id: replace(fast, members=members)})


@asynccontextmanager
async def fleet_of(
    *,
    capacity: int = 8,
    keys: tuple[ApiKeySpec, ...] = (),
    limits: HttpLimits | None = None,
    dispatch_limits: DispatchLimits | None = None,
    is_ollama: bool = False,
    operations: frozenset[str] | None = None,
    endpoint: str | None = None,
    second_endpoint: str | None = None,
    second_capacity: int = 8,
    strangers: Strangers | None = None,
    tracer: Tracer | None = None,
    bound_s: float = 110.0,
    on_get: Callable[[bytes], bytes] | None = None,
    **model: object,
) -> AsyncIterator[HttpFleet]:
    limits = limits or HttpLimits()
    numbers = itertools.count(1)
    clock = SystemClock()
    async with asyncio.timeout(bound_s), StubEngine(on_get=on_get) as stub:
        config = snapshot(
            endpoint or stub.endpoint,
            capacity=capacity,
            is_ollama=is_ollama,
            operations=operations,
            **model,
        )
        if second_endpoint is not None:
            config = with_second(config, second_endpoint, capacity=second_capacity)
        if dispatch_limits is not None:
            config = replace(config, limits=dispatch_limits)
        async with (
            Edge(
                config,
                clock=clock,
                codec=AdminStepCodec(),
                new_run_id=lambda: RunId(f"run-{next(numbers)}"),
                tracer=tracer,
            ) as edge,
            Listener(handler=edge.nodes, host="127.0.0.1", port=0) as listener,
        ):
            api_keys = ApiKeys(keys, buffered_bytes=limits.key_buffered_bytes, now=clock.monotonic)
            surface = EdgeHttp(
                edge.dispatcher,
                find_snapshot=lambda: edge.snapshot,
                find_keys=lambda: api_keys,
                limits=limits,
                clock=clock,
                make_id=lambda: f"req-{next(numbers)}",
                find_report=edge.nodes.probed,
                strangers=strangers,
            )
            async with HttpServer(surface, limits=limits, clock=clock) as server:
                _, port = await server.listen("127.0.0.1", 0)
                node = Node(
                    NodeIdentity(
                        node_id=KEY.node,
                        token=TOKEN,
                        instance_id="one",
                        software_version="0",
                        protocol_version=1,
                        adapter_types=adapter_types(),
                    ),
                    dialer=Dialer(host="127.0.0.1", port=listener.port),
                    policy=ReconnectPolicy(interval_s=0.05, attempts_max=None),
                    make_adapter=create_adapter,
                    codec=AdminStepCodec(),
                    clock=clock,
                    rng=random.Random(1),
                    stop_grace_s=1.0,
                    tracer=tracer,
                )
                fleet = HttpFleet(edge, surface, server, stub, port)
                fleet.node = node
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(node.run())
                    try:
                        await eventually(lambda: edge.status.status()["nodes"][0]["step"] == "ready")
                        stub.calls.clear()
                        yield fleet
                    finally:
                        await fleet.close_callers()
                        node.stop()
                        node.stop()
