"""A journal that kills at a chosen write: its own process, or another.

In the processes of ``crash_nursery`` it takes the place of the real one.

The file that ``CRASH_AT`` names holds an order, ``POINT PID``; the next acceptance takes it and counts from there, over
later acceptances too. Every write has two points: before it, and after it is durable but before anybody was told. PID 0
is the process itself; point 0 takes an older order back.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from iop.store.journal import SqlJournal


class DeadlyJournal(SqlJournal):
    """Counts, and kills."""

    _left = 0
    _victim = 0

    def _take_order(self) -> None:
        order = Path(os.environ.get("CRASH_AT", "/nowhere"))
        try:
            self._left, self._victim = map(int, order.read_text().split())
            order.unlink()
        except FileNotFoundError:
            pass

    def _pass(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                Path(os.environ["CRASH_AT"]).with_suffix(".struck").touch()
                os.kill(self._victim or os.getpid(), signal.SIGKILL)

    async def accept(self, claim: Any, decide: Any) -> Any:
        """A new operation."""
        self._take_order()
        self._pass()
        accepted = await super().accept(claim, decide)
        self._pass()
        return accepted

    async def advance(self, operation_id: Any, move: Any) -> Any:
        """A move of an operation."""
        self._pass()
        moved = await super().advance(operation_id, move)
        self._pass()
        return moved

    async def amend(self, change: Any) -> Any:
        """A change of the desired state."""
        self._pass()
        amended = await super().amend(change)
        self._pass()
        return amended
