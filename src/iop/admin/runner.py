"""Runs one step over the groups of an operation and journals what comes back, as it comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from iop.admin.crew import Crew, GroupReport
from iop.admin.enums import AdminErrorCode, ParticipantPhase
from iop.admin.goals import Goal
from iop.admin.journal import Advance
from iop.admin.ledger import Ledger
from iop.admin.records import GroupMembers, StepRecord
from iop.admin.results import EventBody, OperationProgress, ParticipantStatus, ParticipantUpdate
from iop.admin.steps import BYTES_UNIT, ParticipantOutcome, Step, StepCall, StepProgress, StepResult
from iop.core.ids import GroupId, ParticipantId

__all__ = ["StepRunner"]


class StepRunner:
    """Sends calls and journals their answers; can be woken and told to call them off."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._ports = ledger.ports
        self._crew: Crew | None = None
        self._cancelled = False
        self._last_progress = 0.0
        self._bytes: dict[ParticipantId, StepProgress] = {}

    def wake(self) -> None:
        """Connectivity changed: look again."""
        if self._crew is not None:
            self._crew.wake()

    def cancel(self) -> None:
        """The journal says that the operation was called off or superseded: look again."""
        self._cancelled = True
        self.wake()

    def call(self, group: GroupMembers, number: int, body: Step, until: float) -> StepCall:
        """The call of a numbered step on one group; `until` is monotonic seconds."""
        return StepCall(
            operation_id=self._ledger.record.operation_id,
            ordinal=self._ledger.record.spec.ordinal,
            step=number,
            group_id=group.group_id,
            participant_ids=group.participant_ids,
            body=body,
            timeout_s=max(0.001, until - self._ports.clock.monotonic()),
        )

    async def run(
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
        """Run calls to their reports, journalling as they come in.

        Args:
            calls: at most one per group; their step records are durable already.
            goal: what each must have achieved.
            doing: the phase that errors are told of.
            done: what participants show that reached the goal.
            index: the phase's index.
            until: monotonic seconds; who has not reported then is abandoned.
            fails_fast: abandon the rest at the first failure or when called off.
            is_undo: the calls take the phase back.
        """
        reports: dict[GroupId, GroupReport] = {}
        crew = Crew(self._ports.driver, self._ports.clock, self._ports.timing.crew, goal=goal, phase=doing)
        out_of_time = AdminErrorCode.ROLLBACK_FAILED if is_undo else AdminErrorCode.DEADLINE_EXCEEDED
        async with crew:
            self._crew = crew
            try:
                crew.start(calls)
                if self._cancelled:
                    crew.wake()  # it was called off before there was a crew to wake
                while crew.pending or len(reports) < len(calls):
                    finished = await crew.wait(until=self._next_look(until))
                    reports.update({r.group_id: r for r in finished})
                    await self._journal_reports(finished, crew.take_progress(), done, index, is_undo)
                    if fails_fast and any(not r.is_ok for r in finished):
                        crew.abandon(AdminErrorCode.INTERRUPTED)
                    if self._cancelled and not is_undo:
                        await self._ledger.refresh()
                        if self._ledger.record.moves.cancel_requested and fails_fast:
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
        loaded = {p: r for p, r in progress.items() if r.unit == BYTES_UNIT}
        self._bytes.update(loaded)
        reported = {p for report in finished for p in report.call.participant_ids}
        is_due = now - self._last_progress >= self._ports.timing.progress_interval_s
        if is_due:
            statuses.extend(
                self._with_bytes(self._ledger.status(p, r.phase))
                for p, r in loaded.items()
                if p not in reported
            )
        if progress and is_due:
            self._last_progress = now
            events.extend(_progress_events(progress.values()))
        for report in finished:
            self._ports.last_seen.update({r.participant_id: r for r in report.after if r.reachable})
            before = self._ledger.steps.get((report.call.step, report.group_id))
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
            statuses.extend(map(self._with_bytes, self._ledger.statuses_of(report, done)))
        events.extend(ParticipantUpdate(status=s) for s in statuses)
        if not events and not records:
            return
        self._ledger.remember(records)
        await self._ledger.advance(
            lambda _snapshot, _record: Advance(
                events=tuple(events), statuses=tuple(statuses), steps=tuple(records)
            )
        )

    def _with_bytes(self, status: ParticipantStatus) -> ParticipantStatus:
        """What was told last of how much the participant has loaded goes with its status from then on."""
        told = self._bytes.get(status.participant_id)
        if told is None:
            return status
        return dataclasses.replace(status, bytes_done=told.done, bytes_total=told.total)


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
