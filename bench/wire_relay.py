"""CPU cost of the wire alone: Edge and Node in one process over a loopback socket, no HTTP on either side.

    python bench/wire_relay.py [--profile]

Prints microseconds of CPU, both sides together, per plain request, per chunk that shares its turn with others
(unpaced), and per chunk that comes alone (paced, over 64 streams).
"""

from __future__ import annotations

import asyncio
import cProfile
import pstats
import sys
import time

import uvloop

from iop.core.ids import RunId
from iop.net.dialer import Dialer
from iop.net.listener import Listener
from iop.testing import packets as make
from iop.testing.waiting import eventually
from iop.testing.wire_ends import PlainEdge, PlainNode
from iop.wire.messages import BodyFraming, TunnelRequest

CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" tok"}}]}\n\n'
HEADERS = (
    (b"content-type", b"application/json"),
    (b"accept", b"*/*"),
    (b"user-agent", b"client/1.0"),
    (b"x-request-id", b"0123456789abcdef"),
)
ANSWER_HEADERS = (
    (b"content-type", b"application/json"),
    (b"content-length", b"600"),
    (b"server", b"engine"),
    (b"date", b"Mon, 30 Nov 2026 00:00:00 GMT"),
)


class Sink:
    """Consumes at once and counts."""

    __slots__ = ("chunks", "done", "stream")

    def __init__(self) -> None:
        self.chunks = 0
        self.done = asyncio.get_running_loop().create_future()

    def on_response_start(self, **_: object) -> None: ...

    def on_body(self, data: bytes) -> None:
        self.chunks += 1
        self.stream.consumed(len(data))

    def on_usage(self, _usage: object) -> None: ...

    def on_end(self) -> None:
        self.done.set_result(None)

    def on_error(self, error: object) -> None:
        self.done.set_exception(RuntimeError(str(error)))


class Echo(PlainNode):
    """Answers with a fixed body, or holds."""

    def on_tunnel(self, tunnel) -> None:  # type: ignore[no-untyped-def]
        if tunnel.request.path == "/hold":
            tunnel.bind(on_cancel=lambda _: None, on_writable=lambda: None)
            tunnel.start(status=200, headers=ANSWER_HEADERS, framing=BodyFraming.CHUNKED)
            self.held[tunnel.request.run_id] = tunnel
            return
        tunnel.start(status=200, headers=ANSWER_HEADERS, framing=BodyFraming.LENGTH)
        tunnel.send_body(b"x" * 600)
        tunnel.end()


def open_tunnel(edge: PlainEdge, run_id: str, path: str = "") -> Sink:
    sink = Sink()
    request = TunnelRequest(
        run_id=RunId(run_id),
        adapter="engine",
        target="model",
        operation="chat_completions",
        path=path,
        headers=HEADERS,
    )
    sink.stream = edge.node.open_tunnel(request, [b"x" * 400], sink)
    return sink


async def measure() -> None:
    edge, node = PlainEdge(), Echo()
    async with Listener(handler=edge, host="127.0.0.1", port=0) as listener:
        connection = await Dialer(host="127.0.0.1", port=listener.port).dial(node)
        connection.register(make.register_request())
        await eventually(lambda: bool(node.acks))

        count = 5000
        before = time.process_time()
        for n in range(count):
            await open_tunnel(edge, f"request-0123456789-{n}").done
        print(f"plain request, one at a time   {(time.process_time() - before) / count * 1e6:8.1f} us")
        before = time.process_time()
        for n in range(0, count, 50):
            sinks = [open_tunnel(edge, f"batch-0123456789-{n + k}") for k in range(50)]
            for sink in sinks:
                await sink.done
        print(f"plain request, fifty at a time {(time.process_time() - before) / count * 1e6:8.1f} us")

        sinks = [open_tunnel(edge, f"stream-0123456789-{n}", "/hold") for n in range(64)]
        await eventually(lambda: len(node.held) == 64)
        tunnels = list(node.held.values())
        rounds = 300
        before = time.process_time()
        for _ in range(rounds):
            for tunnel in tunnels:
                for _ in range(10):
                    tunnel.send_body(CHUNK)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        print(
            f"unpaced chunk                  {(time.process_time() - before) / (rounds * 640) * 1e6:8.2f} us"
        )

        rounds = 10_000
        before = time.process_time()
        for n in range(rounds):
            tunnels[n % 64].send_body(CHUNK)
            await asyncio.sleep(0.0002)
        spent = time.process_time() - before
        before = time.process_time()
        for _ in range(rounds):
            await asyncio.sleep(0.0002)
        spent -= time.process_time() - before
        print(f"paced chunk                    {spent / rounds * 1e6:8.1f} us")
        for tunnel in tunnels:
            tunnel.end()
        for sink in sinks:
            await sink.done


if __name__ == "__main__":
    if "--profile" in sys.argv:
        profiler = cProfile.Profile()
        profiler.enable()
        uvloop.run(measure())
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    else:
        uvloop.run(measure())
