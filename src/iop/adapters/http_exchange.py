"""What is asked of an engine over HTTP and what comes back: origins, requests, sinks and failures."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final, Protocol
from urllib.parse import urlsplit

from iop.core.errors import InvalidRequest
from iop.wire.messages import BodyFraming

HEADERS_TIMEOUT_S: Final = 600.0
"""Until response headers must have come when the request says nothing itself; a long prefill takes
minutes."""


@unique
class UpstreamFailure(Enum):
    """Why an exchange ended badly; the value is the stream error's code."""

    CONNECT_FAILED = "connect_failed"
    TIMEOUT = "timeout"
    UPSTREAM_ERROR = "upstream_error"
    TRUNCATED = "upstream_truncated"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamError:
    """One failed exchange.

    Attributes:
        message: for people; no addresses.
        is_unsent: no byte of the request was handed to a socket, so it may be sent elsewhere (EN-112).
    """

    failure: UpstreamFailure
    message: str
    is_unsent: bool


class ResponseSink(Protocol):
    """Receives one answer. Calls come in order; none may raise. ``on_closed`` is always the last."""

    def on_start(self, status: int, headers: list[tuple[bytes, bytes]], framing: BodyFraming) -> None:
        """Final status and headers; interim answers were consumed."""
        ...

    def on_body(self, data: bytes) -> bool:
        """Body bytes, content encoding untouched. False: read no more until ``HttpExchange.resume``."""
        ...

    def on_end(self) -> None:
        """The answer is whole, or ended with its connection where only that delimits it."""
        ...

    def on_error(self, error: UpstreamError) -> None:
        """The exchange failed or was cancelled."""
        ...

    def on_closed(self) -> None:
        """Nothing of the exchange is left: exactly once, after ``on_end`` or ``on_error``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an endpoint URL points.

    Attributes:
        base_path: path prefix of every request, without a trailing slash.
        host_header: value of ``Host``.
    """

    host: str
    port: int
    is_tls: bool
    base_path: str
    host_header: bytes

    @staticmethod
    def parse(endpoint: str) -> Origin:
        """Read ``http(s)://HOST[:PORT][/BASE]``.

        Raises:
            InvalidRequest: not such a URL; the message does not repeat it, since it may hold a password.
        """
        try:
            parts = urlsplit(endpoint)
            port = parts.port
        except ValueError as exc:
            raise InvalidRequest(
                "endpoint: not a URL; write http://HOST:PORT", reason="BAD_ENDPOINT"
            ) from exc
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidRequest(
                "endpoint: write http://HOST:PORT or https://HOST:PORT", reason="BAD_ENDPOINT"
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise InvalidRequest(
                "endpoint: no user, query or fragment; use api_key for a credential", reason="BAD_ENDPOINT"
            )
        is_tls = parts.scheme == "https"
        default_port = 443 if is_tls else 80
        host = parts.hostname
        shown = f"[{host}]" if ":" in host else host
        if port is not None and port != default_port:
            shown = f"{shown}:{port}"
        try:
            host_header = shown.encode("ascii")
        except UnicodeEncodeError as exc:
            raise InvalidRequest(
                "endpoint: write the host in ASCII (punycode)", reason="BAD_ENDPOINT"
            ) from exc
        return Origin(
            host=host,
            port=port or default_port,
            is_tls=is_tls,
            base_path=parts.path.rstrip("/"),
            host_header=host_header,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One request. ``headers`` are complete but for Host and Content-Length, which are added here.

    Attributes:
        path: absolute, with query; the origin's base path is put before it.
        headers_timeout_s: from now until the final response head.
    """

    method: bytes
    path: bytes
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: Sequence[bytes] = ()
    headers_timeout_s: float = HEADERS_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedResponse:
    """A whole answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def client_ssl_context(ca_pem: bytes) -> ssl.SSLContext:
    """TLS settings for an engine: its own authority, or the system's when ``ca_pem`` is empty.

    Raises:
        InvalidRequest: not a PEM certificate.
    """
    try:
        return (
            ssl.create_default_context(cadata=ca_pem.decode("ascii"))
            if ca_pem
            else ssl.create_default_context()
        )
    except (ssl.SSLError, ValueError) as exc:
        raise InvalidRequest("tls.ca: not a PEM certificate", reason="BAD_CA") from exc
