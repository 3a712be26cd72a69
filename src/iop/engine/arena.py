"""Memory that can really be given back.

Each arena is a mapped memory file of its own, told apart by its name in the kernel's map of the process.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arena", "ArraySpec", "resident_bytes"]

_ALIGN: Final = 64
"""Arrays start on cache lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """Shape and element type of one array in an arena."""

    shape: tuple[int, ...]
    dtype: str


class Arena:
    """Named arrays in one mapping. Owns the memory; whoever holds a view of it must drop it before ``close``.

    Args:
        name: shown by the kernel; must be unique in the process among live arenas.
        specs: the arrays, in order.
        size_min: inflate the mapping to at least so many bytes, all of them touched.
    """

    def __init__(self, name: str, specs: Mapping[str, ArraySpec], *, size_min: int = 0) -> None:
        offsets: dict[str, int] = {}
        end = 0
        for key, spec in specs.items():
            offsets[key] = end
            end += -(-math.prod(spec.shape) * np.dtype(spec.dtype).itemsize // _ALIGN) * _ALIGN
        self.name = name
        self.used = end
        self.size = max(end, size_min, mmap.PAGESIZE)
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.size)
        self._map = mmap.mmap(self._fd, self.size)
        # `frombuffer` pins the mapping while a view lives, so closing too early is an error and no dangling pointer.
        self.arrays: dict[str, NDArray[Any]] = {
            key: np.frombuffer(
                self._map, dtype=spec.dtype, count=math.prod(spec.shape), offset=offsets[key]
            ).reshape(spec.shape)
            for key, spec in specs.items()
        }
        # Resident from the start, as an engine's preallocated memory is; else a release would give back only what was
        # used.
        np.frombuffer(self._map, dtype=np.uint8)[:] = 0

    def digest(self) -> str:
        """SHA-256 of the arrays' bytes, computed now."""
        return hashlib.sha256(memoryview(self._map)[: self.used]).hexdigest()

    def write_to(self, fd: int) -> None:
        """Copy the arrays' bytes to a file, from its start."""
        view, at = memoryview(self._map)[: self.used], 0
        while at < self.used:
            at += os.pwrite(fd, view[at:], at)

    def read_from(self, fd: int) -> None:
        """Fill the arrays from a file written by ``write_to``."""
        view, at = memoryview(self._map)[: self.used], 0
        while at < self.used:
            count = os.preadv(fd, [view[at:]], at)
            if count == 0:
                raise EOFError("the offloaded copy is shorter than the arena")
            at += count

    def close(self) -> None:
        """Unmap and free. Raises BufferError when somebody still holds a view: that would keep the memory."""
        self.arrays.clear()
        self._map.close()
        os.close(self._fd)


def resident_bytes(name: str) -> int:
    """Bytes of the arena ``name`` that are resident in this process, as the kernel tells; 0 when unmapped."""
    total, inside = 0, False
    with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            head = line.split(None, 6)
            if "-" in head[0] and not head[0].endswith(":"):
                inside = len(head) >= 6 and head[5] == f"/memfd:{name}"
            elif inside and head[0] == "Rss:":
                total += int(head[1]) * 1024
    return total
