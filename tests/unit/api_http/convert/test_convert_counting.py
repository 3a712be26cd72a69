"""A token count as a tokenizer's request, and its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iop.adapters.profiles import DEFAULT_PROFILE, VLLM_PROFILE
from iop.api.http.convert.counting import count_of, tokenize_request
from iop.api.http.convert.plan import conversion_for
from iop.core.errors import InvalidRequest


def made(body: dict[str, Any]) -> dict[str, Any]:
    parts, size = tokenize_request(json.dumps({"model": "public", **body}).encode(), model="real")
    whole = b"".join(parts)
    assert size == len(whole)
    value: dict[str, Any] = json.loads(whole)
    return value


@pytest.mark.clause("SF-14")
def test_only_what_becomes_prompt_is_sent_to_the_tokenizer() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "seen"}
    value = made(
        {
            "max_tokens": 9,
            "container": "c",
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "messages": [
                {"role": "user", "content": "hi \ud800"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
        }
    )
    assert set(value) == {"model", "messages", "add_generation_prompt"}
    assert (value["model"], value["add_generation_prompt"]) == ("real", True)
    assert [message["role"] for message in value["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.clause("SF-14")
@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hi"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}
            ]
        },
        {"messages": [], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
)
def test_what_a_tokenizer_of_text_cannot_count_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        made(body)


@pytest.mark.clause("SF-14")
def test_counts_are_asked_of_the_tokenizer_only_where_there_is_no_route_for_them() -> None:
    assert conversion_for("count_tokens", frozenset({"count_tokens", "tokenize"})) is None
    assert conversion_for("count_tokens", frozenset({"chat_completions", "tokenize"})) == "tokenize"
    assert conversion_for("count_tokens", frozenset({"chat_completions"})) is None
    assert VLLM_PROFILE.operations["tokenize"].path == "/tokenize"
    assert "tokenize" not in DEFAULT_PROFILE.operations


@pytest.mark.clause("SF-14")
def test_only_a_whole_number_is_a_count() -> None:
    assert count_of(b'{"count":5,"max_model_len":1024,"tokens":[77]}') == 5
    for body in (b"", b"[]", b"{}", b'{"count":-1}', b'{"count":"5"}', b'{"count":true}', b'{"count":1.5}'):
        assert count_of(body) is None


@pytest.mark.clause("SF-14")
@pytest.mark.parametrize("number", ["9" * 5000, "1e999"])
def test_a_number_that_cannot_be_written_again_is_not_sent_to_a_tokenizer(number: str) -> None:
    schema = '[{"name":"f","input_schema":{"n":%s}}]' % number  # noqa: UP031 - braces
    body = '{"model":"public","messages":[],"tools":%s}' % schema  # noqa: UP031 - braces
    with pytest.raises(InvalidRequest, match="too large"):
        tokenize_request(body.encode(), model="real")
