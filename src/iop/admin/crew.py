"""One step on many groups, side by side: calls, read-back, judgement, and who was lost (AD-25, AD-36, AD-37).

A `Crew` runs one phase for one operation. It decides nothing about the operation: it reports what each group did, as
they finish, and can be told to abandon those still waiting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType

from iop.admin.enums import AdminErrorCode, ParticipantPhase
from iop.admin.goals import Goal, judge
from iop.admin.participant import ParticipantDriver
from iop.admin.results import ParticipantError
from iop.admin.steps import (
    ParticipantOutcome,
    ParticipantReadBack,
    StepCall,
    StepProgress,
    StepResult,
)
from iop.core.clock import Clock
from iop.core.errors import IopError, Unavailable
from iop.core.ids import GroupId, ParticipantId

__all__ = ["WAIT_S_MIN", "Crew", "CrewTiming", "GroupReport", "read_back_all"]

logger = logging.getLogger(__name__)

WAIT_S_MIN = 0.001
"""Shortest wait: a time that is due within the clock's resolution must still come."""

MESSAGE_CHARS_MAX = 500
"""Longest engine message kept per participant; it is stored and shown with every status."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CrewTiming:
    """Bounds of everything that waits (AD-25).

    Attributes:
        lost_after_s: a participant unreachable for so long fails its step with PARTICIPANT_LOST. Shorter turns a
            reconnect into a failure; longer keeps everybody else waiting.
        read_back_timeout_s: an engine that does not say how it stands within it counts as unknown.
    """

    lost_after_s: float = 30.0
    read_back_timeout_s: float = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """What one group did.

    Attributes:
        result: the step's answer, made up where there was none.
        errors: why participants did not reach the goal; empty means the group did.
        after: read back after the step; empty when it was not asked.
    """

    group_id: GroupId
    call: StepCall
    result: StepResult
    errors: Mapping[ParticipantId, ParticipantError]
    after: tuple[ParticipantReadBack, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether every participant of the group reached the goal."""
        return not self.errors


async def read_back_all(
    driver: ParticipantDriver, ids: Sequence[ParticipantId], *, timeout_s: float
) -> Mapping[ParticipantId, ParticipantReadBack]:
    """Read participants back; who does not answer in time, or at all, is unreachable."""
    seen: dict[ParticipantId, ParticipantReadBack] = {}
    if ids:
        try:
            async with asyncio.timeout(timeout_s):
                seen = {r.participant_id: r for r in await driver.read_back(ids)}
        except (IopError, TimeoutError) as exc:
            logger.warning("read_back.failed participants=%d error=%s", len(ids), exc)
    return {p: seen.get(p) or ParticipantReadBack(participant_id=p, reachable=False) for p in ids}


class Crew:
    """Runs the calls of one phase.

    Use as `async with crew:` around `wait`; leaving it early abandons all calls.
    """

    def __init__(
        self,
        driver: ParticipantDriver,
        clock: Clock,
        timing: CrewTiming,
        *,
        goal: Goal,
        phase: ParticipantPhase,
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._timing = timing
        self._goal = goal
        self._phase = phase
        self._wake = asyncio.Event()
        self._scopes: dict[GroupId, asyncio.Timeout] = {}
        self._abandoned: set[GroupId] = set()
        self._gone_since: dict[GroupId, float] = {}
        self._finished: list[GroupReport] = []
        self._pending: dict[GroupId, StepCall] = {}
        self._progress: dict[ParticipantId, StepProgress] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._is_stale = True

    async def __aenter__(self) -> Crew:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self.abandon(AdminErrorCode.INTERRUPTED)
        try:
            await self._tasks.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            # Whoever uses a crew matches on what it raised itself, which a task group would hide in a group.
            if group.exceptions != (error,):
                raise

    def start(self, calls: Sequence[StepCall]) -> None:
        """Send calls, one per group."""
        assert self._tasks is not None
        for call in calls:
            self._pending[call.group_id] = call
            self._tasks.create_task(self._run(call), name=f"step {call.operation_id}/{call.step}")

    @property
    def pending(self) -> int:
        """Groups that have not reported yet."""
        return len(self._pending)

    def wake(self) -> None:
        """Make `wait` return now: connectivity changed, or the owner wants to look."""
        self._is_stale = True
        self._wake.set()

    def abandon(self, why: AdminErrorCode) -> None:
        """Stop waiting for every group still running; each reports `why`. The steps may still take effect."""
        for group in list(self._pending):
            self._abandon(group, why)

    def take_progress(self) -> Mapping[ParticipantId, StepProgress]:
        """Progress since the last call, the latest of each participant."""
        taken, self._progress = self._progress, {}
        return taken

    async def wait(self, *, until: float) -> Sequence[GroupReport]:
        """Wait for reports, a wake-up or a time; return what finished since the last call.

        Args:
            until: monotonic seconds.
        """
        self._note_connectivity()
        until = min([until, *self._lost_times()])
        if not self._finished and self._pending:
            try:
                async with asyncio.timeout(max(WAIT_S_MIN, until - self._clock.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        self._note_connectivity()
        self._drop_lost()
        finished, self._finished = self._finished, []
        return finished

    def _lost_times(self) -> list[float]:
        return [
            since + self._timing.lost_after_s
            for group, since in self._gone_since.items()
            if group in self._pending
        ]

    def _note_connectivity(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        now = self._clock.monotonic()
        gone = {p.group_id for p in self._driver.participants() if not p.connected}
        known = {p.group_id for p in self._driver.participants()}
        for group in self._pending:
            if group in gone or group not in known:
                self._gone_since.setdefault(group, now)
            else:
                self._gone_since.pop(group, None)

    def _drop_lost(self) -> None:
        now = self._clock.monotonic()
        for group, since in self._gone_since.items():
            if group in self._pending and now >= since + self._timing.lost_after_s:
                self._abandon(group, AdminErrorCode.PARTICIPANT_LOST)

    def _abandon(self, group: GroupId, why: AdminErrorCode) -> None:
        """Report the group at once. Its call may be long in letting go of the engine; leaving the crew waits for it."""
        if group in self._abandoned:
            return
        self._abandoned.add(group)
        call = self._pending.pop(group)
        scope = self._scopes.get(group)
        if scope is None:
            self._finished.append(self._made_up(call, why, "not sent", changed=False))
        else:
            scope.reschedule(asyncio.get_running_loop().time())
            self._finished.append(self._given_up(call, why))
        self._wake.set()

    def _report(self, progress: StepProgress) -> None:
        self._progress[progress.participant_id] = progress
        self._wake.set()

    async def _run(self, call: StepCall) -> None:
        """Run one call under its own supervisor: whatever goes wrong becomes this group's report."""
        if call.group_id in self._abandoned:
            return
        try:
            report = await self._execute(call)
        except Exception as exc:
            logger.exception("step.crashed operation=%s step=%d", call.operation_id, call.step)
            report = self._made_up(call, AdminErrorCode.INTERNAL, type(exc).__name__)
        if call.group_id in self._abandoned:
            return  # reported when it was given up
        del self._pending[call.group_id]
        self._finished.append(report)
        self._wake.set()

    async def _execute(self, call: StepCall) -> GroupReport:
        group = call.group_id
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[group] = scope
                try:
                    result = await self._driver.execute(call, self._report)
                    after = await read_back_all(
                        self._driver, call.participant_ids, timeout_s=self._timing.read_back_timeout_s
                    )
                finally:
                    del self._scopes[group]
        except TimeoutError:
            return self._made_up(call, AdminErrorCode.DEADLINE_EXCEEDED, "it ran out of its own time")
        except Unavailable as exc:
            return self._made_up(call, AdminErrorCode.PARTICIPANT_LOST, exc.message)
        except IopError as exc:
            return self._made_up(call, AdminErrorCode.PARTICIPANT_FAILED, exc.message)
        return self._judged(call, result, after)

    def _judged(
        self, call: StepCall, result: StepResult, after: Mapping[ParticipantId, ParticipantReadBack]
    ) -> GroupReport:
        told = {o.participant_id: o for o in result.participants}
        errors: dict[ParticipantId, ParticipantError] = {}
        for participant in call.participant_ids:
            outcome = told.get(participant)
            if outcome is None:
                errors[participant] = self._error(AdminErrorCode.PARTICIPANT_FAILED, "it gave no answer")
                continue
            error = judge(self._goal, call.body, outcome, after[participant], phase=self._phase)
            if error is not None:
                errors[participant] = dataclasses.replace(error, message=error.message[:MESSAGE_CHARS_MAX])
        return GroupReport(
            group_id=call.group_id,
            call=call,
            result=result,
            errors=errors,
            after=tuple(after[p] for p in call.participant_ids),
        )

    def _given_up(self, call: StepCall, why: AdminErrorCode) -> GroupReport:
        """Of a call that goes on for nobody. When its time is up, who held it up is named, and the others with it."""
        silent = self._driver.silent(call.participant_ids) if why is AdminErrorCode.DEADLINE_EXCEEDED else {}
        if not silent:
            return self._made_up(call, why, _WORDS.get(why, "abandoned"))
        held_up = self._error(AdminErrorCode.INTERRUPTED, f"held up by {', '.join(sorted(silent))}")
        errors = {p: self._error(why, silent[p]) if p in silent else held_up for p in call.participant_ids}
        outcomes = tuple(ParticipantOutcome(participant_id=p, error=error) for p, error in errors.items())
        return GroupReport(
            group_id=call.group_id, call=call, result=StepResult(participants=outcomes), errors=errors
        )

    def _error(self, code: AdminErrorCode, message: str) -> ParticipantError:
        return ParticipantError(
            code=code, message=message[:MESSAGE_CHARS_MAX], step=self._phase, retryable=True
        )

    def _made_up(
        self, call: StepCall, why: AdminErrorCode, message: str, *, changed: bool = True
    ) -> GroupReport:
        error = self._error(why, message)
        outcomes = tuple(
            ParticipantOutcome(participant_id=p, error=error, changed=changed) for p in call.participant_ids
        )
        return GroupReport(
            group_id=call.group_id,
            call=call,
            result=StepResult(participants=outcomes),
            errors=dict.fromkeys(call.participant_ids, error),
        )


_WORDS = {
    AdminErrorCode.PARTICIPANT_LOST: "unreachable for too long",
    AdminErrorCode.DEADLINE_EXCEEDED: "the operation's deadline passed",
    AdminErrorCode.INTERRUPTED: "abandoned, since the operation will not complete",
    AdminErrorCode.ROLLBACK_FAILED: "the rollback's bound passed",
}
