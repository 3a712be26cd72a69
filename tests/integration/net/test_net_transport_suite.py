"""The memory link and TCP behave alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from iop.testing.memory_transport import MemoryLink
from iop.testing.transport_suite import RecordingEnd, TransportSuite
from iop.testing.waiting import eventually


class TestMemoryLink(TransportSuite):
    def join(self) -> AbstractAsyncContextManager[tuple[RecordingEnd, RecordingEnd]]:
        return self._join()

    @asynccontextmanager
    async def _join(self) -> AsyncIterator[tuple[RecordingEnd, RecordingEnd]]:
        link = MemoryLink(RecordingEnd, RecordingEnd)
        yield link.left, link.right
        link.cut()


class TestTcp(TransportSuite):
    def join(self) -> AbstractAsyncContextManager[tuple[RecordingEnd, RecordingEnd]]:
        return self._join()

    @asynccontextmanager
    async def _join(self) -> AsyncIterator[tuple[RecordingEnd, RecordingEnd]]:
        loop = asyncio.get_running_loop()
        right = RecordingEnd()
        server = await loop.create_server(lambda: right, "127.0.0.1", 0)
        _, left = await loop.create_connection(RecordingEnd, "127.0.0.1", server.sockets[0].getsockname()[1])
        await eventually(lambda: bool(right.log))
        yield left, right
        server.close()
        for end in (left, right):
            end.transport.abort()
        await asyncio.sleep(0)
