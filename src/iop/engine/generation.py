"""What a caller asks of the engine and what it gets back: frozen data, no behaviour beyond validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final, TypeAlias

from iop.core.errors import InvalidRequest

__all__ = [
    "ChatMessage",
    "ChatPrompt",
    "FinishReason",
    "Finished",
    "GenerationEvent",
    "GenerationRequest",
    "PromptScored",
    "Sampling",
    "StopMatch",
    "Stopping",
    "TokenChunk",
    "TokenLogprob",
    "TokenScore",
    "Usage",
]

SEQUENCES_MAX: Final = 16
"""Most alternatives (`n`) of one request. More would let one request hold every running slot."""

TOP_LOGPROBS_MAX: Final = 20
"""Most alternatives listed per token; bounds the size of an event."""

STOPS_MAX: Final = 16
"""Most stop strings or stop tokens of one request; each is searched for at every token."""

STOP_CHARS_MAX: Final = 256
"""Longest stop string; that much text may have to be held back while it could still become one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation.

    ``role`` is one of ``system``, ``developer``, ``user``, ``assistant``, ``tool``.
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation rendered for the model.

    ``text`` is for people; ``token_ids`` is what to generate from. They differ in one way that matters: marks such as
    ``<|end|>`` inside a message's content are plain text in ``token_ids``, so that content cannot forge a turn.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 is greedy: the likeliest token, the lower id on a tie.

    Order: penalties, temperature, ``top_k``, ``top_p``, ``min_p``. ``top_k`` 0 means no limit. ``seed`` None draws one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a sequence ends.

    ``max_tokens`` None means up to the context's end. Below ``min_tokens`` no end-of-text, stop string or stop token is
    taken. ``stop`` strings are cut from the text unless ``include_stop_in_output``.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request. ``prompt`` is text, or token ids such as ``ChatPrompt.token_ids``.

    Attributes:
        request_id: unique among the live ones; names the request in ``Engine.abort``.
        n: alternatives to generate, each with its own ``index`` in the events.
        logprobs: None for none; 0 for the chosen token's only; k for the k likeliest beside it.
        prompt_logprobs: the same for the prompt's tokens; computing them skips the prefix cache.
        priority: lower values are admitted first; equal ones in order of arrival.
    """

    request_id: str
    prompt: str | tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0

    def validate(self, *, vocabulary_size: int, context_tokens: int) -> None:
        """Check every range that does not need the tokenised prompt.

        Raises:
            InvalidRequest: names the field and what it may be.
        """
        sampling, stopping = self.sampling, self.stopping
        _in_range("temperature", sampling.temperature, 0.0, 100.0)
        _in_range("top_p", sampling.top_p, 0.0, 1.0)
        _in_range("min_p", sampling.min_p, 0.0, 1.0)
        _in_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
        _in_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
        if sampling.top_p == 0.0:
            raise _invalid("top_p", "must be above 0")
        if sampling.top_k < -1:
            raise _invalid("top_k", "must be 0 (no limit), -1 (no limit) or positive")
        if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**64:
            raise _invalid("seed", "must be a 64-bit integer")
        if not 1 <= self.n <= SEQUENCES_MAX:
            raise _invalid("n", f"must be from 1 to {SEQUENCES_MAX}")
        if stopping.max_tokens is not None and not 1 <= stopping.max_tokens < 2**31:
            raise _invalid("max_tokens", "must be from 1 to 2147483647")
        if stopping.min_tokens < 0:
            raise _invalid("min_tokens", "must not be negative")
        if stopping.max_tokens is not None and stopping.min_tokens > stopping.max_tokens:
            raise _invalid("min_tokens", "must not exceed max_tokens")
        if stopping.min_tokens > context_tokens:
            raise _invalid("min_tokens", f"must not exceed the context of {context_tokens} tokens")
        if len(stopping.stop) > STOPS_MAX or len(stopping.stop_token_ids) > STOPS_MAX:
            raise _invalid("stop", f"must hold at most {STOPS_MAX} entries")
        if any(not 1 <= len(text) <= STOP_CHARS_MAX for text in stopping.stop):
            raise _invalid("stop", f"each string must have 1 to {STOP_CHARS_MAX} characters")
        for name, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is not None and not 0 <= wanted <= TOP_LOGPROBS_MAX:
                raise _invalid(name, f"must be from 0 to {TOP_LOGPROBS_MAX}")
        ids = (*stopping.stop_token_ids, *(self.prompt if isinstance(self.prompt, tuple) else ()))
        if any(not 0 <= token < vocabulary_size for token in ids):
            raise _invalid("token_ids", f"each must be from 0 to {vocabulary_size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScore:
    """One candidate at one position. ``rank`` is 1 for the likeliest; ``logprob`` is natural and of the raw model."""

    token_id: int
    text: str
    token_bytes: bytes
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """The chosen token's score and the likeliest alternatives, best first (the chosen one included if it is there)."""

    chosen: TokenScore
    top: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Scores of the prompt's tokens, once, before the first chunk.

    Entry 0 of ``logprobs`` is None: nothing predicts the first token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Some text of sequence ``index``.

    ``text`` is always whole characters and never part of a stop string, so it may be empty while ``token_ids`` is not;
    the chunks' texts joined are the answer. ``logprobs`` has one entry per token id when asked for, else is empty.
    ``weight_version`` names the weights that produced these tokens (AD-33).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    weight_version: str


@unique
class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """What stopped a sequence: exactly one of the three is set."""

    text: str | None = None
    token_id: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted. ``cached_prompt_tokens`` were taken from the prefix cache and not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Sequence ``index`` ended. The last of a request's ``n`` has ``usage``; nothing follows that one.

    ``message`` says for people why an operator ended it (reason ABORTED). ``weight_versions`` lists the versions that
    produced this sequence's tokens in order; more than one only when an update kept work in flight (AD-33).
    """

    index: int
    reason: FinishReason
    stop: StopMatch | None = None
    message: str = ""
    weight_versions: tuple[str, ...] = ()
    usage: Usage | None = None


GenerationEvent: TypeAlias = PromptScored | TokenChunk | Finished


def _invalid(name: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"`{name}` {rule}.", details={"field": name})


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise _invalid(name, f"must be a number from {low:g} to {high:g}")
