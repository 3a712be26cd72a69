"""One gRPC listener: an address, the services on it, their health and their reflection (AD-02, AD-06).

Each listener stands alone: what is not in its list of services is neither served, nor told by its health, nor
shown by its reflection.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from iop.api.grpc.health import HEALTH_SERVICE, LiveHealth, ServingCheck
from iop.api.grpc.tls import ServerTls, server_credentials
from iop.core.errors import InvalidRequest, PreconditionFailed, Unavailable
from iop.core.limits import MIB

__all__ = ["GrpcListener", "GrpcService", "ListenerSettings", "ServerTls", "is_loopback"]

_log = logging.getLogger(__name__)

REFLECTION_SERVICE: Final[str] = reflection.SERVICE_NAME

RECEIVE_BYTES_MAX: Final = 16 * MIB
"""Largest request by default. Larger lets one call make us allocate more; admin raises it for tensors (AD-104)."""

CALLS_MAX: Final = 4096
"""RPCs at once; beyond it callers get RESOURCE_EXHAUSTED. Each costs a task and its messages."""

UNIX_PREFIX: Final = "unix:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerSettings:
    """Where and how to listen.

    Attributes:
        address: `HOST:PORT` (port 0: any free one) or `unix:PATH`.
        is_insecure_allowed: the config says `insecure: true`: listen off loopback without TLS (AD-04).
        receive_bytes_max: largest request message.
        calls_max: RPCs at once.
        stop_grace_s: how long running calls may go on after a stop.
    """

    address: str
    tls: ServerTls | None = None
    is_insecure_allowed: bool = False
    receive_bytes_max: int = RECEIVE_BYTES_MAX
    calls_max: int = CALLS_MAX
    stop_grace_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcService:
    """One service on a listener: what to register, the file that declares it, and whether it can serve."""

    name: str
    file: FileDescriptor
    register: Callable[[grpc.aio.Server], None]
    is_serving: ServingCheck


class GrpcListener:
    """A listener; `address` is where it really listens once it serves."""

    def __init__(
        self,
        services: Sequence[GrpcService],
        *,
        interceptors: Sequence[Any],
        settings: ListenerSettings,
    ) -> None:
        self._services = tuple(services)
        self._interceptors = tuple(interceptors)
        self._settings = settings
        self._health = LiveHealth({service.name: service.is_serving for service in services})
        self.address = settings.address

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[GrpcListener]:
        """Listen until the block ends, then stop gracefully.

        Raises:
            InvalidRequest: the address is malformed.
            PreconditionFailed: INSECURE_LISTENER, off loopback without TLS (AD-04).
            Unavailable: ADDRESS_IN_USE, or the address cannot be bound.
        """
        server = self._build()
        self.address = self._bind(server)
        await server.start()
        _log.info("grpc.listening", extra={"address": self.address, "services": self._names()})
        try:
            yield self
        finally:
            await self._stop(server)

    def _build(self) -> grpc.aio.Server:
        limit = self._settings.receive_bytes_max
        server = grpc.aio.server(
            interceptors=self._interceptors,
            maximum_concurrent_rpcs=self._settings.calls_max,
            options=(
                ("grpc.max_receive_message_length", limit),
                # Without this two processes share a taken port silently, each getting some of the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ),
        )
        for service in self._services:
            service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        pool = pool_of([service.file for service in self._services])
        names = (*self._names(), HEALTH_SERVICE, REFLECTION_SERVICE)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            ReflectionServicer(names, pool=pool), server
        )
        return server

    def _bind(self, server: grpc.aio.Server) -> str:
        settings = self._settings
        host, port = split_address(settings.address)
        if settings.tls is None and not settings.is_insecure_allowed and not is_loopback(settings.address):
            raise PreconditionFailed(
                f"{settings.address} is not loopback and has no TLS: add tls, or write insecure: true.",
                reason="INSECURE_LISTENER",
                details={"address": settings.address},
            )
        target = settings.address if port is None else _join(host, port)
        try:
            bound = (
                server.add_insecure_port(target)
                if settings.tls is None
                else server.add_secure_port(target, server_credentials(settings.tls))
            )
        except RuntimeError:
            # grpc names its own source lines here; the address is what the operator can act on.
            raise Unavailable(
                f"Cannot listen on {settings.address}: it is taken, or not an address of this machine.",
                reason="ADDRESS_IN_USE",
                details={"address": settings.address},
            ) from None
        if port is None:
            Path(host).chmod(stat.S_IRUSR | stat.S_IWUSR)
            return settings.address
        return _join(host, bound)

    async def _stop(self, server: grpc.aio.Server) -> None:
        """Health first, so that balancers leave; then no new calls; then the running ones, up to the grace."""
        self._health.shut_down()
        await server.stop(self._settings.stop_grace_s)
        self._remove_socket_file()
        _log.info("grpc.stopped", extra={"address": self.address})

    def _remove_socket_file(self) -> None:
        if self._settings.address.startswith(UNIX_PREFIX):
            Path(self._settings.address.removeprefix(UNIX_PREFIX)).unlink(missing_ok=True)

    def _names(self) -> tuple[str, ...]:
        return tuple(service.name for service in self._services)


def pool_of(files: Sequence[FileDescriptor]) -> DescriptorPool:
    """A descriptor pool with these files, what they import, and health and reflection; nothing else (AD-06).

    The default pool would show a caller every message of this process, whichever listener it asks.
    """
    pool = DescriptorPool()
    seen: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        copy = FileDescriptorProto()
        file.CopyToProto(copy)
        pool.Add(copy)

    for file in (*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        add(file)
    return pool


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address: a Unix socket, `localhost`, or a loopback literal."""
    host, port = split_address(address)
    if port is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int | None]:
    """Host and port; for `unix:PATH` the path and None.

    Raises:
        InvalidRequest: neither form.
    """
    if address.startswith(UNIX_PREFIX):
        path = address.removeprefix(UNIX_PREFIX)
        if path:
            return path, None
    host, separator, port = address.rpartition(":")
    if separator and host and port.isascii() and port.isdigit() and int(port) < 65_536:
        return host.strip("[]"), int(port)
    raise InvalidRequest(
        f"{address!r} is no listen address: write HOST:PORT or unix:PATH.", details={"address": address}
    )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
