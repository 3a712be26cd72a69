"""Streams that wait in a queue are told their place, where the model says so (EN-110, SF-06)."""

from __future__ import annotations

import asyncio
import gzip
import json

import openai
import pytest
from http_fleet import HttpFleet, fleet_of, post

from iop.edge.calls import Outcome
from iop.edge.snapshot import QueueSpec
from iop.testing.http_site import RawCaller
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer
from iop.testing.waiting import eventually

STREAM = b'{"model":"fast","messages":[],"stream":true}'
PLAIN = b'{"model":"fast","messages":[]}'
PATIENT = QueueSpec(max_waiters=8, timeout_s=30.0, comment_s=0.05)
HASTY = QueueSpec(max_waiters=8, timeout_s=0.3, comment_s=0.05)
SILENT = QueueSpec(max_waiters=8, timeout_s=30.0)

ERRORS = {
    "/v1/chat/completions": b"data: {",
    "/v1/completions": b"data: {",
    "/v1/messages": b"event: error\ndata: {",
    "/v1/responses": b"event: error\ndata: {",
}


class Door:
    """A provider with one slot, whose first request holds it until told; later ones are answered by ``rest``."""

    def __init__(self, fleet: HttpFleet, rest: bytes | None = None) -> None:
        self.may_end = asyncio.Event()
        self._fleet = fleet
        self._rest = rest
        fleet.stub.script = self._answer

    async def _answer(self, call: StubCall) -> None:
        if len(self._fleet.stub.calls) == 1:
            await self.may_end.wait()
        elif self._rest is not None:
            await call.write(self._rest)
            return
        await call.start_events()
        await call.chunk(*sse_events(["hello"]))
        await call.end_chunks()

    async def hold(self) -> RawCaller:
        """Fill the slot."""
        caller = await self._fleet.call()
        await caller.send(post(STREAM))
        await eventually(lambda: len(self._fleet.stub.calls) == 1)
        return caller


async def waiting_caller(
    fleet: HttpFleet, request_id: str, body: bytes = STREAM, path: str = ""
) -> RawCaller:
    caller = await fleet.call()
    before = fleet.edge.pools.waiting
    await caller.send(
        post(body, b"x-request-id: " + request_id.encode(), path=path or "/v1/chat/completions")
    )
    await eventually(lambda: fleet.edge.pools.waiting == before + 1)
    return caller


@pytest.mark.clause("EN-110", "SF-03", "SF-13")
async def test_a_waiting_stream_hears_its_place_get_better_and_then_its_answer() -> None:
    async with fleet_of(capacity=1, queue=PATIENT) as fleet:
        door = Door(fleet)
        await door.hold()
        first = await waiting_caller(fleet, "first")
        second = await waiting_caller(fleet, "second")
        await first.read_until(b": waiting behind 0\n")
        seen = await second.read_until(b": waiting behind 1\n")
        assert seen.startswith(b"HTTP/1.1 200 OK\r\n") and b"x-request-id: second\r\n" in seen
        assert b"x-iop-queue-position: 1\r\n" in seen
        first.reset()
        await second.read_until(b": waiting behind 0\n")
        door.may_end.set()
        rest = await second.read_until(b"0\r\n")
        assert b"hello" in rest and b"data: [DONE]\n\n" in rest
        trailers = await second.read_until(b"\r\n\r\n")
        assert b"x-iop-weight-version-last: " in trailers
        assert b"x-iop-provider: p-" in trailers and b"x-iop-converted" not in trailers
        await fleet.settled()
        assert fleet.outcome("second") is Outcome.COMPLETE
        assert fleet.outcome("first") is Outcome.CLIENT_CANCELLED


@pytest.mark.case("P-04")
@pytest.mark.clause("EN-110", "SF-03")
async def test_after_a_wait_comments_go_on_while_the_prompt_is_read_and_end_with_the_first_event() -> None:
    async def slow(call: StubCall) -> None:
        number = len(fleet.stub.calls)
        await (may_end if number == 1 else may_begin).wait()
        await call.start_events()
        await call.chunk(*sse_events(["hello"], is_done=False))
        if number > 1:
            await may_go_on.wait()
        await call.chunk(b"data: [DONE]\n\n")
        await call.end_chunks()

    may_end, may_begin, may_go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with fleet_of(capacity=1, queue=PATIENT) as fleet:
        fleet.stub.script = slow
        first = await fleet.call()
        await first.send(post(STREAM))
        await eventually(lambda: len(fleet.stub.calls) == 1)
        second = await waiting_caller(fleet, "second")
        await second.read_until(b": waiting behind 0\n")
        may_end.set()
        for _ in range(3):
            await second.read_until(b": the provider has it\n")
        may_begin.set()
        await second.read_until(b"hello")
        may_go_on.set()
        rest = await second.read_until(b"0\r\n")
        assert b"has it" not in rest and b"data: [DONE]\n\n" in rest
        assert b"has it" not in await first.read_until(b"0\r\n"), (
            "it did not wait: its answer is its provider's"
        )
        await fleet.settled()


@pytest.mark.clause("EN-110", "SF-06")
@pytest.mark.parametrize("path", ERRORS)
async def test_a_wait_that_ends_in_vain_is_an_event_of_the_dialect(path: str) -> None:
    async with fleet_of(capacity=1, queue=HASTY) as fleet:
        await Door(fleet).hold()
        body = b'{"model":"fast","messages":[],"input":"x","prompt":"x","max_tokens":5,"stream":true}'
        caller = await waiting_caller(fleet, "late", body, path)
        status, _, seen = await caller.read_answer()
        comment, _, event = seen.partition(ERRORS[path])
        assert status == 200 and comment.startswith(b": waiting behind 0\n")
        told = json.loads(b"{" + event)
        assert told["error"]["code"] == "queue_timeout" and "free in time" in told["error"]["message"]
        assert fleet.outcome("late") is Outcome.REJECTED
        # The connection goes on.
        await caller.send(b"GET /v1/models HTTP/1.1\r\nHost: edge\r\n\r\n")
        assert (await caller.read_answer())[0] == 200


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            whole_answer(b'{"error":{"message":"too long","code":"context"}}', status=b"400 Bad Request"),
            {"message": "too long", "code": "context"},
        ),
        (
            whole_answer(b"oops", status=b"500 Internal Server Error", kind=b"text/html"),
            {"code": "upstream_error"},
        ),
        (whole_answer(b'{"id":"x","choices":[]}'), {"code": "upstream_error"}),
        (whole_answer(b"x" * 3_000_000, status=b"400 Bad Request"), {"code": "upstream_error"}),
    ],
    ids=["its-error", "no-json", "no-events", "endless"],
)
async def test_what_is_no_stream_after_the_wait_is_told_as_an_event(
    answer: bytes, told: dict[str, str]
) -> None:
    async with fleet_of(capacity=1, queue=PATIENT) as fleet:
        door = Door(fleet, rest=answer)
        await door.hold()
        caller = await waiting_caller(fleet, "late")
        await caller.read_until(b": waiting behind 0\n")
        door.may_end.set()
        seen = await caller.read_until(b"\r\n0\r\n")
        error = json.loads(seen[seen.index(b"data: ") + 6 :].partition(b"\n\n")[0])["error"]
        assert told.items() <= error.items()
        assert b"[DONE]" not in seen
        await fleet.settled()


@pytest.mark.clause("SF-05", "SF-06")
@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (b"200 OK", b"text/event-stream", b"".join(sse_events(["hello"]))),
        (b"400 Bad Request", b"application/json", b'{"error":{"message":"hello"}}'),
    ],
    ids=["stream", "error"],
)
async def test_what_comes_compressed_after_the_wait_is_read_in_clear(
    status: bytes, kind: bytes, body: bytes
) -> None:
    packed = gzip.compress(body)
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    async with fleet_of(capacity=1, queue=PATIENT) as fleet:
        door = Door(fleet, rest=head % (status, kind, len(packed)) + packed)
        await door.hold()
        caller = await fleet.call()
        await caller.send(post(STREAM, b"Accept-Encoding: gzip"))
        await caller.read_until(b": waiting behind 0\n")
        door.may_end.set()
        seen = await caller.read_until(b"\r\n0\r\n")
        assert b"hello" in seen and (b"[DONE]" in seen) is (status == b"200 OK")


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize("status", [b"400 Bad Request", b"200 OK"])
async def test_an_answer_that_is_cut_after_the_wait_is_told_as_an_event(status: bytes) -> None:
    async with fleet_of(capacity=1, queue=PATIENT) as fleet:
        door = Door(fleet)
        answer = fleet.stub.script

        async def cut(call: StubCall) -> None:
            if len(fleet.stub.calls) == 1:
                await answer(call)
            else:
                await call.write(b'HTTP/1.1 %b\r\nContent-Length: 500\r\n\r\n{"error":{' % status)
                call.close()

        fleet.stub.script = cut
        await door.hold()
        caller = await waiting_caller(fleet, "late")
        await caller.read_until(b": waiting behind 0\n")
        door.may_end.set()
        seen = await caller.read_until(b"\r\n0\r\n")
        assert b'data: {"error":' in seen and b"no event stream" in seen
        await fleet.settled()
        assert fleet.outcome("late") is Outcome.UPSTREAM_TRUNCATED


@pytest.mark.clause("EN-110")
@pytest.mark.parametrize(("queue", "body"), [(SILENT, STREAM), (PATIENT, PLAIN)], ids=["off", "no-stream"])
async def test_by_default_and_for_whole_answers_a_wait_is_silent(queue: QueueSpec, body: bytes) -> None:
    async with fleet_of(capacity=1, queue=queue) as fleet:
        door = Door(fleet, rest=whole_answer(b'{"error":{"message":"no"}}', status=b"400 Bad Request"))
        await door.hold()
        listener = await waiting_caller(fleet, "heard") if queue is PATIENT else None
        caller = await waiting_caller(fleet, "quiet", body)
        if listener is not None:  # several of its comments later
            for _ in range(3):
                await listener.read_until(b": waiting behind 0\n")
        door.may_end.set()
        assert (await caller.read_answer())[0] == 400


@pytest.mark.clause("EN-110", "SF-01")
async def test_the_official_client_reads_over_the_comments() -> None:
    async with fleet_of(capacity=1, queue=PATIENT) as fleet:
        door = Door(fleet)
        await door.hold()
        async with openai.AsyncOpenAI(
            base_url=fleet.url, api_key="none", max_retries=0, timeout=20
        ) as client:
            listener = await waiting_caller(fleet, "before")

            async def ask() -> str:
                stream = await client.chat.completions.create(model="fast", messages=[], stream=True)
                return "".join([part.choices[0].delta.content or "" async for part in stream])

            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(ask())
                await eventually(lambda: fleet.edge.pools.waiting == 2)
                for _ in range(3):
                    await listener.read_until(b": waiting behind 0\n")
                door.may_end.set()
            assert asked.result() == "hello"


@pytest.mark.clause("EN-110", "SF-02")
@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_converted_stream_waits_in_the_callers_dialect(is_refused: bool) -> None:
    refusal = whole_answer(b'{"error":{"message":"too long","code":"context"}}', status=b"400 Bad Request")
    async with fleet_of(capacity=1, queue=PATIENT, operations=frozenset({"chat_completions"})) as fleet:
        door = Door(fleet, rest=refusal if is_refused else None)
        await door.hold()
        messages = (
            b'{"model":"fast","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"hi"}]}'
        )
        caller = await waiting_caller(fleet, "late", messages, "/v1/messages")
        await caller.read_until(b": waiting behind 0\n")
        door.may_end.set()
        seen = await caller.read_until(b"\r\n0\r\n")
        if is_refused:
            assert b"event: error\n" in seen and b"too long" in seen and b"message_stop" not in seen
        else:
            assert b"event: message_start\n" in seen and b"hello" in seen and b"event: message_stop\n" in seen
        trailers = await caller.read_until(b"\r\n\r\n")
        assert b"x-iop-converted: chat_completions\r\n" in trailers and b"x-iop-provider: p-" in trailers
        await fleet.settled()


@pytest.mark.clause("EN-112", "SF-06", "SF-24")
async def test_a_stream_that_an_edge_behind_this_one_began_and_failed_is_told_so_and_sent_to_nobody_else() -> (
    None
):
    async with StubEngine() as other, fleet_of(second_endpoint=other.endpoint) as fleet:

        async def begin_and_fail(call: StubCall) -> None:
            await call.start_events()
            await call.chunk(b": waiting behind 0\n")
            await call.chunk(
                b'data: {"error":{"message":"full","type":"rate_limit_error","code":"queue_timeout"}}\n\n'
            )
            await call.end_chunks()

        fleet.stub.script = other.script = begin_and_fail
        caller = await fleet.call()
        await caller.send(post(STREAM, b"x-request-id: begun"))
        status, _, body = await caller.read_answer()
        assert status == 200
        assert body.startswith(b": waiting behind 0\n")
        assert body.count(b'"code":"queue_timeout"') == 1
        assert b"[DONE]" not in body
        assert len(fleet.stub.calls) + len(other.calls) == 1
        await fleet.settled()
        assert fleet.outcome("begun") is not Outcome.COMPLETE
