"""Metrics: names keep the rule, labels are bounded."""

from __future__ import annotations

import pytest

from iop.obs.metrics import Metrics


@pytest.mark.clause("SF-32")
def test_metrics_render_in_the_text_format() -> None:
    metrics = Metrics(with_process=False)
    metrics.counter("iop_edge_requests_total", "requests", ["code"]).labels("200").inc(3)
    metrics.gauge("iop_edge_queue_depth", "waiting", read=lambda: 7)
    metrics.histogram("iop_edge_first_token_seconds", "time to first token", buckets=(0.1, 1.0)).observe(0.5)
    text = metrics.render().decode()
    assert 'iop_edge_requests_total{code="200"} 3.0' in text
    assert "iop_edge_queue_depth 7.0" in text
    assert 'iop_edge_first_token_seconds_bucket{le="1.0"} 1.0' in text


@pytest.mark.parametrize("name", ["edge_requests_total", "iop_Edge_x_total", "iop_x"])
def test_a_name_that_breaks_the_rule_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Metrics(with_process=False).gauge(name, "doc")


def test_a_counter_ends_in_total_and_identifiers_are_no_labels() -> None:
    metrics = Metrics(with_process=False)
    with pytest.raises(ValueError, match="_total"):
        metrics.counter("iop_edge_requests", "doc")
    with pytest.raises(ValueError, match="one series per request_id"):
        metrics.counter("iop_edge_requests_total", "doc", ["request_id"])
