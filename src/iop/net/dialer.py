"""One dial from a Node to its Edge; when to try again is the Node's supervisor's business (EN-20 to EN-25)."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from iop.core.errors import Unavailable
from iop.net.node_connection import NodeWire
from iop.net.ports import NodeHandler
from iop.net.tls import ClientTls, client_context
from iop.wire.session import SessionSettings

CONNECT_TIMEOUT_S: Final = 10.0
"""For TCP and TLS together. Longer keeps a Node on a dead address; shorter fails on slow links."""


class Dialer:
    """Knows where the Edge is and how to reach it.

    Args:
        host: name or address.
        port: of the Edge's nodes listener.
        settings: limits and times until the Edge's config tells its own.
        tls: files; absent: plain TCP.
        connect_timeout_s: see CONNECT_TIMEOUT_S.
        unix_nanos: wall clock.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        settings: SessionSettings | None = None,
        tls: ClientTls | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        unix_nanos: Callable[[], int] = time.time_ns,
    ) -> None:
        self._host = host
        self._port = port
        self._settings = settings or SessionSettings()
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._unix_nanos = unix_nanos

    async def dial(self, handler: NodeHandler) -> NodeWire:
        """Try once to connect; the caller then registers.

        Returns:
            An open connection; from now on ``handler.on_closed`` is called exactly once.

        Raises:
            InvalidRequest: an unusable local TLS file; a retry cannot help (EN-22).
            Unavailable: no connection in time, or the Edge's certificate was refused; retryable.
        Cancellation: safe; nothing stays open.
        """
        loop = asyncio.get_running_loop()
        # Read anew each time, so that a renewed certificate needs no restart.
        context = client_context(self._tls) if self._tls is not None else None
        server_name = (self._tls.server_name or self._host) if self._tls is not None else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: NodeWire(
                        handler=handler, settings=self._settings, loop=loop, unix_nanos=self._unix_nanos
                    ),
                    self._host,
                    self._port,
                    ssl=context,
                    server_hostname=server_name,
                    ssl_handshake_timeout=self._connect_timeout_s if context is not None else None,
                )
        except TimeoutError as exc:
            raise Unavailable(
                f"The Edge did not answer within {self._connect_timeout_s:g} s.", reason="CONNECT_TIMEOUT"
            ) from exc
        except ssl.SSLCertVerificationError as exc:
            raise Unavailable(
                f"The Edge's certificate was refused: {exc.verify_message}.",
                reason="EDGE_CERTIFICATE_REFUSED",
            ) from exc
        except OSError as exc:
            raise Unavailable(f"The Edge cannot be reached: {_text(exc)}.", reason="CONNECT_FAILED") from exc
        return connection


def _text(error: OSError) -> str:
    """Why, without the address that asyncio puts into its own text."""
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or 'no reason given'})"
    return os.strerror(error.errno).lower() if error.errno else type(error).__name__
