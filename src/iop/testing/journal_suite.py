"""What every journal must do, as tests: memory, SQLite and PostgreSQL run the same suite.

A test module subclasses `JournalSuite` and provides the `open_journal` fixture: an async callable that opens another
journal on the same store, as the next process would.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest

from iop.admin import planner
from iop.admin.audit import find_break
from iop.admin.desired import Desired, QuarantineRecord, WeightRecord, with_item
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    ParticipantPhase,
    PauseMode,
    ReconfigurableField,
    ResourceKind,
    VerificationMethod,
    WeightFormat,
    WeightRetention,
)
from iop.admin.journal import Acceptance, Advance, AuditEntry, Journal, KeyClaim, Replay, Snapshot
from iop.admin.permissions import PRESETS, Principal
from iop.admin.profile import AdminLimits
from iop.admin.records import OperationRecord, StepRecord
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    FileDigest,
    FlushCachesRequest,
    MutationOptions,
    MutationRequest,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    ServingChange,
    UpdateWeightsRequest,
)
from iop.admin.results import (
    AdminError,
    OperationAccepted,
    OperationCompleted,
    OperationFailed,
    OperationProgress,
    ParticipantError,
    ParticipantStatus,
    ParticipantUpdate,
    PauseResult,
)
from iop.admin.steps import ParticipantOutcome, ParticipantReadBack, StepResult, WorkCounts
from iop.core.errors import (
    AlreadyExists,
    IopError,
    LocalProtocolError,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from iop.core.ids import GroupId, OperationId, ParticipantId
from iop.testing.fake_participants import FakeFleet

__all__ = ["JournalSuite", "OpenJournal"]

OpenJournal: TypeAlias = Callable[[], Awaitable[Journal]]

NOW = 1_700_000_000_000_000_000
ROOT = Principal(name="root", permissions=PRESETS["admin"])
A0 = ParticipantId("a/0")


def _options(key: str) -> MutationOptions:
    return MutationOptions(idempotency_key=key, reason="why \u2713")


def pause_request(key: str = "k") -> PauseRequest:
    """A pause of everything."""
    spec = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE)
    return PauseRequest(options=_options(key), target=AllTargets(), pause=spec)


def every_request() -> tuple[MutationRequest, ...]:
    """Requests that between them hold every sort of value that a journal must keep."""
    return (
        pause_request("pause"),
        FlushCachesRequest(
            options=_options("flush"),
            target=AllTargets(),
            kinds=(CacheKind.PREFIX, CacheKind.ENCODER),
            busy_policy=BusyPolicy.PREEMPT,
        ),
        ReleaseResourcesRequest(
            options=_options("release"),
            target=AllTargets(),
            kinds=(ResourceKind.WEIGHTS, ResourceKind.KV_CACHE),
            weight_retention=WeightRetention.OFFLOAD_TO_HOST,
            pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT),
        ),
        UpdateWeightsRequest(
            options=_options("update"),
            model="m",
            source=DiskSource(
                path="/w",
                format=WeightFormat.SAFETENSORS,
                digests=(FileDigest(name="a", sha256=bytes(range(32))),),
            ),
            weight_version="v1",
            cache_policy=CachePolicy.FLUSH,
            quiesce=PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE),
        ),
        ReconfigureServingRequest(
            options=_options("reconfigure"),
            target=AllTargets(),
            changes=(
                ServingChange(field=ReconfigurableField.CAPACITY, value=4),
                ServingChange(field=ReconfigurableField.ENABLED, value=False),
                ServingChange(field=ReconfigurableField.SERVED_ALIASES, value=("x", "y")),
            ),
        ),
    )


def claim_of(request: MutationRequest, *, digest: bytes = bytes(32), principal: str = "root") -> KeyClaim:
    """The key claim of a request."""
    return KeyClaim(principal=principal, key=request.options.idempotency_key, request_sha256=digest)


def accepting(request: MutationRequest, operation_id: str) -> Callable[[Snapshot], Acceptance]:
    """The planner's decision on a request, on a fleet of one group."""
    inp = planner.PlanInput(
        principal=ROOT,
        request=request,
        request_sha256=bytes(32),
        operation_id=OperationId(operation_id),
        participants=FakeFleet({"a": 2}).participants(),
        limits=AdminLimits(),
        now_unix_nanos=NOW,
    )
    return lambda snapshot: planner.accept(inp, snapshot)


async def accepted(journal: Journal, request: MutationRequest, operation_id: str) -> OperationRecord:
    """Accept a request."""
    record = await journal.accept(claim_of(request), accepting(request, operation_id))
    assert isinstance(record, OperationRecord)
    return record


def completing(record: OperationRecord, *, ended_at: int = NOW + 5) -> Advance:
    """A completing transaction, simpler than a real one."""
    result = PauseResult(pause_epoch=1, mode=PauseMode.DRAIN, drained=2)
    moves = dataclasses.replace(
        record.moves,
        state=AdminOperationState.SUCCEEDED,
        ended_at_unix_nanos=ended_at,
        result=result,
    )
    return Advance(moves=moves, events=(OperationCompleted(result=result, revision=1),))


class JournalSuite:
    """Subclass it and provide `open_journal`."""

    has_live_lock = True
    """Whether a second journal is refused while the first one's process lives."""

    @pytest.fixture
    async def journal(self, open_journal: OpenJournal) -> Journal:
        """A journal that holds the lease."""
        journal = await open_journal()
        await journal.acquire("one")
        return journal

    @pytest.mark.clause("AD-20", "AD-21")
    async def test_acceptance_is_the_first_event(self, journal: Journal) -> None:
        record = await accepted(journal, pause_request(), "op-1")
        events = await journal.events("op-1", after_sequence=0, limit=10)
        assert [e.sequence for e in events] == [1]
        assert isinstance(events[0].event, OperationAccepted)
        assert record.moves.last_sequence == 1
        assert (await journal.load("op-1")) == record
        assert (await journal.snapshot()).desired.pauses[1].operation_id == "op-1"

    @pytest.mark.clause("AD-12")
    async def test_a_key_names_its_operation_for_ever_after(self, journal: Journal) -> None:
        request = pause_request()
        await accepted(journal, request, "op-1")
        again = await journal.accept(claim_of(request), accepting(request, "op-2"))
        assert again == Replay(operation_id=OperationId("op-1"))
        assert await journal.find_key(claim_of(request)) == again
        with pytest.raises(AlreadyExists):
            await journal.accept(claim_of(request, digest=b"x" * 32), accepting(request, "op-2"))
        assert await journal.find_key(claim_of(request, principal="other")) is None

    @pytest.mark.clause("AD-12")
    async def test_a_refusal_burns_no_key_and_leaves_nothing(self, journal: Journal) -> None:
        def refuse(_snapshot: Snapshot) -> Acceptance:
            raise PreconditionFailed("no", reason="NO")

        before = await journal.snapshot()
        with pytest.raises(PreconditionFailed):
            await journal.accept(claim_of(pause_request()), refuse)
        assert await journal.find_key(claim_of(pause_request())) is None
        assert await journal.snapshot() == before
        await accepted(journal, pause_request(), "op-1")

    @pytest.mark.clause("AD-12", "AD-21")
    async def test_64_callers_racing_one_key_make_one_operation(self, journal: Journal) -> None:
        request = pause_request()
        outcomes: list[OperationRecord | Replay] = []

        async def race(number: int) -> None:
            outcomes.append(await journal.accept(claim_of(request), accepting(request, f"op-{number}")))

        async with asyncio.TaskGroup() as tasks:
            for number in range(64):
                tasks.create_task(race(number))
        ids = {o.operation_id for o in outcomes}
        assert len(ids) == 1
        assert sum(isinstance(o, OperationRecord) for o in outcomes) == 1

    @pytest.mark.clause("AD-21", "AD-23")
    async def test_an_advance_numbers_events_without_gaps(self, journal: Journal) -> None:
        await accepted(journal, pause_request(), "op-1")
        status = ParticipantStatus(
            participant_id=A0,
            phase=ParticipantPhase.FAILED,
            error=ParticipantError(
                code=AdminErrorCode.PARTICIPANT_FAILED, message="no", step=ParticipantPhase.QUIESCING
            ),
            weight_version="v0",
            bytes_done=1,
            verified_by=VerificationMethod.DIGEST,
        )
        step = StepRecord(
            step=1,
            group_id=GroupId("a"),
            phase_index=0,
            before=(
                ParticipantReadBack(
                    participant_id=A0,
                    paused=None,
                    released=frozenset({ResourceKind.GRAPHS}),
                    cached=((CacheKind.PREFIX, 2),),
                    serving=(
                        (ReconfigurableField.CAPACITY, 4),
                        (ReconfigurableField.ENABLED, True),
                        (ReconfigurableField.SERVED_ALIASES, ("x",)),
                    ),
                ),
            ),
            result=StepResult(
                participants=(ParticipantOutcome(participant_id=A0, content_digest=b"\x00\xff"),),
                work=WorkCounts(kept=2),
            ),
        )
        progress = OperationProgress(phase=ParticipantPhase.QUIESCING, done=0, total=2, unit="participants")
        moved = await journal.advance(
            OperationId("op-1"),
            lambda _s, _r: Advance(
                events=(progress, ParticipantUpdate(status=status)), statuses=(status,), steps=(step,)
            ),
        )
        assert moved.moves.last_sequence == 3
        events = await journal.events("op-1", after_sequence=1, limit=10)
        assert [e.sequence for e in events] == [2, 3]
        assert events[1].event == ParticipantUpdate(status=status)
        loaded = await journal.load("op-1")
        assert loaded is not None and loaded.statuses[A0] == status
        assert tuple(await journal.steps("op-1")) == (step,)

    @pytest.mark.clause("AD-21")
    async def test_nothing_follows_a_terminal_event(self, journal: Journal) -> None:
        await accepted(journal, pause_request(), "op-1")
        await journal.advance(OperationId("op-1"), lambda _s, r: completing(r))
        with pytest.raises(LocalProtocolError):
            await journal.advance(OperationId("op-1"), lambda _s, r: completing(r))
        error = AdminError(code=AdminErrorCode.INTERNAL, message="late")
        with pytest.raises(LocalProtocolError):
            await journal.advance(
                OperationId("op-1"),
                lambda _s, _r: Advance(events=(OperationFailed(error=error, revision=1),)),
            )
        events = await journal.events("op-1", after_sequence=0, limit=10)
        assert [e.is_terminal for e in events] == [False, True]
        assert (await journal.snapshot()).running == {}

    async def test_a_move_of_none_writes_nothing(self, journal: Journal) -> None:
        record = await accepted(journal, pause_request(), "op-1")
        assert await journal.advance(OperationId("op-1"), lambda _s, _r: None) == record
        with pytest.raises(NotFound):
            await journal.advance(OperationId("op-9"), lambda _s, _r: None)

    @pytest.mark.clause("AD-26", "AD-100")
    async def test_the_next_process_finds_everything_as_it_was(
        self, journal: Journal, open_journal: OpenJournal
    ) -> None:
        for number, request in enumerate(every_request()):
            await accepted(journal, request, f"op-{number}")
            await journal.advance(OperationId(f"op-{number}"), lambda _s, r: completing(r))
            await journal.amend(lambda s: dataclasses.replace(s.desired, pauses={}, releases={}))
        await accepted(journal, pause_request("last"), "op-last")

        def change(snapshot: Snapshot) -> Desired:
            desired = snapshot.desired
            quarantine = QuarantineRecord(
                group_id=GroupId("b"),
                participant_ids=(ParticipantId("b/0"),),
                reason="it lied",
                operation_id=OperationId("op-1"),
                since_unix_nanos=NOW,
                instances={ParticipantId("b/0"): "7"},
            )
            weights = WeightRecord(model="m", version="v1", operation_id="op-3", digests={A0: b"\x01"})
            return dataclasses.replace(
                desired,
                revision=7,
                quarantines=with_item(desired.quarantines, quarantine.group_id, quarantine),
                weights=with_item(desired.weights, "m", weights),
            )

        await journal.amend(change)
        snapshot = await journal.snapshot()
        records = await journal.list_operations(
            before_ordinal=None, limit=50, kinds=frozenset(), states=frozenset()
        )
        await journal.aclose()
        successor = await open_journal()
        await successor.acquire("two")
        found = await successor.snapshot()
        assert found.desired == snapshot.desired
        assert dict(found.running) == dict(snapshot.running)
        assert [
            r.spec
            for r in await successor.list_operations(
                before_ordinal=None, limit=50, kinds=frozenset(), states=frozenset()
            )
        ] == [r.spec for r in records]
        await successor.aclose()

    @pytest.mark.clause("AD-100")
    async def test_only_the_holder_of_the_lease_writes(
        self, journal: Journal, open_journal: OpenJournal
    ) -> None:
        successor = await open_journal()
        if self.has_live_lock:
            with pytest.raises(Unavailable) as refusal:
                await successor.acquire("two")
            assert refusal.value.reason == "STORE_LEASED"
            await accepted(journal, pause_request(), "op-1")
        else:
            await successor.acquire("two")
            with pytest.raises(Unavailable) as lost:
                await accepted(journal, pause_request(), "op-1")
            assert lost.value.reason == "LEASE_LOST"
        await successor.aclose()

    async def test_without_a_lease_nothing_is_written(self, open_journal: OpenJournal) -> None:
        journal = await open_journal()
        with pytest.raises(IopError):
            await accepted(journal, pause_request(), "op-1")
        await journal.aclose()

    async def test_listing_is_newest_first_with_filters_and_pages(self, journal: Journal) -> None:
        for number, request in enumerate(every_request()):
            await accepted(journal, request, f"op-{number}")
            await journal.advance(OperationId(f"op-{number}"), lambda _s, r: completing(r))
            await journal.amend(lambda s: dataclasses.replace(s.desired, pauses={}, releases={}))
        everything = await journal.list_operations(
            before_ordinal=None, limit=50, kinds=frozenset(), states=frozenset()
        )
        assert [r.operation_id for r in everything] == ["op-4", "op-3", "op-2", "op-1", "op-0"]
        page = await journal.list_operations(
            before_ordinal=everything[1].spec.ordinal, limit=2, kinds=frozenset(), states=frozenset()
        )
        assert [r.operation_id for r in page] == ["op-2", "op-1"]
        flushes = await journal.list_operations(
            before_ordinal=None,
            limit=50,
            kinds=frozenset({AdminOperationKind.FLUSH_CACHES}),
            states=frozenset({AdminOperationState.SUCCEEDED}),
        )
        assert [r.operation_id for r in flushes] == ["op-1"]

    @pytest.mark.clause("AD-01", "AD-26")
    @pytest.mark.parametrize("number", [2**63 - 1, 2**63, 2**64 - 1])
    async def test_numbers_beyond_all_that_there_are_find_what_they_say(
        self, journal: Journal, number: int
    ) -> None:
        await accepted(journal, every_request()[0], "op-0")
        assert await journal.events("op-0", after_sequence=number, limit=10) == ()
        listed = await journal.list_operations(
            before_ordinal=number, limit=10, kinds=frozenset(), states=frozenset()
        )
        assert [r.operation_id for r in listed] == ["op-0"]

    @pytest.mark.clause("AD-32")
    async def test_content_is_kept_until_unreferenced(self, journal: Journal) -> None:
        await journal.put_blob(b"d1", b"one")
        await journal.put_blob(b"d1", b"one")
        await journal.put_blob(b"d2", b"two")
        assert await journal.get_blob(b"d1") == b"one"
        await journal.expire(ended_before_unix_nanos=0, keep_blobs=frozenset({b"d1"}))
        assert await journal.get_blob(b"d1") == b"one"
        assert await journal.get_blob(b"d2") is None

    @pytest.mark.clause("AD-12")
    async def test_old_operations_are_forgotten_with_their_keys(self, journal: Journal) -> None:
        await accepted(journal, pause_request(), "op-1")
        await journal.advance(OperationId("op-1"), lambda _s, r: completing(r, ended_at=NOW + 5))
        assert await journal.expire(ended_before_unix_nanos=NOW + 5, keep_blobs=frozenset()) == 0
        assert await journal.expire(ended_before_unix_nanos=NOW + 6, keep_blobs=frozenset()) == 1
        assert await journal.load("op-1") is None
        assert await journal.events("op-1", after_sequence=0, limit=5) == ()
        assert await journal.find_key(claim_of(pause_request())) is None

    @pytest.mark.clause("AD-101", "AD-106")
    async def test_audit_rows_form_a_chain(self, journal: Journal) -> None:
        for number in range(3):
            await journal.append_audit(
                AuditEntry(
                    at_unix_nanos=NOW + number,
                    principal="root",
                    peer="127.0.0.1",
                    method="PAUSE",
                    outcome="ACCEPTED",
                    request_sha256=b"\x00" * 32,
                )
            )
        rows = await journal.audit_rows(after_index=0, limit=10)
        assert [r.index for r in rows] == [1, 2, 3]
        assert find_break(rows, head=rows[-1].digest) == ""
        assert "missing" in find_break([rows[0], rows[2]])
        altered = dataclasses.replace(rows[1], entry=dataclasses.replace(rows[1].entry, principal="nobody"))
        assert "altered" in find_break([rows[0], altered, rows[2]])
        assert "not the given head" in find_break(rows[:2], head=rows[-1].digest)

    async def test_the_store_tells_whether_it_can_be_written(self, journal: Journal) -> None:
        before = await journal.snapshot()
        await journal.check_writable()
        assert await journal.snapshot() == before
