"""A whole fleet as a user has it: ``iop up`` in a state directory of its own, every port free, real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ANY = "127.0.0.1:0"
UP_FLAGS = [
    part
    for name in (
        "http",
        "openengine",
        "admin",
        "ops",
        "nodes",
        "engine-http",
        "engine-openengine",
        "engine-admin",
    )
    for part in (f"--{name}", ANY)
]
PATIENCE_S = 60.0
STORY = [{"role": "user", "content": "Tell me a story."}]


def eventually(check: Callable[[], bool], what: str, *, within_s: float = PATIENCE_S) -> float:
    """Wait until ``check`` holds; returns how long that took, in seconds.

    All of it is other processes' work, and a busy machine may run none of them for seconds: so the bound is generous.
    """
    begun = time.monotonic()
    while not check():
        waited = time.monotonic() - begun
        if waited > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(min(max(waited / 10, 0.01), 0.05))
    return time.monotonic() - begun


def iop(*arguments: str, home: Path, timeout_s: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "iop.cli", *arguments],
        env={**os.environ, "IOP_HOME": str(home), **more},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@dataclass
class Fleet:
    """A running ``iop up``."""

    home: Path
    process: subprocess.Popen[str]
    run: dict[str, Any]
    ready_after_s: float

    @property
    def base_url(self) -> str:
        """For OpenAI clients."""
        return f"http://{self.run['http']}/v1"

    def iop(self, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """One command against this fleet."""
        return iop(*arguments, home=self.home, timeout_s=timeout_s)

    def admin(self, *arguments: str) -> dict[str, Any]:
        """One admin verb that must succeed; its JSON object."""
        done = self.iop("admin", *arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def start_iop(self, *arguments: str) -> subprocess.Popen[str]:
        """One command, not waited for."""
        return subprocess.Popen(
            [sys.executable, "-m", "iop.cli", *arguments],
            env={**os.environ, "IOP_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def status(self) -> dict[str, Any]:
        """``GET /status`` with leases, asked directly because tests ask often."""
        request = urllib.request.Request(
            f"http://{self.run['ops']}/status?leases=true",
            headers={"authorization": f"Bearer {self.run['tokens']['viewer']}"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            shown: dict[str, Any] = json.load(answer)
        return shown

    def leases(self) -> int:
        """How many leases are out."""
        return len(self.status()["leases"])

    def queue_depth(self) -> int:
        """How many requests wait."""
        return sum(int(model["queue_depth"]) for model in self.status()["models"])

    def engine_counters(self) -> dict[str, float]:
        """The engine's own figures, by name without prefix and ``_total``."""
        with urllib.request.urlopen(f"http://{self.run['engine']['http']}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return {
            name.removesuffix("_total"): float(value)
            for name, value in re.findall(r"^iop_engine_(\S+) (\S+)$", text, re.MULTILINE)
        }

    def processes(self) -> list[psutil.Process]:
        """The parent, its parts, and what they started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


@contextlib.contextmanager
def running_fleet(home: Path, *flags: str) -> Iterator[Fleet]:
    """Start ``iop up`` and wait until it is ready; it and all its parts are gone when the block ends."""
    home.mkdir(parents=True, exist_ok=True)
    ready = home / "ready.json"
    begun = time.monotonic()
    with (home / "up.out").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "iop.cli", "up", *UP_FLAGS, "--ready-file", str(ready), *flags],
            env={**os.environ, "IOP_HOME": str(home)},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    started: list[psutil.Process] = []
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, "iop up is ready")
        assert process.poll() is None, (home / "up.out").read_text()
        run = json.loads((home / "run.json").read_text())
        fleet = Fleet(home=home, process=process, run=run, ready_after_s=time.monotonic() - begun)
        started = fleet.processes()
        yield fleet
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        process.kill()
        process.wait()
        for left in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def alive(processes: list[psutil.Process]) -> list[int]:
    """Process ids of those that still run; the dead that nobody has waited for do not count."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.pid)
    return left
