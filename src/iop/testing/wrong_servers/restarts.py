"""What a restart must not lose, lost (AD-12, AD-13, AD-26)."""

from __future__ import annotations

import dataclasses

from iop.testing.conformance_site import Recipe
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.wrong_servers.defect import Defect

__all__ = ["DEFECTS"]


class _Forgetful(MemoryJournal):
    """Every taker of the store but the first finds it without something."""

    async def acquire(self, owner: str) -> int:
        """As the port says, and forget."""
        if self._store.token:
            self.forget(self._store)
        return await super().acquire(owner)

    def forget(self, store: MemoryStore) -> None:
        """What is gone."""
        raise NotImplementedError


def _drop(store: MemoryStore, *, unfinished: bool) -> None:
    gone = [op for op, r in store.records.items() if r.moves.state.is_terminal is not unfinished]
    for operation_id in gone:
        del store.records[operation_id], store.events[operation_id], store.step_records[operation_id]
    store.keys = {key: found for key, found in store.keys.items() if found[1] not in gone}


class _LosesFinished(_Forgetful):
    def forget(self, store: MemoryStore) -> None:
        _drop(store, unfinished=False)


class _LosesUnfinished(_Forgetful):
    def forget(self, store: MemoryStore) -> None:
        _drop(store, unfinished=True)


class _LosesKeys(_Forgetful):
    def forget(self, store: MemoryStore) -> None:
        store.keys = {}


class _LosesPauses(_Forgetful):
    def forget(self, store: MemoryStore) -> None:
        store.desired = dataclasses.replace(store.desired, pauses={})


class _LosesTheRevision(_Forgetful):
    def forget(self, store: MemoryStore) -> None:
        store.desired = dataclasses.replace(store.desired, revision=0)


DEFECTS = (
    Defect(
        name="a restart loses finished operations",
        caught_by=("AD-26-restart-finished",),
        recipe=Recipe(journal=_LosesFinished),
    ),
    Defect(
        name="a restart loses an accepted operation",
        caught_by=("AD-26-restart-running",),
        recipe=Recipe(journal=_LosesUnfinished),
    ),
    Defect(
        name="a restart loses keys", caught_by=("AD-26-restart-finished",), recipe=Recipe(journal=_LosesKeys)
    ),
    Defect(
        name="a restart loses pauses", caught_by=("AD-26-restart-pause",), recipe=Recipe(journal=_LosesPauses)
    ),
    Defect(
        name="a restart loses the revision",
        caught_by=("AD-26-restart-finished",),
        recipe=Recipe(journal=_LosesTheRevision),
    ),
)
