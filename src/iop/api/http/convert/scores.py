"""Log probabilities of tokens, which chats and responses both tell, in nearly the same words."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Final, TypeAlias

__all__ = ["RESPONSES_INCLUDE", "Score", "chat_scores", "read_scores", "response_scores", "scores_within"]

Score: TypeAlias = Mapping[str, Any]
"""One token as its provider told it: ``token``, ``logprob``, and perhaps ``bytes`` and ``top_logprobs``."""

RESPONSES_INCLUDE: Final = "message.output_text.logprobs"
"""How responses are asked for them."""


def read_scores(value: Any) -> tuple[Score, ...]:
    """The scores of a list; whatever is none is left out."""
    if not isinstance(value, list):
        return ()
    return tuple(each for each in value if isinstance(each, dict) and _is_score(each))


def scores_within(scores: tuple[Score, ...], text: str, *, after: str) -> tuple[Score, ...]:
    """Those of the tokens that make up ``text``, of an answer with reasoning, which it stands ``after``, or calls.

    All of them, where tokens and text do not meet: better some too many than some lost.
    """
    starts = [0, *accumulate(len(score["token"]) for score in scores)]
    joined = "".join(score["token"] for score in scores)
    before = joined.find(after)
    start = joined.find(text, max(before, 0) + (len(after) if before >= 0 else 0))
    first, last = bisect_left(starts, start), bisect_left(starts, start + len(text))
    if start < 0 or starts[first] != start or starts[last] != start + len(text):
        return scores
    return scores[first:last]


def chat_scores(scores: Iterable[Score]) -> dict[str, Any] | None:
    """As a choice's ``logprobs``; None for none."""
    told = [_worded(score, no_bytes=None) for score in scores]
    return {"content": told, "refusal": None} if told else None


def response_scores(scores: Iterable[Score]) -> list[dict[str, Any]]:
    """As the ``logprobs`` of a part."""
    return [_worded(score, no_bytes=[]) for score in scores]


def _is_score(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("token"), str) and isinstance(value.get("logprob"), int | float)


def _worded(score: Score, *, no_bytes: Any) -> dict[str, Any]:
    others = [_one(other, no_bytes) for other in read_scores(score.get("top_logprobs"))]
    return {**_one(score, no_bytes), "top_logprobs": others}


def _one(score: Score, no_bytes: Any) -> dict[str, Any]:
    told = score.get("bytes")
    return {
        "token": score["token"],
        "logprob": score["logprob"],
        "bytes": told if isinstance(told, list) else no_bytes,
    }
