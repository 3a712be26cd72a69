"""The server under test, as checks see it: calls by role, the state it is in, and the way back to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from iop.conformance.hooks import HookName, HookPhase, Hooks, NoHooks
from iop.conformance.inference import GrpcInference, HttpInference, Inference
from iop.conformance.messages import pb
from iop.conformance.model import CheckFailed, CheckNotRun, require
from iop.conformance.offer import Offer
from iop.conformance.wire import MUTATIONS, Answer, Stream, call, open_stream

__all__ = ["Bench", "Running", "Target"]

RPC_TIMEOUT_S: Final = 20.0
"""For operations that nothing holds up."""

SETTLE_TIMEOUT_S: Final = 90.0
"""For operations that must take back what a failing rank left: a rollback alone may take 60 s (AD-25)."""

PATIENCE_S: Final = 40.0
"""For ends that are due soon: of a cancelled operation, of one whose deadline passed. Only wrong servers use it up."""

COMES_BACK_S: Final = 120.0
"""For a server that was restarted, and its participants."""

_CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)

_DONE_STATES: Final = frozenset(
    {
        pb.ADMIN_OPERATION_STATE_SUCCEEDED,
        pb.ADMIN_OPERATION_STATE_FAILED,
        pb.ADMIN_OPERATION_STATE_CANCELLED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where the server is, and what the caller lent to judge it by.

    Attributes:
        address: of OpenEngineAdmin.
        tokens: by role: `admin`, `operator`, `viewer`; those not given are absent.
        inference: address of its `openengine.v1.Inference`.
        http: `http://HOST:PORT` of its OpenAI HTTP; work goes there if it is given.
        inference_token: for them, where they want one.
        checkpoints: two directories of weights of the served model, the first being what it serves now.
        capacity: what its capacity is now.
        credentials: for TLS.
    """

    address: str
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    inference: str | None = None
    http: str | None = None
    inference_token: str | None = field(default=None, repr=False)
    checkpoints: tuple[str, str] | None = None
    capacity: int | None = None
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)


class Bench:
    """Everything that a check uses. One at a time; a check need not clean up, `put_back` does.

    Args:
        target: the server.
        hooks: what the caller lent.
        patience_s: how long an end that is due soon may take.
    """

    def __init__(self, target: Target, hooks: Hooks | None = None, *, patience_s: float = PATIENCE_S) -> None:
        self.target = target
        self.patience_s = patience_s
        self.hooks: Hooks = hooks or NoHooks()
        self.core: GrpcInference | None = None
        self.inference: Inference | None = None
        self._channel: grpc.aio.Channel | None = None
        self._run = secrets.token_hex(4)
        self._count = itertools.count(1)
        self._begun: set[str] = set()
        self._profiles: list[str] = []
        self._epochs: frozenset[int] = frozenset()
        self._releases: frozenset[int] = frozenset()
        self._quarantined: frozenset[str] = frozenset()
        self._hold: contextlib.AsyncExitStack | None = None
        self._failing = False
        self._connected = 0

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Bench]:
        """Hold a channel for the block."""
        async with contextlib.AsyncExitStack() as stack:
            self._channel = await stack.enter_async_context(self._open(self.target.address))
            if self.target.inference is not None:
                inference = await stack.enter_async_context(self._open(self.target.inference))
                self.core = GrpcInference(inference, token=self.target.inference_token)
                self.inference = self.core
            if self.target.http is not None:
                self.inference = HttpInference(self.target.http, token=self.target.inference_token)
            yield self

    def _open(self, address: str) -> grpc.aio.Channel:
        if self.target.credentials is not None:
            return grpc.aio.secure_channel(address, self.target.credentials, options=_CHANNEL_OPTIONS)
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)

    @property
    def channel(self) -> grpc.aio.Channel:
        """To the admin listener."""
        assert self._channel is not None, "used outside of connected()"
        return self._channel

    # ---------------------------------------------------------------------------------------------------- calls

    def key(self) -> str:
        """A new idempotency key."""
        return f"conformance-{self._run}-{next(self._count)}"

    def metadata(self, role: str) -> tuple[tuple[str, str], ...]:
        """The credential of a role; `nobody` has none.

        Raises:
            CheckNotRun: the caller lent no token of this role.
        """
        if role == "nobody":
            return ()
        token = self.target.tokens.get(role)
        if token is None:
            if role == "admin" and not self.target.tokens:
                return ()
            raise CheckNotRun(f"needs --{'' if role == 'admin' else role + '-'}token REF")
        return (("authorization", f"Bearer {token}"),)

    async def call(
        self, rpc: str, request: Message | bytes, *, role: str = "admin", timeout_s: float = RPC_TIMEOUT_S
    ) -> Answer:
        """One whole call."""
        answer = await call(self.channel, rpc, request, metadata=self.metadata(role), timeout_s=timeout_s)
        self._note(rpc, answer.messages)
        return answer

    async def call_as(
        self, metadata: Sequence[tuple[str, str]], rpc: str, request: Message | bytes
    ) -> Answer:
        """One whole call with credentials as given."""
        answer = await call(self.channel, rpc, request, metadata=metadata, timeout_s=RPC_TIMEOUT_S)
        self._note(rpc, answer.messages)
        return answer

    def open(
        self, rpc: str, request: Message | bytes, *, role: str = "admin", timeout_s: float = SETTLE_TIMEOUT_S
    ) -> Stream:
        """Begin a call whose answer is a stream."""
        return open_stream(self.channel, rpc, request, metadata=self.metadata(role), timeout_s=timeout_s)

    async def begin(self, rpc: str, request: Message, *, role: str = "admin") -> Stream:
        """Begin a mutation and wait until it is accepted.

        Raises:
            CheckFailed: it is not.
        """
        stream = self.open(rpc, request, role=role)
        self._begun.add((await stream.first()).operation_id)
        return stream

    def _note(self, rpc: str, messages: Sequence[Any]) -> None:
        if rpc not in MUTATIONS:
            return
        for message in messages:
            if message.operation_id:
                self._begun.add(message.operation_id)
            if rpc == "StartProfile" and message.profile_id:
                self._profiles.append(message.profile_id)

    # --------------------------------------------------------------------------------------------------- reading

    async def profile(self) -> Any:
        """GetAdminProfile, now."""
        return (await self.call("GetAdminProfile", pb.GetAdminProfileRequest())).message

    async def offer(self) -> Offer:
        """The profile, read for what can be asked."""
        return Offer(await self.profile())

    async def get(self, operation_id: str) -> Any:
        """GetOperation."""
        return (
            await self.call("GetOperation", pb.GetAdminOperationRequest(operation_id=operation_id))
        ).message

    async def watch(self, operation_id: str, *, after: int = 0) -> Answer:
        """WatchOperation to its end."""
        request = pb.WatchAdminOperationRequest(operation_id=operation_id, after_sequence=after)
        return await self.call("WatchOperation", request, timeout_s=SETTLE_TIMEOUT_S)

    async def cancel(self, operation_id: str, *, role: str = "admin") -> Answer:
        """CancelOperation."""
        request = pb.CancelAdminOperationRequest(operation_id=operation_id, reason="conformance")
        return await self.call("CancelOperation", request, role=role)

    async def operations(self, **filters: Any) -> list[Any]:
        """ListOperations, the first page."""
        request = pb.ListAdminOperationsRequest(page_size=50, **filters)
        return list((await self.call("ListOperations", request)).message.operations)

    async def until_done(self, operation_id: str, *, timeout_s: float = SETTLE_TIMEOUT_S) -> Any:
        """The operation once it is terminal.

        Raises:
            CheckFailed: it never was.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    operation = await self.get(operation_id)
                    if operation.state in _DONE_STATES:
                        return operation
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise CheckFailed(
                saw=f"operation {operation_id} unfinished after {timeout_s:g} s", wants="a terminal event"
            ) from None

    # --------------------------------------------------------------------------------------------- common moves

    async def flushed(self, offer: Offer, **options: Any) -> tuple[Any, Answer]:
        """A flush that completed: its request and its answer."""
        offer.need("FlushCaches")
        request = offer.flush(self.key(), **options)
        answer = await self.call("FlushCaches", request)
        require(answer.completed, saw="nothing", wants="completion")
        return request, answer

    async def paused(self, offer: Offer, *, role: str = "admin", **wishes: int) -> int:
        """Pause everybody; the epoch."""
        offer.need("Pause", "Resume")
        answer = await self.call("Pause", offer.pause(self.key(), **wishes), role=role)
        return int(answer.completed.result.pause.pause_epoch)

    async def resumed(self, offer: Offer, epoch: int) -> Answer:
        """End a pause."""
        answer = await self.call("Resume", offer.resume(self.key(), epoch))
        require(answer.completed, saw="nothing", wants="completion")
        return answer

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Give the server work that does not end within the block, so that a drain waits for it.

        Raises:
            CheckNotRun: neither the hook nor an inference address was lent.
        """
        if self.hooks.has(HookName.HOLD):
            await self.hooks.run(HookName.HOLD, HookPhase.BEGIN)
            self._hold = contextlib.AsyncExitStack()
            self._hold.push_async_callback(self.hooks.run, HookName.HOLD, HookPhase.END)
        elif self.inference is not None:
            self._hold = contextlib.AsyncExitStack()
            model = (await self.offer()).participants[0].models[0]
            await self._hold.enter_async_context(self.inference.busy(model))
        else:
            raise CheckNotRun("needs work to wait for: --inference HOST:PORT, --http URL or --hook hold=CMD")
        try:
            yield
        finally:
            await self.let_go()

    async def let_go(self) -> None:
        """End the work that `held` began. Idempotent."""
        hold, self._hold = self._hold, None
        if hold is not None:
            await hold.aclose()

    @contextlib.asynccontextmanager
    async def running(self, offer: Offer, *, role: str = "admin", **options: Any) -> AsyncIterator[Running]:
        """A pause by drain that waits for work, so that an operation is running for the whole block."""
        offer.need("Pause", "Resume")
        if pb.PAUSE_MODE_DRAIN not in offer.common("Pause", "pause_modes"):
            raise CheckNotRun("an operation can be kept running only by a drain, and DRAIN is not offered")
        async with self.held():
            request = offer.pause(self.key(), **options)
            stream = await self.begin("Pause", request, role=role)
            operation_id = stream.seen[0].operation_id
            await asyncio.sleep(0.05)
            state = (await self.get(operation_id)).state
            if state in _DONE_STATES:
                raise CheckNotRun("the work to wait for ended before the pause did")
            yield Running(bench=self, request=request, stream=stream, operation_id=operation_id)

    @contextlib.asynccontextmanager
    async def failing_rank(self) -> AsyncIterator[None]:
        """Some participants fail what they are asked within the block.

        Raises:
            CheckNotRun: no hook.
        """
        self._connected = len((await self.offer()).participants)
        await self.hooks.run(HookName.FAIL_RANK, HookPhase.BEGIN)
        self._failing = True
        try:
            yield
        finally:
            await self.mend()

    async def mend(self) -> None:
        """End what `failing_rank` began. Idempotent."""
        if self._failing:
            self._failing = False
            await self.hooks.run(HookName.FAIL_RANK, HookPhase.END)
            await self.until_back(self._connected)

    async def restart(self) -> None:
        """Restart the server hard and wait until it serves and its participants are connected.

        Raises:
            CheckFailed: it did not come back.
        """
        connected = len((await self.offer()).participants)
        await self.hooks.run(HookName.RESTART)
        await self.until_back(connected)

    async def until_back(self, connected: int) -> None:
        """Wait until the server answers and this many participants are connected."""
        told = "nothing"
        try:
            async with asyncio.timeout(COMES_BACK_S):
                while True:
                    answer = await self.call("GetAdminProfile", pb.GetAdminProfileRequest(), timeout_s=2.0)
                    told = answer.told()
                    if answer.is_ok and len(Offer(answer.message).participants) >= connected:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise CheckFailed(
                saw=f"no answer with {connected} participants within {COMES_BACK_S:g} s of the restart ({told})",
                wants="the server to come back",
            ) from None

    # ------------------------------------------------------------------------------------------- as it was found

    async def remember(self) -> None:
        """Take note of what is in force and not ours."""
        profile = await self.profile()
        self._epochs = frozenset(p.pause_epoch for p in profile.pauses)
        self._releases = frozenset(r.resource_epoch for r in profile.releases)
        self._quarantined = frozenset(p.participant_id for p in profile.participants if p.quarantined)

    async def put_back(self) -> None:
        """Leave the server as it was found, whatever a check did to it.

        Raises:
            CheckFailed: that did not work.
        """
        await self.let_go()
        await self.mend()
        for operation_id in sorted(self._begun):
            found = await self.call("GetOperation", pb.GetAdminOperationRequest(operation_id=operation_id))
            if found.is_ok and found.message.state not in _DONE_STATES:
                await self.until_done(operation_id)
        self._begun.clear()
        await self._stop_profiles()
        await self._heal()
        await self._lift()

    async def _stop_profiles(self) -> None:
        while self._profiles:
            profile_id = self._profiles.pop()
            await self.call("StopProfile", Offer(pb.AdminProfile()).stop_profile(self.key(), profile_id))

    async def _lift(self) -> None:
        for _ in range(8):
            profile = await self.profile()
            offer = Offer(profile)
            releases = [r for r in profile.releases if r.resource_epoch not in self._releases]
            pauses = [p for p in profile.pauses if p.pause_epoch not in self._epochs]
            if not releases and not pauses:
                return
            for release in releases:
                request = offer.restore(self.key(), release.resource_epoch, kinds=release.kinds)
                await self.call("RestoreResources", request, timeout_s=SETTLE_TIMEOUT_S)
            for pause in pauses:
                await self.call(
                    "Resume", offer.resume(self.key(), pause.pause_epoch), timeout_s=SETTLE_TIMEOUT_S
                )
        raise CheckFailed(saw="pauses or releases of this check that cannot be ended", wants="them to end")

    async def _heal(self) -> None:
        """End quarantines that a check left: an operation over whole groups that completes does (AD-31)."""
        for _ in range(3):
            profile = await self.profile()
            ill = {p.participant_id for p in profile.participants if p.quarantined} - self._quarantined
            if not ill:
                return
            offer = Offer(profile)
            if offer.has("FlushCaches"):
                await self.call("FlushCaches", offer.flush(self.key()), timeout_s=SETTLE_TIMEOUT_S)
            else:
                await self.call("Pause", offer.pause(self.key()), timeout_s=SETTLE_TIMEOUT_S)


@dataclass(slots=True, kw_only=True)
class Running:
    """An operation that does not end before `let_go`."""

    bench: Bench
    request: Any
    stream: Stream
    operation_id: str

    async def finish(self) -> Answer:
        """Let it go on and take the rest of its events."""
        await self.bench.let_go()
        return await self.stream.rest(timeout_s=SETTLE_TIMEOUT_S)
