"""TLS and mutual TLS on the wire, and renewal of certificates without a restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from iop.core.errors import InvalidRequest, Unavailable
from iop.net import listener as listener_module
from iop.net.dialer import Dialer
from iop.net.listener import CLOSE_TIMEOUT_S, Listener
from iop.net.tls import ClientTls, ServerTls
from iop.testing import packets as make
from iop.testing.waiting import eventually
from iop.testing.wire_ends import PlainEdge, PlainNode
from iop.wire.session import SessionSettings

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


class Files:
    """An authority and what it signed, as files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = trustme.CA()
        self.ca = root / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        self.issue("edge", "localhost", "127.0.0.1")
        self.issue("node", "node-1")

    def issue(self, name: str, *identities: str, by: trustme.CA | None = None) -> None:
        leaf = (by or self.authority).issue_cert(*identities)
        leaf.private_key_pem.write_to_path(self.root / f"{name}.key")
        leaf.cert_chain_pems[0].write_to_path(self.root / f"{name}.pem")

    def server(self, *, mutual: bool = False) -> ServerTls:
        return ServerTls(
            certificate=self.root / "edge.pem",
            key=self.root / "edge.key",
            client_ca=self.ca if mutual else None,
        )

    def client(self, **changes: Any) -> ClientTls:
        return ClientTls(**{"ca": self.ca, **changes})

    def mutual_client(self) -> ClientTls:
        return self.client(certificate=self.root / "node.pem", key=self.root / "node.key")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


PLACES_BACK_S = 30
"""A bound for a busy machine; the places come back a second after the handshakes' time is up."""


def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario)


async def become_ready(port: int, tls: ClientTls | None) -> PlainNode:
    node = PlainNode()
    connection = await Dialer(host="127.0.0.1", port=port, tls=tls).dial(node)
    connection.register(make.register_request())
    await eventually(lambda: bool(node.acks) or bool(node.closed))
    return node


@pytest.mark.clause("EN-104")
@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
def test_a_node_serves_through_tls(files: Files, mutual: bool, loop_factory: Any) -> None:
    async def scenario() -> None:
        edge = PlainEdge()
        async with Listener(
            handler=edge, host="127.0.0.1", port=0, tls=files.server(mutual=mutual)
        ) as listener:
            node = await become_ready(listener.port, files.mutual_client() if mutual else files.client())
            assert node.acks
            body = bytes(range(256)) * 2000
            sink = edge.open_tunnel([body])
            await sink.wait()
            assert bytes(sink.body) == body

    run(loop_factory, scenario())


@pytest.mark.clause("EN-104")
def test_a_node_without_the_asked_certificate_never_registers(files: Files) -> None:
    async def scenario() -> None:
        edge = PlainEdge()
        async with Listener(
            handler=edge, host="127.0.0.1", port=0, tls=files.server(mutual=True)
        ) as listener:
            node = PlainNode()
            try:
                connection = await Dialer(host="127.0.0.1", port=listener.port, tls=files.client()).dial(node)
                connection.register(make.register_request())
                await eventually(lambda: bool(node.closed))
            except Unavailable:
                pass
            assert not edge.connections

    run(asyncio.new_event_loop, scenario())


@pytest.mark.clause("EN-104")
def test_an_edge_that_the_nodes_authority_did_not_sign_is_refused(files: Files) -> None:
    async def scenario() -> None:
        files.issue("edge", "127.0.0.1", by=trustme.CA())
        async with Listener(handler=PlainEdge(), host="127.0.0.1", port=0, tls=files.server()) as listener:
            with pytest.raises(Unavailable) as caught:
                await become_ready(listener.port, files.client())
            assert caught.value.reason == "EDGE_CERTIFICATE_REFUSED"

    run(asyncio.new_event_loop, scenario())


@pytest.mark.clause("EN-104")
def test_an_edge_certificate_for_another_name_is_refused_unless_that_name_is_meant(files: Files) -> None:
    async def scenario() -> None:
        files.issue("edge", "edge.fleet.internal")
        async with Listener(handler=PlainEdge(), host="127.0.0.1", port=0, tls=files.server()) as listener:
            with pytest.raises(Unavailable):
                await become_ready(listener.port, files.client())
            node = await become_ready(listener.port, files.client(server_name="edge.fleet.internal"))
            assert node.acks

    run(asyncio.new_event_loop, scenario())


@pytest.mark.clause("EN-100", "EN-104")
def test_plain_bytes_to_a_tls_listener_end_that_connection_alone(files: Files) -> None:
    async def scenario() -> None:
        edge = PlainEdge()
        async with Listener(handler=edge, host="127.0.0.1", port=0, tls=files.server()) as listener:
            node = await become_ready(listener.port, None)
            assert node.closed
            assert not node.acks
            assert (await become_ready(listener.port, files.client())).acks

    run(asyncio.new_event_loop, scenario())


@pytest.mark.clause("EN-104")
def test_failed_handshakes_hold_no_place_for_long_and_do_not_hold_up_a_stop(files: Files) -> None:
    async def scenario() -> None:
        settings = SessionSettings(handshake_timeout_s=0.2)
        loop = asyncio.get_running_loop()
        async with Listener(
            handler=PlainEdge(),
            host="127.0.0.1",
            port=0,
            tls=files.server(),
            settings=settings,
            strangers_max=2,
        ) as listener:
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
                writer.write(b"this is no TLS at all, and that ends it")
                await reader.read()
                writer.close()
            assert listener.connections_open == 0
            assert not (await become_ready(listener.port, files.client())).acks
            assert listener.counters.refused_full == 1
            async with asyncio.timeout(PLACES_BACK_S):
                while not (await become_ready(listener.port, files.client())).acks:
                    pass
            stopping_at = loop.time()
        assert loop.time() - stopping_at < CLOSE_TIMEOUT_S

    run(asyncio.new_event_loop, scenario())


def serial(port: int, files: Files) -> int:
    context = ssl.create_default_context(cafile=str(files.ca))
    import socket

    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
    ):
        certificate = wrapped.getpeercert()
        assert certificate is not None
        return int(str(certificate["serialNumber"]), 16)


@pytest.mark.clause("EN-104")
@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_a_renewed_certificate_is_served_without_a_restart(
    files: Files, loop_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "TLS_FILES_CHECK_INTERVAL_S", 0.02)

    async def scenario() -> None:
        edge = PlainEdge()
        async with Listener(handler=edge, host="127.0.0.1", port=0, tls=files.server()) as listener:
            old = await asyncio.to_thread(serial, listener.port, files)
            node = await become_ready(listener.port, files.client())
            (files.root / "edge.pem").write_text("half a certificate")
            await asyncio.sleep(0.1)
            assert await asyncio.to_thread(serial, listener.port, files) == old, (
                "unusable files change nothing"
            )
            files.issue("edge", "localhost", "127.0.0.1")
            async with asyncio.timeout(30):
                while await asyncio.to_thread(serial, listener.port, files) == old:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            sink = edge.open_tunnel()
            await sink.wait()
            assert not node.closed, "open connections stay"

    run(loop_factory, scenario())


@pytest.mark.clause("EN-22", "EN-104")
@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
def test_an_unusable_file_is_named_by_its_setting_before_anything_is_bound(files: Files, broken: str) -> None:
    async def scenario() -> None:
        name = {"certificate": "edge.pem", "key": "edge.key", "client_ca": "ca.pem"}[broken]
        (files.root / name).write_text("nonsense")
        with pytest.raises(InvalidRequest) as caught:
            await Listener(
                handler=PlainEdge(), host="127.0.0.1", port=0, tls=files.server(mutual=True)
            ).start()
        assert caught.value.reason == "TLS_FILES"
        assert str(files.root) not in caught.value.message
        with pytest.raises(InvalidRequest):
            await Dialer(host="127.0.0.1", port=1, tls=files.client(certificate=files.ca)).dial(PlainNode())

    run(asyncio.new_event_loop, scenario())
