"""Handing out the files that profiles leave, beside OpenEngineAdmin on its listener (AD-46)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from iop.admin.permissions import Permission, Principal
from iop.api.grpc.admin_codec import require_text
from iop.api.grpc.interceptors import current_principal
from iop.core.errors import IopError
from iop.core.limits import KIB
from iop.pb.iop import artifacts_pb2 as pb
from iop.pb.iop import artifacts_pb2_grpc

__all__ = ["ARTIFACT_METHODS", "ARTIFACT_SERVICE", "READ", "ArtifactService", "ReadArtifact"]

ARTIFACT_SERVICE: Final[str] = pb.DESCRIPTOR.services_by_name["Artifacts"].full_name

ARTIFACT_METHODS: Final[Mapping[str, Permission | None]] = MappingProxyType(
    {f"/{ARTIFACT_SERVICE}/Read": Permission.PROFILE}
)
"""Who may read the profile may read what it names."""

PIECE_BYTES_MAX: Final = 256 * KIB
"""Largest message: larger ones would be held whole on both sides, smaller ones cost a call each."""

URI_CHARS_MAX: Final = 1024
"""Longest uri that is looked for; those that we make are shorter."""

READ: Final = "READ_ARTIFACT"

ReadArtifact: TypeAlias = Callable[[str], AsyncIterator[bytes]]
"""The bytes behind a uri, read at the reader's pace. Raises NotFound, or Unavailable when they cannot be had whole."""

Audit: TypeAlias = Callable[[Principal, str], Awaitable[None]]


class ArtifactService(artifacts_pb2_grpc.ArtifactsServicer):
    """Reads as fast as the caller does; holds one piece.

    Args:
        read: where the files are.
        audit: told of each call's outcome (AD-101).
    """

    def __init__(self, read: ReadArtifact, audit: Audit) -> None:
        self._read = read
        self._audit = audit

    async def Read(
        self, request: pb.ReadArtifactRequest, context: Any
    ) -> AsyncGenerator[pb.ReadArtifactResponse, None]:
        """AD-46."""
        principal = current_principal()
        try:
            uri = require_text(request.uri, "uri", chars_max=URI_CHARS_MAX)
            pieces = self._read(uri)
            # What cannot be had at all is refused and audited as such.
            first = await anext(pieces, b"")
        except IopError as refusal:
            await self._audit(principal, refusal.reason)
            raise
        await self._audit(principal, "ALLOWED")
        async with contextlib.AsyncExitStack() as stack:
            aclose = getattr(pieces, "aclose", None)
            if aclose is not None:
                stack.push_async_callback(aclose)
            for message in _messages(first):
                yield message
            async for piece in pieces:
                for message in _messages(piece):
                    yield message


def _messages(piece: bytes) -> list[pb.ReadArtifactResponse]:
    return [
        pb.ReadArtifactResponse(data=piece[start : start + PIECE_BYTES_MAX])
        for start in range(0, len(piece), PIECE_BYTES_MAX)
    ]
