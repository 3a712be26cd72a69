"""The answer to one generation that goes through dispatch: what a provider's sink feeds and a handler reads.

Sinks push in the turn in which bytes or events come. Their credit goes back when what was made of them has been taken,
so what a slow caller leaves here is bounded by the stream's window (EN-102). One answer outlives the attempts at it: a
repeated attempt brings another sink.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from iop.api.grpc import ports
from iop.api.grpc.hops import ignored_names
from iop.core.errors import IopError
from iop.edge.handle import DispatchHandle
from iop.wire.messages import Usage as WireUsage

__all__ = ["AnswerStream"]

_CUT: Final = ports.RequestFailed(
    code="INTERNAL", message="The provider's answer was cut before it was finished.", retryable=True
)


class AnswerStream:
    """Implements `ports.GenerationStream`.

    Args:
        caller: name of the API key that made the request.
        outputs: how many outputs must finish for the answer to be whole (SF-14).
        shows_provider: whether the caller is told the opaque name of who serves it (SF-13).
        on_closed: told once, with the stream, when its reader is done.
    """

    def __init__(
        self,
        *,
        caller: str,
        outputs: int,
        shows_provider: bool = False,
        on_closed: Callable[[AnswerStream], None] = lambda _stream: None,
    ) -> None:
        self.caller = caller
        self._outputs = outputs
        self._shows_provider = shows_provider
        self._on_closed = on_closed
        self._handle: DispatchHandle | None = None
        self._wake = asyncio.Event()
        self._events: deque[tuple[ports.GenerationEvent, ports.Usage | None]] = deque()
        self._owed = 0
        self._refused: IopError | None = None
        self._finishes: dict[int, ports.OutputFinished] = {}
        self._usage: ports.Usage | None = None
        self._ignored = ""
        self._is_accepted = False
        self._is_whole = False
        self.is_terminal = False
        """Its last event is there; whatever else comes is dropped."""

    def bind(self, handle: DispatchHandle) -> None:
        """The dispatch that feeds this stream."""
        self._handle = handle

    @property
    def weight_version(self) -> str:
        """Of the provider, as known now (AD-33)."""
        return self._handle.weight_version if self._handle is not None else ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the caller is told of the dispatch besides, named as on HTTP."""
        handle = self._handle
        if handle is None:
            return ()
        told = [("x-iop-queue-ms", str(handle.queue_ms))]
        if handle.queue_position:
            told.append(("x-iop-queue-position", str(handle.queue_position)))
        if self._shows_provider:
            told.append(("x-iop-provider", handle.provider_name))
        told.append(("x-request-id", handle.request.request_id))
        return (*told, *ignored_names(self._ignored))

    async def wait_accepted(self) -> None:
        """Wait until the provider has begun; dispatch bounds the wait.

        Raises:
            IopError: it refused, or was lost before; nothing was accepted.
        """
        while not (self._is_accepted or self.is_terminal):
            self._wake.clear()
            await self._wake.wait()
        if self._refused is not None:
            raise self._refused

    # ------------------------------------------------------------------------------------------ the reader's side

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[ports.GenerationEvent, ports.Usage | None]:
        while not self._events:
            self._pay()
            if self.is_terminal:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._events.popleft()

    async def aclose(self) -> None:
        """Leave: the provider's work is called off if it goes on. Idempotent."""
        self._on_closed(self)
        if self._handle is not None and not self._is_whole:
            # A whole answer's stream ends by itself in a moment; a cancel would only change its outcome.
            self._handle.cancel()

    def end_by(self, failure: ports.RequestFailed) -> bool:
        """End it from outside with this as its last event; False if it had ended."""
        if self.is_terminal:
            return False
        self._terminate(failure)
        if self._handle is not None:
            self._handle.cancel()
        return True

    # ------------------------------------------------------------------------------------------ the sink's side

    @property
    def is_accepted(self) -> bool:
        """Whether the provider has begun; from then on failures are events, not refusals (SF-20)."""
        return self._is_accepted

    def accept(self, *, ignored: str = "") -> None:
        """The provider has begun.

        Args:
            ignored: hints that it says it did not follow, as it names them.
        """
        self._ignored = ignored
        self._is_accepted = True
        self._wake.set()

    def owe(self, size_bytes: int) -> None:
        """Bytes came; their credit goes back when what was made of them is taken."""
        self._owed += size_bytes
        if self.is_terminal:
            self._pay()
        self._wake.set()

    def push(self, event: ports.OutputTokens | ports.PromptScored) -> None:
        """Part of the answer."""
        if not self.is_terminal:
            self._is_accepted = True
            self._events.append((event, None))
            self._wake.set()

    def finish(self, event: ports.OutputFinished) -> None:
        """One output is over; told when all are, because only then is the usage known."""
        self._finishes.setdefault(event.output_index, event)

    def count(self, usage: ports.Usage) -> None:
        """Tokens of the whole answer."""
        self._usage = usage
        if self._handle is not None:
            self._handle.note_usage(
                WireUsage(
                    prompt_tokens=usage.prompt_tokens,
                    completion_tokens=usage.completion_tokens,
                    cached_prompt_tokens=usage.cached_prompt_tokens,
                    reasoning_tokens=usage.reasoning_tokens,
                )
            )

    def complete(self) -> None:
        """The provider has said all: a success if every output finished, else its answer was cut (SF-14)."""
        if self.is_terminal:
            return
        if len(self._finishes) < self._outputs:
            self.note_broken()
            self._terminate(_CUT)
            return
        self._is_whole = True
        *others, last = sorted(self._finishes)
        self._events.extend((self._finishes[index], None) for index in others)
        self._terminate(self._finishes[last])

    def fail(self, failure: ports.RequestFailed) -> None:
        """It ended badly after it was accepted."""
        if not self.is_terminal:
            self._terminate(failure)

    def refuse(self, error: IopError) -> None:
        """It was not accepted."""
        if not self.is_terminal:
            self.is_terminal = True
            self._refused = error
            self._wake.set()

    def note_broken(self) -> None:
        """What came is no answer: say so to dispatch, before this leaves it."""
        if self._handle is not None:
            self._handle.note_truncated()

    # ------------------------------------------------------------------------------------------ inner

    def _pay(self) -> None:
        if self._handle is not None and self._owed:
            self._handle.consumed(self._owed)
            self._owed = 0

    def _terminate(self, event: ports.GenerationEvent) -> None:
        self.is_terminal = True
        self._events.append((event, self._usage))
        self._wake.set()
