"""The upstream HTTP client against a raw server that may write anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from iop.adapters.http_connection import HEAD_BYTES_MAX, HttpExchange
from iop.adapters.http_exchange import HttpRequest, Origin, UpstreamError, UpstreamFailure, client_ssl_context
from iop.adapters.http_upstream import HttpUpstream
from iop.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, RemoteProtocolError, Unavailable
from iop.testing.adapter_suite import (
    CHUNKED_HEAD,
    LAST_CHUNK,
    ScriptedUpstream,
    UpstreamRequest,
    UpstreamScript,
    chunk,
    plain_answer,
)
from iop.testing.waiting import PATIENCE_S, eventually
from iop.wire.messages import BodyFraming


class Sink:
    def __init__(self, *, stop_after: int | None = None) -> None:
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.framing: BodyFraming | None = None
        self.pieces: list[bytes] = []
        self.ended = False
        self.error: UpstreamError | None = None
        self.closed = 0
        self.stop_after = stop_after
        self.exchange: HttpExchange | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def on_start(self, status: int, headers: list[tuple[bytes, bytes]], framing: BodyFraming) -> None:
        assert self.status is None
        self.status, self.headers, self.framing = status, headers, framing

    def on_body(self, data: bytes) -> bool:
        assert self.status is not None
        assert not self.ended
        assert self.error is None
        self.pieces.append(data)
        return self.stop_after is None or len(self.body) < self.stop_after

    def on_end(self) -> None:
        assert not self.ended
        assert self.error is None
        self.ended = True

    def on_error(self, error: UpstreamError) -> None:
        assert not self.ended
        assert self.error is None
        self.error = error

    def on_closed(self) -> None:
        assert self.ended or self.error is not None
        self.closed += 1


class Client:
    def __init__(self, client: HttpUpstream, server: ScriptedUpstream) -> None:
        self.client = client
        self.server = server

    def send(
        self,
        sink: Sink,
        *,
        method: bytes = b"POST",
        body: tuple[bytes, ...] = (b"{}",),
        timeout_s: float = 10,
    ) -> Sink:
        request = HttpRequest(method=method, path=b"/v1/x", body=body, headers_timeout_s=timeout_s)
        sink.exchange = self.client.request(request, sink)
        return sink

    async def get(
        self, *, method: bytes = b"POST", body: tuple[bytes, ...] = (b"{}",), timeout_s: float = 10
    ) -> Sink:
        sink = self.send(Sink(), method=method, body=body, timeout_s=timeout_s)
        await eventually(lambda: sink.closed > 0)
        assert sink.closed == 1
        return sink


@contextlib.asynccontextmanager
async def talking(script: UpstreamScript, **options: float) -> AsyncIterator[Client]:
    async with ScriptedUpstream(script).serving() as server, asyncio.TaskGroup() as tasks:
        client = HttpUpstream(Origin.parse(server.endpoint), **options)  # type: ignore[arg-type]
        client.start(tasks)
        try:
            yield Client(client, server)
        finally:
            await client.aclose()


def writing(*writes: bytes, close: bool = False) -> UpstreamScript:
    async def script(request: UpstreamRequest) -> None:
        for data in writes:
            await request.connection.write(data)
        if close:
            request.connection.close()

    return script


async def test_one_connection_serves_many_requests() -> None:
    async with talking(writing(plain_answer())) as client:
        for _ in range(5):
            assert (await client.get()).ended
        assert len(client.server.connections) == 1
        assert client.server.connections[0].request_count == 5


async def test_each_framing_is_told_as_it_is() -> None:
    cases = [
        (plain_answer(b"abc"), False, BodyFraming.LENGTH, b"abc"),
        (CHUNKED_HEAD + chunk(b"abc") + LAST_CHUNK, False, BodyFraming.CHUNKED, b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", True, BodyFraming.CLOSE, b"abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", True, BodyFraming.CLOSE, b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, BodyFraming.NONE, b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", False, BodyFraming.NONE, b""),
        (plain_answer(b""), False, BodyFraming.LENGTH, b""),
    ]
    for answer, close, framing, body in cases:
        async with talking(writing(answer, close=close)) as client:
            sink = await client.get()
            assert sink.ended
            assert sink.framing is framing
            assert sink.body == body


async def test_any_split_of_the_answer_gives_the_same_answer() -> None:
    whole = CHUNKED_HEAD + chunk("é東🚀".encode()) + chunk(b"b" * 20) + LAST_CHUNK
    for cut in range(1, len(whole)):

        async def script(request: UpstreamRequest, cut: int = cut) -> None:
            await request.connection.write(whole[:cut])
            await asyncio.sleep(0)
            await request.connection.write(whole[cut:])

        async with talking(script) as client:
            sink = await client.get()
            assert sink.ended
            assert sink.body == "é東🚀".encode() + b"b" * 20


async def test_many_chunks_of_one_read_come_as_one_piece() -> None:
    async with talking(writing(CHUNKED_HEAD + chunk(b"abc") * 1000 + LAST_CHUNK)) as client:
        sink = await client.get()
        assert sink.body == b"abc" * 1000
        assert len(sink.pieces) <= 3


async def test_interim_answers_are_consumed() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with talking(writing(interim + plain_answer(b"abc"))) as client:
        for _ in range(2):
            sink = await client.get()
            assert sink.status == 200
            assert sink.body == b"abc"
            assert b"Link" not in dict(sink.headers)
        assert len(client.server.connections) == 1


async def test_trailers_and_chunk_extensions_are_dropped() -> None:
    answer = CHUNKED_HEAD + b"3;ext=1\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"
    async with talking(writing(answer)) as client:
        sink = await client.get()
        assert sink.ended
        assert sink.body == b"abc"
        assert b"X-Trailer" not in dict(sink.headers)
        assert (await client.get()).ended
        assert len(client.server.connections) == 1


@pytest.mark.parametrize("rubbish", [b"x" * 40, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"])
@pytest.mark.parametrize("apart", [False, True])
async def test_bytes_behind_an_answer_reach_nobody(rubbish: bytes, apart: bool) -> None:
    async def script(request: UpstreamRequest) -> None:
        answer = plain_answer(b"abc")
        if apart:
            await request.connection.write(answer)
            await asyncio.sleep(0.01)
            await request.connection.write(rubbish)
        else:
            await request.connection.write(answer + rubbish)

    async with talking(script) as client:
        for _ in range(3):
            sink = await client.get()
            assert sink.ended
            assert sink.body == b"abc"
            if apart:
                await eventually(lambda: client.client.connection_count == 0)
        assert all(connection.request_count == 1 for connection in client.server.connections)


@pytest.mark.clause("EN-112")
async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(plain_answer())
        request.connection.close()

    async with talking(script) as client:
        for _ in range(20):
            assert (await client.get()).ended


@pytest.mark.clause("EN-112")
async def test_a_request_is_never_sent_twice() -> None:
    async def script(request: UpstreamRequest) -> None:
        if request.connection.request_count == 1:
            await request.connection.write(plain_answer())
        else:
            request.connection.reset()

    async with talking(script) as client:
        assert (await client.get()).ended
        sink = await client.get()
        assert sink.error is not None
        assert sink.error.failure is UpstreamFailure.UPSTREAM_ERROR
        assert not sink.error.is_unsent
        assert len(client.server.requests) == 2


@pytest.mark.parametrize(
    ("writes", "failure"),
    [
        ((b"",), UpstreamFailure.UPSTREAM_ERROR),
        ((b"HTTP/1.1 200 OK\r\nContent-",), UpstreamFailure.UPSTREAM_ERROR),
        ((CHUNKED_HEAD,), UpstreamFailure.TRUNCATED),
        ((CHUNKED_HEAD + chunk(b"abc"),), UpstreamFailure.TRUNCATED),
        ((CHUNKED_HEAD + chunk(b"abc") + b"0\r\n",), UpstreamFailure.TRUNCATED),
        ((plain_answer(b"abcdef")[:-2],), UpstreamFailure.TRUNCATED),
    ],
)
@pytest.mark.clause("EN-112")
async def test_a_cut_is_told_by_where_it_fell(writes: tuple[bytes, ...], failure: UpstreamFailure) -> None:
    async with talking(writing(*writes, close=True)) as client:
        sink = await client.get()
        assert sink.error is not None
        assert sink.error.failure is failure
        assert not sink.error.is_unsent


async def test_a_reset_inside_a_close_delimited_body_is_a_cut() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await eventually(lambda: bool(sink.pieces))
        request.connection.reset()

    async with talking(script) as client:
        sink = Sink()
        client.send(sink)
        await eventually(lambda: sink.closed > 0)
        assert sink.body == b"abc"
        # A reset may show as end of file on some systems; then the framing has told that the end is not
        # known.
        assert sink.ended or (sink.error is not None and sink.error.failure is UpstreamFailure.TRUNCATED)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        CHUNKED_HEAD + b"zz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 000 Odd\r\n\r\n",
        CHUNKED_HEAD.replace(b"chunked", b"gzip, chunked") + b"3\r\nabc\r\n0\r\n\r\n",
        CHUNKED_HEAD.replace(b"chunked", b"gzip") + b"abc",
    ],
)
async def test_what_is_not_http_fails_and_closes(answer: bytes) -> None:
    async with talking(writing(answer)) as client:
        sink = await client.get()
        assert sink.error is not None
        assert sink.error.failure in {UpstreamFailure.UPSTREAM_ERROR, UpstreamFailure.TRUNCATED}
        assert sink.error.failure is UpstreamFailure.TRUNCATED or not sink.body
        await eventually(lambda: client.client.connection_count == 0)


@pytest.mark.parametrize(
    "endless",
    [
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1024,
        b"HTTP/1.1 100 Continue\r\n\r\n",
        CHUNKED_HEAD + b"3;" + b"e" * 1024,
        CHUNKED_HEAD + b"0\r\nX: " + b"a" * 1024,
    ],
)
async def test_an_endless_head_is_cut_off(endless: bytes) -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(endless)
        filler = b"HTTP/1.1 100 Continue\r\n\r\n" * 40 if endless.startswith(b"HTTP/1.1 100") else b"a" * 1000
        for _ in range(20 * HEAD_BYTES_MAX // 1000):
            await request.connection.write(filler)

    async with talking(script) as client:
        sink = await client.get()
        assert sink.error is not None
        assert sink.error.failure in {UpstreamFailure.UPSTREAM_ERROR, UpstreamFailure.TRUNCATED}


@pytest.mark.clause("EN-56")
async def test_no_head_in_time_is_a_timeout_and_closes() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.wait_closed_by_peer()

    async with talking(script) as client:
        sink = await client.get(timeout_s=0.05)
        assert sink.error is not None
        assert sink.error.failure is UpstreamFailure.TIMEOUT
        await eventually(lambda: client.server.requests[0].connection.is_closed)


async def test_a_body_may_take_longer_than_the_head_may() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(CHUNKED_HEAD)
        for _ in range(5):
            await asyncio.sleep(0.25)
            await request.connection.write(chunk(b"a"))
        await request.connection.write(LAST_CHUNK)

    async with talking(script) as client:
        assert (await client.get(timeout_s=1.0)).body == b"aaaaa"


async def test_a_large_body_arrives_whole_and_in_order() -> None:
    parts = tuple(bytes([n]) * 700_000 for n in range(10))
    async with talking(writing(plain_answer())) as client:
        assert (await client.get(body=parts)).ended
        assert client.server.requests[0].body == b"".join(parts)


async def test_an_early_answer_ends_the_upload_and_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain_answer(b"too large", status="413 No"))
        await writer.drain()
        await done.wait()
        writer.close()

    done = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.TaskGroup() as tasks:
        client = HttpUpstream(Origin.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        client.start(tasks)
        sink = Sink()
        request = HttpRequest(method=b"POST", path=b"/", body=(b"x" * 50_000_000,))
        client.request(request, sink)
        await eventually(lambda: sink.closed > 0)
        assert sink.status == 413
        assert sink.body == b"too large"
        assert client.idle_count == 0
        done.set()
        await client.aclose()


async def test_a_stopped_reader_holds_its_connection_and_the_pool_gets_it_back_reading() -> None:
    async def script(request: UpstreamRequest) -> None:
        await request.connection.write(plain_answer(b"x" * 1_000_000))

    async with talking(script) as client:
        sink = Sink(stop_after=1)
        client.send(sink)
        await eventually(lambda: len(sink.pieces) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(sink.pieces) == 1
        sink.stop_after = None
        assert sink.exchange is not None
        sink.exchange.resume()
        await eventually(lambda: sink.closed > 0)
        assert len(sink.body) == 1_000_000
        assert (await client.get()).ended
        assert len(client.server.connections) == 1


async def test_idle_connections_are_bounded_and_time_out() -> None:
    gate = asyncio.Event()

    async def script(request: UpstreamRequest) -> None:
        await gate.wait()
        await request.connection.write(plain_answer())

    async with talking(script, idle_connections_max=2, idle_timeout_s=0.05) as client:
        sinks = [client.send(Sink()) for _ in range(5)]
        await eventually(lambda: len(client.server.requests) == 5)
        gate.set()
        await eventually(lambda: all(sink.ended for sink in sinks))
        assert client.client.idle_count <= 2
        await eventually(lambda: client.client.connection_count == 0)


async def test_head_has_no_body() -> None:
    async with talking(writing(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")) as client:
        sink = await client.get(method=b"HEAD", body=())
        assert sink.ended
        assert sink.framing is BodyFraming.NONE


async def test_fetch_gives_the_whole_answer_or_a_typed_error() -> None:
    async def script(request: UpstreamRequest) -> None:
        answers = {
            "/ok": plain_answer(b"abc", status="201 Created"),
            "/big": plain_answer(b"x" * 1000),
            "/rubbish": b"rubbish\r\n\r\n",
        }
        if request.path in answers:
            await request.connection.write(answers[request.path])
        elif request.path == "/cut":
            request.connection.reset()
        else:
            await request.connection.wait_closed_by_peer()

    async with talking(script) as client:

        async def fetch(path: bytes, timeout_s: float = PATIENCE_S) -> bytes:
            request = HttpRequest(method=b"GET", path=path, headers_timeout_s=timeout_s)
            response = await client.client.fetch(request, body_bytes_max=100)
            return b"%d %b" % (response.status, response.body)

        assert await fetch(b"/ok") == b"201 abc"
        with pytest.raises(Overloaded):
            await fetch(b"/big")
        with pytest.raises(RemoteProtocolError):
            await fetch(b"/rubbish")
        with pytest.raises(Unavailable):
            await fetch(b"/cut")
        with pytest.raises(DeadlineExceeded):
            await fetch(b"/never", 0.05)
        await eventually(lambda: client.client.connection_count <= 1)


async def test_a_closed_client_refuses() -> None:
    async with talking(writing(plain_answer())) as client:
        await client.client.aclose()
        with pytest.raises(Unavailable):
            client.send(Sink())


async def test_closing_does_not_wait_for_a_dial() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        # Fill the backlog, so that the next connection hangs.
        port = silent.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        sink = Sink()
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            client = HttpUpstream(Origin.parse(f"http://127.0.0.1:{port}"), connect_timeout_s=60)
            client.start(tasks)
            client.request(HttpRequest(method=b"GET", path=b"/"), sink)
            await asyncio.sleep(0.02)
            assert not sink.closed
            await client.aclose()
        for filler in fillers:
            filler.close()
    assert sink.closed == 1
    assert sink.error is not None
    assert sink.error.is_unsent


def test_an_ipv6_origin_keeps_its_brackets() -> None:
    origin = Origin.parse("https://[::1]/v0/")
    assert (origin.host, origin.port, origin.is_tls) == ("::1", 443, True)
    assert (origin.host_header, origin.base_path) == (b"[::1]", "/v0")


@pytest.mark.parametrize(
    "pem", [b"no", b"\xff", b"-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----\n"]
)
def test_a_bad_authority_is_a_config_error(pem: bytes) -> None:
    with pytest.raises(InvalidRequest):
        client_ssl_context(pem)


def test_an_empty_authority_means_the_systems() -> None:
    assert client_ssl_context(b"").verify_mode is ssl.CERT_REQUIRED
