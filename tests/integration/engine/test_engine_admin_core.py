"""The operation core over real ranks: what an operator asks for is what the engine then is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_kit import answer, collect, eventually, request

from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    CachePolicy,
    ChangeDisposition,
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
from iop.core.errors import IopError, PreconditionFailed
from iop.core.ids import OperationId
from iop.engine import Engine, EngineSettings, EngineState, Finished, builtin_checkpoint
from iop.engine.participants import RankDriver
from iop.testing.admin_world import ADMIN, LoopClock, digest_of
from iop.testing.memory_journal import MemoryJournal, MemoryStore

QUEUE, REJECT = AdmissionPolicy.QUEUE, AdmissionPolicy.REJECT
EVERYTHING = AllTargets()
SECOND = DiskSource(path=str(builtin_checkpoint("second")), format=WeightFormat.SAFETENSORS)


class Server:
    """A core over one engine; ``do`` runs an operation to its end."""

    def __init__(self, engine: Engine, core: AdminCore, driver: RankDriver, *, prefix: str) -> None:
        self.engine, self.core, self.driver = engine, core, driver
        self._keys = (f"{prefix}-{number}" for number in itertools.count())

    async def do(self, make: Callable[..., MutationRequest], **fields: Any) -> Any:
        options = MutationOptions(idempotency_key=next(self._keys))
        wanted = make(options=options, **fields)
        call = MutationCall(principal=ADMIN, request=wanted, request_sha256=digest_of(wanted))
        return await self.core.run_to_end(call)

    async def pause(self, mode: PauseMode, admission: AdmissionPolicy = QUEUE) -> Any:
        return await self.do(PauseRequest, target=EVERYTHING, pause=PauseSpec(mode=mode, admission=admission))


@contextlib.asynccontextmanager
async def serve(settings: EngineSettings, store: MemoryStore, *, prefix: str = "op") -> AsyncIterator[Server]:
    numbers = itertools.count()
    clock = LoopClock()
    async with Engine(settings) as engine:
        checkpoint = settings.checkpoint
        assert checkpoint is not None
        driver = RankDriver(engine, checkpoint=checkpoint)
        core = AdminCore(
            journal=MemoryJournal(store, unix_nanos=clock.unix_nanos),
            driver=driver,
            clock=clock,
            new_id=lambda: OperationId(f"{prefix}-{next(numbers)}"),
            owner="test",
        )
        async with asyncio.TaskGroup() as tasks:
            runner = tasks.create_task(core.run(), name="core")
            await core.wait_ready()
            yield Server(engine, core, driver, prefix=prefix)
            runner.cancel()


@pytest.fixture
async def server(settings: EngineSettings) -> AsyncIterator[Server]:
    async with serve(settings, MemoryStore()) as running:
        await eventually(lambda: running.engine._running().runner.scheduler.can_admit)
        yield running


@pytest.mark.clause("AD-41", "AD-42", "AD-14")
async def test_pause_drains_and_resume_by_epoch_lets_the_waiting_go(server: Server) -> None:
    engine = server.engine
    stream = engine.generate(request("old", max_tokens=60))
    await anext(stream)
    async with asyncio.TaskGroup() as group:
        pausing = group.create_task(server.pause(PauseMode.DRAIN))
        assert isinstance((await collect(stream))[-1], Finished)
    paused = pausing.result()
    assert (paused.drained, paused.aborted, paused.kept) == (1, 0, 0)
    assert engine.state is EngineState.PAUSED
    waiting = engine.generate(request("new", max_tokens=3))
    with pytest.raises(PreconditionFailed) as stale:
        await server.do(ResumeRequest, pause_epoch=paused.pause_epoch + 1)
    assert stale.value.reason == "STALE_EPOCH"
    assert engine.counters().waiting == 1
    await server.do(ResumeRequest, pause_epoch=paused.pause_epoch)
    assert isinstance((await collect(waiting))[-1], Finished)


@pytest.mark.clause("AD-40")
async def test_flush_is_told_per_rank_and_read_back(server: Server) -> None:
    prompt = "Tell me a story about a bear in the forest. " * 4
    await answer(server.engine, request("a", prompt, max_tokens=2))
    assert server.engine.counters().prefix_entries > 0
    result = await server.do(
        FlushCachesRequest, target=EVERYTHING, kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL
    )
    assert {one.outcome for one in result.caches} == {CacheOutcome.CLEARED}
    assert {one.participant_id for one in result.caches} == {"rank-0", "rank-1"}
    miss = await answer(server.engine, request("b", prompt, max_tokens=2))
    assert miss.finished.usage is not None
    assert miss.finished.usage.cached_prompt_tokens == 0


@pytest.mark.clause("AD-45", "AD-43", "AD-44", "AD-32")
async def test_the_training_loop_keeps_frozen_work_and_swaps_weights(server: Server) -> None:
    engine = server.engine
    stream = engine.generate(request("kept", max_tokens=120))
    await anext(stream)
    paused = await server.pause(PauseMode.KEEP)
    assert paused.kept == 1
    released = await server.do(ReleaseResourcesRequest, target=EVERYTHING, kinds=(ResourceKind.KV_CACHE,))
    assert all(one.bytes > 1_000_000 for one in released.released)
    assert not (await engine.read_back())[0].kv_resident
    await server.do(
        UpdateWeightsRequest,
        model="iop-tiny",
        source=SECOND,
        weight_version="step-1",
        cache_policy=CachePolicy.FLUSH,
        quiesce=PauseSpec(mode=PauseMode.KEEP, admission=QUEUE),
    )
    assert engine.state is EngineState.PAUSED
    await server.do(
        RestoreResourcesRequest, resource_epoch=released.resource_epoch, kinds=(ResourceKind.KV_CACHE,)
    )
    await server.do(ResumeRequest, pause_epoch=paused.pause_epoch)
    end = (await collect(stream))[-1]
    assert isinstance(end, Finished)
    assert end.weight_versions == ("first", "step-1")
    assert end.usage is not None
    assert end.usage.completion_tokens == 120


@pytest.mark.clause("AD-32", "AD-33", "AD-38")
async def test_an_update_quiesces_by_itself_and_a_bad_source_changes_nothing(
    server: Server, tmp_path: Path
) -> None:
    engine = server.engine
    before = await engine.read_back()
    fields = {
        "model": "iop-tiny",
        "weight_version": "step-1",
        "cache_policy": CachePolicy.FLUSH,
        "quiesce": PauseSpec(mode=PauseMode.DRAIN, admission=QUEUE),
    }
    absent = DiskSource(path=str(tmp_path / "absent"), format=WeightFormat.SAFETENSORS)
    with pytest.raises(IopError):
        await server.do(UpdateWeightsRequest, source=absent, **fields)
    assert await engine.read_back() == before
    assert engine.state is EngineState.SERVING
    await server.do(UpdateWeightsRequest, source=SECOND, **fields)
    assert engine.state is EngineState.SERVING
    assert engine.weight_version == "step-1"
    (newest, *_) = (await server.core.list_operations(ADMIN, ListOperationsRequest())).operations
    resident = [rank.weight_bytes_resident for rank in await engine.read_back()]
    for status, bytes_resident in zip(newest.participants, resident, strict=True):
        assert status.bytes_done == status.bytes_total
        assert 0 < (status.bytes_done or 0) <= bytes_resident
    found = await answer(engine, request("a", max_tokens=3))
    assert set(found.versions) == {"step-1"}


@pytest.mark.clause("AD-35", "AD-26")
async def test_a_restarted_engine_is_brought_to_the_desired_state_before_it_serves(
    settings: EngineSettings,
) -> None:
    store = MemoryStore()
    async with serve(settings, store, prefix="one") as server:
        await server.do(
            UpdateWeightsRequest,
            model="iop-tiny",
            source=SECOND,
            weight_version="step-1",
            cache_policy=CachePolicy.FLUSH,
            quiesce=PauseSpec(mode=PauseMode.DRAIN, admission=QUEUE),
        )
        expected = (await answer(server.engine, request("a", max_tokens=30))).tokens
        paused = await server.pause(PauseMode.DRAIN)
    async with serve(settings, store, prefix="two") as server:
        stream = server.engine.generate(request("b", max_tokens=30))
        await eventually(lambda: server.engine.weight_version == "step-1")
        await eventually(lambda: server.engine.state is EngineState.PAUSED)
        assert server.engine.counters().tokens_generated == 0
        await server.do(ResumeRequest, pause_epoch=paused.pause_epoch)
        tokens: list[int] = []
        async for event in stream:
            tokens += getattr(event, "token_ids", ())
        assert tokens == expected


@pytest.mark.clause("AD-43")
async def test_weights_released_by_discard_come_back_the_same(server: Server) -> None:
    expected = (await answer(server.engine, request("a", max_tokens=30))).tokens
    released = await server.do(
        ReleaseResourcesRequest,
        target=EVERYTHING,
        kinds=(ResourceKind.WEIGHTS,),
        weight_retention=WeightRetention.DISCARD,
        pause=PauseSpec(mode=PauseMode.DRAIN, admission=REJECT),
    )
    assert not any(state.weights_resident for state in await server.engine.read_back())
    with pytest.raises(PreconditionFailed):
        await server.do(ResumeRequest, pause_epoch=released.pause_epoch)
    await server.do(
        RestoreResourcesRequest, resource_epoch=released.resource_epoch, kinds=(ResourceKind.WEIGHTS,)
    )
    await server.do(ResumeRequest, pause_epoch=released.pause_epoch)
    await eventually(lambda: not server.engine._running().runner.rejects)
    assert (await answer(server.engine, request("b", max_tokens=30))).tokens == expected


@pytest.mark.clause("AD-46")
async def test_profile_artifacts_can_be_found_by_their_uri(server: Server) -> None:
    started = await server.do(
        StartProfileRequest, target=EVERYTHING, kinds=(ProfilerKind.CPU, ProfilerKind.SCHEDULER)
    )
    await answer(server.engine, request("a", max_tokens=3))
    stopped = await server.do(StopProfileRequest, profile_id=started.profile_id)
    assert len(stopped.artifacts) == 3
    for told in stopped.artifacts:
        file = server.driver.artifact(told.uri)
        assert (file.size_bytes, bytes.fromhex(file.sha256)) == (told.size_bytes, told.sha256)


@pytest.mark.clause("AD-47")
async def test_capacity_is_judged_applied_and_read_back(server: Server) -> None:
    def change(value: int) -> tuple[ServingChange, ...]:
        return (ServingChange(field=ReconfigurableField.CAPACITY, value=value),)

    done = await server.do(ReconfigureServingRequest, target=EVERYTHING, changes=change(3))
    assert {one.disposition for one in done.changes} == {ChangeDisposition.APPLIED}
    assert server.engine.info.slots == 3
    with pytest.raises(IopError):
        await server.do(ReconfigureServingRequest, target=EVERYTHING, changes=change(1000))
    assert server.engine.info.slots == 3


@pytest.mark.clause("AD-35", "AD-39")
async def test_a_driven_engine_takes_nothing_until_its_gates_are_opened(settings: EngineSettings) -> None:
    async with Engine(replace(settings)) as engine:
        assert settings.checkpoint is not None
        RankDriver(engine, checkpoint=settings.checkpoint)
        stream = engine.generate(request("early", max_tokens=3))
        await engine.read_back()
        assert (engine.counters().waiting, engine.counters().running) == (1, 0)
        engine.set_gate(is_open=True)
        assert isinstance((await collect(stream))[-1], Finished)


@pytest.mark.clause("AD-18", "AD-41")
async def test_a_harder_pause_takes_over_a_drain_that_is_still_waiting(server: Server) -> None:
    stream = server.engine.generate(request("long", max_tokens=1900))
    await anext(stream)
    ended: list[BaseException] = []

    async def drain() -> None:
        try:
            await server.pause(PauseMode.DRAIN)
        except IopError as exc:
            ended.append(exc)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(drain())
        await eventually(lambda: not server.engine._running().runner.scheduler.can_admit)
        paused = await server.pause(PauseMode.ABORT)
    assert paused.aborted == 1
    assert len(ended) == 1
    assert server.engine.state is EngineState.PAUSED
    assert isinstance((await collect(stream))[-1], Finished)
