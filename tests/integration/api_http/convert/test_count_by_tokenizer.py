"""Counting at providers that have no route for counts but a tokenizer that takes chats (SF-14)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_fleet import KEY, fleet_of

from iop.edge.snapshot import DispatchLimits
from iop.testing.stub_engine import StubCall, StubEngine, whole_answer

PATH = "/v1/messages/count_tokens"
OPERATIONS = frozenset({"models", "chat_completions", "tokenize"})
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
PICTURE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}


def ask(content: Any, **more: Any) -> bytes:
    return json.dumps({"model": "fast", "messages": [{"role": "user", "content": content}], **more}).encode()


@pytest.mark.clause("SF-14", "SF-01", "EN-51")
async def test_a_tokenizers_count_is_the_answer_and_takes_no_slot() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def script(call: StubCall) -> None:
        begun.set()
        await go_on.wait()
        await call.write(whole_answer(b'{"count":41,"max_model_len":1024,"tokens":[1,2]}'))

    async with fleet_of(capacity=1, operations=OPERATIONS) as fleet:
        fleet.stub.script = script
        async with asyncio.TaskGroup() as tasks:
            body = ask("hi", system="Be brief.", tools=[TOOL])
            counting = tasks.create_task(fleet.post(body, path=PATH))
            await begun.wait()
            leases = fleet.edge.pools.leases
            assert (leases.in_flight(KEY), leases.side_in_flight(KEY)) == (0, 1)
            go_on.set()
        status, headers, answer = counting.result()
        assert (status, answer) == (200, b'{"input_tokens":41}')
        assert b"x-iop-estimate" not in headers
        assert headers[b"x-iop-converted"] == b"tokenize"
        (call,) = fleet.stub.calls
        assert (call.method, call.path) == (b"POST", b"/tokenize")
        assert call.json == {
            "model": "org/Real-8B-Instruct",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
            "add_generation_prompt": True,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "look",
                        "description": "Looks.",
                        "parameters": {"type": "object"},
                    },
                }
            ],
        }
        await fleet.settled()


@pytest.mark.clause("SF-14")
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (b"404 Not Found", b'{"detail":"Not Found"}'),
        (b"405 Method Not Allowed", b""),
        (b"501 Not Implemented", b"{}"),
        (b"400 Bad Request", b'{"error":{"message":"no template"}}'),
        (b"500 Internal Server Error", b"broken"),
        (b"200 OK", b'{"tokens":[1,2]}'),
        (b"200 OK", b'{"count":true}'),
        (b"200 OK", b"["),
    ],
)
async def test_an_answer_without_a_count_leads_to_the_marked_estimate(status: bytes, body: bytes) -> None:
    async def script(call: StubCall) -> None:
        await call.write(whole_answer(body, status=status))

    async with fleet_of(operations=OPERATIONS) as fleet:
        fleet.stub.script = script
        got, headers, answer = await fleet.post(ask("x" * 400), path=PATH)
        assert (got, headers[b"x-iop-estimate"]) == (200, b"1")
        assert 100 <= json.loads(answer)["input_tokens"] <= 110
        assert len(fleet.stub.calls) == 1
        await fleet.settled()


async def cut(call: StubCall) -> None:
    await call.write(
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"count":5}'
    )
    call.close()


async def reset(call: StubCall) -> None:
    call.reset()


async def say_nothing(call: StubCall) -> None:
    await call.wait_gone()


@pytest.mark.clause("SF-14", "EN-112")
@pytest.mark.parametrize("script", [cut, reset, say_nothing])
async def test_a_tokenizer_that_breaks_or_is_slow_leads_to_the_marked_estimate(
    script: Callable[[StubCall], Awaitable[None]],
) -> None:
    limits = DispatchLimits(first_byte_timeout_s=0.3, total_timeout_s=30.0)
    async with fleet_of(operations=OPERATIONS, dispatch_limits=limits) as fleet:
        fleet.stub.script = script
        got, headers, answer = await fleet.post(ask("x" * 400), path=PATH)
        assert (got, headers[b"x-iop-estimate"]) == (200, b"1")
        assert 100 <= json.loads(answer)["input_tokens"] <= 110
        assert fleet.stub.calls
        await fleet.settled()


@pytest.mark.clause("SF-14")
async def test_what_has_no_coding_is_read_however_that_is_spelled() -> None:
    async def script(call: StubCall) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: Identity\r\n")
        await call.write(b'Content-Length: 11\r\n\r\n{"count":7}')

    async with fleet_of(operations=OPERATIONS) as fleet:
        fleet.stub.script = script
        _, _, answer = await fleet.post(ask("hi"), path=PATH)
        assert answer == b'{"input_tokens":7}'


@pytest.mark.clause("SF-14")
async def test_who_has_the_route_counts_what_no_tokenizer_can() -> None:
    async def script(call: StubCall) -> None:
        await call.write(whole_answer(b'{"input_tokens":77}'))

    async with (
        StubEngine(script) as counting,
        fleet_of(operations=OPERATIONS, second_endpoint=counting.endpoint) as fleet,
    ):
        for _ in range(4):
            got, headers, answer = await fleet.post(ask([PICTURE]), path=PATH)
            assert (got, answer) == (200, b'{"input_tokens":77}')
            assert b"x-iop-estimate" not in headers
        assert not fleet.stub.calls
        await fleet.settled()


@pytest.mark.clause("SF-14")
async def test_a_picture_is_not_shown_to_a_tokenizer_of_text() -> None:
    async with fleet_of(operations=OPERATIONS) as fleet:
        content = [{"type": "text", "text": "x" * 400}, PICTURE]
        got, headers, _ = await fleet.post(ask(content), path=PATH)
        assert (got, headers[b"x-iop-estimate"]) == (200, b"1")
        assert not fleet.stub.calls
        await fleet.settled()


@pytest.mark.clause("SF-01", "SF-14")
async def test_the_listing_says_that_counts_are_converted() -> None:
    async with fleet_of(operations=OPERATIONS) as fleet:
        caller = await fleet.call()
        await caller.send(b"GET /v1/models/fast HTTP/1.1\r\nHost: e\r\n\r\n")
        _, _, answer = await caller.read_answer()
        entry = json.loads(answer)["iop"]
        assert entry["endpoints"][PATH] == ["converted"]
        assert entry["conversions"][PATH] == ["tokenize"]
