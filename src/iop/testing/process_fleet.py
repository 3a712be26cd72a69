"""Real ``iop edge`` and ``iop node`` processes around scripted engines, for tests that stop, kill and cut them.

Addresses are fixed before the start, because an Edge that was killed must come back where its Nodes look for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from iop.testing.http_site import RawCaller
from iop.testing.waiting import PATIENCE_S, free_ports

__all__ = ["ProcessFleet", "eventually", "post", "provider"]

START_TIMEOUT_S: Final = 60.0
VIEWER: Final = "viewer-secret"


def provider(endpoint: str, **more: object) -> dict[str, object]:
    """An adapter of a scripted engine, as edge.yaml names it."""
    return {"name": "main", "type": "openai_compat", "endpoint": endpoint, **more}


def post(body: object, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """A whole request, for ``RawCaller.send``."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: edge", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


async def eventually(predicate: Callable[[], Any], *, what: str, within_s: float = PATIENCE_S) -> float:
    """Wait until ``predicate`` holds, asking often; returns how long that took. An awaitable answer is awaited.

    Whoever has waited for long is asked less often: the asking takes the time of those who are waited for.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        held = predicate()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return loop.time() - begun
        waited = loop.time() - begun
        if waited > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(min(max(waited / 10, 0.01), 0.05))


class ProcessFleet:
    """One Edge and some Nodes, each a process. Use as ``async with``; nothing of it outlives the block.

    Args:
        directory: for configs, logs and stores.
        adapters: by Node id, its adapters (see :func:`provider`).
        model: more keys of the one model, ``fast``, which every Node's ``main`` serves.
        heartbeat: interval and timeout, seconds. A part that a busy machine does not run for the timeout is lost, so
            only tests of that give a short one.
        edge: more sections of edge.yaml.
        host: where the Edge listens; off loopback it is told to be insecure.
        prefixes: by ``edge`` or Node id, what to run the process under, such as ``ip netns exec NAME``.
    """

    def __init__(
        self,
        directory: Path,
        adapters: Mapping[str, Sequence[Mapping[str, object]]],
        *,
        model: Mapping[str, object] | None = None,
        heartbeat: tuple[float, float] = (0.5, 30.0),
        edge: Mapping[str, object] | None = None,
        host: str = "127.0.0.1",
        prefixes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.directory = directory
        self.adapters = {node: [dict(item) for item in items] for node, items in adapters.items()}
        self.model = dict(model or {})
        self.heartbeat = heartbeat
        self.more = dict(edge or {})
        self.host = host
        self.prefixes = dict(prefixes or {})
        self.http, self.ops, self.nodes = free_ports(3)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._callers: list[RawCaller] = []

    async def __aenter__(self) -> ProcessFleet:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "viewer.token").write_text(VIEWER)
        for node in self.adapters:
            (self.directory / f"{node}.token").write_text(f"secret-of-{node}")
        self.write_edge()
        return self

    async def __aexit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.reset()
        for name in tuple(self.processes):
            self.kill(name)

    # ---- configs ----

    @property
    def nodes_address(self) -> str:
        """Where Nodes dial."""
        return f"{self.host}:{self.nodes}"

    def edge_config(self) -> dict[str, Any]:
        """edge.yaml as it would be written now."""
        interval, timeout = self.heartbeat
        is_local = self.host == "127.0.0.1"
        return {
            "listen": {
                "http": f"127.0.0.1:{self.http}",
                "ops": f"127.0.0.1:{self.ops}",
                "nodes": self.nodes_address,
                "admin": None,
                "openengine": None,
            },
            "insecure": not is_local,
            "heartbeat": {"interval_sec": interval, "timeout_sec": timeout},
            "store": f"sqlite:///{self.directory / 'edge.db'}",
            "admin": {"principals": [{"name": "viewer", "token": "file:viewer.token", "role": "admin"}]},
            "nodes": [
                {"id": node, "token": f"file:{node}.token", "adapters": items}
                for node, items in self.adapters.items()
            ],
            "models": [
                {
                    "id": "fast",
                    "providers": [
                        {"node": node, "adapter": item["name"], "target": "real"}
                        for node, items in self.adapters.items()
                        for item in items
                        if item["name"] == "main"
                    ],
                    **self.model,
                }
            ],
            **self.more,
        }

    def write_edge(self) -> None:
        """Write edge.yaml."""
        (self.directory / "edge.yaml").write_text(yaml.safe_dump(self.edge_config()))

    # ---- processes ----

    async def start(self, dial: str | None = None) -> None:
        """Start the Edge and all Nodes and wait until every Node is ready."""
        await self.start_edge()
        for node in self.adapters:
            self.start_node(node, dial=dial)
        await self.all_ready()

    async def start_edge(self) -> None:
        """Start the Edge and wait until it serves."""
        ready = self.directory / "edge.ready"
        ready.unlink(missing_ok=True)
        self._spawn("edge", "edge", "--config", "edge.yaml", "--ready-file", str(ready))
        await eventually(
            lambda: ready.exists() or self.processes["edge"].poll() is not None,
            what="the Edge serves",
            within_s=START_TIMEOUT_S,
        )
        assert self.processes["edge"].poll() is None, self.log("edge")

    def start_node(self, node: str, *, dial: str | None = None) -> None:
        """Start a Node; it becomes ready on its own."""
        config = {
            "edge": dial or self.nodes_address,
            "node": node,
            "token": f"file:{node}.token",
            "reconnect": {"interval_sec": 0.2, "max_attempts": 0},
        }
        (self.directory / f"{node}.yaml").write_text(yaml.safe_dump(config))
        self._spawn(node, "node", "--config", f"{node}.yaml")

    def _spawn(self, name: str, *arguments: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*self.prefixes.get(name, ()), sys.executable, "-m", "iop.cli", *arguments],
                env={**os.environ, "IOP_HOME": str(self.directory)},
                cwd=self.directory,
                stdout=output,
                stderr=output,
            )

    def signal(self, name: str, number: int) -> None:
        """Send one part a signal."""
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """End one part as a crash does, and whatever was stopped too."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """What it has said."""
        return (self.directory / f"{name}.log").read_text()

    # ---- asking ----

    async def get(self, path: str) -> Any:
        """An answer of the ops listener."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ops)
        caller = RawCaller(reader, writer)
        try:
            await caller.send(
                f"GET {path} HTTP/1.1\r\nHost: ops\r\nAuthorization: Bearer {VIEWER}\r\n\r\n".encode()
            )
            status, _, body = await caller.read_answer()
        finally:
            await caller.close()
        assert status == 200, (path, status, body)
        return json.loads(body)

    async def status(self) -> dict[str, Any]:
        """The fleet, with its leases."""
        shown: dict[str, Any] = await self.get("/status?leases=true")
        return shown

    async def node(self, node: str) -> dict[str, Any]:
        """One Node's part of the status."""
        return next(item for item in (await self.status())["nodes"] if item["id"] == node)

    async def all_ready(self, *, within_s: float = START_TIMEOUT_S) -> float:
        """Wait until every Node is ready; returns how long that took."""

        async def is_so() -> bool:
            try:
                nodes = (await self.status())["nodes"]
            except (OSError, asyncio.IncompleteReadError):
                return False
            return all(node["step"] == "ready" for node in nodes)

        return await eventually(is_so, what="every Node is ready", within_s=within_s)

    async def outcome(self, request_id: str) -> str | None:
        """How a request ended; None while it runs or is not known."""
        try:
            shown = await self.get(f"/explain/{request_id}")
        except AssertionError:
            return None
        outcome: str | None = shown["outcome"]
        return outcome

    async def ended(self, request_id: str) -> str:
        """How a request ended, once it has: its last byte may reach the caller before its outcome is on record."""

        async def is_so() -> bool:
            return await self.outcome(request_id) is not None

        await eventually(is_so, what=f"{request_id} has its outcome")
        outcome = await self.outcome(request_id)
        assert outcome is not None
        return outcome

    async def settled(self, *, within_s: float = PATIENCE_S) -> None:
        """Wait until no lease is out and every request has its outcome."""

        async def is_so() -> bool:
            status = await self.status()
            return not status["leases"] and not status["counters"]["requests_live"]

        await eventually(is_so, what="no lease is out, every request has its outcome", within_s=within_s)

    async def call(self) -> RawCaller:
        """A connection to the public API."""
        caller = RawCaller(*await asyncio.open_connection("127.0.0.1", self.http, limit=1 << 26))
        self._callers.append(caller)
        return caller

    async def ask(self, body: object, *headers: str, path: str = "/v1/chat/completions") -> RawCaller:
        """Send a request on a new connection; the test reads the answer."""
        caller = await self.call()
        await caller.send(post(body, *headers, path=path))
        return caller
