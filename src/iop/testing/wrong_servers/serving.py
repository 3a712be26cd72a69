"""Servers that do something else to requests than they were told, or serve them where they must not (AD-02, AD-41)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError

from iop.admin import capability, planner, spool
from iop.admin.enums import AdminOperationKind
from iop.admin.profile import AdminLimits
from iop.admin.requests import InlineTensorSource
from iop.admin.steps import ParticipantOutcome, StepCall, WorkCounts
from iop.api.grpc import listeners
from iop.api.grpc.inference_service import INFERENCE_SERVICE
from iop.api.grpc.interceptors import AuthInterceptor
from iop.api.grpc.ports import GenerationEvent, OutputFinish, OutputFinished
from iop.api.grpc.server import GrpcListener
from iop.core.errors import Draining, IopError, Unsupported
from iop.testing.conformance_site import Recipe, SiteFleet
from iop.testing.site_inference import GROUP, SiteInference
from iop.testing.wrong_servers.defect import Defect, patched

__all__ = ["DEFECTS", "ONE_AT_ONCE", "CannotPutBack", "WithoutKinds"]

_is_public = AuthInterceptor._is_public
_admin_listener = listeners.admin_listener
_refusals = planner.refusals
_spool = spool.spool
_capability_refusals = capability.capability_refusals


class _ServesThroughPauses(SiteInference):
    async def admit(self) -> None:
        """Whatever the gate says."""


class _RefusesInsteadOfQueueing(SiteInference):
    async def admit(self) -> None:
        if not self.fleet.is_open(f"{GROUP}/0"):
            raise Draining("paused", reason="PAUSED")


class _StaysShut(SiteInference):
    """Who refused once refuses for ever."""

    def __init__(self, fleet: SiteFleet) -> None:
        super().__init__(fleet)
        self.is_shut = False

    async def admit(self) -> None:
        self.is_shut = self.is_shut or not self.fleet.is_open(f"{GROUP}/0")
        if self.is_shut:
            raise Draining("paused", reason="PAUSED")


class _GoesOnFrozen(SiteInference):
    async def turn(self) -> None:
        """Whatever froze it."""


class _CallsItFinished(SiteInference):
    def ending(self) -> GenerationEvent:
        return OutputFinished(output_index=0, reason=OutputFinish.LENGTH)


class _TellsNothing(SiteInference):
    admin_profile_revision = None


class _DrainsByAborting(SiteFleet):
    async def drained(self) -> None:
        self.aborts += 1
        self.work[GROUP] = 0


class _DrainsWithoutWaiting(SiteFleet):
    async def drained(self) -> None:
        """Whoever runs."""


class _CountsNobody(SiteFleet):
    def _on_work(self, call: StepCall, outcomes: Sequence[ParticipantOutcome]) -> WorkCounts:
        super()._on_work(call, outcomes)
        return WorkCounts()


class WithoutKinds(SiteFleet):
    """A fleet that does less: it takes no reconfiguration and no profile."""

    def __init__(self) -> None:
        super().__init__()
        for rank in self.ranks.values():
            less = {AdminOperationKind.RECONFIGURE_SERVING, AdminOperationKind.START_PROFILE}
            rank.capabilities = replace(rank.capabilities, operations=rank.capabilities.operations - less)


class CannotPutBack(SiteFleet):
    """A fleet that keeps no replaced weights, and does not tell where those of its start can be read again."""

    def __init__(self) -> None:
        super().__init__()
        for rank in self.ranks.values():
            rank.capabilities = replace(rank.capabilities, holds_previous_weights=False)


async def _spool_any_bytes(journal: Any, request: Any) -> Any:
    source = getattr(request, "source", None)
    if isinstance(source, InlineTensorSource):
        tensors = tuple(replace(tensor, sha256=b"") for tensor in source.tensors)
        request = replace(request, source=InlineTensorSource(tensors=tensors))
    return await _spool(journal, request)


def _no_limit(inp: Any, snapshot: Any) -> Iterator[IopError]:
    return (refusal for refusal in _refusals(inp, snapshot) if refusal.reason != "TOO_MANY_OPERATIONS")


def _no_inline(request: Any, chosen: Any) -> Iterator[IopError]:
    if isinstance(getattr(request, "source", None), InlineTensorSource):
        yield Unsupported("not by tensors", reason="UNSUPPORTED_BY_PARTICIPANT")
    yield from _capability_refusals(request, chosen)


def _with_inference(*arguments: Any, **options: Any) -> GrpcListener:
    """The admin listener, with inference on it."""
    listener = _admin_listener(*arguments, **options)
    inference = _ServesThroughPauses(SiteFleet()).listener()
    listener._services += tuple(s for s in inference._services if s.name == INFERENCE_SERVICE)
    return listener


def _serves_callers(interceptor: Any, method: str) -> bool:
    return INFERENCE_SERVICE in method or _is_public(interceptor, method)


@contextlib.contextmanager
def _one_listener_for_all() -> Iterator[None]:
    with (
        patched("iop.testing.conformance_site.admin_listener", _with_inference)(),
        patched("iop.api.grpc.interceptors.AuthInterceptor._is_public", _serves_callers)(),
    ):
        yield


def _guesses(request: Any, parse: Callable[[bytes], Any] | None) -> Any:
    """Bytes that are no message are taken for the commonest one."""
    if parse is None:
        return request
    try:
        return parse(request)
    except DecodeError:
        message = parse(b"")
        message.options.idempotency_key = "guessed"
        message.target.all.SetInParent()
        if "busy_policy" in message.DESCRIPTOR.fields_by_name:
            message.kinds.append(1)
            message.busy_policy = 2
        else:
            message.pause.mode = message.pause.admission = 1
        return message


def _accepts(*_arguments: Any, **_options: Any) -> None:
    return None


def _nothing(*_arguments: Any, **_options: Any) -> Iterator[Any]:
    return iter(())


def _inference(name: str, check_id: str, inference: Callable[[SiteFleet], SiteInference]) -> Defect:
    return Defect(name=name, caught_by=(check_id,), recipe=Recipe(inference=inference))


ONE_AT_ONCE = AdminLimits(max_concurrent_operations=1)
"""So that a fleet of two groups can have one operation too many."""

DEFECTS = (
    Defect(
        name="more operations at once than advertised",
        caught_by=("AD-18-limit",),
        recipe=Recipe(limits=ONE_AT_ONCE),
        patch=patched("iop.admin.planner.refusals", _no_limit),
    ),
    Defect(
        name="weights are replaced that cannot be put back",
        caught_by=("AD-32-irreversible",),
        recipe=Recipe(fleet=CannotPutBack),
        patch=patched("iop.admin.legality._update_refusals", _nothing),
    ),
    Defect(
        name="weights are discarded that cannot be reloaded",
        caught_by=("AD-43-irreversible",),
        recipe=Recipe(fleet=CannotPutBack),
        patch=patched("iop.admin.legality._release_refusals", _nothing),
    ),
    Defect(
        name="tensors in the request are offered and refused",
        caught_by=("AD-45-inline",),
        patch=patched("iop.admin.planner.capability_refusals", _no_inline),
    ),
    Defect(
        name="tensors in the request are not checked",
        caught_by=("AD-45-inline-shape",),
        patch=patched("iop.admin.shape._check_inline", _accepts),
    ),
    Defect(
        name="the digest of tensors is ignored",
        caught_by=("AD-45-inline-digest",),
        patch=patched("iop.admin.core.spool", _spool_any_bytes),
    ),
    Defect(
        name="inference on the admin listener",
        caught_by=("AD-02-apart",),
        patch=_one_listener_for_all,
    ),
    Defect(
        name="garbage is taken for a message",
        caught_by=("AD-10-garbage",),
        patch=patched("iop.api.grpc.interceptors._parse", _guesses),
    ),
    Defect(
        name="kinds that nobody offers are accepted",
        caught_by=("AD-15-kinds-refused",),
        recipe=Recipe(fleet=WithoutKinds),
        patch=patched("iop.admin.planner.capability_refusals", _nothing),
    ),
    _inference("core discovery hides the admin service", "AD-50-core-info", _TellsNothing),
    _inference("requests are served during a pause", "AD-41-queue", _ServesThroughPauses),
    _inference("requests that should wait are refused", "AD-41-queue", _RefusesInsteadOfQueueing),
    _inference("requests that should be refused are served", "AD-41-reject", _ServesThroughPauses),
    _inference("a rejecting pause goes on after its end", "AD-41-reject", _StaysShut),
    _inference("frozen requests go on", "AD-41-keep", _GoesOnFrozen),
    _inference("an aborted request is said to have finished", "AD-41-abort", _CallsItFinished),
    Defect(name="a drain ends requests", caught_by=("AD-41-drain",), recipe=Recipe(fleet=_DrainsByAborting)),
    Defect(
        name="a drain waits for nobody",
        caught_by=("AD-41-drain",),
        recipe=Recipe(fleet=_DrainsWithoutWaiting),
    ),
    Defect(
        name="a pause counts nobody",
        caught_by=("AD-41-drain", "AD-41-abort", "AD-41-keep"),
        recipe=Recipe(fleet=_CountsNobody),
    ),
)
