"""A normalised run as events of a generation: the sinks of providers that do not speak HTTP (EN-40, SF-24)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Final

import orjson
from google.protobuf.message import DecodeError

from iop.api.grpc import ports
from iop.api.grpc.answer_stream import AnswerStream
from iop.api.grpc.completion_sink import failure_of
from iop.api.grpc.inference_codec import decode_event
from iop.api.http.errors import error_of_stream
from iop.core.errors import InvalidRequest, IopError, NotFound, RemoteProtocolError, Unsupported
from iop.core.limits import MIB
from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.wire import run_metadata
from iop.wire.finish_words import finish_words
from iop.wire.messages import RunEvent, RunEventType, StreamError
from iop.wire.messages import Usage as WireUsage

__all__ = ["EngineRunSink", "RunSink"]

MESSAGE_CHARS_MAX: Final = 300
"""Longest part of an adapter's own words that a caller reads."""

LINE_BYTES_MAX: Final = 16 * MIB
"""Largest message of an OpenEngine server, in base64: the scores of a long prompt come in one."""

_REASON: Final = re.compile(r"[A-Z][A-Z0-9_]{1,63}")
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.\[\]-]{0,127}")
"""Of a field or a feature: nothing that could name a place passes as one (EN-04)."""

_FALLBACK_MARK: Final = "openai_text_tool_fallback"
_TOOL_CALLS: Final = "openai_tool_calls"


class RunSink:
    """Sink of a run whose deltas are the answer's text."""

    def __init__(self, answer: AnswerStream, *, outputs: int) -> None:
        self._answer = answer
        self._outputs = outputs

    def on_run_event(self, event: RunEvent) -> None:
        """One event of the run."""
        match event.type:
            case RunEventType.START:
                self._answer.accept(ignored=event.metadata.get(run_metadata.IGNORED, ""))
            case RunEventType.DELTA:
                # Reasoning has no place in the schema; its tokens are counted in the usage.
                self._take(event)
                self._answer.owe(event.credit_bytes)
            case RunEventType.COMPLETE:
                self._complete(event)
            case _:
                self._end_badly(event.error or StreamError(code="cancelled"), event.metadata)

    def _take(self, event: RunEvent) -> None:
        if event.delta and 0 <= event.output_index < self._outputs:
            self._answer.push(
                ports.OutputTokens(output_index=event.output_index, tokens=(), text=event.delta)
            )

    def _complete(self, event: RunEvent) -> None:
        self._count(event.usage)
        calls = _calls_of(event)
        is_fallback = event.metadata.get(_FALLBACK_MARK) == "true"
        # A backend that tells no reason for its one output has finished it all the same: the run is complete.
        for index, reason in enumerate(event.finish_reasons or ("stop",)):
            words = finish_words(
                "tool_calls" if calls and index == 0 else reason,
                tool_calls=calls if index == 0 else (),
                is_text_fallback=is_fallback,
            )
            self._answer.finish(
                ports.OutputFinished(output_index=index, reason=_FINISHES.get(reason, _STOP), message=words)
            )
        self._answer.complete()

    def _count(self, usage: WireUsage | None) -> None:
        if usage is not None and (usage.prompt_tokens is not None or usage.completion_tokens is not None):
            self._answer.count(
                ports.Usage(
                    prompt_tokens=usage.prompt_tokens or 0,
                    completion_tokens=usage.completion_tokens or 0,
                    cached_prompt_tokens=usage.cached_prompt_tokens,
                    reasoning_tokens=usage.reasoning_tokens,
                )
            )

    def _end_badly(self, error: StreamError, told: Mapping[str, str]) -> None:
        if self._answer.is_accepted:
            self._answer.fail(failure_of(error))
        else:
            self._answer.refuse(_refusal_of(error, told))


class EngineRunSink(RunSink):
    """Sink of a run whose deltas are an OpenEngine server's own messages (`iop.wire.run_metadata`)."""

    def __init__(self, answer: AnswerStream, *, outputs: int) -> None:
        super().__init__(answer, outputs=outputs)
        self._line = ""
        self._failure: ports.RequestFailed | None = None

    def _take(self, event: RunEvent) -> None:
        lines = (self._line + event.delta).split("\n")
        self._line = lines.pop()
        try:
            if len(self._line) > LINE_BYTES_MAX:
                raise RemoteProtocolError("A message of the engine is too large.", reason="MESSAGE_TOO_LARGE")
            for line in lines:
                self._take_message(pb.GenerateResponse.FromString(base64.b64decode(line, validate=True)))
        except (binascii.Error, DecodeError, RemoteProtocolError):
            self._line = ""
            self._answer.note_broken()
            self._answer.fail(
                ports.RequestFailed(code="INTERNAL", message="The provider sent what cannot be read.")
            )

    def _take_message(self, message: pb.GenerateResponse) -> None:
        told = decode_event(message)
        if isinstance(told, ports.OutputTokens | ports.OutputFinished) and told.output_index >= self._outputs:
            raise RemoteProtocolError("An output that nobody asked for.", reason="UNKNOWN_OUTPUT")
        match told:
            case ports.OutputTokens() | ports.PromptScored():
                self._answer.push(told)
            case ports.OutputFinished():
                self._answer.finish(told)
            case ports.RequestFailed():
                self._failure = told  # in the engine's own words; the run's terminal follows
            case None:
                pass

    def _complete(self, event: RunEvent) -> None:
        self._count(event.usage)
        self._answer.complete()

    def _end_badly(self, error: StreamError, told: Mapping[str, str]) -> None:
        if self._failure is not None:
            self._answer.fail(self._failure)
        else:
            super()._end_badly(error, told)


_STOP: Final = ports.OutputFinish.STOP
_FINISHES: Final = {
    "length": ports.OutputFinish.LENGTH,
    "cancelled": ports.OutputFinish.CANCELLED,
}


def _calls_of(event: RunEvent) -> list[dict[str, object]]:
    """Native tool calls of the completing event (EN-65)."""
    told = event.metadata.get(_TOOL_CALLS)
    if told is None:
        return []
    try:
        calls = orjson.loads(told)
    except orjson.JSONDecodeError:
        return []
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _refusal_of(error: StreamError, told: Mapping[str, str]) -> IopError:
    """What a request must change only the adapter can say, or the OpenEngine server behind it by reason and field."""
    known = error_of_stream(error)
    if isinstance(known, InvalidRequest | Unsupported | NotFound) and error.message:
        reason = told.get(run_metadata.REFUSAL + "reason", "")
        names = {name: told.get(run_metadata.REFUSAL + name, "") for name in ("field", "feature")}
        return type(known)(
            error.message[:MESSAGE_CHARS_MAX],
            reason=reason if _REASON.fullmatch(reason) else known.reason,
            details={name: value for name, value in names.items() if _NAME.fullmatch(value)},
        )
    return known
