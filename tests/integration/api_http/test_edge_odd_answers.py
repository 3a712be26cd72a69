"""Answers that are odd, or no good HTTP: each ends in one known way and reaches nobody else (SF-03, SF-04)."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from http_fleet import fleet_of, post

from iop.testing.stub_engine import StubCall, whole_answer

WHOLE = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
)
EVENTS = (
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}\n\n'
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(WHOLE)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CLOSED = "cut"
"""A head, and then the connection closes without the body's proper end."""


def chunks(data: bytes, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(data), extension, data, trailers)


GOOD = OK + JSON + LENGTH + b"\r\n" + WHOLE
ANSWERS: dict[str, tuple[bytes, Any, Any]] = {
    # what comes, what a tunnel's caller gets, what a converted one's gets
    "plain": (GOOD, 200, 200),
    "interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + GOOD,
        200,
        200,
    ),
    "interim answers without end": (b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, 502, 502),
    "another protocol": (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nzzz",
        502,
        502,
    ),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 502, 502),
    "no HTTP": (b"\x00\xff\x10garbage\r\n\r\n", 502, 502),
    "nothing": (b"", 502, 502),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-Ty", 502, 502),
    "a status of no class": (b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\n{}", 600, 600),
    "a status below all": (b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\n{}", 502, 502),
    "no number for a status": (b"HTTP/1.1 2x0 Odd\r\n\r\n", 502, 502),
    "no reason phrase": (GOOD.replace(b" OK", b"", 1), 200, 200),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, 502),
    "content where there is none": (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello", 204, 502),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, 502),
    "a redirect": (
        b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        302,
        502,
    ),
    "an empty body": (OK + JSON + b"Content-Length: 0\r\n\r\n", 200, 502),
    "HTTP/1.0 until it closes": (b"HTTP/1.0 200 OK\r\n" + JSON + b"\r\n" + WHOLE, 200, 200),
    "until it closes": (OK + JSON + b"\r\n" + WHOLE, 200, 200),
    "cut, until it closes": (OK + JSON + b"\r\n" + WHOLE[:-3], CLOSED, 502),
    "two framings": (OK + JSON + LENGTH + CHUNKED + b"\r\n" + chunks(WHOLE), 502, 502),
    "two lengths": (OK + JSON + LENGTH + b"Content-Length: 3\r\n\r\n" + WHOLE, 502, 502),
    "a negative length": (OK + JSON + b"Content-Length: -1\r\n\r\n" + WHOLE, 502, 502),
    "an endless length": (OK + JSON + b"Content-Length: 99999999999999999999\r\n\r\n" + WHOLE, 502, 502),
    "a length that is too long": (OK + JSON + b"Content-Length: 5000\r\n\r\n" + WHOLE, CLOSED, 502),
    "extensions and trailers": (
        OK + JSON + CHUNKED + b"\r\n" + chunks(WHOLE, b";a=b", b"X-Trailer: 1\r\nSet-Cookie: a=b\r\n"),
        200,
        200,
    ),
    "a bad chunk": (OK + JSON + CHUNKED + b"\r\nzz\r\n", CLOSED, 502),
    "a transfer coding": (
        OK + JSON + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(gzip.compress(WHOLE)),
        502,
        502,
    ),
    "two content codings": (
        OK + JSON + b"Content-Encoding: gzip, gzip\r\nContent-Length: 2\r\n\r\nab",
        502,
        502,
    ),
    "a broken content coding": (
        OK + JSON + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
        CLOSED,
        502,
    ),
    "a head without end": (OK + b"X-A: " + b"a" * 200_000 + b"\r\n\r\n", 502, 502),
    "line feeds alone": (b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", 502, 502),
    "a folded field": (OK + b"X-A: a\r\n b\r\n" + JSON + LENGTH + b"\r\n" + WHOLE, 502, 502),
    "a zero byte in a field": (OK + b"X-A: a\0b\r\n" + JSON + LENGTH + b"\r\n" + WHOLE, 502, 502),
    "a carriage return in a field": (OK + b"X-A: a\rX-B: c\r\n" + JSON + LENGTH + b"\r\n" + WHOLE, 502, 502),
    "a space in a field's name": (OK + b"X A: b\r\n" + JSON + LENGTH + b"\r\n" + WHOLE, 502, 502),
    "another answer behind it": (GOOD + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON", 200, 200),
    "events": (OK + SSE + CHUNKED + b"\r\n" + chunks(EVENTS), 200, 200),
    "events with a byte order mark": (OK + SSE + b"\r\n\xef\xbb\xbf" + EVENTS, 200, 200),
    "events of a stated length": (OK + SSE + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS, 200, 200),
    "no kind of content": (OK + LENGTH + b"\r\n" + WHOLE, 200, 200),
    "brackets without end": (OK + JSON + b"\r\n" + b"[" * 100_000, CLOSED, 502),
    "too deep to be converted": (OK + JSON + b"\r\n" + b'{"a":' * 3000 + b"1" + b"}" * 3000, 200, 502),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tunnel": ("/v1/chat/completions", {}),
    "converted": ("/v1/messages", {"operations": frozenset({"chat_completions"})}),
}


@pytest.mark.case("P-02")
@pytest.mark.clause("SF-03", "SF-04", "SF-06", "SF-14", "EN-04")
@pytest.mark.parametrize("kind", KINDS)
async def test_an_odd_answer_ends_in_one_known_way_and_harms_nobody(kind: str) -> None:
    path, options = KINDS[kind]
    body = b'{"model":"fast","max_tokens":5,"messages":[{"role":"user","content":"x"}]}'
    async with fleet_of(capacity=1, **options) as fleet:
        for name, (data, tunnelled, converted) in ANSWERS.items():

            async def script(call: StubCall, data: bytes = data) -> None:
                await call.write(data)
                call.close()

            fleet.stub.script = script
            caller = await fleet.call()
            async with asyncio.timeout(20):
                await caller.send(post(body, b"Connection: close", path=path))
                answer = await caller.read_to_end()
            await caller.close()
            await fleet.settled()
            wanted = tunnelled if kind == "tunnel" else converted
            head, _, rest = answer.partition(b"\r\n\r\n")
            if wanted is CLOSED:
                assert head.startswith(b"HTTP/1.1 200 "), name
                stated = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                assert len(rest) < int(stated) if stated else not rest.endswith(b"0\r\n\r\n"), name
            else:
                assert head.startswith(b"HTTP/1.1 %d " % wanted), (name, answer)
            for never in (b"POISON", b"set-cookie", b"10.0.0.1", b"x-trailer", b"early"):
                assert never not in answer.lower(), name
            if wanted == 502 and kind == "tunnel":
                assert json.loads(rest)["error"]["code"] in ("upstream_error", "unsupported_encoding"), name

            async def healthy(call: StubCall) -> None:
                await call.write(whole_answer(WHOLE))

            fleet.stub.script = healthy
            status, _, _ = await fleet.post(body, path=path)
            assert status == 200, name
