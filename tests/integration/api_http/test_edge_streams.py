"""Provider answers through the whole fleet: what reaches the caller, and how endings are told (P-01 to
P-07).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib

import openai
import pytest
from http_fleet import HttpFleet, fleet_of, post

from iop.api.http.limits import HttpLimits
from iop.edge.calls import Outcome
from iop.testing.stub_engine import StubCall, sse_events, whole_answer

STREAM = b'{"model":"fast","stream":true,"messages":[]}'
PLAIN = b'{"model":"fast","messages":[]}'
TEXTS = ["café ", "東京 🚀", "e\u0301 done"]
DONE = b"data: [DONE]\n\n"


async def ask(
    fleet: HttpFleet, body: bytes = STREAM, *headers: bytes, path: str = "/v1/chat/completions"
) -> bytes:
    """The body of one answer, whatever its framing; the end of the connection ends a cut one."""
    caller = await fleet.call()
    await caller.send(post(body, *headers, path=path))
    head = await caller.read_until(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return await caller.read_to_end()
    out = b""
    while True:
        line = await caller.reader.readline()
        if not line:
            return out + b"<cut>"
        size = int(line, 16)
        out += (await caller.reader.readexactly(size + 2))[:-2]
        if size == 0:
            return out


@pytest.mark.case("P-01")
@pytest.mark.clause("SF-03", "SF-05")
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("prefix", [b"data: ", b"data:"])
async def test_a_stream_cut_anywhere_arrives_as_it_was(newline: bytes, prefix: bytes) -> None:
    events = b"".join(sse_events(TEXTS)).replace(b"data: ", prefix).replace(b"\n", newline)

    async with fleet_of() as fleet:
        for cut in range(1, len(events)):

            async def script(call: StubCall, cut: int = cut) -> None:
                await call.start_events()
                await call.chunk(events[:cut])
                await asyncio.sleep(0.001)
                await call.chunk(events[cut:])
                await call.end_chunks()

            fleet.stub.script = script
            assert await ask(fleet) == events

        async def drip(call: StubCall) -> None:
            await call.start_events()
            for byte in events:
                await call.chunk(bytes([byte]))
            await call.end_chunks()

        fleet.stub.script = drip
        assert await ask(fleet) == events
        async with openai.AsyncOpenAI(base_url=fleet.url, api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(model="fast", messages=[], stream=True)
            texts = [chunk.choices[0].delta.content async for chunk in stream]
        assert [text for text in texts if text] == TEXTS


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-14", "EN-112")
@pytest.mark.parametrize(
    ("tail", "outcome"),
    [
        (sse_events([]), Outcome.COMPLETE),
        ([*sse_events([], is_done=False), b"data:[DONE]\n\n"], Outcome.COMPLETE),
        ([*sse_events([]), DONE], Outcome.COMPLETE),
        (sse_events([], is_done=False), Outcome.COMPLETE),
        ([], Outcome.UPSTREAM_TRUNCATED),
        ([*sse_events([], is_done=False), b"data: [DONE]"], Outcome.COMPLETE),
        ([*sse_events([]), b"rubbish " * 5], Outcome.COMPLETE),
    ],
    ids=["a", "b", "c", "d", "e", "f", "g"],
)
async def test_seven_ways_to_end_a_stream(tail: list[bytes], outcome: Outcome) -> None:
    start = sse_events(["one", "two"], finish=None, is_done=False)

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*start, *tail)
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        answer = await ask(fleet, STREAM, b"x-request-id: this-one")
        assert answer.startswith(b"".join(start))
        if outcome is Outcome.COMPLETE:
            assert answer.count(b"[DONE]") == 1
            assert answer.endswith(b"[DONE]\n\n")
            assert b"rubbish" not in answer
        else:
            assert b"[DONE]" not in answer
            error = json.loads(answer.removeprefix(b"".join(start)).removeprefix(b"data: "))["error"]
            assert error["code"] == "upstream_truncated"
        await fleet.settled()
        assert fleet.outcome("this-one") is outcome
        fleet.stub.script = StubEngineDefault
        assert b"rubbish" not in await ask(fleet)


ABORT = b'data: {"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"abort"}]}\n\n'


@pytest.mark.clause("SF-06", "SF-14", "EN-112")
async def test_a_stream_that_its_engine_gave_up_ends_as_an_error_and_counts_as_truncated() -> None:
    start = [*sse_events(["one"], finish=None, is_done=False), ABORT]

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*start, DONE)
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        answer = await ask(fleet, STREAM, b"x-request-id: given-up")
        assert answer.startswith(b"".join(start))
        assert b"[DONE]" not in answer
        error = json.loads(answer.removeprefix(b"".join(start)).removeprefix(b"data: "))["error"]
        assert error["code"] == "upstream_truncated"
        await fleet.settled()
        assert fleet.outcome("given-up") is Outcome.UPSTREAM_TRUNCATED


@pytest.mark.clause("SF-03", "SF-14", "EN-112")
async def test_a_stream_that_tells_of_an_error_and_ends_like_a_good_one_counts_as_truncated() -> None:
    told = [*sse_events(["one"], finish=None, is_done=False), b'data: {"error":{"message":"oom"}}\n\n', DONE]

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*told)
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        assert await ask(fleet, STREAM, b"x-request-id: failed") == b"".join(told)
        await fleet.settled()
        assert fleet.outcome("failed") is Outcome.UPSTREAM_TRUNCATED


@pytest.mark.clause("SF-03", "SF-14", "EN-112")
async def test_a_whole_answer_that_its_engine_gave_up_passes_as_it_is_and_counts_as_truncated() -> None:
    body = b'{"choices":[{"index":0,"message":{"content":"c"},"finish_reason":"abort"}]}'

    async def script(call: StubCall) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await call.write(head % len(body), body)

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(PLAIN, b"x-request-id: given-up"))
        await caller.read_until(b"\r\n\r\n")
        assert await caller.reader.readexactly(len(body)) == body
        await fleet.settled()
        assert fleet.outcome("given-up") is Outcome.UPSTREAM_TRUNCATED


async def StubEngineDefault(call: StubCall) -> None:  # noqa: N802 - stands for the stub's own script
    await call.start_events()
    await call.chunk(*sse_events(["next"]))
    await call.end_chunks()


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-14")
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_cut_stream_has_no_success_marker_in_any_dialect(path: str) -> None:
    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b'event: x\ndata: {"type":"content_block_delta"}\n\n')
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        answer = await ask(fleet, STREAM, path=path)
        assert b"message_stop" not in answer
        assert b"completed" not in answer
        last = answer.rstrip().split(b"\n\n")[-1]
        assert last.startswith(b"event: error\ndata: {")
        assert json.loads(last.split(b"data: ")[1])["type"] == "error"


@pytest.mark.case("P-04")
@pytest.mark.clause("SF-05")
async def test_heartbeat_comments_arrive_before_the_first_data() -> None:
    go_on = asyncio.Event()

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(b": waiting\n")
        await go_on.wait()
        await call.chunk(*sse_events(["x"]))
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(STREAM))
        await caller.read_until(b": waiting\n")
        go_on.set()
        await caller.read_until(b"[DONE]\n\n")


@pytest.mark.case("P-05")
@pytest.mark.clause("SF-03")
@pytest.mark.parametrize("is_accepted", [True, False])
async def test_a_provider_that_compresses_anyway(is_accepted: bool) -> None:
    clear = b'{"id":"c","choices":[],"text":"' + b"x" * 500 + b'"}'
    packed = gzip.compress(clear)

    async def script(call: StubCall) -> None:
        await call.write(whole_answer(packed, b"Content-Encoding: gzip", status=b"429 Too Many Requests"))

    async with fleet_of() as fleet:
        fleet.stub.script = script
        headers = (b"Accept-Encoding: gzip, br",) if is_accepted else ()
        status, fields, body = await fleet.post(PLAIN, *headers)
        assert status == 429
        if is_accepted:
            assert (fields[b"content-encoding"], body) == (b"gzip", packed)
        else:
            assert b"content-encoding" not in fields
            assert body == clear


@pytest.mark.case("P-05")
@pytest.mark.clause("SF-03", "SF-14")
@pytest.mark.parametrize("coding", [b"gzip", b"deflate"])
async def test_what_was_unpacked_and_lacks_its_end_is_no_whole_answer(coding: bytes) -> None:
    """Its length is right: the provider packed a cut answer, or lost the rest on the way here."""
    clear = b'{"id":"c","choices":[],"text":"' + random.Random(1).randbytes(4000).hex().encode() + b'"}'
    packed = gzip.compress(clear) if coding == b"gzip" else zlib.compress(clear)
    to_send = [packed, packed[:-9], packed[: len(packed) // 2]]

    async def script(call: StubCall) -> None:
        await call.write(whole_answer(to_send.pop(0), b"Content-Encoding: " + coding))

    async with fleet_of() as fleet:
        fleet.stub.script = script
        assert (await fleet.post(PLAIN))[2] == clear
        while to_send:
            caller = await fleet.call()
            await caller.send(post(PLAIN, b"x-request-id: cut"))
            answer = await caller.read_to_end()
            assert not answer.endswith(b"\r\n0\r\n\r\n"), "closed without its proper end"
            await fleet.settled()
            assert fleet.outcome("cut") is Outcome.UPSTREAM_TRUNCATED


@pytest.mark.case("P-05")
@pytest.mark.clause("SF-03", "SF-06")
async def test_a_coding_that_nobody_here_reads_is_a_clear_502() -> None:
    async def script(call: StubCall) -> None:
        await call.write(whole_answer(b"\x01\x02", b"Content-Encoding: br"))

    async with fleet_of() as fleet:
        fleet.stub.script = script
        status, fields, body = await fleet.post(PLAIN)
        assert (status, fields[b"x-iop-reason"]) == (502, b"unsupported_encoding")
        assert json.loads(body)["error"]["code"] == "unsupported_encoding"
        await fleet.settled()
        status, _, body = await fleet.post(PLAIN, b"Accept-Encoding: br")
        assert (status, body) == (200, b"\x01\x02")


@pytest.mark.case("P-05")
@pytest.mark.clause("SF-05")
@pytest.mark.parametrize("accepts", [(), (b"Accept-Encoding: gzip",)], ids=["plain", "coded"])
async def test_compressed_events_arrive_one_by_one(accepts: tuple[bytes, ...]) -> None:
    go_on = asyncio.Event()
    events = sse_events(["one", "two"])

    async def script(call: StubCall) -> None:
        machine = zlib.compressobj(wbits=31)
        await call.start_events(b"Content-Encoding: gzip")
        await call.chunk(machine.compress(events[0]) + machine.flush(zlib.Z_SYNC_FLUSH))
        await go_on.wait()
        await call.chunk(machine.compress(b"".join(events[1:])) + machine.flush())
        await call.end_chunks()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(STREAM, *accepts))
        head = await caller.read_until(b"\r\n\r\n")
        assert fleet.stub.calls[0].headers[b"accept-encoding"] == b"identity"
        if b"content-encoding: gzip" in head:
            assert accepts
            unpack = zlib.decompressobj(31)
            size = int(await caller.reader.readline(), 16)
            assert unpack.decompress((await caller.reader.readexactly(size + 2))[:-2]) == events[0]
        else:
            await caller.read_until(events[0])
        go_on.set()
        await caller.read_until(b"0\r\n\r\n")


@pytest.mark.case("P-06")
@pytest.mark.clause("SF-03", "EN-101")
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_big_body_arrives_with_only_its_model_changed(is_chunked: bool) -> None:
    image = b"A" * (12 << 20)
    body = (
        b'{"messages":[{"role":"user","content":"\\"model\\":\\"fast-latest\\" '
        + image
        + b'"}], "model" : "fast-latest","x":1152921504606846977,"y":1e-7,"z":null}'
    )
    async with fleet_of() as fleet:
        caller = await fleet.call()
        if is_chunked:
            await caller.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for start in range(0, len(body), 1 << 20):
                part = body[start : start + (1 << 20)]
                await caller.send(b"%x\r\n%b\r\n" % (len(part), part))
            await caller.send(b"0\r\n\r\n")
        else:
            await caller.send(post(body))
        assert (await caller.read_answer())[0] == 200
        call = fleet.stub.calls[0]
        assert call.body == body.replace(b'"model" : "fast-latest"', b'"model" : "org/Real-8B-Instruct"')
        assert (b"content-length" in call.headers) != (b"transfer-encoding" in call.headers)
        assert fleet.surface.buffered_bytes == 0


@pytest.mark.case("P-06")
@pytest.mark.clause("SF-12")
async def test_a_body_one_byte_over_the_limit_is_413_in_the_dialect() -> None:
    async with fleet_of(limits=HttpLimits(body_bytes=1000)) as fleet:
        body = PLAIN[:-1] + b" " * (1001 - len(PLAIN)) + b"}"
        for path, kind in (
            ("/v1/chat/completions", "invalid_request_error"),
            ("/v1/messages", "request_too_large"),
        ):
            status, fields, answer = await fleet.post(body, path=path)
            assert (status, json.loads(answer)["error"]["type"]) == (413, kind)
            assert fields[b"x-iop-reason"] == b"body_too_large"
        assert (await fleet.post(body[:-2] + b"}"))[0] == 200
        assert len(fleet.stub.calls) == 1


@pytest.mark.case("P-07")
@pytest.mark.clause("SF-03", "SF-14")
@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("half", [b"", b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"argu'])
async def test_a_reset_in_the_middle_is_told_and_nothing_is_repeated(count: int, half: bytes) -> None:
    events = sse_events(["x"] * count, finish=None, is_done=False)

    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*events, *([half] if half else []))
        await asyncio.sleep(0.02)
        call.reset()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        answer = await ask(fleet, STREAM, b"x-request-id: this-one")
        assert answer.startswith(b"".join(events))
        rest = answer[len(b"".join(events)) :]
        assert b"tool_calls" not in rest
        assert json.loads(rest.removeprefix(b"data: "))["error"]["type"] == "server_error"
        assert len(fleet.stub.calls) == 1
        await fleet.settled()
        assert fleet.outcome("this-one") in (Outcome.UPSTREAM_TRUNCATED, Outcome.UPSTREAM_ERROR)


@pytest.mark.case("P-07")
@pytest.mark.clause("SF-06")
async def test_a_reset_before_any_header_is_a_502() -> None:
    async def script(call: StubCall) -> None:
        call.reset()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        status, fields, body = await fleet.post(STREAM)
        assert status == 502, body
        assert fields[b"x-iop-origin"] == b"edge"
        assert json.loads(body)["error"]["code"].startswith("upstream_")


@pytest.mark.clause("SF-03")
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_a_cut_body_that_is_no_stream_has_no_proper_end(framing: str) -> None:
    async def script(call: StubCall) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        if framing == "length":
            await call.write(head + b'Content-Length: 100\r\n\r\n{"a":')
        elif framing == "chunked":
            await call.write(head + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n')
        else:
            await call.write(head + b'Connection: close\r\n\r\n{"a":')
        call.close()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        caller = await fleet.call()
        await caller.send(post(PLAIN, b"x-request-id: this-one"))
        answer = await caller.read_to_end()
        assert not answer.endswith(b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'{"a":' in answer
        await fleet.settled()
        assert fleet.outcome("this-one") is Outcome.UPSTREAM_TRUNCATED


@pytest.mark.clause("SF-03")
async def test_a_close_delimited_json_body_that_is_whole_is_a_success() -> None:
    async def script(call: StubCall) -> None:
        await call.write(b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"a":"}"}')
        call.close()

    async with fleet_of() as fleet:
        fleet.stub.script = script
        status, _, body = await fleet.post(PLAIN, b"x-request-id: this-one")
        assert (status, body) == (200, b'{"a":"}"}')
        await fleet.settled()
        assert fleet.outcome("this-one") is Outcome.COMPLETE


@pytest.mark.clause("SF-03")
async def test_an_event_that_is_too_large_ends_the_stream_by_name() -> None:
    async def script(call: StubCall) -> None:
        await call.start_events()
        await call.chunk(*sse_events(["x"], finish=None, is_done=False))
        for _ in range(100):
            await call.chunk(b"data: " + b"y" * 1000)
        await call.wait_gone()

    async with fleet_of(limits=HttpLimits(sse_event_bytes=10_000)) as fleet:
        fleet.stub.script = script
        answer = await ask(fleet)
        error = json.loads(answer.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert error["code"] == "event_too_large"
        assert b"yyyy" not in answer
        await fleet.stub.calls[0].wait_gone()
        await fleet.settled()
