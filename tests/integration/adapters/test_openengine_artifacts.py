"""A profile's file from an engine's own admin listener to the Edge's stream, over a real channel (AD-46)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
import pytest

from iop.adapters.openengine.admin_rpc import AdminRpc
from iop.adapters.openengine.artifact_fetch import ArtifactFetch
from iop.adapters.openengine.channel import open_channel
from iop.admin.enums import ProfilerKind
from iop.admin.results import ProfileArtifact
from iop.core.ids import ParticipantId, RunId
from iop.pb.iop import artifacts_pb2 as pb
from iop.pb.iop import artifacts_pb2_grpc
from iop.testing.adapter_suite import TunnelRecorder
from iop.testing.waiting import eventually
from iop.wire.messages import BodyFraming, StreamErrorCode, TunnelRequest

PIECE = bytes(range(256)) * 256  # 64 KiB
PIECES = 512
CONTENT_BYTES = PIECES * len(PIECE)

pytestmark = [pytest.mark.slow, pytest.mark.clause("AD-46", "EN-102")]


@dataclass
class Files(artifacts_pb2_grpc.ArtifactsServicer):
    """An engine's files, and how far they were read."""

    sent: int = 0
    cut_after: int | None = None
    hangs: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def Read(  # noqa: N802 - the RPC's name
        self, request: pb.ReadArtifactRequest, context: Any
    ) -> AsyncIterator[pb.ReadArtifactResponse]:
        if ("authorization", "Bearer tok") not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no credential")
        if request.uri != "profile:p/rank-0/cpu.json":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no artifact has this uri")
        self.asked.set()
        try:
            if self.hangs:
                await asyncio.Event().wait()
            for number in range(PIECES):
                if number == self.cut_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the file is gone")
                self.sent += 1
                yield pb.ReadArtifactResponse(data=PIECE)
        finally:
            self.left.set()


NAMED = ProfileArtifact(
    participant_id=ParticipantId("rank-0"),
    kind=ProfilerKind.CPU,
    uri="profile:p/rank-0/cpu.json",
    media_type="application/json",
    size_bytes=CONTENT_BYTES,
    sha256=sha256(PIECE * PIECES).digest(),
)


@contextlib.asynccontextmanager
async def engine(files: Files | None) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    if files is not None:
        artifacts_pb2_grpc.add_ArtifactsServicer_to_server(files, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}", ca_pem=b"")
    try:
        yield channel
    finally:
        await channel.close(None)
        await server.stop(0)


def recorder(window_bytes: int) -> TunnelRecorder:
    request = TunnelRequest(run_id=RunId("r"), adapter="main", method="GET", path="/")
    return TunnelRecorder(request, window_bytes=window_bytes)


async def fetched(
    files: Files | None,
    *,
    token: str = "tok",
    uri: str = NAMED.uri,
    named: ProfileArtifact | None = NAMED,
    window_bytes: int = 1 << 40,
) -> TunnelRecorder:
    """Fetch to the end."""
    stream = recorder(window_bytes)
    async with engine(files) as channel, asyncio.timeout(60):
        fetch = ArtifactFetch(AdminRpc(channel, token), uri, stream, named=named)
        fetch.bind()
        await fetch.run(stream.on_done)
    assert stream.is_terminal
    assert stream.done_count == 1
    return stream


async def test_a_whole_file_comes_with_its_length() -> None:
    stream = await fetched(Files())
    assert stream.ended
    assert (stream.status, stream.framing) == (200, BodyFraming.LENGTH)
    assert stream.headers == [(b"Content-Length", b"%d" % CONTENT_BYTES)]
    assert sha256(stream.received).digest() == NAMED.sha256
    assert (await fetched(Files(), named=None)).framing is BodyFraming.CHUNKED


async def test_a_reader_that_stops_stops_the_engine_and_one_that_goes_on_gets_it_all() -> None:
    files = Files()
    stream = recorder(len(PIECE))
    async with engine(files) as channel, asyncio.TaskGroup() as tasks:
        fetch = ArtifactFetch(AdminRpc(channel, "tok"), NAMED.uri, stream, named=NAMED)
        fetch.bind()
        tasks.create_task(fetch.run(stream.on_done))
        await eventually(lambda: stream.credit_bytes <= 0)
        settled = -1
        while settled != files.sent:
            settled = files.sent
            await asyncio.sleep(0.2)  # until the transport's own buffers are full
        assert len(stream.received) == len(PIECE)
        assert files.sent < PIECES, "the engine sent it all though nobody read"
        while not stream.is_terminal:
            stream.grant(len(PIECE) * 8)
            await asyncio.sleep(0)
    assert stream.ended
    assert sha256(stream.received).digest() == NAMED.sha256


async def test_a_file_that_was_cut_is_told_as_cut() -> None:
    stream = await fetched(Files(cut_after=3))
    assert stream.error is not None
    assert stream.error.code == StreamErrorCode.UPSTREAM_TRUNCATED
    assert not stream.error.before_start


@pytest.mark.parametrize(
    "named",
    [
        ProfileArtifact(**{**{f: getattr(NAMED, f) for f in NAMED.__slots__}, "sha256": bytes(32)}),
        ProfileArtifact(
            **{**{f: getattr(NAMED, f) for f in NAMED.__slots__}, "size_bytes": CONTENT_BYTES - 1}
        ),
        ProfileArtifact(
            **{**{f: getattr(NAMED, f) for f in NAMED.__slots__}, "size_bytes": CONTENT_BYTES + 1}
        ),
    ],
    ids=["digest", "longer", "shorter"],
)
async def test_another_file_than_the_named_one_never_ends_well(named: ProfileArtifact) -> None:
    stream = await fetched(Files(), named=named)
    assert stream.error is not None
    assert stream.error.code == StreamErrorCode.UPSTREAM_TRUNCATED
    assert "not the one that it named" in stream.error.message
    assert len(stream.received) <= named.size_bytes


@pytest.mark.parametrize(
    ("files", "token", "uri", "words"),
    [
        (Files(), "tok", "profile:p/rank-9/x", "stop the profile again"),
        (Files(), "wrong", NAMED.uri, "no credential"),
        (None, "tok", NAMED.uri, "hands out no files"),
    ],
    ids=["unknown", "credential", "no service"],
)
async def test_what_cannot_be_had_is_refused_in_words(
    files: Files | None, token: str, uri: str, words: str
) -> None:
    stream = await fetched(files, token=token, uri=uri)
    assert stream.error is not None
    assert stream.error.before_start
    assert words in stream.error.message
    assert stream.status is None


async def test_an_engine_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iop.adapters.openengine.artifact_fetch.SILENCE_MAX_S", 0.2)
    stream = await fetched(Files(hangs=True))
    assert stream.error is not None
    assert "sends nothing" in stream.error.message


@pytest.mark.parametrize("hangs", [True, False], ids=["while waiting", "while there is no credit"])
async def test_a_cancelled_fetch_leaves_the_engine(hangs: bool) -> None:
    files = Files(hangs=hangs)
    stream = recorder(len(PIECE))
    async with engine(files) as channel, asyncio.TaskGroup() as tasks:
        fetch = ArtifactFetch(AdminRpc(channel, "tok"), NAMED.uri, stream, named=NAMED)
        fetch.bind()
        tasks.create_task(fetch.run(stream.on_done))
        if not hangs:
            await eventually(lambda: stream.credit_bytes <= 0)
        else:
            await files.asked.wait()
        stream.cancel()
        await stream.finished()
        await eventually(files.left.is_set)
    assert stream.error is not None
    assert stream.error.code == StreamErrorCode.CANCELLED


async def test_an_adapter_that_closes_ends_its_fetches() -> None:
    stream = recorder(len(PIECE))
    async with engine(Files(hangs=True)) as channel:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                fetch = ArtifactFetch(AdminRpc(channel, "tok"), NAMED.uri, stream, named=NAMED)
                fetch.bind()
                await fetch.run(stream.on_done)
    assert stream.error is not None
    assert "closed" in stream.error.message
    assert stream.done_count == 1
