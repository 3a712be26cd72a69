"""The journal port: the one durable thing that the operation core stands on.

Every write is a transaction whose content a pure function decides from what the transaction itself read. So the rules
of AD-12, AD-13, AD-18 and AD-21 hold whoever writes at the same time: the function sees the truth, and either all of
its answer becomes durable or none. The function may run more than once and must be pure.

An implementation that cannot write raises `Unavailable` (reason STORE_UNAVAILABLE); one whose lease was taken over
raises `Unavailable` (reason LEASE_LOST). Neither leaves anything half-written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from iop.admin.desired import Desired
from iop.admin.enums import AdminOperationKind, AdminOperationState
from iop.admin.records import OperationMoves, OperationRecord, OperationSpec, StepRecord
from iop.admin.results import AdminOperationEvent, EventBody, ParticipantStatus
from iop.core.ids import OperationId

__all__ = [
    "Acceptance",
    "Advance",
    "AuditEntry",
    "AuditRow",
    "Journal",
    "KeyClaim",
    "Replay",
    "Snapshot",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one transaction sees: the desired state and every unfinished operation (without statuses)."""

    desired: Desired
    running: Mapping[OperationId, OperationRecord]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyClaim:
    """An idempotency key as its principal used it (AD-12). Equal digests mean the same payload."""

    principal: str
    key: str
    request_sha256: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What one transaction changes about one operation; `None` and empty mean: as before.

    Attributes:
        moves: the operation's changing part. `last_sequence` is set by the journal.
        events: appended in order; the journal numbers and stamps them.
        statuses: participants that moved.
        steps: step records written or replaced.
        desired: the desired state after it.
    """

    moves: OperationMoves | None = None
    events: tuple[EventBody, ...] = ()
    statuses: tuple[ParticipantStatus, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    desired: Desired | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """A new operation, with its first event, and what its acceptance does to others (AD-18)."""

    spec: OperationSpec
    first: Advance
    others: Mapping[OperationId, Advance] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The key is known with the same payload: this is its operation (AD-12)."""

    operation_id: OperationId


Decide: TypeAlias = Callable[[Snapshot], Acceptance]
Move: TypeAlias = Callable[[Snapshot, OperationRecord], Advance | None]
Amend: TypeAlias = Callable[[Snapshot], Desired | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One call as the audit keeps it (AD-101)."""

    at_unix_nanos: int
    principal: str
    peer: str
    method: str
    outcome: str
    operation_id: str = ""
    request_sha256: bytes = b""
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """An entry in its chain: `digest` covers the entry and `previous` (AD-106)."""

    index: int
    entry: AuditEntry
    previous: bytes
    digest: bytes


class Journal(Protocol):
    """Durable operations. Safe for concurrent use by the tasks of one event loop."""

    async def acquire(self, owner: str) -> int:
        """Become the one process that writes here, and fence off the one before (AD-100).

        Returns:
            The fencing token; rises with every taker. All later writes carry it implicitly.

        Raises:
            Unavailable: STORE_LEASED, another process is alive and holds it.
        """
        ...

    async def aclose(self) -> None:
        """Give the lease and all resources back. Idempotent."""
        ...

    async def check_writable(self) -> None:
        """Find out whether a write would succeed now; writes nothing that stays.

        Raises:
            Unavailable: STORE_UNAVAILABLE or LEASE_LOST.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """The state now."""
        ...

    async def accept(self, claim: KeyClaim, decide: Decide) -> OperationRecord | Replay:
        """Accept one operation, or find the one that its key names.

        The key lookup comes first (AD-12); `decide` is called only for an unknown key and may raise a refusal,
        which leaves nothing behind.

        Raises:
            AlreadyExists: IDEMPOTENCY_KEY_REUSED, the key is known with another payload.
            IopError: whatever `decide` raised.
        """
        ...

    async def find_key(self, claim: KeyClaim) -> Replay | None:
        """The operation of a key, if any. Raises AlreadyExists as `accept` does."""
        ...

    async def advance(self, operation_id: OperationId, move: Move) -> OperationRecord:
        """Move one operation on; `move` returning None writes nothing. Returns the operation after it.

        Raises:
            NotFound: no such operation.
            LocalProtocolError: events after a terminal one (also a constraint of the store, AD-21).
        """
        ...

    async def amend(self, change: Amend) -> Desired:
        """Change the desired state outside of any operation (reconciliation). Returns the state after it."""
        ...

    async def load(self, operation_id: str) -> OperationRecord | None:
        """One operation with its statuses, or None."""
        ...

    async def events(
        self, operation_id: str, *, after_sequence: int, limit: int
    ) -> Sequence[AdminOperationEvent]:
        """Events after a sequence, in order, at most `limit`."""
        ...

    async def steps(self, operation_id: str) -> Sequence[StepRecord]:
        """All step records of an operation, by (step, group)."""
        ...

    async def list_operations(
        self,
        *,
        before_ordinal: int | None,
        limit: int,
        kinds: frozenset[AdminOperationKind],
        states: frozenset[AdminOperationState],
    ) -> Sequence[OperationRecord]:
        """Operations newest first with an ordinal below `before_ordinal`; empty filters match all."""
        ...

    async def put_blob(self, digest: bytes, content: bytes) -> None:
        """Keep content under its SHA-256 until `expire` finds it unreferenced (inline tensors, AD-32)."""
        ...

    async def get_blob(self, digest: bytes) -> bytes | None:
        """Content kept under a digest."""
        ...

    async def expire(self, *, ended_before_unix_nanos: int, keep_blobs: frozenset[bytes]) -> int:
        """Forget operations that ended before a time, with their keys and events. Returns how many."""
        ...

    async def append_audit(self, entry: AuditEntry) -> AuditRow:
        """Append to the audit chain."""
        ...

    async def audit_rows(self, *, after_index: int, limit: int) -> Sequence[AuditRow]:
        """Audit rows in order."""
        ...
