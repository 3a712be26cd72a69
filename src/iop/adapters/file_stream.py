"""One file as the answer of a tunnel, within its credit (AD-46, EN-102)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from iop.adapters.base import TunnelStream
from iop.adapters.http_tunnel import refuse_tunnel
from iop.wire.messages import BodyFraming, CancelReason, StreamError, StreamErrorCode

PIECE_BYTES: Final = 64 * 1024


class FileStream:
    """Reads as the stream's credit allows; a local file's read is as quick as a copy."""

    def __init__(self, path: Path, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        self._path = path
        self._stream = stream
        self._on_done = on_done
        self._file: BinaryIO | None = None

    def open(self) -> None:
        """Begin; the stream is bound when this returns."""
        self._stream.bind(on_cancel=self._on_cancel, on_writable=self._send)
        try:
            self._file = self._path.open("rb")
            size = self._path.stat().st_size
        except OSError:
            refuse_tunnel(self._stream, StreamErrorCode.INVALID_REQUEST, "the artifact cannot be read")
            self._close()
            return
        self._stream.start(
            status=200,
            headers=[(b"Content-Length", b"%d" % size)],
            framing=BodyFraming.LENGTH,
        )
        self._send()

    def _send(self) -> None:
        while self._file is not None and self._stream.credit_bytes > 0:
            try:
                piece = self._file.read(PIECE_BYTES)
            except OSError:
                self._stream.fail(
                    StreamError(code=StreamErrorCode.UPSTREAM_TRUNCATED, message="the artifact was cut")
                )
                self._close()
                return
            if not piece:
                self._stream.end()
                self._close()
                return
            self._stream.send_body(piece)

    def _on_cancel(self, reason: CancelReason) -> None:  # noqa: ARG002 - every reason ends it
        if self._file is not None:
            self._stream.fail(
                StreamError(code=StreamErrorCode.CANCELLED, message="the request was cancelled")
            )
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._on_done()
