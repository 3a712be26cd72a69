"""A whole Node on a real loopback socket, between a played Edge and a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from iop.adapters.registry import adapter_types, create_adapter
from iop.core.ids import NodeId, RunId
from iop.net.admin_steps import AdminStepCodec
from iop.net.dialer import Dialer
from iop.net.listener import Listener
from iop.net.ports import EdgeConnection, OutboundStream
from iop.node.node import Node, NodeIdentity
from iop.node.supervisor import ReconnectPolicy
from iop.testing.adapter_suite import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    ScriptedUpstream,
    SystemTestClock,
    UpstreamRequest,
    chunk,
    plain_answer,
)
from iop.testing.waiting import SOON_S, eventually
from iop.wire.messages import (
    AdapterConfig,
    BodyFraming,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandType,
    Header,
    NodeConfig,
    OpenAICompatSettings,
    ProviderReport,
    ReadyAck,
    ReadyRequest,
    RegisterRequest,
    RegisterResponse,
    StreamError,
    TunnelRequest,
    Usage,
)


class PlayedEdge:
    """Accepts every Node and gives it one config."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.connections: list[EdgeConnection] = []
        self.ready: list[EdgeConnection] = []
        self.reports: list[ProviderReport] = []
        self.closed: list[CloseReason] = []
        self.late_frames = 0

    def on_register(self, connection: EdgeConnection, request: RegisterRequest) -> None:
        self.connections.append(connection)
        connection.respond_register(
            RegisterResponse(
                accepted=True,
                node_id=request.node_id,
                config=self.config,
                protocol_version_min=1,
                protocol_version_max=1,
            )
        )

    def on_ready(self, connection: EdgeConnection, request: ReadyRequest) -> None:
        connection.respond_ready(ReadyAck(ready=True))
        self.ready.append(connection)

    def on_report(self, connection: EdgeConnection, report: ProviderReport) -> None:
        self.reports.append(report)

    def on_late_frame(self, connection: EdgeConnection) -> None:
        self.late_frames += 1

    def on_closed(self, connection: EdgeConnection, reason: CloseReason) -> None:
        self.closed.append(reason)


class Caller:
    """A tunnel sink that reads as long as it likes."""

    def __init__(self, *, is_reading: bool = True) -> None:
        self.is_reading = is_reading
        self.status = 0
        self.headers: list[Header] = []
        self.framing: BodyFraming | None = None
        self.body = bytearray()
        self.ended = False
        self.error: StreamError | None = None
        self.stream: OutboundStream | None = None
        self._unread = 0

    @property
    def is_over(self) -> bool:
        return self.ended or self.error is not None

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        self.status, self.headers, self.framing = status, list(headers), framing

    def on_body(self, data: bytes) -> None:
        self.body += data
        self._unread += len(data)
        if self.is_reading:
            self.read()

    def read(self) -> None:
        if self.stream is not None and self._unread:
            unread, self._unread = self._unread, 0
            self.stream.consumed(unread)

    def on_usage(self, usage: Usage) -> None:
        pass

    def on_end(self) -> None:
        self.ended = True

    def on_error(self, error: StreamError) -> None:
        self.error = error


class Rig:
    def __init__(self, edge: PlayedEdge, node: Node, upstream: ScriptedUpstream) -> None:
        self.edge = edge
        self.node = node
        self.upstream = upstream

    async def connection(self, count: int = 1) -> EdgeConnection:
        await eventually(lambda: len(self.edge.ready) >= count)
        return self.edge.ready[count - 1]

    async def call(
        self, caller: Caller, body: Sequence[bytes] = (b"{}",), *, run_id: str = "run-1", count: int = 1
    ) -> Caller:
        connection = await self.connection(count)
        request = TunnelRequest(
            run_id=RunId(run_id),
            adapter="main",
            operation="chat_completions",
            headers=((b"Content-Type", b"application/json"),),
            stream=True,
        )
        caller.stream = connection.open_tunnel(request, body, caller)
        return caller


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[Rig]:
    async def answer(request: UpstreamRequest) -> None:
        await request.connection.write(plain_answer())

    async with ScriptedUpstream(answer).serving() as upstream:
        config = NodeConfig(
            config_revision=1,
            adapters=(
                AdapterConfig(
                    name="main",
                    type="openai_compat",
                    capacity=64,
                    settings=OpenAICompatSettings(endpoint=upstream.endpoint),
                ),
            ),
        )
        edge = PlayedEdge(config)
        async with Listener(handler=edge, host="127.0.0.1", port=0) as listener, asyncio.timeout(60):
            node = Node(
                NodeIdentity(
                    node_id=NodeId("gpu-1"),
                    token="t",
                    instance_id="i",
                    software_version="0",
                    protocol_version=1,
                    adapter_types=adapter_types(),
                ),
                dialer=Dialer(host="127.0.0.1", port=listener.port),
                policy=ReconnectPolicy(interval_s=0.05, attempts_max=None),
                make_adapter=create_adapter,
                codec=AdminStepCodec(),
                clock=SystemTestClock(),
                rng=random.Random(1),
                stop_grace_s=1.0,
            )
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(node.run())
                try:
                    yield Rig(edge, node, upstream)
                finally:
                    node.stop()
                    node.stop()
            assert running.result() == 0


def streaming(*events: bytes) -> object:
    async def script(request: UpstreamRequest) -> None:
        if request.method == "GET":
            await request.connection.write(plain_answer(b'{"data":[{"id":"m"}]}'))
            return
        await request.connection.write(CHUNKED_HEAD)
        for event in events:
            await request.connection.write(chunk(event))
        await request.connection.write(LAST_CHUNK)

    return script


@pytest.mark.clause("EN-01", "EN-12", "EN-50", "EN-52", "EN-53")
async def test_a_chat_goes_through_byte_for_byte() -> None:
    async with fleet() as rig:
        events = [b'data: {"n":%d,"t":"\xf0\x9f\x9a\x80"}\n\n' % n for n in range(200)] + [
            b"data: [DONE]\n\n"
        ]
        rig.upstream.script = streaming(*events)  # type: ignore[assignment]
        caller = await rig.call(Caller(), (b'{"model":', b'"m"}'))
        await eventually(lambda: caller.is_over)
        assert caller.ended
        assert bytes(caller.body) == b"".join(events)
        assert caller.framing is BodyFraming.CHUNKED
        assert rig.upstream.requests[-1].body == b'{"model":"m"}'
        await eventually(lambda: bool(rig.edge.reports))
        assert rig.edge.reports[-1].providers[0].id == "main"


@pytest.mark.clause("EN-101", "EN-106")
async def test_a_large_body_arrives_whole() -> None:
    async with fleet() as rig:
        body = [bytes([n]) * 1_000_000 for n in range(8)]
        caller = await rig.call(Caller(), body)
        await eventually(lambda: caller.is_over)
        assert caller.ended
        assert rig.upstream.requests[-1].body == b"".join(body)


@pytest.mark.clause("EN-56", "SF-07")
async def test_a_caller_that_leaves_closes_the_engine_connection_within_a_second() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(CHUNKED_HEAD + chunk(b"data: 1\n\n"))
        await request.connection.wait_closed_by_peer()

    async with fleet() as rig:
        await rig.connection()
        rig.upstream.script = script
        caller = await rig.call(Caller())
        await eventually(lambda: bool(caller.body))
        assert caller.stream is not None
        caller.stream.cancel(CancelReason.CLIENT_GONE)
        await eventually(lambda: rig.upstream.requests[-1].connection.is_closed, within_s=SOON_S)
        await eventually(lambda: caller.is_over)
        assert caller.error is not None
        assert caller.error.code == "cancelled"
        assert rig.node.work is not None
        await eventually(lambda: rig.node.work is not None and rig.node.work.in_flight == 0)


@pytest.mark.clause("EN-102", "SF-08")
async def test_a_caller_that_stops_reading_holds_its_own_stream_only() -> None:
    whole = 4 * 1024 * 1024

    async with fleet() as rig:
        await rig.connection()
        rig.upstream.script = streaming(*[b"x" * 16384] * (whole // 16384))  # type: ignore[assignment]
        slow = await rig.call(Caller(is_reading=False))
        await eventually(lambda: len(slow.body) >= 256 * 1024)
        fast = await rig.call(Caller(), run_id="run-2")
        await eventually(lambda: fast.is_over)
        assert len(fast.body) == whole
        assert len(slow.body) <= 2 * 256 * 1024
        assert not slow.is_over
        slow.is_reading = True
        slow.read()
        await eventually(lambda: slow.is_over)
        assert len(slow.body) == whole


@pytest.mark.clause("EN-117", "EN-23", "EN-14")
async def test_a_dropped_connection_cancels_at_the_engine_and_the_node_is_back_at_once() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(CHUNKED_HEAD + chunk(b"data: 1\n\n"))
        await request.connection.wait_closed_by_peer()

    async with fleet() as rig:
        first = await rig.connection()
        rig.upstream.script = script
        caller = await rig.call(Caller())
        await eventually(lambda: bool(caller.body))
        first.close(CloseReason.SHUTDOWN)
        await eventually(lambda: rig.upstream.requests[-1].connection.is_closed, within_s=SOON_S)
        await rig.connection(2)
        rig.upstream.script = streaming(b"data: 2\n\n")  # type: ignore[assignment]
        again = await rig.call(Caller(), run_id="run-2", count=2)
        await eventually(lambda: again.is_over)
        assert again.ended


@pytest.mark.clause("EN-112")
async def test_an_engine_that_is_away_is_told_as_unsent() -> None:
    async with fleet() as rig:
        connection = await rig.connection()
        moved = NodeConfig(
            config_revision=2,
            adapters=(
                AdapterConfig(
                    name="main",
                    type="openai_compat",
                    settings=OpenAICompatSettings(endpoint="http://127.0.0.1:1"),
                ),
            ),
        )
        response = await connection.refresh(moved, timeout_s=10)
        assert response.config_revision == 2
        caller = await rig.call(Caller())
        await eventually(lambda: caller.is_over)
        assert caller.error is not None
        assert caller.error.code == "connect_failed"
        assert caller.error.before_start


@pytest.mark.clause("EN-75", "EN-90")
async def test_a_command_is_answered_over_the_same_socket() -> None:
    async with fleet() as rig:
        connection = await rig.connection()
        answer = await connection.command(CommandRequest(type=CommandType.PROVIDERS), timeout_s=10)
        assert answer.ok
        assert answer.providers[0].category == "api"
        assert answer.providers[0].capabilities["admin"] == "true"  # paused at its gate
