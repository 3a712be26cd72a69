"""The Edge's spans of one request: the whole, each wait for a provider, each attempt (SF-13, SF-32).

::

    chat_completions            the request, from dispatch to its outcome; under the caller's span
    |- queue                    from asking for a lease to having one
    `- attempt                  one stream on a Node; its context goes there, and the Node's span hangs below it
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from iop.edge.calls import Call, DispatchRequest, Outcome, ServedTarget, TunnelCall
from iop.edge.outcomes import RequestRecord
from iop.obs.tracing import Span, SpanKind, Tracer, parse_trace, with_trace

__all__ = ["RequestTrace"]

_WENT_WELL: Final = frozenset({Outcome.COMPLETE, Outcome.CLIENT_CANCELLED})


class RequestTrace:
    """Spans of one request. Made only where spans are recorded."""

    __slots__ = ("_attempt", "_queue", "_root", "_tracer")

    def __init__(self, tracer: Tracer, request: DispatchRequest) -> None:
        self._tracer = tracer
        self._root = tracer.start(
            request.operation,
            kind=SpanKind.SERVER,
            parent=parse_trace(request.traceparent, request.tracestate),
            attributes={
                "iop.request_id": request.request_id,
                "gen_ai.operation.name": request.operation,
                "gen_ai.request.model": request.model[:200],
            },
        )
        self._queue: Span | None = None
        self._attempt: Span | None = None
        self.waits()

    @property
    def trace_id(self) -> str:
        """For logs."""
        return self._root.context.trace_id

    def waits(self) -> None:
        """It asks for a lease."""
        self._queue = self._tracer.start(
            "queue", kind=SpanKind.INTERNAL, parent=self._root.context, attributes={}
        )

    def opens(self, call: Call, target: ServedTarget, run_id: str) -> Call:
        """It has a lease: the call as it goes to the Node, with the attempt for its parent."""
        self._leave_queue("")
        self._attempt = span = self._tracer.start(
            "attempt",
            kind=SpanKind.CLIENT,
            parent=self._root.context,
            attributes={
                "iop.run_id": run_id,
                "iop.node_id": target.key.node,
                "iop.provider": target.key.provider,
                "iop.route": target.route.value,
                "gen_ai.response.model": target.target,
            },
        )
        context = span.context
        if isinstance(call, TunnelCall):
            return replace(call, headers=with_trace(call.headers, context))
        return replace(call, traceparent=context.traceparent, tracestate=context.state)

    def answers(self, status: int) -> None:
        """The first part of an answer is here."""
        if self._attempt is not None:
            self._attempt.event("first_byte")
            if status:
                self._attempt.set("http.response.status_code", status)

    def repeats(self, code: str) -> None:
        """The attempt ended without effect, and another one is sought. Idempotent."""
        self._leave_attempt(code)
        if self._queue is None:
            self.waits()

    def ends(self, record: RequestRecord, outcome: Outcome, reason: str) -> None:
        """It has its outcome."""
        error = "" if outcome in _WENT_WELL else reason or outcome.value
        self._leave_queue(error)
        self._leave_attempt(error)
        root = self._root
        root.set("iop.outcome", outcome.value)
        root.set("iop.attempts", len(record.attempts))
        root.set("iop.queue_ms", record.queue_ms)
        if record.usage is not None:
            if record.usage.prompt_tokens is not None:
                root.set("gen_ai.usage.input_tokens", record.usage.prompt_tokens)
            if record.usage.completion_tokens is not None:
                root.set("gen_ai.usage.output_tokens", record.usage.completion_tokens)
        root.end(error=error)

    def _leave_queue(self, error: str) -> None:
        span, self._queue = self._queue, None
        if span is not None:
            span.end(error=error)

    def _leave_attempt(self, error: str) -> None:
        span, self._attempt = self._attempt, None
        if span is not None:
            span.end(error=error)
