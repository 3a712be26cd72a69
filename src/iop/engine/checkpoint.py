"""Reads a checkpoint directory and cuts a rank's shard out of it, quantised for exact arithmetic.

The safetensors header is read by hand: it comes from outside, and its sizes are checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from iop.core.errors import InvalidRequest, NotFound
from iop.engine.arena import ArraySpec
from iop.engine.exact import F32, INNER_MAX, LANES, WEIGHT_LEVELS, quantise

__all__ = [
    "ModelConfig",
    "TensorFile",
    "file_sha256",
    "fill_shard",
    "load_config",
    "shard_specs",
    "tensor_shapes",
    "weights_file",
]

FORMAT: Final = "iop-transformer-1"
CONFIG_BYTES_MAX: Final = 64 * 1024
HEADER_BYTES_MAX: Final = 1024 * 1024
"""A header of this model has a few kilobytes; a larger one is damage or malice."""

_KINDS: Final[Mapping[str, tuple[type, ...]]] = {"str": (str,), "int": (int,), "float": (int, float)}
_DTYPES: Final[Mapping[str, tuple[str, int]]] = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<u2", 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry of the model; two checkpoints fit together when these are equal but for ``weight_version``."""

    weight_version: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    ffn_width: int
    window_tokens: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads


def load_config(folder: Path) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        NotFound: no such directory or file; names the key and the fix.
        InvalidRequest: damaged, or a geometry that the engine cannot compute exactly.
    """
    path = folder / "config.json"
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise InvalidRequest("The checkpoint's config.json is too large.")
        content: Any = json.loads(path.read_bytes())
    except OSError as exc:
        raise NotFound(
            "`checkpoint` names no readable checkpoint; give a directory with config.json, tokenizer.json and"
            " model.safetensors, or leave it out for the built-in one.",
            reason="CHECKPOINT_NOT_FOUND",
        ) from exc
    except ValueError as exc:
        raise InvalidRequest("The checkpoint's config.json is not JSON; copy the checkpoint again.") from exc
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidRequest(f"The checkpoint's config.json must have format {FORMAT}.")
    values: dict[str, Any] = {}
    for entry in fields(ModelConfig):
        value = content.get(entry.name)
        if not isinstance(value, _KINDS[str(entry.type)]) or isinstance(value, bool):
            raise InvalidRequest(f"The checkpoint's config.json needs a sensible `{entry.name}`.")
        if isinstance(value, int | float) and not 0 < value < 2**20:
            raise InvalidRequest(f"The checkpoint's config.json needs a sensible `{entry.name}`.")
        values[entry.name] = value
    config = ModelConfig(**values)
    _check_geometry(config)
    return config


def _check_geometry(config: ModelConfig) -> None:
    if any(size % LANES for size in (config.vocabulary, config.width, config.heads, config.ffn_width)):
        raise InvalidRequest(
            f"The checkpoint's vocabulary, width, heads and ffn_width must be multiples of {LANES}."
        )
    if config.width % config.heads or config.head_width % 2:
        raise InvalidRequest("The checkpoint's width must be heads times an even number.")
    if max(config.width, config.ffn_width // LANES) > INNER_MAX:
        raise InvalidRequest(
            f"The checkpoint's inner dimensions must not exceed {INNER_MAX}; exact sums end there."
        )
    if config.window_tokens > config.context_tokens or config.window_tokens > 2**13 or config.layers > 256:
        raise InvalidRequest("The checkpoint's window must fit the context and 8192 tokens, its layers 256.")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor of the model."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocabulary, config.width),
        "norm.weight": (config.width,),
    }
    for layer in range(config.layers):
        at = f"layers.{layer}."
        shapes[f"{at}attn_norm.weight"] = shapes[f"{at}mlp_norm.weight"] = (config.width,)
        for name in "qkvo":
            shapes[f"{at}attn.{name}.weight"] = (config.width, config.width)
        shapes[f"{at}mlp.gate.weight"] = shapes[f"{at}mlp.up.weight"] = (config.ffn_width, config.width)
        shapes[f"{at}mlp.down.weight"] = (config.width, config.ffn_width)
    return shapes


class TensorFile:
    """One safetensors file, mapped and checked; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open and check the header.

        Raises:
            NotFound: not there or not readable.
            InvalidRequest: not a sound safetensors file.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise NotFound(
                "The weights file is not there or not readable; check the path.", reason="SOURCE_UNAVAILABLE"
            ) from exc
        try:
            size = os.fstat(fd).st_size
            if size < 10:
                raise _damaged("it is too short")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        except OSError as exc:
            raise _damaged("it cannot be mapped") from exc
        finally:
            os.close(fd)
        try:
            self._read_header(size)
        except InvalidRequest:
            self._map.close()
            raise

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._map[:8], "little")
        if length > min(HEADER_BYTES_MAX, size - 8):
            raise _damaged("its header is too long")
        try:
            header: Any = json.loads(self._map[8 : 8 + length])
        except (ValueError, RecursionError) as exc:
            raise _damaged("its header is not JSON") from exc
        if not isinstance(header, dict):
            raise _damaged("its header is not an object")
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                dtype, shape = entry["dtype"], tuple(entry["shape"])
                begin, end = entry["data_offsets"]
            except (TypeError, KeyError, ValueError) as exc:
                raise _damaged(f"its header has no sound entry for {name[:80]!r}") from exc
            sound = all(type(n) is int and 0 <= n < 2**31 for n in (*shape, begin, end)) and len(shape) <= 8
            if not sound or not isinstance(dtype, str) or dtype not in _DTYPES:
                raise _damaged(f"{name[:80]!r} must have dtype {', '.join(_DTYPES)} and a sound shape")
            if end - begin != math.prod(shape) * _DTYPES[dtype][1] or 8 + length + end > size:
                raise _damaged(f"{name[:80]!r} does not have the bytes that its shape needs")
            self._entries[name] = (dtype, shape, 8 + length + begin)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InvalidRequest (SOURCE_MISMATCH) unless exactly these tensors are there with these shapes."""
        missing = sorted(shapes.keys() - self._entries.keys())
        extra = sorted(self._entries.keys() - shapes.keys())
        if missing or extra:
            name, what = (missing[0], "lack") if missing else (extra[0], "have an unknown tensor")
            raise InvalidRequest(f"The weights {what} {name[:80]!r}.", reason="SOURCE_MISMATCH")
        for name, shape in shapes.items():
            if self._entries[name][1] != shape:
                raise InvalidRequest(
                    f"The weights' {name!r} must have shape {list(shape)}.", reason="SOURCE_MISMATCH"
                )

    def read(self, name: str) -> F32:
        """One tensor as float32, a copy."""
        dtype, shape, offset = self._entries[name]
        kind, size = _DTYPES[dtype]
        # Sliced to bytes first: a view would keep the mapping from closing for as long as anybody holds it.
        raw = np.frombuffer(self._map[offset : offset + math.prod(shape) * size], dtype=kind)
        if dtype == "BF16":
            values = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.astype(np.float32)
        if not np.isfinite(values).all():
            raise InvalidRequest(
                f"The weights' {name!r} holds values that are not finite.", reason="SOURCE_MISMATCH"
            )
        return values.reshape(shape)


def weights_file(path: Path) -> Path:
    """The safetensors file that ``path`` means: itself, or ``model.safetensors`` in it."""
    return path if path.suffix == ".safetensors" else path / "model.safetensors"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex digits. Raises NotFound."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise NotFound(
            "A weights file is not there or not readable; check the path.", reason="SOURCE_UNAVAILABLE"
        ) from exc


def shard_specs(config: ModelConfig, ranks: int) -> dict[str, ArraySpec]:
    """Arrays that one of ``ranks`` ranks holds. Integers are kept as float32, which is what products take."""
    width, lanes = config.width, LANES // ranks
    local, ffn = width // ranks, config.ffn_width // ranks

    def array(*shape: int) -> ArraySpec:
        return ArraySpec(shape=shape, dtype="float32")

    specs = {
        "embed": array(config.vocabulary // ranks, width),
        "embed.scale": array(config.vocabulary // ranks, 1),
    }
    for layer in range(config.layers):
        at = f"{layer}."
        specs[at + "attn_norm"] = specs[at + "mlp_norm"] = array(width)
        specs[at + "qkv"], specs[at + "qkv.scale"] = array(width, 3 * local), array(3 * local)
        specs[at + "o"], specs[at + "o.scale"] = array(lanes, width // LANES, width), array(width)
        specs[at + "gate_up"], specs[at + "gate_up.scale"] = array(width, 2 * ffn), array(2 * ffn)
        specs[at + "down"], specs[at + "down.scale"] = (
            array(lanes, config.ffn_width // LANES, width),
            array(width),
        )
    specs["norm"] = array(width)
    return specs


def fill_shard(
    arrays: Mapping[str, F32], file: TensorFile, config: ModelConfig, *, rank: int, ranks: int
) -> None:
    """Cut, quantise and store the shard of ``rank``: weights of 8 bits, one scale per output channel."""

    def part(size: int) -> slice:
        return slice(rank * size // ranks, (rank + 1) * size // ranks)

    def columns(names: tuple[str, ...], size: int, to: str) -> None:
        integers, scale = quantise(
            np.concatenate([file.read(name)[part(size)] for name in names]), WEIGHT_LEVELS
        )
        arrays[to][:] = integers.T
        arrays[to + ".scale"][:] = scale[:, 0]

    def rows(name: str, size: int, to: str) -> None:
        integers, scale = quantise(file.read(name), WEIGHT_LEVELS)
        arrays[to][:] = integers[:, part(size)].T.reshape(arrays[to].shape)
        arrays[to + ".scale"][:] = scale[:, 0]

    integers, scale = quantise(file.read("embed.weight")[part(config.vocabulary)], WEIGHT_LEVELS)
    arrays["embed"][:], arrays["embed.scale"][:] = integers, scale
    for layer in range(config.layers):
        source, at = f"layers.{layer}.", f"{layer}."
        arrays[at + "attn_norm"][:] = file.read(source + "attn_norm.weight")
        arrays[at + "mlp_norm"][:] = file.read(source + "mlp_norm.weight")
        columns(tuple(f"{source}attn.{name}.weight" for name in "qkv"), config.width, at + "qkv")
        rows(source + "attn.o.weight", config.width, at + "o")
        columns((source + "mlp.gate.weight", source + "mlp.up.weight"), config.ffn_width, at + "gate_up")
        rows(source + "mlp.down.weight", config.ffn_width, at + "down")
    arrays["norm"][:] = file.read("norm.weight")


def _damaged(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The weights are no sound safetensors file: {why}; copy the file again.", reason="SOURCE_MISMATCH"
    )
