"""The Node's spans of one stream: its stay on this Node, and the provider's part of it (SF-13, SF-32).

The provider's span is what the engine is given as its parent. Bytes of the answer do not pass through code of ours
here: only its begin and its end do, so that a traced tunnel costs no more per chunk than another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from iop.net.ports import InboundRun, InboundTunnel
from iop.obs.tracing import Span, SpanKind, TraceContext, Tracer, parse_trace, read_trace, with_trace
from iop.wire.messages import (
    BodyFraming,
    CancelReason,
    Header,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    TunnelRequest,
)

__all__ = ["TracedRun", "TracedTunnel"]


class _Spans:
    """Both spans of one stream."""

    __slots__ = ("_node", "_provider")

    def __init__(
        self, tracer: Tracer, request: TunnelRequest | RunRequest, name: str, *, parent: TraceContext | None
    ) -> None:
        attributes = {"iop.run_id": request.run_id, "iop.provider": request.adapter}
        self._node = tracer.start("node", kind=SpanKind.SERVER, parent=parent, attributes=attributes)
        self._provider: Span = tracer.start(
            f"provider {name}",
            kind=SpanKind.CLIENT,
            parent=self._node.context,
            attributes={"iop.provider": request.adapter, "gen_ai.request.model": request.target},
        )

    @property
    def context(self) -> TraceContext:
        """For the engine."""
        return self._provider.context

    def answers(self, status: int = 0) -> None:
        self._provider.event("first_byte")
        if status:
            self._provider.set("http.response.status_code", status)

    def ends(self, error: str) -> None:
        self._provider.end(error=error)

    def closes(self) -> None:
        """Nothing of it is left at the engine."""
        self._provider.end()
        self._node.end()


class TracedTunnel:
    """An inbound tunnel with spans around it; otherwise the one that it was made of."""

    __slots__ = (
        "_spans",
        "_tunnel",
        "bind",
        "body",
        "request",
        "send_body",
        "send_usage",
    )

    def __init__(self, tracer: Tracer, tunnel: InboundTunnel) -> None:
        request = tunnel.request
        self._tunnel = tunnel
        self._spans = _Spans(
            tracer,
            request,
            request.operation or request.path.partition("?")[0],
            parent=read_trace((name.lower(), value) for name, value in request.headers),
        )
        self.request: TunnelRequest = replace(
            request, headers=tuple(with_trace(request.headers, self._spans.context))
        )
        self.body: Sequence[bytes] = tunnel.body
        self.bind = tunnel.bind
        self.send_body = tunnel.send_body
        self.send_usage = tunnel.send_usage

    @property
    def credit_bytes(self) -> int:
        """As the connection has it."""
        return self._tunnel.credit_bytes

    @property
    def cancel_at_safe_point(self) -> bool:
        """As the connection has it."""
        return self._tunnel.cancel_at_safe_point

    def start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Note the first byte, and hand on."""
        self._spans.answers(status)
        self._tunnel.start(status=status, headers=headers, framing=framing)

    def end(self) -> None:
        """Note the end, and hand on."""
        self._spans.ends("")
        self._tunnel.end()

    def fail(self, error: StreamError) -> None:
        """Note the code, and hand on."""
        self._spans.ends(error.code)
        self._tunnel.fail(error)

    def closing(self, on_done: Callable[[], None]) -> Callable[[], None]:
        """``on_done`` that ends the Node's span, too."""

        def closed() -> None:
            self._spans.closes()
            on_done()

        return closed


class TracedRun:
    """An inbound run with spans around it; otherwise the one that it was made of."""

    __slots__ = ("_has_answered", "_run", "_spans", "request")

    def __init__(self, tracer: Tracer, run: InboundRun) -> None:
        request = run.request
        self._run = run
        self._has_answered = False
        self._spans = _Spans(
            tracer, request, "run", parent=parse_trace(request.traceparent, request.tracestate)
        )
        context = self._spans.context
        self.request: RunRequest = replace(request, traceparent=context.traceparent, tracestate=context.state)

    @property
    def credit_bytes(self) -> int:
        """As the connection has it."""
        return self._run.credit_bytes

    @property
    def cancel_at_safe_point(self) -> bool:
        """As the connection has it."""
        return self._run.cancel_at_safe_point

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """As the connection does it."""
        self._run.bind(on_cancel=on_cancel, on_writable=on_writable)

    def emit(self, event: RunEvent) -> None:
        """Note the first text and the end, and hand on."""
        if event.type.is_terminal:
            cancelled = "cancelled" if event.type is RunEventType.CANCELLED else ""
            self._spans.ends(cancelled if event.error is None else event.error.code)
        elif not self._has_answered and event.type is RunEventType.DELTA:
            self._has_answered = True
            self._spans.answers()
        self._run.emit(event)

    def close(self) -> None:
        """Nothing of it is left at the engine."""
        self._spans.closes()
