"""One list of scenarios, by the official clients, over providers that speak another dialect or none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from dialect_clients import TALKS, Ask, say
from http_fleet import HttpFleet, fleet_of
from scripted_backends import BACKENDS

from iop.testing.stub_engine import StubCall, whole_answer
from iop.testing.waiting import SOON_S

ROUTES = [
    ("messages", "chat"),
    ("responses", "chat"),
    ("chat", "messages"),
    ("responses", "messages"),
    ("chat", "responses"),
    ("messages", "responses"),
    ("responses", "responses"),
    ("chat", "run"),
    ("messages", "run"),
    ("responses", "run"),
    ("chat", "chat"),
    ("messages", "messages"),
]
OPERATIONS = {
    "chat": frozenset({"chat_completions"}),
    "messages": frozenset({"messages"}),
    "responses": frozenset({"responses"}),
    "run": None,
}


@asynccontextmanager
async def backend(kind: str, **model: object) -> AsyncIterator[HttpFleet]:
    async with fleet_of(is_ollama=kind == "run", operations=OPERATIONS[kind], **model) as fleet:
        fleet.stub.script = BACKENDS[kind]
        yield fleet
        await fleet.settled()


@pytest.mark.case("P-11", "P-12")
@pytest.mark.clause("SF-01", "SF-02", "SF-10", "EN-65")
@pytest.mark.parametrize(("dialect", "kind"), ROUTES)
async def test_official_clients_read_the_same_answer_on_every_route(dialect: str, kind: str) -> None:
    talk = TALKS[dialect]
    async with backend(kind) as fleet:
        for is_stream in (False, True):
            for is_sync in (False, True):
                how = {"is_stream": is_stream, "is_sync": is_sync}
                plain = await say(talk, fleet.url, Ask("hello"), **how)
                assert plain.text == "Héllo 🚀"
                assert plain.stop == "stop"
                assert plain.tokens == (3, 2)
                assert plain.model == ("org/Real-8B-Instruct" if kind == "run" else "real")
            how = {"is_stream": is_stream, "is_sync": False}
            called = await say(talk, fleet.url, Ask("weather?", with_tools=True), **how)
            assert called.calls == [("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
            assert called.text == "Let me see. "
            assert called.stop == "tool_calls"
            turn = Ask("weather?", results=("sun", "rain"))
            assert (await say(talk, fleet.url, turn, **how)).text == "It is sun and rain"
            thought = await say(talk, fleet.url, Ask("think"), **how)
            assert (thought.reasoning, thought.text) == ("Hm, six by seven.", "42") or dialect == kind
            seen = await say(talk, fleet.url, Ask("look", with_image=True), **how)
            assert seen.text == "1 picture"
            short = await say(talk, fleet.url, Ask("hello", max_tokens=1), **how)
            assert (short.text, short.stop) == ("Hé", "length")


@pytest.mark.clause("SF-02", "SF-06", "SF-10")
@pytest.mark.parametrize(
    ("dialect", "kind"), [("messages", "chat"), ("responses", "chat"), ("chat", "messages")]
)
async def test_errors_of_a_converted_route_are_the_clients_own_types(dialect: str, kind: str) -> None:
    talk = TALKS[dialect]

    async def refuse(call: StubCall) -> None:
        body = b'{"error":{"message":"slow down","type":"requests","code":"rate_limit_exceeded"}}'
        await call.write(whole_answer(body, b"Retry-After: 30", status=b"429 Too Many Requests"))

    async def html(call: StubCall) -> None:
        page = b"<html><body>Bad Gateway at 10.0.0.1</body></html>"
        await call.write(whole_answer(page, status=b"502 Bad Gateway", kind=b"text/html"))

    async with backend(kind) as fleet:
        for is_stream in (False, True):
            fleet.stub.script = refuse
            with pytest.raises(talk.errors.RateLimitError) as limited:
                await say(talk, fleet.url, Ask("hello"), is_stream=is_stream, is_sync=False)
            assert "slow down" in str(limited.value)
            assert limited.value.response.headers["retry-after"] == "30"
            assert "x-iop-origin" not in limited.value.response.headers
            fleet.stub.script = html
            with pytest.raises(talk.errors.InternalServerError) as broken:
                await say(talk, fleet.url, Ask("hello"), is_stream=is_stream, is_sync=False)
            assert broken.value.status_code == 502
            assert broken.value.response.headers["content-type"] == "application/json"
            assert "10.0.0.1" not in broken.value.response.text


@pytest.mark.clause("SF-10")
async def test_what_the_provider_cannot_be_told_is_refused_by_name_unless_the_config_lets_it_go() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with backend("chat") as fleet:
        _, client = TALKS["messages"].clients(fleet.url)
        async with client:
            params = TALKS["messages"].params(Ask("hello", max_tokens=2048))
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.create(**params, thinking=thinking)
            assert "`thinking`" in str(refused.value)
    async with backend("messages") as fleet:
        _, other = TALKS["chat"].clients(fleet.url)
        async with other:
            for field, value in (("n", 2), ("logprobs", True), ("seed", 7)):
                with pytest.raises(openai.BadRequestError) as caught:
                    await other.chat.completions.create(
                        **TALKS["chat"].params(Ask("hello")), **{field: value}
                    )
                assert caught.value.param == field
        assert not fleet.stub.calls
    async with backend("chat", conversion_drops=frozenset({"thinking"})) as fleet:
        _, client = TALKS["messages"].clients(fleet.url)
        async with client:
            raw = await client.messages.with_raw_response.create(**params, thinking=thinking)
            assert raw.headers["x-iop-dropped"] == "thinking"
            assert raw.headers["x-iop-converted"] == "chat_completions"
            assert (await raw.parse()).content[0].text == "Héllo 🚀"


@pytest.mark.case("P-08")
@pytest.mark.clause("SF-07")
@pytest.mark.parametrize("dialect", ["messages", "responses"])
async def test_leaving_a_converted_stream_cancels_the_providers(dialect: str) -> None:
    async def hold(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n')
        await call.wait_gone(within_s=20)

    talk = TALKS[dialect]
    async with backend("chat") as fleet:
        fleet.stub.script = hold
        _, client = talk.clients(fleet.url)
        async with client:
            stream = await talk.call(client)(**talk.params(Ask("hello")), stream=True)
            async for event in stream:
                if "delta" in event.type and "one" in str(event):
                    break
            await stream.close()
        await fleet.stub.calls[0].wait_gone(within_s=SOON_S)


@pytest.mark.clause("SF-06", "SF-14")
@pytest.mark.parametrize("failure", ["cut", "told"])
async def test_a_converted_stream_that_fails_is_never_a_success(failure: str) -> None:
    async def fail(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b'data: {"model":"m","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n')
        if failure == "told":
            await call.chunk(b'data: {"error":{"message":"out of memory","type":"server_error"}}\n\n')
        await call.end_chunks()

    async with backend("chat") as fleet:
        fleet.stub.script = fail
        with pytest.raises(anthropic.APIError) as caught:
            await say(TALKS["messages"], fleet.url, Ask("hello"), is_stream=True, is_sync=False)
        assert ("out of memory" in str(caught.value)) == (failure == "told")
        _, client = TALKS["responses"].clients(fleet.url)
        async with client:
            stream = await client.responses.create(**TALKS["responses"].params(Ask("hello")), stream=True)
            events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert not any(event.type == "response.completed" for event in events)


@pytest.mark.clause("SF-02")
async def test_the_clients_own_stream_helpers_understand_converted_streams() -> None:
    async with backend("chat") as fleet:
        _, client = TALKS["messages"].clients(fleet.url)
        async with (
            client,
            client.messages.stream(**TALKS["messages"].params(Ask("weather?", with_tools=True))) as stream,
        ):
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert message.content[2].input == {"city": "Rome"}
        assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 2)
        _, other = TALKS["responses"].clients(fleet.url)
        async with other, other.responses.stream(**TALKS["responses"].params(Ask("think"))) as events:
            response = await events.get_final_response()
        assert response.output_text == "42"
        assert response.usage is not None


@pytest.mark.clause("SF-14")
async def test_tokens_are_estimated_and_marked_where_no_provider_counts_them() -> None:
    async with backend("chat") as fleet:
        _, client = TALKS["messages"].clients(fleet.url)
        async with client:
            raw = await client.messages.with_raw_response.count_tokens(
                model="fast", messages=[{"role": "user", "content": "hello there"}]
            )
            assert raw.headers["x-iop-estimate"] == "1"
            assert (await raw.parse()).input_tokens >= 1
        assert not fleet.stub.calls


@pytest.mark.case("P-16")
@pytest.mark.clause("SF-15")
async def test_the_public_name_is_shown_on_converted_routes_where_the_rule_says_so() -> None:
    async with backend("chat", response_model="alias") as fleet:
        for dialect in ("messages", "responses"):
            for is_stream in (False, True):
                said = await say(TALKS[dialect], fleet.url, Ask("hello"), is_stream=is_stream, is_sync=False)
                assert said.model == "fast"


@pytest.mark.clause("SF-10", "EN-66")
async def test_calls_that_a_backend_could_only_write_as_text_are_tool_uses_in_every_dialect() -> None:
    async def no_tools(call: StubCall) -> None:
        if call.json.get("tools"):
            refusal = b'{"error":"real does not support tools"}'
            await call.write(whole_answer(refusal, status=b"400 Bad Request"))
            return
        told = {"tool_calls": [{"name": "weather", "arguments": {"city": "Paris"}}]}
        line = {"model": "real", "message": {"role": "assistant", "content": json.dumps(told)}}
        done = {"done": True, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 2}
        body = json.dumps(line | done).encode() + b"\n"
        await call.write(whole_answer(body, kind=b"application/x-ndjson"))

    async with backend("run") as fleet:
        fleet.stub.script = no_tools
        for dialect in ("messages", "responses"):
            for is_stream in (False, True):
                said = await say(
                    TALKS[dialect],
                    fleet.url,
                    Ask("weather?", with_tools=True),
                    is_stream=is_stream,
                    is_sync=False,
                )
                assert (said.calls, said.text) == ([("weather", {"city": "Paris"})], "")
                assert said.stop == "tool_calls"
