"""How an output's end is told in ``GenerationFinished.message`` where the schema has no word for it. Pure.

OpenEngine knows three reasons and no tool calls. A plain other reason, such as ``content_filter``, is the message
itself; tool calls travel in a JSON object, which only callers that sent a chat with tools get to see (SF-24).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["FinishWords", "finish_words", "read_finish_words"]

REASON_CHARS_MAX: Final = 64
"""Longest reason that is passed on; the known ones have at most 16 characters."""

_PLAIN: Final = frozenset({"", "stop", "length", "cancelled", "eos"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishWords:
    """What a message told.

    Attributes:
        reason: empty: the schema's own reason is all.
        tool_calls: in OpenAI's form.
        is_text_fallback: the tools were explained in words, so the text may hold the calls (EN-66).
    """

    reason: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    is_text_fallback: bool = False


def finish_words(
    reason: str, *, tool_calls: Sequence[dict[str, Any]] = (), is_text_fallback: bool = False
) -> str:
    """The message for an output that ended so; empty where the schema says it all."""
    if not tool_calls and not is_text_fallback:
        return "" if reason in _PLAIN else reason[:REASON_CHARS_MAX]
    told: dict[str, Any] = {"finish_reason": reason[:REASON_CHARS_MAX]}
    if tool_calls:
        told["tool_calls"] = list(tool_calls)
    if is_text_fallback:
        told["text_tool_fallback"] = True
    return json.dumps(told, separators=(",", ":"))


def read_finish_words(message: str) -> FinishWords:
    """The reverse; a message that is not in this form is no reason."""
    if not message.startswith("{"):
        # An engine's own words for people may stand here; a reason is one word.
        return FinishWords(
            reason=message if message.isidentifier() and len(message) <= REASON_CHARS_MAX else ""
        )
    try:
        told = json.loads(message)
    except (ValueError, RecursionError):
        return FinishWords()
    if not isinstance(told, dict):
        return FinishWords()
    reason, calls = told.get("finish_reason"), told.get("tool_calls")
    return FinishWords(
        reason=reason if isinstance(reason, str) else "",
        tool_calls=tuple(call for call in calls if isinstance(call, dict)) if isinstance(calls, list) else (),
        is_text_fallback=told.get("text_tool_fallback") is True,
    )
