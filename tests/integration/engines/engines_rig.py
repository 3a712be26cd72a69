"""An adapter in front of a real engine, and short ways to ask through it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from iop.adapters.base import Adapter
from iop.adapters.registry import create_adapter
from iop.testing.adapter_suite import TunnelRecorder, adapter_services, tunnel_request
from iop.wire.messages import AdapterConfig, OpenAICompatSettings

AnyAdapter = TypeVar("AnyAdapter", bound=Adapter)


def config_of(kind: str, endpoint: str, *targets: str) -> AdapterConfig:
    """An adapter config as an Edge sends it."""
    return AdapterConfig(
        name="main",
        type=kind,
        capacity=8,
        targets=targets,
        settings=OpenAICompatSettings(endpoint=endpoint),
    )


@contextlib.asynccontextmanager
async def running(
    config: AdapterConfig, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Adapter]:
    """The registry's adapter for it, started and probed, on a Node with this environment."""
    services = replace(adapter_services(), environment=environment or {})
    async with started(create_adapter(config, services)) as adapter:
        yield adapter


@contextlib.asynccontextmanager
async def started(adapter: AnyAdapter) -> AsyncIterator[AnyAdapter]:
    """It, started and probed, and closed in the end."""
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            await adapter.probe()
            yield adapter
        finally:
            await adapter.aclose()


@dataclass
class EngineHarness:
    """For the shared admin suite."""

    adapter: Adapter
    kind: str

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        """The same kind in front of nobody."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        async with running(config_of(self.kind, f"http://127.0.0.1:{port}")) as adapter:
            yield adapter


def begin(
    adapter: Adapter, body: dict[str, Any], *, operation: str = "chat_completions", path: str = ""
) -> TunnelRecorder:
    """Open one tunnel."""
    request = replace(
        tunnel_request(operation=operation), method="POST" if path else "", path=path, timeout_sec=60
    )
    tunnel = TunnelRecorder(request, (json.dumps(body).encode(),), window_bytes=1 << 30)
    adapter.open_tunnel(tunnel, tunnel.on_done)
    return tunnel


async def ask(
    adapter: Adapter, body: dict[str, Any], *, operation: str = "chat_completions", path: str = ""
) -> TunnelRecorder:
    """Open one tunnel and wait for its end."""
    tunnel = begin(adapter, body, operation=operation, path=path)
    await tunnel.finished()
    return tunnel


def said(tunnel: TunnelRecorder) -> str:
    """The text of a chat completion."""
    text: str = json.loads(tunnel.received)["choices"][0]["message"]["content"]
    return text


def streamed(tunnel: TunnelRecorder) -> str:
    """The text of a streamed chat completion."""
    return "".join(
        choice["delta"].get("content") or ""
        for line in tunnel.received.split(b"\n")
        if line.startswith(b"data: {")
        for choice in json.loads(line[6:])["choices"]
    )


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO = [{"role": "user", "content": "Hello"}]
