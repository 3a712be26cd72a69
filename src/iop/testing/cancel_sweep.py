"""Cancel a coroutine at every point where it waits, and see that nothing is left behind."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final

POINTS_MAX: Final = 10_000
"""More suspensions than this mean that the coroutine never ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What became of one run.

    Attributes:
        suspension: at which suspension it was cancelled, from 1.
        was_reached: it got that far; otherwise it ended before.
        was_cancelled: the cancellation came out at the top; False: it was swallowed, or came too late.
        error: what else came out.
    """

    suspension: int
    was_reached: bool
    was_cancelled: bool
    error: BaseException | None


async def cancel_at(coroutine: Coroutine[Any, Any, object], suspension: int) -> SweepPoint:
    """Run the coroutine as a task and cancel it at its n-th suspension."""
    reached = [False]
    error: BaseException | None = None
    was_cancelled = False
    task: asyncio.Task[object] | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(_run(coroutine, suspension, reached), name=f"cancelled-at-{suspension}")
    except BaseExceptionGroup as group:
        error = group.exceptions[0]
    if task is not None and task.cancelled():
        was_cancelled = True
    return SweepPoint(suspension=suspension, was_reached=reached[0], was_cancelled=was_cancelled, error=error)


async def sweep(
    make: Callable[[], Coroutine[Any, Any, object]],
    check: Callable[[SweepPoint], Awaitable[None]],
) -> int:
    """Run ``make()`` once per suspension point, cancelled there; ``check`` looks at the world after each.

    Returns:
        How many points there were; a zero means that the coroutine never waited, so nothing was shown.

    Raises:
        AssertionError: a cancellation was swallowed, or the coroutine never ends.
    """
    for suspension in range(1, POINTS_MAX):
        point = await cancel_at(make(), suspension)
        if not point.was_reached:
            if point.error is not None:
                raise point.error
            await check(point)
            return suspension - 1
        if not point.was_cancelled and point.error is None:
            raise AssertionError(f"The cancellation at suspension {suspension} was swallowed.")
        await check(point)
    raise AssertionError(f"The coroutine waits more than {POINTS_MAX} times.")


async def _run(coroutine: Coroutine[Any, Any, object], suspension: int, reached: list[bool]) -> object:
    return await _counted(coroutine, suspension, reached)


@types.coroutine
def _counted(
    coroutine: Coroutine[Any, Any, object], suspension: int, reached: list[bool]
) -> Generator[Any, Any, object]:
    """Drive the coroutine by hand, counting what it waits for."""
    count = 0
    failure: BaseException | None = None
    while True:
        try:
            waited = coroutine.send(None) if failure is None else coroutine.throw(failure)
        except StopIteration as stop:
            return stop.value
        failure = None
        count += 1
        if count == suspension:
            reached[0] = True
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            yield waited
        except BaseException as exc:  # noqa: BLE001 - goes into the coroutine, where it belongs
            failure = exc
