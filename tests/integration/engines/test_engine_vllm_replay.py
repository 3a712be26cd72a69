"""What vLLM's routes do not say by their status, each proven against recorded answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from engines_rig import EngineHarness, ask, config_of, started
from engines_steps import GROUP, do, error_of
from replay_engine import Answer
from vllm_replay import DEV, NOT_FOUND, PLAIN, VllmReplay

from iop.adapters.base import Health
from iop.adapters.native_adapter import NativeHttpAdapter
from iop.adapters.vllm.control import VllmControl
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    DrainTimeoutAction,
    PauseMode,
    ProfilerKind,
    ResourceKind,
    WeightFormat,
    WeightRetention,
    WeightSourceKind,
)
from iop.admin.requests import DiskSource, FileDigest, PauseSpec
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    PauseStep,
    PrepareWeightsStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    StartProfileStep,
    Step,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.core.errors import PreconditionFailed, Unavailable, Unsupported
from iop.testing import adapter_suite
from iop.testing.adapter_suite import adapter_services, assert_all_ok
from iop.wire.messages import OpenAICompatSettings

Memory = Callable[[], Awaitable[int | None]]
WEIGHTS = (ResourceKind.WEIGHTS,)
BOTH = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)


async def not_measured() -> int | None:
    return None


@contextlib.asynccontextmanager
async def in_front_of(engine: VllmReplay, memory: Memory = not_measured) -> AsyncIterator[NativeHttpAdapter]:
    async with engine.upstream().serving() as upstream:
        config = config_of("vllm", upstream.endpoint)
        assert isinstance(config.settings, OpenAICompatSettings)
        control = VllmControl(config.settings, adapter_services(), device_memory=memory)
        adapter = NativeHttpAdapter(config, adapter_services(), control)
        async with started(adapter):
            engine.forget()
            yield adapter


@pytest.fixture
async def harness() -> AsyncIterator[EngineHarness]:
    async with in_front_of(VllmReplay()) as adapter:
        yield EngineHarness(adapter, "vllm")


@pytest.mark.clause("AD-37", "AD-40", "AD-41")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    pass


def pause(
    mode: PauseMode, *, timeout_ms: int | None = None, then: DrainTimeoutAction | None = None
) -> PauseStep:
    return PauseStep(
        pause=PauseSpec(
            mode=mode, admission=AdmissionPolicy.QUEUE, drain_timeout_ms=timeout_ms, on_drain_timeout=then
        )
    )


def release(
    *kinds: ResourceKind, retention: WeightRetention = WeightRetention.OFFLOAD_TO_HOST
) -> ReleaseStep:
    return ReleaseStep(kinds=kinds, weight_retention=retention if ResourceKind.WEIGHTS in kinds else None)


# ---- what is offered ----


@pytest.mark.clause("AD-15")
async def test_without_development_mode_only_the_gate_is_offered_and_the_way_out_told() -> None:
    engine = VllmReplay()
    for route in ("GET /is_paused", "POST /pause", "POST /reset_prefix_cache", "GET /server_info"):
        engine.routes[route] = NOT_FOUND
    engine.routes["GET /openapi.json"] = Answer.of({"paths": {"/health": {}, "/v1/models": {}}})
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.operations == {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}
        assert info.capabilities.pause_modes == {PauseMode.DRAIN, PauseMode.ABORT}
        assert "VLLM_SERVER_DEV_MODE=1" in adapter.capabilities.admin_refusal
        with pytest.raises(Unsupported, match="VLLM_SERVER_DEV_MODE=1"):
            await do(adapter, FLUSH)
        assert_all_ok(await do(adapter, pause(PauseMode.DRAIN)))
        assert engine.posts() == []


@pytest.mark.clause("AD-15")
async def test_an_engine_that_hides_its_routes_is_not_guessed_about() -> None:
    engine = VllmReplay()
    engine.routes["GET /openapi.json"] = NOT_FOUND
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.FLUSH_CACHES not in info.capabilities.operations
        assert "--disable-fastapi-docs" in adapter.capabilities.admin_refusal


@pytest.mark.clause("AD-15", "AD-43")
async def test_a_sleep_that_would_free_nothing_is_not_offered_and_never_sent() -> None:
    engine = VllmReplay(sleep_mode=False)
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        engine.forget()
        with pytest.raises(Unsupported, match="--enable-sleep-mode"):
            await do(adapter, release(*BOTH))
        assert engine.posts() == []


@pytest.mark.clause("AD-35")
async def test_a_restarted_engine_is_another_instance_that_is_not_paused() -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        (before,) = adapter.participants()
        engine.start_time, engine.is_paused = "1.79600999999e+09", False
        (back,) = await adapter.read_back([before.participant_id])
        assert back.paused is False
        assert back.instance != before.instance
        assert adapter.participants()[0].instance == back.instance


async def test_a_refused_key_shows_in_the_health_and_not_as_an_engine() -> None:
    engine = VllmReplay()
    engine.routes["GET /v1/models"] = Answer(401, b'{"error":"Unauthorized"}')
    async with in_front_of(engine) as adapter:
        assert adapter.snapshot().health is Health.NOT_READY
        assert adapter.participants() == ()


@pytest.mark.clause("EN-61", "AD-15")
async def test_what_the_engine_leaves_open_without_a_key_is_not_reached_through_a_tunnel() -> None:
    """Its `--api-key` guards `/v1` only: a whole chat is served elsewhere, and every control route is open."""
    engine = VllmReplay()
    opened = [
        name.split()[1]
        for name, answer in PLAIN.matching("without a key").items()
        if answer.status != 401 and "/v1/" not in name
    ]
    assert "/invocations" in opened
    assert "/collective_rpc" in opened
    async with in_front_of(engine) as adapter:
        for path in opened:
            tunnel = await ask(adapter, {}, operation="", path=path)
            assert tunnel.error is not None
            assert tunnel.error.before_start
        assert engine.asked == []


# ---- pause ----


@pytest.mark.clause("AD-41")
@pytest.mark.parametrize(
    ("mode", "native"), [(PauseMode.DRAIN, "wait"), (PauseMode.ABORT, "abort"), (PauseMode.KEEP, "keep")]
)
async def test_pause_options_go_into_the_query_and_the_cache_stays(mode: PauseMode, native: str) -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        assert_all_ok(await do(adapter, pause(mode)))
        (asked,) = [each for each in engine.asked if each.path == "/pause"]
        assert asked.query == {"mode": native, "clear_cache": "false"}
        assert asked.body is None


@pytest.mark.clause("AD-37")
async def test_a_pause_answered_but_not_in_force_fails() -> None:
    engine = VllmReplay()
    engine.routes["POST /pause"] = DEV["pause abort"]
    async with in_front_of(engine) as adapter:
        error = await error_of(adapter, pause(PauseMode.ABORT))
        assert error.code is AdminErrorCode.VERIFICATION_FAILED


async def assert_out_of_time(adapter: NativeHttpAdapter, engine: VllmReplay) -> None:
    """A drain ends as such, and nothing was told to the engine."""
    error = await error_of(adapter, pause(PauseMode.DRAIN, timeout_ms=50, then=DrainTimeoutAction.FAIL))
    assert error.code is AdminErrorCode.DRAIN_TIMEOUT
    assert engine.posts() == []


@pytest.mark.clause("AD-41")
async def test_a_drain_out_of_time_never_calls_the_engines_endless_wait() -> None:
    engine = VllmReplay()
    engine.running = 1
    async with in_front_of(engine) as adapter:
        await assert_out_of_time(adapter, engine)
        result = await do(adapter, pause(PauseMode.DRAIN, timeout_ms=50, then=DrainTimeoutAction.ABORT))
        assert_all_ok(result)
        assert result.work.aborted == 1
        assert [each.query["mode"] for each in engine.asked if each.path == "/pause"] == ["abort"]


@pytest.mark.clause("AD-41")
async def test_a_drain_waits_for_what_the_engine_holds_back_too() -> None:
    """Its own `wait` leaves queued requests in the queue, to be run by whatever weights come."""
    engine = VllmReplay()
    engine.waiting = 1
    async with in_front_of(engine) as adapter:
        await assert_out_of_time(adapter, engine)


@pytest.mark.clause("AD-35", "AD-43")
async def test_a_paused_engine_says_that_it_sleeps_and_is_not_called_released() -> None:
    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.paused is True
        assert back.released == frozenset()


@pytest.mark.clause("AD-15", "AD-35")
async def test_what_another_process_of_the_engine_offers_is_looked_up_anew() -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        assert AdminOperationKind.UPDATE_WEIGHTS in adapter.participants()[0].capabilities.operations
        engine.start_time = "1.79600999999e+09"
        engine.routes["GET /openapi.json"] = PLAIN["openapi, paths only"]
        engine.routes["GET /version"] = Answer.of({"version": "0.33.0"})
        await adapter.probe()
        (info,) = adapter.participants()
        assert info.capabilities.operations == {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}
        assert info.engine_version == "0.33.0"


@pytest.mark.clause("AD-41", "EN-95")
async def test_a_paused_engine_is_sent_no_request_that_it_would_hold_for_ever() -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.KEEP))
        engine.forget()
        tunnel = await ask(adapter, {"messages": []})
        assert tunnel.error is not None
        assert tunnel.error.code == "busy"
        assert engine.asked == []


# ---- caches ----


@pytest.mark.clause("AD-37", "AD-40")
async def test_a_refusal_inside_a_200_is_refused_not_cleared() -> None:
    engine = VllmReplay()
    engine.routes["POST /reset_prefix_cache"] = DEV["reset_prefix_cache while a request runs"]
    async with in_front_of(engine) as adapter:
        (outcome,) = (await do(adapter, FLUSH)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.REFUSED_BUSY
        assert [cache.outcome for cache in outcome.caches] == [CacheOutcome.REFUSED]


@pytest.mark.clause("AD-40")
async def test_waiting_asks_again_until_it_is_cleared() -> None:
    engine = VllmReplay()
    answers = [DEV["reset_prefix_cache while a request runs"], DEV["reset_prefix_cache"]]
    engine.routes["POST /reset_prefix_cache"] = lambda _: answers.pop(0)
    async with in_front_of(engine) as adapter:
        assert_all_ok(await do(adapter, FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.WAIT)))
        assert answers == []


@pytest.mark.clause("AD-40")
async def test_resets_that_never_fail_are_sent_only_at_rest() -> None:
    engine = VllmReplay()
    engine.running = 1
    flush = FlushStep(kinds=(CacheKind.MULTIMODAL, CacheKind.ENCODER), busy_policy=BusyPolicy.FAIL)
    async with in_front_of(engine) as adapter:
        (outcome,) = (await do(adapter, flush)).participants
        assert {cache.outcome for cache in outcome.caches} == {CacheOutcome.REFUSED}
        assert engine.posts() == []
        engine.running = 0
        assert_all_ok(await do(adapter, flush))
        assert engine.posts() == ["/reset_mm_cache", "/reset_encoder_cache"]


# ---- memory ----


@pytest.mark.clause("AD-43")
async def test_a_sleep_is_proven_by_state_and_by_freed_memory() -> None:
    used = [8_000, 8_000, 3_000]

    async def memory() -> int | None:
        return used.pop(0) if len(used) > 1 else used[0]

    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine, memory) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        result = await do(adapter, release(*BOTH))
        assert_all_ok(result)
        assert [amount.bytes for amount in result.participants[0].amounts] == [5_000]
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.released == set(BOTH)


@pytest.mark.clause("AD-37", "AD-43")
async def test_a_sleep_that_freed_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iop.adapters.device_memory.FREED_TIMEOUT_S", 0.05)

    async def memory() -> int | None:
        return 8_000

    async with in_front_of(VllmReplay(sleep_mode=True), memory) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        assert (await error_of(adapter, release(*BOTH))).code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-37", "AD-43")
async def test_a_sleep_answered_by_an_engine_that_stays_awake_fails() -> None:
    engine = VllmReplay(sleep_mode=True)
    engine.routes["POST /sleep"] = DEV["sleep level 1"]
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        assert (await error_of(adapter, release(*BOTH))).code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-43")
async def test_memory_of_a_running_engine_is_not_touched() -> None:
    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine) as adapter:
        with pytest.raises(PreconditionFailed):
            await do(adapter, release(*BOTH))
        assert engine.posts() == []


@pytest.mark.clause("AD-42")
async def test_an_engine_asleep_is_not_resumed_although_it_would_serve() -> None:
    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        await do(adapter, release(*BOTH))
        engine.forget()
        with pytest.raises(PreconditionFailed):
            await do(adapter, ResumeStep())
        assert engine.posts() == []


@pytest.mark.clause("AD-44")
async def test_waking_ends_the_pause_so_it_is_made_again() -> None:
    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        await do(adapter, release(*BOTH))
        engine.forget()
        assert_all_ok(await do(adapter, RestoreStep(kinds=BOTH)))
        assert engine.posts() == ["/wake_up", "/wake_up", "/wake_up", "/pause"]
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.paused is True
        assert back.released == frozenset()


@pytest.mark.clause("AD-44")
async def test_discarded_weights_are_loaded_before_the_engine_wakes(tmp_path: Path) -> None:
    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        await do(adapter, release(*BOTH, retention=WeightRetention.DISCARD))
        with pytest.raises(PreconditionFailed):
            await do(adapter, RestoreStep(kinds=BOTH))
        engine.forget()
        source = DiskSource(path=str(tmp_path), format=WeightFormat.SAFETENSORS)
        assert_all_ok(await do(adapter, RestoreStep(kinds=BOTH, weight_source=source)))
        assert engine.posts() == [
            "/wake_up",
            "/collective_rpc",
            "/weight_checker",
            "/wake_up",
            "/wake_up",
            "/pause",
        ]


@pytest.mark.clause("AD-37", "AD-44")
async def test_discarded_weights_that_come_back_otherwise_are_no_restore(tmp_path: Path) -> None:
    engine = VllmReplay(sleep_mode=True)
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        assert_all_ok(await do(adapter, release(*BOTH, retention=WeightRetention.DISCARD)))
        engine.routes["POST /weight_checker"] = Answer.of({"checksums": {"rank0/head": "another"}})
        source = DiskSource(path=str(tmp_path), format=WeightFormat.SAFETENSORS)
        (outcome,) = (await do(adapter, RestoreStep(kinds=BOTH, weight_source=source))).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED
        assert engine.posts()[-1] == "/weight_checker", "it goes on sleeping"


# ---- weights ----


def checkpoint_at(directory: Path, *, shape: tuple[int, ...] = (2, 2)) -> DiskSource:
    import numpy as np
    from safetensors.numpy import save_file

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text("{}")
    save_file({"head": np.zeros(shape, np.float32)}, directory / "model.safetensors")
    return DiskSource(path=str(directory), format=WeightFormat.SAFETENSORS)


def update(kind: type, source: DiskSource) -> Step:
    step: Step = kind(model="endless", source=source, weight_version="v2")
    return step


@pytest.mark.clause("AD-32", "AD-45")
async def test_what_an_engine_could_not_load_is_found_before_it_is_told(tmp_path: Path) -> None:
    current = checkpoint_at(tmp_path / "current")
    engine = VllmReplay(model_root=current.path)
    other_shape = checkpoint_at(tmp_path / "other", shape=(3, 3))
    good = checkpoint_at(tmp_path / "good")
    cut = checkpoint_at(tmp_path / "cut")
    path = Path(cut.path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    wrong_digest = DiskSource(
        path=good.path,
        format=WeightFormat.SAFETENSORS,
        digests=(FileDigest(name="model.safetensors", sha256=bytes(32)),),
    )
    missing = DiskSource(path=str(tmp_path / "missing"), format=WeightFormat.SAFETENSORS)
    async with in_front_of(engine) as adapter:
        for kind in (PrepareWeightsStep, ApplyWeightsStep):
            for bad, code in (
                (missing, AdminErrorCode.SOURCE_UNAVAILABLE),
                (cut, AdminErrorCode.SOURCE_UNAVAILABLE),
                (other_shape, AdminErrorCode.SOURCE_MISMATCH),
                (wrong_digest, AdminErrorCode.SOURCE_MISMATCH),
            ):
                (outcome,) = (await do(adapter, update(kind, bad))).participants
                assert outcome.error is not None
                assert outcome.error.code is code
                assert not outcome.changed
        assert engine.posts() == []
        assert_all_ok(await do(adapter, update(PrepareWeightsStep, good)))


@pytest.mark.clause("AD-37", "AD-38", "AD-45")
async def test_a_reload_is_one_named_call_without_a_timeout_and_the_label_comes_last(
    tmp_path: Path,
) -> None:
    engine = VllmReplay(model_root=checkpoint_at(tmp_path / "a").path)
    source = checkpoint_at(tmp_path / "b")
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        engine.forget()
        assert_all_ok(await do(adapter, update(ApplyWeightsStep, source)))
        (call,) = [each for each in engine.asked if each.path == "/collective_rpc"]
        assert call.body == {"method": "reload_weights", "kwargs": {"weights_path": source.path}}
        verified = await do(adapter, VerifyWeightsStep(model="endless", weight_version="v2"))
        assert_all_ok(verified)
        assert verified.participants[0].content_digest
        assert engine.posts()[-3:] == ["/resume", "/v1/completions", "/pause"]
        assert "/update_weight_version" not in engine.posts()
        assert {each.body["action"] for each in engine.asked if each.path == "/weight_checker"} == {
            "checksum"
        }
        assert_all_ok(await do(adapter, CommitWeightsStep(model="endless", weight_version="v2")))
        assert engine.label == "v2"


@pytest.mark.clause("AD-37")
async def test_an_engine_that_dies_at_its_first_request_is_not_verified(tmp_path: Path) -> None:
    engine = VllmReplay(model_root=checkpoint_at(tmp_path / "a").path)
    engine.routes["POST /v1/completions"] = DEV["completion after the failed reload"]
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        error = await error_of(adapter, VerifyWeightsStep(model="endless", weight_version="v2"))
        assert error.code is AdminErrorCode.VERIFICATION_FAILED
        assert engine.is_paused


@pytest.mark.clause("AD-33", "AD-37")
async def test_frozen_requests_are_not_let_run_for_a_probe() -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.KEEP))
        engine.forget()
        assert_all_ok(await do(adapter, VerifyWeightsStep(model="endless", weight_version="v2")))
        assert engine.posts() == ["/weight_checker"]


@pytest.mark.clause("AD-37")
async def test_a_label_that_the_engine_does_not_report_fails_the_commit() -> None:
    engine = VllmReplay()
    engine.routes["POST /update_weight_version"] = DEV["update_weight_version"]
    async with in_front_of(engine) as adapter:
        error = await error_of(adapter, CommitWeightsStep(model="endless", weight_version="v3"))
        assert error.code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-32")
async def test_an_undo_loads_the_previous_path_and_compares_its_checksum(tmp_path: Path) -> None:
    current = checkpoint_at(tmp_path / "a")
    engine = VllmReplay(model_root=current.path)
    undo = UndoWeightsStep(model="endless", previous_source=None, previous_weight_version="default")
    async with in_front_of(engine) as adapter:
        assert_all_ok(await do(adapter, undo))
        assert engine.posts() == []
        await do(adapter, update(ApplyWeightsStep, checkpoint_at(tmp_path / "b")))
        assert_all_ok(await do(adapter, undo))
        (_, back) = [each for each in engine.asked if each.path == "/collective_rpc"]
        assert back.body["kwargs"] == {"weights_path": current.path}
        await do(adapter, update(ApplyWeightsStep, checkpoint_at(tmp_path / "b")))
        engine.routes["POST /weight_checker"] = Answer.of({"checksums": {"x": "00"}})
        assert (await error_of(adapter, undo)).code is AdminErrorCode.ROLLBACK_FAILED


@pytest.mark.clause("AD-45")
async def test_a_reload_that_the_engine_fails_is_told_in_its_own_words(tmp_path: Path) -> None:
    engine = VllmReplay()
    engine.routes["POST /collective_rpc"] = DEV["reload from a missing directory"]
    async with in_front_of(engine) as adapter:
        error = await error_of(adapter, update(ApplyWeightsStep, checkpoint_at(tmp_path / "b")))
        assert "Repo id must be in the form" in error.message


# ---- profiles ----


@pytest.mark.clause("AD-46")
async def test_profiles_are_found_by_their_prefix_and_a_second_one_is_refused(tmp_path: Path) -> None:
    engine = VllmReplay(profile_dir=tmp_path)
    start = StartProfileStep(profile_id="p-1", kinds=(ProfilerKind.CPU,), max_steps=5)
    async with in_front_of(engine) as adapter:
        assert_all_ok(await do(adapter, start))
        (asked,) = [each for each in engine.asked if each.path == "/start_profile"]
        assert asked.body["max_iterations"] == 5
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.profiles == {"p-1"}
        (tmp_path / f"{asked.body['profile_prefix']}_rank0.trace.json.gz").write_bytes(b"trace")
        (tmp_path / "somebody_elses.gz").write_bytes(b"x")
        (outcome,) = (await do(adapter, StopProfileStep(profile_id="p-1"))).participants
        assert [artifact.size_bytes for artifact in outcome.artifacts] == [5]
        engine.routes["POST /start_profile"] = DEV["start_profile twice"]
        second = StartProfileStep(profile_id="p-2", kinds=(ProfilerKind.CPU,))
        assert (await error_of(adapter, second)).code is AdminErrorCode.REFUSED_BUSY


@pytest.mark.clause("AD-46")
async def test_a_stop_that_left_no_file_is_no_success(tmp_path: Path) -> None:
    engine = VllmReplay(profile_dir=tmp_path)
    async with in_front_of(engine) as adapter:
        await do(adapter, StartProfileStep(profile_id="p-1", kinds=(ProfilerKind.CPU,)))
        error = await error_of(adapter, StopProfileStep(profile_id="p-1"))
        assert error.code is AdminErrorCode.VERIFICATION_FAILED


# ---- surprises ----


@pytest.mark.clause("EN-34", "AD-37")
async def test_a_server_whose_engine_died_is_not_ready_although_it_lists_models() -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        engine.routes["GET /health"] = Answer(503, b"", "")
        await adapter.probe()
        assert adapter.snapshot().health is Health.NOT_READY
        with pytest.raises(Unavailable):
            await do(adapter, pause(PauseMode.ABORT))
        assert engine.posts() == []
        engine.routes["GET /health"] = DEV["health"]
        await adapter.probe()
        assert adapter.snapshot().health is Health.READY


@pytest.mark.clause("AD-15", "AD-43")
async def test_a_discard_that_the_platform_cannot_do_is_told_in_the_engines_words() -> None:
    engine = VllmReplay(sleep_mode=True)
    engine.routes["POST /release_kv_cache_memory"] = DEV["release_kv_cache_memory while paused"]
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        error = await error_of(adapter, release(ResourceKind.KV_CACHE))
        assert "not supported on CPU" in error.message
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.released == frozenset()


@pytest.mark.clause("AD-15", "AD-45")
async def test_tensors_over_a_group_are_refused_before_anything_is_sent() -> None:
    engine = VllmReplay()
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.weight_sources == {WeightSourceKind.DISK}
        with pytest.raises(Unsupported, match=r"start vLLM .* --weight-transfer-config"):
            await do(adapter, PrepareWeightsStep(model="m", source=GROUP, weight_version="v"))
        assert engine.posts() == []


@pytest.mark.clause("AD-15")
async def test_an_adapter_of_a_model_is_listed_and_is_not_the_model_whose_weights_are_updated() -> None:
    engine = VllmReplay(model_root="/models/base")
    engine.loras["ad1"] = "/loras/ad1"
    async with in_front_of(engine) as adapter:
        assert set(adapter.snapshot().models) == {"ad1", "endless"}
        (info,) = adapter.participants()
        assert info.models == ("endless",)


@pytest.mark.clause("AD-05")
async def test_no_step_ever_names_a_worker_method_a_request_or_a_checker_that_destroys(
    tmp_path: Path,
) -> None:
    """Routes that would run any code, abort by made-up ids or overwrite the weights are never called so."""
    engine = VllmReplay(model_root=str(checkpoint_at(tmp_path / "a").path))
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        source = checkpoint_at(tmp_path / "b")
        for step in (
            PrepareWeightsStep(model="m", source=source, weight_version="v"),
            ApplyWeightsStep(model="m", source=source, weight_version="v"),
            VerifyWeightsStep(model="m", weight_version="v"),
            CommitWeightsStep(model="m", weight_version="v"),
        ):
            assert_all_ok(await do(adapter, step))
        assert not {"/abort_requests", "/scale_elastic_ep", "/update_weights"} & set(engine.posts())
        bodies = [each.body for each in engine.asked if each.path == "/collective_rpc"]
        assert {body["method"] for body in bodies} == {"reload_weights"}
        assert all("timeout" not in body for body in bodies)
        checks = [each.body for each in engine.asked if each.path == "/weight_checker"]
        assert {body["action"] for body in checks} == {"checksum"}
