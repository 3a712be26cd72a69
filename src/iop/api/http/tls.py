"""TLS of a listener whose certificate may be renewed while it runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Final, TypeAlias

from iop.core.errors import InvalidRequest
from iop.net.tls import ServerTls, server_context

__all__ = ["RenewedTls"]

_log: Final = logging.getLogger(__name__)

_Stamp: TypeAlias = tuple[int, int, int]


class RenewedTls:
    """A server context that takes new files as they come; connections made before keep the old certificate.

    Raises:
        InvalidRequest: a file cannot be used; the message names the setting.
    """

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._stamps = _stamps(files)
        self.context: ssl.SSLContext = server_context(files)

    def refresh(self) -> None:
        """Load the files again if one has changed. Unusable new files are logged, and the old ones stay in
        use.
        """
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            server_context(
                self._files
            )  # judged apart first: a half-loaded live context would refuse every caller
            self.context.load_cert_chain(self._files.certificate, self._files.key)
            if self._files.client_ca is not None:
                self.context.load_verify_locations(self._files.client_ca)
        except (InvalidRequest, OSError) as error:
            _log.warning("tls.renewal_failed", extra={"reason": str(error)})
        else:
            _log.info("tls.renewed")


def _stamps(files: ServerTls) -> tuple[_Stamp | None, ...]:
    return tuple(_stamp(path) for path in files.files)


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
