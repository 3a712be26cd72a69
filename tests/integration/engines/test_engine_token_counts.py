"""What is asked of vLLM's tokenizer for a count, and that its answer is what the engine reads then (SF-14)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engines_rig import WEATHER
from engines_transcript import Transcript

from iop.api.http.convert.counting import count_of, tokenize_request

SAID = {each.name: each for each in Transcript.load("vllm-inference").answers}
TOOL: dict[str, Any] = dict(WEATHER["function"])  # type: ignore[call-overload]
USER = {"role": "user", "content": "What do you see?"}
CALL = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}
ANTHROPIC_TOOLS = {"tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]}
PLAIN = {"messages": [USER]}
TALK = {
    "messages": [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}],
    **ANTHROPIC_TOOLS,
}


@pytest.mark.clause("SF-14", "EN-51")
@pytest.mark.parametrize(
    ("body", "counted", "chat"),
    [
        (PLAIN, "tokenize a chat", "chat"),
        ({**PLAIN, **ANTHROPIC_TOOLS}, "tokenize a chat with tools", "tools, auto"),
        (TALK, "tokenize a chat with a tool's result", "after the tool result"),
    ],
)
def test_the_engine_was_asked_just_so_and_counted_what_it_then_read(
    body: dict[str, Any], counted: str, chat: str
) -> None:
    parts, _ = tokenize_request(json.dumps({"model": "public", **body}).encode(), model="sea")
    assert json.loads(b"".join(parts)) == SAID[counted].request
    usage = json.loads(SAID[chat].body)["usage"]
    assert count_of(SAID[counted].body.encode()) == usage["prompt_tokens"]


@pytest.mark.clause("SF-14")
def test_the_engines_own_count_is_the_same() -> None:
    own = json.loads(SAID["Anthropic count_tokens"].body)["input_tokens"]
    assert count_of(SAID["tokenize a chat"].body.encode()) == own
