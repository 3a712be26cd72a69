"""Provider answers of each dialect, whole or in stream events, as neutral events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from iop.api.http.convert.events import (
    Begin,
    Counted,
    Event,
    Failure,
    Finish,
    Reasoning,
    Stop,
    Text,
    ToolArguments,
    ToolBegin,
)
from iop.api.http.convert.scores import Score, read_scores, scores_within
from iop.api.http.json_text import json_text
from iop.api.http.sse import ABORTED

__all__ = ["ChatReader", "MessagesReader", "Reader", "failure_of"]

TEXT_CHARS_MAX: Final = 2000
"""Longest message of a provider's error that is passed on in another dialect."""


SCORES_HELD_MAX: Final = 1024
"""Most scores that wait for the text of their tokens: pieces of one character, or of what an engine holds back."""


class Reader(Protocol):
    """Reads one answer."""

    is_finished: bool
    """Whether the provider gave a finish reason or its terminator (SF-14)."""

    def feed(self, value: Mapping[str, Any]) -> list[Event]:
        """One stream event's data."""
        ...

    def whole(self, value: Mapping[str, Any]) -> list[Event]:
        """A whole answer."""
        ...

    def terminate(self) -> None:
        """The stream's ``[DONE]`` came."""
        ...

    def end(self) -> list[Event]:
        """The answer is over: what was still held back."""
        ...


_CHAT_STOPS: Final = {
    "stop": Stop.END,
    "length": Stop.LENGTH,
    "tool_calls": Stop.TOOLS,
    "function_call": Stop.TOOLS,
    "content_filter": Stop.FILTER,
}


class _Call:
    """A tool call while its name is not known yet."""

    __slots__ = ("held", "id", "is_begun", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.id = ""
        self.is_begun = False
        self.held: list[str] = []


class ChatReader:
    """Reads chat completions. Only the first choice counts: no other dialect can ask for more."""

    __slots__ = (
        "_by_index",
        "_calls",
        "_has_begun",
        "_has_given_up",
        "_id_base",
        "_is_aside",
        "_scores",
        "is_finished",
    )

    def __init__(self, *, id_base: str) -> None:
        """``id_base`` makes ids for calls that come without one."""
        self._id_base = id_base
        self._by_index: dict[int, _Call] = {}
        self._calls = 0
        self._has_begun = False
        self._has_given_up = False
        self._scores: list[Score] = []
        """Of tokens whose text has not come yet."""
        self._is_aside = False
        """Whether reasoning or a call came last: scores without a text are theirs, of which no other dialect tells."""
        self.is_finished = False

    def feed(self, value: Mapping[str, Any]) -> list[Event]:
        """One chunk. Its choice's fields may stand in ``delta`` or ``message``."""
        if value.get("error"):
            return [failure_of(value)]
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(Begin(model=as_str(value.get("model"))))
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("index", 0) == 0:
                self._choice(choice, events)
        if isinstance(usage := value.get("usage"), dict):
            events.append(_chat_counts(usage))
        return events

    def whole(self, value: Mapping[str, Any]) -> list[Event]:
        """A whole answer is one large chunk."""
        return [*self.feed(value), *self.end()]

    def terminate(self) -> None:
        """``[DONE]``: the provider says that this was all."""
        self.is_finished = not self._has_given_up

    def end(self) -> list[Event]:
        """Calls that never got a name: empty ones were none, others are told as they are; and scores that are left."""
        events: list[Event] = [Text(text="", scores=tuple(self._scores))] if self._scores else []
        self._scores = []
        for call in self._by_index.values():
            if not call.is_begun and any(call.held):
                self._begin(call, "", events)
        return events

    def _choice(self, choice: Mapping[str, Any], events: list[Event]) -> None:
        told = choice.get("logprobs")
        scores = read_scores(told.get("content")) if isinstance(told, dict) else ()
        text = ""
        delta = choice.get("delta") or choice.get("message")
        if isinstance(delta, dict):
            # Some engines say both names in every chunk, with the same text.
            thought = as_str(delta.get("reasoning_content")) or as_str(delta.get("reasoning"))
            if thought:
                events.append(Reasoning(text=thought))
            if text := _content(delta.get("content")):
                if scores and (thought or delta.get("tool_calls")):
                    scores = scores_within(scores, text, after=thought)
                events.append(Text(text=text, scores=(*self._scores, *scores)))
                self._scores = []
            self._is_aside = bool(delta.get("tool_calls") or (not text and (thought or self._is_aside)))
            if refusal := as_str(delta.get("refusal")):
                events.append(Text(text=refusal, is_refusal=True))
            calls = delta.get("tool_calls")
            for number, part in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(part, dict):
                    self._call(part, number, events)
        if scores and not text and not self._is_aside:
            self._scores += scores[: SCORES_HELD_MAX - len(self._scores)]
        reason = choice.get("finish_reason")
        if reason == ABORTED:
            self._has_given_up = True  # what follows is no success, and neither is its end (SF-14)
        elif isinstance(reason, str):
            self.is_finished = True
            sequence = choice.get("stop_reason")  # as some engines name the stop text that was met
            if reason == "stop" and isinstance(sequence, str):
                events.append(Finish(stop=Stop.SEQUENCE, sequence=sequence))
            else:
                events.append(Finish(stop=_CHAT_STOPS.get(reason, Stop.END)))

    def _call(self, part: Mapping[str, Any], number: int, events: list[Event]) -> None:
        function = part.get("function")
        function = function if isinstance(function, dict) else {}
        name, call_id = as_str(function.get("name")), as_str(part.get("id"))
        told = part.get("index")
        index = told if isinstance(told, int) else number
        call = self._by_index.get(index)
        # Another id under the same index is another call: some engines number all of them 0.
        if call is None or (call_id and call.id and call_id != call.id and name):
            call = self._by_index[index] = _Call(self._calls)
            self._calls += 1
        call.id = call.id or call_id
        if name and not call.is_begun:
            self._begin(call, name, events)
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = json_text(arguments).decode()
        if isinstance(arguments, str) and arguments:
            if call.is_begun:
                events.append(ToolArguments(slot=call.slot, text=arguments))
            else:
                call.held.append(arguments)

    def _begin(self, call: _Call, name: str, events: list[Event]) -> None:
        call.is_begun = True
        call.id = call.id or f"call_{self._id_base}_{call.slot}"
        events.append(ToolBegin(slot=call.slot, id=call.id, name=name))
        if held := "".join(call.held):
            events.append(ToolArguments(slot=call.slot, text=held))
            call.held = []


_MESSAGE_STOPS: Final = {
    "end_turn": Stop.END,
    "pause_turn": Stop.END,
    "max_tokens": Stop.LENGTH,
    "model_context_window_exceeded": Stop.LENGTH,
    "stop_sequence": Stop.SEQUENCE,
    "tool_use": Stop.TOOLS,
    "refusal": Stop.FILTER,
}


class MessagesReader:
    """Reads Anthropic messages. Blocks that chats have no word for (signatures, server tools) are left out."""

    __slots__ = ("_has_given_up", "_inputs", "_usage", "is_finished")

    def __init__(self) -> None:
        self._inputs: dict[int, str] = {}
        self._usage: dict[str, Any] = {}
        self._has_given_up = False
        self.is_finished = False

    def feed(self, value: Mapping[str, Any]) -> list[Event]:
        """One event's data."""
        match value.get("type"):
            case "message_start":
                message = as_dict(value.get("message"))
                self._count(message)
                return [Begin(model=as_str(message.get("model")))]
            case "content_block_start":
                return self._block(as_int(value.get("index")), as_dict(value.get("content_block")))
            case "content_block_delta":
                return self._delta(as_int(value.get("index")), as_dict(value.get("delta")))
            case "content_block_stop":
                return self._input(as_int(value.get("index")))
            case "message_delta":
                self._count(value)
                delta = as_dict(value.get("delta"))
                self._has_given_up = "stop_reason" in delta and delta["stop_reason"] is None
                return self._stop(delta)
            case "message_stop":
                self.is_finished = not self._has_given_up
                return []
            case "error":
                return [failure_of(value)]
            case _:
                return []

    def whole(self, value: Mapping[str, Any]) -> list[Event]:
        """A whole answer."""
        if value.get("type") == "error":
            return [failure_of(value)]
        events: list[Event] = [Begin(model=as_str(value.get("model")))]
        content = value.get("content")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            events += self._block(index, as_dict(block))
            events += self._input(index)
        self._count(value)
        return events + self._stop(value)

    def terminate(self) -> None:
        """Not this dialect's word."""

    def end(self) -> list[Event]:
        """The counts, once."""
        return []

    def _block(self, index: int, block: Mapping[str, Any]) -> list[Event]:
        match block.get("type"):
            case "text":
                return [Text(text=text)] if (text := as_str(block.get("text"))) else []
            case "thinking":
                return [Reasoning(text=text)] if (text := as_str(block.get("thinking"))) else []
            case "tool_use":
                given = block.get("input")
                if given:
                    self._inputs[index] = json_text(given).decode()
                else:
                    self._inputs[index] = ""
                return [ToolBegin(slot=index, id=as_str(block.get("id")), name=as_str(block.get("name")))]
            case _:
                return []

    def _delta(self, index: int, delta: Mapping[str, Any]) -> list[Event]:
        match delta.get("type"):
            case "text_delta":
                return [Text(text=as_str(delta.get("text")))]
            case "thinking_delta":
                return [Reasoning(text=as_str(delta.get("thinking")))]
            case "input_json_delta":
                if index not in self._inputs or not (part := as_str(delta.get("partial_json"))):
                    return []
                self._inputs[index] = ""  # what comes in parts replaces what the start held
                return [ToolArguments(slot=index, text=part)]
            case _:
                return []

    def _input(self, index: int) -> list[Event]:
        given = self._inputs.get(index)
        return [ToolArguments(slot=index, text=given)] if given else []

    def _stop(self, value: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        reason = value.get("stop_reason")
        if isinstance(reason, str):
            self.is_finished = True
            sequence = value.get("stop_sequence")
            events.append(
                Finish(
                    stop=_MESSAGE_STOPS.get(reason, Stop.END),
                    sequence=sequence if isinstance(sequence, str) else None,
                )
            )
        if self._usage:
            events.append(_message_counts(self._usage))
        return events

    def _count(self, value: Mapping[str, Any]) -> None:
        usage = value.get("usage")
        if isinstance(usage, dict):
            self._usage |= {name: count for name, count in usage.items() if count is not None}


def failure_of(value: Mapping[str, Any]) -> Failure:
    """The error that a provider's body or event tells of, in either dialect's envelope."""
    error = value.get("error")
    if isinstance(error, dict):
        code = error.get("code")
        return Failure(
            message=(as_str(error.get("message")) or "The provider failed.")[:TEXT_CHARS_MAX],
            code=code if isinstance(code, str) else None,
            kind=as_str(error.get("type")) or None,
        )
    text = as_str(error) or as_str(value.get("detail")) or as_str(value.get("message"))
    return Failure(message=(text or "The provider failed.")[:TEXT_CHARS_MAX])


def _content(value: Any) -> str:
    if isinstance(value, list):
        return "".join(as_str(part.get("text")) for part in value if isinstance(part, dict))
    return as_str(value)


def _chat_counts(usage: Mapping[str, Any]) -> Counted:
    return Counted(
        prompt=as_count(usage.get("prompt_tokens")),
        answer=as_count(usage.get("completion_tokens")),
        cached=as_count(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens")),
        reasoning=as_count(as_dict(usage.get("completion_tokens_details")).get("reasoning_tokens")),
    )


def _message_counts(usage: Mapping[str, Any]) -> Counted:
    cached = as_count(usage.get("cache_read_input_tokens"))
    written = as_count(usage.get("cache_creation_input_tokens"))
    return Counted(
        prompt=as_count(usage.get("input_tokens")) + cached + written,
        answer=as_count(usage.get("output_tokens")),
        cached=cached,
        written=written,
    )


def as_str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def as_count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else 0
