"""Wrong tellings of events (AD-21, AD-22, AD-26)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator

from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import ParticipantPhase
from iop.admin.permissions import Principal
from iop.admin.results import AdminOperationEvent, OperationProgress
from iop.core.errors import Unavailable
from iop.testing.wrong_servers.defect import Defect, TellingCore, doctored, with_core

__all__ = ["DEFECTS"]


def _numbered(event: AdminOperationEvent, sequence: int) -> AdminOperationEvent:
    return dataclasses.replace(event, sequence=sequence)


def _second_terminal(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [event, _numbered(event, event.sequence + 1)] if event.is_terminal else [event]


def _progress_after_the_end(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    late = OperationProgress(
        phase=ParticipantPhase.COMMITTED, done=1, total=1, unit="steps", message="by the way"
    )
    more = dataclasses.replace(event, sequence=event.sequence + 1, event=late)
    return [event, more] if event.is_terminal else [event]


def _no_end(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [] if event.is_terminal else [event]


def _gap(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [_numbered(event, event.sequence + (event.sequence > 2))]


def _from_zero(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [_numbered(event, event.sequence - 1)]


def _no_acceptance(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [] if event.sequence == 1 else [_numbered(event, event.sequence - 1)]


class _EndsWithError(TellingCore):
    async def tell(self, events: AsyncIterator[AdminOperationEvent]) -> AsyncIterator[AdminOperationEvent]:
        async for event in events:
            yield event
        raise Unavailable("goodbye", reason="GOODBYE")


class _LeavingCancels(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        operation_id, is_over = "", False
        events = super().submit(call)
        try:
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    operation_id, is_over = event.operation_id, event.is_terminal
                    yield event
        finally:
            if operation_id and not is_over:
                await self.cancel(call.principal, operation_id, reason="its observer left")


class _WatchRepeats(AdminCore):
    async def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        async for event in super().watch(principal, operation_id, after_sequence=max(0, after_sequence - 1)):
            yield event


class _WatchSkips(AdminCore):
    async def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        skipped = after_sequence + 1 if after_sequence else 0
        async for event in super().watch(principal, operation_id, after_sequence=skipped):
            yield event


class _WatchIsBlind(AdminCore):
    async def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        last = (await self.get(principal, operation_id)).last_sequence
        async for event in super().watch(principal, operation_id, after_sequence=after_sequence):
            yield event
            if event.sequence >= last:
                return  # what happens from now on is not told


DEFECTS = (
    Defect(
        name="second terminal event", caught_by=("AD-21-one-terminal",), recipe=doctored(_second_terminal)
    ),
    Defect(
        name="events after the terminal one",
        caught_by=("AD-21-one-terminal",),
        recipe=doctored(_progress_after_the_end),
    ),
    Defect(name="no terminal event", caught_by=("AD-21-one-terminal",), recipe=doctored(_no_end)),
    Defect(name="sequence gap", caught_by=("AD-21-sequences",), recipe=doctored(_gap)),
    Defect(name="sequences from zero", caught_by=("AD-21-first-event",), recipe=doctored(_from_zero)),
    Defect(
        name="first event is not acceptance",
        caught_by=("AD-21-first-event",),
        recipe=doctored(_no_acceptance),
    ),
    Defect(
        name="stream ends with an error after its terminal event",
        caught_by=("AD-21-ends-ok",),
        recipe=with_core(_EndsWithError),
    ),
    Defect(
        name="leaving the stream cancels the operation",
        caught_by=("AD-22-cancelled-stream", "AD-22-rpc-deadline", "AD-26-cut-connection"),
        recipe=with_core(_LeavingCancels),
    ),
    Defect(name="watch repeats an event", caught_by=("AD-26-watch-after",), recipe=with_core(_WatchRepeats)),
    Defect(name="watch skips an event", caught_by=("AD-26-watch-after",), recipe=with_core(_WatchSkips)),
    Defect(name="watch does not go live", caught_by=("AD-26-watch-live",), recipe=with_core(_WatchIsBlind)),
)
