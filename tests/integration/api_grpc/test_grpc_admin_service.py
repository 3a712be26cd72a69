"""OpenEngineAdmin over a real channel: what is refused before the core, what reaches it, and what comes back."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any, cast

import grpc
import pytest
from grpc_admin_rig import (
    ALL,
    DRAIN,
    OPTIONS,
    RPCS,
    TOKENS,
    WELL_FORMED,
    ScriptedOperations,
    bearer,
    call,
    operation,
    refused,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    CancelDisposition,
    PauseMode,
    ProfilerKind,
)
from iop.admin.requests import (
    AllTargets,
    ListOperationsRequest,
    ModelTargets,
    MutationOptions,
    PauseRequest,
    PauseSpec,
    StartProfileRequest,
)
from iop.admin.results import (
    AdminError,
    OperationAccepted,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    PauseResult,
    StartProfileResult,
)
from iop.api.grpc.admin_service import audit_name
from iop.client.admin import AdminClient, AdminTarget
from iop.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    Overloaded,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
)
from iop.core.ids import OperationId, ParticipantId
from iop.obs.metrics import Metrics
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc

PAUSE = PauseRequest(
    options=MutationOptions(idempotency_key="k-1", expected_revision=0, deadline_ms=5, reason="why"),
    target=ModelTargets(models=("fast",)),
    pause=PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.REJECT),
)
MUTATIONS = RPCS[:9]


def client(address: str, role: str = "admin") -> AdminClient:
    return AdminClient(AdminTarget(address=address, token=TOKENS[role], timeout_s=60))


# ---------------------------------------------------------------------------------------------- what goes through


@pytest.mark.clause("AD-01", "AD-21")
async def test_a_mutation_reaches_the_core_as_it_was_said_and_its_events_come_back(
    admin_address: str, operations: ScriptedOperations
) -> None:
    async with client(admin_address) as admin:
        events = [event async for event in admin.submit(PAUSE)]
    assert operations.calls[0].request == PAUSE
    assert [event.sequence for event in events] == [1, 2]
    assert events[0].event == OperationAccepted(operation=operation())
    assert events[1].event == OperationCompleted(
        result=PauseResult(pause_epoch=7, mode=PauseMode.DRAIN), revision=1
    )


@pytest.mark.clause("AD-01", "AD-23", "AD-24", "AD-50")
async def test_reading_rpcs_pass_their_arguments_and_answers(
    admin_address: str, operations: ScriptedOperations
) -> None:
    wanted = ListOperationsRequest(page_size=3, page_token="t", kinds=(AdminOperationKind.PAUSE,))
    async with client(admin_address) as admin:
        assert await admin.get("op-9") == operation(operation_id="op-9")
        assert (await admin.cancel("op-9", reason="enough")).disposition is CancelDisposition.TOO_LATE
        assert (await admin.list_operations(wanted)).next_page_token == "next"
        assert (await admin.profile()).revision == 3
        assert [event.sequence async for event in admin.watch("op-9", after_sequence=1)] == [2]
    assert [(what, argument) for what, _, argument in operations.seen] == [
        ("GET", "op-9"),
        ("CANCEL", ("op-9", "enough")),
        ("LIST", wanted),
        ("PROFILE", None),
        ("WATCH", ("op-9", 1)),
    ]
    assert all(principal.peer.startswith("ipv4:127.0.0.1") for _, principal, _ in operations.seen)


@pytest.mark.clause("AD-12")
async def test_the_digest_covers_everything_but_key_and_dry_run(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    async def digest(**changes: Any) -> bytes:
        options = pb.MutationOptions(idempotency_key="k")
        for name, value in changes.items():
            setattr(options, name, value)
        await call(
            channel, "Pause", bearer("admin"), pb.PauseRequest(options=options, target=ALL, pause=DRAIN)
        )
        return operations.calls[-1].request_sha256

    first = await digest()
    assert len(first) == 32
    assert await digest(idempotency_key="other") == first
    assert await digest(validate_only=True) == first
    assert operations.calls[-1].request.options.validate_only
    assert await digest(expected_revision=0) != first
    assert await digest(reason="r") != first
    await call(channel, "Resume", bearer("admin"), pb.ResumeRequest(options=OPTIONS, pause_epoch=1))
    assert operations.calls[-1].request_sha256 != first


# ---------------------------------------------------------------------------------------------- refused by shape

SHAPES: list[tuple[str, Any, str, str]] = [
    ("Pause", pb.PauseRequest(options=OPTIONS, pause=DRAIN), "EMPTY_SELECTOR", "target"),
    (
        "Pause",
        pb.PauseRequest(options=OPTIONS, target=pb.TargetSelector(), pause=DRAIN),
        "EMPTY_SELECTOR",
        "target",
    ),
    ("Pause", pb.PauseRequest(options=OPTIONS, target=ALL), "UNSPECIFIED_ENUM", "pause.mode"),
    (
        "Pause",
        pb.PauseRequest(options=OPTIONS, target=ALL, pause=pb.PauseSpec(mode=pb.PAUSE_MODE_ABORT)),
        "UNSPECIFIED_ENUM",
        "pause.admission",
    ),
    (
        "Pause",
        pb.PauseRequest(
            options=OPTIONS,
            target=ALL,
            pause=pb.PauseSpec(mode=cast("Any", 42), admission=pb.ADMISSION_POLICY_QUEUE),
        ),
        "UNKNOWN_ENUM",
        "pause.mode",
    ),
    (
        "FlushCaches",
        pb.FlushCachesRequest(options=OPTIONS, target=ALL, kinds=[pb.CACHE_KIND_PREFIX]),
        "UNSPECIFIED_ENUM",
        "busy_policy",
    ),
    (
        "FlushCaches",
        pb.FlushCachesRequest(
            options=OPTIONS, target=ALL, kinds=[pb.CACHE_KIND_UNSPECIFIED], busy_policy=pb.BUSY_POLICY_FAIL
        ),
        "UNSPECIFIED_ENUM",
        "kinds",
    ),
    (
        "UpdateWeights",
        pb.UpdateWeightsRequest(
            options=OPTIONS, model="m", weight_version="v", cache_policy=pb.CACHE_POLICY_FLUSH
        ),
        "EMPTY_SELECTOR",
        "source",
    ),
]


@pytest.mark.clause("AD-10", "AD-14", "AD-17")
@pytest.mark.parametrize(("rpc", "request_message", "reason", "field"), SHAPES)
async def test_what_is_not_said_is_refused_before_the_core(
    channel: grpc.aio.Channel,
    operations: ScriptedOperations,
    rpc: str,
    request_message: Any,
    reason: str,
    field: str,
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await call(channel, rpc, bearer("admin"), request_message)
    assert (refusal.info().reason, refusal.info().metadata["field"]) == (reason, field)
    assert operations.calls == []


def with_unknown_field(message: Any, field_number: int = 1999) -> bytes:
    """The message's bytes and one varint field that no schema has."""
    tag = field_number << 3
    encoded = bytes([tag & 0x7F | 0x80, tag >> 7 & 0x7F | (0x80 if tag >> 14 else 0)])
    if tag >> 14:
        encoded += bytes([tag >> 14])
    return bytes(message.SerializeToString()) + encoded + b"\x01"


async def send_raw(channel: grpc.aio.Channel, rpc: str, data: bytes) -> None:
    method = f"/openengine.v1.OpenEngineAdmin/{rpc}"
    if rpc in {"StartProfile", "StopProfile"}:
        await channel.unary_unary(method)(data, metadata=bearer("admin"), timeout=60)
    else:
        async for _ in channel.unary_stream(method)(data, metadata=bearer("admin"), timeout=60):
            pass


@pytest.mark.clause("AD-16")
@pytest.mark.parametrize("rpc", MUTATIONS)
async def test_an_unknown_field_in_any_mutation_is_refused(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await send_raw(channel, rpc, with_unknown_field(WELL_FORMED[rpc]))
    assert (refusal.info().reason, refusal.info().metadata["fields"]) == ("UNKNOWN_FIELDS", "1999")
    assert operations.calls == []


@pytest.mark.clause("AD-16")
async def test_unknown_fields_are_refused_at_any_depth(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    spec = pb.TensorSpec.FromString(with_unknown_field(pb.TensorSpec(name="w")))
    tensors = pb.InlineTensorSource(tensors=[pb.InlineTensor(), pb.InlineTensor(spec=spec)])
    request = pb.UpdateWeightsRequest(options=OPTIONS, model="m", inline_tensors=tensors)
    async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await call(channel, "UpdateWeights", bearer("admin"), request)
    assert refusal.info().metadata["fields"] == "inline_tensors.tensors[1].spec.1999"
    assert operations.calls == []


async def test_a_read_ignores_fields_of_newer_clients(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    data = with_unknown_field(pb.GetAdminOperationRequest(operation_id="op-1"))
    method = channel.unary_unary("/openengine.v1.OpenEngineAdmin/GetOperation")
    await method(data, metadata=bearer("viewer"), timeout=60)
    assert operations.seen[0][0] == "GET"


@pytest.mark.clause("AD-17")
@pytest.mark.parametrize("rpc", ["GetOperation", "CancelOperation", "WatchOperation"])
async def test_an_operation_id_is_required(channel: grpc.aio.Channel, rpc: str) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await call(channel, rpc, bearer("admin"), type(WELL_FORMED[rpc])())
    assert refusal.info().metadata["field"] == "operation_id"


@pytest.mark.clause("AD-101")
@pytest.mark.parametrize("rpc", ["GetOperation", "CancelOperation", "WatchOperation"])
@pytest.mark.parametrize("operation_id", ["o" * 129, "op-1\0"], ids=["long", "zero"])
async def test_what_cannot_be_an_operation_id_is_not_looked_up_and_no_text_for_the_audit(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str, operation_id: str
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await call(channel, rpc, bearer("admin"), type(WELL_FORMED[rpc])(operation_id=operation_id))
    assert refusal.info().metadata["field"] == "operation_id"
    assert operations.seen == []
    assert operations.audited == [("admin", audit_name(rpc), "INVALID_FIELD")]


@pytest.mark.clause("AD-24", "AD-101")
async def test_the_reason_of_a_cancel_is_as_long_as_that_of_a_mutation(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    cancel = pb.CancelAdminOperationRequest(operation_id="op-1", reason="r" * 1024)
    await call(channel, "CancelOperation", bearer("admin"), cancel)
    cancel.reason += "r"
    async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
        await call(channel, "CancelOperation", bearer("admin"), cancel)
    assert refusal.info().metadata["field"] == "reason"
    assert len(operations.seen) == 1


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.clause("AD-17")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound("no", reason="UNKNOWN_OPERATION"), grpc.StatusCode.NOT_FOUND),
        (Conflict("no", reason="REVISION_MISMATCH"), grpc.StatusCode.ABORTED),
        (PreconditionFailed("no", reason="STALE_EPOCH"), grpc.StatusCode.FAILED_PRECONDITION),
        (
            Overloaded("no", reason="TOO_MANY_OPERATIONS", retry_after_s=1.5),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (Unavailable("no", reason="STORE_UNAVAILABLE"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_refusals_of_the_core_keep_reason_and_details(
    admin_address: str, channel: grpc.aio.Channel, operations: ScriptedOperations, error: Any, code: Any
) -> None:
    error.details = {"current": "7"}
    operations.fails_with = error
    for rpc in ("Pause", "GetOperation", "StartProfile"):
        async with refused(code) as refusal:
            await call(channel, rpc, bearer("admin"))
        assert (refusal.info().reason, dict(refusal.info().metadata)) == (error.reason, {"current": "7"})
    async with client(admin_address) as admin:
        with pytest.raises(type(error)) as caught:
            await admin.get("op-1")
    assert caught.value.reason == error.reason
    assert caught.value.details == {"current": "7"}
    assert caught.value.retry_after_s == error.retry_after_s


@pytest.mark.clause("AD-17")
@pytest.mark.parametrize("rpc", ["Pause", "GetOperation", "StartProfile"])
async def test_an_unmapped_exception_tells_neither_its_class_nor_its_text(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str
) -> None:
    operations.fails_with = ZeroDivisionError("secret path /etc/shadow")
    async with refused(grpc.StatusCode.INTERNAL) as refusal:
        await call(channel, rpc, bearer("admin"))
    told = f"{refusal.error} {refusal.info()}"
    assert "secret" not in told
    assert "ZeroDivision" not in told
    assert refusal.info().reason == "INTERNAL"


@pytest.mark.parametrize("rpc", ["Pause", "GetOperation"])
async def test_our_own_cancellation_ends_as_a_status_at_once(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str
) -> None:
    operations.fails_with = asyncio.CancelledError()
    async with refused(grpc.StatusCode.UNAVAILABLE) as refusal:
        await call(channel, rpc, bearer("admin"))
    assert refusal.info().reason == "CALL_ENDED"


async def test_long_messages_and_details_still_fit_into_the_trailers(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    operations.fails_with = Conflict(
        "x" * 100_000, details={"first": "1", "epochs": "9," * 50_000, "after": "2"}
    )
    async with refused(grpc.StatusCode.ABORTED) as refusal:
        await call(channel, "Pause", bearer("admin"))
    assert refusal.info().metadata["first"] == "1"
    assert refusal.info().metadata["epochs"].startswith("9,9,")


# ---------------------------------------------------------------------------------------------- audit, metrics


@pytest.mark.clause("AD-101")
async def test_calls_refused_before_the_core_are_audited_and_strangers_are_only_counted(
    channel: grpc.aio.Channel, operations: ScriptedOperations, metrics: Metrics
) -> None:
    async with refused(grpc.StatusCode.UNAUTHENTICATED):
        await call(channel, "UpdateWeights", bearer("nobody"))
    assert operations.audited == []
    async with refused(grpc.StatusCode.PERMISSION_DENIED):
        await call(channel, "UpdateWeights", bearer("operator"))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await call(channel, "FlushCaches", bearer("operator"), pb.FlushCachesRequest())
    assert operations.audited == [
        ("operator", "UPDATE_WEIGHTS", "PERMISSION_DENIED"),
        ("operator", "FLUSH_CACHES", "EMPTY_SELECTOR"),
    ]
    # Refused for its shape, it is told by what it asked for all the same, whatever its key was.
    keyed = pb.FlushCachesRequest(options=pb.MutationOptions(idempotency_key="k", reason="r"))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await call(channel, "FlushCaches", bearer("operator"), keyed)
    payload = pb.FlushCachesRequest(options=pb.MutationOptions(reason="r")).SerializeToString(
        deterministic=True
    )
    assert operations.digests[-1] == hashlib.sha256(b"FlushCaches\0" + payload).digest()
    await call(channel, "GetAdminProfile", bearer("viewer"))
    text = metrics.render().decode()
    for rpc, code in (
        ("UpdateWeights", "UNAUTHENTICATED"),
        ("UpdateWeights", "PERMISSION_DENIED"),
        ("GetAdminProfile", "OK"),
    ):
        assert f'iop_grpc_calls_total{{code="{code}",rpc="openengine.v1.OpenEngineAdmin/{rpc}"}} 1.0' in text
    assert 'code="INVALID_ARGUMENT",rpc="openengine.v1.OpenEngineAdmin/FlushCaches"} 2.0' in text


# ---------------------------------------------------------------------------------------------- profiles


START = StartProfileRequest(
    options=MutationOptions(idempotency_key="k"), target=AllTargets(), kinds=(ProfilerKind.CPU,)
)


@pytest.mark.clause("AD-46")
async def test_a_profile_call_answers_with_the_result_of_its_operation(
    admin_address: str, operations: ScriptedOperations
) -> None:
    result = StartProfileResult(
        operation_id=OperationId("op-1"),
        profile_id="p",
        started_at_unix_nanos=9,
        participant_ids=(ParticipantId("r0"),),
    )
    operations.bodies = [
        OperationAccepted(operation=operation()),
        OperationCompleted(result=result, revision=1),
    ]
    async with client(admin_address) as admin:
        assert await admin.start_profile(START) == result


@pytest.mark.clause("AD-46")
async def test_a_profile_call_that_failed_after_acceptance_is_aborted_with_the_operation_id(
    admin_address: str, operations: ScriptedOperations
) -> None:
    failed = OperationFailed(error=AdminError(code=AdminErrorCode.INTERNAL, message="m"), revision=1)
    operations.bodies = [OperationAccepted(operation=operation()), failed]
    async with client(admin_address) as admin:
        with pytest.raises(Conflict) as caught:
            await admin.start_profile(START)
    assert caught.value.reason == "OPERATION_FAILED"
    assert caught.value.details == {"operation_id": "op-1"}


@pytest.mark.clause("AD-105")
async def test_a_dry_run_of_a_profile_answers_the_plan(
    admin_address: str, operations: ScriptedOperations
) -> None:
    plan = OperationPlan(steps=(), blockers=("paused",), pauses_inference=False, revision=2)
    operations.bodies = [plan]
    async with client(admin_address) as admin:
        assert await admin.start_profile(START) == plan


# ---------------------------------------------------------------------------------------------- detaching


@pytest.mark.clause("AD-22")
@pytest.mark.parametrize("rpc", ["Pause", "WatchOperation"])
async def test_a_cancelled_stream_only_closes_its_observer(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str
) -> None:
    operations.go_on = asyncio.Event()
    stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
    stream = getattr(stub, rpc)(WELL_FORMED[rpc], metadata=bearer("admin"), timeout=60)
    first = await stream.read()
    assert first.sequence == 1
    assert not operations.left.is_set()
    stream.cancel()
    async with asyncio.timeout(30):
        await operations.left.wait()
    # Nothing but the observer was told: no cancel reached the core.
    assert [what for what, _, _ in operations.seen] in (["PAUSE"], ["WATCH"])


@pytest.mark.clause("AD-22")
@pytest.mark.parametrize("rpc", ["Pause", "StartProfile"])
async def test_an_expired_rpc_deadline_only_closes_its_observer(
    channel: grpc.aio.Channel, operations: ScriptedOperations, rpc: str
) -> None:
    operations.go_on = asyncio.Event()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, rpc, bearer("admin"), timeout=1.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(30):
        await operations.left.wait()
    assert not any(what == "CANCEL" for what, _, _ in operations.seen)


# ---------------------------------------------------------------------------------------------- health


@pytest.mark.clause("AD-06")
async def test_health_tells_whether_the_store_can_be_written_and_watchers_hear_of_it(
    channel: grpc.aio.Channel, operations: ScriptedOperations
) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    name = "openengine.v1.OpenEngineAdmin"
    watching = health.Watch(health_pb2.HealthCheckRequest(service=name), timeout=60)
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    operations.is_serving = False
    for service in (name, ""):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()


@pytest.mark.clause("AD-06")
async def test_health_does_not_know_services_of_the_other_listener(channel: grpc.aio.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    async with refused(grpc.StatusCode.NOT_FOUND):
        await health.Check(health_pb2.HealthCheckRequest(service="openengine.v1.Inference"))


# ---------------------------------------------------------------------------------------------- client


async def test_the_client_sends_no_credential_without_a_token(admin_address: str) -> None:
    async with AdminClient(AdminTarget(address=admin_address, timeout_s=60)) as admin:
        with pytest.raises(Unauthenticated) as caught:
            await admin.profile()
    assert caught.value.reason == "NO_CREDENTIAL"


async def test_the_client_reports_an_unreachable_server_as_unavailable(unused_address: str) -> None:
    async with AdminClient(AdminTarget(address=unused_address, token="t", timeout_s=60)) as admin:
        with pytest.raises(Unavailable):
            await admin.profile()


def test_the_client_shows_no_token_and_refuses_one_that_cannot_travel() -> None:
    assert "hush" not in repr(AdminTarget(address="127.0.0.1:1", token="hush"))
    with pytest.raises(InvalidRequest, match="token"):
        AdminClient(AdminTarget(address="127.0.0.1:1", token="a\nb"))
