"""One model served by four kinds: vLLM, llama.cpp, the reference engine and a command-line agent, behind one Node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from engines_fleet import EngineFleet
from engines_models import Engine

from iop.testing.engine_fleet import ENGINE_TOKEN, TARGET
from iop.testing.process_fleet import START_TIMEOUT_S, VIEWER, eventually, provider
from iop.testing.waiting import free_ports

KINDS = ("vllm", "llama", "reference", "agent")
"""Names of the adapters."""

SPOKEN_BY_REFERENCE = {
    "models": {"method": "GET", "path": "/v1/models"},
    "chat_completions": {"method": "POST", "path": "/v1/chat/completions"},
}
"""It has no Messages; the Edge converts for it."""

AGENT = """
import sys
sys.stdin.read()
print("An agent says so.")
"""


class MixedFleet(EngineFleet):
    """The model `fast` is served by all four at once, each with room for one request.

    Args:
        vllm: a real one, or its stand-in.
        llamacpp: a real one.
    """

    def __init__(self, directory: Path, vllm: Engine, llamacpp: Engine) -> None:
        super().__init__(directory, "vllm", vllm)
        ports = free_ports(3)
        self.reference = {
            name: f"127.0.0.1:{port}"
            for name, port in zip(("http", "openengine", "admin"), ports, strict=True)
        }
        script = directory / "agent.py"
        directory.mkdir(parents=True, exist_ok=True)
        script.write_text(AGENT)
        self.adapters = {
            "n1": [
                provider(vllm.endpoint, name="vllm", type="vllm", capacity=1),
                provider(llamacpp.endpoint, name="llama", type="llamacpp", capacity=1),
                provider(
                    f"http://{self.reference['http']}",
                    name="reference",
                    openengine=self.reference["openengine"],
                    admin={"target": self.reference["admin"], "token": "file:engine.token"},
                    profile={"operations": SPOKEN_BY_REFERENCE},
                    capacity=1,
                ),
                {
                    "name": "agent",
                    "type": "cli",
                    "cli": {"command": [sys.executable, "-S", str(script)]},
                    "capacity": 1,
                },
            ]
        }
        targets = {"vllm": vllm.model, "llama": llamacpp.model, "reference": TARGET, "agent": "agent"}
        self.model = {
            "providers": [
                {"node": "n1", "adapter": name, "target": target} for name, target in targets.items()
            ]
        }

    async def open(self) -> None:
        """Start the engine and all else; wait until each provider takes work."""
        (self.directory / "engine.token").write_text(ENGINE_TOKEN)
        config: dict[str, Any] = {
            "listen": self.reference,
            "ranks": 1,
            "slots": 4,
            "store": f"sqlite:///{self.directory / 'engine.db'}",
            "admin": {"principals": [{"name": "edge", "token": "file:engine.token", "role": "admin"}]},
        }
        (self.directory / "engine.yaml").write_text(yaml.safe_dump(config))
        ready = self.directory / "engine.ready"
        self._spawn(
            "engine", "engine", "--config", "engine.yaml", "--no-run-file", "--ready-file", str(ready)
        )
        await eventually(ready.exists, what="the engine serves", within_s=START_TIMEOUT_S)
        await self.start()
        await eventually(self._all_take_work, what="all four take work", within_s=START_TIMEOUT_S)

    async def _all_take_work(self) -> bool:
        shown = (await self.node("n1"))["providers"]
        return len(shown) == len(KINDS) and all(
            each["status"] == "available" and not each["gates"] for each in shown
        )

    async def gates(self) -> dict[str, list[str]]:
        """What holds each provider back."""
        return {each["id"]: each["gates"] for each in (await self.node("n1"))["providers"]}


__all__ = ["KINDS", "VIEWER", "MixedFleet"]
