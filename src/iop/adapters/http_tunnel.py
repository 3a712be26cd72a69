"""One provider tunnel over one HTTP exchange: the glue between a wire stream and an engine's answer (EN-50
to EN-57).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from iop.adapters.base import TunnelStream
from iop.adapters.http_connection import HttpExchange
from iop.adapters.http_exchange import HttpRequest, UpstreamError, UpstreamFailure
from iop.wire.messages import BodyFraming, CancelReason, Header, StreamError, StreamErrorCode

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that concern one connection only (RFC 9110, section 7.6.1)."""

NOT_FOR_ENGINES: Final = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"api-key",
    b"cookie",
}
"""What never reaches an engine: set here anew, or the caller's own credential (SF-04)."""

OUR_PREFIX: Final = b"x-iop-"

_CODES: Final = {
    UpstreamFailure.CONNECT_FAILED: StreamErrorCode.CONNECT_FAILED,
    UpstreamFailure.TIMEOUT: StreamErrorCode.TIMEOUT,
    UpstreamFailure.UPSTREAM_ERROR: StreamErrorCode.UPSTREAM_ERROR,
    UpstreamFailure.TRUNCATED: StreamErrorCode.UPSTREAM_TRUNCATED,
    UpstreamFailure.CANCELLED: StreamErrorCode.CANCELLED,
}


def _nothing() -> None:
    """All was told."""


class Requester(Protocol):
    """Sends a request; `HttpUpstream.request` of the adapter that uses this."""

    def __call__(self, request: HttpRequest, sink: HttpTunnel) -> HttpExchange:
        """Send it. Raises Unavailable when the adapter is closed."""
        ...


class HttpTunnel:
    """Sink of the engine's answer and owner of the stream's one terminal.

    Args:
        stream: where the answer goes; bound here.
        on_done: called when nothing is left of it.
        on_outcome: told whether the engine could be reached: a health observation.
    """

    __slots__ = ("_exchange", "_on_done", "_on_outcome", "_stream")

    def __init__(
        self,
        stream: TunnelStream,
        *,
        on_done: Callable[[], None],
        on_outcome: Callable[[UpstreamError | None], None],
    ) -> None:
        self._stream = stream
        self._on_done = on_done
        self._on_outcome = on_outcome
        self._exchange: HttpExchange | None = None

    def open(self, requester: Requester, request: HttpRequest) -> None:
        """Send the request and bind the stream to it. Raises Unavailable when the adapter is closed."""
        self._exchange = exchange = requester(request, self)
        self._stream.bind(on_cancel=self._on_cancel, on_writable=exchange.resume)

    def on_start(self, status: int, headers: list[tuple[bytes, bytes]], framing: BodyFraming) -> None:
        """RESPONSE_START: the engine's own head."""
        self._on_outcome(None)
        self._forget_body()
        self._stream.start(status=status, headers=headers, framing=framing)

    def on_body(self, data: bytes) -> bool:
        """BODY: one frame per read at most; reading stops when the credit is used up (EN-102)."""
        stream = self._stream
        stream.send_body(data)
        return stream.credit_bytes > 0

    def on_end(self) -> None:
        """END."""
        self._stream.end()

    def on_error(self, error: UpstreamError) -> None:
        """ERROR, also the answer to a cancel (EN-56)."""
        if error.failure is not UpstreamFailure.CANCELLED:
            self._on_outcome(error)
        self._stream.fail(stream_error_of(error))

    def on_closed(self) -> None:
        """The engine's connection is free or gone."""
        self._exchange = None
        self._forget_body()
        on_done, self._on_done = self._on_done, _nothing  # it may know this tunnel
        on_done()

    def _forget_body(self) -> None:
        """Empty the request's body in place: the engine has it, and the objects of a stream lie in reference
        cycles, so that a large one would stay until these are collected.
        """
        body = self._stream.body
        if isinstance(body, list):
            body.clear()

    def cancel(self) -> None:
        """Close the engine's connection; the stream ends as cancelled. Idempotent."""
        if self._exchange is not None:
            self._exchange.cancel()

    def _on_cancel(self, reason: CancelReason) -> None:  # noqa: ARG002 - every reason ends it the same way
        self.cancel()


def stream_error_of(error: UpstreamError) -> StreamError:
    """A failed exchange as the stream's error (EN-112)."""
    return StreamError(
        code=_CODES[error.failure],
        message=error.message,
        retryable=error.failure is not UpstreamFailure.CANCELLED,
        before_start=error.is_unsent,
    )


def refuse_tunnel(
    stream: TunnelStream, code: StreamErrorCode, message: str, *, retryable: bool = False
) -> None:
    """End a tunnel of which the engine saw nothing."""
    stream.fail(StreamError(code=code, message=message, retryable=retryable, before_start=True))


def engine_headers(headers: Sequence[Header]) -> list[Header]:
    """The request headers that may reach an engine, in order.

    Raises:
        ValueError: a name or value could end its line; the whole request is refused.
    """
    named_by_connection: set[bytes] | None = None
    kept: list[Header] = []
    for header in headers:
        name, value = header
        lowered = name.lower()
        if lowered in NOT_FOR_ENGINES:
            if lowered == b"connection":
                named_by_connection = named_by_connection or set()
                named_by_connection.update(token.strip().lower() for token in value.split(b","))
        elif not lowered.startswith(OUR_PREFIX):
            kept.append(header)
    if named_by_connection:
        kept = [header for header in kept if header[0].lower() not in named_by_connection]
    for name, value in kept:
        if _TOKEN.fullmatch(name) is None or _LINE_END.search(value) is not None:
            raise ValueError("a header cannot be sent")
    return kept


_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_LINE_END: Final = re.compile(rb"[\r\n\0]")
