"""A TCP proxy that fails as networks do: packets vanish for a while, come late, or the line breaks.

TCP hides loss from those who use it: what a lossy line looks like from above is silence, then everything at once. So
the proxy keeps what it took during a partition and hands it on when the line heals, as retransmission does; connections
that are opened meanwhile get no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Final

__all__ = ["FaultProxy"]

CHUNK_BYTES: Final = 65_536


class FaultProxy:
    """Listens on a free port of this machine and hands bytes on to ``HOST:PORT``, both ways, while the line is up.

    Args:
        upstream: where bytes go; may be down or not there yet.
        rng: decides about losses, so that a run can be repeated.

    Attributes:
        address: ``HOST:PORT`` to dial.
        opened: connections taken so far.
        loss: how likely a piece of data is lost and sent again, 0 to 1.
        retransmit_s: how long a lost piece takes to come again; TCP's first guess is 0.2 s.
    """

    def __init__(self, upstream: str, *, rng: random.Random | None = None) -> None:
        self._host, _, self._port = upstream.rpartition(":")
        self._rng = rng or random.Random(0)
        self._up = asyncio.Event()
        self._up.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self.address = ""
        self.opened = 0
        self.loss = 0.0
        self.retransmit_s = 0.2

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        """Relay for the block; afterwards every connection is gone."""
        async with asyncio.TaskGroup() as tasks:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = tasks.create_task(self._relay(reader, writer), name="fault proxy")
                self._handlers.add(task)
                task.add_done_callback(self._handlers.discard)

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()[:2]
            self.address = f"{host}:{port}"
            try:
                yield self
            finally:
                server.close()
                for task in tuple(self._handlers):
                    task.cancel()

    def partition(self) -> None:
        """From now on nothing gets through, and nobody is told."""
        self._up.clear()

    def heal(self) -> None:
        """The line is up again; what was held goes on."""
        self._up.set()

    def cut(self) -> None:
        """Break all connections that are open now; new ones work."""
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._up.wait()
            far_reader, far = await asyncio.open_connection(self._host, int(self._port))
            self._writers.add(far)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, far), name="fault proxy out")
                tasks.create_task(self._copy(far_reader, writer), name="fault proxy back")
        except OSError:
            pass
        finally:
            for end in (writer, far):
                if end is not None:
                    self._writers.discard(end)
                    end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes until this direction ends; the other may go on, as TCP has it."""
        try:
            while data := await reader.read(CHUNK_BYTES):
                await self._up.wait()
                if self.loss and self._rng.random() < self.loss:
                    await asyncio.sleep(self.retransmit_s)
                    await self._up.wait()
                writer.write(data)
                await writer.drain()
            await self._up.wait()
            writer.write_eof()
        except OSError:
            # A broken line is broken in both directions.
            writer.transport.abort()
