"""The ops client against a real ops listener: files in pieces, and typed refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from iop.api.http.ops import OpsServer, ops_app
from iop.client.ops import OpsClient, OpsTarget
from iop.core.errors import NotFound, PermissionDenied, Unauthenticated, Unavailable

PIECE = bytes(range(256)) * 1024
PIECES = 64


class NoSource:
    """Nothing here asks it."""


def authorize(token: str | None) -> None:
    if token is None:
        raise Unauthenticated("a viewer token is needed", reason="UNAUTHENTICATED")
    if token != "viewer":
        raise PermissionDenied("this token may not read", reason="PERMISSION_DENIED")


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[int]]]:
    sent = [0]

    async def read(name: str) -> AsyncIterator[bytes]:
        if name == "n1/main/gone":
            raise Unavailable("the artifact's Node is not ready", reason="node_not_ready")
        if name not in {"n1/main/whole", "n1/main/cut"}:
            raise NotFound("no artifact of this name is known", reason="unknown_artifact")
        for number in range(PIECES):
            if name.endswith("cut") and number == 3:
                raise Unavailable("the Node was lost", reason="node_lost")
            sent[0] += 1
            yield PIECE

    app = ops_app(
        source=NoSource(),  # type: ignore[arg-type]  # nothing asks it
        render_metrics=bytes,
        metrics_type="text/plain",
        authorize=authorize,
        is_ready=lambda: (True, ""),
        read_artifact=read,
    )
    async with OpsServer(app, host="127.0.0.1", port=0) as listening:
        yield f"127.0.0.1:{listening.port}", sent


def client(address: str, token: str | None = "viewer") -> OpsClient:
    return OpsClient(OpsTarget(address=address, token=token, timeout_s=60.0))


async def whole(pieces: Iterator[bytes]) -> bytes:
    """All of them, read in a thread as a command would."""
    return await asyncio.to_thread(lambda: b"".join(pieces))


@pytest.mark.clause("AD-46")
async def test_a_file_comes_whole_and_at_the_readers_pace(server: tuple[str, list[int]]) -> None:
    address, sent = server
    pieces = client(address).artifact("n1/main/whole")
    first = await asyncio.to_thread(next, pieces)
    assert first
    await asyncio.sleep(0.3)  # until the socket's buffers are full
    assert sent[0] < PIECES, "it was all sent though one piece was read"
    assert first + await whole(pieces) == PIECE * PIECES


@pytest.mark.clause("AD-46", "SF-30")
async def test_what_cannot_be_had_is_a_typed_error(server: tuple[str, list[int]]) -> None:
    address, _ = server
    for name, token, kind in (
        ("n1/main/other", "viewer", NotFound),
        ("n1/main/gone", "viewer", Unavailable),
        ("n1/main/whole", None, Unauthenticated),
        ("n1/main/whole", "stranger", PermissionDenied),
        ("n1/main/cut", "viewer", Unavailable),
    ):
        with pytest.raises(kind):
            await whole(client(address, token).artifact(name))
    with pytest.raises(Unauthenticated) as refusal:
        await whole(client(address, None).artifact("n1/main/whole"))
    assert refusal.value.details == {"server": address}, "whose word it is"
    with pytest.raises(Unavailable):
        await whole(client("127.0.0.1:1").artifact("n1/main/whole"))
