"""Where a gRPC listener listens, how much it takes, and how it stops."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_admin_rig import DRAIN, OPTIONS, WELL_FORMED, ScriptedOperations, bearer, call
from grpc_health.v1 import health_pb2, health_pb2_grpc

from iop.admin.profile import AdminLimits
from iop.api.grpc.auth import PrincipalDirectory
from iop.api.grpc.listeners import admin_listener, admin_receive_bytes_max
from iop.api.grpc.server import ListenerSettings, is_loopback
from iop.core.errors import InvalidRequest, PreconditionFailed, Unavailable
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc


@pytest.mark.clause("AD-02")
async def test_listens_on_a_unix_socket_that_only_its_owner_can_open(
    operations: ScriptedOperations, principals: PrincipalDirectory, tmp_path: Path
) -> None:
    path = tmp_path / "admin.sock"
    listener = admin_listener(operations, principals, ListenerSettings(address=f"unix:{path}"))
    async with listener.serving():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await call(channel, "GetAdminProfile", bearer("viewer"))
    assert not path.exists()


async def test_a_taken_port_is_named_and_nothing_is_shared(
    admin_address: str, operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    second = admin_listener(operations, principals, ListenerSettings(address=admin_address))
    with pytest.raises(Unavailable, match=admin_address) as caught:
        async with second.serving():
            pass
    assert caught.value.reason == "ADDRESS_IN_USE"


@pytest.mark.clause("AD-04")
@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "198.51.100.7:0", "gpu-1.example:9091"])
async def test_off_loopback_without_tls_it_refuses_to_start(
    operations: ScriptedOperations, principals: PrincipalDirectory, address: str
) -> None:
    listener = admin_listener(operations, principals, ListenerSettings(address=address))
    with pytest.raises(PreconditionFailed, match="insecure: true") as caught:
        async with listener.serving():
            pass
    assert caught.value.reason == "INSECURE_LISTENER"


@pytest.mark.clause("AD-04")
async def test_insecure_written_out_lets_it_start(
    operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    settings = ListenerSettings(address="0.0.0.0:0", is_insecure_allowed=True)
    listener = admin_listener(operations, principals, settings)
    async with listener.serving():
        assert listener.address.startswith("0.0.0.0:")
        assert not listener.address.endswith(":0")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/run/x.sock", True),
        ("10.0.0.1:1", False),
        ("[fe80::1]:1", False),
        ("example.org:1", False),
    ],
)
def test_loopback_is_told_from_other_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:", ":9", "h:65536", "h:-1", "h:x", "unix:"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidRequest, match="listen address"):
        is_loopback(address)


@pytest.mark.clause("AD-104")
def test_the_receive_limit_is_the_tensors_and_one_mebibyte() -> None:
    assert admin_receive_bytes_max(AdminLimits(max_inline_tensor_bytes=5)) == 5 + 1024 * 1024


@pytest.mark.clause("AD-104")
async def test_a_message_over_the_receive_limit_is_refused_and_one_at_it_is_taken(
    operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    def request(size: int) -> Any:
        tensor = pb.InlineTensor(spec=pb.TensorSpec(dtype=pb.TENSOR_DTYPE_INT8), data=bytes(size))
        return pb.UpdateWeightsRequest(
            options=OPTIONS,
            inline_tensors=pb.InlineTensorSource(tensors=[tensor]),
            cache_policy=pb.CACHE_POLICY_FLUSH,
            quiesce=DRAIN,
        )

    limit = 100_000
    settings = ListenerSettings(address="127.0.0.1:0", receive_bytes_max=limit)
    listener = admin_listener(operations, principals, settings)
    overhead = len(request(limit).SerializeToString()) - limit
    async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
        await call(channel, "UpdateWeights", bearer("admin"), request(limit - overhead))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "UpdateWeights", bearer("admin"), request(limit - overhead + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(operations.calls) == 1


async def test_stopping_tells_health_first_and_lets_running_calls_finish(
    operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    operations.go_on = asyncio.Event()
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=30)
    listener = admin_listener(operations, principals, settings)
    async with asyncio.TaskGroup() as tasks, listener.serving():
        channel = grpc.aio.insecure_channel(listener.address)
        health: Any = health_pb2_grpc.HealthStub(channel)
        watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
        stream = stub.Pause(WELL_FORMED["Pause"], metadata=bearer("admin"), timeout=60)
        assert (await stream.read()).sequence == 1

        async def observe() -> None:
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watching.cancel()
            assert operations.go_on is not None
            operations.go_on.set()
            assert (await stream.read()).sequence == 2

        tasks.create_task(observe(), name="observe")
    await channel.close()


async def test_a_call_that_outlives_the_grace_ends_with_a_status(
    operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    operations.go_on = asyncio.Event()
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.1)
    listener = admin_listener(operations, principals, settings)
    async with listener.serving():
        channel = grpc.aio.insecure_channel(listener.address)
        stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
        stream = stub.Pause(WELL_FORMED["Pause"], metadata=bearer("admin"), timeout=60)
        assert (await stream.read()).sequence == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close()


async def test_more_calls_than_allowed_at_once_are_refused_as_exhausted(
    operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    operations.go_on = asyncio.Event()
    settings = ListenerSettings(address="127.0.0.1:0", calls_max=1, stop_grace_s=0.1)
    listener = admin_listener(operations, principals, settings)
    async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
        stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
        stream = stub.Pause(WELL_FORMED["Pause"], metadata=bearer("admin"), timeout=60)
        assert (await stream.read()).sequence == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "GetAdminProfile", bearer("viewer"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stream.cancel()
