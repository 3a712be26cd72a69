"""A small real model on llama.cpp behind Edge and Node, with the official clients: real tokens, real speed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from engines_fleet import EngineFleet, flush, pause, resume
from engines_models import Engine

from iop.admin.enums import AdminOperationState, PauseMode
from iop.admin.results import PauseResult

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "Write one sentence about the sea."}]


@pytest.fixture
async def fleet(gemma: Engine, tmp_path: Path) -> AsyncIterator[EngineFleet]:
    async with EngineFleet(tmp_path / "fleet", "llamacpp", gemma) as made:
        await made.open()
        yield made


@pytest.fixture
async def client(fleet: EngineFleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fleet.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.clause("EN-53", "EN-60")
async def test_the_official_clients_talk_to_a_real_model(
    fleet: EngineFleet, client: openai.AsyncOpenAI
) -> None:
    chat = await client.chat.completions.create(
        model="fast", messages=QUESTION, max_tokens=24, temperature=0, seed=1
    )
    text = chat.choices[0].message.content
    assert text
    assert chat.usage is not None
    assert 0 < chat.usage.completion_tokens <= 24
    parts = await client.chat.completions.create(
        model="fast",
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = [part async for part in parts]
    streamed = "".join(choice.delta.content or "" for part in pieces for choice in part.choices)
    assert streamed == text
    assert pieces[-1].usage is not None
    response = await client.responses.create(model="fast", input="Say hello.", max_output_tokens=16)
    assert response.output_text
    async with anthropic.AsyncAnthropic(base_url=fleet.base_url, api_key="none", max_retries=0) as claude:
        message = await claude.messages.create(model="fast", max_tokens=16, messages=QUESTION)
        assert message.content[-1].text  # type: ignore[union-attr]
        async with claude.messages.stream(model="fast", max_tokens=16, messages=QUESTION) as stream:
            assert "".join([part async for part in stream.text_stream])
        short = await claude.messages.count_tokens(model="fast", messages=QUESTION)
        long = await claude.messages.count_tokens(
            model="fast", messages=[{"role": "user", "content": "the sea " * 50}]
        )
        assert 0 < short.input_tokens < long.input_tokens


@pytest.mark.clause("EN-56", "SF-07")
async def test_a_client_that_leaves_frees_its_slot_within_a_second(
    client: openai.AsyncOpenAI, gemma: Engine
) -> None:
    stream = await client.chat.completions.create(
        model="fast", messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    assert await busy_slots(gemma) == 1
    await stream.close()
    async with asyncio.timeout(1.0):
        while await busy_slots(gemma):
            pass


@pytest.mark.clause("AD-37", "AD-40", "AD-41", "AD-42")
async def test_pause_flush_and_resume_reach_it(
    fleet: EngineFleet, client: openai.AsyncOpenAI, gemma: Engine
) -> None:
    stream = await client.chat.completions.create(
        model="fast", messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    busy = await fleet.operate(flush())
    assert busy.state is AdminOperationState.FAILED
    paused = await fleet.operate(pause(PauseMode.ABORT))
    assert isinstance(paused.result, PauseResult)
    assert paused.result.aborted == 1
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    assert await busy_slots(gemma) == 0
    cleared = await fleet.operate(flush())
    assert cleared.state is AdminOperationState.SUCCEEDED, cleared.error
    resumed = await fleet.operate(resume(paused.result.pause_epoch))
    assert resumed.state is AdminOperationState.SUCCEEDED, resumed.error
    chat = await client.chat.completions.create(model="fast", messages=QUESTION, max_tokens=4)
    assert chat.choices[0].message.content


async def busy_slots(engine: Engine) -> int:
    def ask() -> int:
        with urllib.request.urlopen(f"{engine.endpoint}/slots", timeout=5) as answer:
            return sum(slot["is_processing"] for slot in json.load(answer))

    return await asyncio.to_thread(ask)
