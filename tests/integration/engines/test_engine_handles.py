"""Weights behind a trainer's device handles, at stand-ins for vLLM and SGLang: opening one takes a GPU."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engines_steps import PAUSE, do, error_of, facing
from replay_engine import Answer, ReplayEngine
from safetensors.numpy import save_file
from sglang_stub import Sglang
from trainer_handles import shared
from vllm_replay import HANDLES, VllmReplay

from iop.adapters.base import Adapter
from iop.adapters.device_handles import SharedWeights
from iop.admin.enums import AdminErrorCode, AdminOperationKind, WeightSourceKind
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    PrepareWeightsStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.core.errors import PreconditionFailed, Unsupported
from iop.testing.adapter_suite import assert_all_ok

SOURCE = shared("head", "one device")
WRITTEN = SharedWeights.read(SOURCE, ranks=1, current={})
PREPARE = PrepareWeightsStep(model="m", source=SOURCE, weight_version="v2")
APPLY = ApplyWeightsStep(model="m", source=SOURCE, weight_version="v2")
VERIFY = VerifyWeightsStep(model="m", weight_version="v2")
COMMIT = CommitWeightsStep(model="m", weight_version="v2")


@contextlib.asynccontextmanager
async def in_front_of(kind: str, engine: ReplayEngine) -> AsyncIterator[Adapter]:
    async with facing(kind, engine) as adapter:
        await do(adapter, PAUSE)
        engine.forget()
        yield adapter


def sources(adapter: Adapter) -> frozenset[WeightSourceKind]:
    (info,) = adapter.participants()
    return info.capabilities.weight_sources


async def refuses_handles(adapter: Adapter, how: str) -> None:
    """It says how to enable them, before any step and by the step."""
    (info,) = adapter.participants()
    hows = [each.how for each in info.lacking if each.operation is AdminOperationKind.UPDATE_WEIGHTS]
    assert how in hows[0], "for refusals before any step"
    with pytest.raises(Unsupported, match=how):
        await do(adapter, PREPARE)


@pytest.mark.clause("AD-15", "AD-38", "AD-45")
async def test_vllm_takes_handles_in_one_session_and_the_label_comes_last() -> None:
    vllm = VllmReplay(transfer="ipc")
    async with in_front_of("vllm", vllm) as adapter:
        assert sources(adapter) == {WeightSourceKind.DISK, WeightSourceKind.IPC}
        assert_all_ok(await do(adapter, PREPARE))
        assert vllm.posts() == []
        assert_all_ok(await do(adapter, APPLY))
        asked = [(each.path, each.body) for each in vllm.asked if each.method == "POST"][-5:]
        assert asked == [
            ("/init_weight_transfer_engine", {"init_info": {"packed": False}}),
            ("/start_weight_update", None),
            (
                "/update_weights",
                {
                    "update_info": {
                        "names": ["head"],
                        "dtype_names": ["bfloat16"],
                        "shapes": [[2, 3]],
                        "ipc_handles_pickled": base64.b64encode(WRITTEN.by_device()).decode(),
                    }
                },
            ),
            ("/finish_weight_update", {"weight_version": None}),
            ("/shutdown_weight_transfer_engine", None),
        ]
        assert_all_ok(await do(adapter, VERIFY))
        assert vllm.label == "default"
        assert_all_ok(await do(adapter, COMMIT))
        assert vllm.label == "v2"


@pytest.mark.clause("AD-32", "AD-45")
async def test_a_handle_that_vllm_cannot_open_leaves_it_changed_and_out_of_the_session() -> None:
    vllm = VllmReplay(transfer="ipc")
    vllm.routes["POST /update_weights"] = HANDLES["update_weights without a GPU"]
    async with in_front_of("vllm", vllm) as adapter:
        (outcome,) = (await do(adapter, APPLY)).participants
        assert outcome.error is not None
        assert "partly new" in outcome.error.message
        assert "CUDA" in outcome.error.message
        assert outcome.changed
        assert vllm.posts()[-1] == "/shutdown_weight_transfer_engine"


@pytest.mark.clause("AD-32", "AD-45")
@pytest.mark.parametrize("is_first", [True, False])
async def test_only_weights_that_came_from_disk_are_taken_for_readable_again(
    tmp_path: Path, is_first: bool
) -> None:
    save_file({"head": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    vllm = VllmReplay(transfer="ipc", model_root=str(tmp_path))
    # One that tells no checksums, which would show that other weights came back.
    vllm.routes["POST /weight_checker"] = Answer(404, b"")
    undo = UndoWeightsStep(model="m", previous_source=None, previous_weight_version="v2")
    async with in_front_of("vllm", vllm) as adapter:
        if not is_first:
            assert_all_ok(await do(adapter, APPLY))
            assert_all_ok(await do(adapter, COMMIT))
        vllm.routes["POST /update_weights"] = HANDLES["update_weights without a GPU"]
        await do(adapter, APPLY, "op-2")
        vllm.forget()
        if is_first:
            assert_all_ok(await do(adapter, undo, "op-2"))
            assert "/collective_rpc" in vllm.posts()
        else:
            with pytest.raises(PreconditionFailed, match="cannot be read again"):
                await do(adapter, undo, "op-2")
            assert vllm.posts() == []


@pytest.mark.clause("AD-15", "AD-45")
@pytest.mark.parametrize("lacking", ["gpu", "permission", "backend"])
async def test_vllm_does_not_offer_handles_that_it_could_not_take_and_says_how_to_start_it(
    lacking: str,
) -> None:
    vllm = VllmReplay(transfer="nccl" if lacking == "backend" else "ipc")
    if lacking == "gpu":
        vllm.info["vllm_config"]["device_config"]["device"] = "cpu"
    if lacking == "permission":
        vllm.info["vllm_env"]["VLLM_ALLOW_INSECURE_SERIALIZATION"] = False
    async with in_front_of("vllm", vllm) as adapter:
        assert WeightSourceKind.IPC not in sources(adapter)
        await refuses_handles(adapter, "VLLM_ALLOW_INSECURE_SERIALIZATION=1")
        assert vllm.posts() == []


@pytest.mark.clause("AD-05", "AD-45")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("handle", ["code", "two devices", "protocol 2"])
async def test_a_handle_that_is_none_for_this_engine_never_gets_to_it(kind: str, handle: str) -> None:
    engine = VllmReplay(transfer="ipc") if kind == "vllm" else Sglang()
    async with in_front_of(kind, engine) as adapter:
        source = shared("head", handle)
        for step in (
            PrepareWeightsStep(model="m", source=source, weight_version="v2"),
            ApplyWeightsStep(model="m", source=source, weight_version="v2"),
        ):
            error = await error_of(adapter, step)
            assert error.code is AdminErrorCode.SOURCE_MISMATCH
        assert engine.posts() == []


@pytest.mark.clause("AD-15", "AD-32", "AD-38", "AD-45")
async def test_sglang_takes_handles_between_begin_and_end_and_can_go_back() -> None:
    sglang = Sglang()
    async with in_front_of("sglang", sglang) as adapter:
        assert WeightSourceKind.IPC in sources(adapter)
        assert_all_ok(await do(adapter, PREPARE))
        assert sglang.posts() == []
        assert_all_ok(await do(adapter, APPLY))
        asked = [(each.path, each.body) for each in sglang.asked if each.path != "/weights_checker"]
        asked = [each for each in asked if each[1] is not None]
        tensors = base64.b64encode(WRITTEN.named_tensors()).decode()
        assert asked == [
            ("/begin_weight_update", {"selector": "target"}),
            ("/update_weights_from_tensor", {"serialized_named_tensors": [tensors], "flush_cache": False}),
            ("/end_weight_update", {}),
        ]
        assert_all_ok(await do(adapter, VERIFY))
        assert sglang.version == "default"
        undo = UndoWeightsStep(model="m", previous_source=None, previous_weight_version="default")
        assert_all_ok(await do(adapter, undo))
        assert sglang.content == "model-a"


@pytest.mark.clause("AD-32", "AD-45")
async def test_a_handle_that_sglang_cannot_open_leaves_it_changed() -> None:
    sglang = Sglang()
    failed = {"success": False, "message": "Failed to update parameter online: invalid device"}
    sglang.routes["POST /update_weights_from_tensor"] = Answer.of(failed, 400)
    async with in_front_of("sglang", sglang) as adapter:
        (outcome,) = (await do(adapter, APPLY)).participants
        assert outcome.error is not None
        assert "partly new" in outcome.error.message
        assert outcome.changed


@pytest.mark.clause("AD-15", "AD-45")
@pytest.mark.parametrize("told", [{"tp_size": 2}, {"dp_size": 2}, {"device": "cpu"}])
async def test_sglang_of_several_ranks_or_without_a_gpu_does_not_offer_handles(
    told: dict[str, object],
) -> None:
    sglang = Sglang(**told)
    async with in_front_of("sglang", sglang) as adapter:
        assert WeightSourceKind.IPC not in sources(adapter)
        await refuses_handles(adapter, "a single rank")
        assert sglang.posts() == []
