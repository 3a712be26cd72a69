"""Weights sent along with a request, at stand-ins: made a checkpoint that the engine loads from disk."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engines_steps import PAUSE, do, facing
from replay_engine import ReplayEngine
from safetensors.numpy import load_file, save_file
from sglang_stub import Sglang
from vllm_replay import VllmReplay

from iop.adapters.base import Adapter
from iop.adapters.staged_weights import DIRECTORY_VARIABLE
from iop.admin.enums import (
    AdminErrorCode,
    TensorDtype,
    WeightSourceKind,
)
from iop.admin.requests import InlineTensor, InlineTensorSource, TensorSpec
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    PrepareWeightsStep,
    UndoWeightsStep,
)
from iop.core.errors import Unsupported
from iop.testing.adapter_suite import assert_all_ok

KINDS = pytest.mark.parametrize("kind", ["vllm", "sglang"])


@pytest.fixture
def current(tmp_path: Path) -> Path:
    directory = tmp_path / "current"
    directory.mkdir()
    (directory / "config.json").write_text('{"mine": 1}')
    save_file({"head": np.zeros((2, 2), np.float32)}, directory / "model.safetensors")
    return directory


def engine_at(kind: str, current: Path) -> ReplayEngine:
    if kind == "vllm":
        return VllmReplay(model_root=str(current))
    engine = Sglang()
    engine.path = engine.content = str(current)
    return engine


@contextlib.asynccontextmanager
async def in_front_of(kind: str, engine: ReplayEngine, directory: Path | None) -> AsyncIterator[Adapter]:
    environment = {DIRECTORY_VARIABLE: str(directory)} if directory is not None else {}
    async with facing(kind, engine, environment=environment) as adapter:
        await do(adapter, PAUSE)
        engine.forget()
        yield adapter


def sent(value: float, shape: tuple[int, ...] = (2, 2), name: str = "head") -> InlineTensorSource:
    spec = TensorSpec(name=name, dtype=TensorDtype.FLOAT32, shape=shape)
    return InlineTensorSource(
        tensors=(InlineTensor(spec=spec, data=np.full((2, 2), value, "<f4").tobytes()),)
    )


def loaded(engine: ReplayEngine) -> list[Path]:
    """Directories that the engine was told to load, in order."""
    paths = []
    for each in engine.asked:
        if each.path == "/collective_rpc":
            paths.append(Path(each.body["kwargs"]["weights_path"]))
        elif each.path == "/update_weights_from_disk":
            paths.append(Path(each.body["model_path"]))
    return paths


@KINDS
@pytest.mark.clause("AD-15", "AD-32", "AD-45")
async def test_tensors_sent_along_are_loaded_from_a_checkpoint_made_of_them(
    kind: str, current: Path, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    engine = engine_at(kind, current)
    async with in_front_of(kind, engine, staging) as adapter:
        (info,) = adapter.participants()
        assert WeightSourceKind.INLINE_TENSORS in info.capabilities.weight_sources
        assert TensorDtype.BFLOAT16 in info.capabilities.tensor_dtypes
        prepare = PrepareWeightsStep(model="m", source=sent(1), weight_version="v2")
        assert_all_ok(await do(adapter, prepare))
        assert not loaded(engine)
        assert_all_ok(await do(adapter, ApplyWeightsStep(model="m", source=sent(1), weight_version="v2")))
        (directory,) = loaded(engine)
        assert (load_file(directory / "model.safetensors")["head"] == 1).all()
        assert (directory / "config.json").read_text() == '{"mine": 1}'
        assert_all_ok(await do(adapter, CommitWeightsStep(model="m", weight_version="v2")))
        second = ApplyWeightsStep(model="m", source=sent(2), weight_version="v3")
        assert_all_ok(await do(adapter, second, "op-2"))
        undo = UndoWeightsStep(model="m", previous_source=sent(1), previous_weight_version="v2")
        await do(adapter, undo, "op-2")
        assert (load_file(loaded(engine)[-1] / "model.safetensors")["head"] == 1).all()
        assert_all_ok(await do(adapter, CommitWeightsStep(model="m", weight_version="v2"), "op-3"))
        kept = [path for path in staging.glob("*/*") if path.is_dir()]
        assert kept == [loaded(engine)[-1]], "what is not loaded is removed"


@KINDS
@pytest.mark.clause("AD-45")
async def test_tensors_that_are_not_the_models_are_refused_before_the_engine_is_told(
    kind: str, current: Path, tmp_path: Path
) -> None:
    engine = engine_at(kind, current)
    async with in_front_of(kind, engine, tmp_path) as adapter:
        for source in (sent(1, name="tail"), sent(1, shape=(4, 1)), sent(1, shape=(3, 3))):
            step = PrepareWeightsStep(model="m", source=source, weight_version="v2")
            (outcome,) = (await do(adapter, step)).participants
            assert outcome.error is not None
            assert outcome.error.code is AdminErrorCode.SOURCE_MISMATCH
            assert not outcome.changed
        assert engine.posts() == []


@KINDS
@pytest.mark.clause("AD-15", "AD-45")
async def test_without_a_directory_tensors_are_not_taken(kind: str, current: Path) -> None:
    engine = engine_at(kind, current)
    async with in_front_of(kind, engine, None) as adapter:
        (info,) = adapter.participants()
        assert WeightSourceKind.INLINE_TENSORS not in info.capabilities.weight_sources
        with pytest.raises(Unsupported):
            await do(adapter, PrepareWeightsStep(model="m", source=sent(1), weight_version="v2"))
