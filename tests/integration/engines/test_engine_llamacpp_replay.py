"""llama.cpp in router mode, and what its routes do not say, against recorded answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines_rig import ask
from engines_steps import do, facing, released
from llamacpp_replay import BARE, ROUTER, SINGLE, Router, Single
from replay_engine import Answer, ReplayEngine

from iop.adapters.base import Adapter
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    PauseMode,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import DiskSource, PauseSpec
from iop.admin.steps import FlushStep, PauseStep, ReleaseStep, RestoreStep
from iop.core.errors import PreconditionFailed, Unsupported
from iop.testing.adapter_suite import assert_all_ok

PAUSE = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.QUEUE))
RELEASE = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.DISCARD)
RESTORE = RestoreStep(kinds=(ResourceKind.WEIGHTS,))
FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)


@contextlib.asynccontextmanager
async def in_front_of(engine: ReplayEngine, *targets: str) -> AsyncIterator[Adapter]:
    async with facing("llamacpp", engine, *targets) as adapter:
        yield adapter


@pytest.mark.clause("AD-37", "AD-43", "AD-44")
async def test_unload_and_load_are_done_when_the_model_list_says_so() -> None:
    engine = Router()
    async with in_front_of(engine, "sea") as adapter:
        assert_all_ok(await do(adapter, PAUSE))
        assert_all_ok(await do(adapter, RELEASE))
        assert engine.status["sea"] == "unloaded"
        assert await released(adapter) == {ResourceKind.WEIGHTS}
        assert_all_ok(await do(adapter, RELEASE))
        assert engine.posts().count("/models/unload") == 1
        assert_all_ok(await do(adapter, RESTORE))
        assert engine.status["sea"] == "loaded"
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-35", "AD-43")
async def test_a_question_about_a_model_that_is_just_leaving_does_not_load_it_again() -> None:
    engine = Router()
    async with in_front_of(engine, "sea") as adapter:
        # It goes between the list and the question about its slots.
        engine.coming = [("sea", "unloaded")]
        await adapter.probe()
        assert engine.status["sea"] == "unloaded"
        assert adapter.snapshot().engine_in_flight == 0
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-33", "AD-43")
async def test_a_router_tells_what_it_loads_and_where_it_reads_it_again() -> None:
    async with in_front_of(Router(), "sea") as adapter:
        (info,) = adapter.participants()
        assert info.startup_source == DiskSource(path="models/sea.gguf", format=WeightFormat.GGUF)
        (back,) = await adapter.read_back([info.participant_id])
        # The file is not on this machine, so nothing but its name is known of it.
        assert back.weight_version == "sea" == adapter.snapshot().weight_version


@pytest.mark.clause("AD-33", "AD-37")
async def test_a_file_that_was_replaced_is_another_version(tmp_path: Path) -> None:
    engine = Router()
    file = tmp_path / "sea.gguf"
    file.write_bytes(b"one")
    listing = ROUTER["models, nothing loaded"]
    moved = listing.body.replace(b"models/sea.gguf", str(file).encode())
    engine.routes["GET /v1/models"] = Answer(200, moved)
    async with in_front_of(engine, "sea") as adapter:
        before = adapter.snapshot().weight_version
        file.write_bytes(b"another")
        await adapter.probe()
        assert adapter.snapshot().weight_version not in {before, ""}


@pytest.mark.clause("AD-44")
async def test_of_more_models_than_it_keeps_only_what_was_loaded_comes_back() -> None:
    engine = Router()
    async with in_front_of(engine, "sea", "hill") as adapter:
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        assert_all_ok(await do(adapter, RESTORE))
        assert engine.status == {"sea": "loaded", "hill": "unloaded"}


@pytest.mark.clause("AD-43")
async def test_a_model_that_any_request_would_load_again_is_released_only_behind_the_gate() -> None:
    engine = Router()
    async with in_front_of(engine, "sea") as adapter:
        with pytest.raises(PreconditionFailed):
            await do(adapter, RELEASE)
        assert "/models/unload" not in engine.posts()
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        engine.forget()
        assert (await ask(adapter, {"model": "sea"})).error is not None
        assert engine.asked == []


@pytest.mark.clause("AD-44")
async def test_a_model_that_fails_to_load_is_told() -> None:
    engine = Router()
    async with in_front_of(engine, "sea") as adapter:
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        engine.fails_to_load = True
        (outcome,) = (await do(adapter, RESTORE)).participants
        assert outcome.error is not None
        assert "failed to load" in outcome.error.message


@pytest.mark.clause("AD-43")
async def test_weights_are_discarded_or_nothing() -> None:
    async with in_front_of(Router(), "sea") as adapter:
        await do(adapter, PAUSE)
        offload = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.OFFLOAD_TO_HOST)
        with pytest.raises(PreconditionFailed):
            await do(adapter, offload)


@pytest.mark.clause("AD-15")
@pytest.mark.clause("EN-91")
async def test_load_without_slots_comes_from_the_metrics() -> None:
    engine = Single()
    engine.routes["GET /slots"] = BARE["slots with --no-slots"]
    figures = b"# TYPE x gauge\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 5\n"
    engine.routes["GET /metrics"] = Answer(200, figures, "text/plain; version=0.0.4")
    async with in_front_of(engine) as adapter:
        snapshot = adapter.snapshot()
        assert (snapshot.engine_in_flight, snapshot.engine_queued) == (2, 5)
        engine.routes["GET /metrics"] = BARE["metrics not enabled"]
        await adapter.probe()
        snapshot = adapter.snapshot()
        assert (snapshot.engine_in_flight, snapshot.engine_queued) == (None, None)


@pytest.mark.parametrize(
    ("route", "recorded"),
    [
        ("POST /slots/0", "slot erase without --slot-save-path"),
        ("GET /slots", "slots with --no-slots"),
    ],
)
async def test_a_501_means_not_offered_and_is_told_how_to_enable_it(route: str, recorded: str) -> None:
    engine = Single()
    engine.routes[route] = BARE[recorded]
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.FLUSH_CACHES not in info.capabilities.operations
        with pytest.raises(Unsupported, match="--slot-save-path"):
            await do(adapter, FLUSH)


@pytest.mark.clause("AD-40")
async def test_only_slots_that_were_listed_are_erased_since_others_wrap_around() -> None:
    engine = Single()
    async with in_front_of(engine) as adapter:
        result = await do(adapter, FLUSH)
        assert_all_ok(result)
        assert "24 tokens" in result.participants[0].caches[0].detail
        assert {path for path in engine.posts() if path.startswith("/slots/")} == {"/slots/0", "/slots/1"}


@pytest.mark.clause("AD-37", "AD-40")
async def test_a_slot_that_still_holds_tokens_after_its_erasing_is_not_cleared() -> None:
    engine = Single()
    engine.routes["POST /slots/0"] = lambda asked: (
        SINGLE["slot erase"] if asked.query["action"] == "erase" else SINGLE["slot bad action"]
    )
    async with in_front_of(engine) as adapter:
        (outcome,) = (await do(adapter, FLUSH)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED


async def test_an_engine_asleep_is_not_woken_by_looking_at_it() -> None:
    engine = Single()
    async with in_front_of(engine) as adapter:
        (before,) = adapter.participants()
        engine.routes["GET /props"] = Answer.of({"model_alias": "m", "is_sleeping": True})
        engine.forget()
        await adapter.probe()
        assert [each.path for each in engine.asked] == ["/v1/models", "/props"]
        assert tuple(adapter.participants()) == (before,)


async def test_an_engine_that_loads_its_model_is_no_participant_yet() -> None:
    engine = Single()
    engine.routes["GET /props"] = Answer.of(
        {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503
    )
    async with in_front_of(engine) as adapter:
        assert adapter.participants() == ()
