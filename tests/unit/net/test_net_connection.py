"""Connections over a memory link on virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from iop.core.errors import DeadlineExceeded, LocalProtocolError, Unavailable
from iop.net.connection import FLUSH_TIMEOUT_S
from iop.net.edge_connection import EdgeWire
from iop.net.node_connection import NodeWire
from iop.testing import packets as make
from iop.testing.cancel_sweep import SweepPoint, sweep
from iop.testing.memory_transport import MemoryLink
from iop.testing.virtual_loop import LoopStalledError, VirtualLoop, run_virtual
from iop.testing.waiting import eventually
from iop.testing.wire_ends import PlainEdge, PlainNode, RecordingSink
from iop.wire import messages as m
from iop.wire.session import SessionSettings

WINDOW = 16_384
SETTINGS = SessionSettings(stream_window_bytes=WINDOW)


class Rig:
    """A Node and an Edge joined in memory."""

    def __init__(self, settings: SessionSettings = SETTINGS) -> None:
        loop = asyncio.get_running_loop()
        self.edge = PlainEdge()
        self.node = PlainNode()
        self.link = MemoryLink(
            lambda: NodeWire(
                handler=self.node, settings=settings, loop=loop, unix_nanos=lambda: 5_000_000_000
            ),
            lambda: EdgeWire(
                handler=self.edge, settings=settings, loop=loop, unix_nanos=lambda: 2_000_000_000
            ),
        )

    async def become_ready(self) -> None:
        self.link.left.register(make.register_request())
        async with asyncio.timeout(5):
            await self.edge.became_ready.wait()
        await eventually(lambda: bool(self.node.acks))


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def ready() -> Rig:
    rig = Rig()
    await rig.become_ready()
    return rig


@pytest.mark.clause("EN-10", "EN-12", "EN-50")
@virtual
async def test_a_node_registers_becomes_ready_and_serves_a_tunnel() -> None:
    rig = await ready()
    sink = rig.edge.open_tunnel([b"hello ", b"world"])
    await sink.wait()
    assert (sink.status, bytes(sink.body), sink.error) == (200, b"hello world", None)
    assert sink.headers == make.tunnel_request().headers


@pytest.mark.clause("EN-40")
@virtual
async def test_a_run_goes_end_to_end() -> None:
    rig = await ready()
    sink = rig.edge.open_run(input=b"a prompt")
    await sink.wait()
    assert [event.type.name for event in sink.run_events] == ["START", "DELTA", "COMPLETE"]
    assert sink.run_events[1].delta == "a prompt"


@pytest.mark.clause("EN-75", "EN-80", "EN-120")
@virtual
async def test_commands_refreshes_steps_and_artifacts_are_answered() -> None:
    rig = await ready()
    edge = rig.edge.node
    answer = await edge.command(m.CommandRequest(type=m.CommandType.USAGE, adapter="a"), timeout_s=1)
    assert answer.figures == {"adapter": "a"}
    refreshed = await edge.refresh(make.node_config(config_revision=7), timeout_s=1)
    assert (refreshed.outcome, refreshed.config_revision) == (m.RefreshOutcome.APPLIED, 7)
    seen: list[m.AdminStepEvent] = []
    result = await edge.admin_step(
        make.admin_step(), payload=[b"x" * 100_000], on_event=seen.append, timeout_s=1
    )
    assert (result.operation_id, result.step, len(seen)) == ("op-1", 1, 1)
    assert sum(map(len, rig.node.steps[0].payload)) == 100_000
    sink = RecordingSink()
    sink.stream = edge.fetch_artifact(
        m.ArtifactRequest(run_id=make.RunId("f"), adapter="a", uri="artifact:7"), sink
    )
    await sink.wait()
    assert bytes(sink.body) == b"artifact:7"


@pytest.mark.clause("EN-75")
@virtual
async def test_a_command_that_is_not_answered_ends_in_time_and_leaves_nothing() -> None:
    rig = await ready()
    with pytest.raises(DeadlineExceeded):
        await rig.edge.node.command(m.CommandRequest(type=m.CommandType.USAGE, adapter="silent"), timeout_s=3)
    assert rig.link.right._calls == {}


@pytest.mark.clause("EN-31", "EN-117")
@virtual
async def test_a_cut_connection_gives_every_stream_and_call_its_end_before_on_closed() -> None:
    rig = await ready()
    sink = rig.edge.open_tunnel(path="/hang")
    await eventually(lambda: bool(rig.node.tunnels))
    order: list[str] = []
    rig.edge.on_closed = lambda *_: order.append(f"closed after {len(sink.terminals)}")  # type: ignore[method-assign]
    asyncio.get_running_loop().call_soon(rig.link.cut)
    with pytest.raises(Unavailable):
        await rig.edge.node.command(m.CommandRequest(type=m.CommandType.USAGE, adapter="silent"), timeout_s=3)
    await eventually(lambda: bool(order) and bool(rig.node.closed))
    assert sink.error is not None
    assert sink.error.code == "node_lost"
    assert order == ["closed after 1"]
    assert rig.node.cancels == [("run-1", m.CancelReason.CONNECTION_LOST)]
    assert rig.node.closed == [m.CloseReason.CONNECTION_LOST]
    with pytest.raises(LocalProtocolError):
        rig.edge.open_tunnel()


@pytest.mark.clause("EN-103", "EN-113")
@virtual
async def test_a_half_open_connection_is_found_within_the_timeout_by_both_sides() -> None:
    rig = await ready()
    started = asyncio.get_running_loop().time()
    await asyncio.sleep(100)
    assert not rig.edge.closed, "heartbeats keep an idle connection"
    rig.link.stall()
    at = asyncio.get_running_loop().time()
    await eventually(lambda: bool(rig.edge.closed) and bool(rig.node.closed), within_s=60)
    assert asyncio.get_running_loop().time() - at <= 15.1
    assert rig.edge.closed[0][1] is m.CloseReason.HEARTBEAT_TIMEOUT
    assert rig.node.closed == [m.CloseReason.HEARTBEAT_TIMEOUT]
    assert started < at


@pytest.mark.clause("EN-113")
@virtual
async def test_a_process_that_stood_still_reads_what_waits_before_it_declares_death() -> None:
    rig = await ready()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    rig.link.to_right.delay_s = 0.05
    rig.link.to_left.delay_s = 0.05
    await asyncio.sleep(4.99)
    loop.stand_still(120)
    await asyncio.sleep(30)
    assert not rig.edge.closed
    assert not rig.node.closed


@pytest.mark.clause("EN-17")
@virtual
async def test_a_stranger_that_says_nothing_is_let_go() -> None:
    rig = Rig()
    await eventually(lambda: bool(rig.edge.closed), within_s=SETTINGS.handshake_timeout_s + 1)
    assert rig.edge.closed[0][1] is m.CloseReason.HANDSHAKE_TIMEOUT


@pytest.mark.clause("EN-17")
@virtual
async def test_a_pending_node_that_never_gets_ready_is_let_go() -> None:
    rig = Rig()
    rig.node.on_registered = lambda *_: None  # type: ignore[method-assign]
    rig.link.left.register(make.register_request())
    await eventually(lambda: bool(rig.edge.closed), within_s=61)
    assert rig.edge.closed[0][1] is m.CloseReason.NOT_READY_IN_TIME
    await eventually(lambda: rig.node.closed == [m.CloseReason.NOT_READY_IN_TIME])


@pytest.mark.clause("EN-15")
@virtual
async def test_a_refused_node_hears_why_before_the_connection_closes() -> None:
    rig = Rig()
    rig.edge.registration = m.RegisterResponse(
        accepted=False, reason_code="unknown_node", reason="Not configured."
    )
    rig.link.left.register(make.register_request())
    await eventually(lambda: bool(rig.node.closed))
    assert rig.node.registered[0].reason_code == "unknown_node"
    assert rig.node.closed == [m.CloseReason.REFUSED]
    assert rig.edge.closed[0][1] is m.CloseReason.REFUSED
    await eventually(lambda: rig.link.right_transport.is_closing() and rig.link.left_transport.is_closing())


@pytest.mark.clause("EN-106")
@virtual
async def test_a_cancel_gets_out_although_the_socket_takes_only_little() -> None:
    rig = await ready()
    rig.link.to_right.capacity_bytes = 4096
    rig.link.to_right.delay_s = 0.01
    big = rig.edge.open_tunnel([bytes(1 << 20)], run_id="big")
    other = rig.edge.open_tunnel(run_id="other", path="/hang")
    await eventually(lambda: bool(rig.node.tunnels))
    sent_before = rig.link.delivered_bytes[0]
    assert other.stream is not None
    other.stream.cancel(m.CancelReason.CLIENT_GONE)
    await eventually(lambda: bool(rig.node.cancels), within_s=60)
    assert rig.link.delivered_bytes[0] - sent_before <= 64 * 1024 + 4096 + 1024
    assert not big.terminals
    await big.wait(timeout_s=600)


@pytest.mark.clause("EN-112")
@virtual
async def test_an_opening_packet_that_the_socket_did_not_take_is_told_apart() -> None:
    rig = await ready()
    rig.link.to_left.capacity_bytes = 1000
    rig.link.to_left.is_stalled = True
    first = rig.edge.open_tunnel([bytes(60_000)], run_id="first")
    await asyncio.sleep(0.1)
    second = rig.edge.open_tunnel(run_id="second")
    await asyncio.sleep(0.1)
    assert first.stream is not None
    assert second.stream is not None
    assert first.stream.is_handed_over
    assert not second.stream.is_handed_over
    rig.link.cut()
    await first.wait()
    await second.wait()
    assert first.error is not None
    assert second.error is not None
    assert (first.error.before_start, second.error.before_start) == (False, True)


@pytest.mark.clause("EN-102")
@virtual
async def test_a_reader_that_stops_holds_back_only_itself() -> None:
    rig = await ready()
    slow = RecordingSink()
    slow.is_holding = True
    rig.edge.open_tunnel(run_id="slow", path="/hold", sink=slow)
    await eventually(lambda: "slow" in rig.node.held)
    source = rig.node.held["slow"]
    source.start(status=200, headers=(), framing=m.BodyFraming.CHUNKED)
    source.send_body(bytes(5 * WINDOW))
    for n in range(5):
        quick = rig.edge.open_tunnel([bytes(3 * WINDOW)], run_id=f"quick-{n}")
        await quick.wait()
        assert len(quick.body) == 3 * WINDOW
    assert len(slow.body) == WINDOW
    assert source.credit_bytes == -4 * WINDOW
    slow.release()
    await eventually(lambda: len(slow.body) == 5 * WINDOW)
    assert rig.node.writable == ["slow"]


@pytest.mark.clause("EN-56")
@virtual
async def test_a_detached_sink_hears_nothing_more_and_its_bytes_are_consumed() -> None:
    rig = await ready()
    sink = RecordingSink()
    sink.is_holding = True
    rig.edge.open_tunnel(run_id="gone", path="/hold", sink=sink)
    await eventually(lambda: "gone" in rig.node.held)
    source = rig.node.held["gone"]
    source.start(status=200, headers=(), framing=m.BodyFraming.CHUNKED)
    source.send_body(bytes(WINDOW))
    await eventually(lambda: len(sink.body) == WINDOW)
    assert sink.stream is not None
    sink.stream.detach()
    source.send_body(bytes(3 * WINDOW))
    await eventually(lambda: source.credit_bytes > 0)
    source.end()
    sink.stream.consumed(WINDOW)
    await asyncio.sleep(1)
    assert len(sink.body) == WINDOW
    assert not sink.terminals


@pytest.mark.clause("EN-56", "EN-70")
@virtual
async def test_a_cancel_that_comes_before_the_handler_has_bound_is_told_when_it_binds() -> None:
    rig = await ready()
    kept = []
    rig.node.on_tunnel = kept.append  # type: ignore[method-assign]
    sink = rig.edge.open_tunnel()
    await eventually(lambda: bool(kept))
    assert sink.stream is not None
    sink.stream.cancel(m.CancelReason.TIMEOUT)
    await asyncio.sleep(1)
    told: list[m.CancelReason] = []
    kept[0].bind(on_cancel=told.append, on_writable=lambda: None)
    assert told == []
    await asyncio.sleep(0)
    assert told == [m.CancelReason.TIMEOUT]


@pytest.mark.clause("EN-109")
@virtual
async def test_what_was_said_before_a_close_still_arrives_and_then_the_goodbye() -> None:
    rig = await ready()
    rig.link.to_right.capacity_bytes = 700
    rig.link.to_right.delay_s = 0.01
    sink = rig.edge.open_tunnel(path="/hold", run_id="last")
    await eventually(lambda: "last" in rig.node.held)
    rig.node.held["last"].fail(m.StreamError(code="node_shutdown", message="x" * 3000))
    rig.link.left.close(m.CloseReason.SHUTDOWN)
    await sink.wait()
    assert sink.error is not None
    assert sink.error.code == "node_shutdown"
    await eventually(lambda: bool(rig.edge.closed))
    assert rig.edge.closed[0][1] is m.CloseReason.SHUTDOWN


@virtual
async def test_a_close_to_a_peer_that_does_not_read_ends_all_the_same() -> None:
    rig = await ready()
    rig.link.to_left.is_stalled = True
    rig.link.to_left.capacity_bytes = 0
    rig.link.right.close(m.CloseReason.SHUTDOWN)
    rig.link.right.close(m.CloseReason.SHUTDOWN)
    await eventually(lambda: len(rig.edge.closed) == 1)
    await asyncio.sleep(FLUSH_TIMEOUT_S + 0.1)
    assert rig.link.right_transport.is_closing()
    assert rig.link.right._transport is None


@virtual
async def test_a_bug_in_one_callback_leaves_the_other_streams_alone() -> None:
    rig = await ready()
    bad = RecordingSink()
    bad.on_body = None  # type: ignore[method-assign,assignment]
    rig.edge.open_tunnel(run_id="bad", sink=bad)
    good = rig.edge.open_tunnel(run_id="good")
    await good.wait()
    assert bytes(good.body) == b"{}"
    await bad.wait()
    assert bad.error is not None
    assert bad.error.code == "internal", "an end would claim that nothing is missing"
    await eventually(lambda: rig.link.right.session.streams_open == 0)


@pytest.mark.clause("EN-102")
@virtual
async def test_what_comes_in_one_read_with_a_bug_is_dropped_without_another() -> None:
    rig = await ready()
    log = logging.getLogger("iop.net.connection")
    told: list[logging.LogRecord] = []
    log.addFilter(told.append)  # type: ignore[arg-type]  # and nothing is written
    try:
        bad = RecordingSink()
        bad.on_body = None  # type: ignore[method-assign,assignment]
        rig.edge.open_tunnel(run_id="bad", path="/hold", sink=bad)
        await eventually(lambda: "bad" in rig.node.held)
        source = rig.node.held["bad"]
        source.start(status=200, headers=(), framing=m.BodyFraming.CHUNKED)
        source.send_body(bytes(1000))
        source.send_usage(m.Usage(prompt_tokens=1))  # between them, so that they are two frames
        source.send_body(bytes(1000))
        await bad.wait()
    finally:
        log.removeFilter(told.append)  # type: ignore[arg-type]
    assert len(told) == 1


@virtual
async def test_a_bug_in_the_nodes_handler_ends_its_stream() -> None:
    rig = await ready()

    def fail(_: object) -> None:
        raise RuntimeError("a bug")

    rig.node.on_tunnel = fail  # type: ignore[method-assign]
    rig.node.on_run = fail  # type: ignore[method-assign]
    rig.node.on_admin_step = fail  # type: ignore[method-assign]
    tunnel, run = rig.edge.open_tunnel(run_id="t"), rig.edge.open_run(run_id="r")
    await tunnel.wait()
    await run.wait()
    assert tunnel.error is not None
    assert run.error is not None
    assert tunnel.error.code == run.error.code == "internal"
    result = await rig.edge.node.admin_step(make.admin_step(), timeout_s=1)
    assert result.refused_code == "unavailable"


@pytest.mark.clause("EN-108", "EN-120")
@virtual
async def test_a_step_asked_again_after_a_timeout_is_taken_up_and_has_one_effect() -> None:
    rig = await ready()
    edge = rig.edge.node
    rig.link.to_left.delay_s = 0.4
    payload = [bytes(10 * WINDOW)]
    with pytest.raises(DeadlineExceeded):
        await edge.admin_step(make.admin_step(), payload=payload, timeout_s=1)
    result = await edge.admin_step(make.admin_step(), payload=payload, timeout_s=60)
    assert result.step == 1
    assert len(rig.node.steps) == 1
    assert sum(map(len, rig.node.steps[0].payload)) == 10 * WINDOW


@pytest.mark.clause("EN-113")
@virtual
async def test_the_peers_clock_is_shown_as_skew() -> None:
    rig = Rig()
    rig.link.left.register(make.register_request(clock_unix_nanos=5_000_000_000))
    async with asyncio.timeout(1):
        await rig.edge.became_ready.wait()
    assert rig.edge.node.clock_skew_ms == 3000
    await asyncio.sleep(6)
    assert rig.link.left.clock_skew_ms == -3000


@pytest.mark.clause("EN-34")
@virtual
async def test_reports_reach_the_edge_once_ready_and_are_dropped_before() -> None:
    rig = Rig()
    rig.edge.is_acking = False
    rig.link.left.register(make.register_request())
    await eventually(lambda: bool(rig.node.registered))
    rig.link.left.send_report(m.ProviderReport())
    await asyncio.sleep(1)
    assert rig.edge.reports == []
    rig.edge.is_acking = True
    rig.link.left.send_ready(make.ready_request())
    await eventually(lambda: bool(rig.node.acks))
    rig.link.left.send_report(m.ProviderReport())
    await eventually(lambda: bool(rig.edge.reports))


@pytest.mark.clause("EN-70")
@virtual
async def test_terminating_a_session_reaches_the_handler() -> None:
    rig = await ready()
    rig.edge.node.terminate_session("agent-7", m.CancelReason.CLIENT_GONE)
    await eventually(lambda: rig.node.ended_sessions == ["agent-7"])


@virtual
async def test_a_cancelled_caller_of_a_command_leaves_nothing_behind() -> None:
    rig = await ready()

    async def check(point: SweepPoint) -> None:
        assert rig.link.right._calls == {}
        assert rig.link.right.session._calls == {}

    points = await sweep(
        lambda: rig.edge.node.command(m.CommandRequest(type=m.CommandType.USAGE), timeout_s=1), check
    )
    assert points >= 1


@pytest.mark.clause("EN-100")
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_everything_works_however_the_network_cuts_it(piece: int) -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.link.to_left.piece_bytes_max = rig.link.to_right.piece_bytes_max = piece
        rig.link.left.register(make.register_request())
        async with asyncio.timeout(5):
            await rig.edge.became_ready.wait()
        sinks = [rig.edge.open_tunnel([bytes([n]) * 500], run_id=f"r{n}") for n in range(5)]
        for n, sink in enumerate(sinks):
            await sink.wait()
            assert bytes(sink.body) == bytes([n]) * 500

    run_virtual(scenario())


def test_the_virtual_loop_says_when_nothing_can_ever_happen() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(LoopStalledError):
        run_virtual(wait_for_nothing())


def test_an_hour_passes_at_once_on_the_virtual_loop() -> None:
    async def sleep() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(sleep()) == pytest.approx(3600)
