"""The public listener over TLS: streams, slow callers, leaving, and a certificate renewed while it runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trustme

from iop.api.http.exchange import Exchange
from iop.api.http.limits import HttpLimits
from iop.api.http.server import HttpServer
from iop.api.http.tls import RenewedTls
from iop.core.errors import InvalidRequest
from iop.net.tls import ServerTls
from iop.testing.http_site import RawCaller, Recorder, SystemClock
from iop.testing.waiting import SOON_S, eventually

GET = b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"


class TlsSite:
    """A listener with a certificate of its own authority."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = trustme.CA()
        self.files = ServerTls(certificate=root / "edge.pem", key=root / "edge.key")
        self.issue()
        self.tls = RenewedTls(self.files)
        self.handler = Recorder(limits=HttpLimits(body_bytes=1000))
        self.port = 0

    def issue(self) -> None:
        leaf = self.authority.issue_cert("localhost")
        leaf.private_key_pem.write_to_path(self.files.key)
        leaf.cert_chain_pems[0].write_to_path(self.files.certificate)

    async def call(self) -> RawCaller:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return RawCaller(
            *await asyncio.open_connection("127.0.0.1", self.port, ssl=context, server_hostname="localhost")
        )


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[TlsSite]:
    site = TlsSite(tmp_path)
    async with HttpServer(site.handler, limits=HttpLimits(), clock=SystemClock(), tls=site.tls) as server:
        _, site.port = await server.listen("127.0.0.1", 0)
        yield site


async def test_requests_are_served_and_a_refused_body_is_answered(place: TlsSite) -> None:
    caller = await place.call()
    await caller.send(GET)
    assert (await caller.read_answer())[2] == b"/a|"
    await caller.send(b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000)
    assert (await caller.read_answer())[0] == 413
    await caller.close()


@pytest.mark.clause("SF-07")
async def test_a_caller_that_leaves_is_noticed_through_tls(place: TlsSite) -> None:
    gone: list[bool] = []

    def stream(exchange: Exchange, body: bytes) -> None:
        exchange.bind(on_gone=lambda: gone.append(True))
        exchange.start(200, [])
        exchange.write(b"first")

    place.handler.on_exchange = stream
    for is_polite in (True, False):
        caller = await place.call()
        await caller.send(GET)
        await caller.read_until(b"first")
        if is_polite:
            await caller.close()
        else:
            caller.reset()
        await eventually(lambda: bool(gone), within_s=SOON_S)
        gone.clear()


async def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(place: TlsSite) -> None:
    async def serial() -> object:
        caller = await place.call()
        certificate = caller.writer.get_extra_info("ssl_object").getpeercert()
        await caller.close()
        return certificate["serialNumber"]

    first = await serial()
    place.issue()
    place.tls.refresh()
    second = await serial()
    assert second != first
    place.files.key.write_text("nonsense")
    place.tls.refresh()
    assert await serial() == second


def test_unusable_files_are_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        RenewedTls(ServerTls(certificate=tmp_path / "no.pem", key=tmp_path / "no.key"))
