"""The service itself: its methods, health, reflection, and what is not on its listener (AD-01, AD-02, AD-06)."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from iop.conformance.bench import Bench
from iop.conformance.model import CheckFailed, CheckNotRun, CheckSkipped, check, require
from iop.conformance.wire import METHODS, SERVICE
from iop.pb.openengine.v1 import generation_pb2, openengine_pb2_grpc, server_pb2

TIMEOUT_S = 10.0

REFUSAL_WAIT_S = 2.0
"""How long a refusal may take that needs no message; a server that refuses later is asked with one."""


@check("AD-01-methods")
async def methods_are_there(bench: Bench) -> None:
    """Every RPC of the service answers."""
    offer = await bench.offer()
    absent = []
    for rpc in METHODS:
        if rpc in offer.samples:
            request = offer.sample(rpc, "")
        else:
            request = b""
        answer = await bench.call(rpc, request)
        if answer.code is grpc.StatusCode.UNIMPLEMENTED and (rpc in offer.mutations or rpc not in _KINDS):
            absent.append(rpc)
    require(not absent, saw=f"UNIMPLEMENTED for {', '.join(absent)}", wants="all fourteen RPCs")


_KINDS = frozenset(
    name
    for name in METHODS
    if name not in {"GetOperation", "CancelOperation", "GetAdminProfile", "ListOperations", "WatchOperation"}
)


@check("AD-06-health", clauses=["AD-03"])
async def health_answers(bench: Bench) -> None:
    """grpc.health.v1 tells SERVING for the admin service, without a credential."""
    stub: Any = health_pb2_grpc.HealthStub(bench.channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise CheckFailed(
            saw=f"Health.Check for {SERVICE} answer {error.code().name}",
            wants="SERVING, without a credential",
        ) from None
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    require(name == "SERVING", saw=f"{name} while the server works", wants="SERVING")


@check("AD-06-reflection", clauses=["AD-03"])
async def reflection_lists_the_service(bench: Bench) -> None:
    """Server reflection, where offered, needs a viewer and lists the admin service."""
    answer = await _reflect(bench, bench.metadata("admin"))
    if answer is grpc.StatusCode.UNIMPLEMENTED:
        raise CheckSkipped("the server offers no reflection")
    require(
        not isinstance(answer, grpc.StatusCode), saw=f"reflection answer {answer}", wants="a list of services"
    )
    assert not isinstance(answer, grpc.StatusCode)
    require(SERVICE in answer, saw=f"only {', '.join(sorted(answer))}", wants=SERVICE)
    require(
        "openengine.v1.Inference" not in answer,
        saw="Inference listed on the admin listener",
        wants="reflection of each listener's own services",
    )
    if bench.target.tokens:
        stranger = await _refused(bench) or await _reflect(bench, ())
        require(
            stranger is grpc.StatusCode.UNAUTHENTICATED,
            saw=f"reflection answer {stranger} to somebody without a credential",
            wants="UNAUTHENTICATED",
        )


async def _reflect(bench: Bench, metadata: Any) -> set[str] | grpc.StatusCode:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(bench.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    try:
        async for answer in stub.ServerReflectionInfo(iter([asked]), metadata=metadata, timeout=TIMEOUT_S):
            return {service.name for service in answer.list_services_response.service}
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _refused(bench: Bench) -> grpc.StatusCode | None:
    """The status of a reflection stream without credential that nothing was written on; None if it stays open.

    A server may refuse before it reads, and a write that meets the refusal shows as INTERNAL on our own side.
    """
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(bench.channel)
    call = stub.ServerReflectionInfo(timeout=REFUSAL_WAIT_S)
    code: grpc.StatusCode = await call.code()
    return None if code is grpc.StatusCode.DEADLINE_EXCEEDED else code


@check("AD-02-apart")
async def inference_is_elsewhere(bench: Bench) -> None:
    """The admin listener runs no inference."""
    stub: Any = openengine_pb2_grpc.InferenceStub(bench.channel)  # type: ignore[no-untyped-call,unused-ignore]
    request = generation_pb2.GenerateRequest(prompt="hello")
    try:
        async for _ in stub.Generate(request, metadata=bench.metadata("admin"), timeout=TIMEOUT_S):
            break
    except grpc.aio.AioRpcError as error:
        require(
            error.code() in {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED},
            saw=f"Generate on the admin listener answer {error.code().name}",
            wants="UNIMPLEMENTED",
        )
        return
    raise CheckFailed(saw="Generate answered on the admin listener", wants="listeners apart")


@check("AD-50-core-info")
async def core_discovery_tells(bench: Bench) -> None:
    """GetServerInfo of the core service reveals that the admin service exists."""
    if bench.core is None:
        raise CheckNotRun("needs --inference HOST:PORT")
    stub: Any = openengine_pb2_grpc.ControlStub(bench.core.channel)  # type: ignore[no-untyped-call,unused-ignore]
    answer = await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S)
    extra = dict(answer.extra)
    told = dict(extra.get("openengine.admin") or {})
    require(
        told.get("profile_revision") == 1,
        saw=f"extra with {', '.join(extra) or 'nothing'}",
        wants='extra["openengine.admin"] = {"profile_revision": 1}',
    )
