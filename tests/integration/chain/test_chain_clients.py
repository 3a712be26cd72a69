"""The official clients, unmodified, against an Edge behind which another Edge stands (SF-02, SF-24)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from chain_site import Chain, chained
from test_chained_edges import CALL, TOOLS, say, site

from iop.testing.stub_engine import StubCall, StubEngine, whole_answer
from iop.testing.waiting import SOON_S, eventually

pytestmark = pytest.mark.clause("SF-02", "SF-24")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SECOND = {**CALL, "id": "c-2", "function": {"name": "weather", "arguments": '{"in": "Rome"}'}}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}


def url(chain: Chain) -> str:
    return f"http://127.0.0.1:{chain.outer.http_port}"


def gpt(chain: Chain, **more: Any) -> openai.AsyncOpenAI:
    options = {"api_key": "k", "max_retries": 0, "timeout": 20, **more}
    return openai.AsyncOpenAI(base_url=url(chain) + "/v1", **options)


def claude(chain: Chain) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url(chain), api_key="k", max_retries=0, timeout=20)


async def test_openai_reads_streams_whole_answers_and_usage(kind: str, tmp_path: Path) -> None:
    async with site(tmp_path, kind) as (chain, _stub), gpt(chain) as client:
        whole = await client.chat.completions.create(model="fast", messages=HELLO)
        assert whole.choices[0].message.content == "one two three"
        stream = await client.chat.completions.create(
            model="fast", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "one two three"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 7


async def test_openais_blocking_client_works_too(kind: str, tmp_path: Path) -> None:
    async with site(tmp_path, kind) as (chain, _stub):

        def ask() -> str:
            with openai.OpenAI(base_url=url(chain) + "/v1", api_key="k", max_retries=0) as client:
                stream = client.chat.completions.create(model="fast", messages=HELLO, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

        assert await asyncio.to_thread(ask) == "one two three"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_openai_gets_parallel_calls_and_gives_results_and_a_picture(
    kind: str,
    tmp_path: Path,
    is_stream: bool,
) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "and here?"}, picture]}]
    async with site(tmp_path, kind) as (chain, stub), gpt(chain) as client:
        stub.script = say(finish="tool_calls", calls=[CALL, SECOND])
        options: dict[str, Any] = {"model": "fast", "messages": asked, "tools": TOOLS}
        if is_stream:
            async with client.chat.completions.stream(**options) as stream:
                choice = (await stream.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(**options)).choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments)["in"] for call in calls] == ["Bonn", "Rome"]
        assert [call.id for call in calls] == ["c-1", "c-2"]
        stub.script = say("rain and sun")
        results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls]
        turn = [*asked, choice.message.to_dict(), *results]
        last = await client.chat.completions.create(model="fast", messages=turn, tools=TOOLS)
        assert last.choices[0].message.content == "rain and sun"
        sent = stub.calls[-1].json["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
        assert sent[0]["content"][1] == picture


async def test_openai_raises_its_own_types(kind: str, tmp_path: Path) -> None:
    async def refuse(call: StubCall) -> None:
        await call.write(whole_answer(b'{"error": {"message": "too hot"}}', status=b"400 Bad Request"))

    async def fail(call: StubCall) -> None:
        await call.write(whole_answer(b"{}", status=b"500 Oops"))

    async def cut(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        call.reset()

    async with site(tmp_path, kind) as (chain, stub), gpt(chain) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=HELLO)
        stub.script = refuse
        with pytest.raises(openai.BadRequestError, match="too hot"):
            await client.chat.completions.create(model="fast", messages=HELLO)
        stub.script = fail
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="fast", messages=HELLO)
        stub.script = cut
        stream = await client.chat.completions.create(model="fast", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


@pytest.mark.clause("SF-09")
async def test_openai_tries_again_when_the_inner_queue_was_full(kind: str, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(call: StubCall) -> None:
        await gate.wait()
        await say("late")(call)

    tight = {"model": {"queue": {"max": 1, "timeout_sec": 20}}}
    async with site(tmp_path, kind, inner=tight) as (chain, stub), gpt(chain, max_retries=4) as client:
        stub.script = hold
        body = {"model": "fast", "messages": HELLO, "stream": True}
        held = [await chain.inner.ask(body) for _ in range(4)]
        await eventually(lambda: chain.inner.leases == 4)
        held.append(await chain.inner.ask(body))
        await eventually(lambda: chain.inner.edge.pools.waiting == 1)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(client.chat.completions.create(model="fast", messages=HELLO))
            await eventually(lambda: bool(chain.outer.edge.outcomes.begun_total) and not chain.outer.leases)
            assert not asked.done()
            gate.set()
        assert asked.result().choices[0].message.content == "late"
        for caller in held:
            await caller.read_answer()


@pytest.mark.clause("SF-07")
async def test_openai_leaves_a_stream_and_everything_is_free(kind: str, tmp_path: Path) -> None:
    async def hang(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        await call.wait_gone(within_s=10)

    async with site(tmp_path, kind) as (chain, stub), gpt(chain) as client:
        stub.script = hang
        stream = await client.chat.completions.create(model="fast", messages=HELLO, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await eventually(
            lambda: stub.calls[0].is_closed and chain.outer.leases == chain.inner.leases == 0, within_s=SOON_S
        )


async def test_openai_has_enough_of_waiting(kind: str, tmp_path: Path) -> None:
    async def hang(call: StubCall) -> None:
        await call.wait_gone(within_s=10)

    async with site(tmp_path, kind) as (chain, stub), gpt(chain, timeout=1.0) as client:
        stub.script = hang
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="fast", messages=HELLO)
        await eventually(lambda: stub.calls[0].is_closed)


async def only_chats(call: StubCall) -> None:
    """An engine without Anthropic's routes."""
    if call.path != b"/v1/chat/completions":
        await call.write(whole_answer(b"{}", status=b"404 Not Found"))
        return
    await say(finish="tool_calls", calls=[CALL])(call)


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_anthropic_gets_tool_uses_through_both(
    kind: str,
    tmp_path: Path,
    is_stream: bool,
) -> None:
    profile = {"operations": {"chat_completions": {"method": "POST", "path": "/v1/chat/completions"}}}
    async with StubEngine(only_chats) as stub:
        engine = {"type": "openai_compat", "endpoint": stub.endpoint, "profile": profile}
        async with chained(tmp_path, kind, engine) as chain, claude(chain) as client:
            options: dict[str, Any] = {
                "model": "fast",
                "max_tokens": 64,
                "messages": HELLO,
                "tools": [WEATHER],
            }
            if is_stream:
                async with client.messages.stream(**options) as stream:
                    answer = await stream.get_final_message()
            else:
                answer = await client.messages.create(**options)
            (use,) = [part for part in answer.content if part.type == "tool_use"]
            assert (use.name, use.input, answer.stop_reason) == ("weather", {"in": "Bonn"}, "tool_use")
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**options, "model": "nobody"})
            await chain.settled()
