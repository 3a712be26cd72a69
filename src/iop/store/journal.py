"""The journal on SQL: `iop.admin.journal.Journal` over SQLAlchemy Core.

One transaction per call. A writing transaction first locks the one `meta` row (on SQLite: the whole file) and checks
its fencing token, so decisions are made on what nobody else can change meanwhile. The snapshot that a decision needs
is kept between writes and used again while `meta.version` stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from iop.admin.audit import chain
from iop.admin.desired import (
    Desired,
    OverrideRecord,
    PauseRecord,
    ProfileRecord,
    QuarantineRecord,
    ReleaseRecord,
    WeightRecord,
)
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
from iop.admin.records import OperationMoves, OperationRecord, OperationSpec, StepRecord
from iop.admin.results import AdminOperationEvent, EventBody, ParticipantStatus, is_terminal
from iop.core.errors import AlreadyExists, LocalProtocolError, NotFound, Unavailable
from iop.core.ids import OperationId, ParticipantId
from iop.store import schema as t
from iop.store.connections import Connection
from iop.store.database import Database
from iop.store.serial import dumps, loads

__all__ = ["SqlJournal"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUMBER_MAX: Final = 2**63 - 1
"""Largest number that a column holds; what callers name may be larger, and then means the same."""

CLOSE_TIMEOUT_S: Final = 5.0
"""How long closing waits for a read or write under way; each takes milliseconds."""

_ITEMS: Final[Mapping[str, tuple[str, Any, Callable[[str], Any]]]] = {
    "pause": ("pauses", PauseRecord, int),
    "release": ("releases", ReleaseRecord, int),
    "quarantine": ("quarantines", QuarantineRecord, str),
    "weights": ("weights", WeightRecord, str),
    "profile": ("profiles", ProfileRecord, str),
    "override": ("overrides", OverrideRecord, str),
}
"""Stored kind -> field of `Desired`, its record type, and how its key is read."""

_FINISHED: Final = [s.value for s in AdminOperationState if s.is_terminal]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cached:
    """The state at one version: desired, and running operations with their statuses."""

    version: int
    desired: Desired
    running: Mapping[OperationId, OperationRecord]

    def snapshot(self) -> Snapshot:
        """What decisions see: operations without statuses."""
        bare = {op: dataclasses.replace(r, statuses={}) for op, r in self.running.items()}
        return Snapshot(desired=self.desired, running=bare)


class SqlJournal:
    """A journal in a database.

    Args:
        url: `sqlite:///FILE` or `postgresql://...`.
        unix_nanos: stamps events.
    """

    def __init__(self, url: str, *, unix_nanos: Callable[[], int]) -> None:
        self._database = Database(url)
        self._unix_nanos = unix_nanos
        self._token = 0
        self._cached: _Cached | None = None
        self._writing = asyncio.Lock()
        self._in_use = 0
        self._idle = asyncio.Event()

    # --- lease --------------------------------------------------------------------------------------------------------

    async def acquire(self, owner: str) -> int:
        """Lock, migrate, and fence off whoever wrote before (AD-100)."""
        await self._database.take_lock()
        async with _translated():
            await self._database.migrate()
            async with self._database.writer.connect() as connection:
                row = await connection.one(sa.select(t.meta.c.token).with_for_update())
                token = int(row.token) + 1
                await connection.execute(
                    sa.update(t.meta).values(token=token, owner=owner, version=t.meta.c.version + 1)
                )
                row = await connection.one(sa.select(t.meta))
                cached = await self._read_state(connection, row)
                await connection.commit()
        self._cached = cached
        self._token = token
        logger.info("store.acquired token=%d", token)
        return token

    async def aclose(self) -> None:
        """Close the store, after whoever is using it right now. Idempotent."""
        self._token = 0
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._in_use:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("store.closed_in_use users=%d", self._in_use)
        finally:
            await self._database.aclose()

    @contextlib.asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        """Count a user, so that no connection is out when the store closes: it would never be closed itself."""
        self._in_use += 1
        try:
            async with _translated():
                yield
        finally:
            self._in_use -= 1
            self._idle.set()

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[Connection]:
        async with self._using(), self._database.reader.connect() as connection:
            yield connection

    async def check_writable(self) -> None:
        """Write the row of counters as it is, and take it back."""

        async def probe(connection: Connection, _cached: _Cached) -> None:
            await connection.execute(sa.update(t.meta).values(owner=t.meta.c.owner))
            raise _RollBackError

        with contextlib.suppress(_RollBackError):
            await self._write(probe)

    # --- the one way to write -----------------------------------------------------------------------------------------

    async def _write(self, body: Callable[[Connection, _Cached], Any]) -> Any:
        """Run `body` in a writing transaction with the current state."""
        async with self._writing, self._using(), self._database.writer.connect() as connection:
            row = await connection.one(sa.select(t.meta).with_for_update())
            if self._token == 0 or row.token != self._token:
                raise Unavailable("another process took the store over", reason="LEASE_LOST")
            cached = self._cached
            if cached is None or cached.version != row.version:
                cached = await self._read_state(connection, row)
            result, after = await body(connection, cached) or (None, cached)
            try:
                await connection.commit()
            except BaseException:
                # Committed or not, who knows: read it again.
                self._cached = None
                raise
            self._cached = after
            return result

    async def _read_state(self, connection: Connection, row: Any) -> _Cached:
        desired = Desired(
            revision=row.revision,
            last_epoch=row.last_epoch,
            last_ordinal=row.last_ordinal,
            **await _read_items(connection),
        )
        found = await connection.all(
            sa.select(t.operations.c.spec, t.operations.c.moves).where(t.operations.c.state.not_in(_FINISHED))
        )
        running: dict[OperationId, OperationRecord] = {}
        for each in found:
            spec = loads(each.spec, OperationSpec)
            statuses = await _read_statuses(connection, spec.operation_id)
            running[spec.operation_id] = OperationRecord(
                spec=spec, moves=loads(each.moves, OperationMoves), statuses=statuses
            )
        return _Cached(version=row.version, desired=desired, running=running)

    async def _bump(
        self,
        connection: Connection,
        cached: _Cached,
        desired: Desired | None,
        changed: Mapping[OperationId, OperationRecord],
    ) -> _Cached:
        """Write the counters and changed desired items; returns the state after the transaction."""
        after = desired or cached.desired
        await _write_items(connection, cached.desired, after)
        await connection.execute(
            sa.update(t.meta).values(
                version=cached.version + 1,
                revision=after.revision,
                last_epoch=after.last_epoch,
                last_ordinal=after.last_ordinal,
            )
        )
        running = {**cached.running, **changed}
        running = {op: r for op, r in running.items() if not r.moves.state.is_terminal}
        return _Cached(version=cached.version + 1, desired=after, running=running)

    # --- operations ---------------------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        """The state now; from memory when nobody can have changed it: we hold the lease, and no write is under way."""
        cached = self._cached
        if cached is not None and self._token:
            return cached.snapshot()
        async with self._reading() as connection:
            row = await connection.one(sa.select(t.meta))
            return (await self._read_state(connection, row)).snapshot()

    async def find_key(self, claim: KeyClaim) -> Replay | None:
        """The operation of a key (AD-12)."""
        async with self._reading() as connection:
            return await _find_key(connection, claim)

    async def accept(self, claim: KeyClaim, decide: Decide) -> OperationRecord | Replay:
        """Accept or replay in one transaction."""

        async def body(connection: Connection, cached: _Cached) -> tuple[OperationRecord | Replay, _Cached]:
            replay = await _find_key(connection, claim)
            if replay is not None:
                return replay, cached
            acceptance = decide(cached.snapshot())
            spec, first = acceptance.spec, acceptance.first
            assert first.moves is not None
            record = OperationRecord(spec=spec, moves=first.moves)
            await connection.execute(
                sa.insert(t.operations).values(
                    operation_id=spec.operation_id,
                    ordinal=spec.ordinal,
                    kind=spec.kind.value,
                    state=first.moves.state.value,
                    principal=claim.principal,
                    idempotency_key=claim.key,
                    request_sha256=claim.request_sha256,
                    spec=dumps(spec, OperationSpec),
                    moves=dumps(first.moves, OperationMoves),
                )
            )
            changed = {
                op: await self._apply(connection, cached.running[op], advance)
                for op, advance in acceptance.others.items()
            }
            changed[spec.operation_id] = await self._apply(connection, record, first)
            after = await self._bump(connection, cached, first.desired, changed)
            return changed[spec.operation_id], after

        accepted: OperationRecord | Replay = await self._write(body)
        return accepted

    async def advance(self, operation_id: OperationId, move: Move) -> OperationRecord:
        """Move one operation on in one transaction."""

        async def body(connection: Connection, cached: _Cached) -> tuple[OperationRecord, _Cached]:
            record = cached.running.get(operation_id)
            if record is None:
                record = await _read_record(connection, operation_id)
            if record is None:
                raise NotFound("no such operation", reason="OPERATION_NOT_FOUND")
            advance = move(cached.snapshot(), record)
            if advance is None:
                return record, cached
            moved = await self._apply(connection, record, advance)
            after = await self._bump(connection, cached, advance.desired, {operation_id: moved})
            return moved, after

        moved: OperationRecord = await self._write(body)
        return moved

    async def _apply(
        self, connection: Connection, record: OperationRecord, advance: Advance
    ) -> OperationRecord:
        operation_id = record.operation_id
        if advance.events and record.moves.state.is_terminal:
            raise LocalProtocolError("an event after the terminal one", reason="AFTER_TERMINAL")
        first = record.moves.last_sequence + 1
        if advance.events:
            await self._insert_events(connection, operation_id, first, advance.events)
        moves = dataclasses.replace(
            advance.moves or record.moves, last_sequence=first + len(advance.events) - 1
        )
        await connection.execute(
            sa.update(t.operations)
            .where(t.operations.c.operation_id == operation_id)
            .values(
                state=moves.state.value,
                moves=dumps(moves, OperationMoves),
                ended_at_unix_nanos=moves.ended_at_unix_nanos,
            )
        )
        await connection.upsert(
            t.statuses,
            [
                {
                    "operation_id": operation_id,
                    "participant_id": s.participant_id,
                    "body": dumps(s, ParticipantStatus),
                }
                for s in advance.statuses
            ],
        )
        await connection.upsert(
            t.steps,
            [
                {
                    "operation_id": operation_id,
                    "step": s.step,
                    "group_id": s.group_id,
                    "body": dumps(s, StepRecord),
                }
                for s in advance.steps
            ],
        )
        statuses = {**record.statuses, **{s.participant_id: s for s in advance.statuses}}
        return OperationRecord(spec=record.spec, moves=moves, statuses=statuses)

    async def _insert_events(
        self,
        connection: Connection,
        operation_id: OperationId,
        first: int,
        bodies: Sequence[EventBody],
    ) -> None:
        if any(is_terminal(body) for body in bodies[:-1]):
            raise LocalProtocolError("an event after the terminal one", reason="AFTER_TERMINAL")
        now = self._unix_nanos()
        rows = [
            {
                "operation_id": operation_id,
                "sequence": first + index,
                "at_unix_nanos": now,
                "is_terminal": is_terminal(body),
                "body": dumps(body, EventBody),
            }
            for index, body in enumerate(bodies)
        ]
        try:
            await connection.execute(sa.insert(t.events), rows)
        except sa.exc.IntegrityError as exc:
            raise LocalProtocolError("the events do not fit", reason="EVENT_CONFLICT") from exc

    async def amend(self, change: Amend) -> Desired:
        """Change the desired state."""

        async def body(connection: Connection, cached: _Cached) -> tuple[Desired, _Cached]:
            desired = change(cached.snapshot())
            if desired is None:
                return cached.desired, cached
            return desired, await self._bump(connection, cached, desired, {})

        amended: Desired = await self._write(body)
        return amended

    # --- reading ------------------------------------------------------------------------------------------------------

    async def load(self, operation_id: str) -> OperationRecord | None:
        """One operation."""
        async with self._reading() as connection:
            return await _read_record(connection, operation_id)

    async def events(
        self, operation_id: str, *, after_sequence: int, limit: int
    ) -> Sequence[AdminOperationEvent]:
        """Events after a sequence."""
        query = (
            sa.select(t.events)
            .where(
                t.events.c.operation_id == operation_id,
                t.events.c.sequence > min(after_sequence, NUMBER_MAX),
            )
            .order_by(t.events.c.sequence)
            .limit(limit)
        )
        async with self._reading() as connection:
            rows = await connection.all(query)
        return tuple(
            AdminOperationEvent(
                operation_id=row.operation_id,
                sequence=row.sequence,
                timestamp_unix_nanos=row.at_unix_nanos,
                event=loads(row.body, EventBody),  # type: ignore[arg-type]  # a union is its type
            )
            for row in rows
        )

    async def steps(self, operation_id: str) -> Sequence[StepRecord]:
        """Step records by (step, group)."""
        query = (
            sa.select(t.steps.c.body)
            .where(t.steps.c.operation_id == operation_id)
            .order_by(t.steps.c.step, t.steps.c.group_id)
        )
        async with self._reading() as connection:
            return tuple(loads(text, StepRecord) for (text,) in await connection.all(query))

    async def list_operations(
        self,
        *,
        before_ordinal: int | None,
        limit: int,
        kinds: frozenset[AdminOperationKind],
        states: frozenset[AdminOperationState],
    ) -> Sequence[OperationRecord]:
        """Operations, newest first."""
        query = sa.select(t.operations.c.spec, t.operations.c.moves).order_by(t.operations.c.ordinal.desc())
        if before_ordinal is not None:
            query = query.where(t.operations.c.ordinal < min(before_ordinal, NUMBER_MAX))
        if kinds:
            query = query.where(t.operations.c.kind.in_([k.value for k in kinds]))
        if states:
            query = query.where(t.operations.c.state.in_([s.value for s in states]))
        async with self._reading() as connection:
            rows = await connection.all(query.limit(limit))
            records = []
            for row in rows:
                spec = loads(row.spec, OperationSpec)
                statuses = await _read_statuses(connection, spec.operation_id)
                records.append(
                    OperationRecord(spec=spec, moves=loads(row.moves, OperationMoves), statuses=statuses)
                )
            return tuple(records)

    # --- content, retention, audit ------------------------------------------------------------------------------------

    async def put_blob(self, digest: bytes, content: bytes) -> None:
        """Keep content under its digest."""

        async def body(connection: Connection, _cached: _Cached) -> None:
            await connection.upsert(t.blobs, [{"digest": digest, "content": content}])

        await self._write(body)

    async def get_blob(self, digest: bytes) -> bytes | None:
        """Content by digest."""
        async with self._reading() as connection:
            query = sa.select(t.blobs.c.content).where(t.blobs.c.digest == digest)
            content = await connection.scalar(query)
        return None if content is None else bytes(content)

    async def expire(self, *, ended_before_unix_nanos: int, keep_blobs: frozenset[bytes]) -> int:
        """Forget old operations and unreferenced content."""
        old = sa.select(t.operations.c.operation_id).where(
            t.operations.c.ended_at_unix_nanos < ended_before_unix_nanos
        )

        async def body(connection: Connection, cached: _Cached) -> tuple[int, _Cached]:
            for table in (t.events, t.statuses, t.steps):
                await connection.execute(sa.delete(table).where(table.c.operation_id.in_(old)))
            deleted = await connection.execute(
                sa.delete(t.operations).where(t.operations.c.ended_at_unix_nanos < ended_before_unix_nanos)
            )
            await connection.execute(sa.delete(t.blobs).where(t.blobs.c.digest.not_in(keep_blobs)))
            return deleted, cached

        count: int = await self._write(body)
        return count

    async def append_audit(self, entry: AuditEntry) -> AuditRow:
        """Append to the chain (AD-106)."""

        async def body(connection: Connection, cached: _Cached) -> tuple[AuditRow, _Cached]:
            query = sa.select(t.audit).order_by(t.audit.c.index.desc()).limit(1)
            last = await connection.first(query)
            row = chain(None if last is None else _audit_row(last), entry)
            await connection.execute(
                sa.insert(t.audit).values(
                    index=row.index,
                    body=dumps(entry, AuditEntry),
                    previous=row.previous,
                    digest=row.digest,
                )
            )
            return row, cached

        row: AuditRow = await self._write(body)
        return row

    async def audit_rows(self, *, after_index: int, limit: int) -> Sequence[AuditRow]:
        """Audit rows in order."""
        query = sa.select(t.audit).where(t.audit.c.index > after_index).order_by(t.audit.c.index).limit(limit)
        async with self._reading() as connection:
            return tuple(_audit_row(row) for row in await connection.all(query))


class _RollBackError(Exception):
    """Ends a transaction that was only a question."""


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Database errors as ours; the text of the SQL stays inside."""
    try:
        yield
    except sa.exc.SQLAlchemyError as exc:
        logger.warning("store.failed error=%s", type(exc).__name__, exc_info=exc)
        raise Unavailable("the store cannot be used", reason="STORE_UNAVAILABLE") from exc


async def _find_key(connection: Connection, claim: KeyClaim) -> Replay | None:
    query = sa.select(t.operations.c.operation_id, t.operations.c.request_sha256).where(
        t.operations.c.principal == claim.principal, t.operations.c.idempotency_key == claim.key
    )
    row = await connection.first(query)
    if row is None:
        return None
    if bytes(row.request_sha256) != claim.request_sha256:
        raise AlreadyExists(
            "the idempotency key was used with another request",
            reason="IDEMPOTENCY_KEY_REUSED",
            details={"operation_id": row.operation_id},
        )
    return Replay(operation_id=OperationId(row.operation_id))


async def _read_record(connection: Connection, operation_id: str) -> OperationRecord | None:
    query = sa.select(t.operations.c.spec, t.operations.c.moves).where(
        t.operations.c.operation_id == operation_id
    )
    row = await connection.first(query)
    if row is None:
        return None
    return OperationRecord(
        spec=loads(row.spec, OperationSpec),
        moves=loads(row.moves, OperationMoves),
        statuses=await _read_statuses(connection, operation_id),
    )


async def _read_statuses(
    connection: Connection, operation_id: str
) -> Mapping[ParticipantId, ParticipantStatus]:
    query = sa.select(t.statuses.c.body).where(t.statuses.c.operation_id == operation_id)
    found = [loads(text, ParticipantStatus) for (text,) in await connection.all(query)]
    return {s.participant_id: s for s in found}


async def _read_items(connection: Connection) -> dict[str, Any]:
    items: dict[str, dict[Any, Any]] = {field: {} for field, _, _ in _ITEMS.values()}
    for row in await connection.all(sa.select(t.desired_items)):
        field, record_type, read_key = _ITEMS[row.kind]
        items[field][read_key(row.key)] = loads(row.body, record_type)
    return items


async def _write_items(connection: Connection, before: Desired, after: Desired) -> None:
    """Only what differs; identity of records is enough to see that one did not change."""
    for kind, (field, record_type, _) in _ITEMS.items():
        old, new = getattr(before, field), getattr(after, field)
        if old is new:
            continue
        gone = [str(key) for key in old if key not in new]
        if gone:
            await connection.execute(
                sa.delete(t.desired_items).where(
                    t.desired_items.c.kind == kind, t.desired_items.c.key.in_(gone)
                )
            )
        await connection.upsert(
            t.desired_items,
            [
                {"kind": kind, "key": str(key), "body": dumps(record, record_type)}
                for key, record in new.items()
                if old.get(key) is not record
            ],
        )


def _audit_row(row: Any) -> AuditRow:
    return AuditRow(
        index=row.index,
        entry=loads(row.body, AuditEntry),
        previous=bytes(row.previous),
        digest=bytes(row.digest),
    )
