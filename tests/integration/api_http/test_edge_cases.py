"""Cases from the field, at the level of bytes and with a second provider beside (`tests/cases.md`)."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from http_fleet import HttpFleet, fleet_of, post

from iop.api.http.limits import HttpLimits
from iop.edge.calls import Outcome
from iop.testing.stub_engine import StubCall, StubEngine, sse_events, whole_answer

STREAM = b'{"model":"fast","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
PLAIN = b'{"model":"fast","messages":[]}'
CHAT_ONLY = frozenset({"chat_completions"})
ID = b"x-request-id: this-one"


async def read_stream(fleet: HttpFleet, *, path: str = "/v1/chat/completions") -> tuple[bytes, bytes]:
    """Head and body of one chunked answer; a cut one ends with a mark of our own."""
    caller = await fleet.call()
    await caller.send(post(STREAM, ID, path=path))
    head = await caller.read_until(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head, await caller.reader.readexactly(size)
    out = b""
    while size := int(await caller.reader.readline(), 16):
        out += (await caller.reader.readexactly(size + 2))[:-2]
    return head, out


@pytest.mark.case("P-07")
@pytest.mark.clause("EN-112", "SF-06", "SF-14")
@pytest.mark.parametrize("route", ["chat/completions", "messages"])
@pytest.mark.parametrize("count", [None, 0, 1, 50], ids=["before headers", "none", "one", "fifty"])
@pytest.mark.parametrize("is_in_call", [False, True])
async def test_what_a_provider_began_no_other_one_is_asked_for(
    route: str, count: int | None, is_in_call: bool
) -> None:
    """Both providers reset; one that had begun must not be followed by the other."""
    usage = {"prompt_tokens": 7, "completion_tokens": count or 0}
    events = [
        *sse_events(["x"] * (count or 0), finish=None, is_done=False),
        b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n",
    ]
    call_begins = (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","function":'
        b'{"name":"f","arguments":"{\\"a\\""}}]}}]}\n\n'
    )
    half = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"argum'

    async def script(call: StubCall) -> None:
        if count is not None:
            await call.start_events()
            await call.chunk(*events, *([call_begins, half] if is_in_call else []))
            await asyncio.sleep(0.02)
        call.reset()

    async with (
        StubEngine(script) as other,
        fleet_of(second_endpoint=other.endpoint, operations=CHAT_ONLY) as fleet,
    ):
        fleet.stub.script = script
        before = len(other.calls) + len(fleet.stub.calls)
        head, body = await read_stream(fleet, path=f"/v1/{route}")
        assert len(other.calls) + len(fleet.stub.calls) == before + 1
        await fleet.settled()
        record = fleet.edge.outcomes.find("this-one")
        assert record is not None
        if count is None:
            assert head.startswith(b"HTTP/1.1 502")
            assert b"x-iop-origin: edge" in head
            return
        assert record.outcome in (Outcome.UPSTREAM_TRUNCATED, Outcome.UPSTREAM_ERROR)
        assert record.usage is not None
        assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (7, count)
        assert b"argum" not in body.replace(b'"arguments":"{', b"")
        for success in (b"[DONE]", b"message_stop", b"finish_reason", b'tool_use"}'):
            assert success not in body
        last = json.loads(body.strip().split(b"\n\n")[-1].split(b"data: ")[1])
        assert last["error"]["type"] in {"server_error", "api_error"}


@pytest.mark.case("P-04")
@pytest.mark.clause("SF-05")
@pytest.mark.parametrize(
    ("path", "operations"), [("/v1/chat/completions", None), ("/v1/messages", CHAT_ONLY)]
)
@pytest.mark.parametrize("comment", [b": waiting\n", b":\n", b": waiting\r\n"])
async def test_comments_arrive_while_nothing_else_does_and_are_no_data(
    path: str, operations: frozenset[str] | None, comment: bytes
) -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(comment)
        await go_on.wait()
        first, *rest = sse_events(["é", "b"])
        # Between the lines of one event: neither its end nor a part of it.
        await call.chunk(b"event: x\n" + comment + first, *rest)
        await call.end_chunks()

    async with fleet_of(operations=operations) as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(STREAM, path=path))
        await caller.read_until(b"\r\n\r\n")
        await caller.read_until(comment.strip())
        go_on.set()
        body = await caller.read_until(b"0\r\n\r\n")
        assert "é".encode() in body and b"waiting" not in body.replace(comment.strip(), b"")
        assert body.count(b"data: ") == (4 if operations is None else body.count(b"event: "))


@pytest.mark.case("P-05")
@pytest.mark.clause("SF-03", "SF-15")
@pytest.mark.parametrize("accepts", [(), (b"Accept-Encoding: gzip, br",)], ids=["plain", "coded"])
async def test_what_must_be_rewritten_is_unpacked_first_and_has_its_right_length(
    accepts: tuple[bytes, ...],
) -> None:
    packed = gzip.compress(b'{"model":"real","choices":[]}')

    async def zipped(call: StubCall) -> None:
        await call.write(whole_answer(packed, b"Content-Encoding: gzip"))

    async def strange(call: StubCall) -> None:
        await call.write(whole_answer(b"\x01\x02", b"Content-Encoding: br"))

    async with fleet_of(response_model="alias") as fleet:
        fleet.stub.script = zipped
        status, headers, body = await fleet.post(PLAIN, *accepts)
        assert (status, body) == (200, b'{"model":"fast","choices":[]}')
        assert b"content-encoding" not in headers
        assert headers[b"content-length"] == b"%d" % len(body)
        fleet.stub.script = strange
        status, headers, _ = await fleet.post(PLAIN, *accepts)
        assert (status, headers[b"x-iop-reason"]) == (502, b"unsupported_encoding")


@pytest.mark.case("P-06")
@pytest.mark.clause("SF-12")
@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "invalid_request_error"), ("/v1/messages", "request_too_large")],
)
async def test_an_undeclared_body_one_byte_over_the_limit_is_413_in_the_dialect(path: str, kind: str) -> None:
    async with fleet_of(limits=HttpLimits(body_bytes=1000)) as fleet:
        for size, expected in ((1000, 200), (1001, 413)):
            caller = await fleet.call()
            body = PLAIN[:-1] + b" " * (size - len(PLAIN)) + b"}"
            await caller.send(
                b"POST %b HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
            )
            await caller.send(b"1f4\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (body[:500], size - 500, body[500:]))
            status, fields, answer = await caller.read_answer()
            assert status == expected
            if status == 413:
                assert (json.loads(answer)["error"]["type"], fields[b"x-iop-reason"]) == (
                    kind,
                    b"body_too_large",
                )
        assert len(fleet.stub.calls) == 1
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.case("P-16")
@pytest.mark.clause("EN-04", "SF-15")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"])
async def test_neither_addresses_nor_keys_stand_in_any_answer_of_ours(path: str) -> None:
    async def broken(call: StubCall) -> None:
        call.reset()

    async with fleet_of(response_model="alias") as fleet:
        secrets = (
            b"upstream-secret",
            fleet.stub.endpoint.encode().removeprefix(b"http://"),
            b"127.0.0.1",
            b"gpu-1",
        )
        fleet.stub.script = broken
        answers: list[Any] = [await fleet.post(PLAIN, path=path)]
        await fleet.stub.__aexit__(None, None, None)  # nobody listens there any more
        answers.append(await fleet.post(PLAIN, path=path))
        await fleet.stop_node()
        answers.append(await fleet.post(PLAIN, path=path))
        assert [status for status, _, _ in answers] == [502, 502, 503]
        for _, headers, body in answers:
            for secret in secrets:
                assert secret not in body
                assert all(secret not in value for value in headers.values())
