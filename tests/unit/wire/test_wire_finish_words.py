"""How an output's end is told where the schema has no word for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.wire.finish_words import FinishWords, finish_words, read_finish_words

pytestmark = pytest.mark.clause("SF-24", "EN-65", "EN-66")

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize("reason", ["", "stop", "length", "cancelled"])
def test_what_the_schema_says_needs_no_words(reason: str) -> None:
    assert finish_words(reason) == ""
    assert read_finish_words("") == FinishWords()


def test_a_reason_of_its_own_is_the_message() -> None:
    assert finish_words("content_filter") == "content_filter"
    assert read_finish_words("content_filter").reason == "content_filter"


@pytest.mark.parametrize("message", ["aborted by its caller", "{not json", "{}", '{"tool_calls": 3}', "[1]"])
def test_an_engines_words_for_people_are_no_reason(message: str) -> None:
    assert read_finish_words(message) == FinishWords()


@given(
    calls=st.lists(st.just(CALL), max_size=3),
    reason=st.sampled_from(["stop", "length", "tool_calls", "content_filter"]),
    is_fallback=st.booleans(),
)
def test_what_is_told_is_read(calls: list[dict[str, Any]], reason: str, is_fallback: bool) -> None:
    told = read_finish_words(finish_words(reason, tool_calls=calls, is_text_fallback=is_fallback))
    assert list(told.tool_calls) == calls
    assert told.is_text_fallback is is_fallback
    if calls or is_fallback:
        assert told.reason == reason


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(message: str) -> None:
    read_finish_words(message)
    read_finish_words("{" + message)
