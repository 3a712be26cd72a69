"""What a Node says about addresses stays inside."""

from __future__ import annotations

import time

import pytest

from iop.edge.scrub import TEXT_CHARS_MAX, scrub
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingSink,
    adapter_spec,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.wire.messages import StreamError


@pytest.mark.clause("EN-04")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("cannot connect to http://10.0.0.5:8000/v1/chat: refused", "cannot connect to [address] refused"),
        ("connect 10.1.2.3:443 failed", "connect [address] failed"),
        ("peer [fe80::1%eth0]:7070 closed", "peer [address] closed"),
        ("gpu-1.lab.example:8000 timed out", "[address] timed out"),
        ("localhost:8000 and localhost", "[address] and [address]"),
        ("dial unix:/run/engine.sock: no such file", "dial [address] no such file"),
        ("version 1.2.3 of step 4:2 at 12:30:05", "version 1.2.3 of step 4:2 at 12:30:05"),
        ("tokens [10] of [12:30]", "tokens [10] of [12:30]"),
        ("the model org/Real-8B is not loaded", "the model org/Real-8B is not loaded"),
    ],
)
def test_addresses_are_taken_out_and_nothing_else(given, told):
    assert scrub(given) == told


def test_hostile_texts_are_bounded_in_length_and_time():
    began = time.process_time()
    for text in ("a." * 100_000, "a-" * 100_000, "[" + ":" * 100_000, "1." * 100_000, "x://" * 50_000):
        assert len(scrub(text)) <= TEXT_CHARS_MAX
    assert time.process_time() - began < 1.0


@pytest.mark.clause("EN-04")
async def test_a_stream_error_reaches_the_surface_without_the_engines_address(make_edge):
    edge = await make_edge(snapshot_of({"n1/main": adapter_spec("main")}, {"fast": ["n1/main"]}))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    node.streams[0].fail_with(
        StreamError(code="upstream_error", message="10.0.0.5:8000 reset the connection")
    )
    assert sink.error.message == "[address] reset the connection"
