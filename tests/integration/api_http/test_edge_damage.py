"""Damaged provider bytes through the whole fleet: no hang, no leak, no false success, no cross-talk (SF-14,
P-09).
"""

from __future__ import annotations

import asyncio
import random

import pytest
from http_fleet import fleet_of, post

from iop.testing.stub_engine import StubCall, sse_events, whole_answer

STREAM = b'{"model":"fast","stream":true,"messages":[]}'
PLAIN = b'{"model":"fast","messages":[]}'
RAW_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in sse_events(["alpha ", "東京 ", "omega"]))
    + b"0\r\n\r\n"
)
RAW_PLAIN = whole_answer(b'{"id":"one","choices":[{"index":0,"message":{"content":"hi"}}]}')
ROUNDS = 150


def damage(data: bytes, rng: random.Random) -> bytes:
    """Cut it, or change, drop or repeat some bytes of it."""
    at = rng.randrange(len(data))
    match rng.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + rng.randbytes(rng.randrange(1, 4)) + data[at + rng.randrange(4) :]
        case 2:
            return data[:at] + data[at + rng.randrange(1, 20) :]
        case _:
            return data[:at] + data[max(0, at - 20) :]


@pytest.mark.case("P-09")
@pytest.mark.clause("SF-14", "EN-112", "SF-03")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_damaged_answers_end_and_leave_the_fleet_as_it_was(seed: int) -> None:
    rng = random.Random(seed)
    async with fleet_of(capacity=1) as fleet:
        for number in range(ROUNDS):
            is_stream = rng.random() < 0.7
            data = damage(RAW_STREAM if is_stream else RAW_PLAIN, rng)

            async def script(call: StubCall, data: bytes = data) -> None:
                place = rng.randrange(len(data) + 1)
                await call.write(data[:place])
                await asyncio.sleep(0)
                await call.write(data[place:])
                call.close()

            fleet.stub.script = script
            caller = await fleet.call()
            request_id = f"damage-{number}"
            await caller.send(
                post(
                    STREAM if is_stream else PLAIN,
                    b"x-request-id: " + request_id.encode(),
                    b"Connection: close",
                )
            )
            answer = await caller.read_to_end()
            assert answer.startswith(b"HTTP/1.1 "), (number, data)
            if is_stream and answer.endswith(b"0\r\n\r\n") and b"text/event-stream" in answer:
                events = answer.partition(b"\r\n\r\n")[2]
                is_finished = b'"finish_reason": "' in data or b"[DONE]" in data
                assert b'"error":' in events or is_finished, (number, data, answer)
            await fleet.settled()
            assert fleet.outcome(request_id) is not None
            fleet.stub.script = healthy
            status, _, body = await fleet.post(PLAIN)
            assert (status, body) == (200, b'{"healthy":true}'), (number, data)
        assert fleet.edge.pools.leases.returned_total == 2 * ROUNDS


async def healthy(call: StubCall) -> None:
    await call.write(whole_answer(b'{"healthy":true}'))
