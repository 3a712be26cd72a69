"""Operations whose server dies at a write, and what must hold after its restart."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from iop.admin.enums import (
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    PauseMode,
    ResourceKind,
    WeightFormat,
)
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    FlushCachesRequest,
    ListOperationsRequest,
    MutationOptions,
    PauseRequest,
    PauseSpec,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import AdminOperation, AdminOperationEvent
from iop.client.admin import AdminClient, StreamingMutation
from iop.core.errors import IopError
from iop.engine import CHECKPOINTS, builtin_checkpoint
from iop.testing.engine_fleet import MODEL, TARGET, EngineFleet
from iop.testing.process_fleet import eventually

KINDS = ("pause", "resume", "flush", "release", "restore", "update")
PROMPT = "Tell me a story about a fox."
QUIESCE = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.REJECT)
LAUNCHER = (str(Path(__file__).with_name("crash_main.py")),)
RESTARTED_WITHIN_S = 60.0
SETTLED_WITHIN_S = 30.0


class Site:
    """A server of the contract that can be killed: the Edge over two engines, or one engine by itself."""

    def __init__(self, directory: Path, *, part: str) -> None:
        self.part = part
        self.order = directory / "crash-at"
        self.is_edge = part == "edge"
        nodes = ["n1", "n2"] if self.is_edge else ["n1"]
        self.process = "edge" if self.is_edge else "engine-n1"
        self.fleet = EngineFleet(
            directory,
            nodes,
            ranks=1 if self.is_edge else 2,
            launchers={self.process: LAUNCHER},
            variables={self.process: {"CRASH_AT": str(self.order)}},
        )
        self._keys = itertools.count(1)
        self.texts: dict[str, str] = {}
        self.seen: list[object] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        """Start it, and learn what each version says."""
        async with self.fleet:
            if self.is_edge:
                await self.fleet.start()
            else:
                await self._start()
            for version in ("second", "first"):
                # The engines start with the other one; nobody has seen where that comes from.
                await self.do(self.update_to(version, allow_irreversible=True), may_be_refused=True)
                self.texts[version] = (await self.say()).text
            assert self.texts["first"] != self.texts["second"]
            yield self

    def client(self) -> AdminClient:
        """Of whoever can be killed."""
        return self.fleet.client() if self.is_edge else self.fleet.engine_client("n1")

    async def say(self) -> Any:
        """One answer, from where callers ask."""
        return await self.fleet.say(PROMPT, engine=None if self.is_edge else "n1")

    async def _start(self) -> None:
        if self.is_edge:
            await self.fleet.start_edge()
            await self.fleet.all_ready()
            await self.fleet.all_operated()
        else:
            self.fleet.spawn_engine("n1")
            await self.fleet.engine_ready("n1")

    async def restart(self) -> None:
        """It was killed; start it again."""
        self.order.unlink(missing_ok=True)
        self.fleet.processes.pop(self.process).wait()
        await self._start()

    # ---- operations ----

    def options(self) -> MutationOptions:
        """With a key of its own."""
        return MutationOptions(idempotency_key=f"crash-{next(self._keys)}")

    def update_to(self, version: str, *, allow_irreversible: bool = False) -> UpdateWeightsRequest:
        """The other checkpoint."""
        return UpdateWeightsRequest(
            options=self.options(),
            model=MODEL if self.is_edge else TARGET,
            source=DiskSource(path=str(builtin_checkpoint(version)), format=WeightFormat.SAFETENSORS),
            weight_version=version,
            cache_policy=CachePolicy.FLUSH,
            quiesce=QUIESCE,
            allow_irreversible=allow_irreversible,
        )

    async def do(self, request: StreamingMutation, *, may_be_refused: bool = False) -> AdminOperation | None:
        """Run one to its success."""
        async with self.client() as client:
            operation_id = ""
            try:
                async for event in client.submit(request):
                    operation_id = event.operation_id
            except IopError:
                if may_be_refused:
                    return None
                raise
            ended = await client.get(operation_id)
        assert ended.state is AdminOperationState.SUCCEEDED, ended
        return ended

    async def calm(self) -> None:
        """Undo what an operation before left: all restored, nothing paused."""
        async with self.client() as client:
            profile = await client.profile()
        for release in profile.releases:
            await self.do(self.restore(release.resource_epoch))
        for pause in profile.pauses:
            await self.do(ResumeRequest(options=self.options(), pause_epoch=pause.pause_epoch))

    async def pause(self) -> int:
        """Pause everything; its epoch."""
        await self.do(PauseRequest(options=self.options(), target=AllTargets(), pause=QUIESCE))
        async with self.client() as client:
            return (await client.profile()).pauses[0].pause_epoch

    def release(self) -> ReleaseResourcesRequest:
        """The KV cache of everybody."""
        return ReleaseResourcesRequest(
            options=self.options(), target=AllTargets(), kinds=(ResourceKind.KV_CACHE,)
        )

    def restore(self, epoch: int) -> RestoreResourcesRequest:
        """The same back."""
        return RestoreResourcesRequest(
            options=self.options(), resource_epoch=epoch, kinds=(ResourceKind.KV_CACHE,)
        )

    async def prepare(self, kind: str) -> StreamingMutation:
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
                await self.pause()
                return self.release()
            case "restore":
                await self.pause()
                await self.do(self.release())
                async with self.client() as client:
                    return self.restore((await client.profile()).releases[0].resource_epoch)
            case _:
                async with self.client() as client:
                    now_is = (await client.profile()).participants[0].weight_version
                return self.update_to(next(each for each in CHECKPOINTS if each != now_is))

    # ---- the crash, and after it ----

    async def crash(self, request: StreamingMutation, *, point: int) -> bool:
        """Run the operation with a server that dies at a point; False when it was through before."""
        self.order.write_text(str(point))
        async with self.client() as client:
            with contextlib.suppress(IopError):
                async for _ in client.submit(request):
                    pass
                return False
        process = self.fleet.processes[self.process]
        await eventually(lambda: process.poll() is not None, what="it died", within_s=RESTARTED_WITHIN_S)
        return True

    async def replay(self, request: StreamingMutation) -> list[AdminOperationEvent]:
        """Everything that the key tells."""
        async with self.client() as client:
            return [event async for event in client.submit(request)]

    async def check(self, request: StreamingMutation) -> AdminOperation:
        """After the restart: the key still tells one history with one end, and the fleet is as it says."""
        events = await self.replay(request)
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert [event.is_terminal for event in events] == [False] * (len(events) - 1) + [True]
        assert await self.replay(request) == events, "a history does not change"
        async with self.client() as client:
            page = await client.list_operations(ListOperationsRequest(page_size=50))
            ours = [o for o in page.operations if o.idempotency_key == request.options.idempotency_key]
            assert len(ours) == 1, "one key, one operation"
            assert all(operation.state.is_terminal for operation in page.operations)
            ended = await client.get(events[0].operation_id)
        if self.is_edge and not isinstance(request, UpdateWeightsRequest):
            # All others roll forward (AD-26); an engine that died with its server may have lost what they build on.
            assert ended.state is AdminOperationState.SUCCEEDED, ended
        try:
            await eventually(self.is_as_told, what="the fleet is as told", within_s=SETTLED_WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"after {ended}: {self.seen}") from error
        return ended

    async def is_as_told(self) -> bool:
        """Whether pauses, releases and versions are so at the engines, and callers meet them so; `seen` says how."""
        async with self.client() as client:
            profile = await client.profile()
        told = bool(profile.pauses), bool(profile.releases)
        versions = {p.weight_version for p in profile.participants}
        self.seen = [(p.state.name, p.quarantine_reason, p.weight_version) for p in profile.participants]
        if any(p.quarantined or p.state.name == "OFFLINE" for p in profile.participants):
            return False
        if len(versions) != 1 or any((p.paused, p.released) != told for p in profile.participants):
            return False
        if self.is_edge:
            for node in self.fleet.engines:
                async with self.fleet.engine_client(node) as engine:
                    own = await engine.profile()
                self.seen += [(node, p.paused, p.released, p.weight_version) for p in own.participants]
                if {(p.paused, p.released, p.weight_version) for p in own.participants} != {
                    (*told, *versions)
                }:
                    return False
        answer = await self.say()
        self.seen += [(answer.status, answer.error, answer.text)]
        if profile.pauses:
            return answer.status == 503
        return answer.status == 200 and answer.text == self.texts[next(iter(versions))]


async def sweep(site: Site, kind: str, *, points: range) -> int:
    """Crash one kind of operation at each of these points, as far as it has them; how many it had."""
    for crashed, point in enumerate(points):
        request = await site.prepare(kind)
        if not await site.crash(request, point=point):
            site.order.unlink(missing_ok=True)
            return crashed
        await site.restart()
        ended = await site.check(request)
        if ended.state is not AdminOperationState.SUCCEEDED:
            assert ended.error is not None
            assert not ended.error.quarantined, ended
            await site.do(await site.prepare(kind))  # asked for again it succeeds
    return len(points)
