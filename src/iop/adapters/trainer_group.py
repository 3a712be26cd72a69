"""Weights that a trainer broadcasts to an engine, looked at before a group is formed (AD-45). Pure.

An engine that joins a group with wrong numbers waits for the others without an end, and a broadcast that breaks off
leaves it with weights that are partly new. So what the numbers and names cannot be is refused first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from iop.adapters.checkpoint import Layout
from iop.adapters.gate_control import StepFailed
from iop.admin.enums import AdminErrorCode, DistributedBackend, TensorDtype
from iop.admin.requests import DistributedSource

BACKENDS: Final = frozenset({DistributedBackend.NCCL})
"""What the engines here join."""

DTYPES: Final[Mapping[TensorDtype, str]] = {
    TensorDtype.FLOAT32: "float32",
    TensorDtype.FLOAT16: "float16",
    TensorDtype.BFLOAT16: "bfloat16",
    TensorDtype.FLOAT8_E4M3: "float8_e4m3fn",
    TensorDtype.FLOAT8_E5M2: "float8_e5m2",
    TensorDtype.INT8: "int8",
    TensorDtype.UINT8: "uint8",
    TensorDtype.INT32: "int32",
    TensorDtype.INT64: "int64",
}
"""As the engines name them."""


def check_group(source: DistributedSource, *, ranks: int, current: Layout) -> None:
    """Whether this engine can be what the group still lacks.

    Args:
        ranks: of the engine.
        current: tensors of the checkpoint that it runs; empty where this machine does not see it.

    Raises:
        StepFailed: SOURCE_MISMATCH, nothing was touched.
    """
    if source.backend not in BACKENDS:
        raise _mismatch(f"the engine joins no {source.backend.name} group")
    if not source.tensors:
        raise _mismatch("no tensors are named")
    if source.rank_offset < 1 or source.rank_offset + ranks != source.world_size:
        # Several engines would all take the same ranks, and none would ever answer.
        raise _mismatch(
            f"the engine has {ranks} ranks, and the group has {source.world_size - source.rank_offset} left from "
            f"{source.rank_offset} on: they must be the same, so one engine is updated by one group"
        )
    for tensor in source.tensors:
        known = current.get(tensor.name)
        if current and known is None:
            raise _mismatch(f"the engine's checkpoint has no tensor {tensor.name!r}")
        if known is not None and known[1] != tensor.shape:
            raise _mismatch(f"tensor {tensor.name!r} has shape {tensor.shape}, the engine's has {known[1]}")


def _mismatch(message: str) -> StepFailed:
    return StepFailed(message, code=AdminErrorCode.SOURCE_MISMATCH, changed=False)
