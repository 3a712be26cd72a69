"""Channels to an engine's gRPC listeners, and its statuses as our errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from iop.core.errors import (
    AlreadyExists,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    IopError,
    NotFound,
    Overloaded,
    PermissionDenied,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

CONNECT_TIMEOUT_S: Final = 5.0
"""Until an engine must have accepted a connection; engines are near."""

MESSAGE_BYTES_MAX: Final = 65 * 1024 * 1024
"""Largest message either way: an inline weight update of the contract's default size, with its frame
(AD-104)."""

END_OF_CALL: Final[Any] = grpc.aio.EOF
"""What reading a call gives when it ended with OK."""

DETAILS_KEY: Final = "grpc-status-details-bin"

MESSAGE_CHARS_MAX: Final = 512
"""Most of an engine's own words that go on."""

_ERRORS: Final[Mapping[grpc.StatusCode, type[IopError]]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.UNIMPLEMENTED: Unsupported,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
        grpc.StatusCode.FAILED_PRECONDITION: PreconditionFailed,
        grpc.StatusCode.ABORTED: Conflict,
        grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: Cancelled,
    }
)


def check_authority(ca_pem: bytes) -> None:
    """Raises InvalidRequest when an authority is given that is not PEM text."""
    if ca_pem and b"-----BEGIN CERTIFICATE-----" not in ca_pem:
        raise InvalidRequest("tls.ca: not a PEM certificate", reason="BAD_CA")


def open_channel(target: str, *, ca_pem: bytes) -> grpc.aio.Channel:
    """A channel that connects when first used. TLS exactly when an authority is given."""
    options = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        # Ours is the only retry: a request must not be sent twice behind our back (EN-112).
        ("grpc.enable_retries", 0),
        # An ambient proxy must not see what belongs between a Node and its engine.
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
    if not ca_pem:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(ca_pem), options=options)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata with the engine's credential; none for an empty token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


async def connect(channel: grpc.aio.Channel, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """Wait until the channel is connected, so that whatever fails later may have reached the engine (EN-112).

    Raises:
        Unavailable: not connected; nothing was sent.
    Cancellation: safe.
    """
    state = channel.get_state(try_to_connect=True)
    if state is grpc.ChannelConnectivity.READY:
        return
    try:
        async with asyncio.timeout(timeout_s):
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.SHUTDOWN:
                    raise Unavailable("the adapter is closed", reason="CLOSED")
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    # The last dial failed, at most a second ago; the channel goes on dialling by itself.
                    raise Unavailable("the engine cannot be reached", reason="ENGINE_UNREACHABLE")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as exc:
        raise Unavailable(
            f"the engine accepted no connection within {timeout_s:g} s", reason="ENGINE_UNREACHABLE"
        ) from exc


def error_of(status: grpc.aio.AioRpcError) -> IopError:
    """The typed error that a status and its ErrorInfo tell; the engine's words are shortened."""
    error_type = _ERRORS.get(status.code(), Internal)
    # An Edge that passes on what its own engine said has put the word before it already.
    words = (status.details() or status.code().name).removeprefix("engine: ")[:MESSAGE_CHARS_MAX]
    if status.code() is grpc.StatusCode.UNAVAILABLE and "addresses" in words:
        # The library's own text names the address (EN-04).
        words = "the engine cannot be reached"
    reason, details = _error_info(status)
    return error_type(f"engine: {words}", reason=reason, details=details)


def _error_info(status: grpc.aio.AioRpcError) -> tuple[str | None, dict[str, str]]:
    trailing: Any = status.trailing_metadata() or ()
    for key, value in trailing:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        info = error_details_pb2.ErrorInfo()
        try:
            rich = status_pb2.Status.FromString(value)
            for detail in rich.details:
                if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                    return info.reason or None, {
                        name[:64]: text[:256] for name, text in info.metadata.items()
                    }
        except DecodeError:
            return None, {}
    return None, {}
