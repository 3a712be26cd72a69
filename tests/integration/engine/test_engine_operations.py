"""Administrative steps against real ranks: each acts, can be read back, and can be undone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_kit import answer, collect, eventually, request

from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    DrainTimeoutAction,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    TensorDtype,
    WeightRetention,
)
from iop.core.errors import (
    Conflict,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Unsupported,
)
from iop.engine import (
    ArtifactFile,
    DiskWeights,
    Engine,
    EngineSettings,
    EngineState,
    Finished,
    FinishReason,
    GenerationStream,
    InlineTensor,
    InlineWeights,
    builtin_checkpoint,
)
from iop.engine.checkpoint import TensorFile, weights_file
from iop.testing.cancel_sweep import SweepPoint, cancel_at, sweep

QUEUE, REJECT = AdmissionPolicy.QUEUE, AdmissionPolicy.REJECT
BEAR = "Tell me a story about a bear in the forest. " * 4


async def started(engine: Engine, request_id: str, *, max_tokens: int = 300) -> GenerationStream:
    stream = engine.generate(request(request_id, max_tokens=max_tokens))
    await anext(stream)
    return stream


async def rest(stream: GenerationStream) -> Finished:
    end = [event async for event in stream][-1]
    assert isinstance(end, Finished)
    return end


@pytest.mark.clause("AD-41", "AD-37")
async def test_drain_lets_started_work_finish_and_new_work_wait(engine: Engine) -> None:
    stream = await started(engine, "old", max_tokens=60)
    async with asyncio.TaskGroup() as group:
        pausing = group.create_task(engine.pause(mode=PauseMode.DRAIN, admission=QUEUE))
        await eventually(lambda: not engine._running().runner.scheduler.can_admit)
        waiting = engine.generate(request("new", max_tokens=3))
        assert (await rest(stream)).reason is FinishReason.LENGTH
    report = pausing.result()
    assert (report.drained, report.aborted, report.kept) == (1, 0, 0)
    assert all(state.paused and state.mode is PauseMode.DRAIN for state in report.ranks)
    assert engine.state is EngineState.PAUSED
    steps = engine.counters().steps
    assert (await engine.read_back())[0].waiting == 1
    assert engine.counters().steps == steps
    states = await engine.resume()
    assert not any(state.paused for state in states)
    assert isinstance((await collect(waiting))[-1], Finished)


@pytest.mark.clause("AD-41")
async def test_drain_out_of_time_opens_again_or_aborts(engine: Engine) -> None:
    stream = await started(engine, "long", max_tokens=1900)
    with pytest.raises(DeadlineExceeded) as late:
        await engine.pause(
            mode=PauseMode.DRAIN,
            admission=REJECT,
            drain_timeout_s=0.01,
            on_drain_timeout=DrainTimeoutAction.FAIL,
        )
    assert late.value.reason == "DRAIN_TIMEOUT"
    assert engine.state is EngineState.SERVING
    await anext(stream)
    await answer(engine, request("meanwhile", max_tokens=2))
    report = await engine.pause(
        mode=PauseMode.DRAIN,
        admission=REJECT,
        drain_timeout_s=0.01,
        on_drain_timeout=DrainTimeoutAction.ABORT,
    )
    assert (report.drained, report.aborted) == (0, 1)
    assert (await rest(stream)).reason is FinishReason.ABORTED


@pytest.mark.clause("AD-41")
async def test_abort_ends_work_with_a_reason_and_reject_turns_away(engine: Engine) -> None:
    stream = await started(engine, "old", max_tokens=1900)
    report = await engine.pause(mode=PauseMode.ABORT, admission=REJECT)
    assert report.aborted == 1
    end = await rest(stream)
    assert end.reason is FinishReason.ABORTED
    assert end.message
    with pytest.raises(Draining) as refused:
        engine.generate(request("new"))
    assert refused.value.reason == "PAUSED"
    await engine.resume()
    await answer(engine, request("new", max_tokens=2))


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-41", "AD-42")
async def test_keep_freezes_and_resume_loses_no_token(engine: Engine) -> None:
    expected = (await answer(engine, request("plain", max_tokens=200))).tokens
    stream = engine.generate(request("kept", max_tokens=200))
    tokens = [*(await anext(stream)).token_ids]  # type: ignore[union-attr]  # the first event is a chunk
    report = await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)
    assert report.kept == 1
    assert [state.kept for state in report.ranks] == [1, 1]
    steps, generated = engine.counters().steps, engine.counters().tokens_generated
    assert (await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)).kept == 1
    with pytest.raises(PreconditionFailed) as refused:
        await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    assert refused.value.reason == "PAUSE_MODE"
    assert (engine.counters().steps, engine.counters().tokens_generated) == (steps, generated)
    await engine.resume()
    async for event in stream:
        tokens += getattr(event, "token_ids", ())
    assert tokens == expected


@pytest.mark.clause("AD-41", "SF-07")
async def test_a_frozen_request_whose_caller_leaves_is_gone_at_once(engine: Engine) -> None:
    stream = await started(engine, "kept", max_tokens=1900)
    await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)
    await stream.aclose()
    assert engine.counters().kept == 0
    assert engine.counters().kv_blocks_used == 0
    assert (await engine.read_back())[0].kept == 0


@pytest.mark.clause("AD-41")
async def test_a_harder_pause_over_a_frozen_one_aborts(engine: Engine) -> None:
    stream = await started(engine, "kept", max_tokens=1900)
    await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)
    report = await engine.pause(mode=PauseMode.ABORT, admission=REJECT)
    assert (report.aborted, report.kept) == (1, 0)
    assert (await rest(stream)).reason is FinishReason.ABORTED


@pytest.mark.clause("AD-39")
async def test_a_cancelled_pause_leaves_the_gates_open(engine: Engine) -> None:
    stream = await started(engine, "long", max_tokens=1900)
    async with asyncio.TaskGroup() as group:
        pausing = group.create_task(engine.pause(mode=PauseMode.DRAIN, admission=REJECT))
        await eventually(lambda: bool(engine._running().runner.rejects))
        pausing.cancel()
    assert engine.state is EngineState.SERVING
    await answer(engine, request("new", max_tokens=2))
    assert not any(state.paused for state in await engine.read_back())
    await stream.aclose()


@pytest.mark.clause("AD-40", "AD-37")
async def test_flush_empties_the_cache_and_a_prefix_misses_afterwards(engine: Engine) -> None:
    first = await answer(engine, request("a", BEAR, max_tokens=2))
    hit = await answer(engine, request("b", BEAR, max_tokens=2))
    before = engine.counters()
    assert hit.finished.usage is not None
    assert hit.finished.usage.cached_prompt_tokens > 0
    assert before.prefix_entries > 0
    assert (await engine.read_back())[1].kv_blocks_filled > 0
    report = await engine.flush(kinds=[CacheKind.PREFIX], busy=BusyPolicy.FAIL)
    assert report.entries_dropped == before.prefix_entries
    assert [one.outcome for one in report.outcomes] == [CacheOutcome.CLEARED] * 2
    assert [(state.prefix_entries, state.kv_blocks_filled) for state in report.ranks] == [(0, 0)] * 2
    miss = await answer(engine, request("c", BEAR, max_tokens=2))
    assert miss.finished.usage is not None
    assert miss.finished.usage.cached_prompt_tokens == 0
    computed = engine.counters().prefill_positions_computed - before.prefill_positions_computed
    assert computed == miss.finished.usage.prompt_tokens
    assert first.tokens == hit.tokens == miss.tokens


@pytest.mark.clause("AD-40")
async def test_flush_of_a_busy_engine_refuses_waits_or_preempts(engine: Engine) -> None:
    expected = (await answer(engine, request("plain", max_tokens=200))).tokens
    stream = await started(engine, "busy", max_tokens=200)
    refused = await engine.flush(kinds=[CacheKind.PREFIX, CacheKind.ENCODER], busy=BusyPolicy.FAIL)
    outcomes = {(one.kind, one.outcome) for one in refused.outcomes}
    assert outcomes == {
        (CacheKind.PREFIX, CacheOutcome.REFUSED),
        (CacheKind.ENCODER, CacheOutcome.UNKNOWN),
    }
    late = await engine.flush(kinds=[CacheKind.PREFIX], busy=BusyPolicy.WAIT, wait_timeout_s=0.001)
    assert {one.outcome for one in late.outcomes} == {CacheOutcome.REFUSED}
    done = await engine.flush(kinds=[CacheKind.PREFIX], busy=BusyPolicy.PREEMPT)
    assert done.preempted == 1
    assert {one.outcome for one in done.outcomes} == {CacheOutcome.CLEARED}
    tokens = expected[:1]
    async for event in stream:
        tokens += getattr(event, "token_ids", ())
    assert tokens == expected
    again = await started(engine, "again", max_tokens=20)
    waited = await engine.flush(kinds=[CacheKind.PREFIX], busy=BusyPolicy.WAIT)
    assert {one.outcome for one in waited.outcomes} == {CacheOutcome.CLEARED}
    assert (await rest(again)).reason is FinishReason.LENGTH


@pytest.mark.clause("AD-43", "AD-44")
@pytest.mark.parametrize("retention", list(WeightRetention))
async def test_release_gives_memory_back_and_restore_gives_the_same_answers(
    settings: EngineSettings, retention: WeightRetention
) -> None:
    pad = 32 * 1024 * 1024
    async with Engine(replace(settings, pad_weights_to_bytes=pad)) as engine:
        expected = (await answer(engine, request("a", max_tokens=100))).tokens
        stream = engine.generate(request("kept", max_tokens=100))
        tokens = [*(await anext(stream)).token_ids]  # type: ignore[union-attr]  # the first event is a chunk
        kinds = [ResourceKind.WEIGHTS, ResourceKind.KV_CACHE]
        with pytest.raises(PreconditionFailed) as refused:
            await engine.release(kinds=kinds, retention=retention)
        assert refused.value.reason == "NOT_PAUSED"
        await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)
        before = await engine.read_back()
        rss = [resident(state.pid) for state in before]
        report = await engine.release(kinds=kinds, retention=retention)
        for old, moved, state in zip(rss, report.moved, report.ranks, strict=True):
            assert moved.weight_bytes == before[state.rank].weight_bytes_resident >= pad
            assert moved.kv_bytes == before[state.rank].kv_bytes_resident > 1024 * 1024
            assert not state.weights_resident
            assert not state.kv_resident
            assert (state.weight_digest, state.weight_retention) == ("", retention)
            assert old - resident(state.pid) > 0.9 * (moved.weight_bytes + moved.kv_bytes)
        again = await engine.release(kinds=kinds, retention=retention)
        assert [one.weight_bytes + one.kv_bytes for one in again.moved] == [0, 0]
        with pytest.raises(PreconditionFailed) as early:
            await engine.resume()
        assert early.value.reason == "RESOURCES_RELEASED"
        restored = await engine.restore(kinds=kinds)
        assert [state.weight_digest for state in restored.ranks] == [state.weight_digest for state in before]
        await engine.resume()
        async for event in stream:
            tokens += getattr(event, "token_ids", ())
        assert tokens == expected
        assert (await answer(engine, request("b", max_tokens=100))).tokens == expected


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


@pytest.mark.clause("AD-43")
async def test_discard_without_a_source_is_refused_and_changes_nothing(
    settings: EngineSettings, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in builtin_checkpoint("first").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    async with Engine(replace(settings, checkpoint=copy)) as engine:
        (copy / "model.safetensors").unlink()
        await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)
        with pytest.raises(PreconditionFailed) as refused:
            await engine.release(kinds=[ResourceKind.WEIGHTS], retention=WeightRetention.DISCARD)
        assert refused.value.reason == "IRREVERSIBLE"
        assert all(state.weights_resident for state in await engine.read_back())
        await engine.resume()
        await answer(engine, request("a", max_tokens=3))


async def test_graphs_are_unsupported(engine: Engine) -> None:
    with pytest.raises(Unsupported):
        await engine.release(kinds=[ResourceKind.GRAPHS])


@pytest.mark.clause("AD-32", "AD-33", "AD-34", "AD-38")
async def test_weights_are_swapped_verified_and_committed(settings: EngineSettings) -> None:
    async with Engine(replace(settings, checkpoint=builtin_checkpoint("second"))) as other:
        expected = (await answer(other, request("a", BEAR, max_tokens=50))).tokens
        digests = [state.weight_digest for state in await other.read_back()]
    async with Engine(settings) as engine:
        old = await answer(engine, request("a", BEAR, max_tokens=50))
        source = DiskWeights(path=builtin_checkpoint("second"))
        prepared = await engine.prepare_weights("u1", source=source, version="v2")
        assert [one.digest for one in prepared] == digests
        with pytest.raises(PreconditionFailed):
            await engine.apply_weights("u1")
        await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
        for rank in (0, 1):
            await engine.apply_weights("u1", ranks=[rank])
        verified = await engine.verify_weights("u1")
        assert [one.digest for one in verified] == digests
        assert engine.weight_version == "first"
        assert {state.weight_version for state in await engine.read_back()} == {"first"}
        with pytest.raises(PreconditionFailed) as unsettled:
            await engine.resume()
        assert unsettled.value.reason == "UPDATE_PENDING"
        for rank in (0, 1):
            await engine.commit_weights("u1", ranks=[rank])
        await engine.commit_weights("u1")
        states = await engine.resume()
        assert {state.weight_version for state in states} == {"v2"}
        assert engine.counters().prefix_entries == 0
        new = await answer(engine, request("b", BEAR, max_tokens=50))
        assert new.tokens == expected != old.tokens
        assert new.finished.usage is not None
        assert new.finished.usage.cached_prompt_tokens == 0
        assert (set(old.versions), set(new.versions)) == ({"first"}, {"v2"})
        assert new.finished.weight_versions == ("v2",)


@pytest.mark.clause("AD-32", "AD-24")
async def test_an_update_that_was_only_staged_can_be_taken_back_newest_step_first(engine: Engine) -> None:
    source = DiskWeights(path=builtin_checkpoint("second"))
    await engine.prepare_weights("u1", source=source, version="v2")
    await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    states = await engine.resume()
    assert not any(state.paused for state in states)
    await engine.undo_weights("u1")
    await engine.prepare_weights("u2", source=source, version="v2")
    await engine.undo_weights("u2")
    assert {state.weight_version for state in await engine.read_back()} == {"first"}


@pytest.mark.clause("AD-32")
async def test_undo_puts_the_old_weights_back_exactly(engine: Engine) -> None:
    old = await answer(engine, request("a", BEAR, max_tokens=50))
    before = await engine.read_back()
    await engine.prepare_weights("u", source=DiskWeights(path=builtin_checkpoint("second")), version="v2")
    with pytest.raises(Conflict):
        await engine.prepare_weights("w", source=DiskWeights(path=builtin_checkpoint("second")), version="v3")
    await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    await engine.apply_weights("u", ranks=[1])
    await engine.undo_weights("u", ranks=[0])
    await engine.undo_weights("u", ranks=[1])
    await engine.undo_weights("u")
    after = await engine.resume()
    assert [state.weight_digest for state in after] == [state.weight_digest for state in before]
    assert engine.weight_version == "first"
    assert (await answer(engine, request("b", BEAR, max_tokens=50))).tokens == old.tokens


@pytest.mark.clause("AD-45")
async def test_inline_tensors_replace_what_they_name_and_can_be_reloaded(engine: Engine) -> None:
    old = await answer(engine, request("a", max_tokens=40))
    with TensorFile(weights_file(builtin_checkpoint("second"))) as file:
        values = file.read("layers.0.mlp.down.weight").astype("<f4")
    tensor = InlineTensor(
        name="layers.0.mlp.down.weight",
        dtype=TensorDtype.FLOAT32,
        shape=values.shape,
        data=values.tobytes(),
        sha256=hashlib.sha256(values.tobytes()).digest(),
    )
    await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    await engine.prepare_weights("u", source=InlineWeights(tensors=(tensor,)), version="mixed")
    await engine.apply_weights("u")
    await engine.commit_weights("u")
    await engine.resume()
    new = await answer(engine, request("b", max_tokens=40))
    assert new.tokens != old.tokens
    await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    await engine.release(kinds=[ResourceKind.WEIGHTS], retention=WeightRetention.DISCARD)
    await engine.restore(kinds=[ResourceKind.WEIGHTS])
    await engine.resume()
    assert (await answer(engine, request("c", max_tokens=40))).tokens == new.tokens


@pytest.mark.clause("AD-45")
async def test_an_update_over_released_weights_restores_them(engine: Engine) -> None:
    await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    await engine.release(kinds=[ResourceKind.WEIGHTS], retention=WeightRetention.OFFLOAD_TO_HOST)
    await engine.prepare_weights("u", source=DiskWeights(path=builtin_checkpoint("second")), version="v2")
    await engine.apply_weights("u")
    await engine.verify_weights("u")
    await engine.undo_weights("u")
    assert not any(state.weights_resident for state in await engine.read_back())
    await engine.prepare_weights("u2", source=DiskWeights(path=builtin_checkpoint("second")), version="v2")
    await engine.apply_weights("u2")
    await engine.commit_weights("u2")
    await engine.resume()
    assert {state.weight_version for state in await engine.read_back()} == {"v2"}
    await answer(engine, request("a", max_tokens=3))


@pytest.mark.clause("AD-32")
async def test_unsuitable_sources_are_refused_and_nothing_changes(engine: Engine, tmp_path: Path) -> None:
    before = await engine.read_back()
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\xff" * 100)
    header = json.dumps({"embed.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    partial = tmp_path / "partial.safetensors"
    partial.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    norm = np.zeros(128, "<f4")
    norm[0] = np.nan
    unsound = InlineTensor(name="norm.weight", dtype=TensorDtype.FLOAT32, shape=(128,), data=norm.tobytes())
    cases = (
        (DiskWeights(path=tmp_path / "absent"), NotFound),
        (DiskWeights(path=tmp_path / ("a" * 300)), NotFound),
        (DiskWeights(path=damaged), InvalidRequest),
        (DiskWeights(path=partial), InvalidRequest),
        (
            DiskWeights(path=builtin_checkpoint("second"), sha256={"model.safetensors": "00" * 32}),
            InvalidRequest,
        ),
        (DiskWeights(path=builtin_checkpoint("second"), sha256={"../x": "00" * 32}), InvalidRequest),
        (InlineWeights(tensors=()), InvalidRequest),
        (InlineWeights(tensors=(replace(unsound, shape=(64,)),)), InvalidRequest),
        (InlineWeights(tensors=(replace(unsound, dtype=TensorDtype.INT8),)), Unsupported),
        (InlineWeights(tensors=(unsound,)), InvalidRequest),
    )
    for source, kind in cases:
        with pytest.raises(kind):
            await engine.prepare_weights("u", source=source, version="v2")
    await engine.pause(mode=PauseMode.DRAIN, admission=QUEUE)
    await engine.resume()
    assert await engine.read_back() == before


def read(file: ArtifactFile) -> bytes:
    return Path(file.path).read_bytes()


@pytest.mark.clause("AD-46")
async def test_profiles_leave_files_whose_digests_are_told(engine: Engine) -> None:
    kinds = [ProfilerKind.CPU, ProfilerKind.MEMORY, ProfilerKind.SCHEDULER]
    await engine.start_profile("p", kinds=kinds)
    await engine.start_profile("p", kinds=kinds)
    with pytest.raises(Conflict) as active:
        await engine.start_profile("q", kinds=kinds)
    assert active.value.reason == "PROFILE_ACTIVE"
    await answer(engine, request("a", max_tokens=5))
    files = await engine.stop_profile("p")
    assert await engine.stop_profile("p") == files
    assert sorted((file.rank, file.kind) for file in files) == [
        (-1, ProfilerKind.SCHEDULER),
        (0, ProfilerKind.CPU),
        (0, ProfilerKind.MEMORY),
        (1, ProfilerKind.CPU),
        (1, ProfilerKind.MEMORY),
    ]
    for file in files:
        content = read(file)
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file.size_bytes, file.sha256)
    with pytest.raises(NotFound):
        await engine.stop_profile("unknown")
    with pytest.raises(Unsupported):
        await engine.start_profile("g", kinds=[ProfilerKind.GPU])


@pytest.mark.clause("AD-46")
async def test_a_step_bound_ends_the_recording(engine: Engine) -> None:
    await engine.start_profile("p", kinds=[ProfilerKind.SCHEDULER, ProfilerKind.CPU], max_steps=3)
    await answer(engine, request("a", max_tokens=10))
    files = await engine.stop_profile("p")
    trace = json.loads(read(next(file for file in files if file.rank == -1)))
    assert len(trace["traceEvents"]) == 3


@pytest.mark.clause("AD-47")
async def test_slots_can_change_while_running(engine: Engine) -> None:
    report = await engine.set_slots(1)
    assert (report.slots, report.slots_before, engine.info.slots) == (1, 16, 1)
    streams = [await started(engine, "a"), engine.generate(request("b"))]
    await anext(streams[0])
    assert (engine.counters().running, engine.counters().waiting) == (1, 1)
    await engine.set_slots(2)
    await anext(streams[1])
    assert engine.counters().running == 2
    with pytest.raises(InvalidRequest):
        await engine.set_slots(0)
    for stream in streams:
        await stream.aclose()


BOTH = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)


@pytest.mark.clause("AD-36", "AD-43", "AD-44")
async def test_memory_whose_release_or_restore_was_given_up_at_any_moment_comes_back(engine: Engine) -> None:
    await engine.pause(mode=PauseMode.ABORT, admission=QUEUE)

    async def there_and_back() -> None:
        await engine.release(kinds=BOTH, retention=WeightRetention.DISCARD)
        await engine.restore(kinds=BOTH)

    async def comes_back(_: SweepPoint) -> None:
        seen = await engine.read_back()
        if all(state.weights_resident and state.kv_resident for state in seen):
            await engine.resume()  # whatever is not released is in nobody's way
            await engine.pause(mode=PauseMode.ABORT, admission=QUEUE)
        await engine.restore(kinds=BOTH)
        seen = await engine.read_back()
        assert all(state.weights_resident and state.kv_resident for state in seen)

    assert await sweep(there_and_back, comes_back) > 3


@pytest.mark.clause("AD-36", "AD-42")
async def test_a_resume_that_was_given_up_at_any_moment_has_happened_or_not(engine: Engine) -> None:
    await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)

    async def whole(point: SweepPoint) -> None:
        is_paused = {state.paused for state in await engine.read_back()}
        assert is_paused == {engine.state is EngineState.PAUSED} == {point.was_reached}
        await engine.pause(mode=PauseMode.KEEP, admission=QUEUE)

    assert await sweep(engine.resume, whole) > 1


@pytest.mark.clause("AD-32", "AD-36")
async def test_an_undo_that_was_given_up_at_any_moment_stands_in_no_other_updates_way(
    engine: Engine,
) -> None:
    other = DiskWeights(path=builtin_checkpoint("second"))

    for moment in range(1, 100):
        await engine.prepare_weights("one", source=other, version="v1")
        if not (await cancel_at(engine.undo_weights("one"), moment)).was_reached:
            break
        await engine.prepare_weights("two", source=other, version="v2")
        await engine.undo_weights("two")
    assert moment > 1


@pytest.mark.clause("AD-36", "AD-46")
async def test_a_profile_whose_start_or_stop_was_given_up_at_any_moment_is_stopped(engine: Engine) -> None:
    names = (f"p{number}" for number in range(1000))
    name = next(names)

    async def recorded() -> None:
        await engine.start_profile(name, kinds=[ProfilerKind.CPU], max_steps=None, max_duration_s=None)
        await engine.stop_profile(name)

    async def is_over(_: SweepPoint) -> None:
        nonlocal name
        with contextlib.suppress(NotFound):
            assert await engine.stop_profile(name)
        assert engine.running_profile == ""
        name = next(names)

    assert await sweep(recorded, is_over) > 1
