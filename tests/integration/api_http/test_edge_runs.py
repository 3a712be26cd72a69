"""Chat through a provider that takes normalised runs, by the official client."""

from __future__ import annotations

import json

import openai
import pytest
from http_fleet import fleet_of

from iop.testing.stub_engine import StubCall, whole_answer
from iop.testing.waiting import SOON_S

ASK = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def line(**fields: object) -> bytes:
    return json.dumps({"model": "m", "done": False} | fields).encode() + b"\n"


async def answer(call: StubCall) -> None:
    """An Ollama backend that talks, or calls a tool when it was offered one."""
    message: dict[str, object] = {"role": "assistant", "content": ""}
    if call.json.get("tools"):
        message["tool_calls"] = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    await call.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    if "tool_calls" not in message:
        await call.chunk(line(message={"role": "assistant", "content": "Hé"}))
        message["content"] = "llo"
    await call.chunk(
        line(message=message), line(done=True, done_reason="stop", prompt_eval_count=3, eval_count=2)
    )
    await call.end_chunks()


@pytest.mark.clause("SF-10", "EN-40", "EN-60", "EN-65")
async def test_the_official_client_cannot_tell_a_run_from_a_tunnel() -> None:
    async with fleet_of(is_ollama=True) as fleet:
        fleet.stub.script = answer
        async with openai.AsyncOpenAI(base_url=fleet.url, api_key="k", max_retries=0) as client:
            whole = await client.chat.completions.create(model="fast", messages=ASK)
            assert whole.choices[0].message.content == "Héllo"
            assert whole.model == "org/Real-8B-Instruct"
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 2)
            stream = await client.chat.completions.create(
                model="fast", messages=ASK, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Héllo"
            assert chunks[-1].usage is not None
            called = await client.chat.completions.create(model="fast", messages=ASK, tools=TOOLS)
            assert called.choices[0].finish_reason == "tool_calls"
            assert called.choices[0].message.tool_calls is not None
            assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"a": 1}
            with pytest.raises(openai.NotFoundError) as caught:
                await client.embeddings.create(model="fast", input="x")
            assert caught.value.code == "operation_not_supported"
        await fleet.settled()
        assert fleet.stub.calls[0].json["model"] == "org/Real-8B-Instruct"


@pytest.mark.clause("SF-07", "EN-56")
async def test_a_caller_that_leaves_ends_the_run() -> None:
    async def hold(call: StubCall) -> None:
        await call.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        await call.chunk(line(message={"role": "assistant", "content": "one"}))
        await call.wait_gone(within_s=20)

    async with fleet_of(is_ollama=True) as fleet:
        fleet.stub.script = hold
        caller = await fleet.call()
        body = b'{"model":"fast","stream":true,"messages":[{"role":"user","content":"x"}]}'
        await caller.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await caller.read_until(b"one")
        caller.reset()
        await fleet.stub.calls[0].wait_gone(within_s=SOON_S)
        await fleet.settled()


@pytest.mark.clause("SF-06")
async def test_a_backends_failure_is_told_in_the_dialect() -> None:
    async def fail(call: StubCall) -> None:
        await call.write(whole_answer(b'{"error":"no such model"}', status=b"500 Internal Server Error"))

    async with fleet_of(is_ollama=True) as fleet:
        fleet.stub.script = fail
        body = b'{"model":"fast","messages":[{"role":"user","content":"x"}]}'
        status, fields, answer = await fleet.post(body)
        assert status >= 500
        assert fields[b"x-iop-origin"] == b"edge"
        assert json.loads(answer)["error"]["type"] == "server_error"
