"""The vLLM adapter in front of the real server on CPU: runs with `make engines-test`."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines_models import ANSWER, Engine
from engines_rig import HELLO, EngineHarness, ask, begin, config_of, running, said, streamed
from safetensors.numpy import load_file
from talks_vllm import make_lora

from iop.adapters.staged_weights import DIRECTORY_VARIABLE
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    PauseMode,
    ProfilerKind,
    TensorDtype,
    VerificationMethod,
    WeightFormat,
    WeightSourceKind,
)
from iop.admin.requests import DiskSource, InlineTensor, InlineTensorSource, PauseSpec, TensorSpec
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    PauseStep,
    PrepareWeightsStep,
    ResumeStep,
    StartProfileStep,
    Step,
    StepResult,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.testing import adapter_suite
from iop.testing.adapter_suite import TunnelRecorder, assert_all_ok, step_call
from iop.testing.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.fixture
async def harness(vllm: Engine) -> AsyncIterator[EngineHarness]:
    async with running(config_of("vllm", vllm.endpoint, vllm.model)) as adapter:
        made = EngineHarness(adapter, "vllm")
        await do(made, ResumeStep())
        yield made
        await do(made, ResumeStep())


async def do(harness: EngineHarness, body: Step, *, operation: str = "op-1") -> StepResult:
    call = replace(step_call(harness.adapter, body, operation=operation), timeout_s=120)
    return await harness.adapter.execute_step(call, lambda _: None)


def pause(mode: PauseMode) -> PauseStep:
    return PauseStep(pause=PauseSpec(mode=mode, admission=AdmissionPolicy.REJECT))


def get(engine: Engine, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{engine.endpoint}{path}", timeout=10) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def chat(**more: object) -> dict[str, Any]:
    return {"model": "endless", "messages": HELLO, "temperature": 0, **more}


def source(path: Path) -> DiskSource:
    return DiskSource(path=str(path), format=WeightFormat.SAFETENSORS)


async def a_stream(harness: EngineHarness, tokens: int) -> TunnelRecorder:
    usage = {"include_usage": True}
    tunnel = begin(harness.adapter, chat(stream=True, max_tokens=tokens, stream_options=usage))
    await eventually(lambda: len(tunnel.received) > 2000)
    return tunnel


@pytest.mark.clause("AD-37", "AD-40", "AD-41")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    pass


@pytest.mark.clause("AD-15")
async def test_capabilities_are_those_of_this_process(harness: EngineHarness) -> None:
    (info,) = harness.adapter.participants()
    offered = info.capabilities
    assert offered.pause_modes == set(PauseMode)
    assert offered.cache_kinds == set(CacheKind)
    assert offered.profiler_kinds == {ProfilerKind.CPU}
    assert AdminOperationKind.UPDATE_WEIGHTS in offered.operations
    assert AdminOperationKind.RELEASE_RESOURCES not in offered.operations
    assert "--enable-sleep-mode" in harness.adapter.capabilities.admin_refusal
    assert info.instance
    assert info.engine_version
    assert info.startup_source is not None


@pytest.mark.clause("EN-56")
async def test_a_caller_gone_is_gone_at_the_engine(harness: EngineHarness) -> None:
    tunnel = await a_stream(harness, 30_000)
    tunnel.cancel()
    await tunnel.finished()
    async with asyncio.timeout(2):
        while True:
            await harness.adapter.probe()
            if harness.adapter.snapshot().engine_in_flight == 0:
                break


@pytest.mark.clause("AD-41", "AD-42")
async def test_a_kept_stream_freezes_and_goes_on_without_losing_a_token(harness: EngineHarness) -> None:
    tokens = 12_000
    tunnel = await a_stream(harness, tokens)
    result = await do(harness, pause(PauseMode.KEEP))
    assert_all_ok(result)
    assert result.work.kept == 1
    await stands_still(tunnel)
    assert not tunnel.is_terminal
    resumed = await do(harness, ResumeStep(), operation="op-2")
    assert_all_ok(resumed)
    assert resumed.work.resumed == 1
    await eventually(lambda: tunnel.is_terminal, within_s=120)
    assert tunnel.ended
    assert b'"completion_tokens":12000' in tunnel.received
    text = streamed(tunnel)
    assert text in ANSWER * (len(text) // len(ANSWER) + 2)


async def stands_still(tunnel: TunnelRecorder) -> None:
    """Until nothing comes any more: what it had made before the pause is still sent."""
    async with asyncio.timeout(60):
        seen = -1
        while len(tunnel.received) != seen:
            seen = len(tunnel.received)
            await asyncio.sleep(0.7)


@pytest.mark.clause("AD-41")
async def test_an_aborting_pause_ends_the_stream_as_the_engine_says(harness: EngineHarness) -> None:
    tunnel = await a_stream(harness, 30_000)
    assert_all_ok(await do(harness, pause(PauseMode.ABORT)))
    await tunnel.finished()
    assert b'"finish_reason":"abort"' in tunnel.received


@pytest.mark.clause("AD-40")
async def test_a_flush_is_refused_in_a_200_while_busy_and_cleared_when_idle(
    harness: EngineHarness,
) -> None:
    flush = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)
    tunnel = await a_stream(harness, 30_000)
    (outcome,) = (await do(harness, flush)).participants
    assert outcome.error is not None
    assert outcome.error.code is AdminErrorCode.REFUSED_BUSY
    assert [cache.outcome for cache in outcome.caches] == [CacheOutcome.REFUSED]
    tunnel.cancel()
    await tunnel.finished()
    everything = FlushStep(kinds=tuple(CacheKind), busy_policy=BusyPolicy.WAIT)
    assert_all_ok(await do(harness, everything, operation="op-2"))


async def swap(harness: EngineHarness, path: Path, version: str, *, operation: str) -> StepResult:
    for body in (
        PrepareWeightsStep(model="endless", source=source(path), weight_version=version),
        ApplyWeightsStep(model="endless", source=source(path), weight_version=version),
    ):
        assert_all_ok(await do(harness, body, operation=operation))
    verified = await do(
        harness, VerifyWeightsStep(model="endless", weight_version=version), operation=operation
    )
    assert_all_ok(verified)
    return verified


@pytest.mark.clause("AD-32", "AD-37", "AD-38", "AD-45")
async def test_a_swap_changes_the_answers_on_the_right_side_of_the_label(
    harness: EngineHarness, vllm: Engine, models: Path
) -> None:
    assert ANSWER in said(await ask(harness.adapter, chat(max_tokens=60)))
    label = get(vllm, "/weight_info")["weight_version"]
    assert_all_ok(await do(harness, pause(PauseMode.DRAIN)))
    verified = await swap(harness, models / "hill", "hill-1", operation="op-2")
    assert verified.participants[0].verified_by in {VerificationMethod.CHECKSUM, VerificationMethod.PROBE}
    assert get(vllm, "/is_paused")["is_paused"]
    assert get(vllm, "/weight_info")["weight_version"] == label
    commit = CommitWeightsStep(model="endless", weight_version="hill-1")
    assert_all_ok(await do(harness, commit, operation="op-2"))
    assert get(vllm, "/weight_info")["weight_version"] == "hill-1"
    flush = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)
    assert_all_ok(await do(harness, flush, operation="op-2"))
    assert_all_ok(await do(harness, ResumeStep(), operation="op-2"))
    hill = said(await ask(harness.adapter, chat(max_tokens=60)))
    assert ANSWER not in hill
    assert_all_ok(await do(harness, pause(PauseMode.DRAIN), operation="op-3"))
    await swap(harness, models / "endless", label, operation="op-3")
    undo = UndoWeightsStep(
        model="endless", previous_source=source(models / "hill"), previous_weight_version="hill-1"
    )
    assert_all_ok(await do(harness, undo, operation="op-3"))
    assert_all_ok(await do(harness, ResumeStep(), operation="op-3"))
    assert said(await ask(harness.adapter, chat(max_tokens=60))) == hill
    assert_all_ok(await do(harness, pause(PauseMode.DRAIN), operation="op-4"))
    await swap(harness, models / "endless", "sea-2", operation="op-4")
    commit = CommitWeightsStep(model="endless", weight_version="sea-2")
    assert_all_ok(await do(harness, commit, operation="op-4"))
    assert_all_ok(await do(harness, flush, operation="op-4"))


@pytest.mark.clause("AD-32", "AD-45")
async def test_a_bad_path_is_refused_before_the_engine_is_touched_and_it_lives_on(
    harness: EngineHarness, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header at all")
    for path in (models / "absent", tmp_path):
        step = PrepareWeightsStep(model="endless", source=source(path), weight_version="v")
        (outcome,) = (await do(harness, step)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.SOURCE_UNAVAILABLE
        assert not outcome.changed
    assert (await ask(harness.adapter, chat(max_tokens=4))).status == 200


@pytest.mark.clause("AD-46")
async def test_a_profile_leaves_files_that_are_fetched_through_the_adapter(
    harness: EngineHarness,
) -> None:
    start = StartProfileStep(profile_id="profile-1", kinds=(ProfilerKind.CPU,), label="x")
    assert_all_ok(await do(harness, start))
    await ask(harness.adapter, chat(max_tokens=2))
    result = await do(harness, StopProfileStep(profile_id="profile-1"), operation="op-2")
    assert_all_ok(result)
    artifacts = result.participants[0].artifacts
    assert artifacts
    tunnel = TunnelRecorder(adapter_suite.tunnel_request(), window_bytes=1 << 30)
    harness.adapter.open_artifact(artifacts[0].uri, tunnel, tunnel.on_done)
    await tunnel.finished()
    assert len(tunnel.received) == artifacts[0].size_bytes


def post(engine: Engine, path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{engine.endpoint}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30):
        pass


@pytest.mark.clause("AD-15", "AD-33")
async def test_a_lora_adapter_loaded_at_the_engine_is_a_model_of_it_until_it_is_unloaded(
    harness: EngineHarness, vllm: Engine, models: Path, tmp_path: Path
) -> None:
    lora = make_lora(tmp_path / "ad1", models / "endless")
    label = get(vllm, "/weight_info")["weight_version"]
    await asyncio.to_thread(post, vllm, "/v1/load_lora_adapter", {"lora_name": "ad1", "lora_path": str(lora)})
    try:
        await harness.adapter.probe()
        assert "ad1" in harness.adapter.snapshot().models
        (info,) = harness.adapter.participants()
        assert "ad1" not in info.models, "its weights are not those that an update replaces"
        assert ANSWER in said(await ask(harness.adapter, chat(model="ad1", max_tokens=60)))
        assert get(vllm, "/weight_info")["weight_version"] == label
    finally:
        await asyncio.to_thread(post, vllm, "/v1/unload_lora_adapter", {"lora_name": "ad1"})
    await harness.adapter.probe()
    assert "ad1" not in harness.adapter.snapshot().models
    assert (await ask(harness.adapter, chat(model="ad1", max_tokens=4))).status == 404


def tensors_of(directory: Path) -> InlineTensorSource:
    return InlineTensorSource(
        tensors=tuple(
            InlineTensor(
                spec=TensorSpec(name=name, dtype=TensorDtype.FLOAT32, shape=array.shape),
                data=array.astype("<f4").tobytes(),
            )
            for name, array in load_file(directory / "model.safetensors").items()
        )
    )


@pytest.mark.clause("AD-15", "AD-32", "AD-45")
async def test_tensors_sent_along_change_the_answers_and_are_undone(
    vllm: Engine, models: Path, tmp_path: Path
) -> None:
    config = config_of("vllm", vllm.endpoint, vllm.model)
    async with running(config, {DIRECTORY_VARIABLE: str(tmp_path)}) as adapter:
        harness = EngineHarness(adapter, "vllm")
        await do(harness, ResumeStep())
        offered = adapter.participants()[0].capabilities.weight_sources
        assert WeightSourceKind.INLINE_TENSORS in offered
        assert_all_ok(await do(harness, pause(PauseMode.DRAIN)))
        sent = tensors_of(models / "hill")
        for body in (
            PrepareWeightsStep(model="endless", source=sent, weight_version="sent-1"),
            ApplyWeightsStep(model="endless", source=sent, weight_version="sent-1"),
            VerifyWeightsStep(model="endless", weight_version="sent-1"),
            FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL),
        ):
            assert_all_ok(await do(harness, body, operation="op-2"))
        assert_all_ok(await do(harness, ResumeStep(), operation="op-2"))
        assert ANSWER not in said(await ask(adapter, chat(max_tokens=60)))
        assert_all_ok(await do(harness, pause(PauseMode.DRAIN), operation="op-2"))
        undo = UndoWeightsStep(
            model="endless", previous_source=source(models / "endless"), previous_weight_version="default"
        )
        assert_all_ok(await do(harness, undo, operation="op-2"))
        assert_all_ok(await do(harness, ResumeStep(), operation="op-3"))
        assert ANSWER in said(await ask(adapter, chat(max_tokens=60)))
