"""Tools at engines that take none: known beforehand where an engine says so; else its own words pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines_models import Engine
from engines_rig import HELLO, WEATHER, ask, config_of, running
from engines_steps import facing
from replay_engine import Answer, Asked
from sglang_stub import Sglang
from test_engine_trtllm_stub import Trtllm
from vllm_chat_replay import VllmChatReplay
from vllm_replay import HANDLES

from iop.adapters.base import Adapter, Health
from iop.testing.adapter_suite import ScriptedUpstream

CHAT: dict[str, Any] = {"model": "sea", "messages": HELLO, "max_tokens": 4, "tools": [WEATHER]}


def tools_of(adapter: Adapter) -> bool | None:
    (facts,) = adapter.snapshot().model_facts.values()
    return facts.tools


@pytest.mark.clause("SF-01", "EN-53")
async def test_a_llama_cpp_without_jinja_is_known_to_take_no_tools_although_its_template_does(
    llamacpp_without_tools: Engine,
) -> None:
    engine = llamacpp_without_tools
    async with running(config_of("llamacpp", engine.endpoint, engine.model)) as adapter:
        assert tools_of(adapter) is False
        answer = await ask(adapter, CHAT)
        assert (answer.status, json.loads(answer.received)["error"]) == (
            500,
            {"code": 500, "message": "tools param requires --jinja flag", "type": "server_error"},
        )
        assert adapter.snapshot().health is Health.READY


@pytest.mark.clause("EN-53")
@pytest.mark.parametrize("name", ["nothing said", "auto", "required", "named"])
async def test_what_vllm_says_of_tools_without_a_parser_passes_unchanged_and_is_asked_once(name: str) -> None:
    vllm = VllmChatReplay()
    refusal = HANDLES[f"tools without a parser, {name}"]
    assert refusal.status == 400
    vllm.routes["POST /v1/chat/completions"] = refusal
    async with facing("vllm", vllm, "endless") as adapter:
        answer = await ask(adapter, CHAT)
        assert (answer.status, answer.received) == (400, refusal.body)
        assert b"--tool-call-parser" in refusal.body
        assert vllm.posts() == ["/v1/chat/completions"]
        assert tools_of(adapter) is None
        await adapter.probe()
        assert adapter.snapshot().health is Health.READY


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize(("parser", "tools"), [("qwen25", True), (None, False), ("absent", None)])
async def test_sglangs_parser_of_tool_calls_decides_since_it_refuses_nothing(
    parser: str | None, tools: bool | None
) -> None:
    sglang = Sglang()
    info = {"model_path": "model-a", "served_model_name": "model-a", "weight_version": "default"}
    sglang.routes["GET /model_info"] = Answer.of(
        info if parser == "absent" else {**info, "tool_call_parser": parser}
    )
    async with facing("sglang", sglang, "model-a") as adapter:
        assert tools_of(adapter) is tools
        assert sglang.posts() == []


@pytest.mark.clause("SF-01", "EN-65")
async def test_a_call_that_comes_back_as_text_stays_text() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    said = Answer.of(
        {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    )
    sglang = Sglang()
    seen: list[Any] = []

    def answer(asked: Asked) -> Answer:
        seen.append(asked.body)
        return said

    sglang.routes["POST /v1/chat/completions"] = answer
    async with facing("sglang", sglang, "model-a") as adapter:
        tunnel = await ask(adapter, CHAT)
        assert (tunnel.status, tunnel.received) == (200, said.body)
        assert seen == [CHAT]


@pytest.mark.clause("SF-01")
async def test_tensorrt_llm_does_not_tell_and_nothing_is_said_for_it() -> None:
    async with (
        ScriptedUpstream(Trtllm()).serving() as upstream,
        running(config_of("trtllm", upstream.endpoint, "m")) as adapter,
    ):
        assert tools_of(adapter) is None
