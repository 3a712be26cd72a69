"""``make scale``: one Edge under many Nodes, under readers that stopped, under a large upload. Prints what it measures.

    python bench/fleet_scale.py [nodes|stopped|upload ...] [--nodes 1000] [--idle 20] [--seconds 6]

Everything is a real process on loopback: ``iop edge``, ``iop node``, Nodes in a few processes, scripted engines and
callers in processes of their own, so that their work does not show in the gaps that are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import cast

import uvloop
from run import usage

from iop.core.limits import KIB, MIB, STREAM_WINDOW_BYTES
from iop.testing.node_swarm import node_id
from iop.testing.process_fleet import ProcessFleet, post, provider
from iop.testing.stub_engine import whole_answer

SWARMS = 4
STOPPED_STREAMS = 200
UPLOAD_BYTES = 32 * MIB
UPLOAD_EVERY_S = 0.5
UPLOAD_NEIGHBOURS = 50
PACE_S = 0.01
ROUNDS = 3
CHUNK = b"data: " + b"x" * 90 + b"\n\n"
FLOOD = b"data: " + b"x" * (16 * KIB) + b"\n\n"


# ---- scripted parts in processes of their own ----


class Engine(asyncio.Protocol):
    """A scripted engine that costs next to nothing: floods, drips, or swallows, as its request's ``user`` says."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._head, self._body, self._received, self._length = b"", b"", 0, -1
        self._is_flooding = self._is_lost = False

    def data_received(self, data: bytes) -> None:
        if self._length < 0:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            self._length = int(found[1]) if found else (0 if head.startswith(b"GET") else sys.maxsize)
        self._received += len(data)
        self._body = (self._body + data)[:300] if len(self._body) < 300 else self._body
        if self._received >= self._length or (self._length == sys.maxsize and data.endswith(b"0\r\n\r\n")):
            self._answer()

    def _answer(self) -> None:
        start = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        if b'"user":"flood"' in self._body:
            self._transport.write(start)
            self._is_flooding = True
            self.resume_writing()
        elif b'"user":"drip"' in self._body:
            self._transport.write(start)
            self._drip(self._loop.time())
        else:
            self._transport.write(whole_answer(b'{"object":"list","data":[],"bytes":%d}' % self._received))
            self._head, self._body, self._received, self._length = b"", b"", 0, -1

    def _drip(self, at: float) -> None:
        if not self._is_lost:
            self._transport.write(b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK))
            at = max(at + PACE_S, self._loop.time())
            self._loop.call_at(at, self._drip, at)

    def pause_writing(self) -> None:
        self._is_flooding = False

    def resume_writing(self) -> None:
        self._is_flooding = True
        while self._is_flooding and not self._is_lost:
            self._transport.write(b"%x\r\n%b\r\n" % (len(FLOOD), FLOOD))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True


async def engine_role() -> None:
    """A scripted engine; says where it is."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def body(user: str, *, padding: int = 0) -> bytes:
    """A streaming chat request that tells the engine what to do."""
    # The streams that are measured have an engine process of their own, or they would feel what the others do to it.
    model = b"calm" if user == "drip" else b"fast"
    start = b'{"user":"%b","model":"%b","stream":true,"messages":[],"pad":"' % (user.encode(), model)
    return start + b"x" * padding + b'"}'


class Caller(asyncio.Protocol):
    """Sends one request; notes when bytes came, or reads nothing at all."""

    def __init__(self, request: bytes, *, is_stopped: bool = False) -> None:
        self._request, self._is_stopped = request, is_stopped
        self.stamps: list[float] = []
        self.received = b""
        self.got = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "pause_reading")
        self.transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.stamps.append(time.perf_counter())
        if len(self.received) < 4096:
            self.received += data[:4096]
        self.got.set()
        if self._is_stopped:
            self.transport.pause_reading()  # type: ignore[attr-defined]


async def calling(port: int, request: bytes, count: int, *, is_stopped: bool = False) -> list[Caller]:
    loop = asyncio.get_running_loop()
    callers = []
    for _ in range(count):
        end = socket.socket()
        if is_stopped:
            # Else the kernel alone takes megabytes per reader, and filling them is what would be measured.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * KIB)
        end.setblocking(False)
        await loop.sock_connect(end, ("127.0.0.1", port))
        _, caller = await loop.create_connection(lambda: Caller(request, is_stopped=is_stopped), sock=end)
        callers.append(caller)
    for caller in callers:
        await caller.got.wait()
    return callers


async def stopped_role(port: int, count: int) -> None:
    """Callers that stop reading after their first bytes."""
    await calling(port, post(body("flood")), count, is_stopped=True)
    print("stopped", flush=True)
    await asyncio.Event().wait()


async def upload_role(port: int) -> None:
    """One large upload for each line that it reads; says how long each took."""
    request = post(body("swallow", padding=UPLOAD_BYTES).replace(b'"stream":true', b'"stream":false'))
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        begun = time.perf_counter()
        (caller,) = await calling(port, request, 1)
        assert caller.received.startswith(b"HTTP/1.1 200"), caller.received
        caller.transport.abort()  # type: ignore[attr-defined]
        print(f"{time.perf_counter() - begun:.3f}", flush=True)


@contextlib.contextmanager
def part(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """One process; gone at the end of the block."""
    command = [sys.executable, *(str(argument) for argument in arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


# ---- figures ----


def resident(pid: int) -> int:
    """Bytes in memory now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def p99_gap_ms(callers: list[Caller], *, since: float, until: float) -> float:
    """The 99th percentile of the time between two chunks of one stream, over all streams."""
    gaps = [
        second - first
        for caller in callers
        for first, second in zip(caller.stamps, caller.stamps[1:], strict=False)
        if since <= first and second <= until
    ]
    return sorted(gaps)[int(len(gaps) * 0.99)] * 1000


async def measured(callers: list[Caller], seconds: float) -> float:
    begun = time.perf_counter()
    await asyncio.sleep(seconds)
    return p99_gap_ms(callers, since=begun, until=time.perf_counter())


def show(name: str, value: float, unit: str, *, bound: float | None = None) -> dict[str, object]:
    verdict = (
        "" if bound is None else f"   (bound {bound:g} {unit}: {'holds' if value <= bound else 'BROKEN'})"
    )
    print(f"{name:<58} {value:>9.2f} {unit}{verdict}", flush=True)
    return {"name": name, "value": value, "unit": unit, "bound": bound}


async def at_rest(pid: int) -> None:
    """Wait until nothing flows any more: buffers between here and there are full, and the process has little to do."""
    for _ in range(30):
        before = usage(pid).cpu_s
        await asyncio.sleep(1)
        if usage(pid).cpu_s - before < 0.03:
            return


def show_gaps(whose: str, alone: list[float], what: str, beside: list[float]) -> None:
    """Medians over the rounds, which take turns: other work on the machine hits both alike, and one burst neither."""
    baseline = statistics.median(alone)
    show(f"p99 gap of {whose} alone", baseline, "ms")
    show(f"p99 gap of {whose} beside {what}", statistics.median(beside), "ms", bound=2 * baseline)


async def timed(work: Coroutine[None, None, None]) -> float:
    begun = time.perf_counter()
    await work
    return time.perf_counter() - begun


# ---- the three measurements ----


async def many_nodes(directory: Path, count: int, idle_s: float) -> None:
    """Idle cost of a large fleet, and its return after the Edge was killed."""
    with part(__file__, "--role", "engine") as engine:
        endpoint = await said(engine)
        adapters = {node_id(0): [provider(endpoint)], **{node_id(n): [] for n in range(1, count)}}
        fleet = ProcessFleet(directory, adapters, heartbeat=(5.0, 15.0))
        async with fleet:
            await fleet.start_edge()
            each = -(-count // SWARMS)
            with contextlib.ExitStack() as stack:
                begun = time.perf_counter()
                for first in range(0, count, each):
                    size = min(each, count - first)
                    stack.enter_context(
                        part("-m", "iop.testing.node_swarm", fleet.nodes_address, first, size)
                    )
                await fleet.all_ready(within_s=120)
                show(f"{count} Nodes ready, from starting their processes", time.perf_counter() - begun, "s")
                pid = fleet.processes["edge"].pid
                await asyncio.sleep(2)
                before, begun = usage(pid), time.perf_counter()
                await asyncio.sleep(idle_s)
                spent = usage(pid).cpu_s - before.cpu_s
                share = 100 * spent / (time.perf_counter() - begun)
                show(f"Edge CPU with {count} idle Nodes, of one core", share, "%", bound=5)
                show(f"Edge memory with {count} Nodes, peak", usage(pid).peak_bytes / MIB, "MiB", bound=300)
                fleet.kill("edge")
                begun = time.perf_counter()
                await fleet.start_edge()
                show("Edge started again", time.perf_counter() - begun, "s")
                await fleet.all_ready(within_s=120)
                show(f"all {count} ready again, from the kill", time.perf_counter() - begun, "s", bound=30)
                show(
                    "Edge memory after that, peak", usage(fleet.processes["edge"].pid).peak_bytes / MIB, "MiB"
                )


@contextlib.asynccontextmanager
async def one_node(directory: Path) -> AsyncIterator[ProcessFleet]:
    """An Edge and a Node with two engines: one for the streams that are measured, one for all else."""
    with part(__file__, "--role", "engine") as engine, part(__file__, "--role", "engine") as calm:
        adapters = [
            provider(await said(engine), capacity=1000),
            {**provider(await said(calm), capacity=1000), "name": "calm"},
        ]
        models = [
            {"id": model, "providers": [{"node": "n1", "adapter": adapter, "target": "real"}]}
            for model, adapter in (("fast", "main"), ("calm", "calm"))
        ]
        async with ProcessFleet(
            directory, {"n1": adapters}, heartbeat=(5.0, 15.0), edge={"models": models}
        ) as fleet:
            await fleet.start()
            yield fleet


async def stopped_readers(directory: Path, seconds: float) -> None:
    """Memory of streams whose readers stopped, and the gaps of a healthy stream beside them."""
    async with one_node(directory) as fleet:
        pids = {name: fleet.processes[name].pid for name in ("edge", "n1")}
        (healthy,) = await calling(fleet.http, post(body("drip")), 1)
        await measured([healthy], 1.0)
        before = {name: resident(pid) for name, pid in pids.items()}
        grown = dict.fromkeys(pids, 0)
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(await measured([healthy], seconds))
            arguments = ("--role", "stopped", "--port", fleet.http, "--count", STOPPED_STREAMS)
            with part(__file__, *arguments) as callers:
                assert await said(callers) == "stopped"
                await at_rest(pids["edge"])
                beside.append(await measured([healthy], seconds))
                grown = {name: max(grown[name], resident(pid) - before[name]) for name, pid in pids.items()}
        bound = 2 * STREAM_WINDOW_BYTES * STOPPED_STREAMS / MIB
        for name, label in (("edge", "Edge"), ("n1", "Node")):
            show(
                f"{label} memory grown by {STOPPED_STREAMS} stopped streams",
                grown[name] / MIB,
                "MiB",
                bound=bound,
            )
        show_gaps("a healthy stream", alone, "them", beside)
        healthy.transport.abort()  # type: ignore[attr-defined]
        show("all leases back after the callers were killed", await timed(fleet.settled(within_s=30)), "s")


async def large_upload(directory: Path, seconds: float) -> None:
    """The gaps of streams while a large upload passes."""
    async with one_node(directory) as fleet:
        streams = await calling(fleet.http, post(body("drip")), UPLOAD_NEIGHBOURS)
        await measured(streams, 1.0)
        alone, beside, took = [], [], []
        # One process for all: starting one costs the streams more than what it uploads.
        with part(__file__, "--role", "upload", "--port", fleet.http) as upload:
            assert await said(upload) == "ready"
            assert upload.stdin is not None
            for _ in range(ROUNDS):
                alone.append(await measured(streams, seconds))
                begun = time.perf_counter()
                while time.perf_counter() - begun < seconds:
                    upload.stdin.write("\n")
                    upload.stdin.flush()
                    took.append(float(await said(upload)))
                    await asyncio.sleep(max(0.0, UPLOAD_EVERY_S - took[-1]))
                beside.append(p99_gap_ms(streams, since=begun, until=time.perf_counter()))
        show(f"a {UPLOAD_BYTES // MIB} MiB upload, slowest of {len(took)}", max(took), "s")
        show_gaps(f"{UPLOAD_NEIGHBOURS} streams", alone, "uploads", beside)
        for name, label in (("edge", "Edge"), ("n1", "Node")):
            show(f"{label} memory, peak", usage(fleet.processes[name].pid).peak_bytes / MIB, "MiB")


async def measure(chosen: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="iop-scale-") as scratch:
        base = Path(scratch)
        if "nodes" in chosen.parts:
            await many_nodes(base / "nodes", chosen.nodes, chosen.idle)
        if "stopped" in chosen.parts:
            await stopped_readers(base / "stopped", chosen.seconds)
        if "upload" in chosen.parts:
            await large_upload(base / "upload", chosen.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["nodes", "stopped", "upload"])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--idle", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--role", choices=("engine", "stopped", "upload"))
    parser.add_argument("--port", type=int)
    parser.add_argument("--count", type=int)
    chosen = parser.parse_args()
    match chosen.role:
        case "engine":
            uvloop.run(engine_role())
        case "stopped":
            uvloop.run(stopped_role(chosen.port, chosen.count))
        case "upload":
            uvloop.run(upload_role(chosen.port))
        case _:
            uvloop.run(measure(chosen))


if __name__ == "__main__":
    main()
