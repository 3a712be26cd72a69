"""Profiles of SGLang and TensorRT-LLM, at stand-ins, in a directory that the Node names."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from engines_steps import do, facing
from replay_engine import Answer, Asked, ReplayEngine
from sglang_stub import Sglang

from iop.adapters.base import Adapter
from iop.adapters.engine_profiles import DIRECTORY_VARIABLE, prefix_of
from iop.admin.enums import AdminErrorCode, AdminOperationKind, ProfilerKind
from iop.admin.steps import StartProfileStep, StopProfileStep
from iop.core.errors import Unsupported
from iop.testing.adapter_suite import (
    TunnelRecorder,
    assert_all_ok,
    tunnel_request,
)

START = StartProfileStep(profile_id="p-1", kinds=(ProfilerKind.CPU, ProfilerKind.GPU), max_steps=3)
STOP = StopProfileStep(profile_id="p-1")
PROFILES = {AdminOperationKind.START_PROFILE, AdminOperationKind.STOP_PROFILE}


class Trtllm(ReplayEngine):
    """Writes names of its own choice into the directory that it is given."""

    def __init__(self) -> None:
        super().__init__(unknown=Answer(404, b'{"detail":"Not Found"}'))
        self.directory: Path | None = None
        self.routes = {
            "GET /health": Answer(200, b""),
            "GET /version": Answer.of({"version": "1.4.0"}),
            "GET /v1/models": Answer.of({"data": [{"id": "m"}]}),
            "GET /start_profile": Answer(405, b'{"detail":"Method Not Allowed"}'),
            "POST /start_profile": self._start,
            "POST /stop_profile": self._stop,
        }

    def _start(self, asked: Asked) -> Answer:
        if self.directory is not None:
            return Answer.of({"success": False, "message": "Profiling is active"}, 409)
        self.directory = Path(asked.body["output_dir"])
        return Answer.of({"message": "Profiling started"})

    def _stop(self, _: Asked) -> Answer:
        if self.directory is None:
            return Answer.of({"error": "Profiling is not active"}, 500)
        (self.directory / "trace-0.json").write_bytes(b"trace")
        self.directory = None
        return Answer.of({"message": "Profiling stopped"})


def in_front_of(
    kind: str, engine: ReplayEngine, directory: Path | None
) -> AbstractAsyncContextManager[Adapter]:
    environment = {DIRECTORY_VARIABLE: str(directory)} if directory is not None else {}
    return facing(kind, engine, environment=environment)


def engine_of(kind: str) -> ReplayEngine:
    return Sglang() if kind == "sglang" else Trtllm()


async def fetched(adapter: Adapter, uri: str) -> bytes:
    tunnel = TunnelRecorder(tunnel_request(), window_bytes=1 << 20)
    adapter.open_artifact(uri, tunnel, tunnel.on_done)
    await tunnel.finished()
    return bytes(tunnel.received) if tunnel.error is None else b"refused"


@pytest.mark.clause("AD-46")
@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
async def test_a_profile_is_started_stopped_listed_and_fetched(kind: str, tmp_path: Path) -> None:
    engine = engine_of(kind)
    async with in_front_of(kind, engine, tmp_path) as adapter:
        assert_all_ok(await do(adapter, START))
        asked = next(each.body for each in engine.asked if str(each) == "POST /start_profile")
        assert asked["activities"] == ["CPU", "GPU"]
        assert asked["num_steps"] == 3
        assert prefix_of("p-1") in json.dumps(asked)
        (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
        assert back.profiles == {"p-1"}
        second = StartProfileStep(profile_id="p-2", kinds=(ProfilerKind.CPU,))
        (refused,) = (await do(adapter, second)).participants
        assert refused.error is not None
        assert refused.error.code is AdminErrorCode.REFUSED_BUSY
        result = await do(adapter, STOP)
        assert_all_ok(result)
        artifacts = result.participants[0].artifacts
        assert len(artifacts) == (2 if kind == "sglang" else 1)
        assert (await fetched(adapter, artifacts[0].uri)).startswith(b"trace")
        again = await do(adapter, STOP)
        assert again.participants[0].artifacts == artifacts


@pytest.mark.clause("AD-46")
@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
async def test_one_that_stopped_by_itself_is_a_success_by_its_files_only(kind: str, tmp_path: Path) -> None:
    engine = engine_of(kind)
    async with in_front_of(kind, engine, tmp_path) as adapter:
        assert_all_ok(await do(adapter, START))
        stop = engine.routes["POST /stop_profile"]
        assert callable(stop)
        stop(Asked("POST", "/stop_profile", {}, None))
        assert_all_ok(await do(adapter, STOP))
        (unknown,) = (await do(adapter, StopProfileStep(profile_id="another"))).participants
        assert unknown.error is not None


@pytest.mark.clause("AD-37", "AD-46")
async def test_a_profile_that_left_no_file_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iop.adapters.engine_profiles.SETTLE_TIMEOUT_S", 0.2)
    engine = Sglang()
    engine.routes["POST /stop_profile"] = Answer(200, b"Stop profiling.", "text/plain")
    async with in_front_of("sglang", engine, tmp_path) as adapter:
        await do(adapter, START)
        (outcome,) = (await do(adapter, STOP)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-15", "AD-46")
async def test_an_older_tensorrt_llm_without_profile_routes_does_not_offer_them(tmp_path: Path) -> None:
    engine = Trtllm()
    del engine.routes["GET /start_profile"]
    async with in_front_of("trtllm", engine, tmp_path) as adapter:
        (info,) = adapter.participants()
        assert AdminOperationKind.START_PROFILE not in info.capabilities.operations
        assert "a newer one" in adapter.capabilities.admin_refusal


@pytest.mark.clause("AD-15", "AD-46")
@pytest.mark.parametrize("kind", ["sglang", "trtllm"])
async def test_without_a_directory_profiles_are_not_offered_and_the_way_is_told(kind: str) -> None:
    async with in_front_of(kind, engine_of(kind), None) as adapter:
        (info,) = adapter.participants()
        assert not PROFILES & info.capabilities.operations
        with pytest.raises(Unsupported, match=DIRECTORY_VARIABLE):
            await do(adapter, START)


@pytest.mark.clause("AD-46")
async def test_only_files_of_profiles_of_ours_are_sent(tmp_path: Path) -> None:
    (tmp_path / "somebody_elses").write_bytes(b"x")
    async with in_front_of("sglang", Sglang(), tmp_path) as adapter:
        await do(adapter, START)
        artifacts = (await do(adapter, STOP)).participants[0].artifacts
        for uri in (
            "sglang-profile:somebody_elses",
            artifacts[0].uri + "/../somebody_elses",
            f"sglang-profile:{prefix_of('p-1')}/../../etc/passwd",
            "file:///etc/passwd",
        ):
            assert await fetched(adapter, uri) == b"refused"


@pytest.mark.clause("AD-37", "AD-46")
async def test_a_place_that_cannot_be_made_or_read_fails_the_step_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / prefix_of("p-1")).write_bytes(b"a file where a directory should be")
    engine = Trtllm()
    async with in_front_of("trtllm", engine, tmp_path) as adapter:
        (outcome,) = (await do(adapter, START)).participants
        assert outcome.error is not None
        assert not outcome.changed
        assert engine.posts() == []
