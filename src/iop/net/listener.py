"""Where Nodes arrive: the Edge's listening socket (EN-02, EN-104)."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, cast

from iop.core.errors import InvalidRequest, IopError, Unavailable
from iop.net.edge_connection import EdgeWire
from iop.net.ports import EdgeHandler
from iop.net.tls import ServerTls, server_context
from iop.wire.messages import CloseReason
from iop.wire.session import SessionSettings

logger = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 4096
"""Connections at once, Nodes and strangers. Above the fleets we aim at; each costs a descriptor and a few KiB."""

STRANGERS_MAX: Final = 1024
"""Connections that have not registered. A whole fleet may come back at once, so this is not small."""

TLS_FILES_CHECK_INTERVAL_S: Final = 5.0
"""How often certificate files are looked at; a renewal is seen within this time."""

CLOSE_TIMEOUT_S: Final = 3.0
"""How long ``aclose`` waits for Goodbyes to be written; longer than a connection takes to cut itself."""

BACKLOG: Final = 1024


@dataclass(slots=True)
class ListenerCounters:
    """What a listener met; only ever rises."""

    accepted: int = 0
    refused_full: int = 0


class Listener:
    """Accepts Nodes and hands their connections to the handler.

    ``async with`` does everything; ``start``, ``run`` and ``aclose`` are its parts.

    Args:
        handler: hears of every connection.
        host: address to bind; a name is resolved.
        port: 0 takes a free one, see ``port``.
        settings: limits and times of new sessions.
        tls: files; absent: plain TCP.
        is_insecure_allowed: bind beyond loopback without TLS (EN-104).
        connections_max: see CONNECTIONS_MAX.
        strangers_max: see STRANGERS_MAX.
        unix_nanos: wall clock.
    """

    def __init__(
        self,
        *,
        handler: EdgeHandler,
        host: str,
        port: int,
        settings: SessionSettings | None = None,
        tls: ServerTls | None = None,
        is_insecure_allowed: bool = False,
        connections_max: int = CONNECTIONS_MAX,
        strangers_max: int = STRANGERS_MAX,
        unix_nanos: Callable[[], int] = time.time_ns,
    ) -> None:
        self._handler = handler
        self._host = host
        self._port = port
        self.settings = settings or SessionSettings()
        self._tls = tls
        self._is_insecure_allowed = is_insecure_allowed
        self._connections_max = connections_max
        self._strangers_max = strangers_max
        self._unix_nanos = unix_nanos
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[EdgeWire] = set()
        self._strangers = 0
        self._shaking_hands = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._stack = AsyncExitStack()
        self.counters = ListenerCounters()

    async def __aenter__(self) -> Listener:
        """Start, and watch the certificate files until the block ends."""
        await self.start()
        if self._tls is not None:
            tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            watcher = tasks.create_task(self.run(), name="tls files")
            self._stack.callback(watcher.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
        # Without the block's own error, which would come back out of the task group wrapped.
        await self._stack.aclose()

    @property
    def port(self) -> int:
        """The port that is bound; what was asked for before that."""
        return self._port

    @property
    def connections_open(self) -> int:
        """Connections now, strangers included."""
        return len(self._connections)

    async def start(self) -> None:
        """Bind and accept.

        Raises:
            InvalidRequest: an unusable TLS file, or off loopback without TLS; nothing was bound.
            Unavailable: the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except OSError as exc:
            raise Unavailable("The nodes listener's host cannot be resolved.", reason="BIND_FAILED") from exc
        family, _, _, _, address = found[0]
        if self._tls is None and not self._is_insecure_allowed and not _is_loopback(str(address[0])):
            raise InvalidRequest(
                "The nodes listener is not on loopback: give it TLS files, or say insecure: true.",
                reason="INSECURE_LISTENER",
            )
        self._socket = _bind(family, address)
        self._port = self._socket.getsockname()[1]
        try:
            await self._serve()
        except BaseException:
            self._socket.close()
            raise

    async def run(self) -> None:
        """Take new certificate files into use as they change, until cancelled. Without TLS: only wait."""
        if self._tls is None:
            await asyncio.Event().wait()
            return
        seen = await asyncio.to_thread(_stamps, self._tls.files)
        while True:
            await asyncio.sleep(TLS_FILES_CHECK_INTERVAL_S)
            now = await asyncio.to_thread(_stamps, self._tls.files)
            if now == seen:
                continue
            seen = now
            try:
                await self.reload_tls()
            except IopError as exc:
                # Half-written files are ordinary here; the old context serves until they are whole.
                logger.warning("listener.tls_reload_failed reason=%s", exc.reason)

    async def reload_tls(self) -> None:
        """Serve new connections with the files as they are now; open ones stay as they are.

        Raises:
            InvalidRequest: an unusable file; the old context goes on serving.
        """
        old = self._server
        await self._serve()
        if old is not None:
            old.close()
        logger.info("listener.tls_reloaded")

    async def aclose(self, reason: CloseReason = CloseReason.SHUTDOWN) -> None:
        """Stop accepting, say goodbye to all and wait until they are gone, at most CLOSE_TIMEOUT_S."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for connection in list(self._connections):
            connection.close(reason)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._empty.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()

    async def _serve(self) -> None:
        """Accept from a copy of the listening socket, so that a next server can take over from this one."""
        assert self._socket is not None
        context = server_context(self._tls) if self._tls is not None else None
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: self._accept(loop),
            sock=self._socket.dup(),
            ssl=context,
            backlog=BACKLOG,
            ssl_handshake_timeout=self.settings.handshake_timeout_s if context is not None else None,
        )

    def _accept(self, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        # The cap comes before any state: a refused stranger costs one small object until it is cut.
        if (
            len(self._connections) + self._shaking_hands >= self._connections_max
            or self._strangers + self._shaking_hands >= self._strangers_max
        ):
            self.counters.refused_full += 1
            return _Cut()
        self.counters.accepted += 1
        slot = _Slot(self, loop)
        slot.connection = EdgeWire(
            handler=self._handler,
            settings=self.settings,
            loop=loop,
            unix_nanos=self._unix_nanos,
            on_made=slot.be_stranger,
            on_gone=slot.leave,
            on_registered=slot.be_known,
        )
        return slot.connection

    def count(self, *, shaking_hands: int = 0, strangers: int = 0) -> None:
        """For slots: the figures that the caps look at."""
        self._shaking_hands += shaking_hands
        self._strangers += strangers

    def enter(self, connection: EdgeWire) -> None:
        """For slots: its transport is there."""
        self._connections.add(connection)
        self._empty.clear()

    def leave(self, connection: EdgeWire) -> None:
        """For slots: its transport is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()


class _Slot:
    """Which of the caps one connection counts against.

    asyncio makes the protocol when it accepts, but says nothing to it when the TLS handshake fails. So a connection
    begins as one that shakes hands, and is forgotten as such when the time for that is over.
    """

    __slots__ = ("_forget", "_is_shaking_hands", "_is_stranger", "_listener", "connection")

    connection: EdgeWire

    def __init__(self, listener: Listener, loop: asyncio.AbstractEventLoop) -> None:
        self._listener = listener
        self._is_shaking_hands = True
        self._is_stranger = False
        self._forget = loop.call_later(listener.settings.handshake_timeout_s + 1, self._end_handshake)
        listener.count(shaking_hands=1)

    def be_stranger(self) -> None:
        """The transport is there."""
        self._end_handshake()
        self._is_stranger = True
        self._listener.count(strangers=1)
        self._listener.enter(self.connection)

    def be_known(self) -> None:
        """It registered."""
        if self._is_stranger:
            self._is_stranger = False
            self._listener.count(strangers=-1)

    def leave(self) -> None:
        """The transport is gone."""
        self.be_known()
        self._listener.leave(self.connection)

    def _end_handshake(self) -> None:
        if self._is_shaking_hands:
            self._is_shaking_hands = False
            self._forget.cancel()
            self._listener.count(shaking_hands=-1)


class _Cut(asyncio.Protocol):
    """Ends a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Cast, not checked: uvloop's transports are no instances of asyncio.Transport.
        cast("asyncio.Transport", transport).abort()


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.setblocking(False)
    except OSError as exc:
        listening.close()
        raise Unavailable(
            f"Port {address[1]} of the nodes listener cannot be bound; is it taken?", reason="BIND_FAILED"
        ) from exc
    return listening


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _stamps(paths: tuple[Path, ...]) -> tuple[tuple[int, int, int] | None, ...]:
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(stamps)
