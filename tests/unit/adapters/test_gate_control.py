"""A provider without a control interface is paused by letting nothing in: tunnels and agents alike."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from iop.adapters.base import Adapter, AdapterServices
from iop.adapters.registry import create_adapter
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    DrainTimeoutAction,
    PauseMode,
)
from iop.admin.requests import PauseSpec
from iop.admin.steps import PauseStep, ResumeStep, StepResult
from iop.core.errors import Unsupported
from iop.core.ids import RunId
from iop.testing import adapter_suite
from iop.testing.adapter_suite import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    RunRecorder,
    ScriptedUpstream,
    SystemTestClock,
    TunnelRecorder,
    UpstreamRequest,
    adapter_services,
    assert_all_ok,
    chunk,
    step_call,
    tunnel_request,
)
from iop.testing.waiting import eventually
from iop.wire.messages import (
    AdapterConfig,
    CliSettings,
    OpenAICompatSettings,
    RunEventType,
    RunRequest,
)


class Held(Protocol):
    """One piece of work that the engine holds until it is let go."""

    @property
    def is_over(self) -> bool: ...
    @property
    def error(self) -> str: ...


@dataclass
class HeldTunnel:
    tunnel: TunnelRecorder

    @property
    def is_over(self) -> bool:
        return self.tunnel.is_terminal and self.tunnel.done_count == 1

    @property
    def error(self) -> str:
        return str(self.tunnel.error.code) if self.tunnel.error is not None else ""


@dataclass
class HeldRun:
    run: RunRecorder

    @property
    def is_over(self) -> bool:
        return self.run.terminal is not None

    @property
    def error(self) -> str:
        terminal = self.run.terminal
        if terminal is None or terminal.type is RunEventType.COMPLETE:
            return ""
        return (
            "cancelled"
            if terminal.type is RunEventType.CANCELLED
            else str(terminal.error and terminal.error.code)
        )


class GateRig(Protocol):
    adapter: Adapter

    async def hold(self) -> Held:
        """Work that has begun and goes on until it is let go."""
        ...

    def let_go(self) -> None: ...
    async def ask(self) -> Held:
        """Work that ends by itself."""
        ...

    def unreachable(self) -> contextlib.AbstractAsyncContextManager[Adapter]: ...


class TunnelRig:
    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.go_on = asyncio.Event()
        self.asked = 0

    async def script(self, request: UpstreamRequest) -> None:
        self.asked += 1
        await request.connection.write(CHUNKED_HEAD + chunk(b"data: 1\n\n"))
        if request.body == b"hold":
            async with asyncio.TaskGroup() as tasks:
                gone = tasks.create_task(request.connection.wait_closed_by_peer())
                told = tasks.create_task(self.go_on.wait())
                await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                told.cancel()
        await request.connection.write(LAST_CHUNK)

    async def hold(self) -> Held:
        tunnel = TunnelRecorder(tunnel_request(), (b"hold",))
        self.adapter.open_tunnel(tunnel, tunnel.on_done)
        await eventually(lambda: bool(tunnel.pieces))
        return HeldTunnel(tunnel)

    def let_go(self) -> None:
        self.go_on.set()

    async def ask(self) -> Held:
        tunnel = TunnelRecorder(tunnel_request())
        self.adapter.open_tunnel(tunnel, tunnel.on_done)
        await tunnel.finished()
        return HeldTunnel(tunnel)


AGENT = """
import os, sys, time
print("begun", flush=True)
while sys.stdin.read() == "hold" and not os.path.exists("go"):
    while not os.path.exists("go"):
        time.sleep(0.01)
"""


class AgentRig:
    def __init__(self, adapter: Adapter, root: Path, tasks: asyncio.TaskGroup) -> None:
        self.adapter = adapter
        self.root = root
        self.tasks = tasks

    def run(self, text: str) -> RunRecorder:
        request = RunRequest(
            run_id=RunId(f"run-{text}"),
            adapter="main",
            target="m",
            input=text.encode(),
            workspace=str(self.root),
        )
        return RunRecorder(request)

    async def hold(self) -> Held:
        run = self.run("hold")
        self.tasks.create_task(self.adapter.run(run))
        await eventually(lambda: "begun" in run.text)
        return HeldRun(run)

    def let_go(self) -> None:
        for directory in self.root.iterdir():
            (directory / "go").touch()

    async def ask(self) -> Held:
        run = self.run("ask")
        await self.adapter.run(run)
        return HeldRun(run)


@contextlib.asynccontextmanager
async def started(config: AdapterConfig, services: AdapterServices | None = None) -> AsyncIterator[Adapter]:
    adapter = create_adapter(config, services or adapter_services())
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            yield adapter
        finally:
            await adapter.aclose()


@pytest.fixture(params=["openai_compat", "cli"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GateRig]:
    if request.param == "cli":
        (tmp_path / "agent.py").write_text(AGENT)
        settings = CliSettings(command=(sys.executable, "-S", str(tmp_path / "agent.py")))
        config = AdapterConfig(name="main", type="cli", targets=("m",), settings=settings)
        services = AdapterServices(clock=SystemTestClock(), environment={"PATH": os.environ["PATH"]})
        async with started(config, services) as adapter, asyncio.TaskGroup() as tasks:
            yield AgentRig(adapter, tmp_path / "work", tasks)  # type: ignore[misc]
        return
    upstream = ScriptedUpstream(lambda _: asyncio.sleep(0))
    async with (
        upstream.serving(),
        started(
            AdapterConfig(
                name="main", type="openai_compat", settings=OpenAICompatSettings(endpoint=upstream.endpoint)
            )
        ) as adapter,
    ):
        made = TunnelRig(adapter)
        upstream.script = made.script
        yield made  # type: ignore[misc]


@pytest.fixture
def harness(rig: GateRig) -> GateRig:
    return rig


@pytest.mark.clause("AD-37", "AD-41")
class TestSharedPauseSuite(adapter_suite.PauseSuite):
    pass


async def pause(
    adapter: Adapter,
    mode: PauseMode,
    *,
    limit_ms: int | None = None,
    then: DrainTimeoutAction = DrainTimeoutAction.FAIL,
) -> StepResult:
    spec = PauseSpec(
        mode=mode, admission=AdmissionPolicy.QUEUE, drain_timeout_ms=limit_ms, on_drain_timeout=then
    )
    return await adapter.execute_step(step_call(adapter, PauseStep(pause=spec)), lambda _: None)


async def is_paused(adapter: Adapter) -> bool | None:
    (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
    return back.paused


@pytest.mark.clause("AD-15", "AD-41")
async def test_it_offers_a_pause_that_drains_or_aborts_and_nothing_else(rig: GateRig) -> None:
    (info,) = rig.adapter.participants()
    assert info.capabilities.operations == {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}
    assert info.capabilities.pause_modes == {PauseMode.DRAIN, PauseMode.ABORT}
    assert info.instance
    with pytest.raises(Unsupported, match="freeze"):
        await pause(rig.adapter, PauseMode.KEEP)
    assert await is_paused(rig.adapter) is False


@pytest.mark.clause("AD-41", "EN-95")
async def test_nothing_passes_a_closed_gate_and_it_may_be_tried_elsewhere(rig: GateRig) -> None:
    assert_all_ok(await pause(rig.adapter, PauseMode.DRAIN))
    refused = await rig.ask()
    assert refused.error == "busy"
    resume = step_call(rig.adapter, ResumeStep(), operation="op-2", ordinal=2)
    assert_all_ok(await rig.adapter.execute_step(resume, lambda _: None))
    assert (await rig.ask()).error == ""


@pytest.mark.clause("AD-41")
async def test_a_drain_waits_for_what_runs_and_counts_it(rig: GateRig) -> None:
    held = await rig.hold()
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(pause(rig.adapter, PauseMode.DRAIN))
        await asyncio.sleep(0)  # it closes the gate in its first turn
        assert (await rig.ask()).error == "busy"
        assert not draining.done()
        rig.let_go()
    result = draining.result()
    assert_all_ok(result)
    assert result.work.drained == 1
    assert held.is_over
    assert held.error == ""
    assert await is_paused(rig.adapter)


@pytest.mark.clause("AD-41")
async def test_a_drain_out_of_time_opens_the_gate_again(rig: GateRig) -> None:
    held = await rig.hold()
    (outcome,) = (await pause(rig.adapter, PauseMode.DRAIN, limit_ms=50)).participants
    assert outcome.error is not None
    assert outcome.error.code is AdminErrorCode.DRAIN_TIMEOUT
    assert not outcome.changed
    assert await is_paused(rig.adapter) is False
    assert not held.is_over
    rig.let_go()
    await eventually(lambda: held.is_over)


@pytest.mark.clause("AD-41", "SF-07")
@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.DRAIN])
async def test_an_abort_ends_what_runs_before_it_says_paused(rig: GateRig, mode: PauseMode) -> None:
    held = await rig.hold()
    result = await pause(rig.adapter, mode, limit_ms=50, then=DrainTimeoutAction.ABORT)
    assert_all_ok(result)
    assert result.work.aborted == 1
    assert held.is_over
    assert held.error == "cancelled"
    assert await is_paused(rig.adapter)
