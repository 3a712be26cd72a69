"""The same things that a client does, through two Edges, whichever way the outer one speaks to the inner (SF-24)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from chain_site import TARGET, Chain, chained, edge_yaml, place

from iop.edge.calls import Outcome
from iop.testing.http_site import RawCaller
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer
from iop.testing.waiting import SOON_S, eventually

pytestmark = pytest.mark.clause("SF-24")

HELLO = {"model": "fast", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**HELLO, "stream": True}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "c-1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Bonn"}'}}
"""Within which a caller that left has cancelled the last engine's work (SF-07)."""


@asynccontextmanager
async def site(directory: Path, kind: str, **more: Any) -> AsyncIterator[tuple[Chain, StubEngine]]:
    async with StubEngine(say("one ", "two ", "three")) as stub:
        engine = {"type": "openai_compat", "endpoint": stub.endpoint}
        async with chained(directory, kind, engine, **more) as chain:
            yield chain, stub
            await chain.settled()


def say(*texts: str, finish: str = "stop", calls: list[dict[str, Any]] | None = None) -> Any:
    """A script that answers chats and completions, as streams and whole."""

    async def script(call: StubCall) -> None:
        body = call.json
        is_chat = "messages" in body
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(texts)}
            if calls:
                message |= {"content": None, "tool_calls": calls}
            told = {"message": message} if is_chat else {"text": "".join(texts)}
            answer = {"id": "c", "object": "x", "created": 1, "model": body["model"]}
            choice = {"index": 0, **told, "finish_reason": finish}
            await call.write(whole_answer(json.dumps({**answer, "choices": [choice]}).encode()))
            return
        await call.start_events()
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        events: list[dict[str, Any]] = [{"index": 0, "delta": {"role": "assistant"}}] if is_chat else []
        events += [
            {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
            for text in texts
        ]
        for number, one in enumerate(calls or ()):
            events.append({"index": 0, "delta": {"tool_calls": [{"index": number, **one}]}})
        events.append({"index": 0, "finish_reason": finish, **({"delta": {}} if is_chat else {"text": ""})})
        for event in events:
            await call.chunk(b"data: " + json.dumps({**head, "choices": [event]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        await call.chunk(b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n")
        await call.chunk(b"data: [DONE]\n\n")
        await call.end_chunks()

    return script


def deltas(body: bytes) -> tuple[str, list[Mapping[str, Any]], str | None]:
    """Text, tool calls and finish reason of a chat stream."""
    text, calls, finish = "", [], None
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                delta = choice.get("delta", {})
                text += delta.get("content") or ""
                calls += delta.get("tool_calls") or []
                finish = choice.get("finish_reason") or finish
    return text, calls, finish


async def read_stream(caller: RawCaller) -> tuple[dict[bytes, bytes], bytes]:
    status, headers, body = await caller.read_answer()
    assert status == 200, body
    return headers, body


@pytest.mark.clause("SF-05")
async def test_a_chat_streams_through_both(kind: str, tmp_path: Path) -> None:
    async with site(tmp_path, kind) as (chain, stub):
        _, body = await read_stream(await chain.outer.ask(STREAM))
        assert deltas(body) == ("one two three", [], "stop")
        assert body.endswith(b"data: [DONE]\n\n")
        (call,) = stub.calls
        assert call.json["model"] == TARGET
        assert call.json["messages"] == HELLO["messages"]
        for edge in (chain.outer.edge, chain.inner.edge):
            await eventually(lambda edge=edge: edge.outcomes.totals()[Outcome.COMPLETE] == 1)


async def test_a_chat_is_answered_whole_through_both(kind: str, tmp_path: Path) -> None:
    async with site(tmp_path, kind) as (chain, _stub):
        status, _, body = await chain.outer.answer(HELLO)
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "one two three"
        assert body["choices"][0]["finish_reason"] == "stop"


async def test_a_text_completion_goes_through_both(kind: str, tmp_path: Path) -> None:
    async with site(tmp_path, kind) as (chain, stub):
        status, _, body = await chain.outer.answer(
            {"model": "fast", "prompt": "hello", "max_tokens": 7, "temperature": 0.5}, path="/v1/completions"
        )
        assert status == 200
        assert body["choices"][0]["text"] == "one two three"
        sent = stub.calls[0].json
        assert (sent["prompt"], sent["max_tokens"], sent["temperature"]) == ("hello", 7, 0.5)


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_other_dialects_go_through_both(kind: str, tmp_path: Path, is_stream: bool) -> None:
    profile = {"operations": {"chat_completions": {"method": "POST", "path": "/v1/chat/completions"}}}
    async with StubEngine(say("one ", "two ", "three")) as stub:
        engine = {"type": "openai_compat", "endpoint": stub.endpoint, "profile": profile}
        async with chained(tmp_path, kind, engine) as chain:
            asked = {**HELLO, "max_tokens": 9, "stream": is_stream}
            status, _, body = await chain.outer.answer(asked, path="/v1/messages")
            assert status == 200
            if is_stream:
                assert b'"text_delta"' in body
                assert b"message_stop" in body
            else:
                assert body["content"][0]["text"] == "one two three"
            question = {"model": "fast", "input": "hello", "stream": is_stream}
            status, _, body = await chain.outer.answer(question, path="/v1/responses")
            assert status == 200
            if is_stream:
                assert b"response.completed" in body
            else:
                assert body["output"][-1]["content"][0]["text"] == "one two three"
            await chain.settled()


@pytest.mark.clause("EN-65")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_tools_go_in_and_calls_come_out_through_both(
    kind: str, tmp_path: Path, is_stream: bool
) -> None:
    async with site(tmp_path, kind) as (chain, stub):
        stub.script = say(finish="tool_calls", calls=[CALL])
        request = {**HELLO, "tools": TOOLS, "tool_choice": "auto", "stream": is_stream}
        status, _, body = await chain.outer.answer(request)
        assert status == 200
        sent = stub.calls[0].json
        assert (sent["tools"], sent["tool_choice"]) == (TOOLS, "auto")
        if is_stream:
            _, calls, finish = deltas(body)
        else:
            choice = body["choices"][0]
            calls, finish = choice["message"]["tool_calls"], choice["finish_reason"]
        assert finish == "tool_calls"
        assert [call["function"] for call in calls] == [CALL["function"]]
        assert calls[0]["id"] == "c-1"


async def test_a_tool_result_and_a_picture_reach_the_engine_as_they_were_sent(
    kind: str, tmp_path: Path
) -> None:
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is it?"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c-1", "content": "rain"},
    ]
    async with site(tmp_path, kind) as (chain, stub):
        status, _, _ = await chain.outer.answer(
            {"model": "fast", "messages": messages, "tools": TOOLS, "logit_bias": {"5": -1}}
        )
        assert status == 200
        assert stub.calls[0].json["messages"] == messages
        assert stub.calls[0].json["logit_bias"] == {"5": -1}


@pytest.mark.clause("SF-07")
async def test_a_caller_that_leaves_frees_both_leases_within_a_second(kind: str, tmp_path: Path) -> None:
    async def hang(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*sse_events(["one "], finish=None, is_done=False))
        await call.wait_gone(within_s=10)

    async with site(tmp_path, kind) as (chain, stub):
        stub.script = hang
        caller = await chain.outer.ask(STREAM)
        await caller.read_until(b"one ")
        assert (chain.outer.leases, chain.inner.leases) == (1, 1)
        caller.reset()
        await eventually(
            lambda: stub.calls[0].is_closed and chain.outer.leases == chain.inner.leases == 0, within_s=SOON_S
        )
        await chain.settled()
        for edge in (chain.outer.edge, chain.inner.edge):
            assert edge.outcomes.totals()[Outcome.CLIENT_CANCELLED] == 1


@pytest.mark.clause("SF-06")
async def test_a_refusal_of_the_engine_keeps_its_status_through_both(kind: str, tmp_path: Path) -> None:
    async def refuse(call: StubCall) -> None:
        body = b'{"error": {"message": "the prompt is too long", "type": "invalid_request_error"}}'
        await call.write(whole_answer(body, status=b"400 Bad Request"))

    async with site(tmp_path, kind) as (chain, stub):
        stub.script = refuse
        status, _, body = await chain.outer.answer(STREAM)
        assert status == 400
        assert "the prompt is too long" in body["error"]["message"]


@pytest.mark.clause("SF-06", "EN-116")
async def test_a_failing_engine_is_a_failing_provider_at_both(kind: str, tmp_path: Path) -> None:
    async def fail(call: StubCall) -> None:
        await call.write(whole_answer(b"{}", status=b"500 Oops"))

    async with site(tmp_path, kind) as (chain, stub):
        stub.script = fail
        status, _, _ = await chain.outer.answer(STREAM)
        assert status in {500, 502, 503}
        await eventually(lambda: chain.outer.edge.outcomes.totals()[Outcome.UPSTREAM_ERROR] == 1)


@pytest.mark.clause("SF-06", "SF-14")
async def test_a_stream_that_breaks_ends_in_an_error_and_in_no_success_marker(
    kind: str, tmp_path: Path
) -> None:
    async def cut(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*sse_events(["one "], finish=None, is_done=False))
        call.reset()

    async with site(tmp_path, kind) as (chain, stub):
        stub.script = cut
        _, body = await read_stream(await chain.outer.ask(STREAM))
        assert deltas(body)[0] == "one "
        assert b'"error"' in body
        assert b"[DONE]" not in body
        assert b'finish_reason":"stop' not in body.replace(b" ", b"")


async def test_a_model_that_only_the_outer_knows_is_not_found(kind: str, tmp_path: Path) -> None:
    async with site(tmp_path, kind, target="missing") as (chain, stub):
        status, _, body = await chain.outer.answer(HELLO)
        assert status == 404
        assert body["error"]["code"] == "model_not_found"
        status, _, body = await chain.outer.answer({**HELLO, "model": "nobody"})
        assert status == 404
        assert stub.calls == []


@pytest.mark.clause("EN-110", "SF-09")
async def test_a_full_queue_of_the_inner_is_429_with_retry_after(kind: str, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(call: StubCall) -> None:
        await gate.wait()
        await say("late")(call)

    tight = {"model": {"queue": {"max": 1, "timeout_sec": 20}}}
    async with site(tmp_path, kind, inner=tight) as (chain, stub):
        stub.script = hold
        held = [await chain.outer.ask(STREAM)]
        # Four run at the inner Edge, for that is its adapter's capacity, and the outer Edge lets no fifth through.
        held += [await chain.inner.ask(STREAM) for _ in range(3)]
        await eventually(lambda: chain.inner.leases == 4)
        held.append(await chain.inner.ask(STREAM))
        await eventually(lambda: chain.inner.edge.pools.waiting == 1)
        status, headers, body = await chain.outer.answer(STREAM)
        assert status == 429
        assert body["error"]["code"] == "queue_full"
        assert int(headers[b"retry-after"]) >= 1
        gate.set()
        for caller in held:
            await read_stream(caller)


@pytest.mark.clause("EN-110", "SF-09")
async def test_who_waits_at_the_outer_is_told_its_place(kind: str, tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def hold(call: StubCall) -> None:
        await gate.wait()
        await say("late")(call)

    async with site(tmp_path, kind) as (chain, stub):
        stub.script = hold
        running = [await chain.outer.ask(STREAM) for _ in range(4)]
        await eventually(lambda: chain.outer.leases == 4)
        first = await chain.outer.ask(STREAM)
        await eventually(lambda: chain.outer.edge.pools.waiting == 1)
        second = await chain.outer.ask(STREAM)
        await eventually(lambda: chain.outer.edge.pools.waiting == 2)
        gate.set()
        for caller in (*running, first):
            await read_stream(caller)
        headers, _ = await read_stream(second)
        assert headers[b"x-iop-queue-position"] == b"1"


@pytest.mark.clause("SF-04", "SF-13", "SF-32")
async def test_request_id_and_trace_context_reach_the_engine_through_both(kind: str, tmp_path: Path) -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with site(tmp_path, kind) as (chain, stub):
        caller = await chain.outer.ask(
            STREAM, "X-Request-Id: r-7", f"traceparent: {parent}", "tracestate: a=1"
        )
        headers, _ = await read_stream(caller)
        assert headers[b"x-request-id"] == b"r-7"
        seen = stub.calls[0].headers
        assert seen[b"x-request-id"] == b"r-7"
        assert seen[b"traceparent"] == parent.encode()
        assert seen[b"tracestate"] == b"a=1"
        for edge in (chain.outer.edge, chain.inner.edge):
            record = edge.outcomes.find("r-7")
            assert record is not None
            await eventually(lambda record=record: record.outcome is Outcome.COMPLETE)


@pytest.mark.clause("SF-12", "EN-112")
async def test_the_outer_edges_limit_ends_the_inner_ones_request(kind: str, tmp_path: Path) -> None:
    async def hang(call: StubCall) -> None:
        await call.wait_gone(within_s=20)

    limits = {"edge": {"limits": {"first_byte_timeout_sec": 1.0}}}
    async with site(tmp_path, kind, outer=limits) as (chain, stub):
        stub.script = hang
        status, _, body = await chain.outer.answer(STREAM)
        assert status == 504
        assert body["error"]["code"] == "timeout"
        await eventually(lambda: chain.inner.leases == 0 and stub.calls[0].is_closed, within_s=SOON_S)


@pytest.mark.clause("EN-110")
async def test_an_inner_edge_without_a_provider_is_503(kind: str, tmp_path: Path) -> None:
    quick = {"model": {"queue": {"no_capacity_grace_sec": 0.1}}}
    async with site(tmp_path, kind, inner=quick) as (chain, _stub):
        chain.inner.node.stop()
        await eventually(lambda: not chain.inner.edge.status.status()["nodes"][0]["connected"])
        status, headers, body = await chain.outer.answer(HELLO)
        assert status == 503
        assert body["error"]["code"] == "no_capacity"
        assert b"retry-after" in headers


@pytest.mark.clause("SF-06")
async def test_an_edge_that_names_itself_as_provider_says_so_and_does_not_go_round(
    kind: str, tmp_path: Path
) -> None:
    def circle(http_port: int, grpc_port: int) -> Mapping[str, Any]:
        adapter = (
            {"type": "openengine", "openengine": f"127.0.0.1:{grpc_port}"}
            if kind == "openengine"
            else {"type": "openai_compat", "endpoint": f"http://127.0.0.1:{http_port}"}
        )
        return edge_yaml(adapter, target="fast")

    async with asyncio.timeout(30), place(tmp_path, circle) as own:
        for body in (HELLO, STREAM):
            status, fields, answer = await own.answer(body)
            assert status == 508, (answer, own.edge.outcomes.find(fields[b"x-request-id"].decode()))
            assert answer["error"]["code"] == "loop_detected"
        await own.settled()
        # Each request came back once and was turned away; what else there was, its outcome tells.
        ended = {outcome: count for outcome, count in own.edge.outcomes.totals().items() if count}
        assert sum(ended.values()) == 4, (ended, own.edge.dispatcher.refusals)
