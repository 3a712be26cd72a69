"""Messages between the engine and its ranks over a socket pair: a JSON head, perhaps followed by raw bytes.

Both ends are ours, so the format is plain; sizes are still checked, so that a broken rank cannot make the engine
allocate.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from iop.core.limits import MIB

__all__ = ["FrameBuffer", "FrameError", "encode_frame"]

HEAD: Final = struct.Struct("<I")
FRAME_BYTES_MAX: Final = 8 * MIB
"""Largest message. A step of full slots has some tens of kilobytes; profiles and weights travel as files."""


class FrameError(Exception):
    """The other end does not speak this format."""


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """One message as bytes."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(body)) + body


class FrameBuffer:
    """Collects bytes and gives out whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Messages that became whole. Raises FrameError."""
        self._bytes += data
        while len(self._bytes) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._bytes)
            if length > FRAME_BYTES_MAX:
                raise FrameError("message too long")
            if len(self._bytes) < HEAD.size + length:
                return
            body = bytes(self._bytes[HEAD.size : HEAD.size + length])
            del self._bytes[: HEAD.size + length]
            try:
                message = json.loads(body)
            except ValueError as exc:
                raise FrameError("message is not JSON") from exc
            if not isinstance(message, dict):
                raise FrameError("message is not an object")
            yield message
