"""SGLang's control against a stand-in built from the server's documentation: the calls that would end it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines_rig import EngineHarness, ask, config_of, running
from engines_steps import do, facing
from replay_engine import Answer, ReplayEngine
from safetensors.numpy import save_file
from sglang_stub import Sglang

from iop.adapters.base import Adapter
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    PauseMode,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import DiskSource, PauseSpec
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    PauseStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.core.errors import PreconditionFailed, Unsupported
from iop.testing import adapter_suite
from iop.testing.adapter_suite import assert_all_ok

ALL = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE, ResourceKind.GRAPHS)
KV = (ResourceKind.KV_CACHE,)
FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)


@contextlib.asynccontextmanager
async def in_front_of(engine: Sglang) -> AsyncIterator[Adapter]:
    async with facing("sglang", engine) as adapter:
        yield adapter
    assert not engine.is_dead


@pytest.fixture
async def harness() -> AsyncIterator[EngineHarness]:
    async with in_front_of(Sglang()) as adapter:
        yield EngineHarness(adapter, "sglang")


@pytest.mark.clause("AD-37", "AD-40", "AD-41")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    pass


def pause(mode: PauseMode) -> PauseStep:
    return PauseStep(pause=PauseSpec(mode=mode, admission=AdmissionPolicy.QUEUE))


def release(*kinds: ResourceKind) -> ReleaseStep:
    retention = WeightRetention.DISCARD if ResourceKind.WEIGHTS in kinds else None
    return ReleaseStep(kinds=kinds, weight_retention=retention)


def checkpoint_at(directory: Path) -> DiskSource:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file({"head": np.zeros((2, 2), np.float32)}, directory / "model.safetensors")
    return DiskSource(path=str(directory), format=WeightFormat.SAFETENSORS)


@pytest.mark.clause("AD-15")
async def test_memory_without_the_saver_is_not_offered() -> None:
    async with in_front_of(Sglang(enable_memory_saver=False)) as adapter:
        await do(adapter, pause(PauseMode.ABORT))
        with pytest.raises(Unsupported, match="--enable-memory-saver"):
            await do(adapter, release(*KV))


@pytest.mark.clause("AD-15", "AD-40")
async def test_a_flush_that_would_speak_of_one_rank_only_is_not_offered() -> None:
    async with in_front_of(Sglang(dp_size=2)) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.FLUSH_CACHES not in info.capabilities.operations
        with pytest.raises(Unsupported, match="first rank"):
            await do(adapter, FLUSH)


@pytest.mark.clause("AD-15", "AD-41")
@pytest.mark.parametrize(
    ("routes", "operations", "words"),
    [
        ((), {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}, "DISABLE_OPENAPI_DOC"),
        (
            ("/flush_cache", "/weights_checker"),
            {AdminOperationKind.PAUSE, AdminOperationKind.RESUME, AdminOperationKind.FLUSH_CACHES},
            "a newer one",
        ),
    ],
)
async def test_an_sglang_without_the_routes_is_paused_at_the_gate_and_offers_what_it_has(
    routes: tuple[str, ...], operations: set[AdminOperationKind], words: str
) -> None:
    engine = Sglang()
    engine.routes["GET /openapi.json"] = Answer.of({"paths": {route: {} for route in routes}})
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.operations == operations
        assert info.capabilities.pause_modes == {PauseMode.DRAIN, PauseMode.ABORT}
        assert any(words in each.how for each in info.lacking if each.operation is AdminOperationKind.PAUSE)
        assert BusyPolicy.PREEMPT not in info.capabilities.busy_policies
        assert_all_ok(await do(adapter, pause(PauseMode.DRAIN)))
        (back,) = await adapter.read_back([info.participant_id])
        assert back.paused
        with pytest.raises(Unsupported, match=words):
            await do(adapter, release(*KV))
        assert engine.posts() == []
        assert_all_ok(await do(adapter, ResumeStep()))


@pytest.mark.clause("AD-40")
async def test_a_busy_flush_is_refused_in_the_engines_words() -> None:
    engine = Sglang()
    engine.running = 1
    async with in_front_of(engine) as adapter:
        (outcome,) = (await do(adapter, FLUSH)).participants
        assert outcome.error is not None
        assert "requests are running" in outcome.error.message
        assert [cache.outcome for cache in outcome.caches] == [CacheOutcome.REFUSED]


@pytest.mark.clause("AD-37", "AD-40")
async def test_a_preempting_flush_takes_back_what_runs_and_lets_it_go_on() -> None:
    engine = Sglang()
    engine.running = 1
    preempt = replace(FLUSH, busy_policy=BusyPolicy.PREEMPT)
    async with in_front_of(engine) as adapter:
        assert_all_ok(await do(adapter, preempt))
        told = [(each.path, each.body) for each in engine.asked if each.method == "POST"]
        assert told == [
            ("/pause_generation", {"mode": "retract"}),
            ("/flush_cache", None),
            ("/continue_generation", {}),
        ]
        assert not engine.mode
        assert (await ask(adapter, {})).status == 404, "its gate is as it was: the engine answered"
        # What somebody froze stays where it stands, and so does its cache.
        engine.running = 1
        await do(adapter, pause(PauseMode.KEEP))
        engine.forget()
        (outcome,) = (await do(adapter, preempt)).participants
        assert outcome.error is not None
        assert engine.posts() == ["/flush_cache"]
        assert engine.mode == "in_place"


@pytest.mark.clause("AD-37", "AD-40")
async def test_a_preempting_flush_that_leaves_the_engine_paused_is_no_success() -> None:
    engine = Sglang()
    engine.routes["POST /continue_generation"] = Answer.of({"status": "ok"})
    async with in_front_of(engine) as adapter:
        (outcome,) = (await do(adapter, replace(FLUSH, busy_policy=BusyPolicy.PREEMPT))).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-41")
async def test_frozen_requests_are_resumed_before_they_are_aborted() -> None:
    engine = Sglang()
    engine.running = 2
    async with in_front_of(engine) as adapter:
        frozen = await do(adapter, pause(PauseMode.KEEP))
        assert_all_ok(frozen)
        assert frozen.work.kept == 2
        assert_all_ok(await do(adapter, pause(PauseMode.ABORT)))
        assert engine.posts() == ["/pause_generation", "/continue_generation", "/pause_generation"]


async def test_looking_at_a_paused_engine_never_asks_for_a_generation() -> None:
    engine = Sglang()
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.KEEP))
        await adapter.probe()
        assert not any(each.path.startswith("/health") for each in engine.asked)


@pytest.mark.clause("AD-37")
async def test_only_what_changes_nothing_is_asked_by_get_since_it_would_be_done() -> None:
    engine = Sglang()
    async with in_front_of(engine) as adapter:
        await adapter.probe()
        await adapter.read_back([adapter.participants()[0].participant_id])
        asked = {each.path for each in engine.asked if each.method == "GET"}
        assert asked <= {"/model_info", "/ready", "/ping", "/v1/loads", "/v1/models"}


@pytest.mark.clause("AD-37", "AD-43")
@pytest.mark.parametrize("freed", [0, 3_000])
async def test_a_release_is_proven_by_the_devices_memory(freed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iop.adapters.device_memory.FREED_TIMEOUT_S", 0.05)
    engine = Sglang()

    async def used() -> int | None:
        return 8_000 - (freed if engine.released else 0)

    async with in_front_of(engine) as adapter:
        adapter._control._device_memory = used  # type: ignore[attr-defined]
        await do(adapter, pause(PauseMode.ABORT))
        (outcome,) = (await do(adapter, release(*ALL))).participants
        assert [amount.bytes for amount in outcome.amounts] == ([freed] if freed else [])
        assert (outcome.error is None) is bool(freed)
        if outcome.error is not None:
            assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED
        # Whatever the device says, what the engine answered for must be taken back, and only once.
        restore = RestoreStep(
            kinds=ALL, weight_source=DiskSource(path="model-a", format=WeightFormat.SAFETENSORS)
        )
        assert_all_ok(await do(adapter, restore))
        assert engine.released == set()


@pytest.mark.clause("AD-43")
async def test_memory_is_released_only_at_rest() -> None:
    engine = Sglang()
    async with in_front_of(engine) as adapter:
        with pytest.raises(PreconditionFailed):
            await do(adapter, release(*KV))
        engine.running = 1
        await do(adapter, pause(PauseMode.KEEP))
        with pytest.raises(PreconditionFailed):
            await do(adapter, release(*KV))
        assert "/release_memory_occupation" not in engine.posts()


@pytest.mark.clause("AD-43", "AD-44")
async def test_nothing_is_released_or_restored_twice(tmp_path: Path) -> None:
    engine = Sglang()
    served = checkpoint_at(tmp_path / "served")
    engine.path = engine.content = served.path
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        assert_all_ok(await do(adapter, release(*KV)))
        assert_all_ok(await do(adapter, release(*ALL)))
        assert engine.released == {"weights", "kv_cache", "cuda_graph"}
        with pytest.raises(PreconditionFailed):
            await do(adapter, ResumeStep())
        with pytest.raises(PreconditionFailed):
            await do(adapter, RestoreStep(kinds=ALL))
        restore = RestoreStep(kinds=ALL, weight_source=served)
        engine.forget()
        assert_all_ok(await do(adapter, restore))
        assert engine.posts() == [
            "/resume_memory_occupation",
            "/update_weights_from_disk",
            "/weights_checker",
            "/resume_memory_occupation",
            "/resume_memory_occupation",
        ]
        assert_all_ok(await do(adapter, restore))
        assert_all_ok(await do(adapter, ResumeStep()))


@pytest.mark.clause("AD-37", "AD-44")
async def test_discarded_weights_that_come_back_otherwise_are_no_restore(tmp_path: Path) -> None:
    engine = Sglang()
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        assert_all_ok(await do(adapter, release(ResourceKind.WEIGHTS)))
        other = RestoreStep(kinds=(ResourceKind.WEIGHTS,), weight_source=checkpoint_at(tmp_path / "b"))
        (outcome,) = (await do(adapter, other)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-35", "AD-37")
async def test_what_a_paused_engine_released_before_us_is_not_guessed() -> None:
    engine = Sglang()
    engine.mode = "abort"
    async with in_front_of(engine) as adapter:
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.paused is True
        assert back.released is None
        for step in (release(*KV), RestoreStep(kinds=KV), ResumeStep()):
            with pytest.raises(PreconditionFailed):
                await do(adapter, step)


@pytest.mark.clause("AD-35", "AD-44")
async def test_a_restarted_engine_is_not_asked_for_what_its_predecessor_released() -> None:
    engine = Sglang()
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        assert_all_ok(await do(adapter, release(*KV)))
        engine.mode, engine.released = "", set()
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.paused is False
        assert back.released == frozenset()
        engine.forget()
        assert_all_ok(await do(adapter, RestoreStep(kinds=KV)))
        assert engine.posts() == []


@pytest.mark.clause("AD-32", "AD-37", "AD-38", "AD-45")
async def test_an_update_is_proven_by_checksum_labelled_last_and_can_be_undone(tmp_path: Path) -> None:
    engine = Sglang()
    source = checkpoint_at(tmp_path / "b")
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        apply = ApplyWeightsStep(model="m", source=source, weight_version="v2")
        assert_all_ok(await do(adapter, apply))
        assert engine.version == "default"
        verified = await do(adapter, VerifyWeightsStep(model="m", weight_version="v2"))
        assert verified.participants[0].content_digest
        undo = UndoWeightsStep(model="m", previous_source=None, previous_weight_version="default")
        assert_all_ok(await do(adapter, undo))
        assert engine.path == "model-a"
        assert_all_ok(await do(adapter, apply))
        assert_all_ok(await do(adapter, CommitWeightsStep(model="m", weight_version="v2")))
        assert engine.version == "v2"
        assert adapter.snapshot().weight_version == "v2"


@pytest.mark.clause("AD-33", "AD-45")
async def test_an_update_renames_the_served_model_and_its_name_is_read_again(tmp_path: Path) -> None:
    engine = Sglang()
    first, second = checkpoint_at(tmp_path / "a"), checkpoint_at(tmp_path / "b")
    engine.path = engine.content = first.path
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        await do(adapter, ApplyWeightsStep(model="m", source=second, weight_version="v2"))
        await adapter.probe()
        (info,) = adapter.participants()
        assert info.models == (second.path,)
        assert info.startup_source == first, "where it began is not where it is"


@pytest.mark.clause("AD-05")
async def test_nothing_that_destroys_or_ends_others_requests_is_ever_called(tmp_path: Path) -> None:
    """Its checker can wipe the weights, its abort takes prefixes, and a mere GET changes things."""
    engine = Sglang()
    source = checkpoint_at(tmp_path / "b")
    async with in_front_of(engine) as adapter:
        for step in (
            pause(PauseMode.ABORT),
            release(*KV),
            RestoreStep(kinds=KV),
            FLUSH,
            ApplyWeightsStep(model="m", source=source, weight_version="v2"),
            VerifyWeightsStep(model="m", weight_version="v2"),
            CommitWeightsStep(model="m", weight_version="v2"),
            ResumeStep(),
        ):
            assert_all_ok(await do(adapter, step))
        asked = {each.path for each in engine.asked if each.method == "GET"}
        assert asked <= {"/model_info", "/ready", "/ping", "/v1/loads", "/v1/models"}
        assert "/abort_request" not in engine.posts()
        checks = [each.body for each in engine.asked if each.path == "/weights_checker"]
        assert {body["action"] for body in checks} == {"checksum"}


@pytest.mark.clause("AD-37")
async def test_a_refused_flush_inside_an_update_does_not_hide_that_the_weights_are_live(
    tmp_path: Path,
) -> None:
    engine = Sglang()
    engine.routes["POST /update_weights_from_disk"] = Answer.of(
        {"success": False, "message": "Weights were updated, but the cache was not flushed."}, 400
    )
    source = checkpoint_at(tmp_path / "b")
    async with in_front_of(engine) as adapter:
        await do(adapter, pause(PauseMode.DRAIN))
        step = ApplyWeightsStep(model="m", source=source, weight_version="v2")
        assert_all_ok(await do(adapter, step))
        engine.routes["POST /update_weights_from_disk"] = Answer.of(
            {"success": False, "message": "Failed to load."}, 400
        )
        (outcome,) = (await do(adapter, step)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.PARTICIPANT_FAILED
        assert outcome.changed


@pytest.mark.clause("AD-15", "AD-41")
async def test_trtllm_is_paused_at_the_gate_and_says_why_it_can_no_more() -> None:
    engine = ReplayEngine(unknown=Answer(404, b"{}"))
    engine.routes = {
        "GET /health": Answer(200, b""),
        "GET /version": Answer.of({"version": "1.4.0"}),
        "GET /v1/models": Answer.of({"data": [{"id": "m"}]}),
    }
    async with (
        engine.upstream().serving() as upstream,
        running(config_of("trtllm", upstream.endpoint)) as adapter,
    ):
        assert_all_ok(await do(adapter, pause(PauseMode.DRAIN)))
        with pytest.raises(Unsupported, match="no HTTP route"):
            await do(adapter, FLUSH)
        assert not any(each.path == "/metrics" for each in engine.asked)
        assert engine.posts() == []
