"""Requests of one dialect in the words of another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iop.api.http.convert.chat_to_messages import MAX_TOKENS_DEFAULT
from iop.api.http.convert.plan import Plan, conversion_for, plan_request
from iop.core.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def plan(source: str, target: str, body: dict[str, Any], *allowed: str) -> Plan:
    raw = json.dumps({"model": "public", **body}).encode()
    return plan_request(source, target, raw, model="real", allowed=frozenset(allowed))


def made(source: str, target: str, body: dict[str, Any], *allowed: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(plan(source, target, body, *allowed).body)
    assert value.pop("model") == "real"
    return value


def refused(source: str, target: str, body: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        plan(source, target, body)
    assert caught.value.details["field"] in caught.value.message
    return caught.value.details["field"]


@pytest.mark.clause("SF-01")
def test_a_provider_that_offers_the_operation_is_asked_for_it() -> None:
    both = frozenset({"chat_completions", "messages"})
    assert conversion_for("messages", both) is None
    assert conversion_for("responses", both) == "chat_completions"
    assert conversion_for("responses", frozenset({"messages"})) == "messages"
    assert conversion_for("messages", frozenset({"chat_completions"})) == "chat_completions"
    assert conversion_for("embeddings", both) is None
    assert conversion_for("messages", frozenset()) is None  # nothing known: the plain path decides


@pytest.mark.clause("SF-10")
@pytest.mark.case("P-15")
@pytest.mark.parametrize("number", ["9" * 5000, "1e999", "-1e400"])
@pytest.mark.parametrize("target", ["messages", "responses"])
def test_a_number_that_cannot_be_written_again_is_refused(number: str, target: str) -> None:
    body = b'{"model":"public","messages":[],"vendor":{"n":%b}}' % number.encode()
    with pytest.raises(InvalidRequest, match="too large"):
        plan_request("chat_completions", target, body, model="real")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"n":{number}}}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    if target == "messages":
        assert refused("chat_completions", target, {"messages": messages}).endswith("function.arguments")


@pytest.mark.clause("SF-10")
@pytest.mark.case("P-15")
def test_numbers_keep_their_value() -> None:
    value = made(
        "messages", "chat_completions", {"messages": [USER], "max_tokens": 1, "n64": 2**60 + 1, "f": 1e-7}
    )
    assert (value["n64"], value["f"]) == (2**60 + 1, 1e-7)


@pytest.mark.clause("SF-10")
def test_a_messages_conversation_becomes_a_chat_with_every_turn_in_its_place() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    body = {
        "system": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", **hint}],
        "max_tokens": 9,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "top_k": 5,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="},
                    },
                    {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 2**60 + 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "no", "is_error": True},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
    }
    got = plan("messages", "chat_completions", body)
    assert set(got.dropped) == {"system.cache_control", "messages.content.signature"}
    value = json.loads(got.body)
    assert value["messages"] == [
        {"role": "system", "content": "One.\n\nTwo."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"n": 1152921504606846977}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "Error: no"},
        {"role": "user", "content": "and?"},
    ]
    assert value["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ]
    rest = {
        k: value[k] for k in ("max_tokens", "stop", "user", "tool_choice", "parallel_tool_calls", "top_k")
    }
    assert rest == {
        "max_tokens": 9,
        "stop": ["END"],
        "user": "u",
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "top_k": 5,
    }
    assert "stream_options" not in value


@pytest.mark.case("P-17")
@pytest.mark.clause("SF-10")
def test_null_content_makes_no_empty_text_block_and_results_share_one_turn() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "b"}]},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "so?"}]},
        ]
    }
    value = made("chat_completions", "messages", body)
    assert value["system"] == [{"type": "text", "text": "Be brief."}]
    assert value["max_tokens"] == MAX_TOKENS_DEFAULT
    assert value["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                {"type": "tool_use", "id": "b", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]},
                {"type": "tool_result", "tool_use_id": "b", "content": []},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    late = {"messages": [USER, {"role": "developer", "content": "late"}]}
    assert refused("chat_completions", "messages", late) == "messages[1].role"
    assert (
        refused("chat_completions", "messages", {"messages": [USER | {"content": []}]})
        == "messages[0].content"
    )


@pytest.mark.clause("SF-10")
def test_responses_items_become_the_turns_that_they_stand_for() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]},
            {"role": "developer", "content": "late"},
        ],
        "max_output_tokens": 7,
        "reasoning": {"effort": "low"},
        "text": {"format": schema},
        "metadata": {"k": "v"},
        "store": False,
        "stream": True,
    }
    got = plan("responses", "chat_completions", body)
    value = json.loads(got.body)
    function = {"name": "f", "arguments": "{}"}
    assert value["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": function},
                {"id": "b", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "3"},
        {"role": "developer", "content": "late"},
    ]
    assert value["max_tokens"] == 7
    assert value["reasoning_effort"] == "low"
    assert value["response_format"]["json_schema"] == {k: v for k, v in schema.items() if k != "type"}
    assert value["stream_options"] == {"include_usage": True}
    assert "metadata" not in value
    assert got.echo["metadata"] == {"k": "v"}


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize(
    ("source", "target", "body", "field"),
    [
        ("messages", "chat_completions", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        (
            "messages",
            "chat_completions",
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "tools[0].type",
        ),
        ("messages", "chat_completions", {"mcp_servers": [{}]}, "mcp_servers"),
        ("responses", "chat_completions", {"previous_response_id": "r"}, "previous_response_id"),
        ("responses", "chat_completions", {"store": True}, "store"),
        ("responses", "chat_completions", {"background": True}, "background"),
        ("responses", "chat_completions", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", "chat_completions", {"include": ["message.input_image.image_url"]}, "include[0]"),
        ("responses", "messages", {"include": ["message.output_text.logprobs"]}, "include"),
        ("responses", "messages", {"top_logprobs": 2}, "top_logprobs"),
        ("chat_completions", "messages", {"n": 2}, "n"),
        ("chat_completions", "messages", {"logprobs": True}, "logprobs"),
        ("chat_completions", "messages", {"top_logprobs": 3}, "top_logprobs"),
        ("chat_completions", "messages", {"seed": 1}, "seed"),
        ("chat_completions", "messages", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("chat_completions", "messages", {"temperature": 1.5}, "temperature"),
        (
            "chat_completions",
            "messages",
            {"response_format": {"type": "json_object"}},
            "response_format.type",
        ),
    ],
)
def test_what_the_target_cannot_say_is_refused_by_name_and_let_go_only_where_allowed(
    source: str, target: str, body: dict[str, Any], field: str
) -> None:
    turns: dict[str, Any] = {"input": "hi"} if source == "responses" else {"messages": [USER]}
    assert refused(source, target, turns | body) == field
    bare = field.replace("[0]", "")
    assert plan(source, target, turns | body, bare).dropped == (bare,)


@pytest.mark.clause("SF-10")
def test_values_that_say_what_is_so_anyway_are_no_reason_to_refuse() -> None:
    body = {
        "messages": [USER],
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0,
        "seed": None,
        "store": False,
    }
    assert plan("chat_completions", "messages", body).dropped == ()


@pytest.mark.clause("SF-10")
def test_vendor_fields_pass_with_their_values() -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"a": None, "b": [2**60 + 1]}, "max_tokens": 3}
    value = made("messages", "chat_completions", body)
    assert value["chat_template_kwargs"] == {"a": None, "b": [2**60 + 1]}


@pytest.mark.clause("SF-10")
def test_broken_arguments_and_foreign_kinds_are_refused_by_name() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    field = "messages[1].tool_calls[0].function.arguments"
    assert refused("chat_completions", "messages", {"messages": [USER, turn]}) == field
    assert refused("messages", "chat_completions", {"messages": "hi"}) == "messages"
    assert refused("messages", "chat_completions", {"messages": [{"role": "user"}]}) == "messages[0].content"
    audio = {"type": "input_audio", "input_audio": {}}
    content = {"messages": [{"role": "user", "content": [audio]}]}
    assert refused("chat_completions", "messages", content) == "messages[0].content[0].type"
    assert (
        refused("responses", "chat_completions", {"input": [{"type": "item_reference"}]}) == "input[0].type"
    )


@pytest.mark.clause("SF-10")
def test_a_request_survives_the_way_there_and_back() -> None:
    body = {
        "messages": [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why"}],
        "system": "S",
        "max_tokens": 5,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"effort": "high"},
    }
    chat = made("messages", "chat_completions", body)
    back = made("chat_completions", "messages", chat)
    assert made("messages", "chat_completions", back) == chat
    assert back["tool_choice"] == body["tool_choice"]
    assert back["output_config"] == body["output_config"]
