"""Requests that two readers could take for different ones: each is refused, or handled in one documented
way.
"""

from __future__ import annotations

import pytest

from iop.api.http.protocol import HttpConnection
from iop.testing.http_site import Recorder, SilentTransport, Site

_H = b"Host: edge\r\n"
_TAIL = b"GET /smuggled HTTP/1.1\r\nHost: edge\r\n\r\n"


def _post(*lines: bytes, body: bytes = b"") -> bytes:
    return b"POST /a HTTP/1.1\r\n" + _H + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


REFUSED: dict[str, bytes] = {
    "length beside chunked": _post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunked beside length": _post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"),
    "two different lengths": _post(b"Content-Length: 5", b"Content-Length: 6", body=b"hello"),
    "two equal lengths": _post(b"Content-Length: 5", b"Content-Length: 5", body=b"hello"),
    "a list of lengths": _post(b"Content-Length: 5, 5", body=b"hello"),
    "a signed length": _post(b"Content-Length: +5", body=b"hello"),
    "a negative length": _post(b"Content-Length: -1"),
    "a hexadecimal length": _post(b"Content-Length: 0x5", body=b"hello"),
    "an empty length": _post(b"Content-Length: ", body=b"hello"),
    "a length with a space inside": _post(b"Content-Length: 5 0", body=b"hello"),
    "a length beyond 64 bits": _post(b"Content-Length: 99999999999999999999", body=b"hello"),
    "an unknown coding": _post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "gzip, chunked": _post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "chunked, identity": _post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "identity": _post(b"Transfer-Encoding: identity", b"Content-Length: 5", body=b"hello"),
    "two codings": _post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "quoted coding": _post(b'Transfer-Encoding: "chunked"', body=b"0\r\n\r\n"),
    "a vertical tab before the coding": _post(b"Transfer-Encoding:\x0bchunked", body=b"0\r\n\r\n"),
    "a space before the colon": _post(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "a space before the length's colon": _post(b"Content-Length : 5", body=b"hello"),
    "a folded coding": _post(b"Transfer-Encoding:", b" chunked", body=b"0\r\n\r\n"),
    "a folded header": _post(b"X-A: a", b"\tb"),
    "a first header that begins with a space": b"GET / HTTP/1.1\r\n Host: edge\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: edge\n\n",
    "one bare line feed": b"POST / HTTP/1.1\r\nHost: edge\nContent-Length: 5\r\n\r\nhello",
    "a bare carriage return": _post(b"X-A: a\rTransfer-Encoding: chunked"),
    "a zero byte in a value": _post(b"X-A: a\x00b"),
    "a zero byte in a name": _post(b"X-\x00A: b"),
    "an empty header name": _post(b": b"),
    "a line without a colon": _post(b"X-A"),
    "a bad chunk size": _post(b"Transfer-Encoding: chunked", body=b"zz\r\nhello\r\n0\r\n\r\n"),
    "a prefixed chunk size": _post(b"Transfer-Encoding: chunked", body=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a signed chunk size": _post(b"Transfer-Encoding: chunked", body=b"+5\r\nhello\r\n0\r\n\r\n"),
    "a space after a chunk size": _post(b"Transfer-Encoding: chunked", body=b"5 \r\nhello\r\n0\r\n\r\n"),
    "a chunk size beyond 64 bits": _post(b"Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\nhello\r\n"),
    "a chunk longer than its size": _post(b"Transfer-Encoding: chunked", body=b"4\r\nhello\r\n0\r\n\r\n"),
    "bare line feeds between chunks": _post(b"Transfer-Encoding: chunked", body=b"5\nhello\n0\n\n"),
    "a line feed in a chunk extension": _post(
        b"Transfer-Encoding: chunked", body=b"5;a\nb\r\nhello\r\n0\r\n\r\n"
    ),
    "chunked on HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a host with a path": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "a host with a user": b"GET / HTTP/1.1\r\nHost: user@a\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: edge\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FOO / HTTP/1.1\r\nHost: edge\r\n\r\n",
    "CONNECT": b"CONNECT other:80 HTTP/1.1\r\nHost: other:80\r\n\r\n",
    "a target that is no path": b"GET a/b HTTP/1.1\r\nHost: edge\r\n\r\n",
    "a target of another scheme": b"GET file:///etc HTTP/1.1\r\nHost: edge\r\n\r\n",
    "a fragment in the target": b"GET /a#b HTTP/1.1\r\nHost: edge\r\n\r\n",
    "bytes above ASCII in the target": b"GET /\xff HTTP/1.1\r\nHost: edge\r\n\r\n",
    "an unknown expectation": _post(b"Expect: 200-ok", b"Content-Length: 5", body=b"hello"),
}


@pytest.mark.clause("SF-04", "SF-12")
@pytest.mark.parametrize("name", REFUSED)
async def test_an_ambiguous_request_is_refused_and_nothing_after_it_is_read(site: Site, name: str) -> None:
    handler = Recorder()
    await site.serve(handler)
    caller = await site.call()
    await caller.send(REFUSED[name] + _TAIL)
    answer = await caller.read_to_end()
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), answer
    assert answer.count(b"\r\ndate: ") == 1
    assert b"connection: close" in answer
    assert handler.requests == []


@pytest.mark.clause("SF-12")
@pytest.mark.parametrize("name", REFUSED)
async def test_an_ambiguous_request_is_refused_also_byte_by_byte(site: Site, name: str) -> None:
    handler = Recorder()
    server = await site.serve(handler)
    connection = HttpConnection(server)
    transport = SilentTransport()
    connection.connection_made(transport)
    for byte in REFUSED[name] + _TAIL:
        connection.data_received(bytes([byte]))
    assert handler.requests == []
    assert b"".join(transport.written).startswith((b"HTTP/1.1 4", b"HTTP/1.1 5"))
    connection.connection_lost(None)


HANDLED: dict[str, tuple[bytes, list[tuple[bytes, bytes, bytes]]]] = {
    "empty lines before the request": (b"\r\n\r\nGET /a HTTP/1.1\r\nHost: e\r\n\r\n", [(b"GET", b"/a", b"")]),
    "a coding in capitals": (
        _post(b"TRANSFER-ENCODING: Chunked", body=b"5\r\nhello\r\n0\r\n\r\n"),
        [(b"POST", b"/a", b"hello")],
    ),
    "a chunk extension": (
        _post(b"Transfer-Encoding: chunked", body=b"5;a=b\r\nhello\r\n0\r\n\r\n"),
        [(b"POST", b"/a", b"hello")],
    ),
    "a trailer that looks like framing": (
        _post(b"Transfer-Encoding: chunked", body=b"5\r\nhello\r\n0\r\nX-Trailer: 5\r\n\r\n"),
        [(b"POST", b"/a", b"hello")],
    ),
    "a length with zeros before it": (
        _post(b"Content-Length: 005", body=b"hello"),
        [(b"POST", b"/a", b"hello")],
    ),
    "an absolute target": (
        b"GET http://edge/a HTTP/1.1\r\nHost: edge\r\n\r\n",
        [(b"GET", b"/a", b"")],
    ),
    "a body on GET": (
        b"GET /a HTTP/1.1\r\nHost: edge\r\nContent-Length: 5\r\n\r\nhello",
        [(b"GET", b"/a", b"hello")],
    ),
    "two requests in one write": (
        b"GET /a HTTP/1.1\r\nHost: e\r\n\r\nGET /b HTTP/1.1\r\nHost: e\r\n\r\n",
        [(b"GET", b"/a", b""), (b"GET", b"/b", b"")],
    ),
    "an upgrade that nobody asked us to know": (
        b"GET /a HTTP/1.1\r\nHost: e\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + _TAIL,
        [(b"GET", b"/a", b"")],
    ),
}


@pytest.mark.clause("SF-12")
@pytest.mark.parametrize("name", HANDLED)
async def test_a_strange_request_is_read_in_one_way(site: Site, name: str) -> None:
    handler = Recorder()
    await site.serve(handler)
    caller = await site.call()
    data, expected = HANDLED[name]
    await caller.send(data)
    for _ in expected:
        status, _, _ = await caller.read_answer()
        assert status == 200
    assert handler.requests == expected
