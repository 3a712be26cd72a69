"""A provider's stream of OpenAI completions or chats as events of a generation: the sink of its tunnel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from iop.api.grpc import ports
from iop.api.grpc.answer_stream import AnswerStream
from iop.api.http.errors import error_of_stream
from iop.api.http.sse import event_data
from iop.core.errors import InvalidRequest, IopError, NotFound, Overloaded, Unavailable
from iop.core.limits import KIB, MIB
from iop.wire.finish_words import finish_words
from iop.wire.messages import BodyFraming, Header, StreamError
from iop.wire.messages import Usage as WireUsage

__all__ = ["CompletionSink", "failure_of"]

EVENT_BYTES_MAX: Final = 1 * MIB
"""Largest event of a completion. A provider that sends no event end would fill memory otherwise."""

TOOL_CALL_BYTES_MAX: Final = 1 * MIB
"""Most of tool calls that one answer may gather; they are told whole, at the end."""

REFUSAL_BYTES_MAX: Final = 16 * KIB
"""How much of a provider's error body is read for its message."""

REFUSAL_CHARS_MAX: Final = 300
"""How much of a provider's own words goes into a status message."""

_BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")


class CompletionSink:
    """Sink of one attempt.

    Args:
        answer: what it feeds.
        outputs: how many were asked for; what comes for others is nobody's.
        is_chat: whether the provider answers as chat, else as text completion.
        candidates: how many other tokens were asked for at each position; a provider may tell more.
    """

    def __init__(self, answer: AnswerStream, *, outputs: int, is_chat: bool, candidates: int = 0) -> None:
        self._candidates = candidates
        self._answer = answer
        self._outputs = outputs
        self._is_chat = is_chat
        self._buffer = b""
        self._status = 0
        self._refusal = b""
        self._calls: dict[int, dict[int, dict[str, Any]]] = {}
        self._call_bytes = 0

    @property
    def _is_streaming(self) -> bool:
        return 200 <= self._status < 300

    # ------------------------------------------------------------------------------------------ TunnelSink

    def on_response_start(
        self,
        *,
        status: int,
        headers: Sequence[Header],
        framing: BodyFraming,  # noqa: ARG002 - an event stream ends by what it says
    ) -> None:
        """The provider answers; only an event stream can be a generation."""
        self._status = status
        if not self._is_streaming:
            return
        kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
        if kind.lower().startswith(b"text/event-stream"):
            self._answer.accept()
        else:
            self._answer.note_broken()
            self._answer.refuse(
                Unavailable("The provider did not stream its answer.", reason="UPSTREAM_ERROR")
            )

    def on_body(self, data: bytes) -> None:
        """Provider bytes: parse what is whole."""
        if not self._answer.is_terminal:
            if self._is_streaming:
                self._feed(data)
            else:
                self._refusal += data[: REFUSAL_BYTES_MAX - len(self._refusal)]
        self._answer.owe(len(data))

    def on_usage(self, usage: WireUsage) -> None:
        """An observation of the Node; the body's own figures are the caller's."""

    def on_end(self) -> None:
        """The provider's answer is whole."""
        if self._is_streaming:
            self._complete()
        else:
            self._answer.refuse(_refusal_of(self._status, self._refusal))

    def on_error(self, error: StreamError) -> None:
        """The tunnel ended badly."""
        if self._answer.is_accepted:
            self._answer.fail(failure_of(error))
        else:
            self._answer.refuse(error_of_stream(error))

    # ------------------------------------------------------------------------------------------ parsing

    def _feed(self, data: bytes) -> None:
        self._buffer += data
        while (blank := _BLANK_LINE.search(self._buffer)) is not None and not self._answer.is_terminal:
            event, self._buffer = self._buffer[: blank.start()], self._buffer[blank.end() :]
            self._take(event_data(event))
        if self._answer.is_terminal:
            self._buffer = b""
        elif len(self._buffer) > EVENT_BYTES_MAX:
            self._break("An event of the provider was too large.")

    def _take(self, data: bytes | None) -> None:
        if data is None:
            return
        if data.strip() == b"[DONE]":
            self._complete()
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = None
        if not isinstance(chunk, dict) or chunk.get("error"):
            self._break("The provider failed.", retryable=True)
            return
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._take_choice(choice)
        self._take_usage(chunk.get("usage"))

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index", 0)
        if not isinstance(index, int) or not 0 <= index < self._outputs:
            return
        delta = choice.get("delta") if self._is_chat else None
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        tokens = _tokens_of(choice.get("logprobs"), candidates=self._candidates)
        if (isinstance(text, str) and text) or tokens:
            text = text if isinstance(text, str) else ""
            self._answer.push(ports.OutputTokens(output_index=index, tokens=tokens, text=text))
        if isinstance(delta, dict):
            self._take_calls(index, delta.get("tool_calls"))
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self._finish(index, reason)

    def _take_calls(self, index: int, pieces: object) -> None:
        """Gather the pieces of tool calls."""
        for piece in pieces if isinstance(pieces, list) else ():
            function = piece.get("function") if isinstance(piece, dict) else None
            number = piece.get("index", 0) if isinstance(piece, dict) else None
            if not isinstance(function, dict) or not isinstance(number, int):
                continue
            calls = self._calls.setdefault(index, {})
            call = calls.setdefault(
                number, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] = call["id"] or _text(piece.get("id"))
            told = call["function"]
            told["name"] = told["name"] or _text(function.get("name"))
            told["arguments"] += _text(function.get("arguments"))
            self._call_bytes += len(_text(function.get("arguments"))) + 64
        if self._call_bytes > TOOL_CALL_BYTES_MAX:
            self._break("The provider's tool calls were too large.")

    def _finish(self, index: int, reason: str) -> None:
        calls = self._calls.get(index, {})
        self._answer.finish(
            ports.OutputFinished(
                output_index=index,
                reason=ports.OutputFinish.LENGTH if reason == "length" else ports.OutputFinish.STOP,
                message=finish_words(reason, tool_calls=[calls[number] for number in sorted(calls)]),
            )
        )

    def _take_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt = usage.get("prompt_tokens_details")
            answer = usage.get("completion_tokens_details")
            self._answer.count(
                ports.Usage(
                    prompt_tokens=_count(usage.get("prompt_tokens")) or 0,
                    completion_tokens=_count(usage.get("completion_tokens")) or 0,
                    cached_prompt_tokens=_count(
                        prompt.get("cached_tokens") if isinstance(prompt, dict) else None
                    ),
                    reasoning_tokens=_count(
                        answer.get("reasoning_tokens") if isinstance(answer, dict) else None
                    ),
                )
            )

    # ------------------------------------------------------------------------------------------ ending

    def _complete(self) -> None:
        self._answer.complete()

    def _break(self, message: str, *, retryable: bool = False) -> None:
        self._answer.note_broken()
        self._answer.fail(ports.RequestFailed(code="INTERNAL", message=message, retryable=retryable))


def failure_of(error: StreamError) -> ports.RequestFailed:
    """A stream's bad end after acceptance, in the schema's words."""
    failure = error_of_stream(error)
    code = "DRAINING" if error.code == "aborted_by_admin" else failure.status.engine
    return ports.RequestFailed(code=code, message=failure.message, retryable=failure.retryable)


def _tokens_of(logprobs: object, *, candidates: int) -> tuple[ports.ScoredToken, ...]:
    """Scored tokens, where the provider names their ids; without ids they are no tokens of this schema."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return tuple(
        ports.ScoredToken(
            token_id=entry["id"],
            token=_text(entry.get("token")),
            logprob=_number(entry.get("logprob")),
            candidates=tuple(
                ports.Candidate(
                    token_id=other["id"],
                    token=_text(other.get("token")),
                    logprob=_number(other.get("logprob")) or 0.0,
                )
                for other in (entry.get("top_logprobs") or ())[:candidates]
                if isinstance(other, dict) and _count(other.get("id")) is not None
            ),
        )
        for entry in (content if isinstance(content, list) else ())
        if isinstance(entry, dict) and _count(entry.get("id")) is not None
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
    return value if is_count else None  # type: ignore[return-value]  # narrowed by is_count


def _refusal_of(status: int, body: bytes) -> IopError:
    """A provider's error answer before acceptance, as the status that tells whose fault it is."""
    words = _words_of(body)
    if status in {400, 413, 422}:
        return InvalidRequest(f"The provider refused the request{words}", reason="UPSTREAM_REJECTED")
    if status == 404:
        return NotFound(f"The provider does not know the model{words}", reason="MODEL_NOT_FOUND")
    if status in {408, 429}:
        return Overloaded("The provider is overloaded.", reason="UPSTREAM_OVERLOADED", retry_after_s=1.0)
    # Credentials between the fleet and its providers are nothing that a caller can mend.
    return Unavailable("The provider failed.", reason="UPSTREAM_ERROR", retry_after_s=1.0)


def _words_of(body: bytes) -> str:
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "."
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f": {message[:REFUSAL_CHARS_MAX]}" if isinstance(message, str) and message else "."
