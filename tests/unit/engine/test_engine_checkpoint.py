"""Checkpoints: bounded reading of foreign bytes, and shards that together are the whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iop.core.errors import InvalidRequest, IopError
from iop.engine.checkpoint import (
    TensorFile,
    fill_shard,
    load_config,
    shard_specs,
    tensor_shapes,
    weights_file,
)
from iop.engine.exact import F32
from iop.engine.settings import CHECKPOINTS, builtin_checkpoint

PATH = builtin_checkpoint("first")
CONFIG = load_config(PATH)


def shard(rank: int, ranks: int) -> dict[str, F32]:
    arrays = {key: np.zeros(spec.shape, spec.dtype) for key, spec in shard_specs(CONFIG, ranks).items()}
    with TensorFile(weights_file(PATH)) as file:
        fill_shard(arrays, file, CONFIG, rank=rank, ranks=ranks)
    return arrays


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_all_ranks_are_the_whole_model(ranks: int) -> None:
    (whole,) = [shard(0, 1)]
    parts = [shard(rank, ranks) for rank in range(ranks)]
    for name, axis in (("embed", 0), ("0.o", 0), ("3.down", 0)):
        assert np.array_equal(np.concatenate([part[name] for part in parts], axis=axis), whole[name])
    split = [np.split(part["2.gate_up"], 2, axis=1) for part in parts]
    joined = np.concatenate([gate for gate, _ in split] + [up for _, up in split], axis=1)
    assert np.array_equal(joined, whole["2.gate_up"])


def test_quantised_weights_are_near_the_stored_ones() -> None:
    arrays = shard(0, 1)
    with TensorFile(weights_file(PATH)) as file:
        stored = file.read("layers.1.mlp.down.weight")
    used = arrays["1.down"].reshape(-1, CONFIG.width).T * arrays["1.down.scale"][:, None]
    assert np.abs(used - stored).max() <= 0.51 * arrays["1.down.scale"].max()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_shipped_checkpoints_are_small_and_of_one_model(name: str) -> None:
    folder = builtin_checkpoint(name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    with TensorFile(weights_file(folder)) as file:
        file.check(tensor_shapes(CONFIG))
    assert (folder / "tokenizer.json").read_bytes() == (PATH / "tokenizer.json").read_bytes()
    assert load_config(folder).weight_version == name


@given(st.binary(max_size=200), st.integers(0, 300))
def test_mutated_headers_give_typed_errors_or_a_sound_file(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("noise") / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + noise)
    try:
        with TensorFile(path) as file, pytest.raises(InvalidRequest):
            file.check(tensor_shapes(CONFIG))
    except IopError:
        pass


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**30]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        [],
        None,
    ],
)
def test_entries_that_do_not_fit_the_file_are_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(InvalidRequest):
        TensorFile(path)
