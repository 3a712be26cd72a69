"""Real ``iop edge``, ``iop node`` and ``iop engine`` processes on fixed ports: a fleet whose weights can really change.

Every part can be killed and started again, and started by another program than ``iop.cli`` where a test wants one that
dies at a place of its choosing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from iop.client.admin import AdminClient, AdminTarget
from iop.testing.process_fleet import START_TIMEOUT_S, VIEWER, ProcessFleet, eventually, post
from iop.testing.waiting import free_ports

__all__ = ["MODEL", "Answer", "EngineFleet"]

MODEL: Final = "fast"
TARGET: Final = "iop-tiny"
ENGINE_TOKEN: Final = "engine-secret"
ANSWER_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the public API, with its trailers.

    Attributes:
        text: what the model said.
        is_whole: the body ended as its framing and, for a stream, its protocol say.
        error: the error's code, inside a stream too.
    """

    status: int
    headers: Mapping[str, str]
    trailers: Mapping[str, str]
    text: str
    is_whole: bool
    error: str = ""

    @property
    def first_version(self) -> str:
        """Whose tokens began it."""
        return self.headers.get("x-iop-weight-version", "")

    @property
    def last_version(self) -> str:
        """Whose tokens ended it."""
        return self.trailers.get("x-iop-weight-version-last", self.first_version)


class EngineFleet(ProcessFleet):
    """One Edge, and per Node one reference engine that its adapter ``main`` reaches and operates.

    Args:
        directory: for configs, logs and stores.
        nodes: their ids; each gets an engine called ``engine-ID``.
        ranks: of each engine.
        launchers: by ``edge``, Node id or engine name: the program to start instead of ``-m iop.cli``; it gets the
            same arguments.
        variables: more environment, by the same names.
        edge: more sections of edge.yaml.
    """

    def __init__(
        self,
        directory: Path,
        nodes: Sequence[str],
        *,
        ranks: int = 2,
        launchers: Mapping[str, Sequence[str]] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        edge: Mapping[str, object] | None = None,
        capacity: int = 16,
    ) -> None:
        ports = iter(free_ports(3 * len(nodes) + 1))
        self.engines = {
            node: {name: f"127.0.0.1:{next(ports)}" for name in ("http", "openengine", "admin")}
            for node in nodes
        }
        self.admin_address = f"127.0.0.1:{next(ports)}"
        self.ranks = ranks
        self.capacity = capacity
        self.launchers = dict(launchers or {})
        self.variables = dict(variables or {})
        adapters = {
            node: [
                {
                    "name": "main",
                    "type": "openai_compat",
                    "endpoint": f"http://{where['http']}",
                    "openengine": where["openengine"],
                    "admin": {"target": where["admin"], "token": "file:engine.token"},
                    "capacity": capacity,
                }
            ]
            for node, where in self.engines.items()
        }
        super().__init__(directory, adapters, edge=edge)

    def edge_config(self) -> dict[str, Any]:
        """As without engines, with an admin listener."""
        config = super().edge_config()
        config["listen"]["admin"] = self.admin_address
        for model in config["models"]:
            for provider in model["providers"]:
                provider["target"] = TARGET
        return config

    async def __aenter__(self) -> EngineFleet:
        await super().__aenter__()
        (self.directory / "engine.token").write_text(ENGINE_TOKEN)
        for node, where in self.engines.items():
            config = {
                "listen": where,
                "ranks": self.ranks,
                "slots": self.capacity,
                "store": f"sqlite:///{self.directory / f'engine-{node}.db'}",
                "admin": {"principals": [{"name": "edge", "token": "file:engine.token", "role": "admin"}]},
            }
            (self.directory / f"engine-{node}.yaml").write_text(yaml.safe_dump(config))
        return self

    async def start(self, dial: str | None = None) -> None:
        """Start everything and wait until every engine is operated through its Node."""
        for node in self.engines:
            self.spawn_engine(node)
        for node in self.engines:
            await self.engine_ready(node)
        await super().start(dial)
        await self.all_operated()

    def spawn_engine(self, node: str) -> None:
        """Start one engine; it becomes ready on its own."""
        name = f"engine-{node}"
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        self._spawn(name, "engine", "--config", f"{name}.yaml", "--no-run-file", "--ready-file", str(ready))

    async def engine_ready(self, node: str) -> None:
        """Wait until one engine serves."""
        name = f"engine-{node}"
        ready = self.directory / f"{name}.ready"
        await eventually(
            lambda: ready.exists() or self.processes[name].poll() is not None,
            what=f"{name} serves",
            within_s=START_TIMEOUT_S,
        )
        assert self.processes[name].poll() is None, self.log(name)

    def _spawn(self, name: str, *arguments: str) -> None:
        launcher = self.launchers.get(name, ("-m", "iop.cli"))
        with (self.directory / f"{name}.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *launcher, *arguments],
                env={**os.environ, "IOP_HOME": str(self.directory), **self.variables.get(name, {})},
                cwd=self.directory,
                stdout=output,
                stderr=output,
            )

    def client(self) -> AdminClient:
        """The Edge's admin surface, as one who may do everything."""
        return AdminClient(AdminTarget(address=self.admin_address, token=VIEWER))

    def engine_client(self, node: str) -> AdminClient:
        """One engine's own admin surface."""
        return AdminClient(AdminTarget(address=self.engines[node]["admin"], token=ENGINE_TOKEN))

    async def all_operated(self, *, within_s: float = START_TIMEOUT_S) -> None:
        """Wait until every rank is known to the Edge, connected and reconciled, and what they serve is recorded."""
        wanted = len(self.engines) * self.ranks

        async def is_so() -> bool:
            profile = await client.profile()
            known = [p for p in profile.participants if p.state.name not in {"OFFLINE", "QUARANTINED"}]
            # The profile tells what the ranks said before it is recorded as the model's weights.
            is_recorded = {weights.model for weights in profile.weights} >= {MODEL}
            return len(known) == wanted and all(p.weight_version for p in known) and is_recorded

        async with self.client() as client:
            await eventually(is_so, what="every rank is operated", within_s=within_s)

    async def say(
        self, prompt: str, *, max_tokens: int = 16, is_stream: bool = False, engine: str | None = None
    ) -> Answer:
        """Ask the model greedily, on a connection of its own; ``engine``: past the Edge, that Node's engine itself."""
        body = {
            "model": MODEL if engine is None else TARGET,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream,
        }
        port = self.http if engine is None else int(self.engines[engine]["http"].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(post(body, "TE: trailers"))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await _read_answer(reader, is_stream=is_stream)
        finally:
            writer.close()


async def _read_answer(reader: asyncio.StreamReader, *, is_stream: bool) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    headers = _fields(lines)
    trailers: dict[str, str] = {}
    data, is_whole = b"", True
    try:
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                data += (await reader.readexactly(size + 2))[:-2]
            end = []
            while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
                end.append(line[:-2].decode("latin-1"))
            trailers = _fields(end)
        else:
            data = await reader.readexactly(int(headers["content-length"]))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        is_whole = False
    status = int(first.split()[1])
    text, error, is_complete = _events(data) if is_stream and status == 200 else _object(data)
    return Answer(
        status=status,
        headers=headers,
        trailers=trailers,
        text=text,
        is_whole=is_whole and is_complete,
        error=error,
    )


def _fields(lines: Sequence[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines)
    return {name.lower(): value.strip() for name, _, value in pairs}


def _object(data: bytes) -> tuple[str, str, bool]:
    try:
        value = json.loads(data)
    except ValueError:
        return "", "", False
    if "error" in value:
        return "", _code(value["error"]), True
    return value["choices"][0]["message"]["content"] or "", "", True


def _events(data: bytes) -> tuple[str, str, bool]:
    text, error, is_complete = "", "", False
    for line in data.decode().splitlines():
        if line == "data: [DONE]":
            is_complete = True
        elif line.startswith("data: "):
            value = json.loads(line[6:])
            if "error" in value:
                error = _code(value["error"])
            for choice in value.get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text, error, is_complete


def _code(error: Mapping[str, Any]) -> str:
    return str(error.get("code") or error.get("type") or error.get("message"))
