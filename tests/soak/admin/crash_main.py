"""``iop`` with a journal that kills its own process at a chosen write. For tests alone: they start roles by this file.

The file that ``CRASH_AT`` names holds the number of a point; the next acceptance takes it and counts from there. Every
write has two points: before it, and after it is durable but before anybody was told.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import iop.app.edge
import iop.app.engine
from iop.cli.main import main
from iop.store.journal import SqlJournal

ORDER = Path(os.environ["CRASH_AT"])


class DyingJournal(SqlJournal):
    """Counts, and dies."""

    _left: int | None = None

    def _pass(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async def accept(self, claim: Any, decide: Any) -> Any:
        """A new operation: take the order, if there is one."""
        try:
            self._left = int(ORDER.read_text())
            ORDER.unlink()
        except FileNotFoundError:
            self._left = None
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


iop.app.edge.SqlJournal = DyingJournal  # type: ignore[attr-defined,misc]
iop.app.engine.SqlJournal = DyingJournal  # type: ignore[attr-defined,misc]

if __name__ == "__main__":
    main()
