"""Rules of a model change what they are about, whatever else a body says and however it is written (SF-15)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iop.api.http.rewrite import rewrite_chat, rewritten_parts, with_reasoning_names
from iop.api.http.splice import read_fields

VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)})
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": st.none() | st.text(max_size=8) | st.lists(PART, max_size=2),
    },
    optional={"vendor": VALUE},
)
STYLE = st.sampled_from(
    [
        {"separators": (",", ":")},
        {"indent": 1},
        {"ensure_ascii": False, "separators": (" , ", " :\t")},
    ]
)
REST: dict[str, Any] = {"more": st.dictionaries(st.text(max_size=4), VALUE, max_size=3), "style": STYLE}
"""What else stands in a body, and how it is written."""

SPECIAL = {"system", "developer"}


def written(body: dict[str, Any], style: dict[str, Any]) -> bytes:
    return json.dumps(body, **style).encode("utf-8", "surrogatepass")


def merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rule means, said slowly."""
    places = [number for number, message in enumerate(messages) if message["role"] in SPECIAL]
    if not places or (places == [0] and messages[0]["role"] == "system"):
        return messages
    contents = [messages[number]["content"] for number in places if messages[number]["content"] is not None]
    content: Any
    if all(isinstance(each, str) for each in contents):
        content = "\n\n".join(contents)
    else:
        content = []
        for each in contents:
            content += [{"type": "text", "text": each}] if isinstance(each, str) else each
    others = [message for message in messages if message["role"] not in SPECIAL]
    return [{"role": "system", "content": content}, *others]


@pytest.mark.clause("SF-15")
@settings(max_examples=200)
@given(messages=st.lists(MESSAGE, max_size=6), **REST)
def test_merging_is_what_it_says_and_touches_nothing_else(
    messages: list[dict[str, Any]], more: dict[str, Any], style: dict[str, Any]
) -> None:
    body = more | {"model": "fast", "messages": messages, "stream": True}
    data = written(body, style)
    out = rewrite_chat(data, {"merge_system"}, is_stream=True)
    assert json.loads(out) == body | {"messages": merged(messages)}
    assert rewrite_chat(out, {"merge_system"}, is_stream=True) is out, "once is enough"
    fields = read_fields(data, depth_max=60)
    parts = b"".join(rewritten_parts(fields, "real", {"merge_system", "include_usage"}, is_chat=True))
    usage = {"stream_options": {"include_usage": True}}
    assert json.loads(parts) == body | usage | {"messages": merged(messages), "model": "real"}


DELTA = st.fixed_dictionaries(
    {},
    optional={
        "reasoning": st.none() | st.text(max_size=8),
        "reasoning_content": st.none() | st.text(max_size=8),
        "content": st.none() | st.text(max_size=8),
        "vendor": VALUE,
    },
)
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 3)}, optional={"delta": DELTA, "message": DELTA, "x": VALUE}
)


@pytest.mark.clause("SF-15")
@settings(max_examples=200)
@given(choices=st.lists(CHOICE, max_size=4), **REST)
def test_both_names_say_the_same_and_nothing_else_changes(
    choices: list[dict[str, Any]], more: dict[str, Any], style: dict[str, Any]
) -> None:
    answer = more | {"choices": choices}
    out = with_reasoning_names(written(answer, style))
    for choice in choices:
        for key in ("delta", "message"):
            said = choice.get(key, {})
            for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
                if isinstance(said.get(name), str) and other not in said:
                    said[other] = said[name]
                    break
    assert json.loads(out) == answer
    assert with_reasoning_names(out) == out


@pytest.mark.clause("SF-15", "SF-12")
@given(data=st.binary(max_size=60))
def test_rubbish_passes_as_it_is(data: bytes) -> None:
    assert with_reasoning_names(data) == data
    assert with_reasoning_names(b'{"choices":[' + data) == b'{"choices":[' + data
