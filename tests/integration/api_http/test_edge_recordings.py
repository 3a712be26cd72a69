"""Recorded answers of real engines: replayed they pass byte for byte, damaged they harm nobody (SF-03, SF-14).

``make test-slow`` damages 10,000 of them.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

import pytest
from http_fleet import HttpFleet, fleet_of, post
from recordings import Exchange, damage, pieces, recorded

from iop.testing.stub_engine import StubCall, whole_answer

EXCHANGES = recorded()
TARGET = "org/Real-8B-Instruct"
WORKERS = 8
QUICK_ROUNDS = 80
SOAK_ROUNDS = 2500  # of each of the four kinds


@pytest.mark.clause("SF-03", "SF-05")
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda each: f"{each.engine}: {each.name}")
async def test_a_recorded_exchange_passes_byte_for_byte(exchange: Exchange) -> None:
    async def script(call: StubCall) -> None:
        await call.write(*pieces(exchange.answer, random.Random(len(exchange.answer))))
        call.close()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        status, headers, body = await fleet.post(exchange.request("fast"), path=exchange.path)
        (call,) = fleet.stub.calls
        assert call.path == exchange.path.encode()
        assert call.body == exchange.request(TARGET)  # the name's bytes, and no others
        assert (status, body) == (exchange.status, exchange.body)
        assert headers[b"content-type"] == exchange.header(b"content-type")
        await fleet.settled()


@pytest.mark.clause("SF-03", "SF-05")
async def test_recorded_streams_pass_in_any_pieces() -> None:
    rng = random.Random(5)
    streams = [each for each in EXCHANGES if each.is_stream]
    assert len(streams) >= 6
    async with fleet_of() as fleet:
        for exchange in streams * 8:

            async def script(call: StubCall, exchange: Exchange = exchange) -> None:
                for piece in pieces(exchange.answer, rng, most=60):
                    await call.write(piece)
                    await asyncio.sleep(0)
                call.close()

            fleet.stub.script = script
            _, _, body = await fleet.post(exchange.request("fast"), path=exchange.path)
            assert body == exchange.body, exchange.name


# ---- damage ----

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "tunnel": ({}, ""),
    "converted to chat": ({"operations": frozenset({"chat_completions"})}, "/v1/chat/completions"),
    "converted to messages": ({"operations": frozenset({"messages"})}, "/v1/messages"),
    "converted to responses": ({"operations": frozenset({"responses"})}, "/v1/responses"),
}
CALLERS = {
    "/v1/chat/completions": {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
SUCCESS = {
    "/v1/chat/completions": rb"data: \[DONE\]",
    "/v1/completions": rb"data: \[DONE\]",
    "/v1/messages": rb'"type":\s*"message_stop"',
    "/v1/responses": rb'"type":\s*"response\.(?:completed|incomplete)"',
}
FINISHED = {
    "/v1/chat/completions": rb'finish_reason"\s*:\s*"|\[DONE\]',
    "/v1/completions": rb'finish_reason"\s*:\s*"|\[DONE\]',
    "/v1/messages": rb'stop_reason"\s*:\s*"|message_stop',
    "/v1/responses": rb"response\.completed|response\.incomplete",
}
CHUNK_EDGE = re.compile(rb"\r\n[0-9A-Fa-f]+\r\n")


class Damaged:
    """Rounds of damage on one fleet: several callers at once, each with an answer marked as its own."""

    def __init__(self, fleet: HttpFleet, spoken: str, rng: random.Random) -> None:
        self.fleet = fleet
        self._rng = rng
        self._spoken = spoken
        self._answers: dict[str, bytes] = {}
        self._choices = [
            each
            for each in EXCHANGES
            if each.status == 200 and (each.path == spoken or (not spoken and each.path in FINISHED))
        ]
        fleet.stub.script = self._serve

    async def round(self, number: int) -> None:
        """One damaged answer."""
        rng = self._rng
        exchange = rng.choice(self._choices)
        if self._spoken:
            path = rng.choice([path for path in CALLERS if path != self._spoken])
            asked: dict[str, Any] = {"model": "fast", "stream": exchange.is_stream, **CALLERS[path]}
            body = json.dumps(asked).encode()
        else:
            path, body = exchange.path, exchange.request("fast")
        name = f"round-{number}"
        first, rest = exchange.answer.split(b"\r\n", 1)
        if exchange.is_stream:
            edge = rest.index(b"\r\n\r\n") + 4
            told = b": " + name.encode() + b"\n\n"
            rest = rest[:edge] + b"%x\r\n%b\r\n" % (len(told), told) + rest[edge:]
        data = damage(b"%b\r\nx-round: %b\r\n%b" % (first, name.encode(), rest), rng)
        self._answers[name] = data
        caller = await self.fleet.call()
        fields = (b"x-request-id: " + name.encode(), b"Connection: close")
        try:
            async with asyncio.timeout(20):
                await caller.send(post(body, *fields, path=path))
                answer = await caller.read_to_end()
        except TimeoutError:
            raise AssertionError(f"{name} hangs: {exchange.name} {data!r}") from None
        finally:
            del self._answers[name]
            await caller.close()
        self._judge(name, exchange, path, data, answer)

    async def _serve(self, call: StubCall) -> None:
        data = self._answers[call.headers[b"x-request-id"].decode()]
        for piece in pieces(data, self._rng):
            await call.write(piece)
            await asyncio.sleep(0)
        call.close()

    def _judge(self, name: str, exchange: Exchange, path: str, data: bytes, answer: bytes) -> None:
        about = (name, exchange.name, data, answer)
        assert answer.startswith(b"HTTP/1.1 "), about
        strangers = set(re.findall(rb"round-\d+", answer)) - {name.encode()}
        whole = set(re.findall(rb"round-\d+", data))
        assert strangers <= whole, about  # damage may change a number; another's never comes
        outcome = self.fleet.outcome(name)
        assert outcome is not None, about
        head, _, body = answer.partition(b"\r\n\r\n")
        if b"text/event-stream" in head and re.search(SUCCESS[path], body):
            bare = CHUNK_EDGE.sub(b"", data)
            assert re.search(FINISHED[exchange.path], bare), about
        stated = re.search(rb"(?im)^content-length: (\d+)\r?$", data.partition(b"\r\n\r\n")[0])
        if (
            stated is not None
            and int(stated[1]) > len(data.partition(b"\r\n\r\n")[2])
            and b" 200 " in head[:14]
        ):
            mine = re.search(rb"(?im)^content-length: (\d+)\r?$", head)
            assert mine is None or len(body) < int(mine[1]), about


async def damage_rounds(kind: str, seed: int, rounds: int) -> None:
    options, spoken = KINDS[kind]
    async with fleet_of(capacity=WORKERS, bound_s=rounds * 2.0 + 60, **options) as fleet:
        damaged = Damaged(fleet, spoken, random.Random(seed))
        numbers = iter(range(rounds))

        async def work() -> None:
            for number in numbers:
                await damaged.round(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS):
                tasks.create_task(work())
        await fleet.settled()
        leases = fleet.edge.pools.leases
        assert leases.granted_total == leases.returned_total >= rounds
        fleet.stub.script = healthy
        path = spoken or "/v1/chat/completions"
        status, _, body = await fleet.post(json.dumps({"model": "fast", **CALLERS[path]}).encode(), path=path)
        assert (status, body) == (200, b'{"healthy":true}')


async def healthy(call: StubCall) -> None:
    await call.write(whole_answer(b'{"healthy":true}'))


@pytest.mark.slow
@pytest.mark.clause("SF-03", "SF-05", "SF-10", "SF-14", "EN-112")
@pytest.mark.parametrize("kind", KINDS)
async def test_damaged_recordings_end_and_harm_nobody(kind: str) -> None:
    await damage_rounds(kind, seed=1, rounds=QUICK_ROUNDS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.clause("SF-03", "SF-05", "SF-10", "SF-14", "EN-112")
@pytest.mark.parametrize("kind", KINDS)
async def test_ten_thousand_damaged_recordings_end_and_harm_nobody(kind: str) -> None:
    await damage_rounds(kind, seed=2, rounds=SOAK_ROUNDS)
