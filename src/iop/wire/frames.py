"""Length-prefixed frames out of a byte stream, however it is cut (EN-100).

A frame is a 4-byte big-endian length and that many bytes. Sizes are judged before anything is kept, so a peer makes us
hold at most one frame of the limit in force.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from iop.core.errors import RemoteProtocolError

HEADER_BYTES: Final = 4


def frame(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameReader:
    """Cuts frames out of received bytes.

    Attributes:
        frame_bytes_max: largest payload accepted; may be raised between frames, once the peer is known.
    """

    __slots__ = ("_need", "_pending", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._pending = bytearray()
        self._need = HEADER_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of an unfinished frame."""
        return len(self._pending)

    @property
    def is_mid_frame(self) -> bool:
        """Whether an end of the stream now would cut a frame."""
        return bool(self._pending)

    def feed(self, data: bytes) -> Iterator[tuple[bytes, int, int]]:
        """Yield (buffer, start, end) of each payload that is now complete, without copying it out.

        Read the iterator to its end, or drop the reader: bytes behind the last yielded frame would be lost.

        Raises:
            RemoteProtocolError: ``FRAME_TOO_LARGE`` or ``EMPTY_FRAME``, after the frames before it were yielded.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._need:
                return
            data = bytes(self._pending)
            self._pending.clear()
        at = 0
        size = len(data)
        while size - at >= HEADER_BYTES:
            start = at + HEADER_BYTES
            length = int.from_bytes(data[at:start], "big")
            if length > self.frame_bytes_max:
                raise RemoteProtocolError(
                    f"A frame of {length} bytes is over the limit of {self.frame_bytes_max}.",
                    reason="FRAME_TOO_LARGE",
                    details={"frame_bytes": str(length), "frame_bytes_max": str(self.frame_bytes_max)},
                )
            if not length:
                raise RemoteProtocolError("A frame without content arrived.", reason="EMPTY_FRAME")
            end = start + length
            if end > size:
                self._need = HEADER_BYTES + length
                break
            yield data, start, end
            at = end
        else:
            self._need = HEADER_BYTES
        if at < size:
            self._pending += data[at:] if at else data
