"""The way back: taking back what an operation touched, and finding out what it leaves (AD-29, AD-31, AD-32).

An engine that restarted within an operation lost what was done at its old process, and what was there before. It is
brought to the state that the journal asks for, the way a reconciliation does, before anything is proven of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from iop.admin import settle
from iop.admin.crew import GroupReport
from iop.admin.desired import Desired
from iop.admin.enums import AdminOperationKind, AdminOperationState, CacheOutcome, ParticipantPhase
from iop.admin.goals import Goal
from iop.admin.journal import Advance, Snapshot
from iop.admin.ledger import Ledger, may_have_effect
from iop.admin.reconcile import divergence, remedy_for
from iop.admin.records import GroupMembers, OperationRecord, StepRecord
from iop.admin.results import AdminError, OperationProgress, ParticipantUpdate
from iop.admin.runner import StepRunner
from iop.admin.states import Input, step
from iop.admin.steps import ParticipantReadBack, StepCall
from iop.admin.undo import undo_body
from iop.core.ids import GroupId, ParticipantId

__all__ = ["Rollback"]


class Rollback:
    """Ends an operation's effects: takes them back, or sorts out which stay."""

    def __init__(self, ledger: Ledger, runner: StepRunner) -> None:
        self._ledger = ledger
        self._runner = runner
        self._ports = ledger.ports

    async def take_back(self, failure: AdminError) -> settle.Leftover:
        """Take back what was touched, newest phase first, within the rollback's own bound."""
        until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        await self._ledger.advance(lambda _snapshot, record: _undo_started(record, failure))
        failed = self._ledger.failed_participants()
        bad: dict[GroupId, str] = {}
        for index in reversed(range(len(self._ledger.record.spec.phases))):
            await self._undo_phase(index, bad, until=until)
        snapshot = await self._ports.journal.snapshot()
        target = settle.without_operation(snapshot.desired, self._ledger.record)
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        touched = [g for g in self._ledger.record.spec.groups if g.group_id in self._ledger.touched_groups()]
        seen = await self._ledger.read_until_told(touched)
        for group in touched:
            members = [infos[p] for p in group.participant_ids if p in infos]
            why = bad.pop(group.group_id, "") or divergence(target, members, seen)
            if why and self._ledger.has_restarted(group, seen):
                # What was to be undone, or refused its undo, went with the old process.
                why = await self.bring_to(target, group, seen, until=until)
            elif not why and not self._ledger.has_restarted(group, seen):
                why = self._other_weights(group, seen)
            if why:
                bad[group.group_id] = why
        await self._note_rolled_back(touched, bad)
        return settle.Leftover(
            quarantine=bad, instances=self._ledger.instances(), changed=bool(bad), failed=failed
        )

    async def _undo_phase(self, index: int, bad: dict[GroupId, str], *, until: float) -> None:
        """Send a phase's undo to the groups that it may have touched; adds those that refuse to `bad`."""
        phase = self._ledger.record.spec.phases[index]
        if phase.undo is None:
            return
        snapshot = await self._ports.journal.snapshot()
        target = settle.without_operation(snapshot.desired, self._ledger.record)
        infos = self._ports.driver.participants()
        sent = {
            s.group_id: s for s in self._ledger.steps.values() if s.phase_index == index and not s.is_undo
        }
        number = self._ledger.record.moves.next_step
        calls: list[StepCall] = []
        for group in self._ledger.record.spec.groups:
            record = sent.get(group.group_id)
            if record is None or group.group_id in bad or not may_have_effect(record):
                continue
            body = undo_body(phase, record, target, [p for p in infos if p.group_id == group.group_id])
            if body is not None:
                calls.append(self._runner.call(group, number, await self._ports.with_content(body), until))
        if not calls:
            return
        records = [
            StepRecord(step=number, group_id=c.group_id, phase_index=index, is_undo=True) for c in calls
        ]
        statuses = tuple(
            self._ledger.status(p, ParticipantPhase.ROLLING_BACK) for c in calls for p in c.participant_ids
        )
        await self._ledger.advance(
            lambda _snapshot, record: Advance(
                moves=dataclasses.replace(record.moves, next_step=number + 1),
                events=tuple(ParticipantUpdate(status=s) for s in statuses),
                statuses=statuses,
                steps=tuple(records),
            )
        )
        self._ledger.remember(records)
        reports = await self._runner.run(
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
            # Who obeyed and could not be read back yet is judged with the rest, when all is taken back.
            if not report.is_ok and not _was_obeyed(report):
                first = next(iter(report.errors.values()))
                bad[report.group_id] = f"its undo failed: {first.message}"

    def _other_weights(self, group: GroupMembers, seen: Mapping[ParticipantId, ParticipantReadBack]) -> str:
        """How the content that an update's undo put back differs from what was there before; empty when it does not.

        Weights that no operation published bind nobody, so nothing else would notice that the place from which they
        were read again held others by now (AD-32, AD-37).
        """
        if self._ledger.record.spec.kind is not AdminOperationKind.UPDATE_WEIGHTS:
            return ""
        records = sorted(
            (s for s in self._ledger.steps.values() if s.group_id == group.group_id and s.before),
            key=lambda s: s.step,
        )
        for before in records[0].before if records else ():
            now = seen.get(before.participant_id)
            if now is None or not before.content_digest or not now.content_digest:
                continue  # by label alone, which the undo itself has checked
            if before.content_digest != now.content_digest:
                return f"{before.participant_id} was put back to other weights than it served before"
        return ""

    async def bring_to(
        self,
        target: Desired,
        group: GroupMembers,
        seen: Mapping[ParticipantId, ParticipantReadBack],
        *,
        until: float,
    ) -> str:
        """Bring a restarted engine to a state, as when it comes back at any other time (AD-35).

        Returns how it still differs; empty when it is there.
        """
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        members = [infos[p] for p in group.participant_ids if p in infos]
        for each in remedy_for(target, members, seen).steps:
            number = self._ledger.record.moves.next_step
            record = StepRecord(step=number, group_id=group.group_id, phase_index=0, is_undo=True)
            await self._ledger.advance(
                lambda _snapshot, operation, number=number, record=record: Advance(  # type: ignore[misc]
                    moves=dataclasses.replace(operation.moves, next_step=number + 1), steps=(record,)
                )
            )
            self._ledger.remember([record])
            body = await self._ports.with_content(each.body)
            reports = await self._runner.run(
                [self._runner.call(group, number, body, until)],
                goal=each.goal,
                doing=ParticipantPhase.ROLLING_BACK,
                done=ParticipantPhase.ROLLING_BACK,
                index=0,
                until=until,
                fails_fast=False,
                is_undo=True,
            )
            if not all(report.is_ok for report in reports.values()):
                break
        return divergence(target, members, await self._ledger.read_until_told([group]))

    async def _note_rolled_back(self, touched: Sequence[GroupMembers], bad: Mapping[GroupId, str]) -> None:
        statuses = tuple(
            self._ledger.status(p, ParticipantPhase.ROLLED_BACK)
            for g in touched
            if g.group_id not in bad
            for p in g.participant_ids
        )
        if statuses:
            await self._ledger.advance(
                lambda _snapshot, _record: Advance(
                    events=tuple(ParticipantUpdate(status=s) for s in statuses), statuses=statuses
                )
            )

    async def leave_as_is(self) -> settle.Leftover:
        """Nothing is taken back: sort the groups into done, consistent as before, and unknown (AD-29)."""
        until = self._ports.clock.monotonic() + self._ports.timing.rollback_timeout_s
        snapshot = await self._ports.journal.snapshot()
        spec = self._ledger.record.spec
        touched = self._ledger.touched_groups()
        done = frozenset(g.group_id for g in spec.groups if self._ledger.has_reached_goal(g.group_id))
        suspects = [g for g in spec.groups if g.group_id in touched - done]
        stops_profile = spec.kind is AdminOperationKind.STOP_PROFILE
        rest = [g for g in spec.groups if g.group_id not in done] if stops_profile else suspects
        seen = await self._ledger.read_until_told(rest)
        quarantine = {}
        for group in suspects:
            why = self._is_unknown(snapshot, group, seen)
            if why and self._ledger.has_restarted(group, seen):
                why = await self.bring_to(snapshot.desired, group, seen, until=until)
            if why:
                quarantine[group.group_id] = why
        is_profile_over = stops_profile and not any(
            s.reachable and (s.profiles is None or spec.profile_id in s.profiles) for s in seen.values()
        )
        return settle.Leftover(
            quarantine=quarantine,
            instances=self._ledger.instances(),
            done=done,
            changed=bool(done) or is_profile_over or any(self._may_differ(g, seen) for g in suspects),
            failed=self._ledger.failed_participants(),
            is_profile_over=is_profile_over,
        )

    def _may_differ(self, group: GroupMembers, seen: Mapping[ParticipantId, ParticipantReadBack]) -> bool:
        """Whether a group that did not reach the goal may be otherwise than before, quarantine aside (AD-13).

        What state can be read back was compared with the desired one by then, and the desired one is as it was.
        """
        record = self._ledger.record
        match record.spec.kind:
            case AdminOperationKind.RESUME | AdminOperationKind.RESTORE_RESOURCES:
                return False
            case AdminOperationKind.STOP_PROFILE:
                reached = [seen[p].profiles for p in group.participant_ids]
                return any(running is None or record.spec.profile_id not in running for running in reached)
            case AdminOperationKind.FLUSH_CACHES:
                steps = [s for s in self._ledger.steps.values() if s.group_id == group.group_id]
                return not all(_has_refused(s) for s in steps)
            case _:
                return True  # an update past its point of no return

    def _is_unknown(
        self,
        snapshot: Snapshot,
        group: GroupMembers,
        seen: Mapping[ParticipantId, ParticipantReadBack],
    ) -> str:
        """Why the group's state is not known to be what the journal says; empty when it is."""
        infos = {p.participant_id: p for p in self._ports.driver.participants()}
        if self._ledger.record.moves.committed and any(
            p not in infos or not infos[p].connected for p in group.participant_ids
        ):
            # It is gated when it comes back, until it was brought to the published version (AD-32, AD-35).
            return ""
        members = [infos[p] for p in group.participant_ids if p in infos]
        return divergence(snapshot.desired, members, seen)


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


def _was_obeyed(report: GroupReport) -> bool:
    """Whether every participant answered that it did the step."""
    obeyed = {o.participant_id for o in report.result.participants if o.error is None}
    return obeyed.issuperset(report.call.participant_ids)


def _has_refused(record: StepRecord) -> bool:
    """Whether every participant said that a flush emptied nothing."""
    if record.result is None:
        return False
    return all(
        not o.changed or (o.caches and all(c.outcome is CacheOutcome.REFUSED for c in o.caches))
        for o in record.result.participants
    )
