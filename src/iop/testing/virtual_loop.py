"""An event loop whose clock jumps to the next timer when nothing else is to do.

Hours of timeouts pass in milliseconds and in the same order every time. For code whose input and output is all in
memory: real sockets would find that time runs ahead of them, threads that nobody waits for them.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")

CLOCK_RESOLUTION_S: Final = 1e-9


class LoopStalledError(RuntimeError):
    """Nothing is ready, nothing is scheduled: the code under test waits for something that cannot come."""


class _JumpingSelector(selectors.BaseSelector):
    """Never sleeps: moves the clock by what it was asked to wait."""

    def __init__(self) -> None:
        self._real = selectors.DefaultSelector()
        self.now = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
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

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = CLOCK_RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now

    def stand_still(self, seconds: float) -> None:
        """Let time pass without anything running, as when the process is stopped."""
        self._jumping.now += seconds


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a fresh virtual loop.

    Raises:
        LoopStalledError: it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
