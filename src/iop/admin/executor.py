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

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from iop.admin import settle
from iop.admin.crew import GroupReport
from iop.admin.enums import AdminErrorCode, AdminOperationKind, AdminOperationState
from iop.admin.journal import Advance, Snapshot
from iop.admin.ledger import EndedElsewhereError, ExecutorPorts, ExecutorTiming, Ledger
from iop.admin.reconcile import divergence, is_restarted
from iop.admin.records import GroupMembers, OperationRecord, Phase, StepRecord
from iop.admin.recovery import Direction, plan_recovery
from iop.admin.results import AdminError, OperationProgress, ParticipantUpdate
from iop.admin.rollback import Rollback
from iop.admin.runner import StepRunner
from iop.admin.states import Input, step
from iop.admin.steps import ParticipantReadBack, Step
from iop.core.ids import GroupId, ParticipantId

__all__ = ["Executor", "ExecutorPorts", "ExecutorTiming"]

logger = logging.getLogger(__name__)

READ_BEFORE_SHARE = 0.25
"""What a phase may spend of its time on how things stood before."""


class Executor:
    """Runs one operation. `run` ends when the operation is terminal; nothing of it runs afterwards."""

    def __init__(
        self,
        ports: ExecutorPorts,
        record: OperationRecord,
        *,
        is_recovery: bool,
        on_revived: Callable[[], None] = lambda: None,
    ) -> None:
        self._ports = ports
        self._ledger = Ledger(ports, record)
        self._runner = StepRunner(self._ledger)
        self._is_recovery = is_recovery
        self._on_revived = on_revived
        self._rollback = Rollback(self._ledger, self._runner)
        self._dropped: dict[GroupId, GroupReport] = {}
        self._starts_over = False
        remaining_ns = record.spec.deadline_at_unix_nanos - ports.clock.unix_nanos()
        self._deadline = ports.clock.monotonic() + remaining_ns / 1e9

    @property
    def participant_ids(self) -> frozenset[ParticipantId]:
        """Whom it acts on."""
        return frozenset(self._ledger.record.spec.participant_ids)

    def wake(self) -> None:
        """Connectivity changed: look again."""
        self._runner.wake()

    def cancel(self) -> None:
        """The journal says that it was called off (AD-24), or that it was superseded: look again."""
        self._runner.cancel()

    async def run(self) -> None:
        """Execute to the terminal event.

        Raises:
            Unavailable: LEASE_LOST, another process executes from here on.
        Cancellation: leaves the operation to recovery.
        """
        try:
            await self._run()
        except EndedElsewhereError:
            logger.info("operation.superseded op_id=%s", self._ledger.record.operation_id)
        finally:
            self._ports.announce(self._ledger.record.operation_id)

    async def _run(self) -> None:
        await self._ledger.open()
        plan = plan_recovery(self._ledger.record, tuple(self._ledger.steps.values()))
        if self._ledger.record.moves.state is AdminOperationState.PENDING:
            await self._ledger.advance(self._start)
        # Gates close before anything is asked of an engine, and are the journal's already (AD-39).
        await self._ports.regate()
        if self._is_recovery:
            seen = await self._read_back_before_repeating()
            if plan.direction is Direction.FORWARD:
                await self._revive(seen)
            self._on_revived()
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

    async def _read_back_before_repeating(self) -> Mapping[ParticipantId, ParticipantReadBack]:
        """After a restart the engines' word comes before any step is repeated (AD-26)."""
        ids = self._ledger.record.spec.participant_ids
        seen = await self._ledger.read(ids)
        unreachable = sum(not s.reachable for s in seen.values())
        logger.info(
            "operation.recovered op_id=%s participants=%d unreachable=%d",
            self._ledger.record.operation_id,
            len(ids),
            unreachable,
        )
        return seen

    async def _revive(self, seen: Mapping[ParticipantId, ParticipantReadBack]) -> None:
        """Engines that restarted too: what they had done is gone, and the steps that are left may build on it.

        They are brought to where the operation found them, or, past the point of no return, to the published version;
        then every phase is theirs again. Where that fails, so does the step that needed it.
        """
        restarted = [g for g in self._ledger.record.spec.groups if self._ledger.has_restarted(g, seen)]
        if not restarted:
            return
        snapshot = await self._ports.journal.snapshot()
        target = settle.without_operation(snapshot.desired, self._ledger.record)
        until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        for group in restarted:
            why = await self._rollback.bring_to(target, group, seen, until=until)
            logger.info(
                "operation.revived op_id=%s group=%s differs=%s",
                self._ledger.record.operation_id,
                group.group_id,
                why,
            )
        self._ledger.void_steps(g.group_id for g in restarted)
        self._starts_over = True

    async def _go_forward(self) -> AdminError | None:
        """Run the phases that are left, then complete. Returns why it did not."""
        phases = self._ledger.record.spec.phases
        for index in range(self._first_phase(), len(phases)):
            failure = self._called_off()
            if failure is None and phases[index].commits and not self._ledger.record.moves.committed:
                failure = await self._commit(index)
            if failure is None:
                failure = await self._run_phase(index)
            if failure is not None:
                return failure
        if self._dropped:
            last = self._ledger.record.spec.phases[-1]
            return _failure_of(last, list(self._dropped.values()))
        return await self._complete()

    def _first_phase(self) -> int:
        """Where to go on. After the commit every phase is looked at again: some groups may have been left behind."""
        if self._ledger.record.moves.committed:
            return next(index for index, phase in enumerate(self._ledger.record.spec.phases) if phase.commits)
        return 0 if self._starts_over else self._ledger.record.moves.phase_index

    def _called_off(self) -> AdminError | None:
        if self._ledger.record.moves.committed:
            return None
        if self._ledger.record.moves.cancel_requested:
            return AdminError(code=AdminErrorCode.INTERRUPTED, message="cancelled", retryable=True)
        if self._ports.clock.monotonic() >= self._deadline:
            return _deadline_passed()
        return None

    async def _commit(self, index: int) -> AdminError | None:
        """Journal the point of no return, unless a cancel came first."""
        steps = tuple(self._ledger.steps.values())
        await self._ledger.advance(
            lambda snapshot, record: (
                None
                if record.moves.cancel_requested
                else settle.committed(snapshot, record, steps, phase_index=index)
            )
        )
        return self._called_off()

    async def _complete(self) -> AdminError | None:
        """The completing transaction; a cancel that came before it wins."""
        if not self._ledger.record.spec.groups:
            consistent: frozenset[GroupId] = frozenset()
        else:
            consistent = await self._consistent_groups()
        steps = tuple(self._ledger.steps.values())
        now = self._ports.clock.unix_nanos()

        def move(snapshot: Snapshot, record: OperationRecord) -> Advance | None:
            if record.moves.cancel_requested and not record.moves.committed:
                return None
            return settle.completed(
                snapshot,
                record,
                steps,
                consistent=consistent,
                now_unix_nanos=now,
                file_values=self._ports.driver.file_values(),
            )

        await self._ledger.advance(move)
        return self._called_off() if not self._ledger.record.moves.state.is_terminal else None

    async def _consistent_groups(self) -> frozenset[GroupId]:
        """Quarantined groups that are read back as desired once the operation has completed (AD-31)."""
        snapshot = await self._ports.journal.snapshot()
        suspects = [g for g in self._ledger.record.spec.groups if g.group_id in snapshot.desired.quarantines]
        if not suspects:
            return frozenset()
        desired = settle.after_success(
            snapshot.desired,
            self._ledger.record,
            tuple(self._ledger.steps.values()),
            now_unix_nanos=self._ports.clock.unix_nanos(),
            file_values=self._ports.driver.file_values(),
        )
        seen = await self._ledger.read_groups(suspects)
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        consistent = set()
        for group in suspects:
            if not all(p in infos for p in group.participant_ids):
                continue
            why = divergence(desired, [infos[p] for p in group.participant_ids], seen)
            told = {p: seen[p] for p in group.participant_ids if p in seen and seen[p].reachable}
            is_successor = len(told) == len(group.participant_ids) and is_restarted(
                snapshot.desired.quarantines[group.group_id], told
            )
            if why and is_successor and self._ledger.record.spec.kind is not AdminOperationKind.RESUME:
                # The operation came before the reconciliation of an engine that restarted; what that lacks yet was no
                # part of what the operation had to do.
                why = await self._rollback.bring_to(desired, group, seen, until=until)
            if not why:
                consistent.add(group.group_id)
        return frozenset(consistent)

    async def _run_phase(self, index: int) -> AdminError | None:
        phase = self._ledger.record.spec.phases[index]
        attempts = self._ports.timing.committed_attempts if self._ledger.record.moves.committed else 1
        reports: Mapping[GroupId, GroupReport] = {}
        groups = [
            g
            for g in self._ledger.groups_of(phase)
            if g.group_id not in self._dropped and not self._ledger.is_answered(index, g.group_id)
        ]
        for attempt in range(attempts):
            reports = await self._attempt(index, phase, phase.body, groups, fresh=attempt > 0)
            groups = [g for g in groups if not reports[g.group_id].is_ok]
            if not groups:
                return None
        if self._ledger.record.moves.committed:
            # The rest rolls forward without them (AD-32); they are told of at the end.
            self._dropped.update({g.group_id: reports[g.group_id] for g in groups})
            return None
        return _failure_of(phase, [reports[g.group_id] for g in groups])

    def _fails_fast(self) -> bool:
        spec, moves = self._ledger.record.spec, self._ledger.record.moves
        return not settle.keeps_what_is_done(spec.kind) and not moves.committed

    async def _attempt(
        self, index: int, phase: Phase, body: Step, groups: Sequence[GroupMembers], *, fresh: bool
    ) -> Mapping[GroupId, GroupReport]:
        """Run one phase on some groups: journal, send, collect, journal."""
        if not groups:
            return {}
        until = self._deadline
        if self._ledger.record.moves.committed:
            until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        before = await self._read_before(phase, groups, until)
        numbers = await self._begin(index, phase, groups, before, fresh=fresh)
        content = await self._ports.with_content(body)
        calls = [self._runner.call(group, numbers[group.group_id], content, until) for group in groups]
        return await self._runner.run(
            calls,
            goal=phase.goal,
            doing=phase.doing,
            done=phase.done,
            index=index,
            until=until,
            fails_fast=self._fails_fast(),
        )

    async def _read_before(
        self, phase: Phase, groups: Sequence[GroupMembers], until: float
    ) -> Mapping[ParticipantId, ParticipantReadBack]:
        """What an undo has to go back to, and which processes the phase begins with, which is over at ``until``.

        An engine that cannot be read back is told apart from its successor by the process that answered last; a
        server that is restarted would not know otherwise that what it left there is gone.
        """
        last = self._ports.last_seen
        begun = {s.group_id for s in self._ledger.steps.values()}
        seen = {
            p: ParticipantReadBack(participant_id=p, reachable=False, instance=last[p].instance)
            for g in groups
            for p in g.participant_ids
            if g.group_id not in begun and p in last and last[p].instance
        }
        if phase.undo is not None:
            # Who does not tell how it stands must be left time to be named by the step itself (AD-31).
            left_s = max(0.0, until - self._ports.clock.monotonic())
            told = await self._ledger.read_groups(groups, within_s=READ_BEFORE_SHARE * left_s)
            seen.update({p: read_back for p, read_back in told.items() if read_back.reachable})
        return seen

    async def _begin(
        self,
        index: int,
        phase: Phase,
        groups: Sequence[GroupMembers],
        before: Mapping[ParticipantId, ParticipantReadBack],
        *,
        fresh: bool,
    ) -> Mapping[GroupId, int]:
        """Make the step durable before it is sent; returns its number for each group.

        A step that was begun before a restart keeps its number, so that who executed it already knows it (AD-36).
        """
        known = {
            s.group_id: s for s in self._ledger.steps.values() if s.phase_index == index and not s.is_undo
        }
        next_step = self._ledger.record.moves.next_step
        numbers = {
            g.group_id: known[g.group_id].step
            if g.group_id in known and not fresh and self._ledger.is_open(known[g.group_id])
            else next_step
            for g in groups
        }
        records = [
            StepRecord(
                step=numbers[g.group_id],
                group_id=g.group_id,
                phase_index=index,
                before=known[g.group_id].before
                if g.group_id in known
                else tuple(before[p] for p in g.participant_ids if p in before),
            )
            for g in groups
        ]
        statuses = tuple(self._ledger.status(p, phase.doing) for g in groups for p in g.participant_ids)
        progress = OperationProgress(
            phase=phase.doing, done=0, total=len(statuses), unit="participants", message=phase.action
        )
        await self._ledger.advance(
            lambda _snapshot, record: Advance(
                moves=dataclasses.replace(
                    record.moves,
                    phase_index=index,
                    next_step=max(record.moves.next_step, *(n + 1 for n in numbers.values())),
                ),
                events=(progress, *(ParticipantUpdate(status=s) for s in statuses)),
                statuses=statuses,
                steps=tuple(records),
            )
        )
        self._ledger.remember(records)
        return numbers

    async def _end_badly(self, failure: AdminError) -> None:
        keeps = (
            settle.keeps_what_is_done(self._ledger.record.spec.kind) or self._ledger.record.moves.committed
        )
        leftover = await self._rollback.leave_as_is() if keeps else await self._rollback.take_back(failure)
        now = self._ports.clock.unix_nanos()
        steps = tuple(self._ledger.steps.values())
        await self._ledger.advance(
            lambda snapshot, record: settle.ended_badly(
                snapshot, record, failure, leftover, now_unix_nanos=now, steps=steps
            )
        )


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
