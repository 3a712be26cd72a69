"""Four kinds of engines under one model name: used as one, operated as one, and refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import anthropic
import openai
import pytest
from engines_fleet import flush, pause, resume
from engines_models import ANSWER, Engine
from engines_rig import HELLO, WEATHER
from mixed_fleet import KINDS, MixedFleet
from vllm_chat_replay import VllmChatReplay

from iop.admin.enums import AdminOperationState, AdmissionPolicy, CachePolicy, PauseMode, WeightFormat
from iop.admin.requests import DiskSource, MutationOptions, PauseSpec, UpdateWeightsRequest
from iop.admin.results import PauseResult
from iop.core.errors import Unsupported
from iop.core.ids import NodeId, ProviderId
from iop.edge.calls import ProviderKey
from iop.edge.pools.provider import opaque_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Ask: TypeAlias = Callable[..., Awaitable[tuple[str, int]]]

SHOWN = {opaque_name(ProviderKey(node=NodeId("n1"), provider=ProviderId(name))): name for name in KINDS}

ROUNDS = 4
"""Of as many requests at once as there are providers."""


@pytest.fixture(params=["recorded", pytest.param("real", marks=pytest.mark.engines)])
async def fleet(
    request: pytest.FixtureRequest, llamacpp_sea: Engine, tmp_path: Path
) -> AsyncIterator[MixedFleet]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "real":
            vllm = request.getfixturevalue("vllm")
        else:
            upstream = await stack.enter_async_context(VllmChatReplay().upstream().serving())
            vllm = Engine(endpoint=upstream.endpoint, model="sea")
        made = await stack.enter_async_context(MixedFleet(tmp_path / "mixed", vllm, llamacpp_sea))
        await made.open()
        yield made


def client_of(fleet: MixedFleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.base_url}/v1", api_key="none", max_retries=0)


async def chat(client: openai.AsyncOpenAI, served: Counter[str], **more: Any) -> tuple[str, int]:
    """One answer, whole or streamed to its end, noted under who gave it: its text, and how many calls."""
    if not more.get("stream"):
        raw = await client.chat.completions.with_raw_response.create(
            model="fast", messages=HELLO, max_tokens=40, temperature=0, **more
        )
        served[provider_of(raw.headers)] += 1
        message = raw.parse().choices[0].message
        return message.content or "", len(message.tool_calls or [])
    async with client.chat.completions.with_streaming_response.create(
        model="fast", messages=HELLO, max_tokens=40, temperature=0, **more
    ) as events:
        served[provider_of(events.headers)] += 1
        text, calls = "", 0
        async for part in await events.parse():
            for choice in part.choices:
                text += choice.delta.content or ""
                calls += sum(bool(call.function.name) for call in choice.delta.tool_calls or [])
        return text, calls


async def chat_with_tools(client: openai.AsyncOpenAI, served: Counter[str], **more: Any) -> tuple[str, int]:
    """As `chat`; the reference engine's model calls no tools and says so in its own 400, which passes."""
    try:
        return await chat(client, served, tools=[WEATHER], **more)
    except openai.BadRequestError as refused:
        if refused.param != "tools":
            raise
        served[provider_of(refused.response.headers)] += 1
        return "", 0


def provider_of(headers: Any) -> str:
    """By the name that outsiders get, which tells them nothing."""
    return SHOWN[headers["x-iop-provider"]]


async def rounds(
    client: openai.AsyncOpenAI, ask: Ask = chat, **more: Any
) -> tuple[Counter[str], list[tuple[str, int]]]:
    """Several rounds of one request per provider at once."""
    served: Counter[str] = Counter()
    answers: list[tuple[str, int]] = []
    for _ in range(ROUNDS):
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(client, served, **more)) for _ in KINDS]
        answers += [each.result() for each in asked]
    return served, answers


@pytest.mark.clause("EN-43", "EN-60", "EN-65")
async def test_each_kind_gets_its_share_and_the_official_clients_see_one_model(fleet: MixedFleet) -> None:
    async with client_of(fleet) as client:
        served, answers = await rounds(client)
        assert set(served) == set(KINDS)
        said = [text for text, _ in answers]
        assert sum(ANSWER in text for text in said) == served["vllm"] + served["llama"]
        assert sum("An agent says so." in text for text in said) == served["agent"]
        streamed, answers = await rounds(client, stream=True)
        assert set(streamed) == set(KINDS)
        assert all(text for text, _ in answers)
        for is_stream in (False, True):
            called, answers = await rounds(client, chat_with_tools, stream=is_stream)
            assert set(called) == set(KINDS)
            assert sum(calls for _, calls in answers) == called["vllm"] + called["llama"]
        assert [model.id for model in (await client.models.list()).data] == ["fast"]
    async with anthropic.AsyncAnthropic(base_url=fleet.base_url, api_key="none", max_retries=0) as claude:
        for _ in range(2 * len(KINDS)):
            message = await claude.messages.create(model="fast", max_tokens=40, messages=HELLO)  # type: ignore[arg-type]
            assert message.content


@pytest.mark.clause("AD-15", "AD-19", "AD-37", "AD-39", "AD-41", "AD-42")
async def test_one_pause_covers_all_four_and_what_some_lack_is_refused_by_name(fleet: MixedFleet) -> None:
    async with client_of(fleet) as client:
        for request, hows in (
            (pause(PauseMode.KEEP), ("cannot freeze requests",)),
            (flush(), ("--slot-save-path", "command-line agents have no control interface")),
            (update(), ("command-line agents have no control interface",)),
        ):
            with pytest.raises(Unsupported) as lacking:
                await fleet.operate(request)
            named = {name for name in KINDS if f"n1/{name}/" in lacking.value.message}
            # This llama.cpp was not told where to keep slots, so it cannot flush either.
            assert named == {"llama", "agent"}, lacking.value.message
            assert all(how in lacking.value.message for how in hows), lacking.value.message
            assert not any((await fleet.gates()).values())
        paused = await fleet.operate(pause(PauseMode.DRAIN))
        assert paused.state is AdminOperationState.SUCCEEDED, paused.error
        assert isinstance(paused.result, PauseResult)
        gates = await fleet.gates()
        assert set(gates) == set(KINDS)
        assert all(gates.values()), gates
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="fast", messages=HELLO)  # type: ignore[arg-type]
        assert refused.value.status_code == 503
        resumed = await fleet.operate(resume(paused.result.pause_epoch))
        assert resumed.state is AdminOperationState.SUCCEEDED, resumed.error
        assert not any((await fleet.gates()).values())
        served, _ = await rounds(client)
        assert set(served) == set(KINDS)


def update() -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        options=MutationOptions(idempotency_key=uuid.uuid4().hex),
        model="fast",
        source=DiskSource(path="/nowhere", format=WeightFormat.SAFETENSORS),
        weight_version="v2",
        cache_policy=CachePolicy.FLUSH,
        quiesce=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE),
    )
