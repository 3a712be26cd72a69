"""Which admin steps run, which are answered from memory, and which are refused (EN-108, EN-117, EN-120,
AD-36).

A book outlives connections, not the process. A step is done once per (operation, step): while it runs, a
repetition waits for the same result; when it has ended, the kept result is given again. A step whose
(ordinal, step) lies below the last one seen for any of its participants was superseded and is refused. What
the book forgot, because the process restarted or the entry was pushed out, is for the Edge to settle: it
reads state back before it repeats a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final, Generic, TypeAlias, TypeVar

from iop.wire.messages import AdminStep, AdminStepResult

RESULTS_KEPT_MAX: Final = 1024
"""Results kept for a repetition. An Edge repeats only the steps of operations that are under way."""

PARTICIPANTS_MAX: Final = 65_536
"""Participants whose last step is remembered; far above any machine's ranks. Beyond it the oldest are
forgotten."""

Waiter = TypeVar("Waiter")
StepKey: TypeAlias = tuple[str, str, str, int]
"""Adapter, group, operation, step: one operation sends the same step to many groups."""


def key_of(step: AdminStep) -> StepKey:
    """What makes a repetition the same step."""
    return step.adapter, step.group_id, step.operation_id, step.step


@unique
class Verdict(Enum):
    """What to do with a step that came in."""

    RUN = "run"
    WAIT = "wait"
    REPLAY = "replay"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict, and the kept result when it is REPLAY."""

    verdict: Verdict
    result: AdminStepResult | None = None


@dataclass(slots=True)
class _Running(Generic[Waiter]):
    waiters: list[Waiter] = field(default_factory=list)


class StepBook(Generic[Waiter]):
    """Memory of steps. Pure. A waiter is whatever the shell answers through, one per received packet."""

    def __init__(self) -> None:
        self._running: dict[StepKey, _Running[Waiter]] = {}
        self._results: OrderedDict[StepKey, AdminStepResult] = OrderedDict()
        self._last_seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    @property
    def running_count(self) -> int:
        """Steps under way."""
        return len(self._running)

    def last_seen(self) -> Mapping[tuple[str, str], tuple[int, int]]:
        """(ordinal, step) by (adapter, participant), for the status."""
        return self._last_seen

    def receive(self, step: AdminStep, waiter: Waiter) -> Decision:
        """Take in one step. After RUN the shell executes it and calls :meth:`finish`; after WAIT, that will
        answer.
        """
        key = key_of(step)
        running = self._running.get(key)
        if running is not None:
            running.waiters.append(waiter)
            return Decision(verdict=Verdict.WAIT)
        kept = self._results.get(key)
        if kept is not None:
            return Decision(verdict=Verdict.REPLAY, result=kept)
        position = (step.ordinal, step.step)
        names = [(step.adapter, participant) for participant in step.participant_ids]
        if any(position < self._last_seen.get(name, position) for name in names):
            return Decision(verdict=Verdict.STALE)
        for name in names:
            self._last_seen[name] = position
            self._last_seen.move_to_end(name)
        while len(self._last_seen) > PARTICIPANTS_MAX:
            self._last_seen.popitem(last=False)
        self._running[key] = _Running(waiters=[waiter])
        return Decision(verdict=Verdict.RUN)

    def waiters(self, key: StepKey) -> tuple[Waiter, ...]:
        """Who is to hear of the progress of a running step."""
        running = self._running.get(key)
        return tuple(running.waiters) if running is not None else ()

    def finish(self, key: StepKey, result: AdminStepResult) -> tuple[Waiter, ...]:
        """Keep the result of a running step; the waiters are to be answered with it.

        A refusal that touched nothing is not kept: the same step may be possible the next time it is sent.
        """
        running = self._running.pop(key)
        if not result.refused_code:
            self._results[key] = result
            while len(self._results) > RESULTS_KEPT_MAX:
                self._results.popitem(last=False)
        return tuple(running.waiters)
