"""A checkpoint directory, looked at before an engine is told of it (AD-32, AD-45). Blocking: run in a thread."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from iop.adapters.gate_control import StepFailed
from iop.admin.enums import AdminErrorCode, WeightFormat
from iop.admin.requests import DiskSource

HEADER_BYTES_MAX: Final = 100 * 1024 * 1024
"""Largest safetensors header, as the format itself bounds it."""

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Element type and shape of each tensor."""


def check(source: DiskSource, current: str) -> Layout:
    """Whether an engine could load this, as far as files tell: a bad path kills some at their next request.

    Args:
        source: what is to be loaded.
        current: directory of what is loaded now, if it can be read here; tensors must be the same.

    Raises:
        StepFailed: SOURCE_UNAVAILABLE or SOURCE_MISMATCH; nothing was touched.
    """
    if source.format is not WeightFormat.SAFETENSORS:
        raise _unavailable("only safetensors checkpoints are loaded")
    directory = Path(source.path)
    if not directory.is_dir():
        raise _unavailable(
            "the path is no directory on this machine; nodes and engines must see the same files"
        )
    if not (directory / "config.json").is_file():
        raise _unavailable("the directory has no config.json")
    for wanted in source.digests:
        _check_digest(directory, wanted.name, wanted.sha256)
    layout = read_layout(directory)
    if not layout:
        raise _unavailable("the directory has no safetensors files")
    if current and Path(current).is_dir():
        _compare(layout, read_layout(Path(current)))
    return layout


def read_layout(directory: Path) -> Layout:
    """Of all safetensors files. Raises StepFailed when one is damaged."""
    layout: Layout = {}
    for path in sorted(directory.glob("*.safetensors")):
        layout.update(_read_header(path))
    return layout


def _read_header(path: Path) -> Layout:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
                raise ValueError("header length")
            header = json.loads(file.read(length))
        layout: Layout = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            _, end = entry["data_offsets"]
            if end > size - 8 - length:
                raise ValueError("cut off")
            layout[name] = (str(entry["dtype"]), tuple(map(int, entry["shape"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _unavailable(f"{path.name} is damaged or cannot be read") from exc
    return layout


def _compare(new: Layout, old: Layout) -> None:
    if not old:
        return
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            raise _mismatch(f"tensor {name!r} is only in one of the old and new checkpoints")
        if new[name][1] != old[name][1]:
            raise _mismatch(f"tensor {name!r} has shape {new[name][1]}, the engine's has {old[name][1]}")


def _check_digest(directory: Path, name: str, expected: bytes) -> None:
    path = directory / name
    if Path(name).name != name or not path.is_file():
        raise _unavailable(f"{name!r} is not a file of the checkpoint")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").digest() != expected:
            raise _mismatch(f"{name!r} has another SHA-256 than was given")


def _unavailable(message: str) -> StepFailed:
    return StepFailed(message, code=AdminErrorCode.SOURCE_UNAVAILABLE, changed=False)


def _mismatch(message: str) -> StepFailed:
    return StepFailed(message, code=AdminErrorCode.SOURCE_MISMATCH, changed=False)
