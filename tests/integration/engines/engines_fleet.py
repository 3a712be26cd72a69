"""One Edge and one Node, as processes, in front of a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from engines_models import Engine

from iop.admin.enums import AdmissionPolicy, BusyPolicy, CacheKind, PauseMode
from iop.admin.requests import (
    AllTargets,
    FlushCachesRequest,
    MutationOptions,
    PauseRequest,
    PauseSpec,
    ResumeRequest,
)
from iop.admin.results import AdminOperation
from iop.client.admin import AdminClient, AdminTarget, StreamingMutation
from iop.testing.process_fleet import VIEWER, ProcessFleet, provider
from iop.testing.waiting import free_ports


def flush() -> FlushCachesRequest:
    """Of the prefix cache, unless it is busy."""
    return FlushCachesRequest(
        options=_options(), target=AllTargets(), kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL
    )


def pause(mode: PauseMode) -> PauseRequest:
    """All of it; new requests are refused."""
    spec = PauseSpec(mode=mode, admission=AdmissionPolicy.REJECT)
    return PauseRequest(options=_options(), target=AllTargets(), pause=spec)


def resume(epoch: int) -> ResumeRequest:
    """End one pause."""
    return ResumeRequest(options=_options(), pause_epoch=epoch)


def _options() -> MutationOptions:
    return MutationOptions(idempotency_key=uuid.uuid4().hex)


class EngineFleet(ProcessFleet):
    """The model `fast` is the engine's; the admin listener is open."""

    def __init__(self, directory: Path, kind: str, engine: Engine) -> None:
        target = {"node": "n1", "adapter": "main", "target": engine.model}
        super().__init__(
            directory,
            {"n1": [provider(engine.endpoint, type=kind, capacity=4)]},
            model={"providers": [target]},
        )
        self.http, self.ops, self.nodes, self.admin_port = free_ports(4)

    @property
    def base_url(self) -> str:
        """Of the public API."""
        return f"http://127.0.0.1:{self.http}"

    def edge_config(self) -> dict[str, Any]:
        """With the admin listener."""
        config = super().edge_config()
        config["listen"]["admin"] = f"127.0.0.1:{self.admin_port}"
        return config

    async def __aexit__(self, *_: object) -> None:
        """Shown by pytest when the test failed."""
        for name in tuple(self.processes):
            sys.stderr.write(f"--- {name}\n{self.log(name)[-4000:]}\n")
        await super().__aexit__()

    async def open(self) -> None:
        """Wait until the engine was reconciled and takes work."""
        await self.start()
        async with asyncio.timeout(30):
            while True:
                shown = await self.node("n1")
                (adapter,) = shown["providers"]
                if adapter["status"] == "available" and not adapter.get("gates"):
                    return
                await asyncio.sleep(0.05)

    async def operate(self, request: StreamingMutation) -> AdminOperation:
        """One admin operation to its end, without the start of a command line before it."""
        address = f"127.0.0.1:{self.admin_port}"
        async with AdminClient(AdminTarget(address=address, token=VIEWER)) as client:
            operation_id = ""
            async with asyncio.timeout(60):
                async for event in client.submit(request):
                    operation_id = event.operation_id
            return await client.get(operation_id)

    async def admin(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """One admin command to its end: exit code and what it printed."""
        command = [
            *(sys.executable, "-m", "iop.cli", "admin", *arguments, "--json"),
            *("--target", f"127.0.0.1:{self.admin_port}", "--token", f"file:{self.directory}/viewer.token"),
        ]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env={**os.environ, "IOP_HOME": str(self.directory)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or "{}") | {"stderr": done.stderr}
