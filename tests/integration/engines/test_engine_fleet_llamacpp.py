"""A real llama.cpp behind Edge and Node, used with the official clients and operated by the command line."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import openai
import pytest
from engines_fleet import EngineFleet, flush, pause
from engines_models import ANSWER, Engine
from engines_rig import HELLO, WEATHER

from iop.admin.enums import AdminOperationState, PauseMode
from iop.admin.results import PauseResult
from iop.core.errors import Unsupported
from iop.testing.process_fleet import ProcessFleet, provider
from iop.testing.stub_engine import StubCall, StubEngine, sse_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
async def sea(llamacpp_sea: Engine, tmp_path: Path) -> AsyncIterator[EngineFleet]:
    async with EngineFleet(tmp_path / "sea", "llamacpp", llamacpp_sea) as fleet:
        await fleet.open()
        yield fleet


@pytest.fixture
async def endless(llamacpp: Engine, tmp_path: Path) -> AsyncIterator[EngineFleet]:
    async with EngineFleet(tmp_path / "endless", "llamacpp", llamacpp) as fleet:
        await fleet.open()
        yield fleet


@pytest.mark.clause("EN-55", "EN-60", "EN-65", "EN-85")
async def test_the_official_clients_get_everything_that_the_engine_can(sea: EngineFleet) -> None:
    messages = HELLO
    async with openai.AsyncOpenAI(base_url=f"{sea.base_url}/v1", api_key="none", max_retries=0) as client:
        chat = await client.chat.completions.create(model="fast", messages=messages)  # type: ignore[arg-type]
        assert chat.choices[0].message.content == ANSWER
        parts = await client.chat.completions.create(model="fast", messages=messages, stream=True)  # type: ignore[arg-type]
        text = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
        assert text == ANSWER
        called = await client.chat.completions.create(
            model="fast",
            messages=messages,  # type: ignore[arg-type]
            tools=[WEATHER],  # type: ignore[list-item]
        )
        (call,) = called.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        response = await client.responses.create(model="fast", input="Hello")
        assert response.output_text == ANSWER
        with pytest.raises(openai.APIStatusError) as refused:
            await client.embeddings.create(model="fast", input="x")
        assert refused.value.status_code == 501
    async with anthropic.AsyncAnthropic(base_url=sea.base_url, api_key="none", max_retries=0) as claude:
        message = await claude.messages.create(model="fast", max_tokens=64, messages=messages)  # type: ignore[arg-type]
        assert message.content[-1].text == ANSWER  # type: ignore[union-attr]
        async with claude.messages.stream(model="fast", max_tokens=64, messages=messages) as stream:  # type: ignore[arg-type]
            assert "".join([text async for text in stream.text_stream]) == ANSWER
        count = await claude.messages.count_tokens(model="fast", messages=messages)  # type: ignore[arg-type]
        assert count.input_tokens > 0


@pytest.mark.clause("EN-56", "AD-37", "AD-40", "AD-41", "AD-42")
async def test_cancel_pause_and_flush_reach_the_engine(endless: EngineFleet, llamacpp: Engine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{endless.base_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="fast", messages=HELLO, stream=True)  # type: ignore[arg-type]
        await anext(stream)
        assert await busy_slots(llamacpp) == 1
        await stream.close()
        async with asyncio.timeout(1.0):
            while await busy_slots(llamacpp):
                pass
        stream = await client.chat.completions.create(model="fast", messages=HELLO, stream=True)  # type: ignore[arg-type]
        await anext(stream)
        busy = await endless.operate(flush())
        assert busy.state is AdminOperationState.FAILED
        assert "at work" in str(busy.error)
        with pytest.raises(Unsupported):
            await endless.operate(pause(PauseMode.KEEP))
        paused = await endless.operate(pause(PauseMode.ABORT))
        assert isinstance(paused.result, PauseResult)
        assert paused.result.aborted == 1
        assert await busy_slots(llamacpp) == 0
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="fast", messages=HELLO)  # type: ignore[arg-type]
        code, cleared = await endless.admin("flush", "--all", "--kind", "prefix", "--busy", "fail")
        assert code == 0, cleared
        epoch = str(paused.result.pause_epoch)
        code, resumed = await endless.admin("resume", "--epoch", epoch)
        assert code == 0, resumed
        chat = await client.chat.completions.create(model="fast", messages=HELLO, max_tokens=4)  # type: ignore[arg-type]
        assert chat.choices[0].message.content


@pytest.mark.clause("EN-112", "SF-06", "SF-14")
@pytest.mark.parametrize("has_finish_reason", [False, True])
async def test_words_after_the_last_event_are_no_end_of_an_answer(
    tmp_path: Path, has_finish_reason: bool
) -> None:
    """As a router ends a stream whose model it unloads: status 200, whole by its framing, and no terminator."""

    async def script(call: StubCall) -> None:
        await call.start_events()
        reason = "stop" if has_finish_reason else None
        await call.chunk(*sse_events(["one ", "two"], finish=reason, is_done=False))
        await call.chunk(b"proxy error: Failed to read connection")
        await call.end_chunks()

    async with StubEngine(script) as stub, ProcessFleet(tmp_path, {"n1": [provider(stub.endpoint)]}) as fleet:
        await fleet.start()
        body = {"model": "fast", "messages": HELLO, "stream": True}
        _, _, told = await (await fleet.ask(body, "x-request-id: cut")).read_answer()
        await fleet.settled()
        assert b"proxy error" not in told
        assert (b"[DONE]" in told) is has_finish_reason
        assert (b"upstream_truncated" in told) is not has_finish_reason
        expected = "complete" if has_finish_reason else "upstream_truncated"
        assert await fleet.outcome("cut") == expected
        base_url = f"http://127.0.0.1:{fleet.http}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="fast", messages=HELLO, stream=True)  # type: ignore[arg-type]
            if has_finish_reason:
                assert [part async for part in stream]
                return
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass


async def busy_slots(engine: Engine) -> int:
    def ask() -> int:
        with urllib.request.urlopen(f"{engine.endpoint}/slots", timeout=5) as answer:
            return sum(slot["is_processing"] for slot in json.load(answer))

    return await asyncio.to_thread(ask)
