"""Executes one accepted operation, from the journal's record of it to its terminal event.

Theory of operation. The journal leads: before a step is sent, its record is durable; when groups answer, their answers,
the participants' phases and the events go in together. So at any instant a successor process can go on from what the
journal says, through this same code. The executor itself holds only waits.

Everything it decides is in pure modules: `phases` laid the steps out, `goals` judges answers, `recovery` says in which
direction an interrupted operation goes, `settle` writes the end. What remains here is order: gates close before the
first step and open after the last transaction; phases run one after another, groups side by side; the first failure
of an operation with undo abandons the rest and takes back what was touched, newest first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from iop.admin import settle
from iop.admin.crew import Crew, CrewTiming, GroupReport, read_back_all
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationState,
    ParticipantPhase,
)
from iop.admin.goals import Goal
from iop.admin.journal import Advance, Journal, Snapshot
from iop.admin.participant import ParticipantDriver
from iop.admin.reconcile import divergence
from iop.admin.records import GroupMembers, OperationRecord, Phase, StepRecord
from iop.admin.recovery import Direction, plan_recovery
from iop.admin.results import (
    AdminError,
    EventBody,
    OperationProgress,
    ParticipantError,
    ParticipantStatus,
    ParticipantUpdate,
    is_terminal,
)
from iop.admin.states import Input, step
from iop.admin.steps import (
    ParticipantOutcome,
    ParticipantReadBack,
    Step,
    StepCall,
    StepProgress,
    StepResult,
)
from iop.admin.undo import undo_body
from iop.core.clock import Clock
from iop.core.errors import Unavailable
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = ["Executor", "ExecutorPorts", "ExecutorTiming"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorTiming:
    """Bounds of an execution.

    Attributes:
        rollback_timeout_s: whom a rollback cannot reach within it is quarantined (AD-25). Longer keeps an operation
            unfinished for a Node that may never come back.
        progress_interval_s: at most one journalled progress report per operation and interval.
        committed_attempts: how often a step after the point of no return is tried.
    """

    crew: CrewTiming = dataclasses.field(default_factory=CrewTiming)
    rollback_timeout_s: float = 60.0
    progress_interval_s: float = 0.5
    committed_attempts: int = 3
    store_retry_s: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorPorts:
    """What an executor acts through.

    Attributes:
        regate: make outer admission follow the journal's state, then return (AD-39).
        announce: tell observers of an operation to look again.
        with_content: put spooled tensors back into a step before it is sent.
        last_seen: participants as last reached by anybody; shared, and added to.
    """

    journal: Journal
    driver: ParticipantDriver
    clock: Clock
    timing: ExecutorTiming
    max_event_history: int
    regate: Callable[[], Awaitable[None]]
    announce: Callable[[OperationId], None]
    with_content: Callable[[Step], Awaitable[Step]]
    last_seen: dict[ParticipantId, ParticipantReadBack]


class _EndedElsewhereError(Exception):
    """The operation is terminal already: superseded in another transaction (AD-18)."""


class Executor:
    """Runs one operation. `run` ends when the operation is terminal; nothing of it runs afterwards."""

    def __init__(self, ports: ExecutorPorts, record: OperationRecord, *, is_recovery: bool) -> None:
        self._ports = ports
        self._record = record
        self._is_recovery = is_recovery
        self._steps: dict[tuple[int, GroupId], StepRecord] = {}
        self._crew: Crew | None = None
        self._cancelled = False
        self._last_progress = 0.0
        self._dropped: dict[GroupId, GroupReport] = {}
        remaining_ns = record.spec.deadline_at_unix_nanos - ports.clock.unix_nanos()
        self._deadline = ports.clock.monotonic() + remaining_ns / 1e9

    @property
    def participant_ids(self) -> frozenset[ParticipantId]:
        """Whom it acts on."""
        return frozenset(self._record.spec.participant_ids)

    def wake(self) -> None:
        """Connectivity changed: look again."""
        if self._crew is not None:
            self._crew.wake()

    def cancel(self) -> None:
        """The journal says that it was called off (AD-24), or that it was superseded: look again."""
        self._cancelled = True
        if self._crew is not None:
            self._crew.wake()

    async def run(self) -> None:
        """Execute to the terminal event.

        Raises:
            Unavailable: LEASE_LOST, another process executes from here on.
        Cancellation: leaves the operation to recovery.
        """
        try:
            await self._run()
        except _EndedElsewhereError:
            logger.info("operation.superseded op_id=%s", self._record.operation_id)
        finally:
            self._ports.announce(self._record.operation_id)

    async def _run(self) -> None:
        journal, operation_id = self._ports.journal, self._record.operation_id
        for found in await journal.steps(operation_id):
            self._steps[found.step, found.group_id] = found
        plan = plan_recovery(self._record, tuple(self._steps.values()))
        if self._record.moves.state is AdminOperationState.PENDING:
            await self._advance(self._start)
        # Gates close before anything is asked of an engine, and are the journal's already (AD-39).
        await self._ports.regate()
        if self._is_recovery:
            await self._read_back_before_repeating()
        failure = plan.failure if plan.direction is Direction.BACK else await self._go_forward()
        if failure is not None:
            await self._end_badly(failure)
        # The terminal transaction changed who holds the gates; only now may they open.
        await self._ports.regate()

    def _start(self, _snapshot: Snapshot, record: OperationRecord) -> Advance:
        moves = dataclasses.replace(
            record.moves,
            state=step(record.moves.state, Input.STARTED),
            started_at_unix_nanos=self._ports.clock.unix_nanos(),
        )
        return Advance(moves=moves)

    async def _read_back_before_repeating(self) -> None:
        """After a restart the engines' word comes before any step is repeated (AD-26)."""
        ids = self._record.spec.participant_ids
        seen = await self._read(ids)
        unreachable = sum(not s.reachable for s in seen.values())
        logger.info(
            "operation.recovered op_id=%s participants=%d unreachable=%d",
            self._record.operation_id,
            len(ids),
            unreachable,
        )

    async def _go_forward(self) -> AdminError | None:
        """Run the phases that are left, then complete. Returns why it did not."""
        phases = self._record.spec.phases
        for index in range(self._first_phase(), len(phases)):
            failure = self._called_off()
            if failure is None and phases[index].commits and not self._record.moves.committed:
                failure = await self._commit(index)
            if failure is None:
                failure = await self._run_phase(index)
            if failure is not None:
                return failure
        if self._dropped:
            last = self._record.spec.phases[-1]
            return _failure_of(last, list(self._dropped.values()))
        return await self._complete()

    def _first_phase(self) -> int:
        """Where to go on. After the commit every phase is looked at again: some groups may have been left behind."""
        if self._record.moves.committed:
            return next(index for index, phase in enumerate(self._record.spec.phases) if phase.commits)
        return self._record.moves.phase_index

    def _called_off(self) -> AdminError | None:
        if self._record.moves.committed:
            return None
        if self._record.moves.cancel_requested:
            return AdminError(code=AdminErrorCode.INTERRUPTED, message="cancelled", retryable=True)
        if self._ports.clock.monotonic() >= self._deadline:
            return _deadline_passed()
        return None

    async def _commit(self, index: int) -> AdminError | None:
        """Journal the point of no return, unless a cancel came first."""
        steps = tuple(self._steps.values())
        await self._advance(
            lambda snapshot, record: (
                None
                if record.moves.cancel_requested
                else settle.committed(snapshot, record, steps, phase_index=index)
            )
        )
        return self._called_off()

    async def _complete(self) -> AdminError | None:
        """The completing transaction; a cancel that came before it wins."""
        if not self._record.spec.groups:
            consistent: frozenset[GroupId] = frozenset()
        else:
            consistent = await self._consistent_groups()
        steps = tuple(self._steps.values())
        now = self._ports.clock.unix_nanos()

        def move(snapshot: Snapshot, record: OperationRecord) -> Advance | None:
            if record.moves.cancel_requested and not record.moves.committed:
                return None
            return settle.completed(snapshot, record, steps, consistent=consistent, now_unix_nanos=now)

        await self._advance(move)
        return self._called_off() if not self._record.moves.state.is_terminal else None

    async def _consistent_groups(self) -> frozenset[GroupId]:
        """Quarantined groups that are read back as desired once the operation has completed (AD-31)."""
        snapshot = await self._ports.journal.snapshot()
        suspects = [g for g in self._record.spec.groups if g.group_id in snapshot.desired.quarantines]
        if not suspects:
            return frozenset()
        desired = settle.after_success(
            snapshot.desired,
            self._record,
            tuple(self._steps.values()),
            now_unix_nanos=self._ports.clock.unix_nanos(),
        )
        seen = await self._read_groups(suspects)
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        return frozenset(
            g.group_id
            for g in suspects
            if all(p in infos for p in g.participant_ids)
            and not divergence(desired, [infos[p] for p in g.participant_ids], seen)
        )

    # --- one phase ----------------------------------------------------------------------------------------------------

    def _groups_of(self, phase: Phase) -> list[GroupMembers]:
        groups = self._record.spec.groups
        return list(groups) if phase.groups is None else [groups[i] for i in phase.groups]

    async def _run_phase(self, index: int) -> AdminError | None:
        phase = self._record.spec.phases[index]
        attempts = self._ports.timing.committed_attempts if self._record.moves.committed else 1
        reports: Mapping[GroupId, GroupReport] = {}
        groups = [
            g
            for g in self._groups_of(phase)
            if g.group_id not in self._dropped and not self._is_answered(index, g.group_id)
        ]
        for attempt in range(attempts):
            reports = await self._attempt(index, phase, phase.body, groups, fresh=attempt > 0)
            groups = [g for g in groups if not reports[g.group_id].is_ok]
            if not groups:
                return None
        if self._record.moves.committed:
            # The rest rolls forward without them (AD-32); they are told of at the end.
            self._dropped.update({g.group_id: reports[g.group_id] for g in groups})
            return None
        return _failure_of(phase, [reports[g.group_id] for g in groups])

    def _is_answered(self, index: int, group: GroupId) -> bool:
        """Whether the journal holds this group's good answer already (from before a restart)."""
        return any(
            s.phase_index == index
            and s.group_id == group
            and not s.is_undo
            and s.result is not None
            and all(o.error is None for o in s.result.participants)
            for s in self._steps.values()
        )

    def _fails_fast(self) -> bool:
        spec, moves = self._record.spec, self._record.moves
        return not settle.keeps_what_is_done(spec.kind) and not moves.committed

    async def _attempt(
        self, index: int, phase: Phase, body: Step, groups: Sequence[GroupMembers], *, fresh: bool
    ) -> Mapping[GroupId, GroupReport]:
        """Run one phase on some groups: journal, send, collect, journal."""
        if not groups:
            return {}
        before = await self._read_before(phase, groups)
        number = await self._begin(index, phase, groups, before, fresh=fresh)
        until = self._deadline
        if self._record.moves.committed:
            until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        content = await self._ports.with_content(body)
        calls = [self._call(group, number, content, until) for group in groups]
        return await self._run_crew(
            calls,
            goal=phase.goal,
            doing=phase.doing,
            done=phase.done,
            index=index,
            until=until,
            fails_fast=self._fails_fast(),
        )

    async def _read_before(
        self, phase: Phase, groups: Sequence[GroupMembers]
    ) -> Mapping[ParticipantId, ParticipantReadBack]:
        """What an undo has to go back to."""
        if phase.undo is None:
            return {}
        return await self._read_groups(groups)

    async def _begin(
        self,
        index: int,
        phase: Phase,
        groups: Sequence[GroupMembers],
        before: Mapping[ParticipantId, ParticipantReadBack],
        *,
        fresh: bool,
    ) -> int:
        """Make the step durable before it is sent; returns its number.

        A step that was begun before a restart keeps its number, so that who executed it already knows it (AD-36).
        """
        known = {s.group_id: s for s in self._steps.values() if s.phase_index == index and not s.is_undo}
        open_steps = {group for group, s in known.items() if s.result is None}
        numbers = {known[g.group_id].step for g in groups if g.group_id in open_steps}
        number = min(numbers) if numbers and not fresh else self._record.moves.next_step
        records = [
            StepRecord(
                step=number,
                group_id=g.group_id,
                phase_index=index,
                before=known[g.group_id].before
                if g.group_id in known
                else tuple(before[p] for p in g.participant_ids if p in before),
            )
            for g in groups
        ]
        statuses = tuple(self._status(p, phase.doing) for g in groups for p in g.participant_ids)
        progress = OperationProgress(
            phase=phase.doing, done=0, total=len(statuses), unit="participants", message=phase.action
        )
        await self._advance(
            lambda _snapshot, record: Advance(
                moves=dataclasses.replace(
                    record.moves,
                    phase_index=index,
                    next_step=max(record.moves.next_step, number + 1),
                ),
                events=(progress, *(ParticipantUpdate(status=s) for s in statuses)),
                statuses=statuses,
                steps=tuple(records),
            )
        )
        self._remember(records)
        return number

    def _call(self, group: GroupMembers, number: int, body: Step, until: float) -> StepCall:
        return StepCall(
            operation_id=self._record.operation_id,
            ordinal=self._record.spec.ordinal,
            step=number,
            group_id=group.group_id,
            participant_ids=group.participant_ids,
            body=body,
            timeout_s=max(0.001, until - self._ports.clock.monotonic()),
        )

    async def _run_crew(
        self,
        calls: Sequence[StepCall],
        *,
        goal: Goal,
        doing: ParticipantPhase,
        done: ParticipantPhase,
        index: int,
        until: float,
        fails_fast: bool,
        is_undo: bool = False,
    ) -> Mapping[GroupId, GroupReport]:
        reports: dict[GroupId, GroupReport] = {}
        crew = Crew(self._ports.driver, self._ports.clock, self._ports.timing.crew, goal=goal, phase=doing)
        out_of_time = AdminErrorCode.ROLLBACK_FAILED if is_undo else AdminErrorCode.DEADLINE_EXCEEDED
        async with crew:
            self._crew = crew
            try:
                crew.start(calls)
                while crew.pending or len(reports) < len(calls):
                    finished = await crew.wait(until=self._next_look(until))
                    reports.update({r.group_id: r for r in finished})
                    await self._journal_reports(finished, crew.take_progress(), done, index, is_undo)
                    if fails_fast and any(not r.is_ok for r in finished):
                        crew.abandon(AdminErrorCode.INTERRUPTED)
                    if self._cancelled and not is_undo:
                        await self._refresh()
                        if self._record.moves.cancel_requested and fails_fast:
                            crew.abandon(AdminErrorCode.INTERRUPTED)
                    if self._ports.clock.monotonic() >= until:
                        crew.abandon(out_of_time)
            finally:
                self._crew = None
        return reports

    def _next_look(self, until: float) -> float:
        """Abandoned calls report soon after the deadline; do not spin until they do."""
        now = self._ports.clock.monotonic()
        return until if until > now else now + 0.05

    async def _journal_reports(
        self,
        finished: Sequence[GroupReport],
        progress: Mapping[ParticipantId, StepProgress],
        done: ParticipantPhase,
        index: int,
        is_undo: bool,
    ) -> None:
        """Put answers, phases and events into one transaction; reports that came together go in together."""
        events: list[EventBody] = []
        statuses: list[ParticipantStatus] = []
        records: list[StepRecord] = []
        now = self._ports.clock.monotonic()
        if progress and now - self._last_progress >= self._ports.timing.progress_interval_s:
            self._last_progress = now
            events.extend(_progress_events(progress.values()))
        for report in finished:
            self._ports.last_seen.update({r.participant_id: r for r in report.after if r.reachable})
            before = self._steps.get((report.call.step, report.group_id))
            records.append(
                StepRecord(
                    step=report.call.step,
                    group_id=report.group_id,
                    phase_index=index,
                    is_undo=is_undo,
                    before=before.before if before is not None else (),
                    result=_with_errors(report),
                    after=report.after,
                )
            )
            statuses.extend(self._statuses_of(report, done))
        events.extend(ParticipantUpdate(status=s) for s in statuses)
        if not events and not records:
            return
        self._remember(records)
        await self._advance(
            lambda _snapshot, _record: Advance(
                events=tuple(events), statuses=tuple(statuses), steps=tuple(records)
            )
        )

    def _statuses_of(self, report: GroupReport, done: ParticipantPhase) -> list[ParticipantStatus]:
        after = {r.participant_id: r for r in report.after}
        outcomes = {o.participant_id: o for o in report.result.participants}
        statuses = []
        for participant in report.call.participant_ids:
            error = report.errors.get(participant)
            outcome, seen = outcomes.get(participant), after.get(participant)
            version = (seen.weight_version if seen is not None else None) or ""
            status = self._status(participant, ParticipantPhase.FAILED if error else done, error)
            statuses.append(
                dataclasses.replace(
                    status,
                    weight_version=version or status.weight_version,
                    verified_by=outcome.verified_by
                    if outcome is not None and outcome.verified_by is not None
                    else status.verified_by,
                )
            )
        return statuses

    def _status(
        self, participant: ParticipantId, phase: ParticipantPhase, error: ParticipantError | None = None
    ) -> ParticipantStatus:
        known = self._record.statuses.get(participant)
        if known is None:
            return ParticipantStatus(participant_id=participant, phase=phase, error=error)
        return dataclasses.replace(known, phase=phase, error=error or known.error)

    def _remember(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self._steps[record.step, record.group_id] = record

    # --- the way back -------------------------------------------------------------------------------------------------

    async def _end_badly(self, failure: AdminError) -> None:
        keeps = settle.keeps_what_is_done(self._record.spec.kind) or self._record.moves.committed
        leftover = await self._leave_as_is() if keeps else await self._roll_back(failure)
        now = self._ports.clock.unix_nanos()
        await self._advance(
            lambda snapshot, record: settle.ended_badly(
                snapshot, record, failure, leftover, now_unix_nanos=now
            )
        )

    async def _leave_as_is(self) -> settle.Leftover:
        """Nothing is taken back: sort the groups into done, consistent as before, and unknown (AD-29)."""
        snapshot = await self._ports.journal.snapshot()
        spec = self._record.spec
        touched = self._touched_groups()
        done = frozenset(g.group_id for g in spec.groups if self._reached_goal(g.group_id))
        suspects = [g for g in spec.groups if g.group_id in touched - done]
        seen = await self._read_groups(suspects)
        quarantine = {}
        for group in suspects:
            why = self._is_unknown(snapshot, group, seen)
            if why:
                quarantine[group.group_id] = why
        profile_id = spec.profile_id
        changed = bool(done) or any(self._may_have_changed(g.group_id) for g in suspects)
        return settle.Leftover(
            quarantine=quarantine,
            instances=self._instances(),
            done=done,
            changed=changed,
            failed=self._failed_participants(),
            is_profile_over=not any(
                s.reachable and (s.profiles is None or profile_id in s.profiles) for s in seen.values()
            ),
        )

    def _is_unknown(
        self,
        snapshot: Snapshot,
        group: GroupMembers,
        seen: Mapping[ParticipantId, ParticipantReadBack],
    ) -> str:
        """Why the group's state is not known to be what the journal says; empty when it is."""
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        if self._record.moves.committed and any(
            p not in infos or not infos[p].connected for p in group.participant_ids
        ):
            # It is gated when it comes back, until it was brought to the published version (AD-32, AD-35).
            return ""
        members = [infos[p] for p in group.participant_ids if p in infos]
        return divergence(snapshot.desired, members, seen)

    async def _roll_back(self, failure: AdminError) -> settle.Leftover:
        """Take back what was touched, newest phase first, within the rollback's own bound."""
        until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        await self._advance(lambda _snapshot, record: _undo_started(record, failure))
        failed = self._failed_participants()
        bad: dict[GroupId, str] = {}
        for index in reversed(range(len(self._record.spec.phases))):
            await self._undo_phase(index, bad, until=until)
        snapshot = await self._ports.journal.snapshot()
        target = settle.without_operation(snapshot.desired, self._record)
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        touched = [g for g in self._record.spec.groups if g.group_id in self._touched_groups()]
        seen = await self._read_groups(touched)
        for group in touched:
            members = [infos[p] for p in group.participant_ids if p in infos]
            why = divergence(target, members, seen) if group.group_id not in bad else ""
            if why:
                bad[group.group_id] = why
        await self._note_rolled_back(touched, bad)
        return settle.Leftover(quarantine=bad, instances=self._instances(), changed=bool(bad), failed=failed)

    async def _undo_phase(self, index: int, bad: dict[GroupId, str], *, until: float) -> None:
        """Send a phase's undo to the groups that it may have touched; adds those that refuse to `bad`."""
        phase = self._record.spec.phases[index]
        if phase.undo is None:
            return
        snapshot = await self._ports.journal.snapshot()
        target = settle.without_operation(snapshot.desired, self._record)
        infos = self._ports.driver.participants()
        sent = {s.group_id: s for s in self._steps.values() if s.phase_index == index and not s.is_undo}
        number = self._record.moves.next_step
        calls: list[StepCall] = []
        for group in self._record.spec.groups:
            record = sent.get(group.group_id)
            if record is None or group.group_id in bad or not _may_have_effect(record):
                continue
            body = undo_body(phase, record, target, [p for p in infos if p.group_id == group.group_id])
            if body is not None:
                calls.append(self._call(group, number, await self._ports.with_content(body), until))
        if not calls:
            return
        records = [
            StepRecord(step=number, group_id=c.group_id, phase_index=index, is_undo=True) for c in calls
        ]
        statuses = tuple(
            self._status(p, ParticipantPhase.ROLLING_BACK) for c in calls for p in c.participant_ids
        )
        await self._advance(
            lambda _snapshot, record: Advance(
                moves=dataclasses.replace(record.moves, next_step=number + 1),
                events=tuple(ParticipantUpdate(status=s) for s in statuses),
                statuses=statuses,
                steps=tuple(records),
            )
        )
        self._remember(records)
        reports = await self._run_crew(
            calls,
            goal=Goal.ANSWERED,
            doing=ParticipantPhase.ROLLING_BACK,
            done=ParticipantPhase.ROLLING_BACK,
            index=index,
            until=until,
            fails_fast=False,
            is_undo=True,
        )
        for report in reports.values():
            if not report.is_ok:
                first = next(iter(report.errors.values()))
                bad[report.group_id] = f"its undo failed: {first.message}"

    async def _note_rolled_back(self, touched: Sequence[GroupMembers], bad: Mapping[GroupId, str]) -> None:
        statuses = tuple(
            self._status(p, ParticipantPhase.ROLLED_BACK)
            for g in touched
            if g.group_id not in bad
            for p in g.participant_ids
        )
        if statuses:
            await self._advance(
                lambda _snapshot, _record: Advance(
                    events=tuple(ParticipantUpdate(status=s) for s in statuses), statuses=statuses
                )
            )

    async def _read_groups(
        self, groups: Sequence[GroupMembers]
    ) -> Mapping[ParticipantId, ParticipantReadBack]:
        return await self._read([p for g in groups for p in g.participant_ids])

    async def _read(self, ids: Sequence[ParticipantId]) -> Mapping[ParticipantId, ParticipantReadBack]:
        timeout_s = self._ports.timing.crew.read_back_timeout_s
        seen = await read_back_all(self._ports.driver, ids, timeout_s=timeout_s)
        self._ports.last_seen.update({p: s for p, s in seen.items() if s.reachable})
        return seen

    def _instances(self) -> Mapping[ParticipantId, str]:
        """The engine process of each participant, as last reached."""
        ids = self._record.spec.participant_ids
        seen = {p: self._ports.last_seen[p].instance for p in ids if p in self._ports.last_seen}
        return {p: instance for p, instance in seen.items() if instance}

    def _touched_groups(self) -> frozenset[GroupId]:
        """Groups that some step may have had an effect on."""
        return frozenset(s.group_id for s in self._steps.values() if _may_have_effect(s))

    def _may_have_changed(self, group: GroupId) -> bool:
        return any(s.group_id == group and _may_have_effect(s) for s in self._steps.values())

    def _reached_goal(self, group: GroupId) -> bool:
        """Whether the group is through all its phases."""
        spec = self._record.spec
        for index, phase in enumerate(spec.phases):
            if any(g.group_id == group for g in self._groups_of(phase)) and not self._is_answered(
                index, group
            ):
                return False
        return True

    def _failed_participants(self) -> tuple[ParticipantId, ...]:
        """Those that failed by themselves, not because the rest was called off."""
        failed = [
            p
            for p, status in self._record.statuses.items()
            if status.error is not None and status.error.code is not AdminErrorCode.INTERRUPTED
        ]
        return tuple(sorted(failed))

    # --- the journal --------------------------------------------------------------------------------------------------

    async def _refresh(self) -> None:
        """Take over what other transactions did to the operation (cancel, supersede)."""
        record = await self._ports.journal.load(self._record.operation_id)
        if record is None or record.moves.state.is_terminal:
            raise _EndedElsewhereError
        self._record = record

    async def _advance(self, move: Callable[[Snapshot, OperationRecord], Advance | None]) -> None:
        """Move the operation on in the journal; waits for as long as the store cannot be written (AD-100)."""

        def guarded(snapshot: Snapshot, record: OperationRecord) -> Advance | None:
            if record.moves.state.is_terminal:
                raise _EndedElsewhereError
            advance = move(snapshot, record)
            return None if advance is None else self._within_history(record, advance)

        while True:
            try:
                self._record = await self._ports.journal.advance(self._record.operation_id, guarded)
            except Unavailable as exc:
                if exc.reason != "STORE_UNAVAILABLE":
                    raise
                logger.error("operation.stalled op_id=%s error=%s", self._record.operation_id, exc)
                await asyncio.sleep(self._ports.timing.store_retry_s)
            else:
                self._ports.announce(self._record.operation_id)
                return

    def _within_history(self, record: OperationRecord, advance: Advance) -> Advance:
        """Beyond `max_event_history` only terminal events are added (AD-50); nothing numbered is dropped."""
        room = self._ports.max_event_history - record.moves.last_sequence
        if len(advance.events) <= room:
            return advance
        ending = [e for e in advance.events if is_terminal(e)]
        others = [e for e in advance.events if not is_terminal(e)][: max(0, room)]
        return dataclasses.replace(advance, events=(*others, *ending))


def _undo_started(record: OperationRecord, failure: AdminError) -> Advance:
    if record.moves.state is AdminOperationState.ROLLING_BACK:
        return Advance()
    moves = dataclasses.replace(
        record.moves, state=step(record.moves.state, Input.UNDO_STARTED), failure=failure
    )
    progress = OperationProgress(
        phase=ParticipantPhase.ROLLING_BACK, done=0, total=1, unit="steps", message=failure.message
    )
    return Advance(moves=moves, events=(progress,))


def _deadline_passed() -> AdminError:
    return AdminError(
        code=AdminErrorCode.DEADLINE_EXCEEDED, message="the operation's deadline passed", retryable=True
    )


def _failure_of(phase: Phase, reports: Sequence[GroupReport]) -> AdminError:
    """One error for the operation, from those of its participants."""
    errors = [(p, e) for r in reports for p, e in r.errors.items()]
    own = [(p, e) for p, e in errors if e.code is not AdminErrorCode.INTERRUPTED] or errors
    first_id, first = own[0]
    more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
    return AdminError(
        code=first.code,
        message=f"{phase.action}: {first_id}: {first.message}{more}",
        participants=tuple(p for p, _ in own),
        retryable=all(e.retryable for _, e in own),
    )


def _may_have_effect(record: StepRecord) -> bool:
    """Whether a step that was made durable may have changed its group: unanswered counts as yes."""
    if record.result is None:
        return True
    return any(o.changed for o in record.result.participants)


def _with_errors(report: GroupReport) -> StepResult:
    """The answer as journalled: a participant that missed its goal carries why."""
    told = {o.participant_id: o for o in report.result.participants}
    outcomes = tuple(
        dataclasses.replace(told.get(p) or ParticipantOutcome(participant_id=p), error=report.errors.get(p))
        for p in report.call.participant_ids
    )
    return dataclasses.replace(report.result, participants=outcomes)


def _progress_events(reports: Iterable[StepProgress]) -> list[EventBody]:
    return [
        OperationProgress(
            phase=r.phase, done=r.done, total=r.total, unit=r.unit, message=r.message or r.participant_id
        )
        for r in reports
    ]
