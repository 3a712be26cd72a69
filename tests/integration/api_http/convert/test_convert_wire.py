"""Converted routes at the level of bytes: odd streams of providers, errors, headers, the listing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_fleet import fleet_of, post
from scripted_backends import chat_backend

from iop.api.http.convert.messages_writer import MessagesWriter
from iop.api.http.matrix import SurfaceMatrix
from iop.api.http.models import StatusWithSurfaces
from iop.edge.calls import Outcome
from iop.testing.stub_engine import StubCall, sse_events, whole_answer

CHAT_ONLY = frozenset({"chat_completions"})
ASK = {"model": "fast", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
TEXTS = ["é東", "京🚀", "e\u0301"]


def body(**more: Any) -> bytes:
    return json.dumps(ASK | more).encode()


def text_of(stream: bytes) -> str:
    lines = [line for line in stream.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    return "".join(
        event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"
    )


@pytest.mark.case("P-01")
@pytest.mark.clause("SF-05", "SF-10")
async def test_no_split_of_the_providers_bytes_shows_in_the_messages_stream() -> None:
    stream = b"".join(sse_events(TEXTS))
    variants = [stream, stream.replace(b"\n", b"\r\n"), stream.replace(b"data: ", b"data:")]
    cuts: list[list[bytes]] = [[v[:at], v[at:]] for v in variants for at in range(1, len(v), 23)]
    cuts.append([stream[at : at + 1] for at in range(len(stream))])
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        caller = await fleet.call()
        for parts in cuts:

            async def script(call: StubCall, parts: list[bytes] = parts) -> None:
                await call.start_events()
                for part in parts:
                    await call.chunk(part)
                    await asyncio.sleep(0)
                await call.end_chunks()

            fleet.stub.script = script
            status, fields, answer = await fleet.post(body(), path="/v1/messages", caller=caller)
            assert (status, fields[b"x-iop-converted"]) == (200, b"chat_completions")
            assert text_of(answer) == "".join(TEXTS)
            assert answer.count(b"event: message_stop") == 1
        await fleet.settled()


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-14", "SF-10", "EN-112")
@pytest.mark.parametrize(
    ("ending", "is_success"),
    [
        ([b"data: [DONE]\n\n"], True),
        ([b"data:[DONE]\n\n"], True),
        ([b"data: [DONE]\n\n", b"data: [DONE]\n\n"], True),
        ([], True),
        (None, False),
        ([b"data: [DONE]"], True),
        ([b"data: [DONE]\n\n", b"x" * 40], True),
    ],
)
async def test_seven_ways_to_end_a_stream_are_told_apart_on_converted_routes(
    ending: list[bytes] | None, is_success: bool
) -> None:
    async def script(call: StubCall) -> None:
        finish = None if ending is None else "stop"
        await call.start_events()
        await call.chunk(*sse_events(["one ", "two"], finish=finish, is_done=False), *(ending or []))
        await call.end_chunks()

    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = script
        for path, mark, failure in (
            ("/v1/messages", b"event: message_stop", b"event: error"),
            ("/v1/responses", b"event: response.completed", b"event: response.failed"),
        ):
            ask = body() if path == "/v1/messages" else body(messages=None, max_tokens=None, input="hi")
            status, fields, answer = await fleet.post(ask, path=path)
            assert status == 200
            assert answer.count(mark) == int(is_success)
            assert answer.count(failure) == int(not is_success)
            assert b"xxx" not in answer
            assert b"[DONE]" not in answer
            await fleet.settled()
            outcome = fleet.outcome(fields[b"x-request-id"].decode())
            assert outcome is (Outcome.COMPLETE if is_success else Outcome.UPSTREAM_TRUNCATED)


@pytest.mark.case("P-18")
@pytest.mark.clause("SF-06", "SF-10")
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (b"400 Bad Request", "invalid_request_error"),
        (b"429 Too Many Requests", "rate_limit_error"),
        (b"503 Service Unavailable", "overloaded_error"),
        (b"529 Overloaded", "overloaded_error"),
    ],
)
async def test_a_providers_refusal_keeps_status_and_limit_headers_in_the_callers_envelope(
    status: bytes, kind: str
) -> None:
    async def refuse(call: StubCall) -> None:
        told = b'{"error":{"message":"prompt too long","type":"t","code":"c"}}'
        headers = (b"Retry-After: Wed, 21 Oct 2099 07:28:00 GMT", b"X-RateLimit-Reset: 604800")
        await call.write(whole_answer(told, *headers, status=status))

    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = refuse
        for is_stream in (True, False):
            got, fields, answer = await fleet.post(body(stream=is_stream), path="/v1/messages")
            assert got == int(status[:3])
            assert fields[b"retry-after"] == b"Wed, 21 Oct 2099 07:28:00 GMT"
            assert fields[b"x-ratelimit-reset"] == b"604800"
            value = json.loads(answer)
            assert value["error"] == {"type": kind, "message": "prompt too long", "code": "c"}


@pytest.mark.case("P-18")
@pytest.mark.clause("SF-03", "SF-06")
async def test_html_passes_on_tunnels_and_becomes_an_error_on_converted_routes() -> None:
    page = b"<html>bad</html>"

    async def html(call: StubCall) -> None:
        await call.write(whole_answer(page, status=b"502 Bad Gateway", kind=b"text/html"))

    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = html
        got, fields, answer = await fleet.post(body())
        assert (got, fields[b"content-type"], answer) == (502, b"text/html", page)
        got, fields, answer = await fleet.post(body(), path="/v1/messages")
        assert (got, fields[b"content-type"]) == (502, b"application/json")
        assert json.loads(answer)["type"] == "error"


@pytest.mark.clause("SF-01", "SF-03", "SF-04")
async def test_only_what_the_provider_lacks_is_converted_and_no_dialects_version_travels_along() -> None:
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = chat_backend
        whole = json.dumps(ASK | {"stream": False, "system": "Be brief."}).encode()
        headers = (b"anthropic-version: 2023-06-01", b"Accept-Encoding: gzip", b"X-Own: 1")
        status, fields, answer = await fleet.post(whole, *headers, path="/v1/messages")
        assert (status, json.loads(answer)["role"]) == (200, "assistant")
        sent = fleet.stub.calls[0].headers
        assert b"anthropic-version" not in sent
        assert (sent[b"accept-encoding"], sent[b"x-own"]) == (b"identity", b"1")
        assert fields[b"x-iop-provider"]
        tunnelled = b'{"model":"fast",  "messages":[{"role":"system","content":"Be brief."},'
        tunnelled += b'{"role":"user","content":"hi"}], "z":1e-7}'
        status, fields, _ = await fleet.post(tunnelled)
        assert status == 200
        assert b"x-iop-converted" not in fields
        assert fleet.stub.calls[1].body == tunnelled.replace(b"fast", b"org/Real-8B-Instruct", 1)
        status, _, answer = await fleet.post(b'{"model":"fast","input":"x"}', path="/v1/embeddings")
        assert (status, json.loads(answer)["error"]["code"]) == (404, "operation_not_supported")


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize("is_run", [False, True])
async def test_the_listing_says_how_each_route_is_served(is_run: bool) -> None:
    async with fleet_of(operations=None if is_run else CHAT_ONLY, is_ollama=is_run) as fleet:
        caller = await fleet.call()
        await caller.send(b"GET /v1/models/fast HTTP/1.1\r\nHost: e\r\n\r\n")
        _, _, answer = await caller.read_answer()
        entry = json.loads(answer)["iop"]
        way = "run" if is_run else "tunnel"
        assert entry["endpoints"]["/v1/chat/completions"] == [way]
        assert entry["endpoints"]["/v1/messages"] == ["converted"]
        assert entry["endpoints"]["/v1/messages/count_tokens"] == ["estimate"]
        assert "/v1/embeddings" not in entry["endpoints"]
        assert entry["conversions"] == {
            "/v1/responses": ["chat_completions"],
            "/v1/messages": ["chat_completions"],
        }
        shown = StatusWithSurfaces(
            fleet.edge.status, find_snapshot=lambda: fleet.edge.snapshot, matrix=SurfaceMatrix()
        ).status()
        assert shown["models"][0]["endpoints"] == entry["endpoints"]


@pytest.mark.case("P-15")
@pytest.mark.clause("SF-10", "SF-14")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_a_response_repeats_never_hangs_its_caller(is_stream: bool) -> None:
    """An integer beyond 64 bits and half a character: the encoder that writes answers takes neither."""
    schema = {"type": "object", "properties": {"id": {"maximum": 2**64 + 1}}}
    said = {
        "model": "fast",
        "stream": is_stream,
        "instructions": "Be brief.",
        "input": "hi",
        "metadata": {"a": "\ud83d"},
        "tools": [{"type": "function", "name": "f", "parameters": schema, "strict": False}],
        "user": 10**30,
    }
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = chat_backend
        status, _, answer = await fleet.post(json.dumps(said).encode(), path="/v1/responses")
        assert status == 200
        assert fleet.stub.calls[-1].json["user"] == 10**30
        if is_stream:
            *_, last, _ = answer.split(b"\n\n")
            response = json.loads(last.partition(b"data: ")[2])["response"]
        else:
            response = json.loads(answer)
        assert response["status"] == "completed"
        assert (response["user"], response["metadata"]) == (said["user"], said["metadata"])
        assert response["tools"][0]["parameters"] == schema
        await fleet.settled()


@pytest.mark.clause("SF-06", "SF-14", "EN-112")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_bug_in_the_conversion_of_an_answer_ends_it_and_shows_no_success(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bytes:
        raise TypeError("a bug")

    monkeypatch.setattr(MessagesWriter, "end" if is_stream else "whole", broken)
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        fleet.stub.script = chat_backend
        caller = await fleet.call()
        await caller.send(post(body(system="Be brief.", stream=is_stream), path="/v1/messages"))
        answer = await caller.read_to_end() if is_stream else b"%d" % (await caller.read_answer())[0]
        assert answer.startswith(b"HTTP/1.1 200" if is_stream else b"502")
        assert b"message_stop" not in answer and not answer.endswith(b"0\r\n\r\n")
        await fleet.settled()


@pytest.mark.clause("SF-06", "SF-09", "SF-10")
async def test_what_was_found_out_here_about_an_answer_says_that_it_is_ours() -> None:
    """What the provider told is its own, in the caller's words."""
    cut = b'{"choices":[{"index":0,"message":{"content":"a"}}]}'
    ours = {b"upstream_error": [b"no json", b"[]"], b"upstream_truncated": [cut]}
    async with fleet_of(operations=CHAT_ONLY) as fleet:
        for path in ("/v1/messages", "/v1/responses"):
            ask: dict[str, Any] = {"model": "fast", "input": "hi"} if path == "/v1/responses" else ASK
            for reason, bodies in ours.items():
                for answer in bodies:
                    fleet.stub.script = scripted(whole_answer(answer))
                    status, fields, told = await fleet.post(
                        json.dumps(ask | {"stream": False}).encode(), path=path
                    )
                    assert (status, fields[b"x-iop-origin"], fields[b"x-iop-reason"]) == (
                        502,
                        b"edge",
                        reason,
                    )
                    assert json.loads(told)["error"]["code"] == reason.decode()
            fleet.stub.script = scripted(whole_answer(b"", status=b"302 Found"))
            status, fields, _ = await fleet.post(json.dumps(ask | {"stream": False}).encode(), path=path)
            assert (status, fields[b"x-iop-reason"]) == (502, b"upstream_error")
            fleet.stub.script = scripted(whole_answer(b'{"error":{"message":"full","code":"mine"}}'))
            status, fields, told = await fleet.post(json.dumps(ask | {"stream": False}).encode(), path=path)
            assert (status, b"x-iop-origin" in fields) == (502, False)
            assert json.loads(told)["error"]["code"] == "mine"
        await fleet.settled()


def scripted(answer: bytes) -> Any:
    async def script(call: StubCall) -> None:
        await call.write(answer)

    return script
