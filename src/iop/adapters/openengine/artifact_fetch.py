"""One file of an engine's profile, from its admin listener to the Edge (AD-46).

The engine's stream is read only while the Edge grants credit, so that what is held on the way is one piece, however
slow the reader is. What an artifact's name promised is checked on the way: a file of another size or digest ends as
cut.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

import grpc

from iop.adapters.base import TunnelStream
from iop.adapters.http_tunnel import refuse_tunnel
from iop.adapters.openengine.admin_rpc import AdminRpc
from iop.adapters.openengine.channel import END_OF_CALL, error_of
from iop.admin.results import ProfileArtifact
from iop.core.errors import IopError, NotFound, Unavailable, Unsupported
from iop.wire.messages import BodyFraming, CancelReason, StreamError, StreamErrorCode

__all__ = ["ArtifactFetch"]

_log = logging.getLogger(__name__)

SILENCE_MAX_S: Final = 60.0
"""An engine that sends nothing of a file for so long is given up."""

NOT_OFFERED: Final = (
    "the engine's admin server hands out no files (it lacks iop.Artifacts); fetch them where it runs"
)


class ArtifactFetch:
    """Ends its stream exactly once, whatever happens.

    Args:
        rpc: the engine's admin listener.
        uri: as the engine named it.
        stream: to the Edge.
        named: what the engine said of the file, if it is still known here.
    """

    def __init__(
        self, rpc: AdminRpc, uri: str, stream: TunnelStream, *, named: ProfileArtifact | None
    ) -> None:
        self._rpc = rpc
        self._uri = uri
        self._stream = stream
        self._named = named
        self._is_cancelled = False
        self._has_started = False
        self._wake = asyncio.Event()
        self._call: Any = None

    def bind(self) -> None:
        """Take the stream, before the task that serves it runs."""
        self._stream.bind(on_cancel=self._on_cancel, on_writable=self._wake.set)

    async def run(self, on_done: Callable[[], None]) -> None:
        """Fetch to the end. Never raises but `CancelledError`."""
        call = self._call = self._rpc.read_artifact(self._uri)
        try:
            await self._copy(call)
        except IopError as error:
            self._fail(error)
        except grpc.aio.AioRpcError as status:
            self._fail(error_of(status))
        except asyncio.CancelledError:
            self._fail(Unavailable("the adapter is closed", reason="CLOSED"))
            task = asyncio.current_task()
            # A call that we called off ourselves ends its read in the same way.
            if not self._is_cancelled or (task is not None and task.cancelling()):
                raise
        finally:
            call.cancel()
            on_done()

    async def _copy(self, call: Any) -> None:
        digest, size = sha256(), 0
        while True:
            piece = await self._next(call)
            if piece is None:
                break
            digest.update(piece)
            size += len(piece)
            if self._named is not None and size > self._named.size_bytes:
                break
            self._start()
            if piece:
                self._stream.send_body(piece)
        named = self._named
        if named is not None and (size, digest.digest()) != (named.size_bytes, named.sha256):
            raise Unavailable("the engine's file is not the one that it named", reason="DIGEST_MISMATCH")
        self._start()
        self._stream.end()

    async def _next(self, call: Any) -> bytes | None:
        """The next piece, once there is credit for it; None at the end."""
        while self._stream.credit_bytes <= 0 and not self._is_cancelled:
            self._wake.clear()
            await (
                self._wake.wait()
            )  # as long as the Edge's reader takes; it is bounded there, and a cancel ends it
        if self._is_cancelled:
            raise Unavailable("the request was cancelled", reason="CANCELLED")
        try:
            async with asyncio.timeout(SILENCE_MAX_S):
                message = await call.read()
        except TimeoutError:
            raise Unavailable("the engine sends nothing of the file", reason="TIMEOUT") from None
        if self._is_cancelled:
            raise Unavailable("the request was cancelled", reason="CANCELLED")
        return None if message is END_OF_CALL else bytes(message.data)

    def _start(self) -> None:
        if self._has_started:
            return
        self._has_started = True
        if self._named is None:
            self._stream.start(status=200, headers=[], framing=BodyFraming.CHUNKED)
        else:
            length = [(b"Content-Length", b"%d" % self._named.size_bytes)]
            self._stream.start(status=200, headers=length, framing=BodyFraming.LENGTH)

    def _fail(self, error: IopError) -> None:
        _log.info("artifact.not_fetched reason=%s", error.message)
        if self._is_cancelled:
            self._stream.fail(
                StreamError(code=StreamErrorCode.CANCELLED, message="the request was cancelled")
            )
        elif self._has_started:
            self._stream.fail(StreamError(code=StreamErrorCode.UPSTREAM_TRUNCATED, message=error.message))
        elif isinstance(error, Unsupported):
            refuse_tunnel(self._stream, StreamErrorCode.INVALID_REQUEST, NOT_OFFERED)
        elif isinstance(error, NotFound):
            refuse_tunnel(
                self._stream,
                StreamErrorCode.INVALID_REQUEST,
                "the engine has it no more; stop the profile again",
            )
        else:
            refuse_tunnel(self._stream, StreamErrorCode.UPSTREAM_ERROR, error.message)

    def _on_cancel(self, reason: CancelReason) -> None:  # noqa: ARG002 - every reason ends it
        self._is_cancelled = True
        self._wake.set()
        if self._call is not None:
            self._call.cancel()
