"""Reads that repeat, counted instead of stored one by one (AD-101). Pure.

Whoever operates a server polls its profile every few seconds, and each row of the audit chain is kept for ever. So the
first read of a kind is stored at once; those that follow within a window are counted, and stored as one row with their
number when the window ends. Mutations, refusals and cancellations are never counted together.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Final

from iop.admin.journal import AuditEntry

__all__ = ["ReadTally"]

WINDOW_S: Final = 300.0
"""A poller costs one row in this time. Longer leaves more to be lost by a crash, which the log still has one by one."""

KINDS_MAX: Final = 1024
"""Kinds of reads that are counted at once; beyond it the oldest is stored and begun anew."""

_Key = tuple[str, str, str, str]


@dataclasses.dataclass(slots=True)
class _Window:
    until: float
    last: AuditEntry
    count: int = 0


class ReadTally:
    """What was read and is not stored yet."""

    def __init__(self) -> None:
        self._windows: OrderedDict[_Key, _Window] = OrderedDict()

    def note(self, entry: AuditEntry, *, now: float) -> list[AuditEntry]:
        """Take one read; returns what is to be stored for it, which may be nothing yet."""
        key = _key(entry)
        window = self._windows.get(key)
        if window is not None:
            window.last, window.count = entry, window.count + 1
            return self.due(now)
        stored = [entry]
        while len(self._windows) >= KINDS_MAX:
            stored += _summed(self._windows.popitem(last=False)[1])
        self._windows[key] = _Window(now + WINDOW_S, entry)
        return stored

    def due(self, now: float) -> list[AuditEntry]:
        """Counts whose window is over. What was read in it is counted on; what was not is forgotten."""
        stored: list[AuditEntry] = []
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if window.until > now:
                break
            del self._windows[key]
            if window.count:
                stored += _summed(window)
                self._windows[key] = _Window(now + WINDOW_S, window.last)
        return stored

    def close(self) -> list[AuditEntry]:
        """All counts; nothing is left."""
        stored = [entry for window in self._windows.values() for entry in _summed(window)]
        self._windows.clear()
        return stored


def _key(entry: AuditEntry) -> _Key:
    """Equal for reads that say the same; the port of a peer says nothing."""
    return entry.principal, entry.peer.rpartition(":")[0], entry.method, entry.operation_id


def _summed(window: _Window) -> list[AuditEntry]:
    if not window.count:
        return []
    return [dataclasses.replace(window.last, reason=f"{window.count} more reads like this")]
