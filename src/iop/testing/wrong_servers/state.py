"""Revisions, epochs and plans that are not true (AD-13, AD-14, AD-41 to AD-43, AD-105)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from iop.admin import planner, revisions, settle
from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import AdminOperationKind
from iop.admin.permissions import Principal
from iop.admin.requests import ResumeRequest, kind_of
from iop.admin.results import AdminOperationEvent, OperationPlan
from iop.admin.states import Legality, legality_of
from iop.core.errors import Conflict, IopError, NotFound
from iop.testing.wrong_servers.defect import Defect, changed, patched, with_core

__all__ = ["DEFECTS"]


class _RefusalsRaiseTheRevision(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        try:
            async for event in super().submit(call):
                yield event
        except IopError:
            await self._journal.amend(lambda snapshot: revisions.risen(snapshot.desired))
            raise


class _ZeroIsNothing(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        if call.request.options.expected_revision == 0:
            call = changed(call, expected_revision=None)
        async for event in super().submit(call):
            yield event


class _RevisionIgnored(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        async for event in super().submit(changed(call, expected_revision=None)):
            yield event


def _secretive(*arguments: Any, **options: Any) -> None:
    try:
        revisions.check_revision(*arguments, **options)
    except Conflict as refusal:
        raise Conflict("the revision is another", reason=refusal.reason) from None


def _never_pending(options: Any, *, current: int, has_running: bool) -> None:
    revisions.check_revision(options, current=current, has_running=False)


def _flat(desired: Any) -> Any:
    return desired


class _AnyEpoch(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        active = (await self._journal.snapshot()).desired.pauses
        request = call.request
        if isinstance(request, ResumeRequest) and active and request.pause_epoch not in active:
            request = dataclasses.replace(request, pause_epoch=max(active))
            call = dataclasses.replace(call, request=request)
        async for event in super().submit(call):
            yield event


class _StaleIsNotFound(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        try:
            async for event in super().submit(call):
                yield event
        except IopError as refusal:
            if refusal.reason == "STALE_EPOCH":
                raise NotFound(refusal.message, reason="STALE_EPOCH", details=refusal.details) from None
            raise


def _never_the_same(*_arguments: Any) -> bool:
    return False


def _any_mode(*_arguments: Any) -> None:
    return None


def _patch_resume() -> Any:
    original = settle.after_success

    def spoilt(desired: Any, record: Any, *arguments: Any, **options: Any) -> Any:
        after = original(desired, record, *arguments, **options)
        is_resume = record.spec.kind is AdminOperationKind.RESUME
        return dataclasses.replace(after, pauses={}) if is_resume else after

    return patched("iop.admin.settle.after_success", spoilt)()


def _lax(state: Any, kind: Any) -> Legality:
    found = legality_of(state, kind)
    return Legality.LEGAL if found in {Legality.LEGAL_WITH_PAUSE, Legality.RESOURCES_RELEASED} else found


class _PlansForReal(AdminCore):
    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        options = call.request.options
        if not options.validate_only:
            async for event in super().submit(call):
                yield event
            return
        plan = [event async for event in super().submit(call)]
        if kind_of(call.request) is AdminOperationKind.FLUSH_CACHES and not _blocked(plan[0]):
            key = options.idempotency_key or "planned"
            async for _ in super().submit(changed(call, validate_only=False, idempotency_key=key)):
                pass
        yield plan[0]


def _blocked(event: AdminOperationEvent) -> bool:
    return isinstance(event.event, OperationPlan) and bool(event.event.blockers)


_explain = planner.explain


def _no_blockers(*arguments: Any) -> OperationPlan:
    return dataclasses.replace(_explain(*arguments), blockers=())


class _NoPauses(AdminCore):
    async def profile(self, principal: Principal) -> Any:
        return dataclasses.replace(await super().profile(principal), pauses=())


DEFECTS = (
    Defect(
        name="a refusal raises the revision",
        caught_by=("AD-13-refusals-keep-it",),
        recipe=with_core(_RefusalsRaiseTheRevision),
    ),
    Defect(
        name="success does not raise the revision",
        caught_by=("AD-13-rises",),
        patch=patched("iop.admin.settle.risen", _flat),
    ),
    Defect(
        name="expected_revision 0 is ignored",
        caught_by=("AD-13-zero-is-a-value",),
        recipe=with_core(_ZeroIsNothing),
    ),
    Defect(
        name="expected_revision is ignored", caught_by=("AD-13-mismatch",), recipe=with_core(_RevisionIgnored)
    ),
    Defect(
        name="a mismatch does not name the revision",
        caught_by=("AD-13-mismatch",),
        patch=patched("iop.admin.planner.check_revision", _secretive),
    ),
    Defect(
        name="a running mutation does not hold up others that compare revisions",
        caught_by=("AD-13-pending",),
        patch=patched("iop.admin.planner.check_revision", _never_pending),
    ),
    Defect(
        name="the epoch is ignored",
        caught_by=("AD-14-unknown-epoch", "AD-14-old-epoch-spares-new-pause"),
        recipe=with_core(_AnyEpoch),
    ),
    Defect(
        name="wrong status for a stale epoch",
        caught_by=("AD-14-second-resume", "AD-14-unknown-epoch", "AD-14-restore-epoch"),
        recipe=with_core(_StaleIsNotFound),
    ),
    Defect(
        name="pauses are not in the profile",
        caught_by=("AD-14-epoch-in-profile",),
        recipe=with_core(_NoPauses),
    ),
    Defect(
        name="the same pause gets another epoch",
        caught_by=("AD-41-same-pause",),
        patch=patched("iop.admin.epochs._is_same", _never_the_same),
    ),
    Defect(
        name="a softer pause is accepted",
        caught_by=("AD-41-softer-mode",),
        patch=patched("iop.admin.epochs._check_mode", _any_mode),
    ),
    Defect(name="a resume ends every pause", caught_by=("AD-42-resume-ends-one",), patch=_patch_resume),
    Defect(
        name="a release needs no pause",
        caught_by=("AD-43-needs-pause", "AD-43-release-restore", "AD-45-needs-quiesce"),
        patch=patched("iop.admin.legality.legality_of", _lax),
    ),
    Defect(
        name="validate_only is carried out",
        caught_by=("AD-105-changes-nothing",),
        recipe=with_core(_PlansForReal),
    ),
    Defect(
        name="a plan hides what speaks against it",
        caught_by=("AD-105-blockers",),
        patch=patched("iop.admin.planner.explain", _no_blockers),
    ),
)
