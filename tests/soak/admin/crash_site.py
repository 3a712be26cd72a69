"""A server of the contract that can be killed, and the operations that it is killed in.

Either one reference engine by itself, or an Edge over two Nodes with an engine each, of which the first can be killed
as well as the Edge.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from crash_nursery import Nursery

from iop.admin.enums import (
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    FlushCachesRequest,
    ListOperationsRequest,
    MutationOptions,
    MutationRequest,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    ServingChange,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import AdminOperation, AdminOperationEvent, StartProfileResult
from iop.client.admin import AdminClient
from iop.core.errors import IopError
from iop.engine import CHECKPOINTS, builtin_checkpoint
from iop.pb.openengine.v1 import openengine_pb2_grpc, server_pb2
from iop.testing.engine_fleet import MODEL, TARGET, EngineFleet

KINDS = (
    "pause",
    "resume",
    "flush",
    "release",
    "restore",
    "update",
    "start_profile",
    "stop_profile",
    "reconfigure",
)
PROMPT = "Tell me a story about a fox."
QUIESCE = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.REJECT)
RELEASED = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
CAPACITIES = (16, 12)


class ForkedFleet(EngineFleet):
    """Whose processes come from a nursery."""

    def __init__(self, *args: Any, nursery: Nursery, **more: Any) -> None:
        super().__init__(*args, **more)
        self._nursery = nursery

    def _spawn(self, name: str, *arguments: str) -> None:
        self.processes[name] = self._nursery.spawn(  # type: ignore[assignment]  # all of it that is used
            arguments,
            variables={"IOP_HOME": str(self.directory), **self.variables.get(name, {})},
            directory=self.directory,
            log=self.directory / f"{name}.log",
        )


class Site:
    """Use as ``async with site.running()``.

    Args:
        directory: for configs, logs and stores.
        is_fleet: an Edge over two engines; else one engine of two ranks by itself.
    """

    def __init__(self, directory: Path, *, is_fleet: bool) -> None:
        self.is_fleet = is_fleet
        self.nodes = ["n1", "n2"] if is_fleet else ["n1"]
        self.orders = {part: directory / f"crash-{part}" for part in ("edge", "engine")}
        names = {"edge": "edge", "engine": "engine-n1"}
        self._nursery = Nursery()
        self.fleet = ForkedFleet(
            directory,
            self.nodes,
            nursery=self._nursery,
            ranks=1 if is_fleet else 2,
            variables={names[part]: {"CRASH_AT": str(path)} for part, path in self.orders.items()},
            capacity=CAPACITIES[0],
        )
        self._keys = itertools.count(1)
        self._profiles: list[str] = []
        self.texts: dict[str, str] = {}
        self.seen: list[object] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        """Start it, and learn what each version says."""
        with self._nursery:
            async with self._started():
                yield self

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[None]:
        async with self.fleet:
            if self.is_fleet:
                await self.fleet.start()
            else:
                await self.start("engine")
            for version in ("second", "first"):
                # The engines start with the other one; nobody has seen where that comes from.
                await self.do(self.update_to(version, allow_irreversible=True), may_be_refused=True)
                self.texts[version] = (await self.say()).text
            assert self.texts["first"] != self.texts["second"]
            yield

    def process(self, part: str) -> Any:
        """The Edge's, or the first engine's."""
        return self.fleet.processes["edge" if part == "edge" else "engine-n1"]

    async def start(self, part: str) -> None:
        """Start a part again and wait until it serves; the Edge, until it operates its engines."""
        if part == "edge":
            await self.fleet.start_edge()
            await self.fleet.all_ready()
            await self.fleet.all_operated()
        else:
            self.fleet.spawn_engine("n1")
            await self.fleet.engine_ready("n1")

    def client(self) -> AdminClient:
        """Of the server that operations are asked of."""
        return self.fleet.client() if self.is_fleet else self.fleet.engine_client("n1")

    async def say(self) -> Any:
        """One answer, from where callers ask."""
        return await self.fleet.say(PROMPT, engine=None if self.is_fleet else "n1")

    # ---- asking ----

    async def submit(self, request: MutationRequest) -> str:
        """Ask, and wait for the end; the operation's id."""
        async with self.client() as client:
            if isinstance(request, StartProfileRequest):
                started = await client.start_profile(request)
                assert isinstance(started, StartProfileResult)
                self._profiles.append(started.profile_id)
            elif isinstance(request, StopProfileRequest):
                await client.stop_profile(request)
            else:
                operation_id = ""
                async for event in client.submit(request):
                    operation_id = event.operation_id
                return operation_id
        found = await self.of_key(request)
        assert len(found) == 1, found
        return found[0].operation_id

    async def of_key(self, request: MutationRequest) -> list[AdminOperation]:
        """The operations that the request's key made."""
        async with self.client() as client:
            page = await client.list_operations(ListOperationsRequest(page_size=50))
        return [o for o in page.operations if o.idempotency_key == request.options.idempotency_key]

    async def replay(self, request: MutationRequest) -> list[AdminOperationEvent]:
        """Everything that the key tells."""
        async with self.client() as client:
            if not isinstance(request, StartProfileRequest | StopProfileRequest):
                return [event async for event in client.submit(request)]
            try:
                operation_id = await self.submit(request)
            except IopError as error:
                if error.reason != "OPERATION_FAILED":
                    raise
                operation_id = error.details["operation_id"]
            return [event async for event in client.watch(operation_id)]

    async def do(self, request: MutationRequest, *, may_be_refused: bool = False) -> AdminOperation | None:
        """Run one to its success."""
        try:
            operation_id = await self.submit(request)
        except IopError:
            if may_be_refused:
                return None
            raise
        async with self.client() as client:
            ended = await client.get(operation_id)
        assert ended.state is AdminOperationState.SUCCEEDED, ended
        return ended

    # ---- operations ----

    def options(self) -> MutationOptions:
        """With a key of its own."""
        return MutationOptions(idempotency_key=f"crash-{next(self._keys)}")

    def update_to(self, version: str, *, allow_irreversible: bool = False) -> UpdateWeightsRequest:
        """The other checkpoint."""
        return UpdateWeightsRequest(
            options=self.options(),
            model=MODEL if self.is_fleet else TARGET,
            source=DiskSource(path=str(builtin_checkpoint(version)), format=WeightFormat.SAFETENSORS),
            weight_version=version,
            cache_policy=CachePolicy.FLUSH,
            quiesce=QUIESCE,
            allow_irreversible=allow_irreversible,
        )

    async def calm(self) -> None:
        """Undo what an operation before left: all restored, nothing paused, nothing recorded."""
        async with self.client() as client:
            profile = await client.profile()
        for release in profile.releases:
            await self.do(self.restore(release.resource_epoch))
        for pause in profile.pauses:
            await self.do(ResumeRequest(options=self.options(), pause_epoch=pause.pause_epoch))
        for profile_id in self._profiles:
            # It ends with its engine; then there is nothing to stop.
            with contextlib.suppress(IopError):
                await self.submit(StopProfileRequest(options=self.options(), profile_id=profile_id))
        self._profiles.clear()

    async def pause(self) -> int:
        """Pause everything; its epoch."""
        await self.do(PauseRequest(options=self.options(), target=AllTargets(), pause=QUIESCE))
        async with self.client() as client:
            return (await client.profile()).pauses[0].pause_epoch

    def release(self, *, pause: PauseSpec | None = None) -> ReleaseResourcesRequest:
        """Weights and KV cache of everybody."""
        return ReleaseResourcesRequest(
            options=self.options(),
            target=AllTargets(),
            kinds=RELEASED,
            weight_retention=WeightRetention.OFFLOAD_TO_HOST,
            pause=pause,
        )

    def restore(self, epoch: int) -> RestoreResourcesRequest:
        """The same back."""
        return RestoreResourcesRequest(options=self.options(), resource_epoch=epoch, kinds=RELEASED)

    async def prepare(self, kind: str) -> MutationRequest:
        """Bring the site into a state in which the operation means something; the request."""
        await self.calm()
        match kind:
            case "pause":
                return PauseRequest(options=self.options(), target=AllTargets(), pause=QUIESCE)
            case "resume":
                return ResumeRequest(options=self.options(), pause_epoch=await self.pause())
            case "flush":
                return FlushCachesRequest(
                    options=self.options(),
                    target=AllTargets(),
                    kinds=(CacheKind.PREFIX,),
                    busy_policy=BusyPolicy.WAIT,
                )
            case "release":
                return self.release(pause=QUIESCE)
            case "restore":
                await self.do(self.release(pause=QUIESCE))
                async with self.client() as client:
                    return self.restore((await client.profile()).releases[0].resource_epoch)
            case "update":
                async with self.client() as client:
                    now_is = (await client.profile()).participants[0].weight_version
                return self.update_to(next(each for each in CHECKPOINTS if each != now_is))
            case "start_profile":
                return self.start_profile()
            case "stop_profile":
                await self.do(self.start_profile())
                return StopProfileRequest(options=self.options(), profile_id=self._profiles[-1])
            case "reconfigure":
                slots = await self.slots()
                wanted = next(each for each in CAPACITIES if {each} != slots)
                change = ServingChange(field=ReconfigurableField.CAPACITY, value=wanted)
                return ReconfigureServingRequest(
                    options=self.options(), target=AllTargets(), changes=(change,)
                )
            case _:
                raise AssertionError(kind)

    def start_profile(self) -> StartProfileRequest:
        """Of everybody's scheduler."""
        return StartProfileRequest(
            options=self.options(), target=AllTargets(), kinds=(ProfilerKind.SCHEDULER,)
        )

    # ---- how it stands ----

    async def slots(self) -> set[int]:
        """How many requests each engine takes at once, in its own words."""
        told = set()
        for node in self.nodes:
            async with grpc.aio.insecure_channel(self.fleet.engines[node]["openengine"]) as channel:
                stub: Any = openengine_pb2_grpc.ControlStub(channel)
                info = await stub.GetServerInfo(server_pb2.GetServerInfoRequest(), timeout=30)
            told.add(info.capacity.max_running_requests)
        return told

    async def is_as_told(self) -> bool:
        """Whether pauses, releases and versions are so at the engines, and callers meet them so; `seen` says how.

        A resume or a restore that failed at one engine keeps what it did at the other (AD-29).
        """
        async with self.client() as client:
            profile = await client.profile()
        paused = {p for pause in profile.pauses for p in pause.participant_ids}
        released = {p for release in profile.releases for p in release.participant_ids}
        versions = {p.weight_version for p in profile.participants}
        self.seen = [(p.state.name, p.quarantine_reason, p.weight_version) for p in profile.participants]
        if any(p.quarantined or p.state.name == "OFFLINE" for p in profile.participants):
            return False
        ids = {p.info.participant_id for p in profile.participants}
        if len(versions) != 1 or not released <= paused <= ids:
            return False
        for participant in profile.participants:
            one = participant.info.participant_id
            if (participant.paused, participant.released) != (one in paused, one in released):
                return False
        for node in self.nodes if self.is_fleet else ():
            one = f"{node}/main/0"
            async with self.fleet.engine_client(node) as engine:
                own = await engine.profile()
            self.seen += [(node, p.paused, p.released, p.weight_version) for p in own.participants]
            if {(p.paused, p.released, p.weight_version) for p in own.participants} != {
                (one in paused, one in released, *versions)
            }:
                return False
            kinds = {kind for release in own.releases for kind in release.kinds}
            if kinds != (set(RELEASED) if one in released else set()):
                return False
        answer = await self.say()
        self.seen += [(answer.status, answer.error, answer.text)]
        if paused == ids:
            return bool(answer.status == 503)
        return bool(answer.status == 200 and answer.text == self.texts[next(iter(versions))])
