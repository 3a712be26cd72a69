"""Spans by the OpenTelemetry SDK, sent to a collector over OTLP/HTTP. Needs the extra ``iop[tracing]``.

Nothing global is touched: the provider is made here, handed around as a :class:`iop.obs.tracing.Tracer`, and closed
by whoever made it. Finished spans wait in a bounded queue for a thread of the SDK's; when the collector is slow or
gone the queue overflows and spans are dropped, never requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from iop.obs.tracing import AttributeValue, Span, SpanKind, TraceContext, Tracer

__all__ = ["OtelTracer", "TracingSettings", "tracing_to"]

QUEUE_SPANS_MAX: Final = 8192
"""Finished spans that wait; about 1 kB each. Beyond, they are dropped."""

BATCH_SPANS_MAX: Final = 512
EXPORT_TIMEOUT_S: Final = 5.0
"""One try at the collector; longer would only hold spans that newer ones push out."""

CLOSE_TIMEOUT_S: Final = 3.0
"""How long a stopping process waits for its last spans to leave; a collector that is away must not hold it."""

ATTRIBUTE_CHARS_MAX: Final = 256
"""Longest value of a span's attribute: names and codes fit, content would not."""

_KINDS: Final = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings:
    """Where spans go.

    Attributes:
        endpoint: the collector's traces address, path included.
        sample_ratio: share of new traces that is recorded, 0 to 1; a caller's own decision is kept.
        process: ``edge`` or ``node``.
        instance: which of them: a Node's id.
        version: of the software.
        interval_s: longest time that a finished span waits for company.
    """

    endpoint: str
    sample_ratio: float
    process: str
    instance: str = ""
    version: str = ""
    interval_s: float = 5.0


@contextmanager
def tracing_to(settings: TracingSettings, *, exporter: SpanExporter | None = None) -> Iterator[Tracer]:
    """A tracer whose spans go to ``settings.endpoint``; on leaving, what waits is sent, as far as that takes no longer
    than ``CLOSE_TIMEOUT_S``.
    """
    resource = {"service.name": f"iop-{settings.process}", "service.version": settings.version}
    if settings.instance:
        resource["service.instance.id"] = settings.instance
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
        resource=Resource(resource),
        span_limits=SpanLimits(max_attribute_length=ATTRIBUTE_CHARS_MAX),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter or OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_TIMEOUT_S),
            max_queue_size=QUEUE_SPANS_MAX,
            schedule_delay_millis=settings.interval_s * 1000,
            max_export_batch_size=BATCH_SPANS_MAX,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
        )
    )
    # A collector that is away is told of once per batch, with a traceback; one line is enough.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    try:
        yield OtelTracer(provider.get_tracer("iop", settings.version))
    finally:
        # The SDK's own bound is half a minute.
        closing = threading.Thread(target=provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


class OtelTracer:
    """A tracer of the SDK's as :class:`iop.obs.tracing.Tracer`."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def start(
        self,
        name: str,
        *,
        kind: SpanKind,
        parent: TraceContext | None,
        attributes: Mapping[str, AttributeValue],
    ) -> Span:
        """Start a span; whether it is recorded decides its parent, or the ratio for a new trace."""
        context = trace.set_span_in_context(
            trace.INVALID_SPAN if parent is None else trace.NonRecordingSpan(_told(parent))
        )
        return _OtelSpan(
            self._tracer.start_span(name, context=context, kind=_KINDS[kind], attributes=dict(attributes))
        )


class _OtelSpan:
    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext:
        told = self._span.get_span_context()
        return TraceContext(
            trace_id=trace.format_trace_id(told.trace_id),
            span_id=trace.format_span_id(told.span_id),
            flags=int(told.trace_flags),
            state=told.trace_state.to_header(),
        )

    def set(self, name: str, value: AttributeValue) -> None:
        if self._span.is_recording():
            self._span.set_attribute(name, value)

    def event(self, name: str) -> None:
        if self._span.is_recording():
            self._span.add_event(name)

    def end(self, *, error: str = "") -> None:
        span = self._span
        if not span.is_recording():
            return
        if error:
            span.set_attribute("error.type", error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end()


def _told(parent: TraceContext) -> trace.SpanContext:
    return trace.SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(parent.flags),
        trace_state=trace.TraceState.from_header([parent.state]) if parent.state else None,
    )
