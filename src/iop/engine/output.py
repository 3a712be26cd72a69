"""One sequence's output.

Only whole characters leave it, stop strings are found across tokens, and nothing is sent that must be taken back.
"""

from __future__ import annotations

from dataclasses import dataclass

from iop.engine.generation import FinishReason, StopMatch, Stopping
from iop.engine.tokenizer import Detokenizer, Tokenizer

__all__ = ["Ending", "OutputText"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why and by what a sequence ended."""

    reason: FinishReason
    stop: StopMatch | None = None


class OutputText:
    """Turns chosen tokens into text to send and notices the end.

    Args:
        eos_token_id: the end-of-text mark.
        tokens_max: the most tokens to generate.
    """

    def __init__(
        self, tokenizer: Tokenizer, stopping: Stopping, *, eos_token_id: int, tokens_max: int
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stopping = stopping
        self._eos = eos_token_id
        self._tokens_max = tokens_max
        self._held = ""
        self.count = 0

    def banned(self) -> tuple[int, ...]:
        """Tokens that must not come yet: those that would end the sequence below ``min_tokens``."""
        if self.count >= self._stopping.min_tokens:
            return ()
        return (*(() if self._stopping.ignore_eos else (self._eos,)), *self._stopping.stop_token_ids)

    def push(self, token: int) -> tuple[str, Ending | None]:
        """Take the next token: text to send now, and the ending if this token is the last.

        The end mark and stop tokens have no text; a stop string is cut unless it was asked for.
        """
        self.count += 1
        if token == self._eos and not self._stopping.ignore_eos:
            return self._end(Ending(reason=FinishReason.STOP, stop=StopMatch(eos_token_id=token)))
        if token in self._stopping.stop_token_ids:
            if self._stopping.include_stop_in_output:
                self._held += self._detokenizer.push(token)
            return self._end(Ending(reason=FinishReason.STOP, stop=StopMatch(token_id=token)))
        self._held += self._detokenizer.push(token)
        found = self._find_stop()
        if found is not None:
            at, stop = found
            text = self._held[: at + len(stop)] if self._stopping.include_stop_in_output else self._held[:at]
            return text, Ending(reason=FinishReason.STOP, stop=StopMatch(text=stop))
        if self.count >= self._tokens_max:
            return self._end(Ending(reason=FinishReason.LENGTH))
        return self._release(), None

    def rest(self) -> str:
        """What was held back, for a sequence that is ended from outside."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return text

    def _end(self, ending: Ending) -> tuple[str, Ending]:
        return self.rest(), ending

    def _find_stop(self) -> tuple[int, str] | None:
        """The earliest stop string in the held text; of two at one place the longer."""
        if self.count < self._stopping.min_tokens:
            return None
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stopping.stop]
        at, _, stop = min((one for one in found if one[0] >= 0), default=(-1, 0, ""))
        return (at, stop) if at >= 0 else None

    def _release(self) -> str:
        """Let go of all text but an end that could still become a stop string."""
        keep = 0
        for stop in self._stopping.stop:
            for size in range(min(len(stop) - 1, len(self._held)), keep, -1):
                if stop.startswith(self._held[-size:]):
                    keep = size
                    break
        at = len(self._held) - keep
        text, self._held = self._held[:at], self._held[at:]
        return text
