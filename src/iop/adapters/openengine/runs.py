"""One normalised run over one Generate call (EN-40, EN-56, EN-102).

A run whose metadata says so speaks OpenEngine from end to end: its input is the request, and its deltas are the
engine's messages (`iop.wire.run_metadata`). Any other is worded from its body, and its deltas are text.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import grpc

from iop.adapters.base import RunStream
from iop.adapters.chat_input import read_body
from iop.adapters.openengine.caller_words import in_callers_words
from iop.adapters.openengine.channel import END_OF_CALL, bearer, connect, error_of
from iop.adapters.openengine.prompt import generate_request, passed_request
from iop.core.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    IopError,
    NotFound,
    Overloaded,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from iop.pb.openengine.v1 import error_pb2, openengine_pb2_grpc
from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.wire import run_metadata
from iop.wire.finish_words import read_finish_words
from iop.wire.messages import (
    CancelReason,
    RunEvent,
    RunEventType,
    StreamError,
    StreamErrorCode,
    Usage,
)
from iop.wire.scored_deltas import ScoredToken, scored_line

_log = logging.getLogger(__name__)

WEIGHT_VERSION_KEY: Final = "openengine-weight-version"
UNKNOWN_VERSION: Final = "unknown"

IGNORED_CHARS_MAX: Final = 256
"""Longest list of hints that were not followed; there are three of them."""

_REASONS: Final = frozenset(
    {"queue_full", "queue_timeout", "no_capacity", "paused", "loop_detected", "model_not_found"}
)
"""Refusals of another Edge that mean the same to this one's callers (EN-110)."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_FINISHES: Final = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}

_ENGINE_CODES: Final = {
    error_pb2.ERROR_CODE_INVALID_ARGUMENT: StreamErrorCode.INVALID_REQUEST,
    error_pb2.ERROR_CODE_UNSUPPORTED_FEATURE: StreamErrorCode.INVALID_REQUEST,
    error_pb2.ERROR_CODE_MODEL_NOT_FOUND: StreamErrorCode.INVALID_REQUEST,
    error_pb2.ERROR_CODE_OVERLOADED: StreamErrorCode.BUSY,
    error_pb2.ERROR_CODE_CANCELLED: StreamErrorCode.CANCELLED,
}


class GenerateRun:
    """Drives one call; a fresh object per run.

    Args:
        stream: the run.
        channel: to the engine's inference listener.
        api_key: the engine's credential; empty: none.
        formats: prompt formats that the engine renders itself.
        takes_priority: whether it advertises priorities.

    Attributes:
        weight_version: what the engine said of its weights; empty until it did.
        refusal: why the engine did not take the run, where it said so by a stable code; empty: it took it.
    """

    def __init__(
        self,
        stream: RunStream,
        channel: grpc.aio.Channel,
        *,
        api_key: str,
        formats: frozenset[str],
        takes_priority: bool = False,
    ) -> None:
        self._is_passed = stream.request.metadata.get(run_metadata.OPENENGINE_REQUEST) == "1"
        self._takes_priority = takes_priority
        self.weight_version = ""
        self.refusal = ""
        self._stream = stream
        self._channel = channel
        self._api_key = api_key
        self._formats = formats
        self._call: Any = None
        self._is_cancelled = False
        self._has_started = False
        self._connecting = asyncio.timeout(None)
        self._is_connecting = False
        self._outputs = 1
        self._has_scores = False
        self._writable = asyncio.Event()
        self._finishes: dict[int, str] = {}
        self._told: dict[str, str] = {}
        self._usage: Usage | None = None
        self.reached_engine: bool | None = None

    async def drive(self) -> None:
        """Run to the one terminal event. Raises only CancelledError, with the call cancelled."""
        self._stream.bind(on_cancel=self._on_cancel, on_writable=self._writable.set)
        try:
            terminal = await self._generate()
        except InvalidRequest as exc:
            terminal = _failed(StreamErrorCode.INVALID_REQUEST, exc.message, before_start=self._call is None)
        except grpc.aio.AioRpcError as exc:
            terminal = self._refused(error_of(exc))
        except Unavailable as exc:
            self.reached_engine = False
            terminal = _failed(StreamErrorCode.CONNECT_FAILED, exc.message, retryable=True, before_start=True)
        except asyncio.CancelledError:
            # A call that we cancelled raises this into us although our own task goes on.
            task = asyncio.current_task()
            if not self._is_cancelled or (task is not None and task.cancelling()):
                raise
            terminal = RunEvent(type=RunEventType.CANCELLED)
        finally:
            if self._call is not None:
                self._call.cancel()
        self._stream.emit(terminal)

    def cancel(self) -> None:
        """End the call; the run ends as cancelled."""
        self._on_cancel(CancelReason.ABORTED_BY_ADMIN)

    async def _generate(self) -> RunEvent:
        run = self._stream.request
        request = passed_request(run) if self._is_passed else generate_request(run, formats=self._formats)
        self._outputs = max(1, request.sampling.num_sequences)
        self._has_scores = not self._is_passed and request.response.return_output_logprobs
        try:
            async with self._connecting:
                self._is_connecting = True
                await connect(self._channel)
                self._is_connecting = False
        except TimeoutError:
            # A cancel ends the wait; `connect` bounds itself and raises what we know.
            return RunEvent(type=RunEventType.CANCELLED)
        if self._is_cancelled:
            return RunEvent(type=RunEventType.CANCELLED)
        self.reached_engine = True
        stub: Any = openengine_pb2_grpc.InferenceStub(self._channel)
        self._call = stub.Generate(request, metadata=self._metadata())
        while True:
            while self._stream.credit_bytes <= 0 and not self._is_cancelled:
                # Not reading is what makes the engine's side of the call stop (EN-102).
                self._writable.clear()
                await self._writable.wait()
            response = await self._call.read()
            if response is END_OF_CALL:
                return self._ended()
            if not self._has_started:
                # Only now: until its first message the engine may still refuse by status.
                await self._start()
            terminal = self._take(response)
            if terminal is not None:
                return terminal

    async def _start(self) -> None:
        self._has_started = True
        said: dict[str, Any] = dict(await self._call.initial_metadata() or ())
        version = said.get(WEIGHT_VERSION_KEY, "")
        self.weight_version = str(version) if version and version != UNKNOWN_VERSION else ""
        told = {"weight_version": self.weight_version} if self.weight_version else {}
        if ignored := said.get(run_metadata.IGNORED):
            told[run_metadata.IGNORED] = str(ignored)[:IGNORED_CHARS_MAX]
        if self._has_scores:
            told[run_metadata.SCORED_DELTAS] = "1"
        self._stream.emit(RunEvent(type=RunEventType.START, metadata=told))

    def _take(self, response: pb.GenerateResponse) -> RunEvent | None:
        """Hand one message on; an event when it ends the run."""
        if response.HasField("usage"):
            self._usage = _usage(response.usage)
            response.ClearField("usage")
        kind = response.WhichOneof("event")
        if self._is_passed and kind is not None:
            response.ClearField("request_id")
            line = base64.b64encode(response.SerializeToString()).decode("ascii") + "\n"
            self._stream.emit(RunEvent(type=RunEventType.DELTA, delta=line))
        match kind:
            case "token":
                text = _scored(response.token) if self._has_scores else response.token.text
                if text and not self._is_passed:
                    self._stream.emit(
                        RunEvent(
                            type=RunEventType.DELTA,
                            delta=text,
                            output_index=response.token.output_index,
                        )
                    )
            case "finished":
                self._take_finish(response.finished)
            case "error":
                error = response.error
                code = _ENGINE_CODES.get(error.code, StreamErrorCode.UPSTREAM_ERROR)
                return _failed(code, f"engine: {error.message[:512]}", retryable=error.retryable)
            case "prefill_ready":
                return _failed(StreamErrorCode.UPSTREAM_ERROR, "the engine only prefills")
            case _:
                # Prompt scores, or something that only a newer engine says: nothing of it belongs to a run's text.
                pass
        return None

    def _take_finish(self, finished: pb.GenerationFinished) -> None:
        """Why an output ended; tool calls, where the engine tells of any, are restored at the end (EN-65, EN-66)."""
        if finished.output_index >= self._outputs:
            return  # not asked for: it finishes nothing
        words = read_finish_words(finished.message)
        self._finishes[finished.output_index] = words.reason or _FINISHES.get(finished.reason, "stop")
        if words.tool_calls and finished.output_index == 0:
            self._told["openai_tool_calls"] = json.dumps(words.tool_calls)
        if words.is_text_fallback:
            self._told["openai_text_tool_fallback"] = "true"

    def _ended(self) -> RunEvent:
        if len(self._finishes) < self._outputs:
            return _failed(
                StreamErrorCode.UPSTREAM_TRUNCATED, "the engine ended without finishing every output"
            )
        return RunEvent(
            type=RunEventType.COMPLETE,
            finish_reasons=tuple(self._finishes[index] for index in sorted(self._finishes)),
            usage=self._usage,
            metadata=self._told,
        )

    def _refused(self, error: IopError) -> RunEvent:
        """A status instead of events, or in the middle of them."""
        code: str
        message = error.message
        match error:
            case Unavailable() | Overloaded() | Draining() | PreconditionFailed() | NotFound() if (
                reason := error.reason.lower()
            ) in _REASONS and not self._has_started:
                code = self.refusal = reason
            case Unsupported() if self._is_passed:
                code = "unsupported_feature"
            case InvalidRequest() | Unsupported() | NotFound():
                code = StreamErrorCode.INVALID_REQUEST
                if not self._is_passed and (body := read_body(self._stream.request.input)) is not None:
                    message = in_callers_words(error, body)
            case Overloaded():
                code = StreamErrorCode.BUSY
            case DeadlineExceeded():
                code = StreamErrorCode.TIMEOUT
            case Cancelled():
                code = StreamErrorCode.CANCELLED
            case _ if self._has_started:
                code = StreamErrorCode.UPSTREAM_TRUNCATED
            case _:
                code = StreamErrorCode.UPSTREAM_ERROR
        told: dict[str, str] = {}
        if self._is_passed and code in {StreamErrorCode.INVALID_REQUEST, "unsupported_feature"}:
            told = {run_metadata.REFUSAL + "reason": error.reason[:64]}
            told |= {
                run_metadata.REFUSAL + name: error.details[name]
                for name in ("field", "feature")
                if name in error.details
            }
        return _failed(code, message, retryable=error.retryable, told=told)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Routing and trace keys of the contract (SF-21), and what Edges tell each other (SF-24)."""
        run = self._stream.request
        said = run.metadata
        pairs = (
            ("openengine-routing-key", run.session_id[:256]),
            ("openengine-priority", said.get(run_metadata.PRIORITY, "") if self._takes_priority else ""),
            ("openengine-target-dp-rank", said.get(run_metadata.TARGET_RANK, "")),
            ("traceparent", run.traceparent),
            ("tracestate", run.tracestate),
            ("x-request-id", said.get(run_metadata.REQUEST_ID, "")),
            ("iop-via", said.get(run_metadata.VIA, "")),
        )
        told = [(key, value) for key, value in pairs if value and value.isascii() and value.isprintable()]
        return (*bearer(self._api_key), *told)

    def _on_cancel(self, reason: CancelReason) -> None:
        _log.debug("run.cancelled run_id=%s reason=%s", self._stream.request.run_id, reason.value)
        self._is_cancelled = True
        self._writable.set()
        if self._call is not None:
            self._call.cancel()
        elif self._is_connecting:
            self._connecting.reschedule(asyncio.get_running_loop().time())


def _scored(output: pb.TokenOutput) -> str:
    return scored_line(
        output.text,
        (
            ScoredToken(
                token=each.token,
                logprob=each.logprob if each.HasField("logprob") else None,
                candidates=tuple((other.token, other.logprob) for other in each.candidates),
            )
            for each in output.tokens
        ),
    )


def _usage(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else None,
        reasoning_tokens=usage.reasoning_tokens if usage.HasField("reasoning_tokens") else None,
    )


def _failed(
    code: str,
    message: str,
    *,
    retryable: bool = False,
    before_start: bool = False,
    told: Mapping[str, str] = _NOTHING,
) -> RunEvent:
    return RunEvent(
        type=RunEventType.ERROR,
        metadata=told,
        error=StreamError(code=code, message=message, retryable=retryable, before_start=before_start),
    )
