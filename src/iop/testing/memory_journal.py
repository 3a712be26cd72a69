"""A journal in memory: the reference for what every journal must do, and the one that simulations use.

It passes the same suite as the durable ones. `on_write` is called before and after every write that changes
something; a simulation crashes the process there by raising.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from iop.admin.audit import chain
from iop.admin.desired import Desired
from iop.admin.enums import AdminOperationKind, AdminOperationState
from iop.admin.journal import (
    Advance,
    Amend,
    AuditEntry,
    AuditRow,
    Decide,
    KeyClaim,
    Move,
    Replay,
    Snapshot,
)
from iop.admin.records import OperationRecord, StepRecord
from iop.admin.results import AdminOperationEvent, is_terminal
from iop.core.errors import AlreadyExists, LocalProtocolError, NotFound, Unavailable
from iop.core.ids import GroupId, OperationId

__all__ = ["MemoryJournal", "MemoryStore"]


@dataclasses.dataclass(slots=True)
class MemoryStore:
    """What survives a crash: shared by the journals of successive processes.

    Attributes:
        running: unfinished operations as snapshots show them, without statuses.
    """

    desired: Desired = dataclasses.field(default_factory=Desired)
    records: dict[OperationId, OperationRecord] = dataclasses.field(default_factory=dict)
    running: dict[OperationId, OperationRecord] = dataclasses.field(default_factory=dict)
    events: dict[OperationId, list[AdminOperationEvent]] = dataclasses.field(default_factory=dict)
    step_records: dict[OperationId, dict[tuple[int, GroupId], StepRecord]] = dataclasses.field(
        default_factory=dict
    )
    keys: dict[tuple[str, str], tuple[bytes, OperationId]] = dataclasses.field(default_factory=dict)
    blobs: dict[bytes, bytes] = dataclasses.field(default_factory=dict)
    audit: list[AuditRow] = dataclasses.field(default_factory=list)
    token: int = 0


def _no_hook(_point: str) -> None:
    return


class MemoryJournal:
    """`iop.admin.journal.Journal` over a `MemoryStore`."""

    def __init__(
        self,
        store: MemoryStore,
        *,
        unix_nanos: Callable[[], int],
        on_write: Callable[[str], None] = _no_hook,
    ) -> None:
        self._store = store
        self._unix_nanos = unix_nanos
        self._on_write = on_write
        self._token = 0
        self.writable = True

    async def acquire(self, owner: str) -> int:
        """Fence off whoever wrote before."""
        self._store.token += 1
        self._token = self._store.token
        return self._token

    async def aclose(self) -> None:
        """Nothing to give back."""

    async def check_writable(self) -> None:
        """Whether a write would succeed."""
        await asyncio.sleep(0)
        self._check_lease()

    def _check_lease(self) -> None:
        if not self.writable:
            raise Unavailable("the store cannot be written", reason="STORE_UNAVAILABLE")
        if self._token == 0 or self._token != self._store.token:
            raise Unavailable("another process took the store over", reason="LEASE_LOST")

    def _snapshot(self) -> Snapshot:
        return Snapshot(desired=self._store.desired, running=dict(self._store.running))

    async def snapshot(self) -> Snapshot:
        """The state now."""
        await asyncio.sleep(0)
        return self._snapshot()

    async def find_key(self, claim: KeyClaim) -> Replay | None:
        """The operation of a key."""
        await asyncio.sleep(0)
        return self._find_key(claim)

    def _find_key(self, claim: KeyClaim) -> Replay | None:
        found = self._store.keys.get((claim.principal, claim.key))
        if found is None:
            return None
        digest, operation_id = found
        if digest != claim.request_sha256:
            raise AlreadyExists(
                "the idempotency key was used with another request",
                reason="IDEMPOTENCY_KEY_REUSED",
                details={"operation_id": operation_id},
            )
        return Replay(operation_id=operation_id)

    async def accept(self, claim: KeyClaim, decide: Decide) -> OperationRecord | Replay:
        """Accept or replay, in one step."""
        await asyncio.sleep(0)
        self._check_lease()
        replay = self._find_key(claim)
        if replay is not None:
            return replay
        acceptance = decide(self._snapshot())
        spec = acceptance.spec
        self._on_write("accept.before")
        self._store.keys[claim.principal, claim.key] = (claim.request_sha256, spec.operation_id)
        assert acceptance.first.moves is not None
        self._store.records[spec.operation_id] = OperationRecord(spec=spec, moves=acceptance.first.moves)
        self._store.events[spec.operation_id] = []
        self._store.step_records[spec.operation_id] = {}
        for operation_id, advance in acceptance.others.items():
            self._apply(operation_id, advance)
        record = self._apply(spec.operation_id, acceptance.first)
        self._on_write("accept.after")
        await asyncio.sleep(0)
        return record

    def _apply(self, operation_id: OperationId, advance: Advance) -> OperationRecord:
        record = self._store.records[operation_id]
        events = self._store.events[operation_id]
        if advance.events and events and events[-1].is_terminal:
            raise LocalProtocolError("an event after the terminal one", reason="AFTER_TERMINAL")
        if any(is_terminal(body) for body in advance.events[:-1]):
            raise LocalProtocolError("an event after the terminal one", reason="AFTER_TERMINAL")
        numbered = [
            AdminOperationEvent(
                operation_id=operation_id,
                sequence=len(events) + index + 1,
                timestamp_unix_nanos=self._unix_nanos(),
                event=body,
            )
            for index, body in enumerate(advance.events)
        ]
        events.extend(numbered)
        moves = dataclasses.replace(advance.moves or record.moves, last_sequence=len(events))
        statuses = {**record.statuses, **{s.participant_id: s for s in advance.statuses}}
        record = OperationRecord(spec=record.spec, moves=moves, statuses=statuses)
        self._store.records[operation_id] = record
        if moves.state.is_terminal:
            self._store.running.pop(operation_id, None)
        else:
            self._store.running[operation_id] = dataclasses.replace(record, statuses={})
        for step in advance.steps:
            self._store.step_records[operation_id][step.step, step.group_id] = step
        if advance.desired is not None:
            self._store.desired = advance.desired
        return record

    async def advance(self, operation_id: OperationId, move: Move) -> OperationRecord:
        """Move one operation on."""
        await asyncio.sleep(0)
        self._check_lease()
        record = self._store.records.get(operation_id)
        if record is None:
            raise NotFound("no such operation", reason="OPERATION_NOT_FOUND")
        advance = move(self._snapshot(), record)
        if advance is None:
            return record
        self._on_write("advance.before")
        record = self._apply(operation_id, advance)
        self._on_write("advance.after")
        await asyncio.sleep(0)
        return record

    async def amend(self, change: Amend) -> Desired:
        """Change the desired state."""
        await asyncio.sleep(0)
        self._check_lease()
        desired = change(self._snapshot())
        if desired is not None:
            self._on_write("amend.before")
            self._store.desired = desired
            self._on_write("amend.after")
        return self._store.desired

    async def load(self, operation_id: str) -> OperationRecord | None:
        """One operation."""
        await asyncio.sleep(0)
        return self._store.records.get(OperationId(operation_id))

    async def events(
        self, operation_id: str, *, after_sequence: int, limit: int
    ) -> Sequence[AdminOperationEvent]:
        """Events after a sequence."""
        await asyncio.sleep(0)
        events = self._store.events.get(OperationId(operation_id), [])
        return tuple(events[after_sequence : after_sequence + limit])

    async def steps(self, operation_id: str) -> Sequence[StepRecord]:
        """Step records by (step, group)."""
        await asyncio.sleep(0)
        found = self._store.step_records.get(OperationId(operation_id), {})
        return tuple(found[key] for key in sorted(found))

    async def list_operations(
        self,
        *,
        before_ordinal: int | None,
        limit: int,
        kinds: frozenset[AdminOperationKind],
        states: frozenset[AdminOperationState],
    ) -> Sequence[OperationRecord]:
        """Operations, newest first."""
        await asyncio.sleep(0)
        found = sorted(self._store.records.values(), key=lambda r: -r.spec.ordinal)
        matching = [
            r
            for r in found
            if (before_ordinal is None or r.spec.ordinal < before_ordinal)
            and (not kinds or r.spec.kind in kinds)
            and (not states or r.moves.state in states)
        ]
        return tuple(matching[:limit])

    async def put_blob(self, digest: bytes, content: bytes) -> None:
        """Keep content."""
        await asyncio.sleep(0)
        self._check_lease()
        self._store.blobs[digest] = content

    async def get_blob(self, digest: bytes) -> bytes | None:
        """Content by digest."""
        await asyncio.sleep(0)
        return self._store.blobs.get(digest)

    async def expire(self, *, ended_before_unix_nanos: int, keep_blobs: frozenset[bytes]) -> int:
        """Forget old operations."""
        await asyncio.sleep(0)
        self._check_lease()
        old = {
            op
            for op, r in self._store.records.items()
            if r.moves.ended_at_unix_nanos is not None
            and r.moves.ended_at_unix_nanos < ended_before_unix_nanos
        }
        for operation_id in old:
            del self._store.records[operation_id]
            del self._store.events[operation_id]
            del self._store.step_records[operation_id]
        self._store.keys = {k: v for k, v in self._store.keys.items() if v[1] not in old}
        self._store.blobs = {d: c for d, c in self._store.blobs.items() if d in keep_blobs}
        return len(old)

    async def append_audit(self, entry: AuditEntry) -> AuditRow:
        """Append to the chain."""
        await asyncio.sleep(0)
        self._check_lease()
        last = self._store.audit[-1] if self._store.audit else None
        row = chain(last, entry)
        self._store.audit.append(row)
        return row

    async def audit_rows(self, *, after_index: int, limit: int) -> Sequence[AuditRow]:
        """Audit rows in order."""
        await asyncio.sleep(0)
        return tuple([r for r in self._store.audit if r.index > after_index][:limit])
