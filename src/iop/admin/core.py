"""`AdminCore`: the facade that a service calls and an application runs.

One core stands for one journal and one fleet. Callers authenticate and decode before, encode after; everything else
about an administration call happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from iop.admin import planner
from iop.admin.audit_trail import AuditTrail
from iop.admin.capability import LIMIT_EXCEEDED, cancellable_kinds
from iop.admin.crew import CrewTiming, read_back_all
from iop.admin.desired import Desired, OverrideRecord
from iop.admin.enums import AdminOperationKind, CancelDisposition
from iop.admin.executions import Executions
from iop.admin.executor import ExecutorPorts, ExecutorTiming
from iop.admin.gates import gates_of
from iop.admin.intent import sourced
from iop.admin.journal import Advance, Journal, KeyClaim
from iop.admin.judging import judge_changes
from iop.admin.listing import PAGE_SIZE_MAX, decode_page_token, encode_page_token
from iop.admin.observers import Announcer, follow
from iop.admin.overrides import following_file, in_force
from iop.admin.participant import ParticipantDriver
from iop.admin.permissions import (
    PERMISSION_OF_KIND,
    Permission,
    Principal,
    may_cancel_anything,
    redact,
    require,
    require_cancel,
)
from iop.admin.profile import AdminLimits, AdminProfile, ParticipantInfo
from iop.admin.profiles import profile_of
from iop.admin.reconciler import Reconciler, ReconcilerTiming
from iop.admin.records import OperationRecord, view_of
from iop.admin.requests import DiskSource, ListOperationsRequest, MutationRequest, kind_of
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    CancelResult,
    OperationAccepted,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPage,
    OperationPlan,
    OperationResult,
)
from iop.admin.shape import check_shape
from iop.admin.spool import check_digests, is_spooled, referenced_blobs, spool, with_content
from iop.core.clock import Clock
from iop.core.errors import (
    Conflict,
    IopError,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from iop.core.ids import OperationId

__all__ = ["AdminCore", "CoreTiming", "MutationCall"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CoreTiming:
    """Every bound of the core that is time.

    Attributes:
        first_look_timeout_s: how long readiness waits for the first reconciliation of connected participants.
        gate_timeout_s: how long outer admission may take to follow; it only flips flags.
        reconcile_wait_s: how long an acceptance waits for participants that just came back.
        store_probe_s: how often the store is asked whether it can be written (AD-06, AD-100).
        expiry_period_s: how often old operations are forgotten.
    """

    executor: ExecutorTiming = dataclasses.field(default_factory=ExecutorTiming)
    reconciler: ReconcilerTiming = dataclasses.field(default_factory=ReconcilerTiming)
    first_look_timeout_s: float = 10.0
    gate_timeout_s: float = 30.0
    reconcile_wait_s: float = 5.0
    store_probe_s: float = 5.0
    expiry_period_s: float = 3600.0

    @classmethod
    def of(cls, *, participant_lost_s: float, read_back_period_s: float) -> CoreTiming:
        """The bounds that a config states; all others as they are by default (AD-25, AD-35)."""
        crew = CrewTiming(lost_after_s=participant_lost_s)
        return cls(
            executor=ExecutorTiming(crew=crew),
            reconciler=ReconcilerTiming(period_s=read_back_period_s, crew=crew),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MutationCall:
    """One mutation as it came in: authenticated and decoded, shape not yet checked beyond its types.

    Attributes:
        request_sha256: 32 bytes over the RPC name and the message without `idempotency_key` and `validate_only`,
            serialised deterministically (AD-12). The surface computes it, since only it has the message.
    """

    principal: Principal
    request: MutationRequest
    request_sha256: bytes


T = TypeVar("T")

_Accepted: TypeAlias = OperationId | IopError


class AdminCore:
    """Accepts, executes, recovers and tells about operations.

    `run()` must be running; before it reports ready, `submit` is refused with UNAVAILABLE.

    Args:
        journal: the durable store; the core acquires its lease and closes it.
        driver: carries steps to participants.
        new_id: makes operation ids, unique for ever.
        owner: names this process in the lease.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        driver: ParticipantDriver,
        clock: Clock,
        new_id: Callable[[], OperationId],
        owner: str,
        limits: AdminLimits | None = None,
        timing: CoreTiming | None = None,
    ) -> None:
        self._journal = journal
        self._driver = driver
        self._clock = clock
        self._new_id = new_id
        self._owner = owner
        self._limits = limits or AdminLimits()
        self._timing = timing or CoreTiming()
        self._announcer = Announcer()
        self._tasks: asyncio.TaskGroup | None = None
        self._ready = asyncio.Event()
        self._store_ok = False
        self._audit = AuditTrail(journal, clock)
        self._gate_lock = asyncio.Lock()
        self._spool_lock = asyncio.Lock()
        self._reconciler = Reconciler(
            journal,
            driver,
            clock,
            self._timing.reconciler,
            regate=self._regate,
            with_content=lambda body: with_content(journal, body),
        )
        ports = ExecutorPorts(
            journal=journal,
            driver=driver,
            clock=clock,
            timing=self._timing.executor,
            max_event_history=self._limits.max_event_history,
            regate=self._regate,
            announce=self._announcer.announce,
            with_content=lambda body: with_content(journal, body),
            last_seen=self._reconciler.last_seen,
        )
        self._executions = Executions(ports, self._announcer, self._reconciler)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take the lease, bring gates in force, recover, then execute and reconcile until cancelled.

        Raises:
            Unavailable: STORE_LEASED at the start, LEASE_LOST later: another process took over.
        """
        try:
            token = await self._journal.acquire(self._owner)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._recover(tasks)
                self._store_ok = True
                self._ready.set()
                logger.info("admin.ready owner=%s token=%d", self._owner, token)
                tasks.create_task(self._reconciler.run(), name="admin reconciler")
                tasks.create_task(self._watch_store(), name="admin store probe")
                tasks.create_task(self._expire(), name="admin expiry")
        except BaseExceptionGroup as group:
            lost = group.subgroup(lambda e: isinstance(e, Unavailable))
            if lost is not None:
                raise _first(lost) from group
            raise
        finally:
            self._ready.clear()
            self._store_ok = False
            self._tasks = None
            try:
                async with asyncio.timeout(self._timing.store_probe_s):
                    await self._audit.close()
            except TimeoutError:
                logger.warning("audit.counts_not_stored")
            finally:
                await self._journal.aclose()

    async def _recover(self, tasks: asyncio.TaskGroup) -> None:
        """Gates first, then unfinished operations, then whoever is connected (AD-26)."""
        await self._reconciler.follow_file()
        await self._regate()
        snapshot = await self._journal.snapshot()
        for operation_id in sorted(snapshot.running, key=lambda i: snapshot.running[i].spec.ordinal):
            tasks.create_task(self._execute(operation_id, is_recovery=True), name=f"op {operation_id}")
            self._executions.expect(operation_id)
        try:
            async with asyncio.timeout(self._timing.first_look_timeout_s):
                await self._executions.wait_revived()
                await self._reconciler.look(everybody=True)
        except TimeoutError:
            logger.warning("admin.first_look_incomplete")

    async def wait_ready(self) -> None:
        """Wait until pauses, releases, quarantines and versions are in force (AD-26): listeners may open."""
        await self._ready.wait()

    @property
    def is_serving(self) -> bool:
        """Ready, and the store can be written; else health says NOT_SERVING (AD-06)."""
        return self._ready.is_set() and self._store_ok

    @property
    def limits(self) -> AdminLimits:
        """The limits that it enforces and advertises."""
        return self._limits

    def participants_changed(self) -> None:
        """Tell the core that a participant joined, left or restarted: look again (AD-35). Never blocks."""
        self._reconciler.look_again()
        self._executions.wake()

    async def _regate(self) -> None:
        """Make outer admission follow the journal, overrides before gates; the last caller's view wins."""
        async with self._gate_lock:
            snapshot = await self._journal.snapshot()
            participants = self._driver.participants()
            # A file that was changed counts at once, also before the journal follows it (AD-47).
            desired = following_file(snapshot.desired, self._driver.file_values()) or snapshot.desired
            self._driver.apply_overrides(in_force(desired))
            gates = gates_of(
                desired,
                snapshot.running,
                participants,
                unreconciled=self._reconciler.unreconciled(participants),
            )
            try:
                async with asyncio.timeout(self._timing.gate_timeout_s):
                    await self._driver.apply_gates(gates)
            except TimeoutError:
                raise Unavailable("admission did not follow in time", reason="GATES_NOT_APPLIED") from None

    async def _watch_store(self) -> None:
        while True:
            await asyncio.sleep(self._timing.store_probe_s)
            try:
                await self._journal.check_writable()
            except Unavailable as exc:
                if exc.reason == "LEASE_LOST":
                    raise
                if self._store_ok:
                    logger.error("store.unwritable error=%s", exc)
                self._store_ok = False
            else:
                self._store_ok = True
                await self._audit.count_reads()

    async def _expire(self) -> None:
        """Forget what was promised no longer: keys and operations past their retention (AD-12)."""
        retention_ms = max(self._limits.operation_retention_ms, self._limits.idempotency_retention_ms)
        while True:
            await asyncio.sleep(self._timing.expiry_period_s)
            before = self._clock.unix_nanos() - retention_ms * 1_000_000
            try:
                async with self._spool_lock:
                    snapshot = await self._journal.snapshot()
                    count = await self._journal.expire(
                        ended_before_unix_nanos=before, keep_blobs=referenced_blobs(snapshot)
                    )
                await self._forget_profiles(snapshot.desired, before)
            except Unavailable as exc:
                logger.warning("operations.expiry_failed error=%s", exc)
            else:
                logger.info("operations.expired count=%d", count)

    async def _forget_profiles(self, desired: Desired, before_unix_nanos: int) -> None:
        """Profiles go as the operations do that started and stopped them; their artifacts are named no more."""
        old = {i: p for i, p in desired.profiles.items() if p.last_unix_nanos < before_unix_nanos}
        if any(not p.stopped for p in old.values()):
            ended = await self._ended_profiles()
            old = {i: p for i, p in old.items() if p.stopped or i in ended}
        if old:
            await self._journal.amend(
                lambda s: dataclasses.replace(
                    s.desired, profiles={i: p for i, p in s.desired.profiles.items() if i not in old}
                )
            )

    async def _execute(self, operation_id: OperationId, *, is_recovery: bool) -> None:
        await self._executions.run(operation_id, is_recovery=is_recovery)

    # --- mutations ----------------------------------------------------------------------------------------------------

    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        """Check, accept and observe one mutation; closing the iterator only detaches (AD-22).

        The first event leaves after acceptance is durable (AD-20). With `validate_only`: exactly one plan event.

        Raises (at the first `__anext__`, before anything is journalled):
            IopError: a refusal, in the order of AD-17.
        """
        principal, request = call.principal, call.request
        method = kind_of(request).name
        try:
            require(principal, PERMISSION_OF_KIND[kind_of(request)])
            check_shape(request, self._limits)
            if request.options.validate_only:
                plan = await self._plan(call)
                outcome: OperationId | OperationPlan = plan
            else:
                outcome = await self._accept_shielded(call)
        except IopError as refusal:
            await self._audit.note(principal, method, outcome=refusal.reason, digest=call.request_sha256)
            raise
        reason = request.options.reason
        if isinstance(outcome, OperationPlan):
            await self._audit.note(
                principal, method, outcome="PLANNED", digest=call.request_sha256, reason=reason
            )
            yield AdminOperationEvent(
                operation_id="",
                sequence=0,
                timestamp_unix_nanos=self._clock.unix_nanos(),
                event=outcome,
            )
            return
        await self._audit.note(
            principal,
            method,
            outcome="ACCEPTED",
            operation_id=outcome,
            digest=call.request_sha256,
            reason=reason,
        )
        async for event in follow(self._journal, self._announcer, outcome, after_sequence=0):
            yield event

    async def run_to_end(self, call: MutationCall) -> OperationResult | OperationPlan:
        """Submit and wait for the result: the unary form of StartProfile and StopProfile (AD-46).

        Raises:
            Conflict: OPERATION_FAILED with the operation id, when it failed or was cancelled after acceptance.
            IopError: a refusal.
        """
        async for event in self.submit(call):
            match event.event:
                case OperationPlan() as plan:
                    return plan
                case OperationCompleted(result=result):
                    return result
                case OperationFailed(error=error):
                    raise _failed(event.operation_id, error.message)
                case OperationCancelled(reason=reason):
                    raise _failed(event.operation_id, reason)
                case _:
                    pass
        raise Unavailable("the observation ended before the operation", reason="DETACHED")

    def _plan_input(self, call: MutationCall, operation_id: OperationId) -> planner.PlanInput:
        return planner.PlanInput(
            principal=call.principal,
            request=call.request,
            request_sha256=call.request_sha256,
            operation_id=operation_id,
            participants=self._selectable(),
            limits=self._limits,
            now_unix_nanos=self._clock.unix_nanos(),
        )

    def _selectable(self) -> Sequence[ParticipantInfo]:
        """Participants as operations may select them: one that is not reconciled yet counts as offline (AD-35)."""
        participants = self._driver.participants()
        unreconciled = self._reconciler.unreconciled(participants)
        return [
            dataclasses.replace(p, connected=False) if p.group_id in unreconciled else p for p in participants
        ]

    def _require_ready(self) -> None:
        if not self._ready.is_set():
            raise Unavailable("the server is starting", reason="NOT_READY", retry_after_s=1.0)

    async def _plan(self, call: MutationCall) -> OperationPlan:
        self._require_ready()
        check_digests(call.request)
        inp = await self._judged(self._plan_input(call, self._new_id()))
        plan = planner.explain(inp, await self._journal.snapshot())
        if not self.is_serving:
            return dataclasses.replace(plan, blockers=("STORE_UNAVAILABLE", *plan.blockers))
        return plan

    async def _judged(self, inp: planner.PlanInput) -> planner.PlanInput:
        """Add what only participants can tell: their judgement of a reconfiguration (AD-47), profiles that ended."""
        if kind_of(inp.request) is AdminOperationKind.START_PROFILE:
            return dataclasses.replace(inp, ended_profiles=await self._ended_profiles())
        if kind_of(inp.request) is not AdminOperationKind.RECONFIGURE_SERVING:
            return inp
        snapshot = await self._journal.snapshot()
        # A limit is judged with all the other fields: its refusal lists every judgement.
        if any(r.reason != LIMIT_EXCEEDED for r in planner.refusals(inp, snapshot)):
            return inp
        # Not later than what acceptance will allot, or the judgement would fence off the operation's own steps.
        ordinal = snapshot.desired.next_ordinal(now_us=inp.now_unix_nanos // 1000)
        blockers = await judge_changes(
            self._driver,
            inp.request,
            operation_id=inp.operation_id,
            ordinal=ordinal,
            participants=inp.participants,
            timeout_s=self._timing.executor.crew.read_back_timeout_s,
        )
        return dataclasses.replace(inp, blockers=blockers)

    async def _ended_profiles(self) -> frozenset[str]:
        """Profiles that nobody stopped, but that run nowhere: they reached their bound (AD-46)."""
        snapshot = await self._journal.snapshot()
        running = [p for p in snapshot.desired.profiles.values() if not p.stopped]
        ids = sorted({i for p in running for i in p.participant_ids})
        seen = await read_back_all(
            self._driver, ids, timeout_s=self._timing.executor.crew.read_back_timeout_s
        )
        return frozenset(
            p.profile_id
            for p in running
            if all(
                s.profiles is not None and p.profile_id not in s.profiles
                for s in (seen[i] for i in p.participant_ids)
            )
        )

    async def _accept_shielded(self, call: MutationCall) -> OperationId:
        """Accept in a task of our own: a caller who leaves meanwhile must not leave an accepted operation idle."""
        self._require_ready()
        outcome = await asyncio.shield(self._spawn(self._accept_or_refusal(call), name="admin accept"))
        if isinstance(outcome, IopError):
            raise outcome
        return outcome

    def _spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task of the core's own.

        Raises:
            Unavailable: NOT_READY, the server is stopping.
        """
        try:
            if self._tasks is not None:
                return self._tasks.create_task(work, name=name)
        except RuntimeError:
            pass  # the group is shutting down
        work.close()
        raise Unavailable("the server is stopping", reason="NOT_READY", retry_after_s=1.0)

    async def _accept_or_refusal(self, call: MutationCall) -> _Accepted:
        try:
            return await self._accept(call)
        except IopError as refusal:
            if refusal.reason == "STORE_UNAVAILABLE":
                self._store_ok = False
            return refusal

    async def _accept(self, call: MutationCall) -> OperationId:
        claim = KeyClaim(
            principal=call.principal.name,
            key=call.request.options.idempotency_key,
            request_sha256=call.request_sha256,
        )
        # A retry of a success is never refused by its own effects, so the key comes before everything (AD-12).
        replay = await self._journal.find_key(claim)
        if replay is not None:
            return replay.operation_id
        await self._reconciler.settled(timeout_s=self._timing.reconcile_wait_s)
        # What is spooled belongs to nobody until it is accepted, and is not to be forgotten in between.
        async with self._spool_lock if is_spooled(call.request) else contextlib.nullcontext():
            call = dataclasses.replace(call, request=await spool(self._journal, call.request))
            inp = await self._judged(self._plan_input(call, self._new_id()))
            accepted = await self._journal.accept(claim, lambda snapshot: planner.accept(inp, snapshot))
        if not isinstance(accepted, OperationRecord):
            return accepted.operation_id
        self._store_ok = True
        operation_id = accepted.operation_id
        _ = self._spawn(self._execute(operation_id, is_recovery=False), name=f"op {operation_id}")
        self._executions.drop_superseded(accepted)
        return operation_id

    # --- reading ------------------------------------------------------------------------------------------------------

    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        """The whole state of one operation (AD-23). Raises NotFound."""
        await self._audit.authorize(principal, Permission.GET, "GET_OPERATION", operation_id)
        return redact(view_of(await self._load(operation_id)), principal)

    async def list_operations(self, principal: Principal, request: ListOperationsRequest) -> OperationPage:
        """One page, newest first. Raises InvalidRequest on a foreign page token."""
        await self._audit.authorize(principal, Permission.LIST, "LIST_OPERATIONS")
        size = min(request.page_size or PAGE_SIZE_MAX, PAGE_SIZE_MAX)
        records = await self._journal.list_operations(
            before_ordinal=decode_page_token(request.page_token),
            limit=size + 1,
            kinds=frozenset(request.kinds),
            states=frozenset(request.states),
        )
        shown = tuple(redact(view_of(r), principal) for r in records[:size])
        more = encode_page_token(records[size - 1].spec.ordinal) if len(records) > size else ""
        return OperationPage(operations=shown, next_page_token=more)

    async def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        """Events after a sequence, then live until the terminal one. Raises NotFound."""
        await self._audit.authorize(principal, Permission.WATCH, "WATCH_OPERATION", operation_id)
        record = await self._load(operation_id)
        events = follow(self._journal, self._announcer, record.operation_id, after_sequence=after_sequence)
        async for event in events:
            yield _redacted(event, principal)

    async def profile(self, principal: Principal) -> AdminProfile:
        """What this server offers and how everything stands (AD-50)."""
        await self._audit.authorize(principal, Permission.PROFILE, "GET_ADMIN_PROFILE")
        snapshot = await self._journal.snapshot()
        return profile_of(
            snapshot.desired,
            self._driver.participants(),
            limits=self._limits,
            seen=self._reconciler.last_seen,
        )

    async def weight_sources(self) -> Mapping[str, tuple[str, DiskSource]]:
        """By model: the version in force, and the files that it can be read from again, where there are such.

        For whoever operates this server in turn, and must be able to put back what it replaces (AD-32).
        """
        snapshot = await self._journal.snapshot()
        participants = self._driver.participants()
        found = {
            model: sourced(record, [p for p in participants if model in p.models])
            for model, record in snapshot.desired.weights.items()
        }
        return {
            model: (record.version, record.source)
            for model, record in found.items()
            if record is not None and isinstance(record.source, DiskSource)
        }

    async def name_artifact_again(self, uri: str) -> None:
        """Have whoever holds an artifact of a stopped profile name it once more; a restarted server forgot where it is.

        Does nothing for what no profile left, and for a profile whose participants are away.
        """
        profiles = (await self._journal.snapshot()).desired.profiles.values()
        found = next((p for p in profiles if any(a.uri == uri for a in p.artifacts)), None)
        if found is not None:
            await self._reconciler.name_again(found)

    async def overrides(self) -> Sequence[OverrideRecord]:
        """Reconfigured values that hold over the file's as it is now (AD-47). For whoever explains the config."""
        snapshot = await self._journal.snapshot()
        desired = following_file(snapshot.desired, self._driver.file_values()) or snapshot.desired
        return [record for _, record in sorted(desired.overrides.items()) if record.changes]

    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        """Ask to call an operation off (AD-24).

        Raises:
            NotFound, PermissionDenied: unknown id, the one for whoever may cancel something, else the other.
            Unsupported: CANCEL_UNSUPPORTED for this kind.
        """
        try:
            result = await self._cancel(principal, operation_id, reason)
        except IopError as refusal:
            await self._audit.note(
                principal, "CANCEL_OPERATION", outcome=refusal.reason, operation_id=operation_id
            )
            raise
        await self._audit.note(
            principal,
            "CANCEL_OPERATION",
            outcome=result.disposition.name,
            operation_id=operation_id,
            reason=reason,
        )
        return result

    async def _cancel(self, principal: Principal, operation_id: str, reason: str) -> CancelResult:
        found = await self._journal.load(operation_id)
        if found is None:
            if may_cancel_anything(principal):
                raise _unknown(operation_id)
            raise PermissionDenied("this principal may cancel nothing")
        require_cancel(principal, found.spec.kind)
        if found.spec.kind not in cancellable_kinds():
            raise Unsupported(
                f"an operation of kind {found.spec.kind.name} cannot be cancelled",
                reason="CANCEL_UNSUPPORTED",
                details={"kind": found.spec.kind.name},
            )
        told: list[CancelDisposition] = []

        def move(_snapshot: object, record: OperationRecord) -> Advance | None:
            told[:] = [planner.judge_cancel(record)]
            return planner.request_cancel(record, reason=reason)

        record = await self._journal.advance(found.operation_id, move)
        if told[0] is CancelDisposition.CANCELLING:
            self._executions.cancel(record.operation_id)
        self._announcer.announce(record.operation_id)
        return CancelResult(disposition=told[0], operation=redact(view_of(record), principal))

    async def _load(self, operation_id: str) -> OperationRecord:
        record = await self._journal.load(operation_id)
        if record is None:
            raise _unknown(operation_id)
        return record

    # --- audit --------------------------------------------------------------------------------------------------------

    async def audit(
        self,
        principal: Principal,
        method: str,
        *,
        outcome: str,
        operation_id: str = "",
        digest: bytes = b"",
        reason: str = "",
    ) -> None:
        """Note a call that a surface refused by itself; see `AuditTrail.note`."""
        await self._audit.note(
            principal, method, outcome=outcome, operation_id=operation_id, digest=digest, reason=reason
        )


def _unknown(operation_id: str) -> NotFound:
    return NotFound("no such operation", reason="OPERATION_NOT_FOUND", details={"operation_id": operation_id})


def _failed(operation_id: str, message: str) -> Conflict:
    return Conflict(
        f"operation {operation_id} did not complete: {message}",
        reason="OPERATION_FAILED",
        details={"operation_id": operation_id},
        retryable=False,
    )


def _redacted(event: AdminOperationEvent, viewer: Principal) -> AdminOperationEvent:
    if not isinstance(event.event, OperationAccepted):
        return event
    shown = OperationAccepted(operation=redact(event.event.operation, viewer))
    return dataclasses.replace(event, event=shown)


def _first(group: BaseExceptionGroup[Unavailable]) -> Unavailable:
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    assert isinstance(inner, Unavailable)
    return inner
