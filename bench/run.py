"""``make bench``: the same load straight at a mock upstream and through the fleet, side by side in one run.

Starts a mock upstream, an Edge and a Node on loopback, and measures, first directly and then through the fleet:
requests per second, added latency, CPU of Edge and of Node per request and per SSE event, and peak memory.
CPU comes from /proc, so it holds also where the load generator is the bottleneck. Figures compare only within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Case:
    """One kind of load."""

    name: str
    connections: int
    seconds: float
    stream: tuple[int, int, int] | None = None

    def arguments(self) -> list[str]:
        """For bench/load.py."""
        return [str(self.seconds), str(self.connections), *(str(part) for part in self.stream or ())]


def cases(scale: float) -> list[Case]:
    """Plain closed loop, one connection, streams at full speed, streams paced."""
    return [
        Case("plain", 64, 5 * scale),
        Case("single", 1, 3 * scale),
        Case("unpaced", 64, 5 * scale, (100, 0, 200)),
        Case("paced", 64, 5 * scale, (200, 10_000, 200)),
    ]


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far and peak resident bytes of one process."""

    cpu_s: float
    peak_bytes: int


def usage(pid: int) -> Usage:
    """Read it from /proc; nanoseconds of all threads, where the kernel keeps them, else clock ticks."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    peak = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            peak = int(line.split()[1]) * 1024
    return Usage(cpu_s=total_ns / 1e9, peak_bytes=peak)


@dataclass(frozen=True)
class Fleet:
    """What runs."""

    address: str
    upstream: str
    edge_pid: int
    node_pid: int


@contextlib.contextmanager
def running(arguments: list[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone when the block ends."""
    process = subprocess.Popen([sys.executable, *arguments], text=True, **more)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
        process.kill()
        process.wait()


def await_ready(path: Path, process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """What a process announced in its ready file."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if path.exists():
            facts: dict[str, Any] = json.loads(path.read_text())
            return facts
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise SystemExit(f"it did not start; its log:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def fleet(directory: Path) -> Iterator[Fleet]:
    """A mock upstream behind one Node behind one Edge."""
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(running([str(HERE / "mock_upstream.py"), "0"], stdout=subprocess.PIPE))
        assert mock.stdout is not None
        upstream = f"127.0.0.1:{mock.stdout.readline().strip()}"
        (directory / "node.token").write_text("bench-node\n")
        listen = (
            "{http: '127.0.0.1:0', openengine: null, admin: null, ops: '127.0.0.1:0', nodes: '127.0.0.1:0'}"
        )
        (directory / "edge.yaml").write_text(
            f"listen: {listen}\n"
            f"store: sqlite:///edge.db\n"
            "nodes:\n  - id: bench\n    token: file:node.token\n    adapters:\n"
            f"      - {{name: mock, type: openai_compat, endpoint: 'http://{upstream}', capacity: 256}}\n"
            "models:\n  - {id: bench, providers: [{node: bench, adapter: mock, target: bench}]}\n"
        )
        facts: dict[str, dict[str, Any]] = {}
        pids: dict[str, int] = {}
        for role in ("edge", "node"):
            if role == "node":
                (directory / "node.yaml").write_text(
                    f"edge: {facts['edge']['nodes']}\nnode: bench\ntoken: file:node.token\n"
                )
            log = directory / f"{role}.log"
            ready = directory / f"{role}.ready"
            output = stack.enter_context(log.open("w"))
            command = [
                "-m",
                "iop.cli",
                role,
                "--config",
                str(directory / f"{role}.yaml"),
                "--ready-file",
                str(ready),
            ]
            process = stack.enter_context(running(command, stdout=output, stderr=output))
            facts[role] = await_ready(ready, process, log)
            pids[role] = process.pid
        yield Fleet(
            address=str(facts["edge"]["http"]),
            upstream=upstream,
            edge_pid=pids["edge"],
            node_pid=pids["node"],
        )


def load(address: str, case: Case) -> dict[str, Any]:
    """One run of the load generator, in a process of its own."""
    command = [sys.executable, str(HERE / "load.py"), address, "bench", *case.arguments()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=case.seconds + 90, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the load generator failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(running_fleet: Fleet, case: Case) -> dict[str, Any]:
    """Direct, then through the fleet, with the CPU that Edge and Node spent on the latter."""
    direct = load(running_fleet.upstream, case)
    before = {role: usage(pid) for role, pid in roles(running_fleet).items()}
    through = load(running_fleet.address, case)
    after = {role: usage(pid) for role, pid in roles(running_fleet).items()}
    return {
        "case": case.name,
        "direct": direct,
        "fleet": through,
        "cpu_s": {role: after[role].cpu_s - before[role].cpu_s for role in after},
        "peak_bytes": {role: after[role].peak_bytes for role in after},
    }


def roles(running_fleet: Fleet) -> Mapping[str, int]:
    """Process ids by role."""
    return {"edge": running_fleet.edge_pid, "node": running_fleet.node_pid}


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are asked for, in base units of their names."""
    by_case = {result["case"]: result for result in results}

    def per(case: str, what: str, role: str, scale: float) -> float:
        count = by_case[case]["fleet"][what]
        return float(by_case[case]["cpu_s"][role] / count * scale) if count else float("nan")

    figures: dict[str, Any] = {
        "requests_per_s": {
            way: by_case["plain"][way]["requests"] / by_case["plain"][way]["seconds"]
            for way in ("direct", "fleet")
        },
        "p50_ms": {way: by_case["single"][way]["p50_ms"] for way in ("direct", "fleet")},
        "added_p50_ms": by_case["single"]["fleet"]["p50_ms"] - by_case["single"]["direct"]["p50_ms"],
        "events_per_s": {
            way: by_case["unpaced"][way]["events"] / by_case["unpaced"][way]["seconds"]
            for way in ("direct", "fleet")
        },
        "peak_bytes": results[-1]["peak_bytes"],
        "errors": sum(result[way]["errors"] for result in results for way in ("direct", "fleet")),
    }
    for role in ("edge", "node"):
        figures[f"{role}_cpu_ms_per_request"] = per("plain", "requests", role, 1e3)
        figures[f"{role}_cpu_us_per_event_unpaced"] = per("unpaced", "events", role, 1e6)
        figures[f"{role}_cpu_us_per_event_paced"] = per("paced", "events", role, 1e6)
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """For people."""
    rate, latency, events = figures["requests_per_s"], figures["p50_ms"], figures["events_per_s"]
    peak = {role: size / 2**20 for role, size in figures["peak_bytes"].items()}
    rows = [
        ("", "direct", "fleet", "Edge", "Node"),
        ("requests/s, 64 connections", f"{rate['direct']:.0f}", f"{rate['fleet']:.0f}", "", ""),
        ("p50 ms, 1 connection", f"{latency['direct']:.3f}", f"{latency['fleet']:.3f}", "", ""),
        ("added p50 ms", "", f"{figures['added_p50_ms']:.3f}", "", ""),
        ("SSE events/s, unpaced", f"{events['direct']:.0f}", f"{events['fleet']:.0f}", "", ""),
        *(
            (
                label,
                "",
                f"{figures[f'edge_{key}'] + figures[f'node_{key}']:.3f}",
                f"{figures[f'edge_{key}']:.3f}",
                f"{figures[f'node_{key}']:.3f}",
            )
            for label, key in (
                ("CPU ms per request", "cpu_ms_per_request"),
                ("CPU us per SSE event, unpaced", "cpu_us_per_event_unpaced"),
                ("CPU us per SSE event, paced 10 ms", "cpu_us_per_event_paced"),
            )
        ),
        ("peak memory MiB", "", f"{sum(peak.values()):.0f}", f"{peak['edge']:.0f}", f"{peak['node']:.0f}"),
        ("errors", "", str(figures["errors"]), "", ""),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> int:
    """Run all cases and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object with everything")
    parser.add_argument("--scale", type=float, default=1.0, help="length of each case, relative")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="iop-bench-") as name, fleet(Path(name)) as running_fleet:
        load(running_fleet.address, Case("warm-up", 16, 1.0))
        results = []
        for case in cases(options.scale):
            print(f"measuring: {case.name}", file=sys.stderr)
            results.append(measure(running_fleet, case))
    figures = summary(results)
    print(json.dumps({"figures": figures, "cases": results}) if options.json else table(figures))
    return 1 if figures["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
