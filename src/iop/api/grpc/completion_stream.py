"""A generation that a provider answers as an OpenAI completion stream: the sink of its tunnel, and its events.

Bytes are parsed in the turn in which they come. Their credit goes back when the events made of them have been taken, so
what a slow caller leaves here is bounded by the stream's window (EN-102).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Self

import orjson

from iop.api.grpc import ports
from iop.api.http.errors import error_of_stream
from iop.api.http.sse import event_data
from iop.core.errors import InvalidRequest, IopError, NotFound, Overloaded, Unavailable
from iop.core.limits import KIB, MIB
from iop.edge.handle import DispatchHandle
from iop.wire.messages import BodyFraming, Header, StreamError
from iop.wire.messages import Usage as WireUsage

__all__ = ["CompletionStream"]

EVENT_BYTES_MAX: Final = 1 * MIB
"""Largest event of a text completion. A provider that sends no event end would fill memory otherwise."""

REFUSAL_BYTES_MAX: Final = 16 * KIB
"""How much of a provider's error body is read for its message."""

REFUSAL_CHARS_MAX: Final = 300
"""How much of a provider's own words goes into a status message."""

_BLANK_LINE: Final = re.compile(rb"\r?\n\r?\n")

_CUT: Final = ports.RequestFailed(
    code="INTERNAL", message="The provider's answer was cut before it was finished.", retryable=True
)


class CompletionStream:
    """Sink of one dispatched completion, and its `ports.GenerationStream`.

    Args:
        caller: name of the API key that made it.
    """

    def __init__(self, *, caller: str) -> None:
        self.caller = caller
        self._handle: DispatchHandle | None = None
        self._wake = asyncio.Event()
        self._events: deque[tuple[ports.GenerationEvent, ports.Usage | None]] = deque()
        self._owed = 0
        self._buffer = b""
        self._status = 0
        self._refusal = b""
        self._refused: IopError | None = None
        self._finish: ports.OutputFinished | None = None
        self._usage: ports.Usage | None = None
        self._is_terminal = False

    def bind(self, handle: DispatchHandle) -> None:
        """The dispatch that feeds this stream."""
        self._handle = handle

    @property
    def weight_version(self) -> str:
        """Of the provider, as known now (AD-33)."""
        return self._handle.weight_version if self._handle is not None else ""

    async def wait_accepted(self) -> None:
        """Wait until the provider has begun a stream; dispatch bounds the wait.

        Raises:
            IopError: it refused, or was lost before; nothing was accepted.
        """
        while not (self._events or self._is_terminal or self._is_streaming):
            self._wake.clear()
            await self._wake.wait()
        if self._refused is not None:
            raise self._refused

    @property
    def _is_streaming(self) -> bool:
        return 200 <= self._status < 300

    # ------------------------------------------------------------------------------------------ the reader's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[ports.GenerationEvent, ports.Usage | None]:
        while not self._events:
            self._pay()
            if self._is_terminal:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    async def aclose(self) -> None:
        """Leave: the provider's work is called off if it goes on. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()

    def end_by(self, failure: ports.RequestFailed) -> bool:
        """End it from outside with this as its last event; False if it had ended."""
        if self._is_terminal:
            return False
        self._terminate(failure)
        if self._handle is not None:
            self._handle.cancel()
        return True

    def _pay(self) -> None:
        if self._handle is not None and self._owed:
            self._handle.consumed(self._owed)
            self._owed = 0

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
        if self._is_streaming:
            kind = next((value for name, value in headers if name.lower() == b"content-type"), b"")
            if not kind.lower().startswith(b"text/event-stream"):
                self._refuse(Unavailable("The provider did not stream its answer.", reason="UPSTREAM_ERROR"))
        self._wake.set()

    def on_body(self, data: bytes) -> None:
        """Provider bytes: parse what is whole."""
        self._owed += len(data)
        if self._is_terminal:
            self._pay()
        elif not self._is_streaming:
            self._refusal += data[: REFUSAL_BYTES_MAX - len(self._refusal)]
            self._pay()
        else:
            self._feed(data)
        self._wake.set()

    def on_usage(self, usage: WireUsage) -> None:
        """An observation of the Node; the body's own figures are the caller's."""

    def on_end(self) -> None:
        """The provider's answer is whole."""
        if not self._is_streaming:
            self._refuse(_refusal_of(self._status, self._refusal))
        elif not self._is_terminal:
            self._complete()
        self._wake.set()

    def on_error(self, error: StreamError) -> None:
        """The tunnel ended badly."""
        failure = error_of_stream(error)
        if not self._is_streaming:
            self._refuse(failure)
        elif not self._is_terminal:
            code = "DRAINING" if error.code == "aborted_by_admin" else failure.status.engine
            self._terminate(
                ports.RequestFailed(code=code, message=failure.message, retryable=failure.retryable)
            )
        self._wake.set()

    # ------------------------------------------------------------------------------------------ parsing

    def _feed(self, data: bytes) -> None:
        self._buffer += data
        while (blank := _BLANK_LINE.search(self._buffer)) is not None and not self._is_terminal:
            event, self._buffer = self._buffer[: blank.start()], self._buffer[blank.end() :]
            self._take(event_data(event))
        if len(self._buffer) > EVENT_BYTES_MAX and not self._is_terminal:
            self._terminate(
                ports.RequestFailed(code="INTERNAL", message="An event of the provider was too large.")
            )

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
            self._terminate(
                ports.RequestFailed(code="INTERNAL", message="The provider failed.", retryable=True)
            )
            return
        self._take_choices(chunk.get("choices"))
        self._take_usage(chunk.get("usage"))

    def _take_choices(self, choices: object) -> None:
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or choice.get("index", 0) != 0:
                continue
            text = choice.get("text")
            if isinstance(text, str) and text:
                self._events.append((ports.OutputTokens(output_index=0, tokens=(), text=text), None))
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                is_length = reason == "length"
                self._finish = ports.OutputFinished(
                    output_index=0,
                    reason=ports.OutputFinish.LENGTH if is_length else ports.OutputFinish.STOP,
                    message="" if reason in {"stop", "length"} else reason[:REFUSAL_CHARS_MAX],
                )

    def _take_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self._usage = ports.Usage(
            prompt_tokens=_count(usage.get("prompt_tokens")) or 0,
            completion_tokens=_count(usage.get("completion_tokens")) or 0,
            cached_prompt_tokens=_count(cached),
        )
        if self._handle is not None:
            self._handle.note_usage(
                WireUsage(
                    prompt_tokens=self._usage.prompt_tokens,
                    completion_tokens=self._usage.completion_tokens,
                    cached_prompt_tokens=self._usage.cached_prompt_tokens,
                )
            )

    # ------------------------------------------------------------------------------------------ ending

    def _complete(self) -> None:
        """The provider has said all: a finish if it gave one, else its answer was cut (SF-14)."""
        if self._finish is None:
            if self._handle is not None:
                self._handle.note_truncated()
            self._terminate(_CUT)
        else:
            self._terminate(self._finish)

    def _terminate(self, event: ports.GenerationEvent) -> None:
        self._is_terminal = True
        self._buffer = b""
        self._events.append((event, self._usage))
        self._wake.set()

    def _refuse(self, error: IopError) -> None:
        self._is_terminal = True
        self._refused = error
        self._wake.set()


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
