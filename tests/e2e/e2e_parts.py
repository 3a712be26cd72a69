"""The parts of a fleet as single processes on fixed ports, so that each can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from iop.app.development import DevelopmentTokens, make_tokens, write_edge, write_engine, write_node
from iop.testing.waiting import free_ports

START_TIMEOUT_S = 60.0
SLOTS = 16
MODEL = "iop-tiny"


def free_addresses(*names: str) -> dict[str, str]:
    """An address of this machine for each name."""
    ports = free_ports(len(names))
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


@dataclass
class Parts:
    """Engine, Edge and Node, or some of them.

    Attributes:
        lost_s: how long the Edge waits for a participant that is away; None: as by default.
    """

    home: Path
    lost_s: float | None = None
    engine: dict[str, str] = field(default_factory=lambda: free_addresses("http", "openengine", "admin"))
    edge: dict[str, str] = field(
        default_factory=lambda: free_addresses("http", "openengine", "admin", "ops", "nodes")
    )
    tokens: DevelopmentTokens = field(default_factory=make_tokens)

    def write(self) -> None:
        """Write the configs, the token files and a script per part that starts it."""
        config = self.home / "config"
        config.mkdir(parents=True)
        files = {
            "engine": write_engine(config, tokens=self.tokens, listen=self.engine, settings={"slots": SLOTS}),
            "edge": write_edge(
                config,
                tokens=self.tokens,
                listen=self.edge,
                engine={**self.engine, "slots": SLOTS, "model": MODEL},
            ),
            "node": write_node(config, tokens=self.tokens, edge=self.edge["nodes"]),
        }
        if self.lost_s is not None:
            edge = yaml.safe_load(files["edge"].read_text())
            edge["admin"]["participant_lost_sec"] = self.lost_s
            files["edge"].write_text(yaml.safe_dump(edge))
        for role, token in self.tokens.roles.items():
            (self.home / f"{role}.token").write_text(token)
        for part, file in files.items():
            extra = ["--no-run-file"] if part == "engine" else []
            self._write_start(part, [part, "--config", str(file), *extra])

    def _write_start(self, part: str, arguments: list[str]) -> None:
        ready, log, pid = (self.home / f"{part}.{end}" for end in ("ready", "log", "pid"))
        command = shlex.join([sys.executable, "-m", "iop.cli", *arguments, "--ready-file", str(ready)])
        script = f"""
        if [ -e {pid} ]; then
            pkill -KILL -P $(cat {pid}) || true
            kill -KILL $(cat {pid}) 2>/dev/null || true
        fi
        rm -f {ready}
        IOP_HOME={self.home} nohup {command} </dev/null >>{log} 2>&1 &
        echo $! >{pid}
        until [ -e {ready} ]; do kill -0 $(cat {pid}) || exit 1; sleep 0.05; done
        """
        self.script(part).write_text(script)

    def script(self, part: str) -> Path:
        """What starts a part; a part that runs is killed first, hard."""
        return self.home / f"start-{part}.sh"

    def start(self, part: str) -> None:
        """Start it and wait until it is ready."""
        done = subprocess.run(
            ["bash", str(self.script(part))], timeout=START_TIMEOUT_S, check=False, capture_output=True
        )
        assert done.returncode == 0, (self.home / f"{part}.log").read_text()[-2000:]

    def kill_all(self) -> None:
        """Nothing of it is left."""
        for file in self.home.glob("*.pid"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(file.read_text()))
                for each in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()

    def hooks(self, *names: str, part: str, rank: str = "STOP") -> list[str]:
        """Hook options for `iop conformance` against a part.

        Args:
            rank: the signal that makes a rank fail: STOP, and it hangs; KILL, and its engine goes down with it.
        """
        stop = f"pkill -{rank} -n -P $(cat {self.home / 'engine.pid'})"
        mend = f"bash {self.script('engine')}"
        commands = {
            "restart": f"bash {self.script(part)}",
            "fail-rank": f'if [ "$CONFORMANCE_PHASE" = begin ]; then {stop}; else {mend}; fi',
            "cut": f"kill -USR1 $(cat {self.home / 'relay.pid'}) && sleep 0.2",
        }
        return [f"--hook={name}={commands[name]}" for name in names]


@contextlib.contextmanager
def running_parts(home: Path, *names: str, lost_s: float | None = None) -> Iterator[Parts]:
    """Start these parts in order; all are gone when the block ends."""
    parts = Parts(home=home, lost_s=lost_s)
    parts.write()
    try:
        for name in names:
            parts.start(name)
        yield parts
    finally:
        parts.kill_all()


@contextlib.contextmanager
def relayed(home: Path, upstream: str) -> Iterator[str]:
    """A relay to an address, in a process that cuts every connection on SIGUSR1; its own address."""
    told = home / "relay.address"
    script = Path(__file__).with_name("e2e_relay.py")
    process = subprocess.Popen([sys.executable, str(script), upstream, str(told)])
    (home / "relay.pid").write_text(str(process.pid))
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while not told.exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        yield told.read_text()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def conformance(home: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run `iop conformance` to its end, with the tokens of the parts."""
    tokens = [
        f"--{'' if role == 'admin' else role + '-'}token=file:{home / (role + '.token')}"
        for role in ("admin", "operator", "viewer")
    ]
    environment: Mapping[str, str] = {**os.environ, "IOP_HOME": str(home), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "iop.cli", "conformance", *tokens, *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
