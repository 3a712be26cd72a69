"""Many streams over a faulty memory link on virtual time, from a seed: one terminal each, and nothing left."""

from __future__ import annotations

import asyncio
import random

import pytest

from iop.core.errors import IopError
from iop.net.edge_connection import EdgeWire
from iop.net.node_connection import NodeWire
from iop.net.ports import InboundTunnel
from iop.testing import packets as make
from iop.testing.memory_transport import MemoryLink
from iop.testing.virtual_loop import run_virtual
from iop.testing.waiting import eventually
from iop.testing.wire_ends import PlainEdge, PlainNode, RecordingSink
from iop.wire import messages as m
from iop.wire.session import SessionSettings

WINDOW = 8192
SETTINGS = SessionSettings(stream_window_bytes=WINDOW, heartbeat_interval_s=5, heartbeat_timeout_s=15)


class Engine(PlainNode):
    """Streams random pieces as credit allows, and ends each stream exactly once."""

    def __init__(self, rng: random.Random, tasks: asyncio.TaskGroup) -> None:
        super().__init__()
        self.rng = rng
        self.tasks = tasks
        self.sent: dict[str, bytearray] = {}
        self.whole: set[str] = set()

    def on_tunnel(self, tunnel: InboundTunnel) -> None:
        self.tasks.create_task(self._serve(tunnel), name=tunnel.request.run_id)

    async def _serve(self, tunnel: InboundTunnel) -> None:
        cancelled, writable = asyncio.Event(), asyncio.Event()
        tunnel.bind(on_cancel=lambda _: (cancelled.set(), writable.set()), on_writable=writable.set)  # type: ignore[func-returns-value]
        run_id = tunnel.request.run_id
        body = self.sent.setdefault(run_id, bytearray())
        assert b"".join(tunnel.body) == bytes(tunnel.request.timeout_sec)
        tunnel.start(status=200, headers=(), framing=m.BodyFraming.CHUNKED)
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(self.rng.random() * 0.2)
            while tunnel.credit_bytes <= 0 and not cancelled.is_set():
                writable.clear()
                await writable.wait()
            if cancelled.is_set():
                tunnel.fail(m.StreamError(code="cancelled"))
                return
            piece = self.rng.randbytes(self.rng.choice([1, 50, 3000, 9000]))
            body += piece
            tunnel.send_body(piece)
        self.whole.add(run_id)
        tunnel.end()


async def caller(rng: random.Random, edge: PlainEdge, name: str, sinks: dict[str, RecordingSink]) -> None:
    await asyncio.sleep(rng.random() * 3)
    sink = RecordingSink()
    sink.is_holding = rng.random() < 0.3
    size = rng.choice([0, 10, 70_000, 200_000])
    try:
        # The size rides along as a number that the engine can compare with.
        edge.open_tunnel([bytes(size)], run_id=name, timeout_sec=size, sink=sink)
    except IopError:
        return
    sinks[name] = sink
    assert sink.stream is not None
    if rng.random() < 0.4:
        await asyncio.sleep(rng.random() * 1.5)
        sink.stream.cancel(m.CancelReason.CLIENT_GONE)
    if sink.is_holding:
        await asyncio.sleep(rng.random() * 4)
        sink.release()


async def faults(rng: random.Random, link: MemoryLink[NodeWire, EdgeWire], is_cut: bool) -> None:
    for _ in range(6):
        await asyncio.sleep(rng.random())
        for way in (link.to_left, link.to_right):
            way.delay_s = rng.choice([0, 0.001, 0.05])
            way.piece_bytes_max = rng.choice([None, 7, 1000, 20_000])
            way.capacity_bytes = rng.choice([500, 5000, 300_000])
            way.is_stalled = rng.random() < 0.3
        link.look()
    if is_cut:
        link.cut()
        return
    for way in (link.to_left, link.to_right):
        way.delay_s, way.piece_bytes_max = 0.001, None
    link.heal()


async def scenario(seed: int) -> None:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    sinks: dict[str, RecordingSink] = {}
    is_cut = seed % 3 == 0
    async with asyncio.TaskGroup() as tasks:
        edge, node = PlainEdge(), Engine(rng, tasks)
        link = MemoryLink(
            lambda: NodeWire(handler=node, settings=SETTINGS, loop=loop),
            lambda: EdgeWire(handler=edge, settings=SETTINGS, loop=loop),
        )
        link.left.register(make.register_request())
        async with asyncio.timeout(5):
            await edge.became_ready.wait()
        async with asyncio.TaskGroup() as work:
            for n in range(25):
                work.create_task(caller(rng, edge, f"run-{n}", sinks), name=f"caller-{n}")
            work.create_task(faults(rng, link, is_cut), name="faults")
        await eventually(lambda: all(sink.terminals for sink in sinks.values()), within_s=600)
        assert bool(edge.closed) == bool(node.closed) == is_cut
    for name, sink in sinks.items():
        assert len(sink.terminals) == 1
        assert bytes(node.sent.get(name, b"")).startswith(sink.body), "in order and unchanged"
        if sink.error is None:
            assert name in node.whole
            assert sink.body == node.sent[name]
    if not is_cut:
        assert link.left.session.streams_open == link.right.session.streams_open == 0
        link.left.close(m.CloseReason.SHUTDOWN)
        await eventually(lambda: len(edge.closed) == len(node.closed) == 1)
    assert edge.late_frames == 0


@pytest.mark.clause("EN-31", "EN-40", "EN-52", "EN-56", "EN-57", "EN-101", "EN-102", "EN-106", "EN-117")
@pytest.mark.parametrize("seed", range(16))
def test_streams_over_a_faulty_link_end_once_and_leave_nothing(seed: int) -> None:
    run_virtual(scenario(seed))
