"""The engine's generation events as OpenAI answers: whole objects and stream chunks of chat and
completions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from iop.engine import Finished, TokenChunk, TokenLogprob, TokenScore, Usage

__all__ = ["AnswerShape", "ChatShape", "ChoiceState", "CompletionShape", "echo_prompt", "sse_data"]


def sse_data(value: object) -> bytes:
    """One server-sent event with ``value`` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


@dataclass(slots=True)
class ChoiceState:
    """What one alternative has said so far. A text among ``logprobs`` is a token that nothing predicted."""

    index: int
    is_begun: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | str] = field(default_factory=list)
    text_length: int = 0
    finish: Finished | None = None


class AnswerShape(Protocol):
    """How one route words its answers. ``choice`` carries what was already said."""

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """The chunk that opens an alternative, if the route has one."""
        ...

    def piece(self, choice: ChoiceState, chunk: TokenChunk) -> dict[str, Any]:
        """A stream chunk with some text."""
        ...

    def closing(self, choice: ChoiceState, finished: Finished) -> dict[str, Any]:
        """The stream chunk with an alternative's finish reason."""
        ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last stream chunk, when usage was asked for."""
        ...

    def whole(self, choices: list[ChoiceState], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        ...


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
    }


def _finish_reason(finished: Finished) -> str:
    return finished.reason.value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What every object of one answer repeats; ``fingerprint`` names the weights at acceptance."""

    answer_id: str
    created: int
    model: str
    fingerprint: str
    has_logprobs: bool
    has_usage: bool

    def envelope(self, kind: str, choices: list[dict[str, Any]], *, is_stream: bool) -> dict[str, Any]:
        """An object of this answer."""
        value: dict[str, Any] = {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        if is_stream and self.has_usage:
            value["usage"] = None
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape(_Shape):
    """Chat completions."""

    def _chunk(
        self, index: int, delta: dict[str, Any], *, finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta}
        if self.has_logprobs:
            choice["logprobs"] = logprobs
        choice["finish_reason"] = finish
        return self.envelope("chat.completion.chunk", [choice], is_stream=True)

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """The role comes first."""
        return self._chunk(choice.index, {"role": "assistant", "content": ""})

    def piece(self, choice: ChoiceState, chunk: TokenChunk) -> dict[str, Any]:
        """Text, and its log probabilities."""
        logprobs = (
            {"content": [_chat_logprob(item) for item in chunk.logprobs]} if self.has_logprobs else None
        )
        return self._chunk(choice.index, {"content": chunk.text}, logprobs=logprobs)

    def closing(self, choice: ChoiceState, finished: Finished) -> dict[str, Any]:
        """The finish reason."""
        return self._chunk(choice.index, {}, finish=_finish_reason(finished))

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Empty choices mark the usage chunk for clients."""
        return self.envelope("chat.completion.chunk", [], is_stream=True) | {"usage": _usage(usage)}

    def whole(self, choices: list[ChoiceState], usage: Usage) -> dict[str, Any]:
        """One message per alternative."""
        rendered = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": {
                    "content": [_chat_logprob(item) for item in choice.logprobs if not isinstance(item, str)]
                }
                if self.has_logprobs
                else None,
                "finish_reason": _finish_reason(choice.finish) if choice.finish else None,
            }
            for choice in choices
        ]
        return self.envelope("chat.completion", rendered, is_stream=False) | {"usage": _usage(usage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape(_Shape):
    """Text completions."""

    def _chunk(
        self, index: int, text: str, *, finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self.envelope("text_completion", [choice], is_stream=True)

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """Nothing, unless the prompt is echoed: then it comes first."""
        if not choice.texts:
            return None
        logprobs = _completion_logprobs(choice.logprobs, 0) if self.has_logprobs else None
        return self._chunk(choice.index, "".join(choice.texts), logprobs=logprobs)

    def piece(self, choice: ChoiceState, chunk: TokenChunk) -> dict[str, Any]:
        """Text, and its log probabilities."""
        logprobs = _completion_logprobs(chunk.logprobs, choice.text_length) if self.has_logprobs else None
        return self._chunk(choice.index, chunk.text, logprobs=logprobs)

    def closing(self, choice: ChoiceState, finished: Finished) -> dict[str, Any]:
        """The finish reason."""
        return self._chunk(choice.index, "", finish=_finish_reason(finished))

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Empty choices mark the usage chunk for clients."""
        return self.envelope("text_completion", [], is_stream=True) | {"usage": _usage(usage)}

    def whole(self, choices: list[ChoiceState], usage: Usage) -> dict[str, Any]:
        """One text per alternative."""
        rendered = [
            {
                "index": choice.index,
                "text": "".join(choice.texts),
                "logprobs": _completion_logprobs(choice.logprobs, 0) if self.has_logprobs else None,
                "finish_reason": _finish_reason(choice.finish) if choice.finish else None,
            }
            for choice in choices
        ]
        return self.envelope("text_completion", rendered, is_stream=False) | {"usage": _usage(usage)}


def echo_prompt(choice: ChoiceState, text: str, scores: list[TokenLogprob | str]) -> None:
    """Put the prompt in front of what the alternative will say."""
    choice.texts.append(text)
    choice.text_length += len(text)
    choice.logprobs.extend(scores)


def _score(score: TokenScore) -> dict[str, Any]:
    return {"token": score.text, "logprob": score.logprob, "bytes": list(score.token_bytes)}


def _chat_logprob(item: TokenLogprob) -> dict[str, Any]:
    return _score(item.chosen) | {"top_logprobs": [_score(score) for score in item.top]}


def _completion_logprobs(
    items: tuple[TokenLogprob, ...] | list[TokenLogprob | str], start: int
) -> dict[str, Any]:
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    offset = start
    for item in items:
        offsets.append(offset)
        if isinstance(item, str):
            tokens.append(item)
            values.append(None)
            tops.append(None)
        else:
            tokens.append(item.chosen.text)
            values.append(item.chosen.logprob)
            tops.append({score.text: score.logprob for score in item.top} if item.top else None)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
