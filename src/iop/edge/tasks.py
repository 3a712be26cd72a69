"""An owner for tasks that callbacks start: one group, bounded, whose members cannot bring each other down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, Self

log = logging.getLogger(__name__)

TASKS_MAX: Final = 100_000
"""More would be a leak: tasks here are one per Node exchange, which is bounded by Nodes and operations."""


class TaskOwner:
    """``async with`` it; leaving cancels what still runs and waits for it."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed_total = 0

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        group, self._group = self._group, None
        for task in self._tasks:
            task.cancel()
        if group is not None:
            await group.__aexit__(kind, value, trace)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run ``work`` under this owner; what it raises is logged, and nobody else is disturbed.

        A function, not a coroutine: a task that is cancelled before its first turn never looks at its coroutine.
        """
        if self._group is None or len(self._tasks) >= TASKS_MAX:
            return
        task = self._group.create_task(self._guard(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        try:
            await work()
        except Exception:
            self.failed_total += 1
            log.exception("task.failed", extra={"task": name})
