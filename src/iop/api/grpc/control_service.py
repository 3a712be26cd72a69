"""`openengine.v1.Control` over a control port (SF-22, SF-23, AD-50, AD-103)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from iop.admin.codec import RecordCodec
from iop.admin.enums import EngineRole
from iop.admin.permissions import Permission, Principal
from iop.admin.requests import DiskSource
from iop.admin.weight_sources import EXTRA_KEY, source_words
from iop.api.grpc.auth import ApiCaller
from iop.api.grpc.inference_service import check_model_allowed
from iop.api.grpc.interceptors import current_caller
from iop.api.grpc.ports import AbortOutcome, ControlPort, MayUse, ModelInfo
from iop.core.errors import InvalidRequest, PermissionDenied, Unsupported
from iop.pb.openengine.v1 import (
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from iop.wire.data_parallel import RANKS_EXTRA_KEY, write_ranks

__all__ = ["CONTROL_METHODS", "CONTROL_SERVICE", "ControlService", "WeightSources"]

CONTROL_SERVICE: Final[str] = openengine_pb2.DESCRIPTOR.services_by_name["Control"].full_name

CONTROL_METHODS: Final[Mapping[str, Permission | None]] = MappingProxyType(
    {
        f"/{CONTROL_SERVICE}/{rpc}": permission
        for rpc, permission in {
            "GetServerInfo": Permission.PROFILE,
            "GetModelInfo": Permission.PROFILE,
            "GetLoad": Permission.PROFILE,
            "Health": Permission.PROFILE,
            "Abort": Permission.ABORT,
            "LoadLora": Permission.LORA,
            "UnloadLora": Permission.LORA,
            "ListLoras": Permission.PROFILE,
            "GetKvEventSources": Permission.PROFILE,
            "SubscribeKvEvents": Permission.PROFILE,
        }.items()
    }
)
"""Permission by full method name, where Control is served on an admin listener (AD-103)."""

SCHEMA_REVISION: Final = 1
"""Revision of the core schema that this server speaks, and the oldest client revision it serves."""

SCHEMA_RELEASE: Final = "v1"

ADMIN_EXTRA_KEY: Final = "openengine.admin"

WeightSources: TypeAlias = Callable[[], Awaitable[Mapping[str, tuple[str, DiskSource]]]]

_CODEC: Final = RecordCodec(error=InvalidRequest)


class ControlService(openengine_pb2_grpc.ControlServicer):
    """Discovery, load, health and aborts.

    Args:
        control: who knows.
        admin_profile_revision: revision of the admin profile that this server has on another listener; None: none.
        is_privileged_allowed: this listener has the privileged calls: an admin listener, or a public one whose config
            turns them on (AD-103).
        audit: told of privileged calls by principals, with the RPC and the outcome's code (AD-101).
        weight_sources: tell where the weights in force can be read again; only for listeners that do not let everybody
            in, since it names files of this machine (AD-32).
    """

    def __init__(
        self,
        control: ControlPort,
        *,
        admin_profile_revision: int | None,
        is_privileged_allowed: bool = False,
        audit: Callable[[Principal, str, str], Awaitable[None]] | None = None,
        weight_sources: WeightSources | None = None,
    ) -> None:
        self._audit = audit
        self._weight_sources = weight_sources
        self._control = control
        self._admin_profile_revision = admin_profile_revision
        self._is_privileged_allowed = is_privileged_allowed

    async def GetServerInfo(
        self, request: server_pb2.GetServerInfoRequest, context: Any
    ) -> server_pb2.ServerInfo:
        """What the server is, and that it can be administered (AD-50)."""
        info = self._control.server_info()
        usable = [name for name in info.supported_models if self._may_use(name)]
        answer = _CODEC.encode(replace(info, supported_models=tuple(usable)), server_pb2.ServerInfo())
        answer.schema_revision = SCHEMA_REVISION
        answer.minimum_client_revision = SCHEMA_REVISION
        answer.schema_release = SCHEMA_RELEASE
        if self._admin_profile_revision is not None:
            answer.extra.update({ADMIN_EXTRA_KEY: {"profile_revision": self._admin_profile_revision}})
        if self._weight_sources is not None:
            answer.extra.update({EXTRA_KEY: source_words(await self._weight_sources())})
        return answer

    async def GetModelInfo(self, request: model_pb2.GetModelInfoRequest, context: Any) -> model_pb2.ModelInfo:
        """What a model accepts (SF-22)."""
        model = self._control.model_info(request.model)
        self._check_allowed(request.model, model)
        answer = _CODEC.encode(replace(model, data_parallel_ranks=None), model_pb2.ModelInfo())
        if model.data_parallel_ranks is not None:
            answer.extra.update({RANKS_EXTRA_KEY: write_ranks(model.data_parallel_ranks)})
        return answer

    async def GetLoad(self, request: server_pb2.GetLoadRequest, context: Any) -> server_pb2.LoadInfo:
        """How busy the server is."""
        load = await self._control.load(include_per_rank=request.include_per_rank)
        return _CODEC.encode(load, server_pb2.LoadInfo())

    async def Health(
        self, request: lifecycle_pb2.HealthRequest, context: Any
    ) -> lifecycle_pb2.HealthResponse:
        """How the server is."""
        if request.role not in {0, *EngineRole}:
            raise _bad("role", "is not a known role")
        if request.model:
            self._check_allowed(request.model, self._control.model_info(request.model))
        report = await self._control.health(
            model=request.model,
            role=EngineRole(request.role) if request.role else None,
            include_probe=request.include_inference_probe,
            may_use=_usable_by(current_caller()),
        )
        return _CODEC.encode(report, lifecycle_pb2.HealthResponse())

    async def Abort(self, request: lifecycle_pb2.AbortRequest, context: Any) -> lifecycle_pb2.AbortResponse:
        """End one's own request; ending everybody's is privileged (AD-103)."""
        match request.WhichOneof("target"):
            case "request_id":
                if not request.request_id:
                    raise _bad("request_id", "must not be empty")
                outcome = await self._abort_one(request.request_id)
            case "all_requests":
                await self._enter_privileged("Abort", "Abort of all requests on the admin listener")
                count = await self._control.abort_all()
                outcome = AbortOutcome.ABORTED if count else AbortOutcome.ALREADY_FINISHED
            case "kv_session":
                raise _unsupported("kv_session")
            case _:
                raise _bad("target", "must be request_id, kv_session or all_requests")
        status = lifecycle_pb2.AbortStatus.Value(f"ABORT_STATUS_{outcome.name}")
        return lifecycle_pb2.AbortResponse(status=status)

    async def LoadLora(self, request: lora_pb2.LoadLoraRequest, context: Any) -> lora_pb2.LoadLoraResponse:
        """Privileged (AD-103)."""
        await self._enter_privileged("LoadLora", "LoadLora on the admin listener")
        raise _unsupported("lora")

    async def UnloadLora(
        self, request: lora_pb2.UnloadLoraRequest, context: Any
    ) -> lora_pb2.UnloadLoraResponse:
        """Privileged (AD-103)."""
        await self._enter_privileged("UnloadLora", "UnloadLora on the admin listener")
        raise _unsupported("lora")

    async def ListLoras(self, request: lora_pb2.ListLorasRequest, context: Any) -> lora_pb2.ListLorasResponse:
        """None here can load any, so none are loaded."""
        return lora_pb2.ListLorasResponse()

    async def GetKvEventSources(
        self, request: kv_pb2.GetKvEventSourcesRequest, context: Any
    ) -> kv_pb2.GetKvEventSourcesResponse:
        """An honest empty list: nothing here publishes KV events (SF-23)."""
        return kv_pb2.GetKvEventSourcesResponse()

    def SubscribeKvEvents(
        self, request: kv_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[kv_pb2.SubscribeKvEventsResponse]:
        """Not offered."""
        raise _unsupported("kv_events")

    def _may_use(self, name: str) -> bool:
        """Whether the caller may know of a model, by its id or one of its aliases (SF-11)."""
        caller = current_caller()
        if not isinstance(caller, ApiCaller) or caller.models is None:
            return True
        model = self._control.model_info(name)
        return _usable_by(caller)(name, model.served_model_name, *model.served_model_aliases)

    @staticmethod
    def _check_allowed(name: str, model: ModelInfo) -> None:
        caller = current_caller()
        if isinstance(caller, ApiCaller):
            check_model_allowed(caller, name, model)

    async def _abort_one(self, request_id: str) -> AbortOutcome:
        caller = current_caller()
        if isinstance(caller, ApiCaller):
            return await self._control.abort(request_id, caller=caller.name)
        await self._note(caller, "Abort")
        return await self._control.abort(request_id, caller=None)

    async def _enter_privileged(self, rpc: str, replacement: str) -> None:
        """Refuse where this listener has no privileged calls; note them where it has."""
        if not self._is_privileged_allowed:
            raise PermissionDenied(
                f"This call is privileged and off on this listener; use {replacement}.",
                reason="PRIVILEGED_CALL",
                details={"replacement": replacement},
            )
        caller = current_caller()
        if isinstance(caller, Principal):
            await self._note(caller, rpc)

    async def _note(self, principal: Principal, rpc: str) -> None:
        if self._audit is not None:
            await self._audit(principal, rpc, "ALLOWED")


def _usable_by(caller: ApiCaller | Principal) -> MayUse:
    def may_use(*names: str) -> bool:
        return not isinstance(caller, ApiCaller) or any(map(caller.may_use, names))

    return may_use


def _bad(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"`{field}` {rule}.", reason="INVALID_FIELD", details={"field": field})


def _unsupported(feature: str) -> Unsupported:
    return Unsupported(
        f"`{feature}` is not offered here.", reason="UNSUPPORTED_FEATURE", details={"feature": feature}
    )
