"""One dispatch attempt: the lease, the open stream, and who hears its answer.

An attempt sits between the connection and the surface's sink. Body bytes do not pass through code of ours: while the
caller listens, ``on_body`` *is* the sink's own method; when the caller was told its end early (cancel, timeout, abort)
it becomes a drain that returns the credit, until the Node confirms with its terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from iop.edge.calls import RunCall, ServedTarget, TunnelCall
from iop.edge.pools import Lease, Verdict
from iop.edge.scrub import scrub
from iop.net.ports import OutboundStream, RunSink, TunnelSink
from iop.wire.messages import (
    BodyFraming,
    CancelReason,
    Header,
    RunEvent,
    RunEventType,
    StreamError,
    StreamErrorCode,
    Usage,
)

WEIGHT_VERSION_FIELD = b"x-iop-weight-version"
"""What another Edge says of the weights behind it (SF-24)."""


class AttemptOwner(Protocol):
    """The request that an attempt belongs to."""

    def attempt_started(self, attempt: Attempt) -> None:
        """The first part of an answer is about to reach the sink."""
        ...

    def version_told(self, version: str) -> None:
        """The provider itself says which weights answer (AD-33)."""
        ...

    def attempt_observed(self, usage: Usage) -> None:
        """The Node reported usage."""
        ...

    def attempt_ended(self, attempt: Attempt, error: StreamError | None, tell: Callable[[], None]) -> None:
        """The Node's terminal is there. ``tell`` gives it to the sink, unless another attempt follows."""
        ...


class _Nobody:
    """Owner of an attempt that its Node is done with."""

    def attempt_started(self, attempt: Attempt) -> None:
        """Too late to matter."""

    def version_told(self, version: str) -> None:
        """Too late to matter."""

    def attempt_observed(self, usage: Usage) -> None:
        """Too late to matter."""

    def attempt_ended(self, attempt: Attempt, error: StreamError | None, tell: Callable[[], None]) -> None:
        """It has ended before."""


_NOBODY: Final = _Nobody()


def _ignore(_data: bytes) -> None:
    """The stream is over: nothing is owed for it."""


class Attempt:
    """One attempt; implements ``TunnelSink`` and ``RunSink`` for its connection.

    Attributes:
        is_started: part of an answer reached the surface, so that it cannot be repeated (EN-112).
        is_draining: the surface has heard an end already; whatever comes is dropped.
        is_lost: its generation was fenced: nothing that still comes counts (EN-33).
        status: HTTP status of the answer; 0 before it, and for runs.
        early_verdict: what an early end says of the provider: nothing, unless it let the time pass (EN-116).
    """

    __slots__ = (
        "_owner",
        "_run_sink",
        "_tunnel_sink",
        "early_verdict",
        "is_draining",
        "is_lost",
        "is_started",
        "lease",
        "on_body",
        "status",
        "stream",
        "target",
    )

    on_body: Callable[[bytes], None]

    def __init__(
        self, owner: AttemptOwner, lease: Lease, target: ServedTarget, call: TunnelCall | RunCall
    ) -> None:
        self._owner: AttemptOwner = owner
        self.lease = lease
        self.target = target
        self.is_started = False
        self.is_draining = False
        self.is_lost = False
        self.status = 0
        self.early_verdict = Verdict.NEUTRAL
        self.stream: OutboundStream | None = None
        self._tunnel_sink: TunnelSink | None = None
        self._run_sink: RunSink | None = None
        if isinstance(call, TunnelCall):
            self._tunnel_sink = call.sink
            self.on_body = call.sink.on_body
        else:
            self._run_sink = call.sink
            self.on_body = self._drop

    @property
    def is_handed_over(self) -> bool:
        """Whether the Node may have seen the opening packet."""
        return self.stream is not None and self.stream.is_handed_over

    def consumed(self, size_bytes: int) -> None:
        """Return credit for bytes that left the Edge (EN-102)."""
        if self.stream is not None:
            self.stream.consumed(size_bytes)

    def call_off(self, reason: CancelReason, *, at_safe_point: bool) -> None:
        """Ask the Node to end it, and drop what still comes (EN-56)."""
        self._go_quiet()
        if self.stream is not None:
            self.stream.cancel(reason, at_safe_point=at_safe_point)

    def mark_lost(self) -> None:
        """The generation ended: the stream is nobody's any more."""
        self.is_lost = True
        self._go_quiet()
        if self.stream is not None:
            self.stream.detach()

    def let_go(self) -> None:
        """The Node is done with it: forget request and stream, which know it, so that all die without a search."""
        self._owner = _NOBODY
        self.stream = None
        self.on_body = _ignore

    def forget_sink(self) -> None:
        """The request has its outcome and its Node is done: the sink, which knows the request, is told nothing more."""
        self._tunnel_sink = None
        self._run_sink = None

    def tell_error(self, error: StreamError) -> None:
        """Give the sink an end that the Edge decided."""
        if self._tunnel_sink is not None:
            self._tunnel_sink.on_error(error)
        elif self._run_sink is not None:
            is_cancel = error.code == StreamErrorCode.CANCELLED
            kind = RunEventType.CANCELLED if is_cancel else RunEventType.ERROR
            self._run_sink.on_run_event(RunEvent(type=kind, error=error))

    # ---- from the connection: tunnels ----

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """The provider answered."""
        if self.is_draining or self._tunnel_sink is None:
            return
        self.is_started = True
        self.status = status
        for name, value in headers:
            if len(name) == len(WEIGHT_VERSION_FIELD) and name.lower() == WEIGHT_VERSION_FIELD:
                self._owner.version_told(value.decode("utf-8", "replace"))
        self._owner.attempt_started(self)
        self._tunnel_sink.on_response_start(status=status, headers=headers, framing=framing)

    def on_usage(self, usage: Usage) -> None:
        """Usage was observed (EN-53)."""
        if self.is_draining or self._tunnel_sink is None:
            return
        self._owner.attempt_observed(usage)
        self._tunnel_sink.on_usage(usage)

    def on_end(self) -> None:
        """The answer is whole."""
        sink = self._tunnel_sink
        if sink is not None:
            self._owner.attempt_ended(self, None, sink.on_end)

    def on_error(self, error: StreamError) -> None:
        """The stream ended badly."""
        error = _scrubbed(error)
        self._owner.attempt_ended(self, error, lambda: self.tell_error(error))

    # ---- from the connection: runs ----

    def on_run_event(self, event: RunEvent) -> None:
        """One event of a normalised run (EN-40)."""
        sink = self._run_sink
        if sink is None:
            return
        if event.type.is_terminal:
            if event.error is not None:
                event = replace(event, error=_scrubbed(event.error))
            if event.usage is not None and not self.is_draining:
                self._owner.attempt_observed(event.usage)
            self._owner.attempt_ended(self, _error_of(event), lambda: sink.on_run_event(event))
            return
        if self.is_draining:
            self._drop_text(event)
            return
        if event.type is RunEventType.START and "weight_version" in event.metadata:
            self._owner.version_told(event.metadata["weight_version"])
        if not self.is_started and event.type is not RunEventType.START:
            self.is_started = True
            self._owner.attempt_started(self)
        sink.on_run_event(event)

    # ---- inner ----

    def _go_quiet(self) -> None:
        self.is_draining = True
        self.on_body = self._drop

    def _drop(self, data: bytes) -> None:
        if self.stream is not None:
            self.stream.consumed(len(data))

    def _drop_text(self, event: RunEvent) -> None:
        if self.stream is not None:
            self.stream.consumed(len(event.delta.encode()) + len(event.reasoning_delta.encode()))


def _scrubbed(error: StreamError) -> StreamError:
    """Callers learn what went wrong, not where (EN-04)."""
    return replace(error, message=scrub(error.message)) if error.message else error


def _error_of(event: RunEvent) -> StreamError | None:
    """The terminal run event as a stream error; ``None`` for a complete one."""
    match event.type:
        case RunEventType.COMPLETE:
            return None
        case RunEventType.CANCELLED:
            return event.error or StreamError(code=StreamErrorCode.CANCELLED.value)
        case _:
            return event.error or StreamError(code=StreamErrorCode.UPSTREAM_ERROR.value)
