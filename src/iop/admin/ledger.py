"""The ledger: one operation as the journal has it, and the only way in which its execution writes (AD-20, AD-21).

It keeps the record and the step records at hand, so that the parts of an execution decide from what is durable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from iop.admin.crew import CrewTiming, GroupReport, read_back_all
from iop.admin.enums import AdminErrorCode, ParticipantPhase
from iop.admin.journal import Advance, Journal, Snapshot
from iop.admin.participant import ParticipantDriver
from iop.admin.records import GroupMembers, OperationRecord, Phase, StepRecord
from iop.admin.results import ParticipantError, ParticipantStatus, is_terminal
from iop.admin.steps import ParticipantReadBack, Step
from iop.core.clock import Clock
from iop.core.errors import Unavailable
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = ["EndedElsewhereError", "ExecutorPorts", "ExecutorTiming", "Ledger", "may_have_effect"]

logger = logging.getLogger(__name__)

READ_AGAIN_S: Final = 0.25
"""Between two questions to an engine that does not tell yet how it stands."""


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


class EndedElsewhereError(Exception):
    """The operation is terminal already: superseded in another transaction (AD-18)."""


class Ledger:
    """One operation's record, its steps, and its way into the journal."""

    def __init__(self, ports: ExecutorPorts, record: OperationRecord) -> None:
        self.ports = ports
        self.record = record
        self.steps: dict[tuple[int, GroupId], StepRecord] = {}
        self._answered: set[tuple[int, GroupId]] = set()
        self._void: set[tuple[int, GroupId]] = set()
        self._began: Mapping[ParticipantId, str] = {}

    async def open(self) -> None:
        """Take over the steps that a process before us recorded."""
        self.remember(await self.ports.journal.steps(self.record.operation_id))
        self._began = self.instances()

    def groups_of(self, phase: Phase) -> list[GroupMembers]:
        """The groups that a phase concerns."""
        groups = self.record.spec.groups
        return list(groups) if phase.groups is None else [groups[i] for i in phase.groups]

    def is_answered(self, index: int, group: GroupId) -> bool:
        """Whether the journal holds this group's good answer to a phase already."""
        return (index, group) in self._answered

    def statuses_of(self, report: GroupReport, done: ParticipantPhase) -> list[ParticipantStatus]:
        """Statuses after a group's report: `done`, or FAILED with the error."""
        after = {r.participant_id: r for r in report.after}
        outcomes = {o.participant_id: o for o in report.result.participants}
        statuses = []
        for participant in report.call.participant_ids:
            error = report.errors.get(participant)
            outcome, seen = outcomes.get(participant), after.get(participant)
            version = (seen.weight_version if seen is not None else None) or ""
            status = self.status(participant, ParticipantPhase.FAILED if error else done, error)
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

    def status(
        self, participant: ParticipantId, phase: ParticipantPhase, error: ParticipantError | None = None
    ) -> ParticipantStatus:
        """A participant's status in another phase; an error once noted stays."""
        known = self.record.statuses.get(participant)
        if known is None:
            return ParticipantStatus(participant_id=participant, phase=phase, error=error)
        return dataclasses.replace(known, phase=phase, error=error or known.error)

    def remember(self, records: Iterable[StepRecord]) -> None:
        """Keep step records at hand; they are in the journal, or go there in the same breath."""
        for record in records:
            self.steps[record.step, record.group_id] = record
            result = record.result
            if (
                not record.is_undo
                and result is not None
                and all(o.error is None for o in result.participants)
            ):
                self._answered.add((record.phase_index, record.group_id))

    async def read_groups(
        self, groups: Sequence[GroupMembers], *, within_s: float = math.inf
    ) -> Mapping[ParticipantId, ParticipantReadBack]:
        """Read whole groups back."""
        return await self.read([p for g in groups for p in g.participant_ids], within_s=within_s)

    async def read(
        self, ids: Sequence[ParticipantId], *, within_s: float = math.inf
    ) -> Mapping[ParticipantId, ParticipantReadBack]:
        """Read participants back; who does not answer in time is unreachable."""
        timeout_s = min(within_s, self.ports.timing.crew.read_back_timeout_s)
        seen = await read_back_all(self.ports.driver, ids, timeout_s=timeout_s)
        self.ports.last_seen.update({p: s for p, s in seen.items() if s.reachable})
        return seen

    async def read_until_told(
        self, groups: Sequence[GroupMembers]
    ) -> Mapping[ParticipantId, ParticipantReadBack]:
        """Read whole groups back for good: who is connected and does not tell is asked again, within the same bound.

        Nothing is told of ranks that a step which was given up still acts on, and it soon is: that alone is no reason
        to take a group for unknown (AD-31).
        """
        until = self.ports.clock.monotonic() + self.ports.timing.crew.read_back_timeout_s
        seen = dict(await self.read_groups(groups))
        while True:
            connected = {p.participant_id for p in self.ports.driver.participants() if p.connected}
            silent = [p for p, told in seen.items() if not told.reachable and p in connected]
            if not silent or self.ports.clock.monotonic() >= until:
                return seen
            await asyncio.sleep(READ_AGAIN_S)
            seen.update(await self.read(silent))

    def instances(self) -> Mapping[ParticipantId, str]:
        """The engine process of each participant, as last reached."""
        ids = self.record.spec.participant_ids
        seen = {p: self.ports.last_seen[p].instance for p in ids if p in self.ports.last_seen}
        return {p: instance for p, instance in seen.items() if instance}

    def touched_groups(self) -> frozenset[GroupId]:
        """Groups that some step may have had an effect on."""
        return frozenset(s.group_id for s in self.steps.values() if may_have_effect(s))

    def has_reached_goal(self, group: GroupId) -> bool:
        """Whether the group is through all its phases."""
        return all(
            self.is_answered(index, group)
            for index, phase in enumerate(self.record.spec.phases)
            if any(g.group_id == group for g in self.groups_of(phase))
        )

    def has_restarted(self, group: GroupMembers, seen: Mapping[ParticipantId, ParticipantReadBack]) -> bool:
        """Whether all members answer, and some from another process than the operation began with."""
        if not all(p in seen and seen[p].reachable for p in group.participant_ids):
            return False
        records = [
            record
            for _, record in sorted(self.steps.items())
            if record.group_id == group.group_id and not record.is_undo
        ]
        began: dict[ParticipantId, str] = {}
        for told in [r for record in records for r in record.before]:
            began.setdefault(told.participant_id, told.instance)
        for participant in group.participant_ids:
            began.setdefault(participant, self._began.get(participant, ""))
        for told in [r for record in records for r in record.after]:
            began[told.participant_id] = began.get(told.participant_id) or told.instance
        return any(began.get(p) and seen[p].instance not in {"", began[p]} for p in group.participant_ids)

    def void_steps(self, groups: Iterable[GroupId]) -> None:
        """What these groups did, a process that is gone did: every phase is theirs again, as another step."""
        gone = frozenset(groups)
        self._answered = {(index, group) for index, group in self._answered if group not in gone}
        self._void |= {key for key in self.steps if key[1] in gone}

    def is_open(self, record: StepRecord) -> bool:
        """Whether a step was begun and its answer is still to come, from the process that it was sent to."""
        return record.result is None and (record.step, record.group_id) not in self._void

    def failed_participants(self) -> tuple[ParticipantId, ...]:
        """Those that failed by themselves, not because the rest was called off."""
        failed = [
            p
            for p, status in self.record.statuses.items()
            if status.error is not None and status.error.code is not AdminErrorCode.INTERRUPTED
        ]
        return tuple(sorted(failed))

    async def refresh(self) -> None:
        """Take over what other transactions did to the operation (cancel, supersede)."""
        record = await self.ports.journal.load(self.record.operation_id)
        if record is None or record.moves.state.is_terminal:
            raise EndedElsewhereError
        self.record = record

    async def advance(self, move: Callable[[Snapshot, OperationRecord], Advance | None]) -> None:
        """Move the operation on in the journal; waits for as long as the store cannot be written (AD-100)."""

        def guarded(snapshot: Snapshot, record: OperationRecord) -> Advance | None:
            if record.moves.state.is_terminal:
                raise EndedElsewhereError
            advance = move(snapshot, record)
            return None if advance is None else self._within_history(record, advance)

        while True:
            try:
                self.record = await self.ports.journal.advance(self.record.operation_id, guarded)
            except Unavailable as exc:
                if exc.reason != "STORE_UNAVAILABLE":
                    raise
                logger.error("operation.stalled op_id=%s error=%s", self.record.operation_id, exc)
                await asyncio.sleep(self.ports.timing.store_retry_s)
            else:
                self.ports.announce(self.record.operation_id)
                return

    def _within_history(self, record: OperationRecord, advance: Advance) -> Advance:
        """Beyond `max_event_history` only terminal events are added (AD-50); nothing numbered is dropped."""
        room = self.ports.max_event_history - record.moves.last_sequence
        if len(advance.events) <= room:
            return advance
        ending = [e for e in advance.events if is_terminal(e)]
        others = [e for e in advance.events if not is_terminal(e)][: max(0, room)]
        return dataclasses.replace(advance, events=(*others, *ending))


def may_have_effect(record: StepRecord) -> bool:
    """Whether a step that was made durable may have changed its group: unanswered counts as yes."""
    if record.result is None:
        return True
    return any(o.changed for o in record.result.participants)
