"""TLS contexts for the wire, from files (EN-104)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from iop.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """Files of a listener, PEM.

    Attributes:
        client_ca: when set, a Node must present a certificate that this authority signed.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file whose change means a new context."""
        return tuple(path for path in (self.certificate, self.key, self.client_ca) if path is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Files of a dialler, PEM.

    Attributes:
        ca: authority of the Edge's certificate; absent: the system's.
        certificate: our own, with ``key``, where the Edge asks for one.
        server_name: what the Edge's certificate must name; absent: the host that is dialled.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """A context that serves TLS 1.2 or newer. Raises InvalidRequest naming the setting whose file is unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_chain(context, tls.certificate, tls.key)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_ca(context, tls.client_ca, "client_ca")
    return context


def client_context(tls: ClientTls) -> ssl.SSLContext:
    """A context that verifies the Edge by name. Raises InvalidRequest naming the setting whose file is unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.ca is not None:
        _load_ca(context, tls.ca, "ca")
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if (tls.certificate is None) != (tls.key is None):
        raise InvalidRequest("A client certificate and its key go together.", reason="TLS_FILES")
    if tls.certificate is not None and tls.key is not None:
        _load_chain(context, tls.certificate, tls.key)
    return context


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as exc:
        raise InvalidRequest("The certificate or its key cannot be used.", reason="TLS_FILES") from exc


def _load_ca(context: ssl.SSLContext, ca: Path, setting: str) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as exc:
        raise InvalidRequest(f"The authority file of {setting} cannot be used.", reason="TLS_FILES") from exc
