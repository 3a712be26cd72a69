"""The JSON that operators' programs read keeps its shape."""

from __future__ import annotations

import json

import pytest

from iop.core.errors import InvalidRequest, NotFound, Unavailable
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingSink,
    adapter_spec,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.wire.messages import CloseReason, CommandResponse, CommandType, ProviderReport, ProviderSnapshot

SNAPSHOT = snapshot_of(
    {"n1/main": adapter_spec("main", capacity=3, long_capacity=1)},
    {"fast": ["n1/main"]},
    aliases={"fast": ["fast-latest"]},
)


@pytest.mark.clause("EN-13", "EN-90", "EN-91", "EN-92", "EN-04")
async def test_status_has_the_published_shape_and_no_address(make_edge):
    edge = await make_edge(SNAPSHOT)
    node = FakeEdgeConnection(edge.nodes)
    node.register()
    pending = edge.status.status()["nodes"][0]
    assert (pending["step"], pending["connected"], pending["providers"][0]["capacity"]) == (
        "registered",
        False,
        0,
    )
    node.ready()
    await edge.dispatcher.dispatch(
        request_of("fast-latest", tokens=5000, request_id="r1"), tunnel_to(RecordingSink())
    )
    status = edge.status.status(with_leases=True)
    assert set(status) == {"config_revision", "nodes", "models", "counters", "leases"}
    shown = status["nodes"][0]
    assert set(shown) == {
        "id", "connected", "step", "since", "reason", "config_revision", "clock_skew_ms", "providers",
    }  # fmt: skip
    assert (shown["step"], shown["connected"], shown["config_revision"]) == ("ready", True, 1)
    assert shown["providers"][0] == {
        "id": "main",
        "type": "openai_compat",
        "category": "api",
        "status": "available",
        "health": "online",
        "capacity": 3,
        "in_flight": 1,
        "queued": 0,
        "long_capacity": 1,
        "long_in_flight": 1,
        "long_queued": 0,
        "weight_version": "unknown",
        "gates": [],
        "reason": "",
    }
    model = status["models"][0]
    assert (model["id"], model["providers"], model["queue_depth"], model["queue_max"], model["paused"]) == (
        "fast", ["n1/main"], 0, 1000, False,
    )  # fmt: skip
    (lease,) = status["leases"]
    assert set(lease) == {"id", "node", "provider", "kind", "run_id", "request_id", "since"}
    assert (lease["kind"], lease["request_id"]) == ("long", "r1")
    assert {"late_frames", "leases"} <= set(status["counters"])
    text = json.dumps(status)
    assert node.peer not in text
    assert node.token not in text


@pytest.mark.clause("EN-113")
async def test_a_clock_that_differs_is_shown_with_its_size(make_edge):
    edge = await make_edge(SNAPSHOT)
    node = FakeEdgeConnection(edge.nodes).connect()
    node.clock_skew_ms = -90_000
    shown = edge.status.status()["nodes"][0]
    assert shown["clock_skew_ms"] == -90_000
    assert "-90000 ms" in shown["reason"]


@pytest.mark.clause("EN-75", "EN-13", "EN-04")
async def test_a_command_asks_the_ready_owner_and_its_answer_names_no_address(make_edge):
    edge = await make_edge(SNAPSHOT)
    with pytest.raises(Unavailable):
        await edge.status.command("n1", "usage")
    node = FakeEdgeConnection(edge.nodes).connect()
    asked = []

    def answer(request):
        asked.append((request.type, request.adapter))
        return CommandResponse(
            type=request.type,
            ok=True,
            figures={"edge": "192.0.2.7:7070", "runs": "3"},
            providers=(ProviderSnapshot(id="main", reason="http://10.0.0.5:8000 is down"),),
        )

    node.answer_command = answer
    shown = await edge.status.command("n1", "transport", adapter="main")
    assert asked == [(CommandType.TRANSPORT, "main")]
    assert shown["figures"] == {"edge": "[address]", "runs": "3"}
    assert shown["providers"][0]["reason"] == "[address] is down"
    with pytest.raises(NotFound):
        await edge.status.command("n9", "usage")
    with pytest.raises(InvalidRequest):
        await edge.status.command("n1", "shutdown")


@pytest.mark.clause("EN-112")
async def test_explain_tells_candidates_choice_time_and_outcome(make_edge):
    edge = await make_edge(SNAPSHOT)
    FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), tunnel_to(RecordingSink()))
    shown = edge.status.explain("r1")
    assert shown["candidates"] == [{"provider": "n1/main", "eligible": True, "why": "has room"}]
    assert (shown["provider"], shown["attempts"], shown["outcome"]) == ("n1/main", 1, None)
    assert shown["weight_version"] == {"admission": "unknown", "first": "unknown", "last": "unknown"}
    edge.dispatcher.record_rejection("r2", "fast", "invalid_json")
    assert edge.status.explain("r2")["outcome"] == "rejected"
    with pytest.raises(NotFound):
        edge.status.explain("r3")


@pytest.mark.clause("EN-34", "EN-04")
async def test_an_engine_that_its_node_finds_down_is_shown_down(make_edge):
    edge = await make_edge(SNAPSHOT)
    node = FakeEdgeConnection(edge.nodes)
    node.register()
    node.ready()

    def shown() -> tuple[str, str]:
        provider = edge.status.status()["nodes"][0]["providers"][0]
        return provider["health"], provider["reason"]

    def report(health: str, reason: str = "", name: str = "main") -> None:
        told = ProviderSnapshot(id=name, health=health, reason=reason)
        edge.nodes.on_report(node, ProviderReport(providers=(told,)))

    report("offline", "connect to http://10.1.2.3:8000 failed")
    health, reason = shown()
    assert health == "offline"
    assert reason.startswith("by the Node's probe: ")
    assert "10.1.2.3" not in reason
    report("offline", name="not-configured")
    assert shown() == ("online", "")
    report("ready")
    assert shown() == ("online", "")
    report("not_ready")
    assert shown()[0] == "offline"
    edge.nodes.on_closed(node, CloseReason.CONNECTION_LOST)
    assert shown() == ("offline", "its Node is not connected")
