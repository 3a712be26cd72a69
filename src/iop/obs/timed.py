"""Timed actions and repeated events."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client import Histogram

__all__ = ["RepeatLimiter", "timed"]


@contextlib.contextmanager
def timed(
    log: logging.Logger,
    noun: str,
    *,
    monotonic: Callable[[], float],
    duration: Histogram | None = None,
    **fields: object,
) -> Iterator[None]:
    """Log ``noun.started``, then ``.completed`` or ``.failed`` with ``duration_ms``, and feed the histogram.

    A failure is logged without its traceback and raised on: whoever handles it logs the whole chain once.
    """
    begun = monotonic()
    log.debug(f"{noun}.started", extra=fields)  # noqa: G004  (the noun is a constant of the caller)
    outcome = "failed"
    try:
        yield
        outcome = "completed"
    finally:
        elapsed = monotonic() - begun
        if duration is not None:
            duration.observe(elapsed)
        log.info(f"{noun}.{outcome}", extra={**fields, "duration_ms": round(elapsed * 1000, 3)})  # noqa: G004


class RepeatLimiter:
    """Lets an event through at most once per period and key, and tells how many were held back in between.

    Args:
        period_s: shortest time between two events of one key.
        keys_max: keys remembered; the oldest is forgotten first, so hostile keys cost bounded memory.
    """

    def __init__(self, *, period_s: float, keys_max: int = 1024) -> None:
        self._period_s = period_s
        self._keys_max: Final = keys_max
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def admit(self, key: str, *, now: float) -> int | None:
        """None: hold it back. A number: log it, and say that so many were held back before it."""
        last = self._seen.get(key)
        if last is not None and now - last[0] < self._period_s:
            self._seen[key] = (last[0], last[1] + 1)
            return None
        self._seen[key] = (now, 0)
        self._seen.move_to_end(key)
        if len(self._seen) > self._keys_max:
            self._seen.popitem(last=False)
        return 0 if last is None else last[1]
