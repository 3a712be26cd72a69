"""Requests die by their reference count: the collector finds nothing of them, whatever their end was."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from http_fleet import HttpFleet, fleet_of, post

from iop.adapters.http_exchange import HttpRequest
from iop.adapters.http_tunnel import HttpTunnel
from iop.api.http.exchange import Exchange
from iop.api.http.relay import Relay
from iop.edge.attempt import Attempt
from iop.edge.handle import DispatchHandle
from iop.node.work import HeldTunnel
from iop.testing.stub_engine import Script, StubCall, whole_answer
from iop.wire.stream_edge import EdgeStream
from iop.wire.stream_node import NodeStream

PLAIN = b'{"model":"fast","messages":[]}'
STREAM = b'{"model":"fast","messages":[],"stream":true}'
OF_A_REQUEST = (
    Attempt,
    DispatchHandle,
    EdgeStream,
    Exchange,
    HeldTunnel,
    HttpRequest,
    HttpTunnel,
    NodeStream,
    Relay,
)


@contextmanager
def cyclic_garbage() -> Iterator[Counter[str]]:
    """What of requests only the collector could find, by class; filled when the block has ended."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(value).__name__ for value in gc.garbage if isinstance(value, OF_A_REQUEST))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def whole(call: StubCall) -> None:
    await call.write(whole_answer(b'{"id":"x","choices":[]}'))


async def refused(call: StubCall) -> None:
    await call.write(whole_answer(b'{"error":{"message":"no"}}', status=b"400 Bad Request"))


async def streamed(call: StubCall) -> None:
    await call.start_events()
    await call.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
    await call.chunk(b"data: [DONE]\n\n")
    await call.end_chunks()


async def cut(call: StubCall) -> None:
    await call.start_events()
    await call.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    call.close()


@pytest.mark.clause("SF-08")
@pytest.mark.parametrize(
    ("script", "body"),
    [(whole, PLAIN), (refused, PLAIN), (streamed, STREAM), (cut, STREAM)],
    ids=["whole", "refused", "streamed", "cut"],
)
async def test_an_ended_request_leaves_no_cycle_behind(script: Script, body: bytes) -> None:
    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        with cyclic_garbage() as found:
            for _ in range(5):
                await caller.send(post(body))
                await caller.read_answer()
            await fleet.settled()
        assert not found


@pytest.mark.clause("SF-07", "SF-08")
async def test_a_request_whose_caller_left_leaves_no_cycle_behind() -> None:
    async def endless(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b"data: {}\n\n")
        await call.wait_gone()

    async with fleet_of() as fleet:
        fleet.stub.script = endless
        with cyclic_garbage() as found:
            await leave_early(fleet)
            await fleet.settled()
        assert not found


async def leave_early(fleet: HttpFleet) -> None:
    caller = await fleet.call()
    await caller.send(post(STREAM))
    await caller.read_until(b"data: {}\n\n")
    caller.reset()
