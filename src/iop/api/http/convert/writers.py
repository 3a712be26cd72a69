"""Neutral events as answers of a dialect: what writers have in common, and chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from iop.api.http.convert.blocks import BlockKind, Blocks, Move
from iop.api.http.convert.events import Begin, Counted, Event, Failure, Finish, Stop
from iop.api.http.convert.scores import Score, chat_scores
from iop.api.http.json_text import json_text

__all__ = ["AnswerTerms", "ChatWriter", "Writer", "cut_failure", "data_event", "named_event"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTerms:
    """What the answer's frame needs besides the provider's events.

    Attributes:
        request_id: makes the answer's ids.
        created: seconds since 1970.
        shown_model: name to show instead of the provider's (SF-15).
        fallback_model: name to show where the provider tells none.
        has_usage: whether a chat stream ends with a usage chunk.
        has_both_names: whether chats say reasoning under both of its names (SF-15).
        echo: fields of the request that a Responses object repeats.
    """

    request_id: str
    created: int
    shown_model: str | None = None
    fallback_model: str = ""
    has_usage: bool = False
    has_both_names: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)


class Writer(Protocol):
    """Words one answer, whole or streamed."""

    def feed(self, events: Iterable[Event]) -> bytes:
        """Stream bytes for events; failures are not among them."""
        ...

    def end(self) -> bytes:
        """Stream bytes of a success's end."""
        ...

    def fail(self, failure: Failure) -> bytes:
        """Stream bytes of the dialect's in-band error; no success marker follows."""
        ...

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """The whole answer as one object."""
        ...


def data_event(value: Mapping[str, Any]) -> bytes:
    """One event without a name."""
    return b"data: " + json_text(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One event named by its type."""
    kind: str = value["type"]
    return b"event: " + kind.encode() + b"\ndata: " + json_text(value) + b"\n\n"


def cut_failure() -> Failure:
    """What a stream that ended too early is told as (SF-14)."""
    return Failure(
        message="The provider's answer ended before it was whole.",
        code="upstream_truncated",
        kind="server_error",
    )


class Gathering:
    """State that every writer keeps: model, blocks, stop, counts."""

    __slots__ = ("blocks", "counted", "finish", "has_begun", "model", "terms")

    def __init__(self, terms: AnswerTerms) -> None:
        self.terms = terms
        self.blocks = Blocks()
        self.finish = Finish(stop=Stop.END)
        self.counted: Counted | None = None
        self.has_begun = False
        self.model = terms.shown_model or terms.fallback_model

    def note(self, event: Event) -> None:
        """Keep what belongs to the answer's frame."""
        match event:
            case Begin(model=model):
                if self.terms.shown_model is None and model:
                    self.model = model
            case Finish():
                self.finish = event
            case Counted():
                self.counted = event
            case _:
                pass

    @property
    def stop(self) -> Stop:
        """The stop reason; an answer that calls tools ended for that, whatever an engine says."""
        if self.blocks.has_tools and self.finish.stop is Stop.END:
            return Stop.TOOLS
        return self.finish.stop

    def gather(self, events: Iterable[Event]) -> None:
        """Take a whole answer."""
        for event in events:
            self.note(event)
            self.blocks.feed(event)
        self.blocks.finish()

    def joined(self, kind: BlockKind) -> str:
        """All text of one kind."""
        return "".join(block.text for block in self.blocks.all if block.kind is kind)


_CHAT_STOPS: Final = {
    Stop.END: "stop",
    Stop.SEQUENCE: "stop",
    Stop.LENGTH: "length",
    Stop.TOOLS: "tool_calls",
    Stop.FILTER: "content_filter",
}


class ChatWriter(Gathering):
    """Chat completions."""

    __slots__ = ("_places",)

    def __init__(self, terms: AnswerTerms) -> None:
        super().__init__(terms)
        self._places: dict[int, int] = {}

    def feed(self, events: Iterable[Event]) -> bytes:
        """Chunks; the role comes first."""
        out: list[bytes] = []
        for event in events:
            self.note(event)
            if not self.has_begun:
                self.has_begun = True
                out.append(self._chunk({"role": "assistant", "content": ""}))
            out += self._steps(self.blocks.feed(event))
        return b"".join(out)

    def end(self) -> bytes:
        """The finish reason, the usage chunk if it was asked for, and the terminator."""
        out = [self.feed([Begin(model="")])] if not self.has_begun else []
        out += self._steps(self.blocks.finish())
        out.append(self._chunk({}, finish=_CHAT_STOPS[self.stop]))
        if self.terms.has_usage:
            out.append(data_event({**self._frame(), "choices": [], "usage": _usage(self.counted)}))
        out.append(b"data: [DONE]\n\n")
        return b"".join(out)

    def fail(self, failure: Failure) -> bytes:
        """An error object in a data event, no terminator."""
        return data_event(
            {
                "error": {
                    "message": failure.message,
                    "type": failure.kind or "server_error",
                    "param": None,
                    "code": failure.code or "upstream_error",
                }
            }
        )

    def whole(self, events: Iterable[Event]) -> dict[str, Any]:
        """A ``chat.completion`` object."""
        self.gather(events)
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in self.blocks.all
            if block.kind is BlockKind.TOOL
        ]
        text = self.joined(BlockKind.TEXT)
        refusal = self.joined(BlockKind.REFUSAL)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if (calls or refusal) and not text else text,
            "refusal": refusal or None,
        }
        if reasoning := self.joined(BlockKind.REASONING):
            message["reasoning_content"] = reasoning
            if self.terms.has_both_names:
                message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": chat_scores(score for block in self.blocks.all for score in block.scores),
            "finish_reason": _CHAT_STOPS[self.stop],
        }
        answer = {**self._frame(), "object": "chat.completion", "choices": [choice]}
        if self.counted is not None:
            answer["usage"] = _usage(self.counted)
        return answer

    def _steps(self, steps: Iterable[Any]) -> list[bytes]:
        out = []
        for step in steps:
            block = step.block
            if block.kind is BlockKind.TOOL:
                place = self._places.setdefault(block.index, len(self._places))
                if step.move is Move.OPEN:
                    head = {"name": block.name, "arguments": ""}
                    call = {"index": place, "id": block.id, "type": "function", "function": head}
                    out.append(self._chunk({"tool_calls": [call]}))
                elif step.move is Move.GROW:
                    call = {"index": place, "function": {"arguments": step.text}}
                    out.append(self._chunk({"tool_calls": [call]}))
            elif step.move is Move.GROW:
                delta = {_CHAT_NAMES[block.kind]: step.text}
                if self.terms.has_both_names and block.kind is BlockKind.REASONING:
                    delta["reasoning"] = step.text
                out.append(self._chunk(delta, scores=step.scores))
                block.scores.clear()  # nothing later tells them again, and they are many times their text
        return out

    def _chunk(
        self, delta: Mapping[str, Any], *, finish: str | None = None, scores: Sequence[Score] = ()
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": chat_scores(scores), "finish_reason": finish}
        value = {**self._frame(), "choices": [choice]}
        if self.terms.has_usage:
            value["usage"] = None
        return data_event(value)

    def _frame(self) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.terms.request_id}",
            "object": "chat.completion.chunk",
            "created": self.terms.created,
            "model": self.model,
        }


_CHAT_NAMES: Final = {
    BlockKind.TEXT: "content",
    BlockKind.REFUSAL: "refusal",
    BlockKind.REASONING: "reasoning_content",
}


def _usage(counted: Counted | None) -> dict[str, Any]:
    counted = counted or Counted()
    usage: dict[str, Any] = {
        "prompt_tokens": counted.prompt,
        "completion_tokens": counted.answer,
        "total_tokens": counted.prompt + counted.answer,
    }
    if counted.cached:
        usage["prompt_tokens_details"] = {"cached_tokens": counted.cached}
    if counted.reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": counted.reasoning}
    return usage
