"""The RPCs of an engine's OpenEngineAdmin that steps need; a mutation is followed to its terminal event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import grpc
from google.protobuf.json_format import MessageToDict

from iop.adapters.openengine.channel import END_OF_CALL, bearer, connect, error_of
from iop.admin.codec import RecordCodec
from iop.admin.enums import AdminOperationKind, AdminOperationState, ProfilerKind
from iop.admin.profile import AdminProfile
from iop.admin.requests import (
    DiskSource,
    FlushCachesRequest,
    ListOperationsRequest,
    MutationOptions,
    MutationRequest,
    ParticipantTargets,
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
    AdminError,
    AdminOperation,
    AdminOperationEvent,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPage,
    OperationPlan,
    OperationProgress,
    OperationResult,
    ParticipantStatus,
    ParticipantUpdate,
    StartProfileResult,
    StopProfileResult,
)
from iop.admin.weight_sources import EXTRA_KEY, read_sources
from iop.core.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    IopError,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    RemoteProtocolError,
    Unavailable,
    Unsupported,
)
from iop.core.ids import ParticipantId
from iop.pb.iop import artifacts_pb2, artifacts_pb2_grpc
from iop.pb.openengine.v1 import admin_pb2 as pb
from iop.pb.openengine.v1 import admin_pb2_grpc, openengine_pb2_grpc, server_pb2

_log = logging.getLogger(__name__)

READ_TIMEOUT_S: Final = 5.0
"""Profiles and operations are answered from memory or one query."""

REATTACH_DELAY_S: Final = 0.5
"""Between attempts to follow a mutation whose stream broke; the step's own time bounds them all."""

REATTACH_MAX_S: Final = 1.5
"""How long an engine may take no connection before a mutation under way is told as one of an engine that is away.

Whoever asked for it knows how long to wait (AD-25).
"""

GIVEN_UP_S: Final = 2.0
"""How long a mutation that is given up is waited for until the engine has accepted or refused it.

One that is on its way when its caller leaves would be accepted after whoever comes next has looked for it.
"""

_RUNNING_MAX: Final = 100
"""Operations in one answer; the contract's servers give no more."""

_ENDED_POLL_S: Final = 0.05
"""Between two looks for the end of an operation that was called off; it takes back what it did first."""

_UNFINISHED: Final = tuple(state for state in AdminOperationState if not state.is_terminal)

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


class OperationFailedError(Exception):
    """The engine accepted a mutation and ended it without success."""

    def __init__(self, error: AdminError) -> None:
        super().__init__(error.message)
        self.error = error


class AdminRpc:
    """One engine's admin listener.

    Args:
        channel: to it; owned by the caller.
        token: bearer token; empty: none.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._stub: Any = admin_pb2_grpc.OpenEngineAdminStub(channel)
        self._metadata = bearer(token)
        self._codec = RecordCodec(error=RemoteProtocolError, is_lenient=True)

    async def profile(self) -> AdminProfile:
        """GetAdminProfile. Raises as every call here: typed by status; Unavailable when nobody answers."""
        return self._codec.decode(
            await self._unary("GetAdminProfile", pb.GetAdminProfileRequest()), AdminProfile
        )

    async def weight_sources(self) -> dict[str, tuple[str, DiskSource]]:
        """By model: a version, and the files that it can be read from again, where the server says so (AD-32)."""
        stub: Any = openengine_pb2_grpc.ControlStub(self._channel)
        try:
            info = await stub.GetServerInfo(
                server_pb2.GetServerInfoRequest(), metadata=self._metadata, timeout=READ_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc
        return read_sources(MessageToDict(info.extra).get(EXTRA_KEY)) if info.HasField("extra") else {}

    async def operation(self, operation_id: str) -> AdminOperation:
        """GetOperation."""
        request = pb.GetAdminOperationRequest(operation_id=operation_id)
        return self._codec.decode(await self._unary("GetOperation", request), AdminOperation)

    async def unfinished(self) -> Sequence[AdminOperation]:
        """The engine's operations that run now; an engine runs few at once, so one page has them all."""
        return await self._listed(ListOperationsRequest(page_size=_RUNNING_MAX, states=_UNFINISHED))

    async def newest(self, kind: AdminOperationKind, state: AdminOperationState) -> Sequence[AdminOperation]:
        """The newest operations of one kind in one state: a page of them."""
        return await self._listed(
            ListOperationsRequest(page_size=_RUNNING_MAX, kinds=(kind,), states=(state,))
        )

    async def _listed(self, request: ListOperationsRequest) -> Sequence[AdminOperation]:
        """A page; an empty one from a server that does not list: that RPC came later than the others (AD-01)."""
        message = self._codec.encode(request, pb.ListAdminOperationsRequest())
        try:
            answer = await self._unary("ListOperations", message)
        except (Unsupported, PermissionDenied, NotFound, InvalidRequest):
            return ()
        return self._codec.decode(answer, OperationPage).operations

    async def call_off(self, operation_id: str) -> AdminOperation:
        """Ask to end an operation, and wait until it has ended; one that cannot be called off ends by itself.

        The caller bounds it by its own timeout.
        """
        request = pb.CancelAdminOperationRequest(operation_id=operation_id, reason="given up by the Node")
        with contextlib.suppress(Unsupported):
            await self._unary("CancelOperation", request)
        while True:
            operation = await self.operation(operation_id)
            if operation.state.is_terminal:
                return operation
            await asyncio.sleep(_ENDED_POLL_S)

    async def start_profile(self, request: StartProfileRequest) -> StartProfileResult:
        """StartProfile; a repetition with the same key answers the same."""
        message = self._codec.encode(request, pb.StartProfileRequest())
        try:
            answer = await self._unary("StartProfile", message, outlives_caller=True)
            return self._codec.decode(answer, StartProfileResult)
        except AlreadyExists as exc:
            result = await self._result_of_key(exc)
            assert isinstance(result, StartProfileResult), "the key names the step, and the step its kind"
            return result

    async def could_profile(self, participant_ids: Sequence[ParticipantId], kind: ProfilerKind) -> bool:
        """Whether a profile of these could begin now; False also where the server does not tell."""
        request = StartProfileRequest(
            options=MutationOptions(idempotency_key="", validate_only=True),
            target=ParticipantTargets(participant_ids=tuple(participant_ids)),
            kinds=(kind,),
        )
        message = self._codec.encode(request, pb.StartProfileRequest())
        try:
            answer = await self._unary("StartProfile", message)
        except (Unsupported, PermissionDenied, NotFound, InvalidRequest, PreconditionFailed):
            return False
        return answer.HasField("plan") and not answer.plan.blockers

    async def stop_profile(self, request: StopProfileRequest, *, timeout_s: float) -> StopProfileResult:
        """StopProfile; writing traces may take minutes."""
        message = self._codec.encode(request, pb.StopProfileRequest())
        try:
            answer = await self._unary("StopProfile", message, timeout_s=timeout_s)
        except AlreadyExists as exc:
            result = await self._result_of_key(exc)
            assert isinstance(result, StopProfileResult), "the key names the step, and the step its kind"
            return result
        return self._codec.decode(answer, StopProfileResult)

    async def _result_of_key(self, error: AlreadyExists) -> OperationResult:
        """The result of the operation that an earlier sending of the same step made."""
        known = _operation_of_key(error)
        if not known:
            raise error
        message = pb.WatchAdminOperationRequest(operation_id=known)
        try:
            return await self._follow("WatchOperation", message, lambda _: None)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc

    def read_artifact(self, uri: str) -> Any:
        """The call that streams one of the engine's profile files; its owner reads and cancels it (AD-46)."""
        stub: Any = artifacts_pb2_grpc.ArtifactsStub(self._channel)
        return stub.Read(artifacts_pb2.ReadArtifactRequest(uri=uri), metadata=self._metadata)

    async def plan(self, request: MutationRequest) -> OperationPlan:
        """A dry run (`validate_only`); its blockers say why the mutation would be refused."""
        rpc, message_type = _STREAMING[type(request)]
        call = getattr(self._stub, rpc)(self._codec.encode(request, message_type()), metadata=self._metadata)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S * 4):
                event = await call.read()
            if event is END_OF_CALL or not event.HasField("plan"):
                raise RemoteProtocolError("the engine answered a dry run without a plan", reason="NO_PLAN")
            return self._codec.decode(event.plan, OperationPlan)
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc
        except TimeoutError as exc:
            raise DeadlineExceeded("the engine did not answer a dry run in time") from exc
        finally:
            call.cancel()

    async def mutate(
        self, request: MutationRequest, on_progress: Callable[[OperationProgress | ParticipantStatus], None]
    ) -> OperationResult:
        """Ask for a mutation and follow it to its end, over as many streams as that takes.

        A broken stream leaves the mutation running (AD-22): the same request with the same key attaches
        again. The caller bounds the whole by its own timeout.

        Raises:
            OperationFailedError: accepted, and ended without success.
            Unavailable: nothing was accepted; or the engine went away under it and takes no connection for
                ``REATTACH_MAX_S``. Asking again with the same key attaches, should it be back (AD-25, AD-36).
            IopError: refused before acceptance, by its status.
        Cancellation: safe; the mutation goes on at the engine.
        """
        rpc, message_type = _STREAMING[type(request)]
        message = self._codec.encode(request, message_type())
        loop = asyncio.get_running_loop()
        reached_at: float | None = None
        while True:
            try:
                await connect(self._channel)
                reached_at = loop.time()
                return await self._follow(rpc, message, on_progress)
            except grpc.aio.AioRpcError as exc:
                error = error_of(exc)
                known = _operation_of_key(error)
                if known:
                    rpc, message = "WatchOperation", pb.WatchAdminOperationRequest(operation_id=known)
                    continue
                if not isinstance(error, Unavailable | Cancelled | DeadlineExceeded):
                    raise error from exc
                reached_at = loop.time()
                _log.info("engine_admin.stream_broken rpc=%s reason=%s", rpc, error.message)
            except Unavailable:
                if reached_at is None or loop.time() - reached_at > REATTACH_MAX_S:
                    raise
            await asyncio.sleep(REATTACH_DELAY_S)

    async def _follow(
        self, rpc: str, message: Any, on_progress: Callable[[OperationProgress | ParticipantStatus], None]
    ) -> OperationResult:
        call = getattr(self._stub, rpc)(message, metadata=self._metadata)
        try:
            raw = await _answer_of(call.read)
            while True:
                if raw is END_OF_CALL:
                    raise RemoteProtocolError(
                        "the engine ended an operation's stream without its end", reason="NO_TERMINAL_EVENT"
                    )
                event = self._codec.decode(raw, AdminOperationEvent).event
                match event:
                    case OperationCompleted(result=result):
                        return result
                    case OperationFailed(error=error):
                        raise OperationFailedError(error)
                    case OperationCancelled(reason=reason):
                        raise PreconditionFailed(
                            f"the engine's operation was called off: {reason}"[:512], reason="CALLED_OFF"
                        )
                    case OperationProgress():
                        on_progress(event)
                    case ParticipantUpdate(status=status):
                        on_progress(status)
                    case _:
                        pass
                raw = await call.read()
        finally:
            call.cancel()

    async def _unary(
        self, rpc: str, message: Any, *, timeout_s: float = READ_TIMEOUT_S, outlives_caller: bool = False
    ) -> Any:
        await connect(self._channel)

        def ask() -> Awaitable[Any]:
            asked: Awaitable[Any] = getattr(self._stub, rpc)(
                message, metadata=self._metadata, timeout=timeout_s
            )
            return asked

        try:
            return await (_answer_of(ask) if outlives_caller else ask())
        except grpc.aio.AioRpcError as exc:
            raise error_of(exc) from exc


async def _answer_of(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What the engine says to a mutation first; whoever is cancelled meanwhile still waits for it, within a bound."""
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        try:
            answered.set_result(await ask())
        except grpc.aio.AioRpcError as exc:
            answered.set_exception(exc)

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(read(), name="first answer")
        try:
            await asyncio.wait({reading})
        except asyncio.CancelledError:
            if not reading.done():
                await asyncio.wait({reading}, timeout=GIVEN_UP_S)
            reading.cancel()
            raise
        finally:
            if answered.done() and not answered.cancelled():
                answered.exception()  # looked at, so that nobody is told of it when the caller has left
    return answered.result()


def _operation_of_key(error: IopError) -> str:
    """The operation that the key of a repeated step made.

    A step that is sent again has less time left, and the time that it gives the engine is part of the payload that the
    key stands for (AD-12). Nothing else of it differs, since the key names the step (AD-36).
    """
    if isinstance(error, AlreadyExists) and error.reason == "IDEMPOTENCY_KEY_REUSED":
        return error.details.get("operation_id", "")
    return ""
