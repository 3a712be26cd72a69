"""Weights broadcast by a trainer, at stand-ins for vLLM and SGLang: real groups take GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from engines_steps import GROUP, PAUSE, do, facing
from replay_engine import Answer, ReplayEngine
from sglang_stub import Sglang
from vllm_replay import TRANSFER, VllmReplay

from iop.adapters.base import Adapter
from iop.admin.enums import (
    AdminErrorCode,
    DistributedBackend,
    TensorDtype,
    WeightSourceKind,
)
from iop.admin.requests import DistributedSource, IpcSource, TensorSpec
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    PrepareWeightsStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.core.errors import Unsupported
from iop.testing.adapter_suite import assert_all_ok


@contextlib.asynccontextmanager
async def in_front_of(kind: str, engine: ReplayEngine) -> AsyncIterator[Adapter]:
    async with facing(kind, engine) as adapter:
        await do(adapter, PAUSE)
        engine.forget()
        yield adapter


def apply(source: DistributedSource = GROUP) -> ApplyWeightsStep:
    return ApplyWeightsStep(model="m", source=source, weight_version="v2")


@pytest.fixture
def vllm() -> VllmReplay:
    engine = VllmReplay(transfer="nccl")
    engine.ranks = 2
    return engine


@pytest.fixture
def sglang() -> Sglang:
    return Sglang(tp_size=2)


@pytest.mark.clause("AD-15", "AD-38", "AD-45")
async def test_vllm_takes_a_broadcast_in_one_session_and_the_label_comes_last(vllm: VllmReplay) -> None:
    async with in_front_of("vllm", vllm) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.weight_sources == {WeightSourceKind.DISK, WeightSourceKind.DISTRIBUTED}
        assert info.capabilities.distributed_backends == {DistributedBackend.NCCL}
        prepare = PrepareWeightsStep(model="m", source=GROUP, weight_version="v2")
        assert_all_ok(await do(adapter, prepare))
        assert vllm.posts() == []
        assert_all_ok(await do(adapter, apply()))
        assert vllm.received == ["head"]
        asked = {each.path: each.body for each in vllm.asked if each.method == "POST"}
        assert asked["/init_weight_transfer_engine"]["init_info"] == {
            "master_address": "trainer",
            "master_port": 29_500,
            "rank_offset": 1,
            "world_size": 3,
        }
        assert asked["/update_weights"]["update_info"] == {
            "names": ["head"],
            "dtype_names": ["bfloat16"],
            "shapes": [[2, 3]],
        }
        assert vllm.posts()[-5:] == [
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/shutdown_weight_transfer_engine",
        ]
        assert vllm.label == "default"
        assert_all_ok(await do(adapter, VerifyWeightsStep(model="m", weight_version="v2")))
        assert_all_ok(await do(adapter, CommitWeightsStep(model="m", weight_version="v2")))
        assert vllm.label == "v2"


@pytest.mark.clause("AD-32", "AD-45")
async def test_a_broadcast_that_breaks_off_leaves_vllm_changed_and_out_of_the_group(vllm: VllmReplay) -> None:
    vllm.routes["POST /update_weights"] = TRANSFER["update_weights without a group"]
    async with in_front_of("vllm", vllm) as adapter:
        (outcome,) = (await do(adapter, apply())).participants
        assert outcome.error is not None
        assert "partly new" in outcome.error.message
        assert outcome.changed
        assert vllm.group is None


@pytest.mark.clause("AD-45")
async def test_a_group_that_vllm_cannot_join_changes_nothing(vllm: VllmReplay) -> None:
    vllm.routes["POST /init_weight_transfer_engine"] = TRANSFER["init_weight_transfer_engine without ranks"]
    async with in_front_of("vllm", vllm) as adapter:
        (outcome,) = (await do(adapter, apply())).participants
        assert outcome.error is not None
        assert not outcome.changed
        assert "/start_weight_update" not in vllm.posts()


@pytest.mark.clause("AD-15", "AD-32", "AD-38", "AD-45")
async def test_sglang_takes_a_broadcast_between_begin_and_end_and_can_go_back(
    sglang: Sglang,
) -> None:
    async with in_front_of("sglang", sglang) as adapter:
        (info,) = adapter.participants()
        assert WeightSourceKind.DISTRIBUTED in info.capabilities.weight_sources
        assert_all_ok(await do(adapter, apply()))
        assert [path for path in sglang.posts() if path != "/weights_checker"] == [
            "/init_weights_update_group",
            "/begin_weight_update",
            "/update_weights_from_distributed",
            "/end_weight_update",
            "/destroy_weights_update_group",
        ]
        assert sglang.content == "broadcast of ['head']"
        assert sglang.version == "default"
        verified = await do(adapter, VerifyWeightsStep(model="m", weight_version="v2"))
        assert verified.participants[0].content_digest
        undo = UndoWeightsStep(model="m", previous_source=None, previous_weight_version="default")
        assert_all_ok(await do(adapter, undo))
        assert sglang.content == "model-a"


@pytest.mark.clause("AD-45")
async def test_an_older_sglang_without_begin_and_end_takes_a_broadcast_too(sglang: Sglang) -> None:
    sglang.has_bracket = False
    async with in_front_of("sglang", sglang) as adapter:
        assert_all_ok(await do(adapter, apply()))
        assert sglang.group == ""


@pytest.mark.clause("AD-32", "AD-45")
async def test_a_broadcast_that_breaks_off_leaves_sglang_changed_and_out_of_the_group(sglang: Sglang) -> None:
    sglang.broadcast_fails = True
    async with in_front_of("sglang", sglang) as adapter:
        (outcome,) = (await do(adapter, apply())).participants
        assert outcome.error is not None
        assert outcome.changed
        assert sglang.group == ""


@pytest.mark.clause("AD-45")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "wrong",
    [
        # Room for another engine, which would take the same ranks; then none would ever answer.
        {"world_size": 5},
        {"rank_offset": 0, "world_size": 2},
        {"tensors": ()},
        {"backend": DistributedBackend.GLOO},
    ],
)
async def test_a_group_that_would_never_form_is_refused_before_anything_is_sent(
    kind: str, wrong: dict[str, object], vllm: VllmReplay, sglang: Sglang
) -> None:
    engine = vllm if kind == "vllm" else sglang
    async with in_front_of(kind, engine) as adapter:
        source = replace(GROUP, **wrong)  # type: ignore[arg-type]
        prepare = PrepareWeightsStep(model="m", source=source, weight_version="v2")
        for step in (prepare, apply(source)):
            (outcome,) = (await do(adapter, step)).participants
            assert outcome.error is not None
            assert outcome.error.code is AdminErrorCode.SOURCE_MISMATCH
            assert not outcome.changed
        assert engine.posts() == []


@pytest.mark.clause("AD-15", "AD-45")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_what_was_not_started_for_them_refuses_broadcasts_and_handles(kind: str) -> None:
    engine: ReplayEngine = VllmReplay() if kind == "vllm" else Sglang(dp_size=2)
    async with in_front_of(kind, engine) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.weight_sources == {WeightSourceKind.DISK}
        for source in (GROUP, IpcSource(tensors=())):
            with pytest.raises(Unsupported, match=r"a broadcast .* handles"):
                await do(adapter, PrepareWeightsStep(model="m", source=source, weight_version="v2"))
        assert engine.posts() == []


@pytest.mark.clause("AD-45")
async def test_tensors_that_the_engines_checkpoint_does_not_have_are_refused(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"head": np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
    engine = VllmReplay(transfer="nccl", model_root=str(tmp_path))
    engine.ranks = 2
    engine.routes["POST /weight_checker"] = Answer(404, b"")
    other = replace(GROUP, tensors=(TensorSpec(name="tail", dtype=TensorDtype.BFLOAT16, shape=(1,)),))
    async with in_front_of("vllm", engine) as adapter:
        for source in (GROUP, other):
            (outcome,) = (await do(adapter, apply(source))).participants
            assert outcome.error is not None
            assert outcome.error.code is AdminErrorCode.SOURCE_MISMATCH
