"""Flaps that last as long as in the field (P-20), between network namespaces and through the proxy.

``iop node`` runs in a namespace of its own, joined by a veth pair; ``tc`` drops or loses what passes. Where the machine
does not allow that, the tests say so and the proxy's are what remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from iop.testing.fault_proxy import FaultProxy
from iop.testing.process_fleet import ProcessFleet, eventually, provider
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer

pytestmark = [pytest.mark.soak, pytest.mark.slow]

STREAM = {"model": "fast", "stream": True, "messages": []}
PLAIN = {"model": "fast", "messages": []}
HEARTBEAT = (1.0, 3.0)
PLAIN_LINE = ("pfifo", "limit", "1000")
LOSSY_LINE = ("netem", "delay", "10ms", "5ms", "loss", "10%", "reorder", "25%")
QUEUE = {"queue": {"timeout_sec": 90, "no_capacity_grace_sec": 90}}


async def drip(call: StubCall) -> None:
    if not call.json.get("stream"):
        await call.write(whole_answer(b"{}"))
        return
    await call.start_events()
    while not call.is_peer_gone.is_set():
        await call.chunk(*sse_events(["tick "], finish=None, is_done=False))
        await asyncio.sleep(0.05)


@dataclass
class Line:
    """A link that can be told to fail; ``edge`` and ``engine`` are what the other side dials."""

    fleet: ProcessFleet
    dial: str
    drop: Callable[[], None]
    heal: Callable[[], None]


def ip(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, str, str]]:
    """A namespace joined to this one: its name, our end's device, our end's address."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs ip and tc (Debian: iproute2)")
    name, ours, theirs = f"iop{os.getpid()}", f"iopa{os.getpid() % 10_000}", f"iopb{os.getpid() % 10_000}"
    try:
        ip("ip", "netns", "add", name)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("this machine does not let us make network namespaces")
    try:
        try:
            ip("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs)
            ip("ip", "link", "set", theirs, "netns", name)
            ip("ip", "addr", "add", "10.203.77.1/30", "dev", ours)
            ip("ip", "link", "set", ours, "up")
            for command in (
                ("addr", "add", "10.203.77.2/30", "dev", theirs),
                ("link", "set", theirs, "up"),
                ("link", "set", "lo", "up"),
            ):
                ip("ip", "netns", "exec", name, "ip", *command)
            shape(ours, name, "blackhole")
            shape(ours, name, *PLAIN_LINE)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"this machine does not let us join and shape namespaces: {error}")
        yield name, ours, "10.203.77.1"
    finally:
        with contextlib.suppress(subprocess.SubprocessError):
            ip("ip", "netns", "del", name)
        with contextlib.suppress(subprocess.SubprocessError):
            ip("ip", "link", "del", ours)


def shape(device: str, name: str, *discipline: str) -> None:
    """What happens to packets that leave either end."""
    command = ("tc", "qdisc", "replace", "dev")
    ip(*command, device, "root", *discipline)
    ip("ip", "netns", "exec", name, *command, device.replace("iopa", "iopb"), "root", *discipline)


@contextlib.asynccontextmanager
async def namespace_line(directory: Path) -> AsyncIterator[tuple[StubEngine, Line]]:
    """The Node in a namespace of its own, with its engine on its own side of the line, as in the field."""
    with namespace() as (name, device, address):
        async with StubEngine(drip) as stub:
            # Unix sockets know no namespaces: through one the engine stays reachable while the line is down.
            path = directory / "engine.sock"
            server = await asyncio.start_unix_server(_relay_to(stub.port), str(path))
            inside = subprocess.Popen(  # noqa: ASYNC220 - started in no time
                ["ip", "netns", "exec", name, sys.executable, "-c", RELAY, str(path), "18080"],
                stdout=subprocess.PIPE,
            )
            assert inside.stdout is not None
            assert await asyncio.to_thread(inside.stdout.readline) == b"up\n"
            fleet = ProcessFleet(
                directory,
                {"n1": [provider("http://127.0.0.1:18080", capacity=2)]},
                model=QUEUE,
                heartbeat=HEARTBEAT,
                host=address,
                prefixes={"n1": ("ip", "netns", "exec", name)},
            )
            try:
                async with fleet:
                    yield (
                        stub,
                        Line(
                            fleet=fleet,
                            dial=fleet.nodes_address,
                            drop=lambda: shape(device, name, "blackhole"),
                            heal=lambda: shape(device, name, *PLAIN_LINE),
                        ),
                    )
            finally:
                inside.kill()
                inside.wait()
                inside.stdout.close()
                server.close()


RELAY = """
import asyncio, sys
async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data); await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()
async def relay(reader, writer):
    far_reader, far_writer = await asyncio.open_unix_connection(sys.argv[1])
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", int(sys.argv[2]))
    print("up", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def _relay_to(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copy(reader, far_writer))
            tasks.create_task(copy(far_reader, writer))

    return relay


@contextlib.asynccontextmanager
async def proxy_line(directory: Path) -> AsyncIterator[tuple[StubEngine, Line]]:
    async with StubEngine(drip) as stub:
        fleet = ProcessFleet(
            directory, {"n1": [provider(stub.endpoint, capacity=2)]}, model=QUEUE, heartbeat=HEARTBEAT
        )
        async with FaultProxy(fleet.nodes_address).running() as proxy, fleet:
            yield stub, Line(fleet=fleet, dial=proxy.address, drop=proxy.partition, heal=proxy.heal)


LINES = {"namespace": namespace_line, "proxy": proxy_line}


@pytest.mark.case("P-20")
@pytest.mark.clause("EN-14", "EN-25", "EN-31", "EN-32", "EN-103", "EN-110", "EN-112", "EN-117")
@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize(("silence_s", "times"), [(5.0, 1), (60.0, 1), (1.0, 10)], ids=["5s", "60s", "10x1s"])
async def test_a_line_that_fails_and_heals(tmp_path: Path, kind: str, silence_s: float, times: int) -> None:
    is_fatal = silence_s > HEARTBEAT[1]
    async with LINES[kind](tmp_path) as (stub, line):
        fleet = line.fleet
        await fleet.start(dial=line.dial)
        running = [await fleet.ask(STREAM, "connection: close", f"x-request-id: run-{n}") for n in range(2)]
        for caller in running:
            await caller.read_until(b"tick")
        queued = [await fleet.ask(PLAIN, "connection: close", f"x-request-id: wait-{n}") for n in range(3)]
        await eventually(lambda: _counter(fleet, "waiting", 3), what="three wait")
        for _ in range(times):
            line.drop()
            await asyncio.sleep(silence_s)  # the silence is the subject
            line.heal()
            await asyncio.sleep(0.2 if times == 1 else 1.0)
        await fleet.all_ready(within_s=30)
        if is_fatal:
            for n, caller in enumerate(running):
                assert b"node_lost" in await caller.read_to_end()
                assert await fleet.outcome(f"run-{n}") == "node_lost"
            for call in stub.calls[:2]:
                await call.wait_gone()
        else:
            for caller in running:
                for _ in range(3):
                    await caller.read_until(b"tick")
                caller.reset()
        for n, caller in enumerate(queued):
            assert (await caller.read_to_end()).startswith(b"HTTP/1.1 200 ")
            assert await fleet.outcome(f"wait-{n}") == "complete"
        await fleet.settled()
        counters = (await fleet.status())["counters"]
        assert counters["leases_granted"] == counters["leases_returned"]
        assert sum(value for key, value in counters.items() if key.startswith("outcome_")) == 5
        again = await fleet.ask(STREAM)
        await again.read_until(b"tick")


@pytest.mark.clause("EN-103", "EN-113")
async def test_a_namespace_line_that_loses_a_tenth_and_reorders_ends_nothing(tmp_path: Path) -> None:
    async with namespace_line(tmp_path) as (_, line):
        fleet = line.fleet
        await fleet.start(dial=line.dial)
        callers = [await fleet.ask(STREAM) for _ in range(2)]
        device = f"iopa{os.getpid() % 10_000}"
        try:
            shape(device, f"iop{os.getpid()}", *LOSSY_LINE)
        except subprocess.SubprocessError:
            pytest.skip("this kernel has no netem (module sch_netem)")
        for _ in range(200):
            for caller in callers:
                await caller.read_until(b"tick")
        assert len((await fleet.status())["leases"]) == 2
        assert fleet.log("edge").count('"node.connected"') == 1


async def _counter(fleet: ProcessFleet, name: str, value: int) -> bool:
    return bool((await fleet.status())["counters"][name] == value)
