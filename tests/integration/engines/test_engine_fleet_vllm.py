"""A real vLLM behind Edge and Node: a KEEP pause, a flush and a weight swap by the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeAlias

import openai
import pytest
from engines_fleet import EngineFleet, flush, pause, resume
from engines_models import ANSWER, Engine
from engines_rig import HELLO, WEATHER

from iop.admin.enums import AdminOperationState, PauseMode
from iop.admin.results import PauseResult

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


@pytest.fixture
async def fleet(vllm: Engine, tmp_path: Path) -> AsyncIterator[EngineFleet]:
    async with EngineFleet(tmp_path / "fleet", "vllm", vllm) as made:
        await made.open()
        yield made


TRIES = 4
"""On a busy machine the engine may have made all of a stream before an operation reaches it."""

KEPT_TOKENS = 30_000
"""The engine makes them faster than it sends them: enough that it still works when the pause comes."""

Stream: TypeAlias = openai.AsyncStream[openai.types.chat.ChatCompletionChunk]


async def begin(client: openai.AsyncOpenAI, tokens: int) -> Stream:
    """A stream whose first part has come."""
    stream: Stream = await client.chat.completions.create(  # type: ignore[call-overload]
        model="fast",
        messages=HELLO,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    await anext(stream)
    return stream


async def rest_of(stream: Stream) -> tuple[str, int]:
    """What is still to come, and how many tokens it was in all."""
    text, tokens = "", 0
    async for part in stream:
        text += "".join(choice.delta.content or "" for choice in part.choices)
        tokens = part.usage.completion_tokens if part.usage is not None else tokens
    return text, tokens


@pytest.mark.clause("AD-32", "AD-33", "AD-37", "AD-40", "AD-41", "AD-42", "AD-45")
async def test_a_fleet_with_vllm_freezes_swaps_and_goes_on(fleet: EngineFleet, models: Path) -> None:
    async with openai.AsyncOpenAI(base_url=f"{fleet.base_url}/v1", api_key="none", max_retries=0) as client:

        async def chat(tokens: int) -> tuple[str, str]:
            """What it said, and under which version by the Edge's own word (AD-33)."""
            made = await client.chat.completions.with_raw_response.create(
                model="fast",
                messages=HELLO,  # type: ignore[arg-type]
                max_tokens=tokens,
                temperature=0,
            )
            return made.parse().choices[0].message.content or "", made.headers["x-iop-weight-version"]

        said, first_version = await chat(40)
        assert ANSWER in said
        called = await client.chat.completions.create(model="fast", messages=HELLO, tools=[WEATHER])  # type: ignore[arg-type,list-item]
        assert called.choices[0].message.tool_calls
        for _ in range(TRIES):
            stream = await begin(client, KEPT_TOKENS)
            busy = await fleet.operate(flush())
            await stream.close()
            if busy.state is AdminOperationState.FAILED:
                break
        assert busy.state is AdminOperationState.FAILED
        for _ in range(TRIES):
            stream = await begin(client, KEPT_TOKENS)
            paused = await fleet.operate(pause(PauseMode.KEEP))
            assert isinstance(paused.result, PauseResult)
            if paused.result.kept:
                break
            await fleet.operate(resume(paused.result.pause_epoch))
            await stream.close()
        assert paused.result.kept == 1
        resumed = await fleet.operate(resume(paused.result.pause_epoch))
        assert resumed.state is AdminOperationState.SUCCEEDED
        said, tokens = await rest_of(stream)
        assert tokens == KEPT_TOKENS
        assert said in ANSWER * (len(said) // len(ANSWER) + 2)

        code, released = await fleet.admin("release", "--all", "--kind", "weights", "--retention", "discard")
        assert code == 3, released
        code, swapped = await fleet.admin(*update(models / "hill", "hill-1"))
        assert code == 0, swapped
        hill, version = await chat(40)
        assert ANSWER not in hill
        assert version == "hill-1" != first_version
        code, refused = await fleet.admin(*update(models / "none", "none-1"))
        assert code == 4, refused
        assert await chat(40) == (hill, "hill-1"), "untouched, and alive"
        code, back = await fleet.admin(*update(models / "endless", "sea-2"))
        assert code == 0, back
        said, version = await chat(40)
        assert ANSWER in said
        assert version == "sea-2"
        code, profile = await fleet.admin("profile")
        assert code == 0
        assert "sea-2" in json.dumps(profile)


def update(path: Path, version: str) -> tuple[str, ...]:
    return ("update-weights", "--model", "fast", "--disk", str(path), "--version", version, "--mode", "drain")
