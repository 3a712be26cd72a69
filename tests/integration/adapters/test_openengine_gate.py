"""OpenEngine engines without an admin listener: paused at the gate of their adapter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from openengine_rig import ScriptedEngine, chat_input

from iop.adapters.base import Adapter
from iop.adapters.registry import create_adapter
from iop.admin.enums import AdminOperationKind, AdmissionPolicy, PauseMode
from iop.admin.requests import PauseSpec
from iop.admin.steps import PauseStep, ResumeStep
from iop.core.ids import RunId
from iop.testing import adapter_suite
from iop.testing.adapter_suite import RunRecorder, adapter_services, assert_all_ok, step_call
from iop.testing.waiting import eventually
from iop.wire.messages import AdapterConfig, OpenEngineSettings, RunEventType, RunRequest


@dataclass
class GatedRig:
    adapter: Adapter
    engine: ScriptedEngine

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        yield self.adapter


@pytest.fixture
async def rig() -> AsyncIterator[GatedRig]:
    engine = ScriptedEngine()
    async with engine.serving() as address, asyncio.TaskGroup() as tasks:
        settings = OpenEngineSettings(target=address)
        config = AdapterConfig(name="main", type="openengine", capacity=4, settings=settings)
        adapter = create_adapter(config, adapter_services())
        await adapter.start(tasks)
        try:
            yield GatedRig(adapter, engine)
        finally:
            await adapter.aclose()


def a_run(number: int) -> RunRecorder:
    return RunRecorder(
        RunRequest(run_id=RunId(f"r{number}"), adapter="main", target="m", input=chat_input(8))
    )


@pytest.mark.clause("AD-37", "AD-41", "EN-43")
class TestSharedPauseSuite(adapter_suite.PauseSuite):
    @pytest.fixture
    async def harness(self, rig: GatedRig) -> GatedRig:
        return rig


@pytest.mark.clause("AD-15", "AD-41")
async def test_a_pause_ends_what_runs_and_lets_nothing_in_until_it_is_resumed(rig: GatedRig) -> None:
    (info,) = rig.adapter.participants()
    assert info.capabilities.operations == {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}
    assert "`admin`" in rig.adapter.capabilities.admin_refusal
    rig.engine.held = True
    held, refused, served = a_run(1), a_run(2), a_run(3)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.adapter.run(held))
        await eventually(lambda: rig.engine.in_flight == 1)
        pause = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT))
        result = await rig.adapter.execute_step(step_call(rig.adapter, pause), lambda _: None)
    assert_all_ok(result)
    assert result.work.aborted == 1
    assert held.terminal is not None
    assert held.terminal.type is RunEventType.CANCELLED
    await eventually(lambda: rig.engine.in_flight == 0)
    await rig.adapter.run(refused)
    assert refused.terminal is not None
    assert refused.terminal.error is not None
    assert refused.terminal.error.code == "busy"
    assert refused.terminal.error.before_start
    assert len(rig.engine.requests) == 1
    rig.engine.held = False
    resume = step_call(rig.adapter, ResumeStep(), operation="op-2", ordinal=2)
    assert_all_ok(await rig.adapter.execute_step(resume, lambda _: None))
    await rig.adapter.run(served)
    assert served.terminal is not None
    assert served.terminal.type is RunEventType.COMPLETE
