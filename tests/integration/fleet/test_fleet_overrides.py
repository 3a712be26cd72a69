"""Reconfigured values over restarts of Edge and engine, until the file changes the key; all real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from iop.admin.enums import ReconfigurableField
from iop.admin.requests import (
    AllTargets,
    MutationOptions,
    ReconfigureServingRequest,
    ServingChange,
)
from iop.admin.results import OperationCompleted
from iop.pb.openengine.v1 import openengine_pb2_grpc, server_pb2
from iop.testing.engine_fleet import EngineFleet
from iop.testing.process_fleet import eventually

pytestmark = pytest.mark.slow


async def iop(fleet: EngineFleet, *arguments: str) -> dict[str, Any]:
    """What one command prints as JSON."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "iop.cli", *arguments, "--json"],
        cwd=fleet.directory,
        env={**os.environ, "IOP_HOME": str(fleet.directory)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


async def slots(fleet: EngineFleet) -> int:
    """What the engine itself says."""
    async with grpc.aio.insecure_channel(fleet.engines["n1"]["openengine"]) as channel:
        stub = openengine_pb2_grpc.ControlStub(channel)
        info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30.0)
    return int(info.capacity.max_running_requests)


async def admitted(fleet: EngineFleet) -> int:
    """What the Edge admits."""
    return int((await fleet.node("n1"))["providers"][0]["capacity"])


async def both(fleet: EngineFleet, *, edge: int, engine: int) -> None:
    """Wait until Edge and engine serve these."""

    async def is_so() -> bool:
        try:
            return (await admitted(fleet), await slots(fleet)) == (edge, engine)
        except (OSError, grpc.aio.AioRpcError):
            return False

    await eventually(is_so, what=f"the Edge admits {edge} and the engine serves {engine}", within_s=60.0)


async def reconfigure(fleet: EngineFleet, capacity: int) -> str:
    request = ReconfigureServingRequest(
        options=MutationOptions(idempotency_key=f"capacity-{capacity}"),
        target=AllTargets(),
        changes=(ServingChange(field=ReconfigurableField.CAPACITY, value=capacity),),
    )
    async with fleet.client() as client:
        events = [event async for event in client.submit(request)]
    assert isinstance(events[-1].event, OperationCompleted), events[-1].event
    return events[-1].operation_id


def row(shown: dict[str, Any]) -> tuple[str, str]:
    """The capacity as `config check` and `config show` list it."""
    found = next(r for r in shown["values"] if r["key"] == "nodes[0].adapters[0].capacity")
    return found["value"], found["origin"]


@pytest.mark.clause("AD-47", "AD-35")
async def test_a_reconfigured_capacity_outlives_edge_and_engine_until_the_file_changes_it(
    tmp_path: Path,
) -> None:
    async with EngineFleet(tmp_path, ["n1"], ranks=1, capacity=8) as fleet:
        await fleet.start()
        operation = await reconfigure(fleet, 3)
        await both(fleet, edge=3, engine=3)
        ops = ("--target", f"127.0.0.1:{fleet.ops}", "--token", "file:viewer.token")

        value, origin = row(await iop(fleet, "config", "check", "edge.yaml"))
        assert value == "3"
        assert operation in origin
        assert "over 8" in origin
        assert "edge.yaml" in origin
        assert row(await iop(fleet, "config", "show", *ops)) == (value, origin)

        fleet.kill("edge")
        await fleet.start_edge()
        assert row(await iop(fleet, "config", "show", *ops)) == (value, origin)
        await both(fleet, edge=3, engine=3)

        # A new engine with an empty journal: nothing of its own remembers the value.
        fleet.kill("engine-n1")
        for file in tmp_path.glob("engine-n1.db*"):
            file.unlink()
        fleet.spawn_engine("n1")
        await fleet.engine_ready("n1")
        await both(fleet, edge=3, engine=3)
        await fleet.all_operated()

        config = fleet.edge_config()
        config["nodes"][0]["adapters"][0]["capacity"] = 5
        (tmp_path / "next.yaml").write_text(yaml.safe_dump(config))
        planned = await iop(fleet, "config", "plan", "next.yaml", *ops)
        (ending,) = planned["overrides"]
        assert (ending["key"], ending["value"], ending["file_value"], ending["holds"]) == (
            "n1/main: capacity",
            "3",
            "5",
            False,
        )
        (tmp_path / "edge.yaml").write_text(yaml.safe_dump(config))
        value, _ = row(await iop(fleet, "config", "check", "edge.yaml"))
        assert value == "5"
        fleet.signal("edge", signal.SIGHUP)
        await both(fleet, edge=5, engine=5)

        async def is_forgotten() -> bool:
            return (await iop(fleet, "config", "show", *ops))["overrides"] == []

        await eventually(is_forgotten, what="the override is gone")


@pytest.mark.clause("AD-47", "AD-26")
async def test_an_engine_of_its_own_serves_the_reconfigured_slots_before_it_listens(tmp_path: Path) -> None:
    async with EngineFleet(tmp_path, ["n1"], ranks=1, capacity=8) as fleet:
        fleet.spawn_engine("n1")
        await fleet.engine_ready("n1")
        request = ReconfigureServingRequest(
            options=MutationOptions(idempotency_key="k"),
            target=AllTargets(),
            changes=(ServingChange(field=ReconfigurableField.CAPACITY, value=3),),
        )
        async with fleet.engine_client("n1") as client:
            events = [event async for event in client.submit(request)]
        assert isinstance(events[-1].event, OperationCompleted)
        shown = await iop(fleet, "config", "check", "engine-n1.yaml")
        assert next(r["value"] for r in shown["values"] if r["key"] == "slots") == "3"

        fleet.kill("engine-n1")
        fleet.spawn_engine("n1")
        await fleet.engine_ready("n1")
        assert await slots(fleet) == 3

        fleet.kill("engine-n1")
        file = tmp_path / "engine-n1.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "slots": 6}))
        fleet.spawn_engine("n1")
        await fleet.engine_ready("n1")
        assert await slots(fleet) == 6
