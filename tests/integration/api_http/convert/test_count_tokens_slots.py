"""Counting tokens beside a full engine (SF-14)."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_fleet import KEY, fleet_of

from iop.edge.calls import SIDE_WORK_MAX
from iop.edge.snapshot import QueueSpec
from iop.testing.stub_engine import StubCall, sse_events, whole_answer
from iop.testing.waiting import eventually

CHAT = json.dumps({"model": "fast", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
COUNT = json.dumps({"model": "fast", "messages": [{"role": "user", "content": "x"}]}).encode()
PATH = "/v1/messages/count_tokens"


@pytest.mark.clause("SF-14", "EN-91", "EN-95")
async def test_counting_takes_no_generation_slot_and_waits_for_none() -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        if call.path.startswith(PATH.encode()):
            await call.write(whole_answer(b'{"input_tokens":7}'))
            return
        await call.start_events()
        await call.chunk(*sse_events(["one"], finish=None, is_done=False))
        await go_on.wait()
        await call.chunk(*sse_events(["two"]))
        await call.end_chunks()

    async with fleet_of(capacity=1, long_context_tokens=1) as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n" % len(CHAT) + CHAT
        )
        await caller.read_until(b"one")
        assert fleet.edge.pools.leases.in_flight(KEY) == 1
        for path in (PATH, PATH + "?beta=true"):
            status, fields, answer = await fleet.post(COUNT, path=path)
            assert (status, answer) == (200, b'{"input_tokens":7}')
            assert b"x-iop-estimate" not in fields
            assert b"x-iop-queue-position" not in fields
        go_on.set()
        await caller.read_until(b"[DONE]")
        await fleet.settled()


@pytest.mark.clause("SF-14", "EN-95")
async def test_counting_is_bounded_and_its_failures_are_not_the_engines() -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        if call.path != PATH.encode():
            await call.start_events()
            await call.chunk(*sse_events(["fine"]))
            await call.end_chunks()
            return
        await go_on.wait()
        await call.write(whole_answer(b"broken", status=b"500 Internal Server Error", kind=b"text/plain"))

    queue = QueueSpec(max_waiters=20, timeout_s=20.0, no_capacity_grace_s=0.3, paused_timeout_s=1.0)
    async with fleet_of(capacity=1, queue=queue) as fleet:
        fleet.stub.script = script
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(fleet.post(COUNT, path=PATH)) for _ in range(SIDE_WORK_MAX + 2)]
            await eventually(lambda: len(fleet.stub.calls) == SIDE_WORK_MAX)
            assert fleet.edge.pools.leases.side_in_flight(KEY) == SIDE_WORK_MAX
            assert fleet.edge.pools.leases.in_flight(KEY) == 0
            go_on.set()
        assert [task.result()[0] for task in asked] == [500] * len(asked)
        provider = fleet.edge.pools.provider_figures(KEY)
        assert (provider.health, provider.in_flight) == ("online", 0)
        status, _, answer = await fleet.post(CHAT)
        assert (status, b"[DONE]" in answer) == (200, True)
        await fleet.settled()
