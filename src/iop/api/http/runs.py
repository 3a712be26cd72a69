"""A normalised run as an OpenAI answer: the sink of providers that do not speak HTTP (SF-10, EN-40, EN-65,
EN-66).

The caller's body is the run's input; what comes back as events is worded here as the route words it,
streamed or whole. Native tool calls come with the completing event and are restored from it; text becomes
calls only where the adapter marked the run as one whose tools were explained in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import orjson

from iop.api.http.errors import Dialect, error_event, error_of_stream
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList
from iop.api.http.json_text import json_text
from iop.api.http.pulse import beat_while_frozen
from iop.core.errors import InvalidRequest, IopError, RemoteProtocolError
from iop.edge.dispatch import DispatchHandle
from iop.wire import run_metadata
from iop.wire.messages import CancelReason, RunEvent, RunEventType, StreamError, Usage
from iop.wire.scored_deltas import ScoredLines, ScoredToken

__all__ = ["RunRelay"]

_FALLBACK_MARK: Final = "openai_text_tool_fallback"
_TOOL_CALLS: Final = "openai_tool_calls"

_JSON: Final = (b"content-type", b"application/json")
_SSE: Final = (b"content-type", b"text/event-stream; charset=utf-8")

_FIELD: Final = re.compile(r"([a-z_]+(?:\.[a-z_]+|\[\d+\])*): ")
"""How an adapter begins what it says of one field."""

MESSAGE_CHARS_MAX: Final = 300
"""Longest part of an adapter's own words that a caller reads."""

OUTPUTS_MAX: Final = 1024
"""Alternatives of one answer; callers ask for some, and a Node's number is not trusted."""


class _Choice:
    """One alternative so far. ``held`` is text that may still turn out to be a tool call."""

    __slots__ = ("held", "is_begun", "is_holding", "lines", "offset", "reasoning", "scores", "texts")

    def __init__(self, *, is_holding: bool) -> None:
        self.lines: ScoredLines | None = None
        self.scores: list[ScoredToken] = []
        """Of tokens whose text has not been said yet; of a whole answer, of all."""
        self.offset = 0
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.held: list[str] = []
        self.is_begun = False
        self.is_holding = is_holding


class RunRelay:
    """Sink of one request's run. Bind the handle as soon as there is one.

    Args:
        exchange: where the answer goes.
        dialect: CHAT or COMPLETIONS.
        request_id: makes the answer's id.
        model: the name that the answer shows.
        created: seconds since 1970.
        is_stream: whether events or one object are sent.
        has_usage: whether a stream ends with a usage event.
        has_both_names: whether reasoning is said under both of its names (SF-15).
        has_tools: whether the caller offered tools: then text that begins like a call waits for the end.
        has_one_call: whether the caller wants one tool call at most: others that a backend made do not pass.
        bytes_max: most text that a whole answer may gather.
        begin: called at the first byte with the status; returns headers of ours.
        fail: answers an error before the first byte.
    """

    __slots__ = (
        "_begin",
        "_bytes",
        "_bytes_max",
        "_choices",
        "_dialect",
        "_envelope",
        "_exchange",
        "_fail",
        "_handle",
        "_has_both_names",
        "_has_one_call",
        "_has_scores",
        "_has_tools",
        "_has_usage",
        "_is_stream",
        "_owed",
    )

    def __init__(
        self,
        exchange: Exchange,
        *,
        dialect: Dialect,
        request_id: str,
        model: str,
        created: int,
        is_stream: bool,
        has_usage: bool,
        has_tools: bool,
        has_both_names: bool = False,
        has_one_call: bool = False,
        bytes_max: int,
        begin: Callable[[Exchange, DispatchHandle, int], HeaderList],
        fail: Callable[[Exchange, IopError], None],
    ) -> None:
        self._exchange = exchange
        self._dialect = dialect
        self._is_stream = is_stream
        self._has_usage = has_usage
        self._has_tools = has_tools
        self._has_both_names = has_both_names
        self._has_one_call = has_one_call
        self._has_scores = False
        self._bytes_max = bytes_max
        self._begin = begin
        self._fail = fail
        self._handle: DispatchHandle | None = None
        self._choices: dict[int, _Choice] = {}
        self._bytes = 0
        self._owed = 0
        is_chat = dialect is Dialect.CHAT
        kind = "chat.completion" if is_chat else "text_completion"
        self._envelope = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": kind + ".chunk" if is_chat and is_stream else kind,
            "created": created,
            "model": model,
        }

    def bind(self, handle: DispatchHandle) -> None:
        """Watch over the exchange from now on: its caller may leave or be slow."""
        self._handle = handle
        self._exchange.bind(on_gone=self._on_gone, on_writable=self._on_writable)

    # ---- RunSink ----

    def on_run_event(self, event: RunEvent) -> None:
        """One event of the run."""
        exchange = self._exchange
        is_over = exchange.is_ended or exchange.is_gone
        if event.type is RunEventType.DELTA:
            size = len(event.delta.encode()) + len(event.reasoning_delta.encode())
            if not is_over:
                self._add(event, size)
            if self._handle is not None:
                if exchange.is_writable or exchange.is_ended:
                    self._handle.consumed(size)
                else:
                    self._owed += size
        elif event.type is RunEventType.START:
            self._has_scores = event.metadata.get(run_metadata.SCORED_DELTAS) == "1"
        elif event.type.is_terminal:
            if not is_over:
                if event.type is RunEventType.COMPLETE:
                    self._complete(event)
                else:
                    self._end_badly(event.error or StreamError(code="cancelled"))
            self._handle = None

    # ---- growing ----

    def _add(self, event: RunEvent, size: int) -> None:
        choice = self._choices.get(event.output_index)
        if choice is None:
            if not 0 <= event.output_index < OUTPUTS_MAX:
                self._give_up()  # every one below it is told of at the end
                return
            choice = self._choices[event.output_index] = _Choice(is_holding=self._has_tools)
        self._bytes += size
        if self._bytes > self._bytes_max and (choice.is_holding or not self._is_stream):
            self._give_up()
            return
        text = event.delta
        if self._has_scores:
            try:
                text = self._read_scores(choice, text)
            except RemoteProtocolError:
                self._give_up()
                return
        if choice.is_holding and text:
            choice.held.append(text)
            text = "".join(choice.held).lstrip()
            if text and not text.startswith("{"):
                choice.is_holding = False
            if not choice.is_holding:
                self._say(event.output_index, choice, "".join(choice.held), event.reasoning_delta)
                choice.held = []
            elif event.reasoning_delta:
                self._say(event.output_index, choice, "", event.reasoning_delta)
            return
        self._say(event.output_index, choice, text, event.reasoning_delta)

    def _read_scores(self, choice: _Choice, delta: str) -> str:
        """The text of what lines are whole; their scores wait until it is said."""
        if choice.lines is None:
            choice.lines = ScoredLines()
        texts = []
        for text, tokens in choice.lines.feed(delta):
            texts.append(text)
            choice.scores += tokens
        return "".join(texts)

    def _say(self, index: int, choice: _Choice, text: str, reasoning: str) -> None:
        if not self._is_stream:
            choice.texts.append(text)
            choice.reasoning.append(reasoning)
            return
        self._open(index, choice)
        delta: dict[str, Any] = {}
        if text:
            delta["content"] = text
        if reasoning:
            delta["reasoning_content"] = reasoning
            if self._has_both_names:
                delta["reasoning"] = reasoning
        if delta or choice.scores:
            scores, choice.scores = choice.scores, []
            told = self._worded(choice, scores)
            choice.offset += len(text)
            self._send(index, delta, scores=told)

    def _worded(self, choice: _Choice, scores: list[ScoredToken]) -> dict[str, Any] | None:
        """Scores in the dialect's form; None where none were asked for."""
        if not self._has_scores:
            return None
        if self._dialect is Dialect.CHAT:
            return {
                "content": [
                    {
                        **_score(each.token, each.logprob),
                        "top_logprobs": [_score(*one) for one in each.candidates],
                    }
                    for each in scores
                ],
                "refusal": None,
            }
        offsets = []
        at = choice.offset
        for each in scores:
            offsets.append(at)
            at += len(each.token)
        return {
            "tokens": [each.token for each in scores],
            "token_logprobs": [each.logprob for each in scores],
            "top_logprobs": [dict(each.candidates) for each in scores],
            "text_offset": offsets,
        }

    def _open(self, index: int, choice: _Choice) -> None:
        """The head of the answer, and the role of this alternative, before anything it says."""
        if not self._exchange.is_started:
            self._start(_SSE, None)
        if not choice.is_begun:
            choice.is_begun = True
            if self._dialect is Dialect.CHAT:
                self._send(index, {"role": "assistant", "content": ""})

    def _send(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        finish: str | None = None,
        scores: dict[str, Any] | None = None,
    ) -> None:
        choice: dict[str, Any] = {"index": index}
        if self._dialect is Dialect.CHAT:
            choice["delta"] = delta
            if scores is not None:
                choice["logprobs"] = scores
        else:
            choice["text"] = delta.get("content", "")
            choice["logprobs"] = scores
        choice["finish_reason"] = finish
        value: dict[str, Any] = {**self._envelope, "choices": [choice]}
        if self._has_usage:
            value["usage"] = None
        self._exchange.write(b"data: " + json_text(value) + b"\n\n")

    def _start(self, kind: tuple[bytes, bytes], length: int | None) -> None:
        assert self._handle is not None, "no answer comes before dispatch has returned"
        headers = self._begin(self._exchange, self._handle, 200)
        self._exchange.start(200, [kind, *headers], length=length)
        if kind is _SSE:
            beat_while_frozen(self._exchange, lambda: self._handle is not None and self._handle.is_frozen)

    # ---- endings ----

    def _complete(self, event: RunEvent) -> None:
        is_cut = any(
            choice.lines is not None and not choice.lines.is_whole for choice in self._choices.values()
        )
        if is_cut or len(event.finish_reasons) > OUTPUTS_MAX:
            if self._handle is not None:
                self._handle.note_truncated()  # text would be missing from what looks whole
            self._end_badly(StreamError(code="upstream_error"))
            return
        count = max(1, len(event.finish_reasons), *(index + 1 for index in self._choices), 1)
        calls = self._native_calls(event)
        finished = []
        for index in range(count):
            choice = self._choices.setdefault(index, _Choice(is_holding=False))
            reason = event.finish_reasons[index] if index < len(event.finish_reasons) else "stop"
            own_calls = calls if index == 0 else []
            if not own_calls and event.metadata.get(_FALLBACK_MARK) == "true":
                own_calls = self._told_calls(choice)
            if self._has_one_call:
                own_calls = own_calls[:1]
            if own_calls:
                reason = "tool_calls"
            if choice.held:
                self._say(index, choice, "".join(choice.held), "")
                choice.held = []
            elif choice.scores and self._is_stream:
                self._say(index, choice, "", "")
            finished.append((index, choice, reason, own_calls))
        if self._is_stream:
            self._end_stream(finished, event.usage)
        else:
            self._end_whole(finished, event.usage)

    def _end_stream(
        self, finished: list[tuple[int, _Choice, str, list[dict[str, Any]]]], usage: Usage | None
    ) -> None:
        for index, choice, reason, calls in finished:
            self._open(index, choice)
            if calls:
                numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                self._send(index, {"tool_calls": numbered})
            self._send(index, {}, finish=reason)
        if self._has_usage:
            value = {**self._envelope, "choices": [], "usage": _usage(usage)}
            self._exchange.write(b"data: " + json_text(value) + b"\n\n")
        self._exchange.write(b"data: [DONE]\n\n")
        self._exchange.end()

    def _end_whole(
        self, finished: list[tuple[int, _Choice, str, list[dict[str, Any]]]], usage: Usage | None
    ) -> None:
        choices = []
        for index, choice, reason, calls in finished:
            text = "".join(choice.texts)
            entry: dict[str, Any] = {"index": index}
            if self._dialect is Dialect.CHAT:
                message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
                if reasoning := "".join(choice.reasoning):
                    message["reasoning_content"] = reasoning
                    if self._has_both_names:
                        message["reasoning"] = reasoning
                if calls:
                    message["tool_calls"] = calls
                entry["message"] = message
            else:
                entry["text"] = text
            scores = self._worded(choice, choice.scores)
            choices.append(entry | {"logprobs": scores, "finish_reason": reason})
        value: dict[str, Any] = {**self._envelope, "choices": choices}
        if (counted := _usage(usage)) is not None:
            value["usage"] = counted
        body = json_text(value)
        self._start(_JSON, len(body))
        self._exchange.write(body)
        self._exchange.end()

    def _end_badly(self, error: StreamError) -> None:
        known = error_of_stream(error)
        if isinstance(known, InvalidRequest) and error.message:
            # What a request must change only the adapter can say.
            field = _FIELD.match(error.message)
            known = InvalidRequest(
                error.message[:MESSAGE_CHARS_MAX],
                reason=known.reason,
                details={} if field is None else {"field": field[1]},
            )
        if self._exchange.is_started:
            self._exchange.write(error_event(known, self._dialect))
            self._exchange.end()
        else:
            self._fail(self._exchange, known)

    def _give_up(self) -> None:
        handle = self._handle
        if handle is not None:
            handle.note_truncated()
        self._end_badly(StreamError(code="upstream_error"))
        if handle is not None:
            handle.cancel(CancelReason.CLIENT_GONE)

    # ---- tool calls ----

    def _native_calls(self, event: RunEvent) -> list[dict[str, Any]]:
        told = event.metadata.get(_TOOL_CALLS)
        if told is None:
            return []
        try:
            calls = orjson.loads(told)
        except orjson.JSONDecodeError:
            return []
        return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []

    def _told_calls(self, choice: _Choice) -> list[dict[str, Any]]:
        """Calls that the model wrote as text, where it was told to; the text is then used up (EN-66)."""
        source = choice.held if self._is_stream else [*choice.texts, *choice.held]
        try:
            told = msgspec.json.decode("".join(source).strip().encode(), type=_ToldCalls)
        except (msgspec.MsgspecError, RecursionError):
            return []
        choice.held = []
        choice.texts = []
        return [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments
                    if isinstance(call.arguments, str)
                    else json_text(call.arguments).decode(),
                },
            }
            for number, call in enumerate(told.tool_calls)
        ]

    # ---- the caller ----

    def _on_gone(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.cancel(CancelReason.CLIENT_GONE)

    def _on_writable(self) -> None:
        owed, self._owed = self._owed, 0
        if owed and self._handle is not None:
            self._handle.consumed(owed)


def _score(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "surrogatepass"))}


class _ToldCall(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str = {}


class _ToldCalls(msgspec.Struct):
    tool_calls: list[_ToldCall]


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None or (usage.prompt_tokens is None and usage.completion_tokens is None):
        return None
    prompt, answer = usage.prompt_tokens or 0, usage.completion_tokens or 0
    value: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }
    if usage.cached_prompt_tokens is not None:
        value["prompt_tokens_details"] = {"cached_tokens": usage.cached_prompt_tokens}
    if usage.reasoning_tokens is not None:
        value["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return value
