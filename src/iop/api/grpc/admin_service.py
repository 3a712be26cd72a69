"""OpenEngineAdmin over the operation core: decode, one call, encode (AD-01).

Callers are authenticated and authorised by the interceptor before a handler here runs; everything about operations
happens in the core. A call that ends early only stops watching: the mutation goes on (AD-22).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from iop.admin.core import MutationCall
from iop.admin.permissions import Permission, Principal
from iop.admin.profile import AdminProfile
from iop.admin.requests import (
    FlushCachesRequest,
    ListOperationsRequest,
    MutationRequest,
    PauseRequest,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    CancelResult,
    OperationPage,
    OperationPlan,
    OperationResult,
)
from iop.api.grpc.admin_codec import (
    CODEC,
    check_reason,
    check_unknown_fields,
    decode_mutation,
    payload_digest,
    require_text,
)
from iop.api.grpc.interceptors import current_principal
from iop.core.errors import InvalidRequest
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc

__all__ = ["ADMIN_METHODS", "ADMIN_SERVICE", "AdminOperations", "AdminService", "audit_name"]

ADMIN_SERVICE: Final[str] = pb.DESCRIPTOR.services_by_name["OpenEngineAdmin"].full_name

_RPC_PERMISSIONS: Final[Mapping[str, Permission | None]] = {
    "FlushCaches": Permission.FLUSH,
    "Pause": Permission.PAUSE,
    "Resume": Permission.RESUME,
    "ReleaseResources": Permission.RELEASE,
    "RestoreResources": Permission.RESTORE,
    "UpdateWeights": Permission.UPDATE_WEIGHTS,
    "StartProfile": Permission.START_PROFILE,
    "StopProfile": Permission.STOP_PROFILE,
    "ReconfigureServing": Permission.RECONFIGURE,
    "GetOperation": Permission.GET,
    # Needs the permission of the cancelled kind, which only the core can look up (AD-04, AD-24).
    "CancelOperation": None,
    "GetAdminProfile": Permission.PROFILE,
    "ListOperations": Permission.LIST,
    "WatchOperation": Permission.WATCH,
}

ADMIN_METHODS: Final[Mapping[str, Permission | None]] = MappingProxyType(
    {f"/{ADMIN_SERVICE}/{rpc}": permission for rpc, permission in _RPC_PERMISSIONS.items()}
)
"""Permission by full method name; None: any principal, the core decides further."""

_WORD_START: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")

Events: TypeAlias = AsyncIterator[pb.AdminOperationEvent]
Mutation = TypeVar("Mutation", bound=MutationRequest)


class AdminOperations(Protocol):
    """What this service needs of the operation core; see `iop.admin.core.AdminCore`."""

    @property
    def is_serving(self) -> bool:
        """Whether mutations can be accepted."""
        ...

    def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        """Check, accept and observe one mutation."""
        ...

    async def run_to_end(self, call: MutationCall) -> OperationResult | OperationPlan:
        """The same for RPCs that answer once. Raises Conflict, OPERATION_FAILED, when it did not complete."""
        ...

    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        """One operation."""
        ...

    async def list_operations(self, principal: Principal, request: ListOperationsRequest) -> OperationPage:
        """One page of operations."""
        ...

    def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        """Events after a sequence."""
        ...

    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        """Ask to call an operation off."""
        ...

    async def profile(self, principal: Principal) -> AdminProfile:
        """What the server offers."""
        ...

    async def audit(self, principal: Principal, method: str, *, outcome: str, digest: bytes = b"") -> None:
        """Note a call that was refused before the core saw it (AD-101)."""
        ...


class AdminService(admin_pb2_grpc.OpenEngineAdminServicer):
    """All fourteen RPCs. What a fleet cannot do is refused by the core from its participants' capabilities (AD-15)."""

    def __init__(self, operations: AdminOperations) -> None:
        self._operations = operations

    # ------------------------------------------------------------------------------------------ mutations

    def FlushCaches(self, request: pb.FlushCachesRequest, context: Any) -> Events:
        """AD-40."""
        return self._mutate(request, FlushCachesRequest, "FlushCaches")

    def Pause(self, request: pb.PauseRequest, context: Any) -> Events:
        """AD-41."""
        return self._mutate(request, PauseRequest, "Pause")

    def Resume(self, request: pb.ResumeRequest, context: Any) -> Events:
        """AD-42."""
        return self._mutate(request, ResumeRequest, "Resume")

    def ReleaseResources(self, request: pb.ReleaseResourcesRequest, context: Any) -> Events:
        """AD-43."""
        return self._mutate(request, ReleaseResourcesRequest, "ReleaseResources")

    def RestoreResources(self, request: pb.RestoreResourcesRequest, context: Any) -> Events:
        """AD-44."""
        return self._mutate(request, RestoreResourcesRequest, "RestoreResources")

    def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Any) -> Events:
        """AD-45."""
        return self._mutate(request, UpdateWeightsRequest, "UpdateWeights")

    def ReconfigureServing(self, request: pb.ReconfigureServingRequest, context: Any) -> Events:
        """AD-47."""
        return self._mutate(request, ReconfigureServingRequest, "ReconfigureServing")

    async def StartProfile(self, request: pb.StartProfileRequest, context: Any) -> pb.StartProfileResponse:
        """AD-46."""
        answer = pb.StartProfileResponse()
        await self._finish(request, StartProfileRequest, "StartProfile", answer)
        return answer

    async def StopProfile(self, request: pb.StopProfileRequest, context: Any) -> pb.StopProfileResponse:
        """AD-46."""
        answer = pb.StopProfileResponse()
        await self._finish(request, StopProfileRequest, "StopProfile", answer)
        return answer

    # ------------------------------------------------------------------------------------------ reading

    async def GetOperation(self, request: pb.GetAdminOperationRequest, context: Any) -> pb.AdminOperation:
        """AD-23."""
        async with self._shaping("GetOperation"):
            operation_id = require_text(request.operation_id, "operation_id")
        operation = await self._operations.get(current_principal(), operation_id)
        return CODEC.encode(operation, pb.AdminOperation())

    async def CancelOperation(
        self, request: pb.CancelAdminOperationRequest, context: Any
    ) -> pb.CancelAdminOperationResponse:
        """AD-24."""
        async with self._shaping("CancelOperation"):
            check_unknown_fields(request)
            operation_id = require_text(request.operation_id, "operation_id")
            reason = check_reason(request.reason)
        result = await self._operations.cancel(current_principal(), operation_id, reason=reason)
        return CODEC.encode(result, pb.CancelAdminOperationResponse())

    async def GetAdminProfile(self, request: pb.GetAdminProfileRequest, context: Any) -> pb.AdminProfile:
        """AD-50."""
        profile = await self._operations.profile(current_principal())
        return CODEC.encode(profile, pb.AdminProfile())

    async def ListOperations(
        self, request: pb.ListAdminOperationsRequest, context: Any
    ) -> pb.ListAdminOperationsResponse:
        """AD-01."""
        async with self._shaping("ListOperations"):
            wanted = CODEC.decode(request, ListOperationsRequest)
        page = await self._operations.list_operations(current_principal(), wanted)
        return CODEC.encode(page, pb.ListAdminOperationsResponse())

    async def WatchOperation(self, request: pb.WatchAdminOperationRequest, context: Any) -> Events:
        """AD-01, AD-26."""
        async with self._shaping("WatchOperation"):
            operation_id = require_text(request.operation_id, "operation_id")
        events = self._operations.watch(
            current_principal(), operation_id, after_sequence=request.after_sequence
        )
        async with detaching(events):
            async for event in events:
                yield CODEC.encode(event, pb.AdminOperationEvent())

    # ------------------------------------------------------------------------------------------ shared

    async def _mutate(self, message: Any, record_type: type[Mutation], rpc: str) -> Events:
        call = await self._decode(message, record_type, rpc)
        events = self._operations.submit(call)
        async with detaching(events):
            async for event in events:
                yield CODEC.encode(event, pb.AdminOperationEvent())

    async def _finish(self, message: Any, record_type: type[Mutation], rpc: str, answer: Any) -> None:
        """Run a mutation whose RPC answers once, and fill in the answer."""
        outcome = await self._operations.run_to_end(await self._decode(message, record_type, rpc))
        if isinstance(outcome, OperationPlan):
            answer.plan.SetInParent()
            CODEC.encode(outcome, answer.plan)
        else:
            CODEC.encode(outcome, answer)

    async def _decode(self, message: Any, record_type: type[Mutation], rpc: str) -> MutationCall:
        async with self._shaping(rpc, message):
            return decode_mutation(message, record_type, rpc=rpc, principal=current_principal())

    @contextlib.asynccontextmanager
    async def _shaping(self, rpc: str, mutation: Any = None) -> AsyncIterator[None]:
        """Note in the audit what is refused for its shape, before the core hears of it (AD-101)."""
        try:
            yield
        except InvalidRequest as error:
            digest = b"" if mutation is None else payload_digest(mutation, rpc)
            await self._operations.audit(
                current_principal(), audit_name(rpc), outcome=error.reason, digest=digest
            )
            raise


def audit_name(rpc: str) -> str:
    """An RPC as the audit names it: `FlushCaches`, or its full method name, is `FLUSH_CACHES`."""
    return _WORD_START.sub("_", rpc.rpartition("/")[2]).upper()


@contextlib.asynccontextmanager
async def detaching(events: AsyncIterator[AdminOperationEvent]) -> AsyncIterator[None]:
    """Close an observer when its call ends, however it ends; that never touches the mutation (AD-22)."""
    try:
        yield
    finally:
        aclose = getattr(events, "aclose", None)
        if aclose is not None:
            await aclose()
