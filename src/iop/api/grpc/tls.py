"""TLS of a gRPC listener, with certificates that are read again when their files change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import grpc

from iop.core.errors import InvalidRequest

__all__ = ["ServerTls", "server_credentials", "tls_from_files"]

_log = logging.getLogger(__name__)

_Stamps: TypeAlias = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """PEM material. With `client_ca` every client must show a certificate that it signed (AD-03).

    Attributes:
        reload: gives newer material, or None when there is none. Called at each new connection, from a thread of
            grpc's; must be quick and must not raise.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None
    reload: Callable[[], ServerTls | None] | None = field(default=None, repr=False, compare=False)


def tls_from_files(certificate: Path, key: Path, client_ca: Path | None = None) -> ServerTls:
    """Material from files that may be replaced while the listener runs.

    A replacement that cannot be read, or is caught half written, leaves the old one in use.

    Raises:
        InvalidRequest: a file cannot be read now.
    """
    files = _TlsFiles(certificate, key, client_ca)
    try:
        return files.read()
    except OSError as error:
        raise InvalidRequest(
            f"Cannot read the TLS file {error.filename}: {error.strerror}.",
            reason="TLS_FILE_UNREADABLE",
            details={"file": str(error.filename)},
        ) from error


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials for `add_secure_port`; they follow `tls.reload` if there is one."""
    if tls.reload is None:
        return grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)],
            root_certificates=tls.client_ca,
            require_client_auth=tls.client_ca is not None,
        )
    reload: Final = tls.reload

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        newer = reload()
        return None if newer is None else _configuration(newer)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls),
        fetch,  # type: ignore[arg-type]  # None means "unchanged", which its types leave out
        require_client_authentication=tls.client_ca is not None,
    )


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(tls.key, tls.certificate)], root_certificates=tls.client_ca
    )


class _TlsFiles:
    """Reads the files, and reads them again when their stamps differ from those of the last reading."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._paths = (certificate, key, *(() if client_ca is None else (client_ca,)))
        self._lock = threading.Lock()
        self._stamps: _Stamps = ()

    def read(self) -> ServerTls:
        # Stamps first: a file that changes while it is read shows as changed at the next look.
        self._stamps = tuple(_stamp(path) for path in self._paths)
        contents = [path.read_bytes() for path in self._paths]
        return ServerTls(
            certificate=contents[0],
            key=contents[1],
            client_ca=contents[2] if len(contents) > 2 else None,
            reload=self.newer,
        )

    def newer(self) -> ServerTls | None:
        with self._lock:
            if tuple(_stamp(path) for path in self._paths) == self._stamps:
                return None
            try:
                tls = self.read()
            except OSError as error:
                _log.warning("tls.reload_failed", extra={"error": error.strerror})
                return None
        _log.info("tls.reloaded")
        return tls


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
