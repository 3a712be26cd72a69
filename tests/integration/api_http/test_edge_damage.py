"""Damaged provider bytes through the whole fleet: no hang, no leak, no false success, no cross-talk (SF-14,
P-09).
"""

from __future__ import annotations

import asyncio
import json
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


RUN_LINES = (
    b'{"model":"m","message":{"role":"assistant","content":"alpha "},"done":false}\n',
    '{"model":"m","message":{"role":"assistant","content":"東京"},"done":false}\n'.encode(),
    b'{"model":"m","message":{"content":"","tool_calls":[{"function":{"name":"f","arguments":{"a":1}}}]},"done":false}\n',
    b'{"model":"m","done":true,"done_reason":"stop","prompt_eval_count":3,"eval_count":2}\n',
)
RAW_RUN = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(line), line) for line in RUN_LINES)
    + b"0\r\n\r\n"
)
RUN_CALLERS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
SUCCESS = (b"data: [DONE]", b"message_stop", b"response.completed")


@pytest.mark.case("P-09")
@pytest.mark.clause("SF-14", "EN-112", "SF-10")
@pytest.mark.slow
async def test_damaged_answers_of_runs_end_and_none_looks_whole_that_was_cut() -> None:
    await damage_runs(3, 2 * ROUNDS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.case("P-09")
@pytest.mark.clause("SF-14", "EN-112", "SF-10")
async def test_five_thousand_damaged_answers_of_runs_end() -> None:
    await damage_runs(4, 5000)


async def damage_runs(seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    async with fleet_of(capacity=1, is_ollama=True, bound_s=rounds + 60.0) as fleet:
        for number in range(rounds):
            data = damage(RAW_RUN, rng)

            async def script(call: StubCall, data: bytes = data) -> None:
                place = rng.randrange(len(data) + 1)
                await call.write(data[:place])
                await asyncio.sleep(0)
                await call.write(data[place:])
                call.close()

            fleet.stub.script = script
            path, asked = rng.choice(list(RUN_CALLERS.items()))
            is_stream = rng.random() < 0.7
            body = json.dumps({"model": "fast", "stream": is_stream, **asked}).encode()
            caller = await fleet.call()
            fields = (b"x-request-id: run-%d" % number, b"Connection: close")
            await caller.send(post(body, *fields, path=path))
            answer = await caller.read_to_end()
            about = (number, path, data, answer)
            assert answer.startswith(b"HTTP/1.1 "), about
            if b'"done":true' not in data:
                assert not any(sign in answer for sign in SUCCESS), about
                assert is_stream or not answer.startswith(b"HTTP/1.1 200"), about
            await fleet.settled()
            assert fleet.outcome(f"run-{number}") is not None
        assert fleet.edge.pools.leases.returned_total == rounds


async def healthy(call: StubCall) -> None:
    await call.write(whole_answer(b'{"healthy":true}'))
