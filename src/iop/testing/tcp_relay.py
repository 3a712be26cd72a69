"""A TCP relay that can break every connection through it, as a network does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["TcpRelay"]

CHUNK_BYTES = 65_536

CLOSE_TIMEOUT_S = 10.0
"""Aborted connections end within a turn of the loop; longer means that one was not aborted."""


class TcpRelay:
    """Listens on a free port of this machine and hands bytes on to `HOST:PORT`, both ways."""

    def __init__(self, upstream: str) -> None:
        self._host, _, self._port = upstream.rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.address = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[TcpRelay]:
        """Relay for the block."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._idle.wait()

    def cut(self) -> None:
        """Break all connections that are open now; new ones work."""
        for writer in self._writers:
            writer.transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, far_writer), name="relay out")
                tasks.create_task(_copy(far_reader, writer), name="relay back")
        finally:
            self._writers -= {writer, far_writer}
            writer.transport.abort()
            far_writer.transport.abort()
            if not self._writers:
                self._idle.set()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes until either end is gone; then both are."""
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()
