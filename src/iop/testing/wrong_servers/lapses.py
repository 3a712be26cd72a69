"""Smaller lapses: a rule not kept here, a word not said there (most clauses from AD-01 to AD-105)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any

from iop.admin import epochs, planner
from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import AdminOperationKind, PauseMode
from iop.admin.permissions import Principal
from iop.admin.requests import PauseRequest
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    ReconfigureServingResult,
    StartProfileResult,
    UpdateWeightsResult,
)
from iop.api.grpc.admin_service import AdminService
from iop.api.grpc.interceptors import AuthInterceptor
from iop.core.errors import AlreadyExists, InvalidRequest, IopError, NotFound, PreconditionFailed, Unsupported
from iop.testing.wrong_servers.defect import Defect, TellingCore, doctored, patched, with_core
from iop.testing.wrong_servers.requests import mended

__all__ = ["DEFECTS"]

_refusals = planner.refusals
_claim_pause = epochs.claim_pause
_find_release = epochs.find_release
_is_public = AuthInterceptor._is_public
_list_operations = AdminService.ListOperations


def _ahead(*reasons: str) -> Any:
    """A planner that puts some refusals before those that have precedence."""

    def reordered(inp: Any, snapshot: Any) -> Iterator[IopError]:
        return iter(sorted(_refusals(inp, snapshot), key=lambda refusal: refusal.reason not in reasons))

    return patched("iop.admin.planner.refusals", reordered)


def _names_first(message: Any) -> None:
    if "target" in message.DESCRIPTOR.fields_by_name and "no-such-model" in message.target.models.models:
        raise NotFound("no such model", reason="MODEL_NOT_FOUND", details={"models": "no-such-model"})


def _lax_plans(message: Any) -> None:
    if message.options.validate_only and "target" in message.DESCRIPTOR.fields_by_name:
        message.target.all.SetInParent()


def _anything(*_arguments: Any, **_options: Any) -> None:
    return None


def _nothing(*_arguments: Any, **_options: Any) -> Iterator[Any]:
    return iter(())


def _as_given(value: str, _field: str) -> str:
    return value


def _no(*_arguments: Any) -> bool:
    return False


def _reflects_to_all(interceptor: Any, method: str) -> bool:
    return "ServerReflection" in method or _is_public(interceptor, method)


async def _no_list(*_arguments: Any) -> Any:
    raise Unsupported("not here", reason="UNIMPLEMENTED")


async def _lax_list(service: Any, request: Any, context: Any) -> Any:
    for name in ("kinds", "states"):
        known = [number for number in getattr(request, name) if 0 < number < 100]
        getattr(request, name)[:] = known
    return await _list_operations(service, request, context)


class _CallsItInvalid(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        try:
            async for event in super().submit(call):
                yield event
        except NotFound as refusal:
            raise InvalidRequest(refusal.message, reason=refusal.reason, details=refusal.details) from None


class _WatchesStreamsOnly(AdminCore):
    async def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        if (await self.get(principal, operation_id)).kind is AdminOperationKind.START_PROFILE:
            raise NotFound("it has no events", reason="OPERATION_NOT_FOUND")
        async for event in super().watch(principal, operation_id, after_sequence=after_sequence):
            yield event


class _StampsAnswers(AdminCore):
    async def run_to_end(self, call: MutationCall) -> Any:
        result = await super().run_to_end(call)
        if isinstance(result, StartProfileResult):
            return dataclasses.replace(result, started_at_unix_nanos=self._clock.unix_nanos())
        return result


class _ShowsPausesLate(AdminCore):
    async def profile(self, principal: Principal) -> Any:
        told = await super().profile(principal)
        running = (await self._journal.snapshot()).running
        settled = tuple(pause for pause in told.pauses if pause.operation_id not in running)
        return dataclasses.replace(told, pauses=settled)


class _ShowsOneMode(AdminCore):
    async def profile(self, principal: Principal) -> Any:
        told = await super().profile(principal)
        shown = tuple(dataclasses.replace(pause, mode=PauseMode.DRAIN) for pause in told.pauses)
        return dataclasses.replace(told, pauses=shown)


class _PlansKnowKeys(TellingCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        key = (call.principal.name, call.request.options.idempotency_key)
        store: Any = self._journal
        if call.request.options.validate_only and key in store._store.keys:
            raise AlreadyExists("the key was used", reason="IDEMPOTENCY_KEY_REUSED")
        async for event in super().submit(call):
            yield event


class _UnknownProfileIsAState(AdminCore):
    async def run_to_end(self, call: MutationCall) -> Any:
        try:
            return await super().run_to_end(call)
        except NotFound as refusal:
            raise PreconditionFailed(refusal.message, reason=refusal.reason) from None


class _TellsEndsEarly(AdminCore):
    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        told = await super().get(principal, operation_id)
        return told if told.state.is_terminal else dataclasses.replace(told, revision_after=9)


class _FailuresBlock(AdminCore):
    """A failed operation keeps its lock."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._locked_by = ""

    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        if self._locked_by and isinstance(call.request, PauseRequest):
            raise PreconditionFailed(
                "an operation is running",
                reason="OPERATION_IN_PROGRESS",
                details={"operation_id": self._locked_by},
            )
        async for event in super().submit(call):
            if isinstance(event.event, OperationFailed):
                self._locked_by = event.operation_id
            yield event


def _named_plan(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return [
        dataclasses.replace(event, operation_id="planned")
        if isinstance(event.event, OperationPlan)
        else event
    ]


def _completed(event: AdminOperationEvent, kind: type, **changes: Any) -> list[AdminOperationEvent]:
    done = event.event
    if not isinstance(done, OperationCompleted) or not isinstance(done.result, kind):
        return [event]
    result: Any = dataclasses.replace(done.result, **changes)
    return [dataclasses.replace(event, event=dataclasses.replace(done, result=result))]


def _silent_change(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return _completed(event, ReconfigureServingResult, changes=())


def _other_version(event: AdminOperationEvent) -> list[AdminOperationEvent]:
    return _completed(event, UpdateWeightsResult, weight_version="latest")


def _replaces_none(*arguments: Any, **options: Any) -> Any:
    return dataclasses.replace(_claim_pause(*arguments, **options), replaces=())


def _any_kinds(desired: Any, epoch: int, _kinds: Any) -> Any:
    return _find_release(desired, epoch, ())


def _all_kinds() -> tuple[AdminOperationKind, ...]:
    return tuple(AdminOperationKind)


def _shape(name: str, rule: str, check_id: str) -> Defect:
    return Defect(name=name, caught_by=(check_id,), patch=patched(f"iop.admin.shape.{rule}", _anything))


DEFECTS = (
    Defect(
        name="revisions are compared before names and capabilities",
        caught_by=("AD-17-names-before-revision", "AD-17-capability-before-revision"),
        patch=_ahead("REVISION_MISMATCH"),
    ),
    Defect(
        name="epochs are looked up before revisions are compared",
        caught_by=("AD-17-revision-before-epoch",),
        patch=_ahead("STALE_EPOCH"),
    ),
    Defect(
        name="names are looked up before the shape is checked",
        caught_by=("AD-17-shape-before-rest",),
        patch=mended(_names_first),
    ),
    Defect(
        name="the shape is checked before permission",
        caught_by=("AD-17-permission-before-shape",),
        patch=patched("iop.api.grpc.interceptors.require", _anything),
    ),
    Defect(
        name="an RPC is not there",
        caught_by=("AD-01-methods",),
        patch=patched("iop.api.grpc.admin_service.AdminService.ListOperations", _no_list),
    ),
    Defect(
        name="filters of the list are not checked",
        caught_by=("AD-10-list-filters",),
        patch=patched("iop.api.grpc.admin_service.AdminService.ListOperations", _lax_list),
    ),
    Defect(
        name="reflection for everybody",
        caught_by=("AD-06-reflection",),
        patch=patched("iop.api.grpc.interceptors.AuthInterceptor._is_public", _reflects_to_all),
    ),
    Defect(
        name="paused participants are shown as active",
        caught_by=("AD-50-states",),
        patch=patched("iop.admin.profiles.covering_pauses", lambda *_: ()),
    ),
    Defect(
        name="unknown names are called invalid",
        caught_by=("AD-15-unknown-names", "AD-45-unknown-model"),
        recipe=with_core(_CallsItInvalid),
    ),
    _shape("pause options are not checked", "_check_pause", "AD-41-pause-shape"),
    _shape("retention is not checked", "_check_release", "AD-43-retention-shape"),
    _shape("weight sources are not checked", "_check_source", "AD-45-source-shape"),
    _shape("profile requests are not checked", "_check_start_profile", "AD-46-profile-shape"),
    Defect(
        name="reasons without bound",
        caught_by=("AD-11-reason-length",),
        patch=patched("iop.admin.shape.REASON_BYTES_MAX", 1_000_000),
    ),
    Defect(
        name="an empty id is looked up",
        caught_by=("AD-23-ids-required",),
        patch=patched("iop.api.grpc.admin_service.require_text", _as_given),
    ),
    Defect(
        name="unary operations have no events",
        caught_by=("AD-21-unary-events",),
        recipe=with_core(_WatchesStreamsOnly),
    ),
    Defect(
        name="a unary replay has another answer",
        caught_by=("AD-12-replay-unary",),
        recipe=with_core(_StampsAnswers),
    ),
    Defect(
        name="a pause is shown only once it is complete",
        caught_by=("AD-14-at-acceptance",),
        recipe=with_core(_ShowsPausesLate),
    ),
    Defect(
        name="every pause is shown as a drain", caught_by=("AD-41-modes",), recipe=with_core(_ShowsOneMode)
    ),
    Defect(
        name="a harder pause leaves the old epoch in force",
        caught_by=("AD-41-harder-mode",),
        patch=patched("iop.admin.intent.claim_pause", _replaces_none),
    ),
    Defect(name="a plan has an operation id", caught_by=("AD-105-plan",), recipe=doctored(_named_plan)),
    Defect(
        name="a plan heeds used keys", caught_by=("AD-105-ignores-keys",), recipe=with_core(_PlansKnowKeys)
    ),
    Defect(name="a plan does not check the shape", caught_by=("AD-105-shape",), patch=mended(_lax_plans)),
    Defect(
        name="an unknown profile is a wrong state",
        caught_by=("AD-46-unknown-profile",),
        recipe=with_core(_UnknownProfileIsAState),
    ),
    Defect(
        name="limits of participants are ignored",
        caught_by=("AD-47-over-limit",),
        patch=patched("iop.admin.capability._within", _nothing),
    ),
    Defect(name="a change tells no results", caught_by=("AD-47-applied",), recipe=doctored(_silent_change)),
    Defect(
        name="what was not released can be restored",
        caught_by=("AD-44-subset",),
        patch=patched("iop.admin.legality.find_release", _any_kinds),
    ),
    Defect(
        name="a running operation tells its end",
        caught_by=("AD-23-while-running",),
        recipe=with_core(_TellsEndsEarly),
    ),
    Defect(
        name="unknown operations are denied to those who may cancel",
        caught_by=("AD-24-unknown-id",),
        patch=patched("iop.admin.core.may_cancel_anything", _no),
    ),
    Defect(
        name="the profile does not offer to cancel pauses",
        caught_by=("AD-24-pause-cancellable",),
        patch=patched("iop.admin.profiles.cancellable_kinds", lambda: ()),
    ),
    Defect(
        name="what cannot be cancelled is not refused",
        caught_by=("AD-24-unsupported",),
        patch=patched("iop.admin.core.cancellable_kinds", _all_kinds),
    ),
    Defect(
        name="expected_weight_version is ignored",
        caught_by=("AD-45-expected-version",),
        patch=patched("iop.admin.legality._check_weight_version", _anything),
    ),
    Defect(
        name="an update tells another version", caught_by=("AD-45-update",), recipe=doctored(_other_version)
    ),
    Defect(
        name="a failed operation blocks the next",
        caught_by=("AD-31-healed",),
        recipe=with_core(_FailuresBlock),
    ),
)
