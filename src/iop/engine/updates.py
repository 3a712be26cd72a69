"""Weight updates in steps: prepare beside, apply by a swap, verify by digest, commit or undo (AD-32).

The steps may be given to all ranks at once or rank by rank; the version is published, and old prefixes are dropped,
when the last rank has committed. Until then the engine does not resume, so no token comes from a mixture of shards
(AD-33).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from iop.admin.enums import CachePolicy, TensorDtype
from iop.core.errors import Conflict, InvalidRequest, PreconditionFailed, Unsupported
from iop.engine.checkpoint import (
    ModelConfig,
    TensorFile,
    file_sha256,
    load_config,
    tensor_shapes,
    weights_file,
)
from iop.engine.exact import F32
from iop.engine.operations import Operations
from iop.engine.ranks import RankGroup
from iop.engine.reports import RankWeights
from iop.engine.runner import Runner
from iop.engine.weights import DiskWeights, InlineTensor, InlineWeights, WeightSource

__all__ = ["Updates", "identity_root"]

_DTYPES: Final[Mapping[TensorDtype, str]] = {
    TensorDtype.FLOAT32: "<f4",
    TensorDtype.FLOAT16: "<f2",
    TensorDtype.BFLOAT16: "<u2",
}
_VERSION_CHARS_MAX: Final = 128
"""Longest version label; it travels in HTTP headers and gRPC metadata."""


@dataclass(slots=True, kw_only=True)
class _Update:
    """The update that is not settled yet."""

    update_id: str
    version: str
    source: Path
    prepared: set[int] = field(default_factory=set)
    applied: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    undone: set[int] = field(default_factory=set)


def identity_root(digests: Collection[str]) -> bytes:
    """Root of the prefix chain under weights with these shard digests."""
    return hashlib.sha256("".join(digests).encode()).digest()[:16]


class Updates:
    """Weight steps of one engine. ``source`` is the file of the committed weights."""

    def __init__(
        self,
        *,
        runner: Runner,
        ranks: RankGroup,
        operations: Operations,
        config: ModelConfig,
        source: Path,
        spool: Path,
        inline_bytes_max: int,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        self._operations = operations
        self._config = config
        self._spool = spool
        self._inline_bytes_max = inline_bytes_max
        self._update: _Update | None = None
        self.source = source

    async def prepare(
        self, update_id: str, *, source: WeightSource, version: str, ranks: Collection[int] | None
    ) -> tuple[RankWeights, ...]:
        """See ``Engine.prepare_weights``."""
        if not (
            version and len(version) <= _VERSION_CHARS_MAX and version.isascii() and version.isprintable()
        ):
            raise InvalidRequest(
                f"`weight_version` must be 1 to {_VERSION_CHARS_MAX} printable ASCII characters.",
                details={"field": "weight_version"},
            )
        async with self._operations.turn:
            update = self._update
            if update is not None and update.update_id != update_id:
                raise Conflict(
                    "Another weight update is not settled; commit or undo it first.", reason="UPDATE_PENDING"
                )
            if update is None:
                path = await asyncio.to_thread(self._locate, update_id, source)
                update = _Update(update_id=update_id, version=version, source=path)
            chosen = self._chosen(ranks)
            self._update, self._operations.unsettled_update = update, update_id
            try:
                answers = await self._ranks.call(
                    "prepare", {"id": update_id, "path": str(update.source), "version": version}, ranks=chosen
                )
            except BaseException:
                if not update.prepared and self._runner.failure is None:
                    await self._ranks.call("undo", {"id": update_id}, ranks=chosen)
                    self._settle()
                raise
            update.prepared.update(chosen)
            told = self._told(chosen, [answer["digest"] for answer in answers], self._runner.weight_version)
            return tuple(
                dataclasses.replace(one, loaded_bytes=answer["bytes"])
                for one, answer in zip(told, answers, strict=True)
            )

    async def apply(self, update_id: str, *, ranks: Collection[int] | None) -> tuple[RankWeights, ...]:
        """See ``Engine.apply_weights``."""
        async with self._operations.turn:
            update, chosen = self._known(update_id), self._chosen(ranks)
            if self._operations.pause_in_force is None:
                raise PreconditionFailed("Weights are only swapped while paused.", reason="NOT_PAUSED")
            async with self._runner.idle:
                self._operations.swapped_update = update_id
                answers = await self._ranks.call("apply", {"id": update_id}, ranks=chosen)
            update.applied.update(chosen)
            return self._told(chosen, [answer["digest"] for answer in answers], self._runner.weight_version)

    async def verify(self, update_id: str, *, ranks: Collection[int] | None) -> tuple[RankWeights, ...]:
        """See ``Engine.verify_weights``."""
        async with self._operations.turn:
            self._known(update_id)
            chosen = self._chosen(ranks)
            answers = await self._ranks.call("verify", {"id": update_id}, ranks=chosen)
            return self._told(chosen, [answer["digest"] for answer in answers], self._runner.weight_version)

    async def undo(self, update_id: str, *, ranks: Collection[int] | None) -> tuple[RankWeights, ...]:
        """See ``Engine.undo_weights``."""
        async with self._operations.turn:
            chosen = self._chosen(ranks)
            update = self._update
            async with self._runner.idle:
                try:
                    answers = await self._ranks.call("undo", {"id": update_id}, ranks=chosen)
                except asyncio.CancelledError:
                    self._note_undone(update, update_id, chosen)  # the ranks do it all the same
                    raise
            self._note_undone(update, update_id, chosen)
            return self._told(chosen, [answer["digest"] for answer in answers], self._runner.weight_version)

    def _note_undone(self, update: _Update | None, update_id: str, ranks: Collection[int]) -> None:
        if update is None or update.update_id != update_id:
            return
        update.undone.update(ranks)
        update.prepared.difference_update(ranks)
        if not update.prepared:
            self._settle()

    async def commit(
        self, update_id: str, *, cache_policy: CachePolicy, ranks: Collection[int] | None
    ) -> tuple[RankWeights, ...]:
        """See ``Engine.commit_weights``."""
        async with self._operations.turn:
            update, chosen = self._update, self._chosen(ranks)
            if update is not None and update.update_id == update_id:
                if not set(chosen) <= update.applied:
                    raise PreconditionFailed(
                        "The weight update was not applied on every rank.", reason="NOT_APPLIED"
                    )
                if update.undone:
                    raise PreconditionFailed(
                        "The weight update was undone on a rank.", reason="UPDATE_UNDONE"
                    )
            async with self._runner.idle:
                answers = await self._ranks.call("commit", {"id": update_id}, ranks=chosen)
                if update is not None and update.update_id == update_id:
                    update.committed.update(chosen)
                    if len(update.committed) == self._ranks.count:
                        await self._publish(update, cache_policy)
            return self._told(chosen, [answer["digest"] for answer in answers], self._runner.weight_version)

    async def _publish(self, update: _Update, cache_policy: CachePolicy) -> None:
        """Everything is verified and final: drop what was computed under the old weights, then show the label."""
        states = await self._operations.read_back()
        scheduler = self._runner.scheduler
        if cache_policy is not CachePolicy.KEEP:
            scheduler.root = identity_root([state.weight_digest for state in states])
            scheduler.forget_prefixes()
            await self._ranks.call("zero", {"blocks": scheduler.pool.free_blocks()})
        self.source = update.source
        # Applying new weights also brings released ones back (AD-45).
        self._operations.weights_are_back()
        self._runner.weight_version = update.version
        self._settle()

    def _settle(self) -> None:
        self._update = None
        self._operations.unsettled_update = self._operations.swapped_update = ""

    def _known(self, update_id: str) -> _Update:
        if self._update is None or self._update.update_id != update_id:
            raise PreconditionFailed("This weight update was not prepared here.", reason="NOT_PREPARED")
        return self._update

    def _chosen(self, ranks: Collection[int] | None) -> list[int]:
        chosen = list(range(self._ranks.count)) if ranks is None else sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self._ranks.count:
            raise InvalidRequest(
                f"`ranks` must be from 0 to {self._ranks.count - 1}.", details={"field": "ranks"}
            )
        return chosen

    @staticmethod
    def _told(ranks: list[int], digests: list[str], version: str) -> tuple[RankWeights, ...]:
        pairs = zip(ranks, digests, strict=True)
        return tuple(RankWeights(rank=rank, digest=digest, version=version) for rank, digest in pairs)

    def _locate(self, update_id: str, source: WeightSource) -> Path:
        if isinstance(source, DiskWeights):
            return self._check_disk(source)
        return self._spool_inline(update_id, source)

    def _check_disk(self, source: DiskWeights) -> Path:
        path = weights_file(source.path)
        folder = path.parent
        for name, wanted in source.sha256.items():
            file = folder / name
            if Path(name).name != name:
                raise InvalidRequest(
                    "`digests` must name files directly in the source.", details={"field": "digests"}
                )
            if file_sha256(file) != wanted.lower():
                raise InvalidRequest(f"The SHA-256 of {name!r} is another one.", reason="SOURCE_MISMATCH")
        if path is not source.path and _is_there(folder / "config.json"):
            self._check_geometry(load_config(folder))
        with TensorFile(path) as file_of_tensors:
            file_of_tensors.check(tensor_shapes(self._config))
        return path

    def _check_geometry(self, other: ModelConfig) -> None:
        for name in ModelConfig.__slots__:
            if name != "weight_version" and getattr(other, name) != getattr(self._config, name):
                raise InvalidRequest(
                    f"The checkpoint has another `{name}` than this model.", reason="SOURCE_MISMATCH"
                )

    def _spool_inline(self, update_id: str, source: InlineWeights) -> Path:
        """Write a whole checkpoint file: the committed one with the given tensors in place."""
        shapes = tensor_shapes(self._config)
        given: dict[str, F32] = {}
        if sum(len(tensor.data) for tensor in source.tensors) > self._inline_bytes_max:
            raise InvalidRequest(
                f"Inline tensors must have at most {self._inline_bytes_max} bytes.", reason="INLINE_TOO_LARGE"
            )
        for tensor in source.tensors:
            if tensor.name in given or shapes.get(tensor.name) != tensor.shape:
                raise InvalidRequest(
                    f"The tensor {tensor.name[:80]!r} is unknown, repeated or of another shape.",
                    reason="SOURCE_MISMATCH",
                )
            given[tensor.name] = _decode(tensor)
        if not given:
            raise InvalidRequest(
                "`inline_tensors` must hold at least one tensor.", details={"field": "inline_tensors"}
            )
        self._spool.mkdir(parents=True, exist_ok=True)
        path = self._spool / f"update-{hashlib.sha256(update_id.encode()).hexdigest()[:24]}.safetensors"
        with TensorFile(self.source) as committed:
            committed.check(shapes)
            _write(path, {name: given[name] if name in given else committed.read(name) for name in shapes})
        return path


def _is_there(path: Path) -> bool:
    """Whether it can be seen to be there; a folder that cannot be looked into has nothing, as have names too long."""
    try:
        return path.exists()
    except OSError:
        return False


def _decode(tensor: InlineTensor) -> F32:
    kind = _DTYPES.get(tensor.dtype)
    if kind is None:
        raise Unsupported("Inline tensors must be float32, float16 or bfloat16.", reason="DTYPE_UNSUPPORTED")
    if len(tensor.data) != math.prod(tensor.shape) * np.dtype(kind).itemsize:
        raise InvalidRequest(
            f"The tensor {tensor.name!r} does not have the bytes of its shape.", reason="SOURCE_MISMATCH"
        )
    if tensor.sha256 and hashlib.sha256(tensor.data).digest() != tensor.sha256:
        raise InvalidRequest(
            f"The SHA-256 of the tensor {tensor.name!r} is another one.", reason="SOURCE_MISMATCH"
        )
    raw = np.frombuffer(tensor.data, dtype=kind)
    if tensor.dtype is TensorDtype.BFLOAT16:
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return raw.astype(np.float32).reshape(tensor.shape)


def _write(path: Path, tensors: Mapping[str, F32]) -> None:
    """A safetensors file of float32 tensors, written whole or not at all."""
    header: dict[str, object] = {}
    end = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [end, end + values.nbytes],
        }
        end += values.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, dtype="<f4").tobytes())
    part.replace(path)
