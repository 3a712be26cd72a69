"""The Edge with real sockets and real sessions; the Node is a scripted handler on the shipped Node connection."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack

import pytest

from iop.core.ids import NodeId, RunId
from iop.edge.calls import Outcome
from iop.edge.edge import Edge
from iop.net.admin_steps import AdminStepCodec
from iop.net.dialer import Dialer
from iop.net.listener import Listener
from iop.testing.edge_fleet import TOKEN, RecordingSink, adapter_spec, request_of, snapshot_of, tunnel_to
from iop.testing.waiting import eventually
from iop.wire.messages import (
    BodyFraming,
    CloseReason,
    ReadyRequest,
    RefreshOutcome,
    RefreshResponse,
    RegisterRequest,
    StreamError,
)

SNAPSHOT = snapshot_of({"n1/main": adapter_spec("main", capacity=4)}, {"fast": ["n1/main"]})


class WallClock:
    def monotonic(self) -> float:
        return 0.0

    def unix_nanos(self) -> int:
        return 1_800_000_000_000_000_000


class ScriptedNode:
    """Registers, reports ready, keeps what it is asked; tests answer."""

    def __init__(self, node: str = "n1", token: str = TOKEN, instance: str = "a") -> None:
        self.node, self.token, self.instance = NodeId(node), token, instance
        self.tunnels = []
        self.cancels = []
        self.ended_sessions = []
        self.refreshed = []
        self.answers = []
        self.is_ready = False
        self.closed = None
        self.connection = None

    async def dial(self, port: int) -> ScriptedNode:
        self.connection = await Dialer(host="127.0.0.1", port=port).dial(self)
        self.connection.register(
            RegisterRequest(
                node_id=self.node, token=self.token, protocol_version=1, instance_id=self.instance
            )
        )
        return self

    def on_registered(self, connection, response) -> None:
        self.answers.append(response)
        if response.accepted:
            revision = response.config.config_revision
            connection.send_ready(ReadyRequest(node_id=self.node, config_revision=revision))

    def on_ready_ack(self, connection, ack) -> None:
        self.is_ready = ack.ready

    def on_tunnel(self, tunnel) -> None:
        self.tunnels.append(tunnel)
        tunnel.bind(on_cancel=lambda reason: self._cancelled(tunnel, reason), on_writable=lambda: None)

    def on_terminate_session(self, session_id) -> None:
        self.ended_sessions.append(session_id)

    def _cancelled(self, tunnel, reason) -> None:
        self.cancels.append(reason)
        tunnel.fail(StreamError(code="cancelled"))

    def on_refresh(self, refresh) -> None:
        self.refreshed.append(refresh.config.config_revision)
        refresh.respond(
            RefreshResponse(outcome=RefreshOutcome.APPLIED, config_revision=refresh.config.config_revision)
        )

    def on_closed(self, reason) -> None:
        self.closed = reason
        self.is_ready = False


@pytest.fixture
async def fleet():
    """An Edge behind a listener on a free port."""
    numbers = itertools.count(1)
    async with AsyncExitStack() as stack:
        edge = await stack.enter_async_context(
            Edge(
                SNAPSHOT,
                clock=WallClock(),
                codec=AdminStepCodec(),
                new_run_id=lambda: RunId(f"run-{next(numbers)}"),
            )
        )
        listener = await stack.enter_async_context(Listener(handler=edge.nodes, host="127.0.0.1", port=0))
        yield edge, listener


@pytest.mark.clause("EN-01", "EN-10", "EN-12", "EN-50", "EN-53")
async def test_a_node_registers_gets_ready_and_serves_a_tunnel(fleet):
    edge, listener = fleet
    node = await ScriptedNode().dial(listener.port)
    await eventually(lambda: node.is_ready)
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink, b"x" * 300_000))
    await eventually(lambda: node.tunnels)
    tunnel = node.tunnels[0]
    assert b"".join(tunnel.body) == b"x" * 300_000
    assert tunnel.request.operation == "chat_completions"
    tunnel.start(status=200, headers=((b"content-type", b"text/plain"),), framing=BodyFraming.CHUNKED)
    tunnel.send_body(b"hello ")
    tunnel.send_body(b"world")
    tunnel.end()
    await eventually(lambda: sink.ends)
    assert (sink.status, sink.body, sink.error) == (200, b"hello world", None)
    assert handle.outcome is Outcome.COMPLETE
    assert len(edge.pools.leases) == 0


@pytest.mark.clause("EN-56", "SF-07")
async def test_a_cancel_reaches_the_node_and_the_lease_comes_back_once(fleet):
    edge, listener = fleet
    node = await ScriptedNode().dial(listener.port)
    await eventually(lambda: node.is_ready)
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    await eventually(lambda: node.tunnels)
    handle.cancel()
    await eventually(lambda: node.cancels)
    await eventually(lambda: not len(edge.pools.leases))
    assert node.cancels[0].value == "client_gone"
    assert edge.pools.leases.returned_total == 1


@pytest.mark.clause("EN-70")
async def test_ending_a_session_tells_every_ready_node(fleet):
    edge, listener = fleet
    assert edge.nodes.terminate_session("team:s1") == []
    node = await ScriptedNode().dial(listener.port)
    await eventually(lambda: node.is_ready)
    assert edge.nodes.terminate_session("team:s1") == ["n1"]
    await eventually(lambda: node.ended_sessions == ["team:s1"])


@pytest.mark.clause("EN-31", "EN-112", "EN-30")
async def test_a_cut_socket_settles_what_ran_and_the_next_connection_serves_at_once(fleet):
    edge, listener = fleet
    node = await ScriptedNode().dial(listener.port)
    await eventually(lambda: node.is_ready)
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    await eventually(lambda: node.tunnels)
    node.connection.abort()
    await eventually(lambda: sink.ends)
    assert (sink.error.code, handle.outcome) == ("node_lost", Outcome.NODE_LOST)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        again = await ScriptedNode().dial(listener.port)
        await eventually(lambda: again.tunnels)
    assert waiting.result().outcome is None
    again.tunnels[0].start(status=200, headers=(), framing=BodyFraming.LENGTH)
    again.tunnels[0].end()
    await eventually(lambda: not len(edge.pools.leases))


@pytest.mark.clause("EN-104", "EN-105", "EN-115")
async def test_a_wrong_token_an_unknown_id_and_a_second_process_are_refused(fleet):
    edge, listener = fleet
    for stranger, code in (
        (ScriptedNode(token="guess"), "bad_token"),
        (ScriptedNode(node="n9"), "unknown_node"),
    ):
        await stranger.dial(listener.port)
        await eventually(lambda stranger=stranger: stranger.closed)
        assert [answer.reason_code for answer in stranger.answers] == [code]
    assert edge.status.status()["nodes"][0]["step"] == "absent"
    nodes = []
    for number in range(4):
        nodes.append(await ScriptedNode(instance=f"process-{number}").dial(listener.port))
        await eventually(lambda: nodes[-1].is_ready or nodes[-1].closed)
    assert [node.is_ready for node in nodes] == [False, False, True, False]
    assert nodes[0].closed is CloseReason.SUPERSEDED
    assert nodes[3].answers[0].reason_code == "identity_contended"
    assert nodes[3].answers[0].retry_after_ms > 0
    assert edge.status.status()["nodes"][0]["step"] == "contended"


@pytest.mark.clause("EN-80", "EN-81", "EN-114")
async def test_a_new_config_is_pushed_to_ready_nodes_and_its_result_shown(fleet):
    edge, listener = fleet
    node = await ScriptedNode().dial(listener.port)
    await eventually(lambda: node.is_ready)
    edge.apply_snapshot(
        snapshot_of({"n1/main": adapter_spec("main", capacity=9)}, {"fast": ["n1/main"]}, revision=2)
    )
    await eventually(lambda: node.refreshed == [2])
    await eventually(lambda: edge.status.status()["nodes"][0]["config_revision"] == 2)
    assert edge.status.status()["nodes"][0]["providers"][0]["capacity"] == 9


@pytest.mark.clause("EN-109")
async def test_shutdown_says_goodbye_to_nodes(fleet):
    edge, listener = fleet
    node = await ScriptedNode().dial(listener.port)
    await eventually(lambda: node.is_ready)
    await edge.shut_down(deadline_s=1.0)
    await eventually(lambda: node.closed)
    assert node.closed is CloseReason.SHUTDOWN
