"""An event loop whose clock jumps to the next timer when nothing else is to do.

Hours of timeouts pass in milliseconds and in the same order every time. For code whose input and output is all in
memory: real sockets would find that time runs ahead of them, threads that nobody waits for them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CLOCK_RESOLUTION_S: Final = 1e-9

LOOK_EVERY: Final = 64
"""Turns with something ready between two looks at real files. Only a signal or a thread writes to one, the loop's own,
and a system call in each turn would cost more than most turns do."""


class LoopStalledError(RuntimeError):
    """Nothing is ready, nothing is scheduled: the code under test waits for something that cannot come."""


class _JumpingSelector(selectors.BaseSelector):
    """Never sleeps: moves the clock by what it was asked to wait."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self._unseen = 0
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0 and self._unseen < LOOK_EVERY:
            self._unseen += 1
            return []
        self._unseen = 0
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            raise LoopStalledError("Every task waits, and no timer is set.")
        if timeout > 0:
            self.now += timeout
        return []

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's text. Its clock starts at zero."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = CLOCK_RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As any loop; what is nearer than its clock can tell is now. Else a timer that fires that early, and is set
        again for the same moment, would keep the clock from ever reaching it.
        """
        if 0.0 < when - self._jumping.now < CLOCK_RESOLUTION_S:
            self._jumping.now = when
        return super().call_at(when, callback, *args, context=context)

    def stand_still(self, seconds: float) -> None:
        """Let time pass without anything running, as when the process is stopped."""
        self._jumping.now += seconds

    def next_timer(self) -> float | None:
        """When the next timer is due; ``None`` when none is set."""
        return min((timer.when() for timer in self._scheduled if not timer.cancelled()), default=None)

    def is_quiet(self) -> bool:
        """Whether, but for who asks, everything that was ready has run, and no timer is due."""
        if self._ready:
            return False
        return not self._scheduled or self._scheduled[0].when() >= self.time() + CLOCK_RESOLUTION_S


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a fresh virtual loop.

    Raises:
        LoopStalledError: it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
