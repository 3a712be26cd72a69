"""Keys that are not what makes a retry the same operation (AD-12)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, Final

from iop.admin.core import AdminCore, MutationCall
from iop.admin.journal import Decide, KeyClaim, Replay
from iop.admin.records import OperationRecord
from iop.admin.results import AdminOperationEvent
from iop.core.errors import AlreadyExists, Conflict, IopError
from iop.testing.conformance_site import Recipe
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.wrong_servers.defect import Defect, doctored, with_core

__all__ = ["DEFECTS"]

RIVAL_S: Final = 1.0
"""How long the racing server's first caller waits for a second one."""


class _BurnsKeys(AdminCore):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._burnt: dict[str, bytes] = {}

    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        key = call.request.options.idempotency_key
        if self._burnt.get(key, call.request_sha256) != call.request_sha256:
            raise AlreadyExists("the key was used", reason="IDEMPOTENCY_KEY_REUSED")
        try:
            async for event in super().submit(call):
                yield event
        except IopError:
            self._burnt[key] = call.request_sha256
            raise


class _PlansBurnKeys(_BurnsKeys):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        async for event in super().submit(call):
            yield event
        if call.request.options.validate_only:
            self._burnt[call.request.options.idempotency_key] = call.request_sha256


class _RevisionBeforeKey(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        expected = call.request.options.expected_revision
        current = (await self._journal.snapshot()).desired.revision
        if expected is not None and expected != current and not call.request.options.validate_only:
            raise Conflict(
                f"the revision is {current}",
                reason="REVISION_MISMATCH",
                details={"current_revision": str(current)},
            )
        async for event in super().submit(call):
            yield event


class _RunsReplaysAgain(MemoryJournal):
    def _find_key(self, claim: KeyClaim) -> Replay | None:
        found = super()._find_key(claim)
        if found is not None and self._store.records[found.operation_id].moves.state.is_terminal:
            return None
        return found


class _TakesAnyPayload(MemoryJournal):
    def _find_key(self, claim: KeyClaim) -> Replay | None:
        found = self._store.keys.get((claim.principal, claim.key))
        return Replay(operation_id=found[1]) if found is not None else None


class _SharesKeys(MemoryJournal):
    def _find_key(self, claim: KeyClaim) -> Replay | None:
        return super()._find_key(dataclasses.replace(claim, principal="everybody"))

    async def accept(self, claim: KeyClaim, decide: Decide) -> OperationRecord | Replay:
        return await super().accept(dataclasses.replace(claim, principal="everybody"), decide)


class _Races(MemoryJournal):
    """Looks the key up, then inserts without looking again: of two who look before either inserts, both insert."""

    def __init__(self, store: MemoryStore, **parts: Any) -> None:
        super().__init__(store, **parts)
        self._met: dict[str, asyncio.Event] = {}

    async def find_key(self, claim: KeyClaim) -> Replay | None:
        found = super()._find_key(claim)
        if claim.key in self._met:
            self._met[claim.key].set()
            return found
        met = self._met[claim.key] = asyncio.Event()
        # Whoever comes first stays until somebody else has looked too, so that no machine is too busy for the race.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RIVAL_S):
                await met.wait()
        return found

    def _find_key(self, claim: KeyClaim) -> Replay | None:
        return None


class _ForgetsKeysWhileRunning(MemoryJournal):
    def _find_key(self, claim: KeyClaim) -> Replay | None:
        found = self._store.keys.get((claim.principal, claim.key))
        if found is not None and not self._store.records[found[1]].moves.state.is_terminal:
            return Replay(operation_id=found[1])  # whatever the payload is
        return super()._find_key(claim)


def _last_only(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [event] if event.is_terminal else []


def _renumbered(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [dataclasses.replace(event, sequence=event.sequence + 100)]


def _restamped(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [dataclasses.replace(event, timestamp_unix_nanos=event.timestamp_unix_nanos + 1)]


def _renamed(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [dataclasses.replace(event, operation_id=f"{event.operation_id}-again")]


DEFECTS = (
    Defect(
        name="a refusal burns the key", caught_by=("AD-12-refusal-keeps-key",), recipe=with_core(_BurnsKeys)
    ),
    Defect(
        name="a plan burns the key", caught_by=("AD-105-changes-nothing",), recipe=with_core(_PlansBurnKeys)
    ),
    Defect(
        name="the revision is compared before the key is looked up",
        caught_by=("AD-12-retry-of-success", "AD-17-key-before-revision"),
        recipe=with_core(_RevisionBeforeKey),
    ),
    Defect(
        name="a replay runs again",
        caught_by=("AD-12-replay", "AD-12-one-effect"),
        recipe=Recipe(journal=_RunsReplaysAgain),
    ),
    Defect(
        name="another payload is taken for a replay",
        caught_by=("AD-12-other-payload",),
        recipe=Recipe(journal=_TakesAnyPayload),
    ),
    Defect(
        name="another payload is taken for a replay while it runs",
        caught_by=("AD-12-running",),
        recipe=Recipe(journal=_ForgetsKeysWhileRunning),
    ),
    Defect(
        name="keys of all principals are one", caught_by=("AD-12-scope",), recipe=Recipe(journal=_SharesKeys)
    ),
    Defect(name="racing callers run twice", caught_by=("AD-12-race",), recipe=Recipe(journal=_Races)),
    Defect(
        name="a replay tells the end only",
        caught_by=("AD-12-replay",),
        recipe=doctored(_last_only, replays_only=True),
    ),
    Defect(
        name="a replay has other sequences",
        caught_by=("AD-12-replay",),
        recipe=doctored(_renumbered, replays_only=True),
    ),
    Defect(
        name="a replay has other times",
        caught_by=("AD-12-replay",),
        recipe=doctored(_restamped, replays_only=True),
    ),
    Defect(
        name="a replay has another operation id",
        caught_by=("AD-12-replay",),
        recipe=doctored(_renamed, replays_only=True),
    ),
)
