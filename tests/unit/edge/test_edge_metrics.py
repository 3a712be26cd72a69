"""What a scrape reads is the state itself."""

from __future__ import annotations

import pytest

from iop.core.errors import NotFound
from iop.edge.metrics import EdgeCollector
from iop.obs.metrics import Metrics
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingSink,
    adapter_spec,
    request_of,
    snapshot_of,
    tunnel_to,
)


@pytest.mark.clause("SF-32")
async def test_a_scrape_shows_leases_outcomes_refusals_queues_and_nodes(make_edge):
    edge = await make_edge(
        snapshot_of({"n1/main": adapter_spec("main", capacity=3, long_capacity=1)}, {"fast": ["n1/main"]})
    )
    node = FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    await edge.dispatcher.dispatch(request_of("fast", tokens=5000), tunnel_to(RecordingSink()))
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    node.streams[0].start()
    node.streams[0].end()
    with pytest.raises(NotFound):
        await edge.dispatcher.dispatch(request_of("slow"), tunnel_to(RecordingSink()))
    metrics = Metrics(with_process=False)
    metrics.registry.register(EdgeCollector(edge))
    lines = set(metrics.render().decode().splitlines())
    assert lines >= {
        'iop_edge_requests_total{outcome="complete"} 1.0',
        'iop_edge_requests_total{outcome="rejected"} 1.0',
        'iop_edge_refusals_total{reason="model_not_found"} 1.0',
        'iop_edge_provider_leases{kind="normal",node="n1",provider="main"} 1.0',
        'iop_edge_provider_leases{kind="long",node="n1",provider="main"} 1.0',
        'iop_edge_provider_capacity{node="n1",provider="main"} 3.0',
        'iop_edge_queue_depth{model="fast"} 0.0',
        'iop_edge_nodes{step="ready"} 1.0',
        "iop_edge_requests_live 2.0",
    }
