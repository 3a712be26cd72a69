"""Prometheus metrics of one process: a registry of its own, and names that keep the rule.

A name is ``iop_<part>_<what>_<unit>``, with ``_total`` last for counters, in base units (seconds, bytes). Labels are
bounded sets (a code, a model, a provider), never identifiers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

__all__ = ["DURATION_BUCKETS_S", "TOKEN_BUCKETS_S", "Metrics"]

DURATION_BUCKETS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
"""For whole requests and operations, and for the time to the first token."""

TOKEN_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
"""For the time between tokens."""

_NAME: Final = re.compile(r"iop_[a-z]+(?:_[a-z0-9]+)+")
_ID_LABELS: Final = frozenset(
    {"request_id", "run_id", "op_id", "conn_id", "session_id", "trace_id", "lease_id"}
)


class Metrics:
    """Makes and renders the metrics of one process. Passed in, never global."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self, *, with_process: bool = True) -> None:
        self.registry = CollectorRegistry()
        if with_process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)

    def counter(self, name: str, doc: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only rises; ``name`` ends in ``_total``."""
        if not name.endswith("_total"):
            raise ValueError(f"{name} must end in _total")
        return Counter(_checked(name, labels), doc, labels, registry=self.registry)

    def gauge(
        self, name: str, doc: str, labels: Sequence[str] = (), *, read: Callable[[], float] | None = None
    ) -> Gauge:
        """A level. With ``read`` (and no labels) it is asked at every scrape instead of being set."""
        gauge = Gauge(_checked(name, labels), doc, labels, registry=self.registry)
        if read is not None:
            gauge.set_function(read)
        return gauge

    def histogram(
        self,
        name: str,
        doc: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = DURATION_BUCKETS_S,
    ) -> Histogram:
        """A distribution; ``buckets`` are upper bounds in the name's unit."""
        return Histogram(_checked(name, labels), doc, labels, registry=self.registry, buckets=buckets)

    def render(self) -> bytes:
        """The text format, for ``/metrics``."""
        return generate_latest(self.registry)


def _checked(name: str, labels: Sequence[str]) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name} is not iop_<part>_<what>_<unit>")
    if ids := _ID_LABELS.intersection(labels):
        raise ValueError(f"{name} would have one series per {', '.join(sorted(ids))}")
    return name
