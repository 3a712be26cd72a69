"""The listener as callers meet it: framing, limits, leaving, slowness, draining."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools
import pytest

from iop.api.http.exchange import Exchange
from iop.api.http.limits import HttpLimits
from iop.api.http.protocol import HttpConnection
from iop.core.errors import Unavailable
from iop.testing.http_site import RawCaller, Recorder, SilentTransport, Site
from iop.testing.waiting import SOON_S, eventually

GET = b"GET /a HTTP/1.1\r\nHost: e\r\n\r\n"


def post(body: bytes, *lines: bytes) -> bytes:
    head = b"POST /a HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n" % len(body)
    return head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


async def test_a_connection_serves_many_requests(site: Site) -> None:
    handler = Recorder()
    await site.serve(handler)
    caller = await site.call()
    for number in range(5):
        await caller.send(post(b"%d" % number))
        assert (await caller.read_answer())[2] == b"/a|%d" % number


async def test_pipelined_requests_are_answered_one_at_a_time_and_in_order(site: Site) -> None:
    handler = Recorder()
    open_exchanges: list[Exchange] = []
    handler.on_exchange = lambda exchange, body: open_exchanges.append(exchange)
    await site.serve(handler)
    caller = await site.call()
    await caller.send(post(b"1") + post(b"2"))
    await caller.send(post(b"3") + GET)
    for number in range(4):
        await eventually(lambda: len(open_exchanges) > number)  # noqa: B023 - read within the iteration
        assert len(open_exchanges) == number + 1
        open_exchanges[number].respond(200, [], b"%d" % number)
        assert (await caller.read_answer())[2] == b"%d" % number


async def test_a_flood_of_pipelined_requests_is_refused(site: Site) -> None:
    handler = Recorder()
    handler.on_exchange = lambda exchange, body: None
    server = await site.serve(handler)
    caller = await site.call()
    await caller.send(GET * 500)
    await eventually(lambda: server.counters.refused == 1)
    assert len(handler.requests) == 1


async def test_every_split_of_a_request_is_the_same_request(site: Site) -> None:
    handler = Recorder()
    await site.serve(handler)
    data = (
        b"POST /a?x=1 HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;q=1\r\nhello\r\n6\r\n world\r\n0\r\nT: t\r\n\r\n"
    )
    caller = await site.call()
    for cut in range(1, len(data)):
        caller.writer.write(data[:cut])
        await asyncio.sleep(0)
        caller.writer.write(data[cut:])
        assert (await caller.read_answer())[2] == b"/a|hello world"
    assert len(handler.requests) == len(data) - 1


async def test_head_gets_the_head_of_the_answer_only(site: Site) -> None:
    await site.serve(Recorder())
    caller = await site.call()
    await caller.send(b"HEAD /a HTTP/1.1\r\nHost: e\r\n\r\n" + GET)
    head = await caller.read_until(b"\r\n\r\n")
    assert b"content-length: 3" in head
    assert (await caller.read_answer())[2] == b"/a|"


async def test_http_1_0_gets_no_chunks_and_a_close(site: Site) -> None:
    handler = Recorder()

    def stream(exchange: Exchange, body: bytes) -> None:
        exchange.start(200, [])
        exchange.write(b"one")
        exchange.write(b"two")
        exchange.end()

    handler.on_exchange = stream
    await site.serve(handler)
    caller = await site.call()
    await caller.send(b"GET /a HTTP/1.0\r\n\r\n")
    answer = await caller.read_to_end()
    assert answer.endswith(b"\r\n\r\nonetwo")
    assert b"transfer-encoding" not in answer


async def test_http_1_0_keep_alive_is_kept_where_the_length_is_known(site: Site) -> None:
    await site.serve(Recorder())
    caller = await site.call()
    for _ in range(2):
        await caller.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        _, headers, body = await caller.read_answer()
        assert (headers[b"connection"], body) == (b"keep-alive", b"/a|")


async def test_connection_close_is_obeyed(site: Site) -> None:
    await site.serve(Recorder())
    caller = await site.call()
    await caller.send(b"GET /a HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n")
    assert (await caller.read_to_end()).endswith(b"\r\nconnection: close\r\n\r\n/a|")


@pytest.mark.clause("SF-12")
async def test_a_caller_that_expects_continue_is_told_to_go_on(site: Site) -> None:
    await site.serve(Recorder())
    caller = await site.call()
    await caller.send(post(b"hello", b"Expect: 100-continue")[:-5])
    assert await caller.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await caller.send(b"hello")
    assert (await caller.read_answer())[2] == b"/a|hello"


@pytest.mark.clause("SF-12")
async def test_a_body_that_is_too_large_by_its_own_words_is_refused_before_it_is_read(site: Site) -> None:
    handler = Recorder(limits=HttpLimits(body_bytes=1000))
    await site.serve(handler)
    caller = await site.call()
    await caller.send(post(b"", b"Expect: 100-continue").replace(b"Length: 0", b"Length: 1001"))
    status, headers, _ = await caller.read_answer()
    assert (status, headers[b"connection"]) == (413, b"close")
    assert await caller.read_to_end() == b""


@pytest.mark.clause("SF-12")
@pytest.mark.parametrize("is_declared", [True, False])
async def test_a_caller_that_sends_a_too_large_body_whole_still_reads_the_answer(
    site: Site, is_declared: bool
) -> None:
    limit = 4 << 20
    handler = Recorder(limits=HttpLimits(body_bytes=limit))
    await site.serve(handler)
    caller = await site.call()
    body = b"x" * (limit + 1)
    if is_declared:
        await caller.send(post(body))
    else:
        head = b"POST /a HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n"
        await caller.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    status, _, answer = await caller.read_answer()
    assert status == 413
    assert b"body_too_large" in answer
    assert handler.budget.held_bytes == 0


@pytest.mark.clause("SF-12")
async def test_bodies_beyond_the_budget_are_refused_before_they_are_read(site: Site) -> None:
    limits = HttpLimits(body_bytes=1 << 20, buffered_bytes=100_000)
    handler = Recorder(limits=limits)
    await site.serve(handler, limits=limits)
    first = await site.call()
    await first.send(post(b"x" * 90_000)[:-1])
    await eventually(lambda: handler.budget.held_bytes == 90_000)
    second = await site.call()
    await second.send(post(b"x" * 20_000, b"Expect: 100-continue")[:-20_000])
    status, headers, body = await second.read_answer()
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert b'"code":"overloaded"' in body
    await first.send(b"x")
    assert (await first.read_answer())[0] == 200
    assert handler.budget.held_bytes == 0


@pytest.mark.clause("SF-12")
async def test_an_undeclared_body_takes_budget_as_it_grows_and_gives_it_back_when_its_caller_leaves(
    site: Site,
) -> None:
    limits = HttpLimits(body_bytes=1 << 20, buffered_bytes=1 << 20)
    handler = Recorder(limits=limits)
    await site.serve(handler, limits=limits)
    caller = await site.call()
    await caller.send(b"POST /a HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n")
    await caller.send(b"186a0\r\n" + b"x" * 100_000)
    await eventually(lambda: handler.budget.held_bytes >= 100_000)
    caller.reset()
    await eventually(lambda: handler.budget.held_bytes == 0)


@pytest.mark.clause("SF-12")
@pytest.mark.parametrize(
    "head",
    [
        b"X-A: " + b"a" * 70_000,
        b"\r\n".join(b"X-%d: %s" % (number, b"a" * 1000) for number in range(80)),
        b"\r\n".join(b"X-%d: a" % number for number in range(200)),
        b"X" * 70_000,
    ],
    ids=["one long value", "many long values", "many fields", "one long name"],
)
async def test_an_oversized_header_is_refused(site: Site, head: bytes) -> None:
    handler = Recorder()
    await site.serve(handler)
    caller = await site.call()
    await caller.send(b"GET /a HTTP/1.1\r\nHost: e\r\n" + head)
    assert (await caller.read_until(b"\r\n")).startswith(b"HTTP/1.1 431")
    assert handler.requests == []


@pytest.mark.clause("SF-12")
async def test_a_chunk_extension_or_trailer_without_end_is_refused(site: Site) -> None:
    handler = Recorder()
    await site.serve(handler)
    for tail in (b"5;" + b"a" * 70_000, b"5\r\nhello\r\n0\r\nT: " + b"a" * 70_000):
        caller = await site.call()
        await caller.send(b"POST /a HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n" + tail)
        assert (await caller.read_until(b"\r\n")).startswith(b"HTTP/1.1 431")
    assert handler.requests == []


@pytest.mark.clause("SF-12")
async def test_a_header_that_trickles_is_timed_out(site: Site) -> None:
    await site.serve(Recorder(), limits=HttpLimits(head_timeout_s=0.3))
    caller = await site.call()
    await caller.send(b"GET /a HTTP/1.1\r\nHost")
    assert (await caller.read_until(b"\r\n")).startswith(b"HTTP/1.1 408")


@pytest.mark.clause("SF-12")
async def test_a_body_that_stalls_is_timed_out(site: Site) -> None:
    await site.serve(Recorder(), limits=HttpLimits(body_stall_timeout_s=0.3))
    caller = await site.call()
    await caller.send(post(b"hello")[:-1])
    assert (await caller.read_until(b"\r\n")).startswith(b"HTTP/1.1 408")


@pytest.mark.clause("SF-12")
async def test_a_body_that_drips_is_timed_out_in_the_end(site: Site) -> None:
    server = await site.serve(Recorder(), limits=HttpLimits(body_stall_timeout_s=30.0, total_timeout_s=0.5))
    caller = await site.call()
    await caller.send(post(b"x" * 100)[:-100])

    async def drip() -> None:
        while server.counters.timeouts == 0:
            await caller.send(b"x")
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        group.create_task(drip())
        assert (await caller.read_until(b"\r\n")).startswith(b"HTTP/1.1 408")


async def test_an_idle_connection_is_closed(site: Site) -> None:
    await site.serve(Recorder(), limits=HttpLimits(idle_timeout_s=1.0))
    caller = await site.call()
    await caller.send(GET)
    await caller.read_answer()
    assert await caller.read_to_end() in (b"", b"<reset>")


@pytest.mark.clause("SF-12")
async def test_connections_beyond_the_limit_get_an_answer_and_a_close(site: Site) -> None:
    server = await site.serve(Recorder(), limits=HttpLimits(connections=2))
    callers = [await site.call() for _ in range(3)]
    answer = await callers[2].read_to_end()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"overloaded" in answer
    await callers[0].send(GET)
    assert (await callers[0].read_answer())[0] == 200
    assert server.counters.connections_refused == 1


@pytest.mark.clause("SF-07")
@pytest.mark.parametrize("is_polite", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "streaming"])
async def test_a_caller_that_leaves_is_noticed(site: Site, phase: str, is_polite: bool) -> None:
    handler = Recorder()
    gone: list[str] = []

    def wait(exchange: Exchange, body: bytes) -> None:
        exchange.bind(on_gone=lambda: gone.append(phase))
        if phase == "streaming":
            exchange.start(200, [])
            exchange.write(b"first")

    handler.on_exchange = wait
    await site.serve(handler)
    caller = await site.call()
    await caller.send(GET)
    if phase == "streaming":
        await caller.read_until(b"first")
    else:
        await eventually(lambda: bool(handler.exchanges))
    if is_polite:
        await caller.close()
    else:
        caller.reset()
    await eventually(lambda: gone == [phase], within_s=SOON_S)
    assert handler.exchanges[0].is_gone


@pytest.mark.clause("SF-07")
async def test_a_task_that_answers_is_cancelled_when_its_caller_leaves(site: Site) -> None:
    handler = Recorder()
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    handler.on_exchange = lambda exchange, body: exchange.run(forever(), name="forever")
    await site.serve(handler)
    caller = await site.call()
    await caller.send(GET)
    await eventually(lambda: bool(handler.exchanges))
    await caller.close()
    await eventually(ended.is_set, within_s=SOON_S)


@pytest.mark.clause("SF-07")
@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_an_eager_answer_is_cancelled_also_before_its_task_has_run(site: Site, turns: int) -> None:
    handler = Recorder()
    seen: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    handler.on_exchange = lambda exchange, body: exchange.run(wait(), name="wait", is_eager=True)
    server = await site.serve(handler)
    connection = HttpConnection(server)
    connection.connection_made(SilentTransport())
    connection.data_received(GET)
    for _ in range(turns):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    await eventually(lambda: seen == ["cancelled"])


async def test_an_eager_answer_goes_on_where_it_waited(site: Site) -> None:
    handler = Recorder()
    go_on: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def answer(exchange: Exchange) -> None:
        exchange.respond(200, [], await go_on)

    handler.on_exchange = lambda exchange, body: exchange.run(answer(exchange), name="x", is_eager=True)
    await site.serve(handler)
    caller = await site.call()
    await caller.send(GET)
    await eventually(lambda: bool(handler.exchanges))
    go_on.set_result(b"later")
    assert (await caller.read_answer())[2] == b"later"
    await caller.send(GET)  # the future is done by now: nothing waits, no task is made
    assert (await caller.read_answer())[2] == b"later"


async def begun_answer(site: Site, answer: Callable[[Exchange], None]) -> SilentTransport:
    """What a connection has written in the very turn in which its request was answered so."""
    handler = Recorder()
    handler.on_exchange = lambda exchange, body: answer(exchange)
    connection = HttpConnection(await site.serve(handler))
    transport = SilentTransport()
    connection.connection_made(transport)
    connection.data_received(GET)
    return transport


@pytest.mark.clause("SF-08")
@pytest.mark.parametrize("length", [2, None])
async def test_a_head_goes_out_with_the_first_bytes_of_its_turn(site: Site, length: int | None) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start(200, [], length=length)
        exchange.write(b"ok")

    transport = await begun_answer(site, answer)
    assert len(transport.written) == 1
    assert transport.written[0].startswith(b"HTTP/1.1 200 OK") and b"ok" in transport.written[0]
    await asyncio.sleep(0)
    assert len(transport.written) == 1


@pytest.mark.clause("SF-08")
async def test_a_head_alone_waits_for_no_body(site: Site) -> None:
    transport = await begun_answer(site, lambda exchange: exchange.start(200, [], length=2))
    await asyncio.sleep(0)
    assert b"".join(transport.written).endswith(b"content-length: 2\r\n\r\n")


@pytest.mark.clause("SF-03")
@pytest.mark.parametrize("end", [Exchange.cut, Exchange.end])
async def test_an_answer_that_ends_before_its_body_has_its_head(
    site: Site, end: Callable[[Exchange], None]
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.start(200, [], length=2)
        end(exchange)

    transport = await begun_answer(site, answer)
    assert b"".join(transport.written).endswith(b"content-length: 2\r\n\r\n")
    assert transport.is_closed, "less than was stated is a cut"


@pytest.mark.clause("SF-08")
async def test_a_slow_caller_is_seen_as_slow_and_its_neighbour_is_not(site: Site) -> None:
    handler = Recorder()
    caught_up: list[Exchange] = []

    def stream(exchange: Exchange, body: bytes) -> None:
        exchange.bind(on_gone=None, on_writable=lambda: caught_up.append(exchange))
        exchange.start(200, [])

    handler.on_exchange = stream
    await site.serve(handler)
    slow, quick = await site.call(), await site.call()
    slow.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport as well
    for caller in (slow, quick):
        await caller.send(GET)
        await eventually(lambda: len(handler.exchanges) > (caller is quick))  # noqa: B023 - read at once
    first, second = handler.exchanges
    written = 0
    while first.is_writable:
        first.write(b"x" * 65_536)
        written += 65_536
        assert written < 64 << 20, "a caller that does not read must come to count as slow"
        await asyncio.sleep(0)
    second.write(b"quick")
    assert second.is_writable
    await quick.read_until(b"quick")
    slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
    await eventually(lambda: caught_up == [first])
    first.end()
    assert len((await slow.read_answer())[2]) == written


async def test_a_handler_that_fails_costs_its_own_request_only(site: Site) -> None:
    handler = Recorder()

    def fail(exchange: Exchange, body: bytes) -> None:
        raise ZeroDivisionError

    async def fail_later() -> None:
        raise Unavailable("Not now.", reason="NOT_NOW", retry_after_s=2.4)

    await site.serve(handler)
    caller = await site.call()
    handler.on_exchange = fail
    await caller.send(GET)
    status, _, body = await caller.read_answer()
    assert status == 500
    assert b"ZeroDivision" not in body
    handler.on_exchange = lambda exchange, body: exchange.run(fail_later(), name="fail")
    await caller.send(GET)
    status, headers, body = await caller.read_answer()
    assert (status, headers[b"retry-after"]) == (503, b"3")
    handler.on_exchange = None
    await caller.send(GET)
    assert (await caller.read_answer())[0] == 200


@pytest.mark.clause("SF-03")
async def test_a_cut_answer_has_no_last_chunk(site: Site) -> None:
    handler = Recorder()

    def cut(exchange: Exchange, body: bytes) -> None:
        exchange.start(200, [])
        exchange.write(b"half")
        exchange.cut()

    handler.on_exchange = cut
    await site.serve(handler)
    caller = await site.call()
    await caller.send(GET)
    answer = await caller.read_to_end()
    assert answer.endswith(b"4\r\nhalf\r\n")


@pytest.mark.clause("SF-03")
async def test_an_answer_short_of_its_stated_length_is_a_cut(site: Site) -> None:
    handler = Recorder()

    def short(exchange: Exchange, body: bytes) -> None:
        exchange.start(200, [], length=10)
        exchange.write(b"half")
        exchange.end()

    handler.on_exchange = short
    await site.serve(handler)
    caller = await site.call()
    await caller.send(GET + GET)
    assert (await caller.read_to_end()).endswith(b"\r\n\r\nhalf")


@pytest.mark.clause("SF-04")
async def test_a_header_value_with_a_line_break_is_dropped(site: Site) -> None:
    handler = Recorder()
    bad = [(b"x-a", b"a\r\nx-b: b"), (b"x-c", b"c")]
    handler.on_exchange = lambda exchange, body: exchange.respond(200, bad, b"")
    await site.serve(handler)
    caller = await site.call()
    await caller.send(GET)
    _, headers, _ = await caller.read_answer()
    assert b"x-a" not in headers
    assert b"x-b" not in headers
    assert headers[b"x-c"] == b"c"


async def test_draining_finishes_what_runs_and_closes_what_idles(site: Site) -> None:
    handler = Recorder()
    handler.on_exchange = lambda exchange, body: exchange.start(200, [])
    server = await site.serve(handler)
    idle, busy = await site.call(), await site.call()
    await busy.send(GET)
    await eventually(lambda: bool(handler.exchanges))

    async def finish() -> None:
        await idle.read_to_end()
        handler.exchanges[0].write(b"the end")
        handler.exchanges[0].end()

    async with asyncio.TaskGroup() as group:
        group.create_task(server.aclose(drain_s=5.0))
        group.create_task(finish())
    assert (await busy.read_answer())[2] == b"the end"
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await site.call()


async def test_a_deadline_set_on_an_exchange_fires_once(site: Site) -> None:
    handler = Recorder()

    def wait(exchange: Exchange, body: bytes) -> None:
        exchange.set_deadline(exchange.started_at + 0.1, lambda: exchange.respond(504, [], b"late"))

    handler.on_exchange = wait
    await site.serve(handler)
    caller: RawCaller = await site.call()
    await caller.send(GET)
    assert (await caller.read_answer())[2] == b"late"
    handler.on_exchange = None
    await caller.send(GET)
    assert (await caller.read_answer())[0] == 200


def test_the_parser_is_built_strict() -> None:
    """The smuggling list relies on llhttp's strict mode; a build that is lenient must not pass silently."""

    class Sink:
        pass

    for data in (
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
    ):
        with pytest.raises(httptools.HttpParserError):
            httptools.HttpRequestParser(Sink()).feed_data(data)
