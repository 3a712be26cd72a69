"""Requests die by their reference count: the collector finds nothing of them, whatever their end was."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from http_fleet import KEY, HttpFleet, fleet_of, post

from iop.adapters.http_exchange import HttpRequest
from iop.adapters.http_tunnel import HttpTunnel
from iop.api.http.convert.hook import Conversion
from iop.api.http.convert.shell import ConvertingExchange
from iop.api.http.exchange import Exchange
from iop.api.http.limits import HttpLimits
from iop.api.http.relay import Relay
from iop.api.http.runs import RunRelay
from iop.edge.attempt import Attempt
from iop.edge.handle import DispatchHandle
from iop.edge.snapshot import DispatchLimits, QueueSpec
from iop.net.edge_connection import OutboundHandle
from iop.net.node_connection import InboundRunHandle, InboundTunnelHandle
from iop.node.work import HeldRun, HeldTunnel
from iop.testing.http_site import RawCaller
from iop.testing.stub_engine import Script, StubCall, StubEngine, whole_answer
from iop.testing.waiting import eventually
from iop.wire.stream_edge import EdgeStream
from iop.wire.stream_node import NodeStream

PLAIN = b'{"model":"fast","messages":[]}'
STREAM = b'{"model":"fast","messages":[],"stream":true}'
CHAT = b'{"model":"fast","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'
CHAT_STREAM = CHAT[:-1] + b',"stream":true}'
OF_A_REQUEST = (
    Attempt,
    Conversion,
    ConvertingExchange,
    DispatchHandle,
    EdgeStream,
    Exchange,
    HeldRun,
    HeldTunnel,
    HttpRequest,
    HttpTunnel,
    InboundRunHandle,
    InboundTunnelHandle,
    NodeStream,
    OutboundHandle,
    Relay,
    RunRelay,
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


async def said(call: StubCall) -> None:
    delta = b'{"message":{"role":"assistant","content":"hello"},"done":false}\n'
    end = b'{"message":{"role":"assistant","content":""},"done":true,"done_reason":"stop"}\n'
    await call.write(whole_answer(delta + end, kind=b"application/x-ndjson"))


async def lacking(call: StubCall) -> None:
    await call.write(whole_answer(b"nothing here", status=b"404 Not Found", kind=b"text/plain"))


async def silent(call: StubCall) -> None:
    await call.wait_gone()


async def bulky(call: StubCall) -> None:
    await call.start_events()
    await call.chunk(b"data: " + b"x" * 5000)
    await call.wait_gone()


async def endless(call: StubCall) -> None:
    await call.start_events()
    await call.chunk(b"data: {}\n\n")
    await call.wait_gone()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request to a fleet of a certain kind."""

    script: Script
    body: bytes = CHAT
    path: str = "/v1/chat/completions"
    fleet: dict[str, Any] = field(default_factory=dict)


CHATS_ONLY = {"operations": frozenset({"chat_completions"})}
CASES = {
    "converted": Case(script=whole, path="/v1/messages", fleet=CHATS_ONLY),
    "converted-refused": Case(script=refused, path="/v1/messages", fleet=CHATS_ONLY),
    "converted-streamed": Case(script=streamed, body=CHAT_STREAM, path="/v1/messages", fleet=CHATS_ONLY),
    "converted-cut": Case(script=cut, body=CHAT_STREAM, path="/v1/messages", fleet=CHATS_ONLY),
    "run": Case(script=said, fleet={"is_ollama": True}),
    "run-streamed": Case(script=said, body=CHAT_STREAM, fleet={"is_ollama": True}),
    "run-too-large": Case(script=said, fleet={"is_ollama": True, "limits": HttpLimits(sse_event_bytes=2)}),
    "estimated": Case(script=lacking, path="/v1/messages/count_tokens"),
    "event-too-large": Case(
        script=bulky, body=CHAT_STREAM, fleet={"limits": HttpLimits(sse_event_bytes=2000)}
    ),
    "timed-out": Case(
        script=silent,
        fleet={"dispatch_limits": DispatchLimits(first_byte_timeout_s=0.1, total_timeout_s=5.0)},
    ),
}


@pytest.mark.clause("SF-08")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_no_kind_of_request_leaves_a_cycle_behind(case: Case) -> None:
    async with fleet_of(**case.fleet) as fleet:
        fleet.stub.script = case.script
        caller = await fleet.call()
        with cyclic_garbage() as found:
            await ask(fleet, case, caller)
        assert not found


async def ask(fleet: HttpFleet, case: Case, caller: RawCaller) -> None:
    for _ in range(2):
        await caller.send(post(case.body, path=case.path))
        await caller.read_answer()
    await over(fleet)


@pytest.mark.clause("SF-08", "SF-10")
async def test_a_request_that_another_provider_took_leaves_no_cycle_behind() -> None:
    several = CHAT[:-1] + b',"n":2}'
    async with (
        StubEngine(whole) as tunnel,
        fleet_of(is_ollama=True, second_endpoint=tunnel.endpoint) as fleet,
    ):
        caller = await fleet.call()
        with cyclic_garbage() as found:
            await ask(fleet, Case(script=whole, body=several), caller)
        assert (len(tunnel.calls), fleet.stub.calls) == (2, [])
        assert not found


@pytest.mark.clause("EN-110")
async def test_a_caller_that_left_the_queue_leaves_no_cycle_behind() -> None:
    queue = QueueSpec(max_waiters=8, timeout_s=30.0, comment_s=0.05)
    async with fleet_of(capacity=1, queue=queue) as fleet:
        fleet.stub.script = endless
        first = await fleet.call()
        await first.send(post(STREAM))
        await first.read_until(b"data: {}\n\n")
        with cyclic_garbage() as found:
            second = await fleet.call()
            await second.send(post(STREAM))
            await second.read_until(b": waiting behind 0\n")
            second.reset()
            await eventually(lambda: fleet.edge.outcomes.live == 1)
            await a_few_turns()
        assert not found


@pytest.mark.clause("EN-31", "AD-41")
@pytest.mark.parametrize("is_lost", [False, True], ids=["aborted", "lost"])
async def test_a_stream_that_was_ended_from_outside_leaves_no_cycle_behind(is_lost: bool) -> None:
    async with fleet_of() as fleet:
        fleet.stub.script = endless
        caller = await fleet.call()
        with cyclic_garbage() as found:
            await caller.send(post(STREAM))
            await caller.read_until(b"data: {}\n\n")
            if is_lost:
                await fleet.stop_node()
            else:
                fleet.edge.dispatcher.abort([KEY])
            await caller.read_until(b"0\r\n\r\n")
            await over(fleet)
        assert not found


async def over(fleet: HttpFleet) -> None:
    """Wait until nothing of the requests is under way, on either side."""
    await fleet.settled()
    node = fleet.node
    assert node is not None
    await eventually(lambda: node.work is None or node.work.in_flight == 0)
    await a_few_turns()


async def a_few_turns() -> None:
    """Let callbacks and cancelled tasks come to their ends."""
    for _ in range(10):
        await asyncio.sleep(0)


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
