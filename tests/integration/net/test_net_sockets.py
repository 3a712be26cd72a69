"""Listener and dialler over loopback sockets, on plain asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
import uvloop

from iop.core.errors import InvalidRequest, Unavailable
from iop.core.limits import KIB, MIB
from iop.net.dialer import Dialer
from iop.net.listener import Listener
from iop.net.node_connection import NodeWire
from iop.testing import packets as make
from iop.testing.waiting import eventually
from iop.testing.wire_ends import PlainEdge, PlainNode, RecordingSink
from iop.wire import messages as m
from iop.wire.frames import frame
from iop.wire.session import SessionSettings

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]
Scenario = Callable[[], Coroutine[Any, Any, None]]


def on_both_loops(scenario: Scenario) -> Callable[[Any], None]:
    """A test that runs the scenario on one of the two event loops."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(scenario())

    run.__name__ = scenario.__name__
    run.__doc__ = scenario.__doc__
    return pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])(run)


class Fleet:
    def __init__(self, edge: PlainEdge, node: PlainNode, listener: Listener, connection: NodeWire) -> None:
        self.edge = edge
        self.node = node
        self.listener = listener
        self.connection = connection


@asynccontextmanager
async def fleet(settings: SessionSettings | None = None) -> AsyncIterator[Fleet]:
    edge, node = PlainEdge(), PlainNode()
    async with Listener(handler=edge, host="127.0.0.1", port=0, settings=settings) as listener:
        connection = await Dialer(host="127.0.0.1", port=listener.port).dial(node)
        connection.register(make.register_request())
        async with asyncio.timeout(30):
            await edge.became_ready.wait()
        yield Fleet(edge, node, listener, connection)
    await eventually(lambda: bool(edge.closed) and bool(node.closed))


@pytest.mark.clause("EN-01", "EN-02", "EN-10", "EN-12", "EN-50")
@on_both_loops
async def test_one_socket_carries_registration_tunnels_runs_and_commands() -> None:
    async with fleet() as rig:
        sinks = [rig.edge.open_tunnel([bytes([n]) * n], run_id=f"t{n}") for n in range(50)]
        run = rig.edge.open_run(run_id="r", input=b"prompt")
        answer = await rig.edge.node.command(m.CommandRequest(type=m.CommandType.TRANSPORT), timeout_s=30)
        for n, sink in enumerate(sinks):
            await sink.wait()
            assert bytes(sink.body) == bytes([n]) * n
        await run.wait()
        assert answer.ok
        assert rig.listener.connections_open == 1
    assert rig.edge.closed[0][1] is m.CloseReason.SHUTDOWN
    assert rig.node.closed == [m.CloseReason.SHUTDOWN]


@pytest.mark.clause("EN-01")
@on_both_loops
async def test_small_frames_are_not_held_back_by_the_kernel() -> None:
    async with fleet() as rig:
        for side in (rig.connection, rig.edge.node):
            raw: socket.socket = side._transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.clause("EN-101")
@on_both_loops
async def test_a_32_mib_upload_goes_beside_other_streams() -> None:
    async with fleet() as rig:
        body = os.urandom(MIB) * 32
        big = rig.edge.open_tunnel([body], run_id="big", path="/hold")
        small_done_first = 0
        for n in range(20):
            small = rig.edge.open_tunnel(run_id=f"small-{n}")
            await small.wait()
            small_done_first += "big" not in rig.node.held
        assert small_done_first == 20, "none had to wait for the upload"
        await eventually(lambda: "big" in rig.node.held)
        assert b"".join(rig.node.held["big"].body) == body
        rig.node.held["big"].fail(m.StreamError(code="internal"))
        await big.wait()


@pytest.mark.clause("EN-102")
@on_both_loops
async def test_readers_that_stop_cost_their_windows_and_stall_nobody() -> None:
    count = 50
    async with fleet() as rig:
        before = psutil.Process().memory_info().rss
        slow = []
        for n in range(count):
            sink = RecordingSink()
            sink.is_holding = True
            slow.append(rig.edge.open_tunnel(run_id=f"slow-{n}", path="/hold", sink=sink))
        await eventually(lambda: len(rig.node.held) == count)
        for source in rig.node.held.values():
            source.start(status=200, headers=(), framing=m.BodyFraming.CHUNKED)
            while source.credit_bytes > 0:
                source.send_body(bytes(16 * KIB))
        await eventually(lambda: sum(len(sink.body) for sink in slow) == count * 256 * KIB)
        for n in range(20):
            quick = rig.edge.open_tunnel([bytes(MIB)], run_id=f"quick-{n}")
            await quick.wait()
        grown = psutil.Process().memory_info().rss - before
        # Both ends are in this process, and the sinks keep what they were given besides.
        assert grown <= 3 * count * 256 * KIB + 32 * MIB
        for sink in slow:
            assert sink.stream is not None
            sink.stream.cancel(m.CancelReason.CLIENT_GONE)
        for sink in slow:
            await sink.wait()


@pytest.mark.clause("EN-56")
@on_both_loops
async def test_a_cancel_crosses_the_socket() -> None:
    async with fleet() as rig:
        sink = rig.edge.open_tunnel(path="/hang")
        await eventually(lambda: bool(sink.status))
        assert sink.stream is not None
        sink.stream.cancel(m.CancelReason.TIMEOUT)
        await sink.wait()
        assert rig.node.cancels == [("run-1", m.CancelReason.TIMEOUT)]
        assert sink.error is not None
        assert sink.error.code == "cancelled"


class RawPeer:
    """A socket that says what it likes."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> RawPeer:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def say(self, data: bytes) -> bytes:
        """What comes back until the other side closes."""
        self.writer.write(data)
        async with asyncio.timeout(30):
            try:
                return await self.reader.read(-1)
            except ConnectionError:
                return b""


@pytest.mark.clause("EN-100")
@on_both_loops
async def test_garbage_ends_its_own_connection_and_disturbs_nobody() -> None:
    async with fleet() as rig:
        steady = rig.edge.open_tunnel(run_id="steady", path="/hold")
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            bytes(4),
            frame(b"\xff" * 40),
            (1 << 31).to_bytes(4, "big"),
            frame(bytes(10)),
            frame(os.urandom(50_000)),
        ):
            async with RawPeer(rig.listener.port) as peer:
                await peer.say(data)
        await eventually(lambda: len(rig.edge.closed) == 6)
        assert {reason for _, reason in rig.edge.closed} == {m.CloseReason.PROTOCOL_ERROR}
        rig.node.held["steady"].fail(m.StreamError(code="internal"))
        await steady.wait()
        rig.edge.closed.clear()


@pytest.mark.clause("EN-100")
@on_both_loops
async def test_a_truncated_frame_is_a_protocol_error() -> None:
    async with fleet() as rig:
        async with RawPeer(rig.listener.port) as peer:
            peer.writer.write(b"\x00\x00\x10\x00half")
            peer.writer.write_eof()
            await peer.reader.read(-1)
        await eventually(lambda: bool(rig.edge.closed))
        assert rig.edge.closed[0][1] is m.CloseReason.PROTOCOL_ERROR
        rig.edge.closed.clear()


@pytest.mark.clause("EN-103")
@on_both_loops
async def test_a_peer_that_falls_silent_on_an_open_socket_is_found_within_the_timeout() -> None:
    settings = SessionSettings(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
    async with fleet(settings) as rig:
        sink = rig.edge.open_tunnel(path="/hang")
        await eventually(lambda: bool(sink.status))
        await asyncio.sleep(1.5)  # beats keep it alive for longer than the timeout
        assert not rig.edge.closed
        transport = rig.connection._transport
        assert transport is not None
        transport.pause_reading()
        rig.connection.session.handle_deadline = lambda **_: []  # type: ignore[method-assign]
        await sink.wait(timeout_s=20)
        assert sink.error is not None
        assert sink.error.code == "node_lost"
        assert rig.edge.closed[0][1] is m.CloseReason.HEARTBEAT_TIMEOUT
        rig.connection.abort()


class NodeThread:
    """A Node on a loop of its own, so that it goes on while the Edge's loop stands still."""

    def __init__(self, port: int) -> None:
        self.node = PlainNode()
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node")

    def __enter__(self) -> PlainNode:
        self._thread.start()
        return self.node

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        connection = await Dialer(host="127.0.0.1", port=self._port).dial(self.node)
        connection.register(make.register_request())
        await eventually(lambda: bool(self.node.acks))
        # It would be right to give up on an Edge that stands still; here only the Edge's own judgement is looked at.
        connection.session.settings = replace(connection.session.settings, heartbeat_timeout_s=60)
        connection.send_report(m.ProviderReport())
        await eventually(self._stop.is_set, within_s=60)
        connection.abort()
        await asyncio.sleep(0)


@pytest.mark.clause("EN-113")
@pytest.mark.slow
@on_both_loops
async def test_an_edge_whose_loop_stood_still_beyond_the_timeout_loses_no_living_node() -> None:
    edge = PlainEdge()
    settings = SessionSettings(heartbeat_interval_s=0.2, heartbeat_timeout_s=0.8)
    stood_still = asyncio.Event()

    def stand_still(*_: object) -> None:
        # In a read callback: on uvloop, timers that fell due meanwhile run before the sockets are polled again.
        time.sleep(1.5)
        stood_still.set()

    edge.on_report = stand_still  # type: ignore[method-assign]
    async with Listener(handler=edge, host="127.0.0.1", port=0, settings=settings) as listener:
        with NodeThread(listener.port):
            await stood_still.wait()
            await asyncio.sleep(0.5)
            assert not edge.closed
            sink = edge.open_tunnel()
            await sink.wait()


@pytest.mark.clause("EN-17", "EN-100")
@on_both_loops
async def test_strangers_are_capped_and_let_go_in_time() -> None:
    edge = PlainEdge()
    settings = SessionSettings(handshake_timeout_s=0.3)
    async with Listener(
        handler=edge, host="127.0.0.1", port=0, settings=settings, strangers_max=3
    ) as listener:
        peers = [RawPeer(listener.port) for _ in range(5)]
        for peer in peers:
            await peer.__aenter__()
        await eventually(lambda: listener.counters.accepted + listener.counters.refused_full == 5)
        assert listener.counters.refused_full == 2
        await eventually(lambda: listener.connections_open == 0)
        assert [reason for _, reason in edge.closed] == [m.CloseReason.HANDSHAKE_TIMEOUT] * 3
        for peer in peers:
            await peer.__aexit__()
        node = PlainNode()
        connection = await Dialer(host="127.0.0.1", port=listener.port).dial(node)
        connection.register(make.register_request())
        await eventually(lambda: bool(node.acks))


@on_both_loops
async def test_registered_nodes_do_not_count_as_strangers() -> None:
    edge = PlainEdge()
    async with Listener(handler=edge, host="127.0.0.1", port=0, strangers_max=1) as listener:
        for _ in range(3):
            node = PlainNode()
            connection = await Dialer(host="127.0.0.1", port=listener.port).dial(node)
            connection.register(make.register_request())
            await eventually(lambda node=node: bool(node.acks))  # type: ignore[misc]
        assert listener.connections_open == 3


@on_both_loops
async def test_a_taken_port_and_an_absent_edge_are_typed_errors() -> None:
    async with Listener(handler=PlainEdge(), host="127.0.0.1", port=0) as listener:
        with pytest.raises(Unavailable) as caught:
            await Listener(handler=PlainEdge(), host="127.0.0.1", port=listener.port).start()
        assert str(listener.port) in caught.value.message
        port = listener.port
    with pytest.raises(Unavailable) as caught:
        await Dialer(host="127.0.0.1", port=port).dial(PlainNode())
    assert caught.value.retryable
    assert "127.0.0.1" not in caught.value.message


@pytest.mark.clause("EN-104")
@on_both_loops
async def test_a_listener_off_loopback_refuses_to_start_without_tls() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await Listener(handler=PlainEdge(), host="0.0.0.0", port=0).start()
    assert caught.value.reason == "INSECURE_LISTENER"
    async with Listener(handler=PlainEdge(), host="0.0.0.0", port=0, is_insecure_allowed=True) as listener:
        assert listener.port


@pytest.mark.clause("EN-103")
@pytest.mark.slow
def test_hundreds_of_idle_nodes_stay_connected_on_few_beats() -> None:
    count = 200
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3 * count:
        pytest.skip("too few descriptors")

    async def scenario() -> None:
        edge = PlainEdge()
        settings = SessionSettings(heartbeat_interval_s=0.5, heartbeat_timeout_s=1.5)
        async with Listener(handler=edge, host="127.0.0.1", port=0, settings=settings) as listener:
            nodes = []
            for _ in range(count):
                node = PlainNode()
                connection = await Dialer(host="127.0.0.1", port=listener.port).dial(node)
                connection.register(make.register_request())
                nodes.append(node)
            await eventually(lambda: all(node.acks for node in nodes))
            await asyncio.sleep(2)
            assert not edge.closed
            assert listener.connections_open == count

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
