"""Streams that a KEEP pause froze: silent, yet alive, and whole when they go on (P-23)."""

from __future__ import annotations

import asyncio

import pytest
from http_fleet import KEY, fleet_of, post

from iop.api.http import pulse
from iop.edge.calls import Outcome
from iop.testing.stub_engine import StubCall, sse_events
from iop.testing.waiting import eventually

BODY = b'{"model":"fast","stream":true,"messages":[{"role":"user","content":"x"}]}'
ID = b"x-request-id: this-one"
BEAT = b": paused\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "BEAT_S", 0.05)


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-41", "SF-03")
async def test_a_frozen_stream_shows_life_and_then_goes_on_where_it_stood() -> None:
    go_on = asyncio.Event()
    tail = sse_events(["two"])

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*sse_events(["one"], finish=None, is_done=False))
        await call.chunk(tail[0][:10])  # half an event: the Edge keeps it, so a beat cannot fall into it
        await go_on.wait()
        await call.chunk(tail[0][10:], *tail[1:])
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(BODY, ID))
        await caller.read_until(b"one")
        assert fleet.edge.dispatcher.freeze([KEY]) == 1
        await caller.read_until(BEAT)
        await caller.read_until(BEAT)
        fleet.edge.dispatcher.thaw([KEY])
        go_on.set()
        rest = await caller.read_until(b"[DONE]\n\n")
        assert tail[0] in rest, "whole, with nothing in its midst"
        await fleet.settled()
        assert fleet.outcome("this-one") is Outcome.COMPLETE


@pytest.mark.clause("AD-41", "SF-07")
async def test_a_beat_reaches_nobody_after_the_caller_has_left() -> None:
    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*sse_events(["one"], finish=None, is_done=False))
        await call.wait_gone(within_s=20)

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(BODY, ID))
        await caller.read_until(b"one")
        fleet.edge.dispatcher.freeze([KEY])
        await caller.read_until(BEAT)
        await caller.close()
        await eventually(lambda: fleet.outcome("this-one") is Outcome.CLIENT_CANCELLED)
        fleet.edge.dispatcher.thaw([KEY])
        await fleet.settled()


@pytest.mark.clause("SF-03")
async def test_an_answer_that_is_no_stream_gets_no_comment() -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        await call.write(
            b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a":'
        )
        await go_on.wait()
        await call.write(b'"b"}')

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller, other = await fleet.call(), await fleet.call()
        await caller.send(post(b'{"model":"fast","messages":[]}'))
        await caller.read_until(b'{"a":')
        fleet.edge.dispatcher.freeze([KEY])

        async def stream(call: StubCall) -> None:
            await call.start_events()
            await call.chunk(*sse_events(["one"], finish=None, is_done=False))
            await go_on.wait()
            await call.chunk(*sse_events(["two"]))
            await call.end_chunks()

        fleet.stub.script = stream
        await other.send(post(BODY))
        await other.read_until(BEAT)
        await other.read_until(BEAT)  # by then the one beside it would have had its own
        fleet.edge.dispatcher.thaw([KEY])
        go_on.set()
        assert await caller.read_until(b"}") == b'"b"}'


@pytest.mark.clause("AD-41", "SF-10")
async def test_a_frozen_run_shows_life_too() -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        await call.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        await call.chunk(b'{"model":"m","message":{"role":"assistant","content":"one"},"done":false}\n')
        await go_on.wait()
        await call.chunk(
            b'{"model":"m","message":{"role":"assistant","content":"two"},"done":true,"done_reason":"stop"}\n'
        )
        await call.end_chunks()

    async with fleet_of(is_ollama=True) as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(BODY))
        await caller.read_until(b"one")
        fleet.edge.dispatcher.freeze([KEY])
        await caller.read_until(BEAT)
        fleet.edge.dispatcher.thaw([KEY])
        go_on.set()
        assert b"two" in await caller.read_until(b"[DONE]\n\n")
