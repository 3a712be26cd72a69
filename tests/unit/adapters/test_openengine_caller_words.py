"""A refusal of an OpenEngine server names the field that the caller wrote (SF-10)."""

from __future__ import annotations

import pytest

from iop.adapters.openengine.caller_words import in_callers_words
from iop.core.errors import InvalidRequest, Unsupported

CHAT = {
    "messages": [],
    "n": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "top_p": 2,
    "max_completion_tokens": 1,
    "response_format": {"type": "json_object"},
}
TEXT = {"prompt": "p", "n": 2, "logprobs": 3, "max_tokens": 1, "stop": ["a"]}


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize(
    ("name", "in_chat", "in_text"),
    [
        ("sampling.num_sequences", "n", "n"),
        ("sampling.top_p", "top_p", ""),
        ("stopping.max_tokens", "max_completion_tokens", "max_tokens"),
        ("stopping.conditions", "", "stop"),
        ("response.return_output_logprobs", "logprobs", "logprobs"),
        ("response.output_candidates.top_n", "top_logprobs", "logprobs"),
        ("guided.json_object", "response_format", ""),
        ("extra.prompt_format", "messages", "prompt"),
        ("prompt", "messages", "prompt"),
        ("media", "messages", "prompt"),
        ("kv.cache_salt", "", ""),  # not of the caller's making
    ],
)
def test_the_field_is_named_as_the_caller_named_it(name: str, in_chat: str, in_text: str) -> None:
    for key in ("field", "feature"):
        error = InvalidRequest(f"engine: `{name}` is too much.", details={key: name})
        for body, own in ((CHAT, in_chat), (TEXT, in_text)):
            wanted = f"{own}: engine: `{own}` is too much." if own else error.message
            assert in_callers_words(error, body) == wanted


def test_words_that_name_no_field_stay_as_they_are() -> None:
    assert in_callers_words(Unsupported("engine: no"), CHAT) == "engine: no"
