"""A scripted operation core behind a real admin listener."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from iop.admin.core import MutationCall
from iop.admin.enums import AdminOperationKind, AdminOperationState, CancelDisposition, PauseMode
from iop.admin.permissions import PRESETS, Permission, Principal
from iop.admin.profile import AdminLimits, AdminProfile, Capabilities
from iop.admin.requests import ListOperationsRequest, kind_of
from iop.admin.results import (
    AdminOperation,
    AdminOperationEvent,
    CancelResult,
    EventBody,
    OperationAccepted,
    OperationCompleted,
    OperationPage,
    OperationPlan,
    OperationResult,
    PauseResult,
    StartProfileResult,
    StopProfileResult,
)
from iop.api.grpc.auth import PrincipalDirectory, PrincipalGrant, secret_sha256
from iop.api.grpc.listeners import admin_listener
from iop.api.grpc.rpc_metrics import RpcMetrics
from iop.api.grpc.server import ListenerSettings
from iop.core.errors import Conflict
from iop.core.ids import OperationId
from iop.obs.metrics import Metrics
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc
from iop.testing.waiting import free_ports

TOKENS = {"viewer": "viewer-token", "operator": "operator-token", "admin": "admin-token"}


def operation(**changes: Any) -> AdminOperation:
    return dataclasses.replace(
        AdminOperation(
            operation_id=OperationId("op-1"),
            kind=AdminOperationKind.PAUSE,
            state=AdminOperationState.PENDING,
            idempotency_key="k",
            principal="operator",
            request_sha256=bytes(32),
            revision_before=0,
            accepted_at_unix_nanos=1,
        ),
        **changes,
    )


def played(kind: AdminOperationKind) -> list[EventBody]:
    results: dict[AdminOperationKind, OperationResult] = {
        AdminOperationKind.START_PROFILE: StartProfileResult(
            operation_id=OperationId("op-1"), profile_id="p", started_at_unix_nanos=9, participant_ids=()
        ),
        AdminOperationKind.STOP_PROFILE: StopProfileResult(
            operation_id=OperationId("op-1"), profile_id="p", artifacts=()
        ),
    }
    result = results.get(kind, PauseResult(pause_epoch=7, mode=PauseMode.DRAIN))
    return [OperationAccepted(operation=operation()), OperationCompleted(result=result, revision=1)]


@dataclasses.dataclass
class ScriptedOperations:
    """Plays the operation core: answers with `bodies`, records what came, and tells when it is left."""

    bodies: list[EventBody] | None = None
    is_serving: bool = True
    fails_with: BaseException | None = None
    calls: list[MutationCall] = dataclasses.field(default_factory=list)
    seen: list[tuple[str, Principal, object]] = dataclasses.field(default_factory=list)
    audited: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    go_on: asyncio.Event | None = None

    async def submit(self, call: MutationCall) -> AsyncIterator[AdminOperationEvent]:
        self.calls.append(call)
        self.seen.append((kind_of(call.request).name, call.principal, call.request))
        async for event in self._play(kind_of(call.request)):
            yield event

    async def run_to_end(self, call: MutationCall) -> Any:
        async with contextlib.aclosing(self.submit(call)) as events:
            async for event in events:
                match event.event:
                    case OperationCompleted(result=result):
                        return result
                    case OperationPlan() as plan:
                        return plan
        raise Conflict("it failed", reason="OPERATION_FAILED", details={"operation_id": "op-1"})

    async def audit(self, principal: Principal, method: str, *, outcome: str, digest: bytes = b"") -> None:
        self.audited.append((principal.name, method, outcome))
        self.digests.append(digest)

    async def watch(
        self, principal: Principal, operation_id: str, *, after_sequence: int = 0
    ) -> AsyncIterator[AdminOperationEvent]:
        self.seen.append(("WATCH", principal, (operation_id, after_sequence)))
        async for event in self._play(AdminOperationKind.PAUSE):
            if event.sequence > after_sequence:
                yield event

    async def _play(self, kind: AdminOperationKind) -> AsyncIterator[AdminOperationEvent]:
        try:
            if self.fails_with is not None:
                raise self.fails_with
            for sequence, body in enumerate(self.bodies or played(kind), 1):
                if sequence == 2 and self.go_on is not None:
                    await self.go_on.wait()
                yield AdminOperationEvent(
                    operation_id="op-1", sequence=sequence, timestamp_unix_nanos=5, event=body
                )
        finally:
            self.left.set()

    async def get(self, principal: Principal, operation_id: str) -> AdminOperation:
        self.seen.append(("GET", principal, operation_id))
        if self.fails_with is not None:
            raise self.fails_with
        return operation(operation_id=operation_id)

    async def list_operations(self, principal: Principal, request: ListOperationsRequest) -> OperationPage:
        self.seen.append(("LIST", principal, request))
        return OperationPage(operations=(operation(),), next_page_token="next")

    async def cancel(self, principal: Principal, operation_id: str, *, reason: str) -> CancelResult:
        self.seen.append(("CANCEL", principal, (operation_id, reason)))
        return CancelResult(disposition=CancelDisposition.TOO_LATE, operation=operation())

    async def profile(self, principal: Principal) -> AdminProfile:
        self.seen.append(("PROFILE", principal, None))
        return AdminProfile(
            capabilities=Capabilities(operations=frozenset({AdminOperationKind.PAUSE})),
            cancellable=(AdminOperationKind.PAUSE,),
            limits=AdminLimits(),
            revision=3,
        )


@pytest.fixture
def operations() -> ScriptedOperations:
    return ScriptedOperations()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(with_process=False)


@pytest.fixture
def principals() -> PrincipalDirectory:
    return PrincipalDirectory(
        [
            *(
                PrincipalGrant(name=role, permissions=PRESETS[role], token_sha256=secret_sha256(token))
                for role, token in TOKENS.items()
            ),
            PrincipalGrant(
                name="flusher",
                permissions=frozenset({Permission.FLUSH}),
                token_sha256=secret_sha256("flusher-token"),
            ),
        ]
    )


@pytest.fixture
async def admin_address(
    operations: ScriptedOperations, principals: PrincipalDirectory, metrics: Metrics
) -> AsyncIterator[str]:
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
    listener = admin_listener(operations, principals, settings, on_ended=RpcMetrics(metrics).on_ended)
    async with listener.serving():
        yield listener.address


@pytest.fixture
async def channel(admin_address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(admin_address) as opened:
        yield opened


def bearer(role: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS.get(role, role)}"),)


@dataclasses.dataclass
class Refusal:
    """What a call was refused with."""

    error: grpc.aio.AioRpcError | None = None

    def info(self) -> Any:
        """Its ErrorInfo."""
        status = rpc_status.from_call(self.error)
        assert status is not None, "the refusal has no details"
        for detail in status.details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                found = error_details_pb2.ErrorInfo()
                detail.Unpack(found)
                return found
        raise AssertionError("the refusal has no ErrorInfo")


@contextlib.asynccontextmanager
async def refused(code: grpc.StatusCode) -> AsyncIterator[Refusal]:
    """The block must fail with this status."""
    refusal = Refusal()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield refusal
    refusal.error = caught.value
    assert caught.value.code() is code, f"{caught.value.code()}: {caught.value.details()}"


@pytest.fixture
def unused_address() -> str:
    """An address where nobody listens."""
    return f"127.0.0.1:{free_ports(1)[0]}"


OPTIONS = pb.MutationOptions(idempotency_key="k")
ALL = pb.TargetSelector(all=pb.AllTargets())
DRAIN = pb.PauseSpec(mode=pb.PAUSE_MODE_DRAIN, admission=pb.ADMISSION_POLICY_QUEUE)

WELL_FORMED: dict[str, Any] = {
    "FlushCaches": pb.FlushCachesRequest(
        options=OPTIONS, target=ALL, kinds=[pb.CACHE_KIND_PREFIX], busy_policy=pb.BUSY_POLICY_WAIT
    ),
    "Pause": pb.PauseRequest(options=OPTIONS, target=ALL, pause=DRAIN),
    "Resume": pb.ResumeRequest(options=OPTIONS, pause_epoch=1),
    "ReleaseResources": pb.ReleaseResourcesRequest(
        options=OPTIONS, target=ALL, kinds=[pb.RESOURCE_KIND_KV_CACHE]
    ),
    "RestoreResources": pb.RestoreResourcesRequest(
        options=OPTIONS, resource_epoch=1, kinds=[pb.RESOURCE_KIND_KV_CACHE]
    ),
    "UpdateWeights": pb.UpdateWeightsRequest(
        options=OPTIONS,
        model="m",
        disk=pb.DiskSource(path="/m", format=pb.WEIGHT_FORMAT_SAFETENSORS),
        weight_version="v2",
        cache_policy=pb.CACHE_POLICY_FLUSH,
    ),
    "StartProfile": pb.StartProfileRequest(options=OPTIONS, target=ALL, kinds=[pb.PROFILER_KIND_CPU]),
    "StopProfile": pb.StopProfileRequest(options=OPTIONS, profile_id="p"),
    "ReconfigureServing": pb.ReconfigureServingRequest(
        options=OPTIONS, target=ALL, changes=[pb.ServingChange(capacity=4)]
    ),
    "GetOperation": pb.GetAdminOperationRequest(operation_id="op-1"),
    "CancelOperation": pb.CancelAdminOperationRequest(operation_id="op-1"),
    "GetAdminProfile": pb.GetAdminProfileRequest(),
    "ListOperations": pb.ListAdminOperationsRequest(),
    "WatchOperation": pb.WatchAdminOperationRequest(operation_id="op-1"),
}
RPCS = [method.name for method in pb.DESCRIPTOR.services_by_name["OpenEngineAdmin"].methods]


async def call(
    channel: grpc.aio.Channel, rpc: str, metadata: Any, request: Any = None, *, timeout: float = 5
) -> list[Any]:
    stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
    answer = getattr(stub, rpc)(request or WELL_FORMED[rpc], metadata=metadata, timeout=timeout)
    if hasattr(answer, "__aiter__"):
        return [event async for event in answer]
    return [await answer]
