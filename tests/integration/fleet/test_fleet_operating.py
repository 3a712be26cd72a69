"""An operator at a running fleet: plan and apply a config, ask a Node, see why one is stuck."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from iop.testing.process_fleet import ProcessFleet, eventually, provider
from iop.testing.stub_engine import StubEngine

pytestmark = pytest.mark.slow


async def iop(fleet: ProcessFleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command against the fleet's ops listener."""
    where = ("--target", f"127.0.0.1:{fleet.ops}", "--token", "file:viewer.token")
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "iop.cli", *arguments, *where],
        cwd=fleet.directory,
        env={**os.environ, "IOP_HOME": str(fleet.directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.clause("EN-75", "EN-80", "EN-114", "EN-04")
async def test_a_config_is_planned_applied_or_refused_whole_and_a_node_is_asked(tmp_path: Path) -> None:
    async with (
        StubEngine() as stub,
        ProcessFleet(tmp_path, {"n1": [provider(stub.endpoint, capacity=4)], "n2": []}) as fleet,
    ):
        await fleet.start_edge()
        fleet.start_node("n1")
        await eventually(lambda: _is_ready(fleet), what="n1 is ready")

        changed = fleet.edge_config()
        changed["nodes"][0]["adapters"][0]["capacity"] = 6
        file = tmp_path / "next.yaml"
        file.write_text(yaml.safe_dump(changed))
        planned = await iop(fleet, "config", "plan", str(file))
        assert planned.returncode == 0, planned.stderr
        assert "capacity: 4 -> 6" in planned.stdout
        assert (await fleet.status())["config_revision"] == 1, "a plan changes nothing"

        applied = await iop(fleet, "config", "apply", str(file), "--json")
        assert applied.returncode == 0, applied.stderr
        shown = json.loads(applied.stdout)
        assert shown["revision"] == 2
        results = {node["id"]: node for node in shown["nodes"]}
        assert results["n1"]["step"] == "ready"
        assert results["n1"]["config_revision"] == 2
        assert not results["n2"]["connected"], "its line says that it is not there"

        before = await fleet.status()
        text = (tmp_path / "edge.yaml").read_text()
        changed["nodes"][0]["adapters"][0]["capacity"] = 7
        changed["models"][0]["providers"][0]["node"] = "nobody"
        file.write_text(yaml.safe_dump(changed))
        refused = await iop(fleet, "config", "apply", str(file))
        assert refused.returncode == 2
        assert "models[0].providers[0]" in refused.stderr
        after = await fleet.status()
        assert after["config_revision"] == before["config_revision"] == 2
        assert after["nodes"][0]["providers"] == before["nodes"][0]["providers"]
        assert (tmp_path / "edge.yaml").read_text() == text

        for question in ("usage", "capabilities", "sessions", "transport", "providers"):
            answer = await iop(fleet, "node", "command", "n1", question, "--json")
            assert answer.returncode == 0, answer.stderr
            assert json.loads(answer.stdout)["ok"]
            assert stub.endpoint not in answer.stdout, "answers tell nothing of where things live"
        away = await iop(fleet, "node", "command", "n2", "usage")
        assert away.returncode == 1
        assert "not ready" in away.stderr
        unknown = await iop(fleet, "node", "command", "n3", "usage")
        assert unknown.returncode == 3


async def _is_ready(fleet: ProcessFleet) -> bool:
    return bool((await fleet.node("n1"))["step"] == "ready")
