"""Profiles of engines behind their own admin server: fetched through the Edge and a Node, and straight (AD-46)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from iop.testing.engine_fleet import EngineFleet

pytestmark = pytest.mark.slow


async def admin(fleet: EngineFleet, *arguments: str, code: int = 0) -> tuple[Any, str]:
    """What one verb of ``iop admin`` prints, and what it says beside that."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "iop.cli", "admin", *arguments, "--json"],
        cwd=fleet.directory,
        env={**os.environ, "IOP_HOME": str(fleet.directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return (json.loads(done.stdout) if done.stdout.strip() else None), done.stderr


@pytest.mark.clause("AD-46", "EN-04", "AD-03")
async def test_a_profiles_files_are_fetched_through_the_edge_and_from_the_engine(tmp_path: Path) -> None:
    async with EngineFleet(tmp_path, ["n1"], ranks=2, capacity=4) as fleet:
        await fleet.start()
        edge = ("--target", fleet.admin_address, "--token", "file:viewer.token")
        engine = ("--target", fleet.engines["n1"]["admin"], "--token", "file:engine.token")
        for name, where in (("edge", edge), ("engine", engine)):
            kinds = ("--kind", "cpu", "--kind", "memory", "--kind", "scheduler")
            started, _ = await admin(fleet, "profile-start", "--all", *kinds, *where)
            assert (await fleet.say("hello there", max_tokens=4)).text
            stopped, _ = await admin(fleet, "profile-stop", started["profile_id"], *where)
            out = tmp_path / f"files-{name}"
            fetched, _ = await admin(
                fleet, "profile-fetch", stopped["operation_id"], "--out", str(out), *where
            )
            assert len(fetched["files"]) == 5, "two kinds of two ranks, and the scheduler's"
            for file in fetched["files"]:
                content = Path(file["file"]).read_bytes()
                assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
            uris = [artifact["uri"] for artifact in stopped["artifacts"]]
            assert all(str(tmp_path) not in uri and "127.0.0.1" not in uri for uri in uris), uris

            told, _ = await admin(
                fleet,
                "profile-fetch",
                stopped["operation_id"],
                *where[:2],
                "--token",
                "none",
                code=3,
            )
            assert told["error"]["reason"] == "NO_CREDENTIAL"

        # The same files by way of the ops listener, where only that can be reached.
        stopped, _ = await admin(fleet, "list", *edge)
        operation = next(o for o in stopped["operations"] if o["kind"] == "STOP_PROFILE")
        over_ops = ("--ops", f"127.0.0.1:{fleet.ops}", "--ops-token", "file:viewer.token")
        fetched, _ = await admin(
            fleet,
            "profile-fetch",
            operation["operation_id"],
            "--out",
            str(tmp_path / "ops"),
            *over_ops,
            *edge,
        )
        assert len(fetched["files"]) == 5


@pytest.mark.clause("AD-46", "AD-26")
@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped-before", "running"])
async def test_a_profiles_files_are_fetched_after_a_restart_of_edge_and_node(
    tmp_path: Path, is_stopped: bool
) -> None:
    async with EngineFleet(tmp_path, ["n1"], ranks=2, capacity=4) as fleet:
        await fleet.start()
        edge = ("--target", fleet.admin_address, "--token", "file:viewer.token")
        started, _ = await admin(fleet, "profile-start", "--all", "--kind", "cpu", *edge)
        if is_stopped:
            stopped, _ = await admin(fleet, "profile-stop", started["profile_id"], *edge)
        for part in ("edge", "n1"):
            fleet.kill(part)
        await fleet.start_edge()
        fleet.start_node("n1")
        await fleet.all_operated()
        if not is_stopped:
            stopped, _ = await admin(fleet, "profile-stop", started["profile_id"], *edge)
        fetched, _ = await admin(
            fleet, "profile-fetch", stopped["operation_id"], "--out", str(tmp_path / "files"), *edge
        )
        assert len(fetched["files"]) == 2
        for file in fetched["files"]:
            assert hashlib.sha256(Path(file["file"]).read_bytes()).hexdigest() == file["sha256"]
