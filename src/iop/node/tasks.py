"""A task group that can be told to end: a daemon has children that would wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


class OwnedTasks(asyncio.TaskGroup):
    """An `asyncio.TaskGroup` whose children can be cancelled together, without an error of the group."""

    def __init__(self) -> None:
        super().__init__()
        self._children: set[asyncio.Task[Any]] = set()

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """As the base class."""
        task = super().create_task(coro, name=name, context=context)
        self._children.add(task)
        task.add_done_callback(self._children.discard)
        return task

    def cancel_children(self) -> None:
        """Cancel all that run now; the group's end then waits only for their clean-up."""
        for task in tuple(self._children):
            task.cancel()
