"""The llama.cpp adapter in front of the real server with a scripted model."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engines_models import ANSWER, Engine
from engines_rig import HELLO, WEATHER, EngineHarness, ask, begin, config_of, running, said, streamed

from iop.adapters.base import Health
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    DrainTimeoutAction,
    PauseMode,
    ResourceKind,
    WeightRetention,
)
from iop.admin.requests import PauseSpec
from iop.admin.steps import FlushStep, PauseStep, ReleaseStep, ResumeStep
from iop.core.errors import Unsupported
from iop.testing import adapter_suite
from iop.testing.adapter_suite import assert_all_ok, step_call
from iop.testing.waiting import eventually

FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)


@pytest.fixture
async def harness(llamacpp: Engine) -> AsyncIterator[EngineHarness]:
    async with running(config_of("llamacpp", llamacpp.endpoint, llamacpp.model)) as adapter:
        yield EngineHarness(adapter, "llamacpp")


@pytest.fixture
async def sea(llamacpp_sea: Engine) -> AsyncIterator[EngineHarness]:
    async with running(config_of("llamacpp", llamacpp_sea.endpoint, llamacpp_sea.model)) as adapter:
        yield EngineHarness(adapter, "llamacpp")


@pytest.mark.clause("AD-37", "AD-40", "AD-41")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    pass


def slots_of(engine: Engine) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{engine.endpoint}/slots", timeout=5) as answer:
        slots: list[dict[str, Any]] = json.load(answer)
    return slots


@pytest.mark.clause("EN-60")
async def test_chat_passes_whole_and_streamed(sea: EngineHarness) -> None:
    whole = await ask(sea.adapter, {"messages": HELLO})
    assert said(whole) == ANSWER
    parts = await ask(sea.adapter, {"messages": HELLO, "stream": True})
    assert streamed(parts) == ANSWER
    assert parts.received.rstrip().endswith(b"data: [DONE]")


@pytest.mark.clause("EN-65")
async def test_a_tool_call_is_the_engines_own(sea: EngineHarness) -> None:
    answer = await ask(sea.adapter, {"messages": HELLO, "tools": [WEATHER]})
    call = json.loads(answer.received)["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    assert json.loads(call["arguments"]) == {"city": "Oslo"}


@pytest.mark.clause("SF-01")
async def test_it_says_its_context_and_that_its_template_knows_tools(sea: EngineHarness) -> None:
    await sea.adapter.probe()
    facts = sea.adapter.snapshot().model_facts
    assert len(facts) == 1
    told = next(iter(facts.values()))
    assert told.context_tokens is not None and told.context_tokens >= 1024
    assert (told.images, told.audio, told.tools) == (False, False, True)
    assert not sea.adapter.snapshot().absent_operations  # it answers 404 to any wrong method


async def test_messages_tokens_and_responses_pass(sea: EngineHarness) -> None:
    message = await ask(sea.adapter, {"messages": HELLO, "max_tokens": 64}, operation="messages")
    assert json.loads(message.received)["content"][-1]["text"] == ANSWER
    count = await ask(sea.adapter, {"messages": HELLO}, operation="count_tokens")
    assert json.loads(count.received)["input_tokens"] > 0
    response = await ask(sea.adapter, {"input": "Hello"}, operation="responses")
    assert ANSWER in response.received.decode()


@pytest.mark.clause("EN-53")
async def test_what_the_engine_refuses_passes_unchanged(sea: EngineHarness) -> None:
    answer = await ask(sea.adapter, {"input": "x"}, operation="", path="/v1/embeddings")
    assert answer.status == 501
    assert json.loads(answer.received)["error"]["type"] == "not_supported_error"


@pytest.mark.clause("EN-56")
async def test_a_caller_gone_frees_the_slot_within_a_second(harness: EngineHarness, llamacpp: Engine) -> None:
    tunnel = begin(harness.adapter, {"messages": HELLO, "stream": True, "max_tokens": -1})
    await eventually(lambda: bool(tunnel.pieces))
    assert any(slot["is_processing"] for slot in await asyncio.to_thread(slots_of, llamacpp))
    tunnel.cancel()
    async with asyncio.timeout(1.0):
        while any(slot["is_processing"] for slot in await asyncio.to_thread(slots_of, llamacpp)):
            pass
    await tunnel.finished()


@pytest.mark.clause("AD-41", "EN-91")
async def test_requests_that_wait_for_a_slot_are_told(harness: EngineHarness) -> None:
    endless = {"messages": HELLO, "stream": True, "max_tokens": -1}
    tunnels = [begin(harness.adapter, endless) for _ in range(3)]
    try:
        await eventually(lambda: sum(bool(tunnel.pieces) for tunnel in tunnels) == 2)
        await harness.adapter.probe()
        snapshot = harness.adapter.snapshot()
        assert (snapshot.engine_in_flight, snapshot.engine_queued) == (2, 1)
    finally:
        for tunnel in tunnels:
            tunnel.cancel()
        for tunnel in tunnels:
            await tunnel.finished()


@pytest.mark.clause("AD-15", "AD-37")
async def test_capabilities_are_what_the_server_was_started_with(
    harness: EngineHarness, sea: EngineHarness
) -> None:
    (able,), (unable,) = harness.adapter.participants(), sea.adapter.participants()
    assert AdminOperationKind.FLUSH_CACHES in able.capabilities.operations
    assert able.capabilities.pause_modes == {PauseMode.DRAIN, PauseMode.ABORT}
    assert able.instance
    assert AdminOperationKind.FLUSH_CACHES not in unable.capabilities.operations
    assert "--slot-save-path" in sea.adapter.capabilities.admin_refusal
    with pytest.raises(Unsupported, match="--slot-save-path"):
        await sea.adapter.execute_step(step_call(sea.adapter, FLUSH), lambda _: None)
    release = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.DISCARD)
    with pytest.raises(Unsupported, match="router"):
        await harness.adapter.execute_step(step_call(harness.adapter, release), lambda _: None)


@pytest.mark.clause("AD-40")
async def test_a_flush_empties_each_slot_and_a_repeated_prompt_is_read_anew(
    harness: EngineHarness,
) -> None:
    prompt = {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 4}
    await ask(harness.adapter, prompt)
    warm = json.loads((await ask(harness.adapter, prompt)).received)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    result = await harness.adapter.execute_step(step_call(harness.adapter, FLUSH), lambda _: None)
    assert_all_ok(result)
    assert "tokens erased" in result.participants[0].caches[0].detail
    cold = json.loads((await ask(harness.adapter, prompt)).received)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.clause("AD-37", "AD-40")
async def test_prompts_that_survive_in_host_ram_are_never_called_cleared(
    llamacpp_with_ram: Engine,
) -> None:
    async with running(config_of("llamacpp", llamacpp_with_ram.endpoint, "sea")) as adapter:
        (outcome,) = (await adapter.execute_step(step_call(adapter, FLUSH), lambda _: None)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED
        assert [cache.outcome for cache in outcome.caches] == [CacheOutcome.UNKNOWN]
        await adapter.probe()
        (info,) = adapter.participants()
        assert AdminOperationKind.FLUSH_CACHES not in info.capabilities.operations
        assert "--cache-ram 0" in adapter.capabilities.admin_refusal


@pytest.mark.clause("AD-40")
async def test_a_flush_of_a_busy_engine_is_refused_and_the_stream_goes_on(
    harness: EngineHarness,
) -> None:
    tunnel = begin(harness.adapter, {"messages": HELLO, "stream": True, "max_tokens": -1})
    await eventually(lambda: bool(tunnel.pieces))
    result = await harness.adapter.execute_step(step_call(harness.adapter, FLUSH), lambda _: None)
    (outcome,) = result.participants
    assert outcome.error is not None
    assert outcome.error.code is AdminErrorCode.REFUSED_BUSY
    assert not outcome.changed
    assert [cache.outcome for cache in outcome.caches] == [CacheOutcome.REFUSED]
    assert not tunnel.is_terminal
    tunnel.cancel()
    await tunnel.finished()


@pytest.mark.clause("AD-41", "EN-95")
async def test_an_aborting_pause_ends_streams_and_lets_nothing_in(harness: EngineHarness) -> None:
    tunnel = begin(harness.adapter, {"messages": HELLO, "stream": True, "max_tokens": -1})
    await eventually(lambda: bool(tunnel.pieces))
    pause = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT))
    result = await harness.adapter.execute_step(step_call(harness.adapter, pause), lambda _: None)
    assert_all_ok(result)
    assert result.work.aborted == 1
    assert tunnel.error is not None
    refused = await ask(harness.adapter, {"messages": HELLO})
    assert refused.error is not None
    assert refused.error.code == "busy"
    assert refused.error.before_start
    resume = step_call(harness.adapter, ResumeStep(), operation="op-2", ordinal=2)
    assert_all_ok(await harness.adapter.execute_step(resume, lambda _: None))
    assert (await ask(harness.adapter, {"messages": HELLO, "max_tokens": 4})).status == 200


@pytest.mark.clause("AD-41")
async def test_a_drain_out_of_time_fails_and_leaves_the_engine_serving(harness: EngineHarness) -> None:
    tunnel = begin(harness.adapter, {"messages": HELLO, "stream": True, "max_tokens": -1})
    await eventually(lambda: bool(tunnel.pieces))
    spec = PauseSpec(
        mode=PauseMode.DRAIN,
        admission=AdmissionPolicy.QUEUE,
        drain_timeout_ms=300,
        on_drain_timeout=DrainTimeoutAction.FAIL,
    )
    call = step_call(harness.adapter, PauseStep(pause=spec))
    (outcome,) = (await harness.adapter.execute_step(call, lambda _: None)).participants
    assert outcome.error is not None
    assert outcome.error.code is AdminErrorCode.DRAIN_TIMEOUT
    assert not outcome.changed
    (back,) = await harness.adapter.read_back(call.participant_ids)
    assert back.paused is False
    assert not tunnel.is_terminal
    tunnel.cancel()
    await tunnel.finished()


async def test_health_and_load_come_from_the_engine(harness: EngineHarness) -> None:
    tunnel = begin(harness.adapter, {"messages": HELLO, "stream": True, "max_tokens": -1})
    await eventually(lambda: bool(tunnel.pieces))
    await harness.adapter.probe()
    snapshot = harness.adapter.snapshot()
    assert snapshot.health is Health.READY
    assert snapshot.engine_in_flight == 1
    assert snapshot.models
    tunnel.cancel()
    await tunnel.finished()
