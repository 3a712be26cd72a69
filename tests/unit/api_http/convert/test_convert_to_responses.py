"""Chats and messages in the words of responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iop.api.http.convert.plan import conversion_for, plan_request
from iop.core.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
RESPONSES = frozenset({"responses"})


def made(source: str, target: str, body: dict[str, Any], *allowed: str) -> dict[str, Any]:
    raw = json.dumps({"model": "public", **body}).encode()
    value: dict[str, Any] = json.loads(
        plan_request(source, target, raw, model="real", allowed=frozenset(allowed)).body
    )
    assert value.pop("model") == "real"
    return value


def refused(source: str, body: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        made(source, "responses", body)
    assert caught.value.details["field"] in caught.value.message
    return caught.value.details["field"]


@pytest.mark.clause("SF-01")
def test_a_provider_that_speaks_responses_alone_serves_every_chat() -> None:
    assert conversion_for("chat_completions", RESPONSES) == "responses"
    assert conversion_for("messages", RESPONSES) == "responses"
    assert conversion_for("responses", RESPONSES) is None
    assert conversion_for("completions", RESPONSES) is None


@pytest.mark.clause("SF-10")
def test_a_chat_becomes_items_in_their_order() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
            {"role": "assistant", "content": "Hm.", "reasoning_content": "six", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "sun"},
            {"role": "developer", "content": [{"type": "text", "text": "Go on."}]},
        ],
        "max_completion_tokens": 9,
        "reasoning_effort": "low",
        "verbosity": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "tools": [{"type": "function", "function": {"name": "f", "description": "d"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 5,
        "n": 1,
        "seed": None,
    }
    assert made("chat_completions", "responses", body) == {
        "input": [
            {"type": "message", "role": "system", "content": "Be brief."},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "look"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
                ],
            },
            {
                "type": "reasoning",
                "id": "rs_2",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "six"}],
            },
            {"type": "message", "role": "assistant", "content": "Hm."},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "Go on."}],
            },
        ],
        "max_output_tokens": 9,
        "reasoning": {"effort": "low"},
        "text": {"verbosity": "high", "format": {"type": "json_schema", "name": "n", "schema": {}}},
        "tools": [
            {
                "type": "function",
                "name": "f",
                "description": "d",
                "strict": False,
                "parameters": {"type": "object", "properties": {}},
            }
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "stream": True,
        "store": False,
        "top_k": 5,
    }


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("stop", ["x"]),
        ("stop", "x"),
        ("logit_bias", {"1": 2}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("seed", 7),
        ("audio", {}),
        ("prediction", {}),
        ("functions", []),
        ("function_call", "auto"),
        ("web_search_options", {}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_responses_cannot_say_is_refused_by_name_or_let_go_where_allowed(field: str, value: Any) -> None:
    body = {"messages": [USER], field: value}
    assert refused("chat_completions", body) == field
    assert field not in made("chat_completions", "responses", body, field)


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0].role"),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "nobody"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": 5}, "messages[0].content"),
    ],
)
def test_parts_that_responses_cannot_say_are_refused_by_place(message: dict[str, Any], field: str) -> None:
    assert refused("chat_completions", {"messages": [message]}) == field


@pytest.mark.clause("SF-10")
def test_messages_become_responses_and_their_own_names_stand_in_refusals() -> None:
    body = {
        "system": "Be brief.",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sun"}]},
        ],
    }
    value = made("messages", "responses", body)
    assert [item.get("role", item["type"]) for item in value["input"]] == [
        "system",
        "user",
        "function_call",
        "function_call_output",
    ]
    assert value["max_output_tokens"] == 9
    assert refused("messages", {**body, "stop_sequences": ["END"]}) == "stop_sequences"
    dropped = plan_request(
        "messages",
        "responses",
        json.dumps({"model": "m", **body, "stop_sequences": ["END"]}).encode(),
        model="real",
        allowed=frozenset({"stop_sequences"}),
    )
    assert dropped.dropped == ("stop_sequences",)


@pytest.mark.clause("SF-10")
def test_a_responses_caller_hears_its_own_names_of_a_messages_provider() -> None:
    body = {"input": "hi", "text": {"verbosity": "low"}}
    with pytest.raises(InvalidRequest) as caught:
        made("responses", "messages", body)
    assert caught.value.details["field"] == "text.verbosity"
    late = {"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}
    with pytest.raises(InvalidRequest) as caught:
        made("responses", "messages", late)
    assert caught.value.details["field"] == "input.role"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(TEXTS)}]
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        said: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            said["reasoning_content"] = draw(TEXTS)
        calls = [f"c{turn}{n}" for n in range(draw(st.integers(0, 2)))]
        if calls:
            said["tool_calls"] = [
                {"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                for each in calls
            ]
        messages.append(said)
        messages += [{"role": "tool", "tool_call_id": each, "content": draw(TEXTS)} for each in calls]
    return messages


@pytest.mark.clause("SF-10")
@given(messages=conversations())
@settings(max_examples=100, deadline=None)
def test_a_chat_that_became_a_response_becomes_the_same_chat_again(messages: list[dict[str, Any]]) -> None:
    there = made("chat_completions", "responses", {"messages": messages})
    back = made("responses", "chat_completions", there)
    assert back["messages"] == messages
