"""How an engine is set up. Plain data; the composition root fills it from flags and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from iop.core.limits import MIB

__all__ = ["CHECKPOINTS", "EngineSettings", "builtin_checkpoint"]

CHECKPOINTS: Final = ("first", "second")
"""The checkpoints of the one model that come with the package; `second` is the better trained one."""


def builtin_checkpoint(name: str) -> Path:
    """Directory of a checkpoint that comes with the package.

    Args:
        name: one of ``CHECKPOINTS``.
    """
    return Path(__file__).parent / "checkpoints" / name


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Everything an :class:`~iop.engine.engine.Engine` needs to know.

    Attributes:
        checkpoint: directory with ``config.json``, ``tokenizer.json`` and ``model.safetensors``; None: the
            built-in `first`.
        model_id: name the model is served under.
        ranks: processes that share the weights; 1, 2 or 4.
        slots: sequences computed side by side. More share one step and each gets slower.
        waiting_max: requests that may wait for a slot; beyond it callers get ``Overloaded``.
        kv_blocks: blocks of the KV arena; each holds ``kv_block_tokens`` positions of one sequence.
        kv_block_tokens: positions per block; only whole blocks are shared through the prefix cache.
        prefill_chunk_tokens: prompt positions per step; larger delays running streams longer, smaller costs steps.
        pad_weights_to_bytes: inflate each rank's weight arena to at least this (tests of release); 0: as it is.
        step_timeout_s: a rank that has not answered by then is lost and the engine fails closed.
        start_timeout_s: ranks must have loaded their shards by then.
        inline_bytes_max: largest weight update by inline tensors.
        artifacts: directory for profile artifacts and spooled weights; None: a private temporary one.
    """

    checkpoint: Path | None = None
    model_id: str = "iop-tiny"
    ranks: int = 2
    slots: int = 16
    waiting_max: int = 256
    kv_blocks: int = 1024
    kv_block_tokens: int = 16
    prefill_chunk_tokens: int = 64
    pad_weights_to_bytes: int = 0
    step_timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    inline_bytes_max: int = 64 * MIB
    artifacts: Path | None = None
