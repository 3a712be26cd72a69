"""Servers that do something else to requests than they were told, or serve them where they must not (AD-02, AD-41)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from iop.admin.enums import AdminOperationKind
from iop.admin.steps import ParticipantOutcome, StepCall, WorkCounts
from iop.api.grpc import listeners
from iop.api.grpc.inference_service import INFERENCE_SERVICE
from iop.api.grpc.interceptors import AuthInterceptor
from iop.api.grpc.server import GrpcListener, GrpcService
from iop.pb.openengine.v1 import generation_pb2, openengine_pb2, openengine_pb2_grpc, server_pb2
from iop.testing.conformance_site import Recipe, SiteFleet
from iop.testing.site_inference import GROUP, SiteInference
from iop.testing.wrong_servers.defect import Defect, patched

__all__ = ["DEFECTS", "WithoutKinds"]

_is_public = AuthInterceptor._is_public
_admin_listener = listeners.admin_listener


class _ServesThroughPauses(SiteInference):
    async def admit(self, context: Any) -> None:
        """Whatever the gate says."""


class _RefusesInsteadOfQueueing(SiteInference):
    async def admit(self, context: Any) -> None:
        if not self.fleet.is_open(f"{GROUP}/0"):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "paused")


class _StaysShut(SiteInference):
    """Who refused once refuses for ever."""

    def __init__(self, fleet: SiteFleet) -> None:
        super().__init__(fleet)
        self.is_shut = False

    async def admit(self, context: Any) -> None:
        self.is_shut = self.is_shut or not self.fleet.is_open(f"{GROUP}/0")
        if self.is_shut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "paused")


class _GoesOnFrozen(SiteInference):
    async def turn(self) -> None:
        """Whatever froze it."""


class _CallsItFinished(SiteInference):
    def ending(self, request_id: str) -> generation_pb2.GenerateResponse:
        finished = generation_pb2.GenerationFinished(
            output_index=0, reason=generation_pb2.FINISH_REASON_LENGTH
        )
        return generation_pb2.GenerateResponse(request_id=request_id, finished=finished)


class _TellsNothing(SiteInference):
    async def GetServerInfo(self, _request: Any, _context: Any) -> server_pb2.ServerInfo:  # noqa: N802
        return server_pb2.ServerInfo(engine_name="site", supported_models=["m"])


class _DrainsByAborting(SiteFleet):
    async def drained(self) -> None:
        self.aborts += 1
        self.work[GROUP] = 0


class _CountsNobody(SiteFleet):
    def _on_work(self, call: StepCall, outcomes: Sequence[ParticipantOutcome]) -> WorkCounts:
        return replace(super()._on_work(call, outcomes), aborted=0)


class WithoutKinds(SiteFleet):
    """A fleet that does less: it takes no reconfiguration and no profile."""

    def __init__(self) -> None:
        super().__init__()
        for rank in self.ranks.values():
            less = {AdminOperationKind.RECONFIGURE_SERVING, AdminOperationKind.START_PROFILE}
            rank.capabilities = replace(rank.capabilities, operations=rank.capabilities.operations - less)


def _with_inference(*arguments: Any, **options: Any) -> GrpcListener:
    """The admin listener, with inference on it."""
    listener = _admin_listener(*arguments, **options)
    fleet = SiteFleet()

    def register(server: grpc.aio.Server) -> None:
        openengine_pb2_grpc.add_InferenceServicer_to_server(_ServesThroughPauses(fleet), server)  # type: ignore[no-untyped-call,unused-ignore]

    service = GrpcService(
        name=INFERENCE_SERVICE,
        file=openengine_pb2.DESCRIPTOR,
        register=register,
        is_serving=lambda: True,
    )
    listener._services = (*listener._services, service)
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


def _nothing(*_arguments: Any, **_options: Any) -> Iterator[Any]:
    return iter(())


def _inference(name: str, check_id: str, inference: Callable[[SiteFleet], SiteInference]) -> Defect:
    return Defect(name=name, caught_by=(check_id,), recipe=Recipe(inference=inference))


DEFECTS = (
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
        name="aborted requests are not counted",
        caught_by=("AD-41-abort",),
        recipe=Recipe(fleet=_CountsNobody),
    ),
)
