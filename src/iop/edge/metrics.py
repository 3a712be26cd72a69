"""The Edge's figures for Prometheus, read at each scrape from the state itself: no second book to keep in step."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from iop.edge.edge import Edge
from iop.edge.registry import NodeStep


class EdgeCollector(Collector):
    """Register it with the process's metrics registry. Labels are configured names and closed sets, never ids."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def collect(self) -> Iterator[Metric]:
        """All figures of one moment."""
        yield from self._requests()
        yield from self._providers()
        yield from self._models()
        yield from self._nodes()

    def _requests(self) -> Iterator[Metric]:
        edge = self._edge
        ended = CounterMetricFamily(
            "iop_edge_requests", "Requests that ended, by outcome.", labels=["outcome"]
        )
        for outcome, count in edge.outcomes.totals().items():
            ended.add_metric([outcome.value], count)
        yield ended
        refused = CounterMetricFamily(
            "iop_edge_refusals", "Requests refused without a provider's answer, by reason.", labels=["reason"]
        )
        for reason, count in sorted(edge.dispatcher.refusals.items()):
            refused.add_metric([reason], count)
        yield refused
        counters = edge.status.counters()
        for name, key, doc in (
            ("iop_edge_repeats", "repeats", "Attempts repeated because the first never reached its Node."),
            ("iop_edge_late_frames", "late_frames", "Frames dropped because their stream had ended."),
            ("iop_edge_overdue_cancels", "overdue_cancels", "Leases returned without a confirmed cancel."),
            ("iop_edge_leases_granted", "leases_granted", "Leases granted."),
            ("iop_edge_leases_returned", "leases_returned", "Leases returned."),
            ("iop_edge_registrations_refused", "refused_registrations", "Node registrations refused."),
        ):
            yield CounterMetricFamily(name, doc, value=counters[key])
        yield GaugeMetricFamily(
            "iop_edge_requests_live", "Requests without an outcome.", value=edge.outcomes.live
        )

    def _providers(self) -> Iterator[Metric]:
        labels = ["node", "provider"]
        capacity = GaugeMetricFamily("iop_edge_provider_capacity", "Slots; zero while away.", labels=labels)
        leases = GaugeMetricFamily(
            "iop_edge_provider_leases", "Leases out, by kind.", labels=[*labels, "kind"]
        )
        queued = GaugeMetricFamily("iop_edge_provider_queued", "Waiters it could serve.", labels=labels)
        gated = GaugeMetricFamily("iop_edge_provider_gated", "1 while a gate holds it.", labels=labels)
        for key in self._edge.pools.roster.providers:
            figures = self._edge.pools.provider_figures(key)
            names = [str(key.node), str(key.provider)]
            capacity.add_metric(names, figures.capacity)
            leases.add_metric([*names, "normal"], figures.in_flight - figures.long_in_flight)
            leases.add_metric([*names, "long"], figures.long_in_flight)
            queued.add_metric(names, figures.queued)
            gated.add_metric(names, 1 if figures.gates else 0)
        yield from (capacity, leases, queued, gated)

    def _models(self) -> Iterator[Metric]:
        depth = GaugeMetricFamily("iop_edge_queue_depth", "Waiting requests.", labels=["model"])
        limit = GaugeMetricFamily("iop_edge_queue_capacity", "Most waiting requests.", labels=["model"])
        for model in self._edge.snapshot.models:
            figures = self._edge.pools.model_figures(model)
            depth.add_metric([model], figures.queue_depth)
            limit.add_metric([model], figures.queue_max)
        yield from (depth, limit)

    def _nodes(self) -> Iterator[Metric]:
        counts = dict.fromkeys(NodeStep, 0)
        for node in self._edge.snapshot.nodes:
            counts[self._edge.nodes.view(node).step] += 1
        steps = GaugeMetricFamily("iop_edge_nodes", "Configured Nodes, by handshake step.", labels=["step"])
        for step, count in counts.items():
            steps.add_metric([step.value], count)
        yield steps
