"""Sources of weights for an update, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from iop.admin.enums import TensorDtype

__all__ = ["DiskWeights", "InlineTensor", "InlineWeights", "WeightSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWeights:
    """A checkpoint directory, or one ``.safetensors`` file, that every rank can read.

    ``sha256`` maps file names relative to ``path`` to 64 hex digits; each given one is checked before anything changes.
    """

    path: Path
    sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineTensor:
    """One tensor in memory: little-endian, row-major. ``sha256`` is 32 bytes, or empty for unchecked."""

    name: str
    dtype: TensorDtype
    shape: tuple[int, ...]
    data: bytes
    sha256: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineWeights:
    """Tensors carried by the request itself; those not named keep their present values."""

    tensors: tuple[InlineTensor, ...]


WeightSource: TypeAlias = DiskWeights | InlineWeights
