"""Fields after a chunked body: what was not known when the answer began (AD-33)."""

from __future__ import annotations

import pytest

from iop.api.http.exchange import Exchange
from iop.testing.http_site import Recorder, Site

GET = b"GET /a HTTP/1.1\r\nHost: e\r\n\r\n"


def ending_with(*fields: tuple[bytes, bytes]) -> Recorder:
    def answer(exchange: Exchange, _body: bytes) -> None:
        exchange.trailers = lambda: fields
        exchange.start(200, [])
        exchange.write(b"abc")
        exchange.end()

    handler = Recorder()
    handler.on_exchange = answer
    return handler


@pytest.mark.clause("AD-33")
async def test_trailers_follow_the_last_chunk_and_the_connection_goes_on(site: Site) -> None:
    await site.serve(ending_with((b"x-iop-weight-version-last", b"v2")))
    caller = await site.call()
    for _ in range(2):
        await caller.send(GET)
        assert b"transfer-encoding: chunked" in await caller.read_until(b"\r\n\r\n")
        assert (
            await caller.read_until(b"\r\n\r\n") == b"3\r\nabc\r\n0\r\nx-iop-weight-version-last: v2\r\n\r\n"
        )


async def test_a_trailer_cannot_carry_a_line_of_its_own(site: Site) -> None:
    await site.serve(ending_with((b"x-iop-weight-version-last", b"v2\r\nx-evil: 1")))
    caller = await site.call()
    await caller.send(GET)
    await caller.read_until(b"\r\n\r\n")
    assert await caller.read_until(b"0\r\n\r\n") == b"3\r\nabc\r\n0\r\n\r\n"
