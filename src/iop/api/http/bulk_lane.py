"""The lane on which large bodies are read: one bounded step of one of them in a turn of the loop (EN-101)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from iop.api.http.bulk import BulkFields, BulkReader

__all__ = ["BulkLane"]


class BulkLane:
    """Reads the large bodies of one listener. Those that come together take turns, step by step."""

    __slots__ = ("_turn",)

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def read(self, parts: Sequence[bytes], *, depth_max: int) -> BulkFields:
        """Read one body; all else that is ready on the loop goes between two steps.

        Raises:
            InvalidRequest: as ``read_fields``.
        """
        reader = BulkReader(parts, depth_max=depth_max)
        is_read = False
        while not is_read:
            async with self._turn:
                is_read = reader.step()
                await asyncio.sleep(0)
        return reader.fields()
