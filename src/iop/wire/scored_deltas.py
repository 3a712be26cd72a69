"""Deltas of a run that carry the scores of their tokens: one line of JSON each (EN-43, EN-102). Pure.

Text alone cannot say how likely its tokens were, and a delta has no field for it. Where both sides know the word
(:data:`iop.wire.run_metadata.SCORED_DELTAS`), a delta's text is such lines instead, all of which counts against credit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from iop.core.errors import RemoteProtocolError

__all__ = ["LEAST_LOGPROB", "ScoredLines", "ScoredToken", "scored_line"]

LEAST_LOGPROB: Final = -9999.0
"""What stands for a logarithm of nothing, which JSON cannot say."""

LINE_BYTES_MAX: Final = 1024 * 1024
"""Longest line; twenty candidates for each of some hundred tokens have a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredToken:
    """One token of an answer.

    Attributes:
        logprob: natural logarithm of its probability; None: not told.
        candidates: other tokens at its place, as many as were asked for.
    """

    token: str
    logprob: float | None = None
    candidates: tuple[tuple[str, float], ...] = ()


_DECODER: Final = msgspec.json.Decoder(tuple[str, list[tuple[str, float | None, list[tuple[str, float]]]]])


def scored_line(text: str, tokens: Iterable[ScoredToken]) -> str:
    """One step of an output: its text, and the tokens that it comes of."""
    told = [
        [
            each.token,
            None if each.logprob is None else _finite(each.logprob),
            [[name, _finite(value)] for name, value in each.candidates],
        ]
        for each in tokens
    ]
    return json.dumps([text, told], separators=(",", ":")) + "\n"


class ScoredLines:
    """Reads one output's lines, however its deltas were cut."""

    __slots__ = ("_rest", "_rest_size")

    def __init__(self) -> None:
        self._rest: list[str] = []
        self._rest_size = 0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of a line is left that has not come to its end."""
        return not self._rest_size

    def feed(self, delta: str) -> Sequence[tuple[str, tuple[ScoredToken, ...]]]:
        """The steps that are whole.

        Raises:
            RemoteProtocolError: a line is none, or too long.
        """
        head, *more = delta.split("\n")
        self._rest.append(head)
        self._rest_size += len(head)
        lines: list[str] = []
        if more:
            *whole, rest = more
            lines = ["".join(self._rest), *whole]
            self._rest, self._rest_size = [rest], len(rest)
        if self._rest_size > LINE_BYTES_MAX:
            raise RemoteProtocolError("a scored delta has no end")
        steps = []
        for line in lines:
            try:
                text, told = _DECODER.decode(line)
            except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
                raise RemoteProtocolError("a scored delta cannot be read") from None
            tokens = tuple(
                ScoredToken(token=token, logprob=logprob, candidates=tuple(others))
                for token, logprob, others in told
            )
            steps.append((text, tokens))
        return steps


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB
