"""Who may call what on the admin listener, over a real channel."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_admin_rig import RPCS, WELL_FORMED, ScriptedOperations, bearer, call, refused
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from iop.pb.openengine.v1 import admin_pb2 as pb

READS = {"GetOperation", "GetAdminProfile", "ListOperations", "WatchOperation"}
OPERATOR = {"FlushCaches", "Pause", "Resume", "StartProfile", "StopProfile"}


def test_every_rpc_has_a_well_formed_example_here() -> None:
    assert set(RPCS) == set(WELL_FORMED)


@pytest.mark.clause("AD-03", "AD-17")
@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "NO_CREDENTIAL"),
        ((("authorization", "Bearer wrong"),), "UNKNOWN_CREDENTIAL"),
        ((("authorization", "Basic dmlld2VyOng="),), "MALFORMED_CREDENTIAL"),
        ((("authorization", "Bearer admin-token"), ("authorization", "Bearer x")), "AMBIGUOUS_CREDENTIAL"),
    ],
    ids=["none", "unknown", "basic", "two"],
)
async def test_without_a_known_credential_every_rpc_is_unauthenticated(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str, metadata: Any, reason: str
) -> None:
    async with refused(grpc.StatusCode.UNAUTHENTICATED) as refusal:
        await call(channel, rpc, metadata)
    assert refusal.info().reason == reason
    assert refusal.info().domain == "openengine.v1"
    assert operations.seen == []


@pytest.mark.clause("AD-03", "AD-04")
@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
async def test_presets_allow_exactly_what_they_say(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str, role: str
) -> None:
    # Cancelling is judged by the core, from the kind of the cancelled operation.
    allowed = {
        "viewer": READS | {"CancelOperation"},
        "operator": READS | OPERATOR | {"CancelOperation"},
        "admin": set(RPCS),
    }[role]
    if rpc in allowed:
        await call(channel, rpc, bearer(role))
        assert [principal.name for _, principal, _ in operations.seen] == [role]
    else:
        async with refused(grpc.StatusCode.PERMISSION_DENIED) as refusal:
            await call(channel, rpc, bearer(role))
        assert refusal.info().reason == "PERMISSION_DENIED"
        assert refusal.info().metadata["principal"] == role
        assert operations.seen == []


@pytest.mark.clause("AD-04")
async def test_a_principal_with_one_explicit_permission_may_do_that_alone(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    await call(channel, "FlushCaches", bearer("flusher-token"))
    async with refused(grpc.StatusCode.PERMISSION_DENIED):
        await call(channel, "GetAdminProfile", bearer("flusher-token"))


@pytest.mark.clause("AD-17")
async def test_permission_is_checked_before_shape_and_authentication_before_permission(
    channel: grpc.aio.Channel,
) -> None:
    malformed = pb.PauseRequest()
    async with refused(grpc.StatusCode.UNAUTHENTICATED):
        await call(channel, "Pause", (), malformed)
    async with refused(grpc.StatusCode.PERMISSION_DENIED):
        await call(channel, "Pause", bearer("viewer"), malformed)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await call(channel, "Pause", bearer("operator"), malformed)


@pytest.mark.clause("AD-17", "AD-101")
@pytest.mark.parametrize(
    ("metadata", "code"),
    [((), grpc.StatusCode.UNAUTHENTICATED), (bearer("operator"), grpc.StatusCode.INVALID_ARGUMENT)],
    ids=["stranger", "operator"],
)
async def test_bytes_that_are_no_message_are_refused_in_the_same_order(
    channel: grpc.aio.Channel, operations: ScriptedOperations, metadata: Any, code: grpc.StatusCode
) -> None:
    raw = channel.unary_stream("/openengine.v1.OpenEngineAdmin/Pause")
    async with refused(code):
        async for _ in raw(b"\xff\xff\xff", metadata=metadata, timeout=60):
            pass
    assert operations.audited == ([("operator", "PAUSE", "MALFORMED_MESSAGE")] if metadata else [])


@pytest.mark.clause("AD-03", "AD-06")
async def test_health_answers_without_credential(channel: grpc.aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="openengine.v1.OpenEngineAdmin"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def list_services(channel: grpc.aio.Channel, metadata: Any) -> set[str]:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [
        answer async for answer in stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=60)
    ]
    return {service.name for service in answers[0].list_services_response.service}


@pytest.mark.clause("AD-03", "AD-06")
async def test_reflection_needs_a_viewer_and_shows_admin_and_no_inference(channel: grpc.aio.Channel) -> None:
    async with refused(grpc.StatusCode.UNAUTHENTICATED):
        await list_services(channel, ())
    async with refused(grpc.StatusCode.PERMISSION_DENIED):
        await list_services(channel, bearer("flusher-token"))
    names = await list_services(channel, bearer("viewer"))
    assert "openengine.v1.OpenEngineAdmin" in names
    assert not names & {"openengine.v1.Inference", "openengine.v1.Control"}


@pytest.mark.clause("AD-06")
@pytest.mark.parametrize(
    ("symbol", "is_known"),
    [("openengine.v1.OpenEngineAdmin", True), ("openengine.v1.Inference", False), ("iop.Packet", False)],
)
async def test_reflection_describes_the_services_of_its_listener_only(
    channel: grpc.aio.Channel, symbol: str, is_known: bool
) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
    answers = [
        answer
        async for answer in stub.ServerReflectionInfo(iter([request]), metadata=bearer("viewer"), timeout=60)
    ]
    assert answers[0].HasField("file_descriptor_response") is is_known
