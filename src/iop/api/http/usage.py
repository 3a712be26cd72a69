"""What whole answers say in their provider's words, as observations: token counts, and a giving up (EN-53)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from iop.api.http.sse import ABORTED
from iop.wire.messages import Usage

__all__ = ["BODY_BYTES_MAX", "usage_of", "usage_of_body", "was_given_up"]

BODY_BYTES_MAX: Final = 256 * 1024
"""Largest JSON answer that is looked into for its usage; in larger ones it would cost more than it tells."""


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer)


def usage_of_body(body: bytes) -> Usage | None:
    """Usage in a whole JSON answer, if there is some."""
    if b'"usage"' not in body:
        return None
    try:
        found = _DECODER.decode(body).usage
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    return usage_of(found) if found else None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = []


_CHOICES_DECODER: Final = msgspec.json.Decoder(_Choices)


def was_given_up(body: bytes) -> bool:
    """Whether a whole answer says that its engine gave it up: it reaches the caller so, and is no success (SF-14)."""
    if b'"abort"' not in body:
        return False
    try:
        choices = _CHOICES_DECODER.decode(body).choices
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return False
    return any(choice.finish_reason == ABORTED for choice in choices)


def usage_of(value: Mapping[str, Any]) -> Usage:
    """Usage of any of the dialects; what is missing or no number stays unknown."""
    prompt_details = _mapping(value, "prompt_tokens_details") or _mapping(value, "input_tokens_details")
    answer_details = _mapping(value, "completion_tokens_details") or _mapping(value, "output_tokens_details")
    return Usage(
        prompt_tokens=_count(value, "prompt_tokens", "input_tokens"),
        completion_tokens=_count(value, "completion_tokens", "output_tokens"),
        cached_prompt_tokens=_count(prompt_details, "cached_tokens")
        if prompt_details
        else _count(value, "cache_read_input_tokens"),
        reasoning_tokens=_count(answer_details, "reasoning_tokens"),
    )


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _count(value: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        found = value.get(name)
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**63:
            return found
    return None
