"""Profile artifacts on Nodes: named without their place, fetched over the Node's own connection (AD-46, EN-04)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from typing import Final

from iop.core.errors import NotFound, Unavailable
from iop.core.ids import NodeId, RunId
from iop.edge.calls import ProviderKey
from iop.edge.scrub import scrub
from iop.net.ports import EdgeConnection, OutboundStream
from iop.wire.messages import ArtifactRequest, BodyFraming, CancelReason, Header, StreamError, Usage

SCHEME: Final = "iop-artifact:"

ARTIFACTS_MAX: Final = 10_000
"""Artifacts remembered; the oldest go first. StopProfile names them again."""

SILENCE_MAX_S: Final = 60.0
"""A Node that sends nothing of an artifact for so long is given up."""


class Artifacts:
    """Which artifact is where.

    Args:
        find_connection: the ready connection of a Node, if any.
        new_run_id: makes a fresh stream id.
    """

    def __init__(
        self, find_connection: Callable[[NodeId], EdgeConnection | None], new_run_id: Callable[[], RunId]
    ) -> None:
        self._find_connection = find_connection
        self._new_run_id = new_run_id
        self._known: OrderedDict[str, tuple[ProviderKey, str]] = OrderedDict()

    def publish(self, key: ProviderKey, uri: str) -> str:
        """Our name for an artifact that a provider named; always the same for the same one."""
        name = f"{key.node}/{key.provider}/{sha256(uri.encode()).hexdigest()[:24]}"
        self._known[name] = (key, uri)
        self._known.move_to_end(name)
        if len(self._known) > ARTIFACTS_MAX:
            self._known.popitem(last=False)
        return SCHEME + name

    def is_known(self, uri: str) -> bool:
        """Whether somebody published it since this Edge started, with or without the scheme."""
        return uri.removeprefix(SCHEME) in self._known

    async def read(self, uri: str) -> AsyncIterator[bytes]:
        """Fetch one; the reader's pace is the Node's (EN-102). With or without the scheme.

        Raises:
            NotFound: nobody published it here.
            Unavailable: its Node is away, or was lost meanwhile, or has it no more.
        Cancellation: safe; the Node is told.
        """
        found = self._known.get(uri.removeprefix(SCHEME))
        if found is None:
            raise NotFound(
                "no artifact of this name is known, or its engine is away", reason="unknown_artifact"
            )
        key, node_uri = found
        connection = self._find_connection(key.node)
        if connection is None:
            raise Unavailable("the artifact's Node is not ready", reason="node_not_ready", retry_after_s=5.0)
        sink = _Sink()
        request = ArtifactRequest(run_id=self._new_run_id(), adapter=key.provider, uri=node_uri)
        stream = connection.fetch_artifact(request, sink)
        try:
            async for data in sink.chunks(stream):
                yield data
        finally:
            if not sink.is_over:
                stream.cancel(CancelReason.CLIENT_GONE)
                stream.detach()


class _Sink:
    """Holds what came and was not read yet: at most one window."""

    def __init__(self) -> None:
        self.is_over = False
        self._error: StreamError | None = None
        self._ready: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def on_response_start(
        self,
        *,
        status: int,
        headers: Sequence[Header],  # noqa: ARG002 - the port's
        framing: BodyFraming,  # noqa: ARG002
    ) -> None:
        """Nothing to keep of it but a refusal."""
        if status >= 400:
            self._error = StreamError(code="unknown_artifact", message="the Node has it no more")

    def on_body(self, data: bytes) -> None:
        """Keep it."""
        self._ready.append(data)
        self._wake.set()

    def on_usage(self, usage: Usage) -> None:
        """Artifacts use no tokens."""

    def on_end(self) -> None:
        """Whole."""
        self.is_over = True
        self._wake.set()

    def on_error(self, error: StreamError) -> None:
        """Cut."""
        self.is_over = True
        self._error = error
        self._wake.set()

    async def chunks(self, stream: OutboundStream) -> AsyncIterator[bytes]:
        """What comes, in order; raises Unavailable when it was cut."""
        while True:
            while self._ready and self._error is None:
                data = self._ready.popleft()
                yield data
                stream.consumed(len(data))
            if self._error is not None:
                raise Unavailable(
                    scrub(self._error.message) or "the artifact was cut", reason=self._error.code
                )
            if self.is_over:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(SILENCE_MAX_S):
                    await self._wake.wait()
            except TimeoutError as error:
                raise Unavailable("the artifact's Node sends nothing", reason="timeout") from error
