"""Time as a value: clocks are passed in, deadlines are absolute.

Pure code takes ``now`` as a float of monotonic seconds and never asks a clock. Shells hold a :class:`Clock`.
"""

from __future__ import annotations

from typing import NewType, Protocol

Monotonic = NewType("Monotonic", float)
"""Seconds on a clock that never jumps; the only time that decides anything (EN-113)."""


class Clock(Protocol):
    """Where a shell takes its time from."""

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps; comparable within this process only."""
        ...

    def unix_nanos(self) -> int:
        """Wall time in nanoseconds since 1970, for records that people read; decides nothing."""
        ...
