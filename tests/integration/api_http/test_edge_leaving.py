"""Callers that leave, and what it leaves behind: nothing (P-08, P-09)."""

from __future__ import annotations

import asyncio

import pytest
from http_fleet import HttpFleet, fleet_of, post

from iop.edge.calls import Outcome
from iop.edge.snapshot import DispatchLimits
from iop.testing.http_site import RawCaller
from iop.testing.stub_engine import StubCall, sse_events, whole_answer
from iop.testing.waiting import SOON_S, eventually

STREAM = b'{"model":"fast","stream":true,"messages":[]}'
PLAIN = b'{"model":"fast","messages":[]}'
ID = b"x-request-id: this-one"


async def leave(caller: RawCaller, is_polite: bool) -> None:
    if is_polite:
        await caller.close()
    else:
        caller.reset()


async def hold(call: StubCall) -> None:
    await call.wait_gone(within_s=20)


async def hold_after_headers(call: StubCall) -> None:
    await call.start_events()
    await hold(call)


async def hold_mid_stream(call: StubCall) -> None:
    await call.start_events()
    await call.chunk(*sse_events(["one"], finish=None, is_done=False))
    await hold(call)


async def hold_mid_answer(call: StubCall) -> None:
    await call.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"a":')
    await hold(call)


async def call_is_held(fleet: HttpFleet) -> StubCall:
    await eventually(lambda: bool(fleet.stub.calls))
    return fleet.stub.calls[-1]


@pytest.mark.case("P-08")
@pytest.mark.clause("SF-07", "EN-56", "EN-112")
@pytest.mark.parametrize("is_polite", [True, False])
@pytest.mark.parametrize(
    ("script", "mark", "body"),
    [
        (hold, b"", STREAM),
        (hold_after_headers, b"\r\n\r\n", STREAM),
        (hold_mid_stream, b"one", STREAM),
        (hold_mid_answer, b'{"a":', PLAIN),
    ],
    ids=["before headers", "before a token", "mid-stream", "mid-answer"],
)
async def test_a_caller_that_leaves_ends_the_engines_request(script, mark, body, is_polite) -> None:
    async with fleet_of(capacity=1) as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(body, ID))
        call = await call_is_held(fleet)
        if mark:
            await caller.read_until(mark)
        await leave(caller, is_polite)
        await call.wait_gone(within_s=SOON_S)
        await fleet.settled()
        assert fleet.outcome("this-one") is Outcome.CLIENT_CANCELLED
        assert fleet.edge.pools.leases.returned_total == 1


@pytest.mark.case("P-08")
@pytest.mark.clause("SF-07", "EN-112")
@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_caller_that_leaves_during_its_upload_reaches_no_engine(is_polite: bool) -> None:
    async with fleet_of() as fleet:
        caller = await fleet.call()
        await caller.send(post(b'{"model":"fast","x":"' + b"y" * 500_000 + b'"}', ID)[:-1000])
        await eventually(lambda: fleet.surface.buffered_bytes > 0)
        await leave(caller, is_polite)
        await eventually(lambda: fleet.surface.buffered_bytes == 0)
        assert fleet.stub.calls == []
        assert fleet.leases == 0
        assert fleet.outcome("this-one") is Outcome.CLIENT_CANCELLED
        assert fleet.edge.outcomes.live == 0


@pytest.mark.case("P-08")
@pytest.mark.clause("SF-07", "EN-110")
@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_caller_that_leaves_the_queue_is_forgotten_at_once(is_polite: bool) -> None:
    async with fleet_of(capacity=1) as fleet:
        fleet.stub.script = hold
        first, second = await fleet.call(), await fleet.call()
        await first.send(post(STREAM))
        await call_is_held(fleet)
        await second.send(post(STREAM, ID))
        await eventually(lambda: fleet.edge.outcomes.live == 2)
        await leave(second, is_polite)
        await eventually(lambda: fleet.outcome("this-one") is Outcome.CLIENT_CANCELLED, within_s=SOON_S)
        assert len(fleet.stub.calls) == 1
        await leave(first, is_polite)
        await fleet.settled()


@pytest.mark.case("P-08")
@pytest.mark.clause("SF-07", "EN-112")
@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_caller_that_leaves_after_the_last_byte_was_served(is_polite: bool) -> None:
    async with fleet_of() as fleet:
        caller = await fleet.call()
        await caller.send(post(STREAM, ID))
        await caller.read_until(b"[DONE]\n\n")
        await leave(caller, is_polite)
        await fleet.settled()
        assert fleet.outcome("this-one") is Outcome.COMPLETE


# ---- the lease leak matrix ----


async def end_ok(call: StubCall) -> None:
    if call.json.get("stream"):
        await call.start_events()
        await call.chunk(*sse_events(["x"]))
        await call.end_chunks()
    else:
        await call.write(whole_answer(b"{}"))


async def end_500(call: StubCall) -> None:
    await call.write(whole_answer(b'{"error":{}}', status=b"500 Internal Server Error"))


async def end_reset(call: StubCall) -> None:
    if call.json.get("stream"):
        await call.start_events()
        await call.chunk(b"data: {")
        await asyncio.sleep(0.002)
    call.reset()


async def end_bad_json(call: StubCall) -> None:
    await call.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{{{")
    call.close()


ENDINGS = {
    "ok": end_ok,
    "500": end_500,
    "reset": end_reset,
    "bad JSON": end_bad_json,
    "time-out": hold,
    "gone": hold,
}
ROUTES = ["chat/completions", "completions", "messages", "responses", "embeddings"]
ROUNDS = 8
"""The long form runs fifty; a leak of any kind shows in the first few, since there is one slot."""


@pytest.mark.case("P-09")
@pytest.mark.clause("SF-07", "EN-31", "EN-112")
@pytest.mark.parametrize("ending", ENDINGS)
async def test_no_route_and_no_ending_leaks_a_lease(ending: str) -> None:
    timeout_s = 0.15 if ending == "time-out" else 20.0
    rounds = 2 if ending == "time-out" else ROUNDS
    limits = DispatchLimits(first_byte_timeout_s=timeout_s, total_timeout_s=30.0)
    async with fleet_of(capacity=1, dispatch_limits=limits) as fleet:
        breaker_off = fleet.edge.snapshot.breaker
        assert breaker_off.failures == 10_000
        for route in ROUTES:
            for body in (PLAIN, STREAM):
                for _ in range(rounds):
                    fleet.stub.script = ENDINGS[ending]
                    fleet.stub.calls.clear()
                    caller = await fleet.call()
                    await caller.send(post(body, path=f"/v1/{route}"))
                    if ending == "gone":
                        call = await call_is_held(fleet)
                        caller.reset()
                        await call.wait_gone(within_s=SOON_S)
                    else:
                        await caller.read_until(b"\r\n\r\n")
                    await caller.close()
                    await fleet.settled()
                assert fleet.leases == 0
        fleet.stub.script = end_ok
        assert (await fleet.post(PLAIN))[0] == 200
        leases = fleet.edge.pools.leases
        await fleet.settled()
        assert leases.returned_total == leases.granted_total


@pytest.mark.clause("SF-08", "EN-102")
async def test_a_slow_caller_slows_its_own_provider_and_nobody_else() -> None:
    sent = 0

    async def flood(call: StubCall) -> None:
        nonlocal sent
        if call.json.get("user") != "slow":
            await end_ok(call)
            return
        await call.start_events()
        while not call.is_peer_gone.is_set():
            await call.chunk(b"data: " + b"x" * 8000 + b"\n\n")
            sent += 8000

    async with fleet_of() as fleet:
        fleet.stub.script = flood
        slow = await fleet.call()
        slow.writer.transport.pause_reading()
        await slow.send(post(STREAM[:-1] + b',"user":"slow"}'))
        before = -1
        while before != sent or sent == 0:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.2)
        assert sent < 16 << 20, "window, socket buffers, and no more"
        for _ in range(5):
            assert (await fleet.post(STREAM))[0] == 200
        slow.writer.transport.resume_reading()
        stuck = sent
        async with asyncio.timeout(30):
            while sent < stuck + (1 << 20):
                await slow.reader.read(1 << 16)
        slow.reset()
        await fleet.settled()
