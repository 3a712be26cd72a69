"""Engines behind TLS: trusted by their own authority, refused by any other, never spoken to in clear."""

from __future__ import annotations

import asyncio
import ssl

import grpc
import pytest
import trustme
from openengine_rig import ScriptedEngine
from test_openengine_adapter import running as running_openengine
from test_openengine_adapter import started

from iop.adapters.base import Health
from iop.core.ids import RunId
from iop.pb.openengine.v1 import openengine_pb2_grpc
from iop.testing.adapter_suite import (
    RunRecorder,
    ScriptedUpstream,
    TunnelRecorder,
    UpstreamRequest,
    plain_answer,
    tunnel_request,
)
from iop.testing.waiting import PATIENCE_S
from iop.wire.messages import (
    AdapterConfig,
    OpenAICompatSettings,
    OpenEngineSettings,
    RunEventType,
    RunRequest,
)


class Authority:
    def __init__(self) -> None:
        self.ca = trustme.CA()
        self.leaf = self.ca.issue_cert("127.0.0.1")

    @property
    def pem(self) -> bytes:
        return self.ca.cert_pem.bytes()

    def server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.leaf.configure_cert(context)
        return context


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def answer(request: UpstreamRequest) -> None:
    await request.connection.write(plain_answer(b"x" * 200_000))


async def call(endpoint: str, ca_pem: bytes) -> tuple[TunnelRecorder, Health]:
    settings = OpenAICompatSettings(endpoint=endpoint, tls_ca_pem=ca_pem)
    async with started(AdapterConfig(name="main", type="openai_compat", settings=settings)) as adapter:
        tunnel = TunnelRecorder(tunnel_request(), (b"y" * 2_000_000,))
        adapter.open_tunnel(tunnel, tunnel.on_done)
        await tunnel.finished()
        return tunnel, adapter.snapshot().health


async def test_an_https_engine_is_reached_through_its_own_authority(authority: Authority) -> None:
    async with ScriptedUpstream(answer, tls=authority.server()).serving() as upstream:
        tunnel, _ = await call(upstream.endpoint, authority.pem)
        assert tunnel.ended
        assert tunnel.received == b"x" * 200_000
        assert len(upstream.requests[0].body) == 2_000_000


@pytest.mark.parametrize("ca", ["other", "system"])
async def test_an_engine_that_nobody_vouches_for_is_not_spoken_to(authority: Authority, ca: str) -> None:
    async with ScriptedUpstream(answer, tls=authority.server()).serving() as upstream:
        tunnel, health = await call(upstream.endpoint, Authority().pem if ca == "other" else b"")
        assert tunnel.error is not None
        assert (tunnel.error.code, tunnel.error.before_start) == ("connect_failed", True)
        assert "not trusted" in tunnel.error.message
        assert health is Health.OFFLINE
        assert upstream.requests == []


async def test_a_plain_server_is_not_taken_for_a_tls_one(authority: Authority) -> None:
    heard: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(65_536))
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        tunnel, _ = await call(f"https://127.0.0.1:{port}", authority.pem)
    assert tunnel.error is not None
    assert tunnel.error.before_start
    assert heard
    assert all(b"POST" not in first for first in heard)


async def test_an_openengine_engine_is_reached_through_its_own_authority_only(authority: Authority) -> None:
    engine = ScriptedEngine()
    server = grpc.aio.server()
    openengine_pb2_grpc.add_InferenceServicer_to_server(engine, server)
    openengine_pb2_grpc.add_ControlServicer_to_server(engine, server)
    key = authority.leaf.private_key_pem.bytes()
    chain = b"".join(blob.bytes() for blob in authority.leaf.cert_chain_pems)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    await server.start()
    try:
        for pem, kind in ((authority.pem, RunEventType.COMPLETE), (Authority().pem, RunEventType.ERROR)):
            settings = OpenEngineSettings(target=f"127.0.0.1:{port}", tls_ca_pem=pem)
            async with running_openengine(settings) as adapter:
                run = RunRecorder(RunRequest(run_id=RunId("r"), adapter="main", target="m", input=b"hi"))
                async with asyncio.timeout(PATIENCE_S):
                    await adapter.run(run)
                assert run.terminal is not None
                assert run.terminal.type is kind
        assert len(engine.requests) == 1
    finally:
        await server.stop(0.1)
