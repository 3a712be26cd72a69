"""The openengine adapter against the reference engine: a real model, real pauses, real caches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from test_openengine_adapter import closed_port, running

from iop.adapters.base import Adapter, Health
from iop.admin.core import AdminCore
from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    PauseMode,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.permissions import PRESETS
from iop.admin.requests import DiskSource, PauseSpec
from iop.admin.steps import (
    BYTES_UNIT,
    ApplyWeightsStep,
    FlushStep,
    PauseStep,
    PrepareWeightsStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    Step,
    StepProgress,
    StepResult,
)
from iop.api.grpc.auth import ApiKeyDirectory, PrincipalDirectory, PrincipalGrant, secret_sha256
from iop.api.grpc.engine_port import EnginePort
from iop.api.grpc.listeners import admin_listener, inference_listener
from iop.api.grpc.server import ListenerSettings
from iop.core.ids import OperationId, RunId
from iop.engine import ChatMessage, Engine, EngineSettings, builtin_checkpoint
from iop.engine.participants import RankDriver
from iop.testing import adapter_suite
from iop.testing.adapter_suite import RunRecorder, assert_all_ok, step_call
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.waiting import PATIENCE_S, SOON_S, eventually
from iop.wire.messages import OpenEngineSettings, RunEventType, RunRequest

pytestmark = pytest.mark.slow


class WallClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix_nanos(self) -> int:
        return time.time_ns()


@dataclass
class Rig:
    adapter: Adapter
    engine: Engine
    number: int = 0

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        port = closed_port()
        settings = OpenEngineSettings(
            target=f"127.0.0.1:{port}", admin_target=f"127.0.0.1:{port}", admin_token="t"
        )
        async with running(settings) as adapter:
            yield adapter

    async def step(self, body: Step) -> StepResult:
        self.number += 1
        call = step_call(self.adapter, body, operation=f"op-{self.number}", ordinal=self.number)
        async with asyncio.timeout(PATIENCE_S):
            return await self.adapter.execute_step(call, lambda _: None)

    def run(self, max_tokens: int, **fields: Any) -> RunRecorder:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        request = RunRequest(
            run_id=RunId(secrets.token_hex(4)),
            adapter="main",
            target=self.engine.info.model_id,
            input=json.dumps({**body, **fields}).encode(),
        )
        return RunRecorder(request)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = WallClock()
    ids = (OperationId(f"op-{n}") for n in range(10_000))
    grants = [PrincipalGrant(name="node", permissions=PRESETS["admin"], token_sha256=secret_sha256("tok"))]
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
    async with Engine(EngineSettings()) as engine, asyncio.TaskGroup() as tasks:
        core = AdminCore(
            journal=MemoryJournal(MemoryStore(), unix_nanos=clock.unix_nanos),
            driver=RankDriver(engine, checkpoint=builtin_checkpoint("first")),
            clock=clock,
            new_id=lambda: next(ids),
            owner="engine",
        )
        running_core = tasks.create_task(core.run())
        await core.wait_ready()
        port = EnginePort(engine, clock=clock)
        admin = admin_listener(core, PrincipalDirectory(grants), settings)
        inference = inference_listener(port, port, ApiKeyDirectory([]), settings, admin_profile_revision=1)
        async with admin.serving(), inference.serving():
            target = OpenEngineSettings(
                target=inference.address, admin_target=admin.address, admin_token="tok"
            )
            async with running(target) as adapter:
                await adapter.probe()
                yield Rig(adapter, engine)
        running_core.cancel()


@pytest.mark.clause("AD-37", "AD-40")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    @pytest.fixture
    async def harness(self, rig: Rig) -> Rig:
        return rig


@pytest.mark.clause("EN-40", "EN-102")
async def test_a_chat_runs_and_counts(rig: Rig) -> None:
    assert rig.adapter.snapshot().health is Health.READY
    run = rig.run(12, ignore_eos=True)
    async with asyncio.timeout(PATIENCE_S):
        await rig.adapter.run(run)
    assert run.terminal is not None
    assert run.terminal.type is RunEventType.COMPLETE, run.terminal
    assert run.terminal.finish_reasons == ("length",)
    assert run.terminal.usage is not None
    assert run.terminal.usage.completion_tokens == 12
    assert run.text
    assert run.events[0].metadata["weight_version"] == rig.engine.weight_version


@pytest.mark.clause("SF-22")
async def test_the_model_sees_the_chat_in_its_own_template(rig: Rig) -> None:
    run = rig.run(24)
    await rig.adapter.run(run)
    prompt = rig.engine.render_chat([ChatMessage(role="user", content="hello")]).token_ids
    assert run.terminal is not None
    assert run.terminal.usage is not None
    assert run.terminal.usage.prompt_tokens == len(prompt)


@pytest.mark.clause("EN-56", "SF-07")
async def test_a_cancelled_run_is_gone_from_the_engine_within_a_second(rig: Rig) -> None:
    run = rig.run(200, ignore_eos=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.adapter.run(run))
        await eventually(lambda: bool(run.text))
        run.cancel()
        await eventually(lambda: rig.engine.counters().running == 0, within_s=SOON_S)
    assert run.terminal is not None
    assert run.terminal.type is RunEventType.CANCELLED


@pytest.mark.clause("AD-37", "AD-41", "AD-42")
async def test_keep_freezes_a_stream_and_resume_goes_on_with_no_token_lost(rig: Rig) -> None:
    whole = rig.run(60, ignore_eos=True)
    await rig.adapter.run(whole)
    run = rig.run(60, ignore_eos=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(rig.adapter.run(run))
        await eventually(lambda: bool(run.text))
        keep = PauseStep(pause=PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE))
        paused = await rig.step(keep)
        assert_all_ok(paused)
        assert paused.work.kept == 1
        assert rig.engine.counters().kept == 1
        resumed = await rig.step(ResumeStep())
        assert_all_ok(resumed)
        assert resumed.work.resumed == 1
    assert run.text == whole.text


@pytest.mark.clause("AD-37", "AD-40")
async def test_a_flush_empties_the_real_prefix_cache(rig: Rig) -> None:
    for _ in range(2):
        await rig.adapter.run(rig.run(2, messages=[{"role": "user", "content": "the harbour " * 40}]))
    assert rig.engine.counters().prefix_tokens_hit > 0
    assert rig.engine.counters().prefix_entries > 0
    assert_all_ok(await rig.step(FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.WAIT)))
    assert rig.engine.counters().prefix_entries == 0


@pytest.mark.clause("AD-43", "AD-44", "AD-45")
async def test_weights_are_released_swapped_and_change_the_greedy_output(rig: Rig) -> None:
    before = rig.run(24, ignore_eos=True)
    await rig.adapter.run(before)
    second = builtin_checkpoint("second") / "model.safetensors"
    source = DiskSource(path=str(second.absolute()), format=WeightFormat.SAFETENSORS)
    model = rig.engine.info.model_id
    assert_all_ok(await rig.step(PrepareWeightsStep(model=model, source=source, weight_version="second")))
    pause = PauseStep(pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE))
    assert_all_ok(await rig.step(pause))
    release = ReleaseStep(kinds=(ResourceKind.KV_CACHE,), weight_retention=None)
    released = await rig.step(release)
    assert_all_ok(released)
    assert all(amount.bytes > 0 for each in released.participants for amount in each.amounts)
    assert_all_ok(await rig.step(ApplyWeightsStep(model=model, source=source, weight_version="second")))
    assert_all_ok(await rig.step(RestoreStep(kinds=(ResourceKind.KV_CACHE,))))
    assert_all_ok(await rig.step(ResumeStep()))
    after = rig.run(24, ignore_eos=True)
    await rig.adapter.run(after)
    assert after.text != before.text
    assert after.events[0].metadata["weight_version"] == "second"
    assert WeightRetention.DISCARD in rig.adapter.participants()[0].capabilities.weight_retentions


@pytest.mark.clause("AD-23", "AD-37")
async def test_bytes_that_the_engine_loads_are_told_by_rank(rig: Rig) -> None:
    hold = PauseStep(pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE))
    assert_all_ok(await rig.step(hold))
    source = DiskSource(path=str(builtin_checkpoint("second")), format=WeightFormat.SAFETENSORS)
    apply = ApplyWeightsStep(model=rig.engine.info.model_id, source=source, weight_version="v-bytes")
    call = step_call(rig.adapter, apply, operation="op-bytes", ordinal=100)
    told: list[StepProgress] = []
    async with asyncio.timeout(PATIENCE_S):
        assert_all_ok(await rig.adapter.execute_step(call, told.append))
    loaded = {one.participant_id: (one.done, one.total) for one in told if one.unit == BYTES_UNIT}
    assert set(loaded) == set(call.participant_ids)
    assert all(done == total > 0 for done, total in loaded.values())
