"""Engines that answer wrongly for a moment, say what cannot be, or are another than a moment ago: at stand-ins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines_rig import ask
from engines_steps import PAUSE, do, facing
from replay_engine import Answer, ReplayEngine
from safetensors.numpy import save_file
from sglang_stub import Sglang
from trainer_handles import shared
from vllm_replay import VllmReplay

from iop.adapters.base import Adapter, Health
from iop.admin.enums import AdminOperationKind, ResourceKind
from iop.admin.steps import (
    ApplyWeightsStep,
    ParticipantReadBack,
    ReleaseStep,
    ResumeStep,
    UndoWeightsStep,
)
from iop.wire.messages import StreamErrorCode

Op = AdminOperationKind
NOW = Answer.of({"error": "later"}, 503)
PAGE = Answer(200, b"<html>It works</html>", "text/html")
LONG = "x" * 100_000


def engine_of(kind: str) -> ReplayEngine:
    return VllmReplay(sleep_mode=True) if kind == "vllm" else Sglang()


def operations(adapter: Adapter) -> frozenset[Op]:
    (info,) = adapter.participants()
    return info.capabilities.operations


async def read_back(adapter: Adapter) -> ParticipantReadBack:
    (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
    return back


async def is_refused_as_paused(adapter: Adapter) -> bool:
    error = (await ask(adapter, {})).error
    return error is not None and error.code is StreamErrorCode.BUSY


@pytest.mark.clause("AD-35", "AD-41")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_gate_follows_a_pause_that_somebody_else_begins_and_ends(kind: str) -> None:
    engine = engine_of(kind)
    async with facing(kind, engine) as adapter:
        _pause_by_somebody(engine)
        await adapter.probe()
        assert (await read_back(adapter)).paused
        assert await is_refused_as_paused(adapter)
        _resume_by_somebody(engine)
        await adapter.probe()
        assert not (await read_back(adapter)).paused
        assert not await is_refused_as_paused(adapter)


@pytest.mark.clause("AD-35", "AD-41")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_gate_of_a_pause_of_ours_stays_closed_whoever_resumes_the_engine(kind: str) -> None:
    engine = engine_of(kind)
    async with facing(kind, engine) as adapter:
        await do(adapter, PAUSE)
        _resume_by_somebody(engine)
        await adapter.probe()
        assert await is_refused_as_paused(adapter)
        await do(adapter, ResumeStep())
        assert not await is_refused_as_paused(adapter)


@pytest.mark.clause("AD-42")
async def test_waking_an_engine_that_somebody_else_paused_lets_nothing_in() -> None:
    vllm = VllmReplay(sleep_mode=True)
    async with facing("vllm", vllm) as adapter:
        vllm.is_paused = True
        await do(adapter, ReleaseStep(kinds=(ResourceKind.KV_CACHE,), weight_retention=None))
        vllm.is_paused = False  # as a woken one is for a moment
        await adapter.probe()
        assert await is_refused_as_paused(adapter)


@pytest.mark.clause("AD-15")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("answer", [NOW, PAGE])
async def test_how_it_was_started_is_asked_again_after_an_answer_that_says_nothing(
    kind: str, answer: Answer
) -> None:
    engine = engine_of(kind)
    told, engine.routes["GET /server_info"] = engine.routes["GET /server_info"], answer
    async with facing(kind, engine) as adapter:
        if adapter.participants():
            assert Op.RELEASE_RESOURCES not in operations(adapter)
        engine.routes["GET /server_info"] = told
        await adapter.probe()
        assert Op.RELEASE_RESOURCES in operations(adapter)


@pytest.mark.clause("AD-15")
async def test_a_vllm_that_never_tells_how_it_was_started_is_not_asked_for_ever() -> None:
    vllm = VllmReplay()
    vllm.routes["GET /server_info"] = NOW
    async with facing("vllm", vllm) as adapter:
        for _ in range(6):
            await adapter.probe()
        assert sum(each.path == "/server_info" for each in vllm.asked) == 4
        assert Op.PAUSE in operations(adapter)


@pytest.mark.clause("AD-15", "AD-35")
async def test_an_sglang_that_was_away_is_asked_anew_how_it_was_started() -> None:
    engine = Sglang()
    async with facing("sglang", engine) as adapter:
        assert Op.RELEASE_RESOURCES in operations(adapter)
        kept, engine.routes["GET /model_info"] = engine.routes["GET /model_info"], NOW
        await adapter.probe()
        engine.routes["GET /model_info"] = kept
        engine.routes["GET /server_info"] = Answer.of({"enable_memory_saver": False, "dp_size": 2})
        await adapter.probe()
        assert not {Op.RELEASE_RESOURCES, Op.FLUSH_CACHES} & operations(adapter)
        engine.forget()
        await adapter.probe()
        assert not [each for each in engine.asked if each.path in {"/server_info", "/openapi.json"}]


@pytest.mark.clause("AD-15", "AD-35")
async def test_a_vllm_that_tells_no_start_and_lost_its_routes_is_looked_at_anew() -> None:
    vllm = VllmReplay()
    vllm.start_time = "0e"  # as several servers that share their metrics: no number
    async with facing("vllm", vllm) as adapter:
        assert Op.FLUSH_CACHES in operations(adapter)
        vllm.routes = {route: answer for route, answer in vllm.routes.items() if route != "GET /is_paused"}
        vllm.routes["GET /openapi.json"] = Answer.of({"paths": {"/health": {}, "/v1/models": {}}})
        await adapter.probe()
        await adapter.probe()
        assert operations(adapter) == {Op.PAUSE, Op.RESUME}


@pytest.mark.clause("AD-37", "EN-91")
@pytest.mark.parametrize(
    ("kind", "route", "answer"),
    [
        ("vllm", "GET /metrics", Answer(200, b'vllm:num_requests_running{engine="0"} 1e400\n', "text/plain")),
        ("vllm", "GET /metrics", Answer(200, b"process_start_time_seconds 9e999\n", "text/plain")),
        ("vllm", "GET /version", Answer.of({"version": LONG})),
        ("vllm", "GET /weight_info", Answer.of({"weight_version": LONG})),
        ("vllm", "GET /v1/models", Answer.of({"data": [{"id": f"m{n}"} for n in range(5000)]})),
        ("sglang", "GET /v1/loads", Answer.of({"loads": [{"num_running_reqs": 10**23}]})),
        ("sglang", "GET /v1/loads", Answer.of({"loads": [{"num_running_reqs": -1}]})),
        ("sglang", "GET /v1/loads", Answer.of({"loads": [{"num_running_reqs": 1.0}]})),
        ("sglang", "GET /server_info", Answer.of({"dp_size": -(10**30)})),
        ("sglang", "GET /model_info", Answer.of({"served_model_name": LONG})),
        ("trtllm", "GET /version", Answer.of({"version": LONG})),
        ("trtllm", "GET /version", Answer(200, b'{"version":' + b"[" * 50_000)),
        ("llamacpp", "GET /props", Answer.of({"build_info": LONG})),
    ],
)
async def test_nonsense_ends_no_adapter_and_goes_no_further(kind: str, route: str, answer: Answer) -> None:
    engine = engine_of(kind) if kind in {"vllm", "sglang"} else ReplayEngine(unknown=Answer.of({}))
    engine.routes[route] = answer
    async with facing(kind, engine) as adapter:
        await adapter.probe()
        assert len(repr(adapter.participants())) < 20_000
        assert len(repr(adapter.snapshot())) < 100_000
        assert adapter.snapshot().health in Health


@pytest.mark.clause("AD-37")
@pytest.mark.parametrize("files", [["a\0b"], ["m.gguf", "/models/n.gguf"], ["/models/m.gguf", ""]])
async def test_a_router_whose_files_have_no_path_is_looked_at_all_the_same(files: list[str]) -> None:
    engine = ReplayEngine(unknown=Answer(404, b""))
    loaded = [{"value": "unloaded", "args": ["-m", file]} for file in files]
    listing = [{"id": f"m{number}", "status": status} for number, status in enumerate(loaded)]
    engine.routes = {
        "GET /props": Answer.of({"role": "router"}),
        "GET /v1/models": Answer.of({"data": listing}),
    }
    async with facing("llamacpp", engine) as adapter:
        (info,) = adapter.participants()
        assert info.models == tuple(f"m{number}" for number in range(len(files)))
        assert (await read_back(adapter)).reachable


@pytest.mark.clause("AD-47")
async def test_a_size_that_no_server_has_is_none() -> None:
    vllm = VllmReplay(data_parallel_max=10**30)
    vllm.ranks, vllm.data_parallel = 10**20, 10**20
    async with facing("vllm", vllm) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.data_parallel_size_max == 1
        assert (await read_back(adapter)).serving == ()


@pytest.mark.clause("AD-32", "AD-45")
async def test_a_trainer_that_is_gone_before_it_begins_costs_no_way_back(tmp_path: Path) -> None:
    save_file({"head": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    vllm = VllmReplay(transfer="ipc", model_root=str(tmp_path))
    vllm.routes["POST /weight_checker"] = Answer(404, b"")
    begins = vllm.routes["POST /init_weight_transfer_engine"]
    apply = ApplyWeightsStep(model="m", source=shared("head", "one device"), weight_version="v2")
    undo = UndoWeightsStep(model="m", previous_source=None, previous_weight_version="v1")
    async with facing("vllm", vllm) as adapter:
        await do(adapter, PAUSE)
        vllm.routes["POST /init_weight_transfer_engine"] = Answer.of({"error": "no peer"}, 500)
        (outcome,) = (await do(adapter, apply)).participants
        assert outcome.error is not None
        assert not outcome.changed
        vllm.routes["POST /init_weight_transfer_engine"] = begins
        vllm.routes["POST /update_weights"] = Answer.of({"error": "invalid resource handle"}, 500)
        await do(adapter, apply, "op-2")
        (outcome,) = (await do(adapter, undo, "op-2")).participants
        assert outcome.error is None
        assert "/collective_rpc" in vllm.posts(), "what it started with is read again"


@pytest.mark.clause("AD-32", "AD-45")
@pytest.mark.parametrize("is_ours", [True, False])
async def test_an_update_of_sglang_that_broke_off_does_not_stand_in_the_way_of_the_next(
    is_ours: bool,
) -> None:
    sglang = Sglang()
    takes = sglang.routes["POST /update_weights_from_tensor"]
    apply = ApplyWeightsStep(model="m", source=shared("head", "one device"), weight_version="v2")
    async with facing("sglang", sglang) as adapter:
        await do(adapter, PAUSE)
        if is_ours:
            sglang.routes["POST /update_weights_from_tensor"] = Answer.of(
                {"success": False, "message": "invalid resource handle"}, 400
            )
            (outcome,) = (await do(adapter, apply)).participants
            assert outcome.error is not None
            assert outcome.changed
            assert not sglang.is_open
        else:
            sglang.is_open = True
        sglang.routes["POST /update_weights_from_tensor"] = takes
        (outcome,) = (await do(adapter, apply, "op-2")).participants
        assert outcome.error is None
        assert not sglang.is_open


@pytest.mark.clause("SF-01")
async def test_what_an_engine_offers_is_asked_anew_after_a_refused_connection_or_a_failing_list() -> None:
    engine = ReplayEngine(unknown=Answer(405, b""))
    engine.routes["GET /v1/models"] = Answer.of({"data": [{"id": "m"}]})
    async with facing("openai_compat", engine) as adapter:
        engine.routes["GET /v1/models"] = NOW
        await adapter.probe()
        assert adapter.snapshot().health is Health.NOT_READY
        engine.routes["GET /v1/models"] = Answer.of({"data": [{"id": "m"}]})
        engine.routes["GET /v1/embeddings"] = Answer(404, b"")
        await adapter.probe()
        assert "embeddings" in adapter.snapshot().absent_operations
        engine.forget()
        await adapter.probe()
        assert [each.path for each in engine.asked] == ["/v1/models"], "at rest it is one question"


def _pause_by_somebody(engine: ReplayEngine) -> None:
    if isinstance(engine, VllmReplay):
        engine.is_paused = True
    elif isinstance(engine, Sglang):
        engine.mode = "in_place"


def _resume_by_somebody(engine: ReplayEngine) -> None:
    if isinstance(engine, VllmReplay):
        engine.is_paused = False
    elif isinstance(engine, Sglang):
        engine.mode = ""
