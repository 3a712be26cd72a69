"""Operations that end otherwise than they say (AD-18, AD-23 to AD-25, AD-29 to AD-32, AD-38, AD-40, AD-46)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

from iop.admin import planner
from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import BusyPolicy, CacheOutcome, CancelDisposition
from iop.admin.permissions import Principal
from iop.admin.records import OperationRecord
from iop.admin.requests import ListOperationsRequest, UpdateWeightsRequest
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    CancelResult,
    FlushCachesResult,
    OperationCompleted,
    OperationFailed,
    OperationPage,
    StopProfileResult,
)
from iop.admin.steps import FlushStep, ParticipantOutcome, Step
from iop.core.errors import Unsupported
from iop.core.ids import OperationId
from iop.testing.conformance_site import Recipe, SiteFleet
from iop.testing.fake_participants import FakeRank, FaultKind
from iop.testing.memory_journal import MemoryJournal
from iop.testing.wrong_servers.defect import Defect, changed, doctored, patched, with_core

__all__ = ["DEFECTS"]


def _all_is_well(*_arguments: Any, **_options: Any) -> None:
    return None


def _as_it_is(desired: Any, _record: Any) -> Any:
    return desired


def _names_nobody(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    if not isinstance(event.event, OperationFailed):
        return [event]
    error = dataclasses.replace(event.event.error, participants=())
    return [dataclasses.replace(event, event=dataclasses.replace(event.event, error=error))]


def _claims_rollback(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    if not isinstance(event.event, OperationFailed):
        return [event]
    error = dataclasses.replace(event.event.error, rolled_back=not event.event.error.rolled_back)
    return [dataclasses.replace(event, event=dataclasses.replace(event.event, error=error))]


def _refused_success(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    done = event.event
    if not isinstance(done, OperationCompleted) or not isinstance(done.result, FlushCachesResult):
        return [event]
    first, *others = done.result.caches
    spoilt = dataclasses.replace(first, outcome=CacheOutcome.REFUSED, detail="busy")
    result = dataclasses.replace(done.result, caches=(spoilt, *others))
    return [dataclasses.replace(event, event=dataclasses.replace(done, result=result))]


def _half_the_flush(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    done = event.event
    if not isinstance(done, OperationCompleted) or not isinstance(done.result, FlushCachesResult):
        return [event]
    result = dataclasses.replace(done.result, caches=done.result.caches[:1])
    return [dataclasses.replace(event, event=dataclasses.replace(done, result=result))]


class _FlushesTheBusy(SiteFleet):
    def _obey(
        self, operation_id: str, body: Step, rank: FakeRank, fault: FaultKind | None
    ) -> ParticipantOutcome:
        if isinstance(body, FlushStep) and body.busy_policy is BusyPolicy.FAIL:
            body = dataclasses.replace(body, busy_policy=BusyPolicy.WAIT)
        return super()._obey(operation_id, body, rank, fault)


class _NoDeadline(AdminCore):
    async def _accept(self, call: MutationCall) -> OperationId:
        return await super()._accept(changed(call, deadline_ms=None))


class _CancelsTheCommitted(AdminCore):
    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        told = await super().cancel(principal, operation_id, reason=reason)
        if told.disposition is CancelDisposition.TOO_LATE:
            return dataclasses.replace(told, disposition=CancelDisposition.CANCELLING)
        return told


class _CancelDoesNothing(AdminCore):
    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        operation = await self.get(principal, operation_id)
        is_over = operation.ended_at_unix_nanos is not None
        disposition = CancelDisposition.ALREADY_TERMINAL if is_over else CancelDisposition.CANCELLING
        return CancelResult(
            disposition=disposition, operation=dataclasses.replace(operation, cancel_requested=not is_over)
        )


class _CancelsNothing(AdminCore):
    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        await super().cancel(principal, operation_id, reason=reason)
        raise Unsupported("no operation can be cancelled here", reason="CANCEL_UNSUPPORTED")


class _PublishesFailures(AdminCore):
    """The version label moves although the update failed."""

    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        async for event in super().submit(call):
            request = call.request
            if isinstance(event.event, OperationFailed) and isinstance(request, UpdateWeightsRequest):
                await self._journal.amend(lambda now, asked=request: _published(now.desired, asked))  # type: ignore[misc]
            yield event


def _published(desired: Any, request: UpdateWeightsRequest) -> Any:
    weights = {
        model: dataclasses.replace(record, version=request.weight_version)
        for model, record in desired.weights.items()
    }
    return dataclasses.replace(desired, weights=weights)


class _TellsHalf(AdminCore):
    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        told = await super().get(principal, operation_id)
        return dataclasses.replace(told, request_sha256=b"", participants=())


class _FindsEverything(AdminCore):
    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        if operation_id.startswith("no-such"):
            everything = await super().list_operations(principal, ListOperationsRequest())
            if everything.operations:
                return everything.operations[0]
        return await super().get(principal, operation_id)


class _OldestFirst(MemoryJournal):
    async def list_operations(self, **wanted: Any) -> Sequence[OperationRecord]:
        return tuple(reversed(await super().list_operations(**wanted)))


class _ListsAll(AdminCore):
    async def list_operations(self, principal: Principal, request: ListOperationsRequest) -> OperationPage:
        everything = dataclasses.replace(request, kinds=(), states=())
        return await super().list_operations(principal, everything)


_supersede = planner._supersede


def _anonymous_takeover(*arguments: Any) -> Any:
    advance = _supersede(*arguments)
    ended = tuple(dataclasses.replace(event, superseded_by="") for event in advance.events)  # type: ignore[arg-type]  # all of them are cancelled
    return dataclasses.replace(advance, events=ended)


class _LosesArtifacts(AdminCore):
    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._stopped: set[str] = set()

    async def run_to_end(self, call: MutationCall) -> Any:
        result = await super().run_to_end(call)
        if isinstance(result, StopProfileResult):
            if result.profile_id in self._stopped:
                return dataclasses.replace(result, artifacts=())
            self._stopped.add(result.profile_id)
        return result


DEFECTS = (
    Defect(
        name="the failure of a rank is reported as success",
        caught_by=("AD-31-partial-pause", "AD-40-partial-flush"),
        patch=patched("iop.admin.crew.judge", _all_is_well),
    ),
    Defect(
        name="a failure names no rank",
        caught_by=("AD-31-partial-pause", "AD-38-failed-update"),
        recipe=doctored(_names_nobody),
    ),
    Defect(
        name="the rollback is skipped",
        caught_by=("AD-31-partial-pause", "AD-25-operation-deadline", "AD-24-cancelling"),
        patch=patched("iop.admin.settle.without_operation", _as_it_is),
    ),
    Defect(
        name="rolled_back is not true", caught_by=("AD-31-partial-pause",), recipe=doctored(_claims_rollback)
    ),
    Defect(
        name="a refused flush is reported as cleared",
        caught_by=("AD-40-refused-flush",),
        recipe=Recipe(fleet=_FlushesTheBusy),
    ),
    Defect(
        name="success of a refused flush",
        caught_by=("AD-40-flush-result",),
        recipe=doctored(_refused_success),
    ),
    Defect(
        name="a flush tells of some participants only",
        caught_by=("AD-40-flush-result",),
        recipe=doctored(_half_the_flush),
    ),
    Defect(
        name="the operation deadline is ignored",
        caught_by=("AD-25-operation-deadline",),
        recipe=with_core(_NoDeadline),
    ),
    Defect(
        name="a cancel after the commit is honoured",
        caught_by=("AD-32-cancel-or-commit",),
        recipe=with_core(_CancelsTheCommitted),
    ),
    Defect(
        name="a cancel has no effect", caught_by=("AD-24-cancelling",), recipe=with_core(_CancelDoesNothing)
    ),
    Defect(
        name="a pause cannot be cancelled",
        caught_by=("AD-24-cancelling", "AD-24-already-terminal"),
        recipe=with_core(_CancelsNothing),
    ),
    Defect(
        name="a failed update publishes its version",
        caught_by=("AD-38-failed-update", "AD-32-partial-update"),
        recipe=with_core(_PublishesFailures),
    ),
    Defect(name="half of the state is told", caught_by=("AD-23-whole-state",), recipe=with_core(_TellsHalf)),
    Defect(name="unknown ids are found", caught_by=("AD-23-unknown-id",), recipe=with_core(_FindsEverything)),
    Defect(
        name="operations are listed oldest first",
        caught_by=("AD-01-list",),
        recipe=Recipe(journal=_OldestFirst),
    ),
    Defect(name="filters of the list are ignored", caught_by=("AD-01-list",), recipe=with_core(_ListsAll)),
    Defect(
        name="a pause that was taken over does not name its successor",
        caught_by=("AD-18-takeover",),
        patch=patched("iop.admin.planner._supersede", _anonymous_takeover),
    ),
    Defect(
        name="a stopped profile has no artifacts any more",
        caught_by=("AD-46-start-stop",),
        recipe=with_core(_LosesArtifacts),
    ),
)
