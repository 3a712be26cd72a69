"""llama.cpp in router mode, and what its routes do not say, against recorded answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines_rig import ask, config_of, running
from replay_engine import Answer, Asked, Recordings, ReplayEngine

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
from iop.admin.steps import FlushStep, PauseStep, ReleaseStep, RestoreStep, Step, StepResult
from iop.core.errors import PreconditionFailed, Unsupported
from iop.testing.adapter_suite import assert_all_ok, step_call

ROUTER = Recordings("llamacpp-router")
SINGLE = Recordings("llamacpp-single")
PAUSE = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.QUEUE))
RELEASE = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.DISCARD)
RESTORE = RestoreStep(kinds=(ResourceKind.WEIGHTS,))
FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)


class Router(ReplayEngine):
    """Two models, `tiny-a` loaded; loading and unloading show some questions later, as they really do."""

    def __init__(self) -> None:
        super().__init__(unknown=SINGLE["unknown path"])
        self.status = {"tiny-a": "loaded", "tiny-b": "unloaded"}
        self.coming: list[tuple[str, str]] = []
        self.fails_to_load = False
        self.routes = {
            "GET /health": ROUTER["router health, nothing loaded"],
            "GET /props": ROUTER["router props"],
            "GET /v1/models": self._models,
            "GET /slots": self._slots,
            "POST /slots/0": SINGLE["slot bad action"],
            "POST /models/unload": self._unload,
            "POST /models/load": self._load,
        }

    def _models(self, _: Asked) -> Answer:
        listing = json.loads(ROUTER["models, nothing loaded"].body)
        for model in listing["data"]:
            model["status"]["value"] = self.status[model["id"]]
        if self.coming:
            name, value = self.coming.pop(0)
            self.status[name] = value
        return Answer.of(listing)

    def _slots(self, asked: Asked) -> Answer:
        name = asked.query.get("model")
        if not name:
            return ROUTER["slots without model"]
        if self.status[name] != "loaded":
            if asked.query.get("autoload") == "false":
                return Answer.of({"error": {"code": 400, "message": "model is not loaded"}}, 400)
            self.status[name] = "loaded"
        return ROUTER["slots via router"]

    def _unload(self, asked: Asked) -> Answer:
        name = asked.body["model"]
        if name not in self.status:
            return ROUTER["unload unknown"]
        self.coming = [(name, "loaded"), (name, "unloaded")]
        return ROUTER["unload tiny-b"]

    def _load(self, asked: Asked) -> Answer:
        name = asked.body["model"]
        if self.status[name] == "loading":
            return ROUTER["load twice"]
        self.status[name] = "loading"
        self.coming = [(name, "loading"), (name, "failed" if self.fails_to_load else "loaded")]
        return ROUTER["load tiny-a"]


@contextlib.asynccontextmanager
async def in_front_of(engine: ReplayEngine, *targets: str) -> AsyncIterator[Adapter]:
    async with (
        engine.upstream().serving() as upstream,
        running(config_of("llamacpp", upstream.endpoint, *targets)) as adapter,
    ):
        engine.forget()
        yield adapter


async def do(adapter: Adapter, body: Step) -> StepResult:
    return await adapter.execute_step(step_call(adapter, body), lambda _: None)


async def released(adapter: Adapter) -> frozenset[ResourceKind] | None:
    (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
    return back.released


@pytest.mark.clause("AD-37", "AD-43", "AD-44")
async def test_unload_and_load_are_done_when_the_model_list_says_so() -> None:
    engine = Router()
    async with in_front_of(engine, "tiny-a") as adapter:
        assert_all_ok(await do(adapter, PAUSE))
        assert_all_ok(await do(adapter, RELEASE))
        assert engine.status["tiny-a"] == "unloaded"
        assert await released(adapter) == {ResourceKind.WEIGHTS}
        assert_all_ok(await do(adapter, RELEASE))
        assert engine.posts().count("/models/unload") == 1
        assert_all_ok(await do(adapter, RESTORE))
        assert engine.status["tiny-a"] == "loaded"
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-35", "AD-43")
async def test_a_question_about_a_model_that_is_just_leaving_does_not_load_it_again() -> None:
    engine = Router()
    async with in_front_of(engine, "tiny-a") as adapter:
        # It goes between the list and the question about its slots.
        engine.coming = [("tiny-a", "unloaded")]
        await adapter.probe()
        assert engine.status["tiny-a"] == "unloaded"
        assert adapter.snapshot().engine_in_flight == 0
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-33", "AD-43")
async def test_a_router_tells_what_it_loads_and_where_it_reads_it_again() -> None:
    async with in_front_of(Router(), "tiny-a") as adapter:
        (info,) = adapter.participants()
        assert info.startup_source == DiskSource(path="models/gguf/tiny-a.gguf", format=WeightFormat.GGUF)
        (back,) = await adapter.read_back([info.participant_id])
        # The file is not on this machine, so nothing but its name is known of it.
        assert back.weight_version == "tiny-a" == adapter.snapshot().weight_version


@pytest.mark.clause("AD-33", "AD-37")
async def test_a_file_that_was_replaced_is_another_version(tmp_path: Path) -> None:
    engine = Router()
    file = tmp_path / "tiny-a.gguf"
    file.write_bytes(b"one")
    listing = ROUTER["models, nothing loaded"]
    moved = listing.body.replace(b"models/gguf/tiny-a.gguf", str(file).encode())
    engine.routes["GET /v1/models"] = Answer(200, moved)
    async with in_front_of(engine, "tiny-a") as adapter:
        before = adapter.snapshot().weight_version
        file.write_bytes(b"another")
        await adapter.probe()
        assert adapter.snapshot().weight_version not in {before, ""}


@pytest.mark.clause("AD-44")
async def test_of_more_models_than_it_keeps_only_what_was_loaded_comes_back() -> None:
    engine = Router()
    async with in_front_of(engine, "tiny-a", "tiny-b") as adapter:
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        assert_all_ok(await do(adapter, RESTORE))
        assert engine.status == {"tiny-a": "loaded", "tiny-b": "unloaded"}


@pytest.mark.clause("AD-43")
async def test_a_model_that_any_request_would_load_again_is_released_only_behind_the_gate() -> None:
    engine = Router()
    async with in_front_of(engine, "tiny-a") as adapter:
        with pytest.raises(PreconditionFailed):
            await do(adapter, RELEASE)
        assert "/models/unload" not in engine.posts()
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        engine.forget()
        assert (await ask(adapter, {"model": "tiny-a"})).error is not None
        assert engine.asked == []


@pytest.mark.clause("AD-44")
async def test_a_model_that_fails_to_load_is_told() -> None:
    engine = Router()
    async with in_front_of(engine, "tiny-a") as adapter:
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        engine.fails_to_load = True
        (outcome,) = (await do(adapter, RESTORE)).participants
        assert outcome.error is not None
        assert "failed to load" in outcome.error.message


@pytest.mark.clause("AD-43")
async def test_weights_are_discarded_or_nothing() -> None:
    async with in_front_of(Router(), "tiny-a") as adapter:
        await do(adapter, PAUSE)
        offload = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.OFFLOAD_TO_HOST)
        with pytest.raises(PreconditionFailed):
            await do(adapter, offload)


@pytest.mark.clause("AD-15")
@pytest.mark.parametrize(
    ("route", "recorded"),
    [
        ("POST /slots/0", "slot erase without --slot-save-path"),
        ("GET /slots", "slots with --no-slots"),
    ],
)
async def test_a_501_means_not_offered_and_is_told_how_to_enable_it(route: str, recorded: str) -> None:
    engine = single()
    engine.routes[route] = SINGLE[recorded]
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.FLUSH_CACHES not in info.capabilities.operations
        with pytest.raises(Unsupported, match="--slot-save-path"):
            await do(adapter, FLUSH)


def single() -> ReplayEngine:
    engine = ReplayEngine(unknown=SINGLE["unknown path"])
    slots = [{"id": 0, "is_processing": False}, {"id": 1, "is_processing": False}]
    known = {f"/slots/{slot['id']}": 12 for slot in slots}
    seen: list[str] = []

    def act(asked: Asked) -> Answer:
        if asked.query["action"] != "erase":
            return SINGLE["slot bad action"]
        erased = known[asked.path] if asked.path not in seen else 0
        seen.append(asked.path)
        return Answer.of({"id_slot": int(asked.path[-1]), "n_erased": erased})

    engine.routes = {
        "GET /props": Answer.of({"total_slots": 2, "model_alias": "m", "build_info": "b1"}),
        "GET /slots": Answer.of(slots),
        "GET /metrics": SINGLE["metrics not enabled"],
        "POST /slots/0": act,
        "POST /slots/1": act,
        "POST /completion": Answer.of({"timings": {"cache_n": 0, "prompt_n": 80}}),
    }
    return engine


@pytest.mark.clause("AD-40")
async def test_only_slots_that_were_listed_are_erased_since_others_wrap_around() -> None:
    engine = single()
    async with in_front_of(engine) as adapter:
        result = await do(adapter, FLUSH)
        assert_all_ok(result)
        assert "24 tokens" in result.participants[0].caches[0].detail
        assert {path for path in engine.posts() if path.startswith("/slots/")} == {"/slots/0", "/slots/1"}


@pytest.mark.clause("AD-37", "AD-40")
async def test_a_slot_that_still_holds_tokens_after_its_erasing_is_not_cleared() -> None:
    engine = single()
    engine.routes["POST /slots/0"] = lambda asked: (
        SINGLE["slot erase, no body"] if asked.query["action"] == "erase" else SINGLE["slot bad action"]
    )
    async with in_front_of(engine) as adapter:
        (outcome,) = (await do(adapter, FLUSH)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED


async def test_an_engine_asleep_is_not_woken_by_looking_at_it() -> None:
    engine = single()
    async with in_front_of(engine) as adapter:
        (before,) = adapter.participants()
        engine.routes["GET /props"] = Answer.of({"model_alias": "m", "is_sleeping": True})
        engine.forget()
        await adapter.probe()
        assert [each.path for each in engine.asked] == ["/v1/models", "/props"]
        assert tuple(adapter.participants()) == (before,)


async def test_an_engine_that_loads_its_model_is_no_participant_yet() -> None:
    engine = single()
    engine.routes["GET /props"] = Answer.of(
        {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503
    )
    async with in_front_of(engine) as adapter:
        assert adapter.participants() == ()
