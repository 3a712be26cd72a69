"""OpenAI responses, whole or in stream events, as neutral events.

What a stream says twice is read once: deltas count, and an item's or the response's closing event only for what no
delta told, because some engines stream a call's arguments, or a whole item, in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
from iop.api.http.convert.readers import TEXT_CHARS_MAX, as_count, as_dict, as_int, as_str, failure_of
from iop.api.http.convert.scores import read_scores

__all__ = ["ResponsesReader"]

_STOPS: Final = {"max_output_tokens": Stop.LENGTH, "content_filter": Stop.FILTER}
_ENDED: Final = frozenset({"completed", "incomplete"})
_FAILED: Final = frozenset({"failed", "cancelled"})


class ResponsesReader:
    """Reads one response. Items that chats have no word for (searches, files, programs) are left out."""

    __slots__ = ("_calls", "_has_begun", "_scored", "_summarised", "_told", "is_finished")

    def __init__(self) -> None:
        self._has_begun = False
        self._calls: dict[int, bool] = {}
        """Calls that began, by the place of their item; whether any of their arguments came."""
        self._told: set[int] = set()
        """Places of other items of which a delta came."""
        self._scored: set[tuple[int, int]] = set()
        """Texts, by their item's place and their own in it, whose log probabilities were told."""
        self._summarised: dict[int, int] = {}
        """Reasoning told by summaries: which part of it came last."""
        self.is_finished = False

    def feed(self, value: Mapping[str, Any]) -> list[Event]:
        """One event's data."""
        kind = as_str(value.get("type"))
        place = as_int(value.get("output_index"))
        match kind:
            case "error":
                return [_failure(value)]
            case "response.created" | "response.in_progress" | "response.queued":
                return self._begin(as_dict(value.get("response")))
            case "response.output_item.added":
                return self._added(place, as_dict(value.get("item")))
            case "response.output_text.delta":
                scores = read_scores(value.get("logprobs"))
                if scores:
                    self._scored.add((place, as_int(value.get("content_index"))))
                return self._grow(place, Text(text=as_str(value.get("delta")), scores=scores))
            case "response.output_text.done" if place in self._told:
                # Some engines tell them only of the text as a whole.
                part = (place, as_int(value.get("content_index")))
                scores = () if part in self._scored else read_scores(value.get("logprobs"))
                self._scored.add(part)
                return [Text(text="", scores=scores)] if scores else []
            case "response.refusal.delta":
                return self._grow(place, Text(text=as_str(value.get("delta")), is_refusal=True))
            case "response.reasoning_text.delta":
                if place in self._summarised:
                    return []
                return self._grow(place, Reasoning(text=as_str(value.get("delta"))))
            case "response.reasoning_summary_text.delta":
                return self._summary(place, as_int(value.get("summary_index")), as_str(value.get("delta")))
            case "response.function_call_arguments.delta":
                return self._arguments(place, as_str(value.get("delta")))
            case "response.output_item.done":
                return self._item(place, as_dict(value.get("item")))
            case "response.completed" | "response.incomplete" | "response.failed" | "response.cancelled":
                response = as_dict(value.get("response"))
                return self._end(response, as_str(response.get("status")) or kind.removeprefix("response."))
            case _:
                return []

    def whole(self, value: Mapping[str, Any]) -> list[Event]:
        """A whole answer."""
        if value.get("error"):
            return [failure_of(value)]
        status = as_str(value.get("status"))
        if not status and isinstance(value.get("output"), list):
            status = "completed"
        return self._end(value, status)

    def terminate(self) -> None:
        """Not this dialect's word."""

    def end(self) -> list[Event]:
        """Nothing is held back."""
        return []

    # ---- inside ----

    def _begin(self, response: Mapping[str, Any]) -> list[Event]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [Begin(model=as_str(response.get("model")))]

    def _added(self, place: int, item: Mapping[str, Any]) -> list[Event]:
        if item.get("type") != "function_call" or place in self._calls:
            return []
        self._calls[place] = False
        return [ToolBegin(slot=place, id=_call_id(item, place), name=as_str(item.get("name")))]

    def _grow(self, place: int, event: Text | Reasoning) -> list[Event]:
        if not event.text:
            return []
        self._told.add(place)
        return [event]

    def _summary(self, place: int, part: int, text: str) -> list[Event]:
        """A summary stands for reasoning that the provider does not show; its parts are paragraphs."""
        if not text or (place in self._told and place not in self._summarised):
            return []
        self._told.add(place)
        last = self._summarised.get(place, part)
        self._summarised[place] = part
        return [Reasoning(text=text if last == part else "\n\n" + text)]

    def _arguments(self, place: int, text: str) -> list[Event]:
        if not text or place not in self._calls:
            return []
        self._calls[place] = True
        return [ToolArguments(slot=place, text=text)]

    def _item(self, place: int, item: Mapping[str, Any]) -> list[Event]:
        """What a finished item says that was not told yet."""
        match item.get("type"):
            case "function_call":
                events = self._added(place, item)
                if not self._calls[place]:
                    events += self._arguments(place, as_str(item.get("arguments")))
                return events
            case "message" if place not in self._told:
                events = []
                for part in _parts(item.get("content")):
                    if part.get("type") == "output_text":
                        scores = read_scores(part.get("logprobs"))
                        events += self._grow(place, Text(text=as_str(part.get("text")), scores=scores))
                    elif part.get("type") == "refusal":
                        events += self._grow(place, Text(text=as_str(part.get("refusal")), is_refusal=True))
                return events
            case "reasoning" if place not in self._told:
                events = []
                for part in _parts(item.get("content")):
                    events += self._grow(place, Reasoning(text=as_str(part.get("text"))))
                if not events:
                    for number, part in enumerate(_parts(item.get("summary"))):
                        events += self._summary(place, number, as_str(part.get("text")))
                return events
            case _:
                return []

    def _end(self, response: Mapping[str, Any], status: str) -> list[Event]:
        if status in _FAILED:
            return [_failure(as_dict(response.get("error")) or {"message": f"The response was {status}."})]
        events = self._begin(response)
        if not self._told and not self._calls:
            # Only of a stream that told nothing else: engines do not agree on how places are counted.
            for place, item in enumerate(_parts(response.get("output"))):
                events += self._item(place, item)
        if status in _ENDED:
            self.is_finished = True
            reason = as_str(as_dict(response.get("incomplete_details")).get("reason"))
            stop = _STOPS.get(reason, Stop.LENGTH) if status == "incomplete" else Stop.END
            if stop is Stop.END and self._calls:
                stop = Stop.TOOLS
            events.append(Finish(stop=stop))
        if isinstance(usage := response.get("usage"), dict):
            events.append(_counts(usage))
        return events


def _failure(value: Mapping[str, Any]) -> Failure:
    if isinstance(value.get("error"), dict):
        return failure_of(value)
    code = value.get("code")
    return Failure(
        message=(as_str(value.get("message")) or "The provider failed.")[:TEXT_CHARS_MAX],
        code=code if isinstance(code, str) else None,
    )


def _parts(value: Any) -> list[Mapping[str, Any]]:
    return [as_dict(part) for part in value] if isinstance(value, list) else []


def _call_id(item: Mapping[str, Any], place: int) -> str:
    return as_str(item.get("call_id")) or as_str(item.get("id")) or f"call_{place}"


def _counts(usage: Mapping[str, Any]) -> Counted:
    return Counted(
        prompt=as_count(usage.get("input_tokens")),
        answer=as_count(usage.get("output_tokens")),
        cached=as_count(as_dict(usage.get("input_tokens_details")).get("cached_tokens")),
        reasoning=as_count(as_dict(usage.get("output_tokens_details")).get("reasoning_tokens")),
    )
