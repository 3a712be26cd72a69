"""The local capacity gate: one per adapter instance, shared by its runs and tunnels (EN-95).

It protects an engine from work that did not come through the Edge's leases, such as the work of a lost
connection that is still dying there while a new one already sends more. It admits or refuses at once and
never queues (EN-117): the queue is the Edge's.
"""

from __future__ import annotations

from typing import Final

SIDE_WORK_MAX: Final = 4
"""Most side work at once; the Edge sends no more (SF-14)."""


class LocalGate:
    """Counts work at one engine. Pure; used on one event loop.

    Args:
        capacity: most work at once.
        long_capacity: most of it with a long context.
    """

    __slots__ = ("_capacity", "_in_flight", "_long_capacity", "_long_in_flight", "_refused", "_side")

    def __init__(self, *, capacity: int, long_capacity: int) -> None:
        self._capacity = capacity
        self._long_capacity = long_capacity
        self._in_flight = 0
        self._long_in_flight = 0
        self._refused = 0
        self._side = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known to be left at the engine, side work included."""
        return not self._in_flight and not self._side

    @property
    def capacity(self) -> int:
        """Most work at once."""
        return self._capacity

    @property
    def long_capacity(self) -> int:
        """Most long-context work at once."""
        return self._long_capacity

    @property
    def in_flight(self) -> int:
        """Work that is not known to have left the engine."""
        return self._in_flight

    @property
    def long_in_flight(self) -> int:
        """Long-context work among it."""
        return self._long_in_flight

    @property
    def refused(self) -> int:
        """How often it was full."""
        return self._refused

    def enter(self, *, is_long: bool) -> bool:
        """Take a place, if there is one. Whoever gets True calls :meth:`leave` exactly once."""
        if self._in_flight >= self._capacity or (is_long and self._long_in_flight >= self._long_capacity):
            self._refused += 1
            return False
        self._in_flight += 1
        self._long_in_flight += is_long
        return True

    def leave(self, *, is_long: bool) -> None:
        """Give a place back."""
        assert self._in_flight > 0
        self._in_flight -= 1
        self._long_in_flight -= is_long
        assert self._long_in_flight >= 0

    def enter_side(self) -> bool:
        """Take a place for work that needs none of the engine's slots, such as counting tokens; it has a bound of
        its own. Whoever gets True calls :meth:`leave_side` exactly once.
        """
        if self._side >= SIDE_WORK_MAX:
            self._refused += 1
            return False
        self._side += 1
        return True

    def leave_side(self) -> None:
        """Give a side place back."""
        assert self._side > 0
        self._side -= 1

    def resize(self, *, capacity: int, long_capacity: int) -> None:
        """Take new bounds; work above them may finish."""
        self._capacity = capacity
        self._long_capacity = long_capacity
