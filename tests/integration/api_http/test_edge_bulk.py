"""Large request bodies through the whole fleet: what reaches the engine, and how little each turn of the loop does."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_fleet import HttpFleet, fleet_of, post

from iop.api.http import bulk
from iop.api.http.bulk import SLICE_BYTES, STEP_BYTES, BulkReader
from iop.api.http.limits import MADE_BYTES_FREE, HttpLimits
from iop.api.http.long_strings import LongStrings
from iop.api.http.protocol import HttpConnection
from iop.core.limits import KIB, MIB
from iop.edge.calls import Outcome
from iop.testing.stub_engine import StubCall, whole_answer
from iop.testing.waiting import eventually
from iop.wire.stream_node import NodeStream

CHAT_ONLY = frozenset({"chat_completions"})
CHAT_ANSWER = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    }
).encode()
READ_BYTES_MAX = 256 * KIB
"""What the loop's transports read at once."""


def picture(size: int) -> str:
    return "data:image/png;base64," + "iVBORw0KGgo=" * (size // 12)


def chat(size: int, **more: Any) -> bytes:
    content = [
        {"type": "image_url", "image_url": {"url": picture(size)}},
        {"type": "text", "text": "東\\\n" * 9},
    ]
    return json.dumps({"messages": [{"role": "user", "content": content}], "model": "fast", **more}).encode()


async def answer(call: StubCall) -> None:
    await call.write(whole_answer(CHAT_ANSWER))


class Turns:
    """Counts what large bodies cost in each turn of the loop: steps and bytes, not time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.steps: Counter[int] = Counter()
        self.reads: Counter[tuple[int, int]] = Counter()
        self.readers: set[BulkReader] = set()
        self._is_over = False
        step, data_received = BulkReader.step, HttpConnection.data_received

        def counted_step(reader: BulkReader) -> bool:
            self.steps[self.now] += 1
            self.readers.add(reader)
            return step(reader)

        def counted_read(connection: HttpConnection, data: bytes) -> None:
            if len(data) >= 64 * KIB:
                self.reads[self.now, id(connection)] += 1
            data_received(connection, data)

        patch.setattr(BulkReader, "step", counted_step)
        patch.setattr(HttpConnection, "data_received", counted_read)
        self._turn()

    def _turn(self) -> None:
        self.now += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> None:
        self._is_over = True


@contextmanager
def uploads(port: int, request: bytes, count: int) -> Iterator[Callable[[], list[bytes]]]:
    """Callers on threads of their own, so that they write as fast as the kernel takes it."""
    answers: list[bytes] = []

    def call() -> None:
        with socket.create_connection(("127.0.0.1", port)) as end:
            end.settimeout(60)
            end.sendall(request)
            answers.append(end.recv(65536))

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: answers
    finally:
        for thread in threads:
            thread.join()


@pytest.mark.clause("EN-101", "EN-102", "SF-08")
async def test_three_large_uploads_at_once_cost_each_turn_one_step_and_one_read_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fleet_of() as fleet:
        fleet.stub.script = answer
        turns = Turns(monkeypatch)
        request = post(chat(8 * MIB))
        with uploads(fleet.port, request, 3) as answers:
            await eventually(lambda: len(answers()) == 3, within_s=60)
        turns.stop()
        assert all(line.startswith(b"HTTP/1.1 200") for line in answers())
        assert len(turns.readers) == 3
        assert max(turns.steps.values()) == 1
        assert sum(turns.steps.values()) >= 3 * 8 * MIB // STEP_BYTES
        assert max(turns.reads.values()) == 1
        assert max(reader.worked_bytes for reader in turns.readers) <= 3 * STEP_BYTES + SLICE_BYTES
        await fleet.settled()
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.case("P-06")
@pytest.mark.clause("SF-03", "EN-101")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
async def test_a_large_body_reaches_the_engine_with_only_the_bytes_of_model_changed(path: str) -> None:
    async with fleet_of() as fleet:
        fleet.stub.script = answer
        for body in (
            chat(3 * MIB),
            b' {"n" : 1.0e0,"input":[' + b"12, 345," * 90_000 + b'[]],\n"model": "fast" ,"\\u0061":"\xff"} ',
            b'{"model":"fast","input":"' + b'\\"\\ud83d\\ude80\\\\' * 60_000 + b'"}',
        ):
            assert len(body) > bulk.BULK_BYTES
            status, _, _ = await fleet.post(body, path=path)
            assert status == 200
            assert fleet.stub.calls[-1].body == body.replace(b'"fast"', b'"org/Real-8B-Instruct"')
        await fleet.settled()
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.clause("EN-111")
@pytest.mark.parametrize(("size", "status"), [(300 * KIB, 200), (500 * KIB, 400)])
async def test_a_large_body_needs_a_long_slot_by_its_text_and_not_by_its_pictures(
    size: int, status: int
) -> None:
    text = {"role": "user", "content": "é" * (size // 2)}
    body = json.loads(chat(2 * MIB))
    body["messages"].append(text)
    async with fleet_of(long_context_tokens=100 * KIB) as fleet:
        fleet.stub.script = answer
        got, fields, _ = await fleet.post(json.dumps(body).encode())
        assert got == status
        assert status == 200 or fields[b"x-iop-reason"] == b"long_context_not_supported"


@pytest.mark.case("P-06")
@pytest.mark.clause("SF-10", "SF-12")
async def test_a_conversion_of_a_large_body_holds_no_second_copy_of_its_pictures() -> None:
    held: list[int] = []

    async def script(call: StubCall) -> None:
        held.append(fleet.surface.buffered_bytes)
        await answer(call)

    data = "iVBORw0KGgo=" * (3 * MIB // 12)
    arguments = {"path": "a", "text": 'say "東"\n' * 20_000}
    ask = {
        "model": "fast",
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                    {"type": "text", "text": 'a "long" text\n' * 4000},
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": arguments}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]},
        ],
    }
    body = json.dumps(ask).encode()
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = script
        status, fields, _ = await fleet.post(body, path="/v1/messages")
        assert (status, fields[b"x-iop-converted"]) == (200, b"chat_completions")
        sent = json.loads(fleet.stub.calls[-1].body)
        user, call, _ = sent["messages"]
        assert user["content"][0]["image_url"]["url"] == "data:image/png;base64," + data
        assert user["content"][1]["text"] == 'a "long" text\n' * 4000
        assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == arguments
        assert len(body) <= held[0] <= len(body) + MADE_BYTES_FREE
        await fleet.settled()
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.clause("SF-10")
async def test_long_tool_arguments_become_the_object_they_are_in_the_other_dialect() -> None:
    arguments = {"text": 'say "東"\n' * 30_000}
    messages = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "t", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
            ],
        },
        {"role": "tool", "tool_call_id": "t", "content": "x" * 300_000},
    ]
    async with fleet_of(operations=frozenset({"messages"})) as fleet:
        fleet.stub.script = answer
        await fleet.post(json.dumps({"model": "fast", "messages": messages}).encode())
        sent = json.loads(fleet.stub.calls[-1].body)
        assert sent["messages"][1]["content"][0]["input"] == arguments
        assert "x" * 300_000 in json.dumps(sent["messages"][2])


@pytest.mark.clause("SF-12")
async def test_what_a_conversion_makes_counts_until_the_answer_begins() -> None:
    words = [{"role": "user", "content": f"message {number}"} for number in range(8000)]
    body = json.dumps({"model": "fast", "max_tokens": 9, "messages": words}).encode()
    limits = HttpLimits(body_bytes=len(body), buffered_bytes=len(body) * 2)
    async with fleet_of(operations=CHAT_ONLY, limits=limits) as fleet:
        fleet.stub.script = answer
        status, fields, _ = await fleet.post(body, path="/v1/messages")
        assert (status, fields[b"x-iop-reason"], fields[b"retry-after"]) == (503, b"overloaded", b"1")
        assert (await fleet.post(body))[0] == 200
        await fleet.settled()
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.clause("SF-06", "SF-12")
async def test_a_body_too_dense_to_be_converted_in_one_piece_is_refused_and_passes_unconverted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "CONVERTED_BYTES_MAX", 100 * KIB)
    words = [{"role": "user", "content": f"message {number}"} for number in range(8000)]
    body = json.dumps({"model": "fast", "max_tokens": 9, "messages": words}).encode()
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = answer
        status, fields, text = await fleet.post(body, path="/v1/messages")
        assert (status, fields[b"x-iop-reason"]) == (413, b"body_too_large")
        assert json.loads(text)["error"]["type"] == "request_too_large"
        assert (await fleet.post(body))[0] == 200
        await fleet.settled()


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (b'"}', b"invalid_request"),
        (b'","model":7}', b"invalid_request"),
        (b'","model":"nobody"}', b"model_not_found"),
        (b'","model":"fast","model":"fast"}', b"duplicate_key"),
        (b'","model":"fast","x":' + b"[" * 200 + b"]" * 200 + b"}", b"json_too_deep"),
        (b'\x01","model":"fast"}', b"invalid_json"),
        (b'\\ud800\\x","model":"fast"}', b"invalid_json"),
        (b'","model":"fast"', b"invalid_json"),
        (b'","model":"fast"}}', b"invalid_json"),
        (b'","model":"fast","x":' + b" " * (600 * KIB) + b"1}", b"invalid_json"),
    ],
)
async def test_a_large_body_that_cannot_be_routed_is_refused_in_the_callers_dialect(
    end: bytes, reason: bytes
) -> None:
    async with fleet_of() as fleet:
        status, fields, text = await fleet.post(b'{"x1":"' + b"x" * 400_000 + end, path="/v1/messages")
        assert fields[b"x-iop-reason"] == reason
        assert status == (404 if reason == b"model_not_found" else 400)
        assert json.loads(text)["type"] == "error"
        assert not fleet.stub.calls
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.clause("SF-07", "SF-12")
async def test_a_caller_who_leaves_while_its_large_body_is_read_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = BulkReader.step
    steps: list[HttpFleet] = []

    def leaving(reader: BulkReader) -> bool:
        steps.append(fleet)
        if len(steps) == 3:
            caller.reset()
        return step(reader)

    monkeypatch.setattr(BulkReader, "step", leaving)
    async with fleet_of() as fleet:
        caller = await fleet.call()
        body = chat(4 * MIB)
        await caller.send(post(body))
        await eventually(lambda: len(steps) > 3 and fleet.surface.buffered_bytes == 0)
        await fleet.settled()
        assert len(steps) < len(body) // STEP_BYTES
        assert not fleet.stub.calls
        monkeypatch.undo()
        fleet.stub.script = answer
        assert (await fleet.post(chat(MIB), b"x-request-id: next"))[0] == 200
        await fleet.settled()
        assert fleet.outcome("next") is Outcome.COMPLETE


@pytest.mark.clause("EN-102", "SF-12")
async def test_no_part_of_a_body_is_held_once_its_answer_begins() -> None:
    may_end = asyncio.Event()

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b"data: {}\n\n")
        await may_end.wait()
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        gc.collect()
        gc.disable()  # what is let go of must not wait for the collector
        try:
            caller = await fleet.call()
            await caller.send(post(chat(MIB, stream=True)))
            await caller.read_until(b"data: {}\n\n")
            streams = [value for value in gc.get_objects() if isinstance(value, NodeStream)]
            requests = [value for value in gc.get_objects() if isinstance(value, LongStrings | BulkReader)]
        finally:
            gc.enable()
        assert [stream.body for stream in streams] == [[]]
        assert not requests
        assert fleet.surface.buffered_bytes == 0
        may_end.set()
        await caller.read_until(b"0\r\n\r\n")
        await fleet.settled()


# ---- compressed bodies ----


@pytest.mark.clause("SF-06")
@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"GZIP", b"identity, gzip"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ],
)
async def test_a_compressed_body_is_refused_and_the_caller_told_what_to_send(
    path: str, coding: bytes
) -> None:
    async with fleet_of() as fleet:
        caller = await fleet.call()
        status, fields, text = await fleet.post(
            b"\x1f\x8b\x08" + b"\0" * 40, b"Content-Encoding: " + coding, path=path, caller=caller
        )
        error = json.loads(text)
        assert (status, fields[b"x-iop-reason"]) == (415, b"content_encoding")
        assert fields[b"accept-encoding"] == b"identity"
        assert "uncompressed" in error["error"]["message"]
        assert (error.get("type") == "error") is path.startswith("/v1/messages")
        # The connection goes on; the identity is no coding.
        fleet.stub.script = answer
        plain = b'{"model":"fast","messages":[]}'
        status, _, _ = await fleet.post(plain, b"Content-Encoding: identity", caller=caller)
        assert status == 200
        assert len(fleet.stub.calls) == 1
