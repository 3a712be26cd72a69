"""Files of profiles on the admin listener: who may, what is refused, and that the client gets them whole (AD-46)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_admin_rig import TOKENS, ScriptedOperations, bearer, refused

from iop.api.grpc.auth import PrincipalDirectory
from iop.api.grpc.listeners import admin_listener
from iop.api.grpc.server import ListenerSettings
from iop.client.admin import AdminClient, AdminTarget
from iop.core.errors import IopError, NotFound, Unavailable, Unsupported
from iop.pb.iop import artifacts_pb2 as pb
from iop.pb.iop import artifacts_pb2_grpc

CONTENT = bytes(range(256)) * 4096


async def read(uri: str) -> AsyncIterator[bytes]:
    if uri != "profile:known":
        raise NotFound("no artifact has this uri", reason="ARTIFACT_NOT_FOUND")
    yield CONTENT
    yield b"and more"


async def cut(uri: str) -> AsyncIterator[bytes]:
    yield uri.encode()
    raise Unavailable("the file is not whole any more", reason="ARTIFACT_LOST")


@pytest.fixture
async def address(operations: ScriptedOperations, principals: PrincipalDirectory) -> AsyncIterator[str]:
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
    async with admin_listener(operations, principals, settings, read_artifact=read).serving() as listener:
        yield listener.address


async def ask(address: str, metadata: Any, uri: str = "profile:known") -> list[bytes]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = artifacts_pb2_grpc.ArtifactsStub(channel)
        request = pb.ReadArtifactRequest(uri=uri)
        return [piece.data async for piece in stub.Read(request, metadata=metadata, timeout=60)]


@pytest.mark.clause("AD-46", "AD-03", "AD-04", "AD-101")
async def test_only_who_may_read_the_profile_may_read_its_files(
    address: str, operations: ScriptedOperations
) -> None:
    async with refused(grpc.StatusCode.UNAUTHENTICATED):
        await ask(address, ())
    async with refused(grpc.StatusCode.PERMISSION_DENIED):
        await ask(address, bearer("flusher-token"))
    async with refused(grpc.StatusCode.NOT_FOUND) as refusal:
        await ask(address, bearer("viewer"), "profile:other")
    assert refusal.info().reason == "ARTIFACT_NOT_FOUND"
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await ask(address, bearer("viewer"), "")
    pieces = await ask(address, bearer("viewer"))
    assert b"".join(pieces) == CONTENT + b"and more"
    assert max(map(len, pieces)) == 256 * 1024
    assert [(name, outcome) for name, _, outcome in operations.audited] == [
        ("flusher", "PERMISSION_DENIED"),
        ("viewer", "ARTIFACT_NOT_FOUND"),
        ("viewer", "INVALID_FIELD"),
        ("viewer", "ALLOWED"),
    ]


@pytest.mark.clause("AD-46")
async def test_the_client_gets_a_file_whole_or_an_error(
    address: str, admin_address: str, operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    async with AdminClient(AdminTarget(address=address, token=TOKENS["viewer"])) as client:
        assert b"".join([piece async for piece in client.artifact("profile:known")]) == CONTENT + b"and more"
        with pytest.raises(NotFound):
            await anext(client.artifact("profile:other"))
    # A server of the contract that hands out no files.
    async with AdminClient(AdminTarget(address=admin_address, token=TOKENS["viewer"])) as client:
        with pytest.raises(IopError) as lacking:
            await anext(client.artifact("profile:known"))
        assert isinstance(lacking.value, Unsupported)
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
    async with (
        admin_listener(operations, principals, settings, read_artifact=cut).serving() as listener,
        AdminClient(AdminTarget(address=listener.address, token=TOKENS["viewer"])) as client,
    ):
        pieces = client.artifact("x")
        assert await anext(pieces) == b"x"
        with pytest.raises(Unavailable):
            await anext(pieces)
