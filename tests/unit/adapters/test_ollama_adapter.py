"""The shared run suite over `ollama`, native tool calls, and tools in words for models that refuse them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from iop.adapters.base import Adapter, Health
from iop.adapters.registry import create_adapter
from iop.core.ids import RunId
from iop.testing import adapter_suite
from iop.testing.adapter_suite import (
    LAST_CHUNK,
    RunRecorder,
    ScriptedUpstream,
    UpstreamRequest,
    adapter_services,
    chunk,
    plain_answer,
)
from iop.testing.waiting import PATIENCE_S, free_ports
from iop.wire.messages import AdapterConfig, OllamaSettings, RunEventType, RunRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def line(**fields: Any) -> bytes:
    return chunk(json.dumps({"model": "m", **fields}).encode() + b"\n")


def delta(text: str, **message: Any) -> bytes:
    return line(message={"role": "assistant", "content": text, **message}, done=False)


def end(count: int, reason: str = "stop") -> bytes:
    return line(
        message={"role": "assistant", "content": ""},
        done=True,
        done_reason=reason,
        prompt_eval_count=3,
        eval_count=count,
    )


@dataclass
class FakeOllama:
    """Streams one short word per token until the request's bound."""

    is_held: bool = False
    takes_tools: bool = True
    in_flight: int = 0
    chats: list[dict[str, Any]] = field(default_factory=list)
    answer: list[bytes] | None = None
    refusal: tuple[str, bytes] | None = None
    digest: str = "sha256:1"
    shown: bytes = b"{}"
    shows: int = 0

    async def __call__(self, request: UpstreamRequest) -> None:
        if request.path == "/api/version":
            await request.connection.write(plain_answer(b'{"version":"0.9"}'))
        elif request.path == "/api/tags":
            await request.connection.write(
                plain_answer(f'{{"models":[{{"name":"m:latest","digest":"{self.digest}"}}]}}'.encode())
            )
        elif request.path == "/api/show":
            assert json.loads(request.body) == {"model": "m"}
            self.shows += 1
            await request.connection.write(plain_answer(self.shown))
        else:
            self.in_flight += 1
            try:
                await self._chat(request)
            finally:
                self.in_flight -= 1

    async def _chat(self, request: UpstreamRequest) -> None:
        body = json.loads(request.body)
        self.chats.append(body)
        if self.refusal is not None:
            await request.connection.write(plain_answer(self.refusal[1], status=self.refusal[0]))
            return
        if body.get("tools") and not self.takes_tools:
            text = b'{"error":"registry.ollama.ai/library/m:latest does not support tools"}'
            await request.connection.write(plain_answer(text, status="400 Bad Request"))
            return
        await request.connection.write(HEAD)
        if self.answer is not None:
            await request.connection.write(b"".join(self.answer) + LAST_CHUNK)
            return
        count = body["options"].get("num_predict", 4)
        for number in range(count):
            await request.connection.write(delta(f"w{number} "))
            if self.is_held:
                await request.connection.wait_closed_by_peer()
                return
        await request.connection.write(end(count, "length") + LAST_CHUNK)


@dataclass
class Rig:
    adapter: Adapter
    engine: FakeOllama

    def request(self, *, max_tokens: int = 8) -> RunRequest:
        return chat(max_tokens=max_tokens)

    def hold(self) -> None:
        self.engine.is_held = True

    def engine_in_flight(self) -> int:
        return self.engine.in_flight

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        async with running(f"http://127.0.0.1:{free_ports(1)[0]}") as adapter:
            yield adapter


@contextlib.asynccontextmanager
async def running(endpoint: str, keep_alive: str = "") -> AsyncIterator[Adapter]:
    settings = OllamaSettings(endpoint=endpoint, keep_alive=keep_alive)
    config = AdapterConfig(name="main", type="ollama", targets=("m",), settings=settings)
    adapter = create_adapter(config, adapter_services())
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            yield adapter
        finally:
            await adapter.aclose()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    engine = FakeOllama()
    async with ScriptedUpstream(engine).serving() as upstream, running(upstream.endpoint) as adapter:
        yield Rig(adapter, engine)


@pytest.mark.clause("EN-40", "EN-43", "EN-56", "EN-102", "EN-112", "EN-117", "SF-07")
class TestSharedRunSuite(adapter_suite.RunSuite):
    @pytest.fixture
    async def harness(self, rig: Rig) -> Rig:
        return rig


def chat(**fields: Any) -> RunRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return RunRequest(run_id=RunId("run-1"), adapter="main", target="m", input=json.dumps(body).encode())


async def run_to_end(rig: Rig, request: RunRequest) -> RunRecorder:
    run = RunRecorder(request)
    async with asyncio.timeout(PATIENCE_S):
        await rig.adapter.run(run)
    assert run.terminal is not None
    return run


@pytest.mark.clause("EN-65")
async def test_native_tool_calls_come_as_metadata_and_never_as_text(rig: Rig) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    rig.engine.answer = [delta("", tool_calls=[call, call]), end(7)]
    run = await run_to_end(rig, chat(tools=[TOOL]))
    assert run.terminal is not None
    assert run.terminal.type is RunEventType.COMPLETE
    calls = json.loads(run.terminal.metadata["openai_tool_calls"])
    assert [each["function"]["name"] for each in calls] == ["get_weather", "get_weather"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Oslo"}
    assert len({each["id"] for each in calls}) == 2
    assert run.terminal.finish_reasons == ("tool_calls",)
    assert run.text == ""
    assert "openai_text_tool_fallback" not in run.terminal.metadata
    assert rig.engine.chats[0]["tools"] == [TOOL]


@pytest.mark.clause("EN-65")
async def test_text_that_looks_like_a_call_is_never_made_one(rig: Rig) -> None:
    text = '{"tool_calls":[{"name":"get_weather","arguments":{}}]}'
    rig.engine.answer = [delta(text), end(7)]
    run = await run_to_end(rig, chat(tools=[TOOL]))
    assert run.terminal is not None
    assert run.text == text
    assert run.terminal.metadata == {}
    assert run.terminal.finish_reasons == ("stop",)


@pytest.mark.clause("EN-66")
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}],
        [
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            {"role": "user", "content": "hi"},
        ],
        [{"role": "user", "content": "hi"}],
    ],
)
async def test_a_model_that_refuses_tools_is_told_them_in_its_leading_system_message(
    rig: Rig, messages: list[dict[str, Any]]
) -> None:
    rig.engine.takes_tools = False
    run = await run_to_end(rig, chat(messages=messages, tools=[TOOL], max_tokens=2))
    assert run.terminal is not None
    assert run.terminal.type is RunEventType.COMPLETE
    assert run.terminal.metadata["openai_text_tool_fallback"] == "true"
    first, second = rig.engine.chats
    assert "tools" in first
    assert "tools" not in second
    roles = [message["role"] for message in second["messages"]]
    assert roles == ["system", "user"]
    assert "get_weather" in second["messages"][0]["content"]
    if len(messages) == 2:
        assert second["messages"][0]["content"].startswith("Be short.")
    again = await run_to_end(rig, chat(tools=[TOOL], max_tokens=2))
    assert len(rig.engine.chats) == 3, "the refusal is remembered"
    assert again.terminal is not None
    assert again.terminal.metadata["openai_text_tool_fallback"] == "true"


@pytest.mark.clause("EN-66", "SF-01")
async def test_a_model_that_says_that_it_takes_no_tools_is_not_tried_with_them(rig: Rig) -> None:
    rig.engine.takes_tools = False
    rig.engine.shown = b'{"capabilities":["completion","vision"]}'
    await rig.adapter.probe()
    facts = rig.adapter.snapshot().model_facts["m"]
    assert (facts.tools, facts.images, facts.audio) == (False, True, False)
    run = await run_to_end(rig, chat(tools=[TOOL], max_tokens=2))
    assert run.terminal is not None
    assert run.terminal.metadata["openai_text_tool_fallback"] == "true"
    (asked,) = rig.engine.chats
    assert "tools" not in asked


@pytest.mark.clause("EN-66", "SF-01")
async def test_what_a_model_can_is_asked_again_only_when_it_was_pulled_anew(rig: Rig) -> None:
    rig.engine.takes_tools = False
    await rig.adapter.probe()
    assert rig.adapter.snapshot().model_facts["m"].tools is None
    await run_to_end(rig, chat(tools=[TOOL], max_tokens=2))
    await rig.adapter.probe()
    assert rig.engine.shows == 1
    await run_to_end(rig, chat(tools=[TOOL], max_tokens=2))
    assert len(rig.engine.chats) == 3, "a refusal is remembered over probes"
    rig.engine.digest, rig.engine.takes_tools = "sha256:2", True
    rig.engine.shown = b'{"capabilities":["completion","tools"]}'
    await rig.adapter.probe()
    assert rig.engine.shows == 2
    assert rig.adapter.snapshot().model_facts["m"].tools is True
    run = await run_to_end(rig, chat(tools=[TOOL], max_tokens=2))
    assert run.terminal is not None
    assert "openai_text_tool_fallback" not in run.terminal.metadata


@pytest.mark.clause("EN-66")
async def test_without_tools_there_is_no_mark(rig: Rig) -> None:
    rig.engine.takes_tools = False
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        run = await run_to_end(rig, chat(max_tokens=1, **fields))
        assert run.terminal is not None
        assert run.terminal.metadata == {}


async def test_earlier_calls_and_results_reach_the_engine_in_its_own_form(rig: Rig) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await run_to_end(rig, chat(messages=messages, tools=[TOOL], max_tokens=1))
    sent = rig.engine.chats[0]["messages"]
    assert sent[1]["tool_calls"] == [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
    assert sent[2] == {"role": "tool", "content": "rain", "tool_name": "get_weather"}
    rig.engine.takes_tools = False
    await run_to_end(rig, chat(messages=messages, tools=[TOOL], max_tokens=1))
    plain = rig.engine.chats[-1]["messages"]
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in plain)


async def test_sampling_reaches_the_engine_and_load_options_never_do(rig: Rig) -> None:
    await run_to_end(
        rig,
        chat(
            temperature=0,
            top_k=3,
            seed=5,
            stop="x",
            max_completion_tokens=2,
            options={"num_ctx": 1},
            num_ctx=1,
            response_format={"type": "json_object"},
        ),
    )
    sent = rig.engine.chats[0]
    assert sent["options"] == {"temperature": 0, "top_k": 3, "seed": 5, "stop": ["x"], "num_predict": 2}
    assert sent["format"] == "json"
    assert set(sent) == {"model", "stream", "options", "messages", "format"}


async def test_thinking_comes_apart_from_the_answer(rig: Rig) -> None:
    rig.engine.answer = [delta("", thinking="hm"), delta("yes"), end(2)]
    run = await run_to_end(rig, chat())
    assert [event.reasoning_delta for event in run.events if event.reasoning_delta] == ["hm"]
    assert run.text == "yes"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ([delta("a"), line(error="model runner has crashed")], "upstream_error"),
        ([delta("a")], "upstream_truncated"),
        ([], "upstream_truncated"),
        ([chunk(b"<html>\n")], "upstream_error"),
        ([chunk(b'{"message": 7}\n')], "upstream_error"),
        ([chunk(b"[" * 100_000 + b"\n")], "upstream_error"),
    ],
)
async def test_an_error_hidden_in_a_200_is_an_error(rig: Rig, answer: list[bytes], code: str) -> None:
    rig.engine.answer = answer
    run = await run_to_end(rig, chat())
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.code == code


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable"),
    [
        ("404 Not Found", b'{"error":"model \'m\' not found"}', "invalid_request", False),
        ("503 Busy", b'{"error":"server busy, please try again"}', "busy", True),
        ("500 Oops", b"<html>oops</html>", "upstream_error", True),
        ("400 Bad", b'{"error":"x does not support thinking"}', "invalid_request", False),
    ],
)
async def test_an_error_answer_is_told_by_its_status(
    rig: Rig, status: str, body: bytes, code: str, retryable: bool
) -> None:
    rig.engine.refusal = (status, body)
    run = await run_to_end(rig, chat(tools=[TOOL]))
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert (run.terminal.error.code, run.terminal.error.retryable) == (code, retryable)
    assert len(rig.engine.chats) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"max_tokens": 0},
        {"max_tokens": 10**300},
        {"temperature": "hot"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
            ]
        },
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"tools": [{"type": "web_search"}]},
        {"best_of": 2},
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"echo": True},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
async def test_what_cannot_be_said_is_refused_before_the_engine(rig: Rig, fields: dict[str, Any]) -> None:
    run = await run_to_end(rig, chat(**fields))
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.code == "invalid_request"
    assert run.terminal.error.before_start
    assert rig.engine.chats == []


async def test_a_probe_tells_version_and_models(rig: Rig) -> None:
    await rig.adapter.probe()
    snapshot = rig.adapter.snapshot()
    assert (snapshot.health, snapshot.models, snapshot.engine_version) == (
        Health.READY,
        ("m:latest",),
        "ollama 0.9",
    )


async def test_keep_alive_of_the_config_goes_with_every_chat() -> None:
    engine = FakeOllama()
    async with ScriptedUpstream(engine).serving() as upstream:
        for keep_alive, sent in (("-1", -1), ("10m", "10m")):
            async with running(upstream.endpoint, keep_alive) as adapter:
                await run_to_end(Rig(adapter, engine), chat(max_tokens=1))
                assert engine.chats[-1]["keep_alive"] == sent
