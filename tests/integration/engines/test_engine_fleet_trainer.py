"""Edge and Node in front of a stand-in for a vLLM on GPUs: a trainer's memory taken, and its size changed."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
from engines_fleet import EngineFleet
from engines_models import Engine
from safetensors.numpy import save_file
from trainer_handles import shared
from vllm_replay import VllmReplay

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationState,
    AdmissionPolicy,
    CachePolicy,
    PauseMode,
)
from iop.admin.requests import MutationOptions, PauseSpec, UpdateWeightsRequest
from iop.core.errors import PreconditionFailed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SESSION = [
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
]


def update(handle: str, version: str, *, allow_irreversible: bool = False) -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        options=MutationOptions(idempotency_key=uuid.uuid4().hex),
        model="fast",
        source=shared("head", handle),
        weight_version=version,
        cache_policy=CachePolicy.FLUSH,
        quiesce=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE),
        allow_irreversible=allow_irreversible,
    )


@pytest.mark.clause("AD-05", "AD-32", "AD-34", "AD-38", "AD-45", "AD-47")
async def test_a_trainers_handles_and_another_size_go_through_the_edge(tmp_path: Path) -> None:
    current = tmp_path / "current"
    current.mkdir()
    (current / "config.json").write_text("{}")
    save_file({"head": np.zeros((2, 3), np.float32)}, current / "model.safetensors")
    vllm = VllmReplay(transfer="ipc", data_parallel_max=4, model_root=str(current))
    async with (
        vllm.upstream().serving() as upstream,
        EngineFleet(tmp_path / "fleet", "vllm", Engine(endpoint=upstream.endpoint, model="endless")) as fleet,
    ):
        await fleet.open()
        vllm.forget()
        updated = await fleet.operate(update("one device", "v2"))
        assert updated.state is AdminOperationState.SUCCEEDED, updated.error
        assert [path for path in vllm.posts() if path in SESSION] == SESSION
        assert "/reset_prefix_cache" in vllm.posts()
        assert (vllm.label, vllm.is_paused) == ("v2", False)
        vllm.forget()
        # Nobody could read those weights again.
        with pytest.raises(PreconditionFailed) as irreversible:
            await fleet.operate(update("one device", "v3"))
        assert irreversible.value.reason == "IRREVERSIBLE"
        refused = await fleet.operate(update("code", "v3", allow_irreversible=True))
        assert refused.state is AdminOperationState.FAILED
        assert refused.error is not None
        assert refused.error.code is AdminErrorCode.SOURCE_MISMATCH
        assert not set(SESSION) & set(vllm.posts())
        assert vllm.label == "v2"

        place = ("--participant", "n1/main/engine", "--data-parallel-size")
        code, told = await fleet.admin("reconfigure", *place, "4")
        assert code == 0, told
        assert vllm.data_parallel == 4
        code, told = await fleet.admin("reconfigure", *place, "5")
        assert code != 0
        assert "from 1 to 4" in told["stderr"], told
        assert vllm.data_parallel == 4
