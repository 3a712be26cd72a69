"""How rank processes add up their parts: one shared mapping and a counter per pair of ranks.

A rank writes its part into its slot, tells every other rank through that pair's event counter, waits for theirs, and
adds all slots in a fixed tree. Slots alternate between two banks: a rank that writes bank k+2 has seen everybody
arrive at k+1, hence everybody has finished reading bank k. Waiting costs no CPU and ends with the process when the
engine is gone.
"""

from __future__ import annotations

import mmap
import os
import select
from collections.abc import Mapping
from typing import Final

import numpy as np

from iop.engine.exact import F32

__all__ = ["EngineGoneError", "Exchange", "exchange_bytes"]

_BANKS: Final = 2


class EngineGoneError(Exception):
    """The engine's process has closed its side; a rank has nothing left to live for."""


def exchange_bytes(*, ranks: int, rows: int, width: int, vocabulary: int) -> int:
    """Size of the shared mapping."""
    return 4 * rows * (_BANKS * ranks * width + vocabulary)


class Exchange:
    """One process's view of the shared mapping.

    Args:
        fd: the shared memory file; closed by its owner.
        rank: this rank; -1 for the engine, which only reads logits.
        signals: event counters by (from, to), those of this rank at least.
        alive_fd: a descriptor that hangs up when the engine goes; -1 for the engine itself.
    """

    def __init__(
        self,
        fd: int,
        *,
        rank: int,
        ranks: int,
        rows: int,
        width: int,
        vocabulary: int,
        signals: Mapping[tuple[int, int], int],
        alive_fd: int,
    ) -> None:
        self._rank, self._ranks = rank, ranks
        self._map = mmap.mmap(fd, exchange_bytes(ranks=ranks, rows=rows, width=width, vocabulary=vocabulary))
        slots = _BANKS * ranks * rows * width
        self._slots: F32 = np.ndarray((_BANKS, ranks, rows, width), dtype=np.float32, buffer=self._map)
        self.logits: F32 = np.ndarray(
            (rows, vocabulary), dtype=np.float32, buffer=self._map, offset=4 * slots
        )
        self._bank = 0
        self._others = [other for other in range(ranks) if other != rank]
        self._signals = signals
        self._alive_fd = alive_fd
        self._poll: dict[int, select.poll] = {}
        for other in self._others if rank >= 0 else ():
            poll = select.poll()
            poll.register(signals[other, rank], select.POLLIN)
            poll.register(alive_fd, 0)
            self._poll[other] = poll

    def sum(self, part: F32) -> F32:
        """Sum of all ranks' parts of shape (R, width), the same bits on each.

        Raises:
            EngineGoneError: while waiting for another rank.
        """
        if self._ranks == 1:
            return part
        rows = len(part)
        self._bank ^= 1
        bank = self._slots[self._bank]
        bank[self._rank, :rows] = part
        for other in self._others:
            os.eventfd_write(self._signals[self._rank, other], 1)
        for other in self._others:
            self._wait_for(other)
        parts = [bank[rank, :rows] for rank in range(self._ranks)]
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        return np.asarray(parts[0], dtype=np.float32)

    def _wait_for(self, other: int) -> None:
        signal = self._signals[other, self._rank]
        while True:
            for fd, event in self._poll[other].poll():
                if fd == signal and event & select.POLLIN:
                    os.eventfd_read(signal)
                    return
                if fd == self._alive_fd and event & (select.POLLHUP | select.POLLERR):
                    raise EngineGoneError
