"""A typed client for any OpenEngineAdmin server: the command line, the console and tests use it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from iop.admin.codec import RecordCodec
from iop.admin.profile import AdminProfile
from iop.admin.requests import (
    FlushCachesRequest,
    ListOperationsRequest,
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
    StartProfileResult,
    StopProfileResult,
)
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
    RemoteProtocolError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from iop.pb.iop import artifacts_pb2, artifacts_pb2_grpc
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc

__all__ = ["AdminClient", "AdminTarget", "ClientTls", "StreamingMutation", "error_of"]

StreamingMutation = (
    FlushCachesRequest
    | PauseRequest
    | ResumeRequest
    | ReleaseResourcesRequest
    | RestoreResourcesRequest
    | UpdateWeightsRequest
    | ReconfigureServingRequest
)
"""Mutations whose RPC answers with a stream of events."""

Result = TypeVar("Result", StartProfileResult, StopProfileResult)

_STREAMING: Final[Mapping[type, tuple[str, Callable[[], Any]]]] = MappingProxyType(
    {
        FlushCachesRequest: ("FlushCaches", pb.FlushCachesRequest),
        PauseRequest: ("Pause", pb.PauseRequest),
        ResumeRequest: ("Resume", pb.ResumeRequest),
        ReleaseResourcesRequest: ("ReleaseResources", pb.ReleaseResourcesRequest),
        RestoreResourcesRequest: ("RestoreResources", pb.RestoreResourcesRequest),
        UpdateWeightsRequest: ("UpdateWeights", pb.UpdateWeightsRequest),
        ReconfigureServingRequest: ("ReconfigureServing", pb.ReconfigureServingRequest),
    }
)

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

ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest answer taken: a profile or an operation over thousands of participants is some megabytes."""

DETAILS_KEY: Final = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """PEM material: whom to trust, and who we are where the server wants to know (AD-03)."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminTarget:
    """Which server, and as whom.

    Attributes:
        address: `HOST:PORT` or `unix:PATH`.
        token: bearer token; None sends none.
        tls: None speaks plain text.
        timeout_s: for calls that answer once; streams have no bound but their caller's.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    timeout_s: float = 30.0


class AdminClient:
    """All RPCs of one server. Every method raises the typed error that the status and its ErrorInfo tell.

    Use it as an async context manager, or call `aclose`. A stream that breaks leaves the operation running; attach to
    it again with `watch(operation_id, after_sequence=...)` (AD-22, AD-26).
    """

    def __init__(self, target: AdminTarget) -> None:
        self._target = target
        self._codec = RecordCodec(error=RemoteProtocolError, is_lenient=True)
        self._metadata = _credentials(target.token)
        self._channel = _open_channel(target)
        self._stub: Any = admin_pb2_grpc.OpenEngineAdminStub(self._channel)
        self._artifacts: Any = artifacts_pb2_grpc.ArtifactsStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the channel. Idempotent."""
        await self._channel.close(None)

    def submit(self, request: StreamingMutation) -> AsyncIterator[AdminOperationEvent]:
        """Ask for a mutation and observe it to its terminal event; for a dry run, one plan.

        Closing the iterator only stops observing (AD-22).
        """
        rpc, message_type = _STREAMING[type(request)]
        return self._events(rpc, self._codec.encode(request, message_type()))

    async def start_profile(self, request: StartProfileRequest) -> StartProfileResult | OperationPlan:
        """Start a profile (AD-46); a plan for a dry run."""
        message = self._codec.encode(request, pb.StartProfileRequest())
        return self._profile_answer(await self._call("StartProfile", message), StartProfileResult)

    async def stop_profile(self, request: StopProfileRequest) -> StopProfileResult | OperationPlan:
        """Stop a profile and learn its artifacts (AD-46); a plan for a dry run."""
        message = self._codec.encode(request, pb.StopProfileRequest())
        return self._profile_answer(await self._call("StopProfile", message), StopProfileResult)

    async def get(self, operation_id: str) -> AdminOperation:
        """The whole state of one operation (AD-23)."""
        answer = await self._call("GetOperation", pb.GetAdminOperationRequest(operation_id=operation_id))
        return self._codec.decode(answer, AdminOperation)

    async def cancel(self, operation_id: str, *, reason: str = "") -> CancelResult:
        """Ask for an operation to be called off (AD-24)."""
        request = pb.CancelAdminOperationRequest(operation_id=operation_id, reason=reason)
        return self._codec.decode(await self._call("CancelOperation", request), CancelResult)

    async def profile(self) -> AdminProfile:
        """What the server offers and how it stands (AD-50)."""
        answer = await self._call("GetAdminProfile", pb.GetAdminProfileRequest())
        return self._codec.decode(answer, AdminProfile)

    async def list_operations(self, request: ListOperationsRequest | None = None) -> OperationPage:
        """One page of operations, newest first."""
        message = self._codec.encode(request or ListOperationsRequest(), pb.ListAdminOperationsRequest())
        return self._codec.decode(await self._call("ListOperations", message), OperationPage)

    async def artifact(self, uri: str) -> AsyncIterator[bytes]:
        """A profile's file in pieces, at the reader's pace (AD-46); hold it to the digest that stands with its name.

        Raises:
            NotFound: the server knows no such artifact.
            Unsupported: it hands out no files.
            Unavailable: it could not be had whole.
        """
        call = self._artifacts.Read(artifacts_pb2.ReadArtifactRequest(uri=uri), metadata=self._metadata)
        try:
            async for piece in call:
                yield piece.data
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from error
        finally:
            call.cancel()

    def watch(self, operation_id: str, *, after_sequence: int = 0) -> AsyncIterator[AdminOperationEvent]:
        """Attach to an operation's events after a sequence, to its terminal event."""
        request = pb.WatchAdminOperationRequest(operation_id=operation_id, after_sequence=after_sequence)
        return self._events("WatchOperation", request)

    async def _events(self, rpc: str, message: Any) -> AsyncIterator[AdminOperationEvent]:
        call = getattr(self._stub, rpc)(message, metadata=self._metadata)
        try:
            async for event in call:
                yield self._codec.decode(event, AdminOperationEvent)
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from error
        finally:
            call.cancel()

    async def _call(self, rpc: str, message: Any) -> Any:
        try:
            return await getattr(self._stub, rpc)(
                message, metadata=self._metadata, timeout=self._target.timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from error

    def _error_of(self, error: grpc.aio.AioRpcError) -> IopError:
        """As :func:`error_of`; one that no server sent says where nobody was reached, and what to do."""
        if error.code() is grpc.StatusCode.UNAVAILABLE and _read_details(error)[0] is None:
            address = self._target.address
            return Unavailable(
                f"Nobody answers at {address} ({error.details()}). Is the server running? Start one with: iop up",
                reason="UNREACHABLE",
                details={"address": address},
            )
        told = error_of(error)
        if isinstance(told, Unauthenticated | PermissionDenied):
            # A fleet has several servers, each with principals of its own: say whose word this is.
            told.details = {**told.details, "server": self._target.address}
        return told

    def _profile_answer(self, answer: Any, record_type: type[Result]) -> Result | OperationPlan:
        if answer.HasField("plan"):
            return self._codec.decode(answer.plan, OperationPlan)
        return self._codec.decode(answer, record_type)


def error_of(error: grpc.aio.AioRpcError) -> IopError:
    """The typed error that a status means, with the reason and metadata of its ErrorInfo."""
    kind = _ERRORS.get(error.code(), Internal)
    message = error.details() or error.code().name
    info, retry_after_s = _read_details(error)
    if info is None:
        return kind(message, reason=error.code().name, retry_after_s=retry_after_s)
    return kind(message, reason=info.reason, details=dict(info.metadata), retry_after_s=retry_after_s)


def _read_details(error: grpc.aio.AioRpcError) -> tuple[Any | None, float | None]:
    info: Any | None = None
    retry_after_s: float | None = None
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        # What a server put there is its own business; unreadable details only cost us the reason.
        with contextlib.suppress(ValueError):
            for detail in _parse_status(value).details:
                if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                    info = error_details_pb2.ErrorInfo()
                    detail.Unpack(info)
                elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                    retry = error_details_pb2.RetryInfo()
                    detail.Unpack(retry)
                    retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return info, retry_after_s


def _parse_status(value: bytes) -> Any:
    try:
        return status_pb2.Status.FromString(value)
    except DecodeError as error:
        raise ValueError("unreadable status details") from error


def _credentials(token: str | None) -> tuple[tuple[str, str], ...]:
    if not token:
        return ()
    if not (token.isascii() and token.isprintable()):
        raise InvalidRequest(
            "The token has characters that cannot travel in metadata.", reason="MALFORMED_TOKEN"
        )
    return (("authorization", f"Bearer {token}"),)


def _open_channel(target: AdminTarget) -> grpc.aio.Channel:
    options = (
        ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
        ("grpc.max_send_message_length", -1),
        # Calls go where they were sent: an ambient proxy must not see tokens that belong on loopback.
        ("grpc.enable_http_proxy", 0),
    )
    if target.tls is None:
        return grpc.aio.insecure_channel(target.address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=target.tls.ca,
        private_key=target.tls.key,
        certificate_chain=target.tls.certificate,
    )
    return grpc.aio.secure_channel(target.address, credentials, options=options)
