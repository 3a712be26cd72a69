"""Observers of operations: they are told to look again, and read the journal (AD-22).

A signal carries no event, so a slow observer costs nothing but its own reading, and one that leaves is never missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from iop.admin.journal import Journal
from iop.admin.results import AdminOperationEvent
from iop.core.ids import OperationId

__all__ = ["Announcer", "follow"]

LOOK_AGAIN_S: Final = 5.0
"""How often an observer looks although nobody called: another process may have written."""

SETTLE_WAIT_S: Final = 5.0
"""Longest that a terminal event is kept back for gates to follow it; a driver that hangs must not hide the end."""

BATCH: Final = 256
"""Events per read; bounds what one observer holds."""


class Announcer:
    """Level-triggered signals, one per operation that somebody watches."""

    def __init__(self) -> None:
        self._events: dict[OperationId, asyncio.Event] = {}
        self._watchers: dict[OperationId, int] = {}
        self._executing: set[OperationId] = set()

    def begin(self, operation_id: OperationId) -> None:
        """This process executes the operation: its terminal event waits until gates stand as it says."""
        self._executing.add(operation_id)

    def end(self, operation_id: OperationId) -> None:
        """Nothing of the operation is left to do here."""
        self._executing.discard(operation_id)
        self.announce(operation_id)

    def is_executing(self, operation_id: OperationId) -> bool:
        """Whether this process still has to make gates follow the journal."""
        return operation_id in self._executing

    def announce(self, operation_id: OperationId) -> None:
        """Something was journalled for this operation."""
        event = self._events.get(operation_id)
        if event is not None:
            event.set()
            # Whoever waits holds the old event; the next look uses a new one.
            self._events[operation_id] = asyncio.Event()

    def watch(self, operation_id: OperationId) -> asyncio.Event:
        """The signal of whatever comes after now; take it before reading."""
        self._watchers[operation_id] = self._watchers.get(operation_id, 0) + 1
        return self._events.setdefault(operation_id, asyncio.Event())

    def unwatch(self, operation_id: OperationId) -> None:
        """One observer less."""
        self._watchers[operation_id] -= 1
        if self._watchers[operation_id] == 0:
            del self._watchers[operation_id], self._events[operation_id]


async def follow(
    journal: Journal, announcer: Announcer, operation_id: OperationId, *, after_sequence: int
) -> AsyncIterator[AdminOperationEvent]:
    """Events after a sequence, then live ones, to the terminal one. Closing it only detaches.

    The terminal event comes after the gates that it opens, so that a request sent on its word is let in (AD-39).
    Yields nothing more when the terminal event was seen before.
    """
    last = after_sequence
    while True:
        signal = announcer.watch(operation_id)
        try:
            events = await journal.events(operation_id, after_sequence=last, limit=BATCH)
            for event in events:
                last = event.sequence
                if event.is_terminal:
                    await _settled(announcer, operation_id)
                yield event
                if event.is_terminal:
                    return
            if events:
                continue
            record = await journal.load(operation_id)
            if record is None or (record.moves.state.is_terminal and record.moves.last_sequence <= last):
                return
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await signal.wait()
            except TimeoutError:
                pass
        finally:
            announcer.unwatch(operation_id)


async def _settled(announcer: Announcer, operation_id: OperationId) -> None:
    """Wait, within a bound, until this process has done what the terminal event says."""
    try:
        async with asyncio.timeout(SETTLE_WAIT_S):
            while announcer.is_executing(operation_id):
                signal = announcer.watch(operation_id)
                try:
                    if announcer.is_executing(operation_id):
                        await signal.wait()
                finally:
                    announcer.unwatch(operation_id)
    except TimeoutError:
        pass
