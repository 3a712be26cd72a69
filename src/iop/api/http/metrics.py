"""Figures of the public listener: counted where they happen by plain additions, shaped only when somebody
asks (SF-32).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from iop.obs.metrics import DURATION_BUCKETS_S

if TYPE_CHECKING:
    from iop.api.http.openai import EdgeHttp
    from iop.api.http.server import HttpServer

__all__ = ["HttpCollector", "SurfaceFigures", "Timings"]

_BOUNDS = [*(str(bound) for bound in DURATION_BUCKETS_S), "+Inf"]


class Timings:
    """A histogram over ``DURATION_BUCKETS_S``."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATION_BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(DURATION_BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds with the counts at or below each."""
        return list(zip(_BOUNDS, map(float, accumulate(self.counts)), strict=True))


class SurfaceFigures:
    """What the public surface counts; operations and reasons are closed sets.

    Attributes:
        answers: by operation and status, the provider's and our own.
        refusals: our own answers by reason.
        first_byte: seconds from a request's head to its answer's first byte, by operation.
    """

    __slots__ = ("answers", "first_byte", "refusals")

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.first_byte: dict[str, Timings] = {}

    def answered(self, operation: str, status: int, *, after_s: float) -> None:
        """Count an answer that begins now."""
        self.answers[operation, status] += 1
        timings = self.first_byte.get(operation)
        if timings is None:
            timings = self.first_byte[operation] = Timings()
        timings.observe(after_s)


class HttpCollector(Collector):
    """Register it with the process's metrics registry."""

    def __init__(self, surface: EdgeHttp, server: HttpServer) -> None:
        self._surface = surface
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """All figures of one moment."""
        figures, counters = self._surface.figures, self._server.counters
        answers = CounterMetricFamily(
            "iop_http_answers", "Answers begun, by operation and status.", labels=["operation", "status"]
        )
        for (operation, status), count in sorted(figures.answers.items()):
            answers.add_metric([operation, str(status)], count)
        yield answers
        refusals = CounterMetricFamily(
            "iop_http_refusals", "Answers that IOP itself made in refusal, by reason.", labels=["reason"]
        )
        for reason, count in sorted(figures.refusals.items()):
            refusals.add_metric([reason], count)
        yield refusals
        timings = HistogramMetricFamily(
            "iop_http_first_byte_seconds",
            "Time from a request's head to its answer's first byte.",
            labels=["operation"],
        )
        for operation, timing in sorted(figures.first_byte.items()):
            timings.add_metric([operation], timing.buckets(), timing.total_s)
        yield timings
        yield GaugeMetricFamily("iop_http_connections", "Connections open.", value=counters.connections)
        yield GaugeMetricFamily(
            "iop_http_buffered_bytes", "Request bytes held.", value=self._surface.buffered_bytes
        )
        for name, doc, value in (
            ("connections_refused", "Connections refused for their number.", counters.connections_refused),
            ("malformed", "Requests refused for their form.", counters.refused),
            ("timeouts", "Requests that took too long to arrive.", counters.timeouts),
        ):
            yield CounterMetricFamily(f"iop_http_{name}", doc, value=value)
