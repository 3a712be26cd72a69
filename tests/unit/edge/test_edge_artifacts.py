"""Profile artifacts: names without places, bytes over the Node's connection."""

from __future__ import annotations

import asyncio

import pytest

from iop.core.errors import NotFound, Unavailable
from iop.testing.edge_fleet import FakeEdgeConnection, adapter_spec, provider_key, snapshot_of
from iop.testing.waiting import eventually
from iop.wire.messages import CancelReason

KEY = provider_key("n1/main")
SNAPSHOT = snapshot_of({"n1/main": adapter_spec("main")}, {"fast": ["n1/main"]})
PLACE = "file:///var/lib/engine/profiles/p1/rank0.json"


@pytest.mark.clause("AD-46", "EN-04")
async def test_an_artifact_is_named_without_its_place_and_fetched_from_its_node(make_edge):
    edge = await make_edge(SNAPSHOT)
    node = FakeEdgeConnection(edge.nodes).connect()
    uri = edge.artifacts.publish(KEY, PLACE)
    assert uri == edge.artifacts.publish(KEY, PLACE)
    assert "engine" not in uri
    got = []

    async def read() -> None:
        got.extend([data async for data in edge.artifacts.read(uri)])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        await eventually(lambda: node.streams)
        stream = node.streams[0]
        assert (stream.request.adapter, stream.request.path) == ("main", PLACE)
        stream.start()
        stream.send(b"one ")
        stream.send(b"two")
        stream.end()
    assert b"".join(got) == b"one two"
    assert stream.credit_returned == 7


@pytest.mark.clause("AD-46")
async def test_unknown_lost_and_vanished_artifacts_are_clear_errors(make_edge):
    edge = await make_edge(SNAPSHOT)
    with pytest.raises(NotFound):
        await anext(edge.artifacts.read("iop-artifact:n1/main/0"))
    uri = edge.artifacts.publish(KEY, PLACE)
    with pytest.raises(Unavailable):
        await anext(edge.artifacts.read(uri))
    for end in ("lose", "vanish"):
        node = FakeEdgeConnection(edge.nodes).connect()

        async def read() -> None:
            with pytest.raises(Unavailable):
                await anext(edge.artifacts.read(uri))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            await eventually(lambda node=node: node.streams)
            if end == "lose":
                node.lose()
            else:
                node.streams[0].start(404)
                node.streams[0].end()


@pytest.mark.clause("AD-46", "EN-56")
async def test_a_reader_who_leaves_calls_the_node_off(make_edge):
    edge = await make_edge(SNAPSHOT)
    node = FakeEdgeConnection(edge.nodes).connect()
    chunks = edge.artifacts.read(edge.artifacts.publish(KEY, PLACE))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(anext(chunks))
        await eventually(lambda: node.streams)
        node.streams[0].start()
        node.streams[0].send(b"x")
    assert first.result() == b"x"
    await chunks.aclose()
    assert node.streams[0].cancelled == [CancelReason.CLIENT_GONE]
