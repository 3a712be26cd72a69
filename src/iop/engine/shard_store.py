"""A rank's weights over their life: loaded, staged beside each other, swapped, put back, released, restored.

Three places hold at most one shard each: *live* computes, *staged* waits to be applied, *previous* waits to be put
back or dropped. An apply or undo only moves shards between places, so what comes back is the very memory that was
there before.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from iop.admin.enums import WeightRetention
from iop.core.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed
from iop.engine.arena import Arena, resident_bytes
from iop.engine.checkpoint import ModelConfig, TensorFile, fill_shard, shard_specs, tensor_shapes
from iop.engine.exact import F32

__all__ = ["ShardStore"]


@dataclass(slots=True, kw_only=True)
class _Held:
    """One shard: in memory (``arena``), in a host file (``host_fd``), or nowhere but in its source."""

    arena: Arena | None
    digest: str
    version: str
    source: Path
    retention: WeightRetention | None = None
    host_fd: int = -1

    def drop(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self.host_fd >= 0:
            os.close(self.host_fd)
            self.host_fd = -1


class ShardStore:
    """The weights of one rank. Blocking; every method leaves a state that ``digest`` can prove."""

    def __init__(self, config: ModelConfig, *, rank: int, ranks: int, pad_to_bytes: int) -> None:
        self._config = config
        self._rank, self._ranks = rank, ranks
        self._pad = pad_to_bytes
        self._number = 0
        self._live: _Held | None = None
        self._staged: _Held | None = None
        self._previous: _Held | None = None
        self._update_id = ""

    @property
    def live(self) -> _Held:
        """The shard in use."""
        assert self._live is not None, "weights are loaded before anything else"
        return self._live

    @property
    def version(self) -> str:
        """Label of the last committed weights; an update that is not committed does not show (AD-38)."""
        return (self._previous or self.live).version

    def arrays(self) -> dict[str, F32]:
        """The arrays to compute with. Raises PreconditionFailed when they are released."""
        if self.live.arena is None:
            raise PreconditionFailed(
                "The weights are released; restore them first.", reason="RESOURCES_RELEASED"
            )
        return self.live.arena.arrays

    def load(self, source: Path, version: str) -> str:
        """Load the first weights. Returns their digest."""
        self._live = self._read(source, version)
        return self._live.digest

    def digest_now(self) -> str:
        """SHA-256 over the memory in use, computed now; "" when released."""
        return "" if self.live.arena is None else self.live.arena.digest()

    def resident(self) -> int:
        """Resident bytes of the shard in use."""
        return 0 if self.live.arena is None else resident_bytes(self.live.arena.name)

    def release(self, retention: WeightRetention) -> int:
        """Unmap the shard in use; returns the bytes that the kernel says are gone. 0 when already released."""
        live = self.live
        if self._staged is not None or self._previous is not None:
            raise PreconditionFailed(
                "A weight update is not settled; commit or undo it first.", reason="UPDATE_PENDING"
            )
        if live.arena is None:
            return 0
        if retention is WeightRetention.DISCARD:
            self._check_reloadable(live)
        else:
            live.host_fd = _host_file()
            live.arena.write_to(live.host_fd)
        name = live.arena.name
        before = resident_bytes(name)
        live.arena.close()
        live.arena, live.retention = None, retention
        return before - resident_bytes(name)

    def _check_reloadable(self, live: _Held) -> None:
        """Prove that the source still gives these weights, before they are thrown away."""
        try:
            again = self._read(live.source, live.version)
        except (NotFound, InvalidRequest) as exc:
            raise PreconditionFailed(
                "The weights' source is gone; they could not be reloaded.", reason="IRREVERSIBLE"
            ) from exc
        same = again.digest == live.digest
        again.drop()
        if not same:
            raise PreconditionFailed(
                "The weights' source has changed; they could not be reloaded.", reason="IRREVERSIBLE"
            )

    def restore(self) -> int:
        """Map the shard again, from the host copy or the source, and verify it; returns its resident bytes."""
        live = self.live
        if live.arena is not None:
            return 0
        if live.host_fd >= 0:
            arena = self._arena()
            arena.read_from(live.host_fd)
            digest = arena.digest()
        else:
            again = self._read(live.source, live.version)
            assert again.arena is not None
            arena, digest = again.arena, again.digest
        if digest != live.digest:
            arena.close()
            raise PreconditionFailed(
                "The restored weights differ from the released ones.", reason="VERIFICATION_FAILED"
            )
        if live.host_fd >= 0:
            os.close(live.host_fd)
            live.host_fd = -1
        live.arena, live.retention = arena, None
        return resident_bytes(arena.name)

    def prepare(self, update_id: str, source: Path, version: str) -> str:
        """Load new weights beside the ones in use. Returns their digest."""
        if self._update_id == update_id and (self._staged or self._previous):
            return (self._staged or self.live).digest
        if self._staged is not None or self._previous is not None:
            raise Conflict(
                "Another weight update is not settled; commit or undo it first.", reason="UPDATE_PENDING"
            )
        self._staged = self._read(source, version)
        self._update_id = update_id
        return self._staged.digest

    def loaded(self, update_id: str) -> int:
        """Bytes of the shard that this update loaded."""
        self._require(update_id)
        held = self._staged or self.live
        return 0 if held.arena is None else held.arena.used

    def apply(self, update_id: str) -> str:
        """Swap the staged shard in; idempotent. Returns the digest now in use."""
        self._require(update_id)
        if self._staged is not None:
            self._previous, self._live, self._staged = self._live, self._staged, None
        return self.live.digest

    def verify(self, update_id: str) -> str:
        """Recompute the digest of the memory in use. Raises PreconditionFailed when it is not the prepared one."""
        self._require(update_id)
        now = self.digest_now()
        if self._previous is None or now != self.live.digest:
            raise PreconditionFailed(
                "The weights in use are not the prepared ones.", reason="VERIFICATION_FAILED"
            )
        return now

    def undo(self, update_id: str) -> str:
        """Put the previous shard back and drop the new one; verified. A no-op for another or a settled update."""
        if self._update_id == update_id:
            if self._previous is not None:
                self.live.drop()
                self._live, self._previous = self._previous, None
            if self._staged is not None:
                self._staged.drop()
                self._staged = None
            if self.live.arena is not None and self.digest_now() != self.live.digest:
                raise PreconditionFailed(
                    "The weights put back are not the previous ones.", reason="VERIFICATION_FAILED"
                )
            self._update_id = ""
        return self.live.digest

    def commit(self, update_id: str) -> str:
        """Drop the previous shard; there is no way back after this. Idempotent."""
        if self._update_id == update_id and self._staged is not None:
            raise PreconditionFailed("The weight update was not applied.", reason="NOT_APPLIED")
        if self._previous is not None:
            self._require(update_id)
            self._previous.drop()
            self._previous = None
        return self.live.digest

    def _require(self, update_id: str) -> None:
        if self._update_id != update_id:
            raise PreconditionFailed("This weight update was not prepared here.", reason="NOT_PREPARED")

    def _read(self, source: Path, version: str) -> _Held:
        with TensorFile(source) as file:
            file.check(tensor_shapes(self._config))
            arena = self._arena()
            try:
                fill_shard(arena.arrays, file, self._config, rank=self._rank, ranks=self._ranks)
            except InvalidRequest:
                arena.close()
                raise
        return _Held(arena=arena, digest=arena.digest(), version=version, source=source)

    def _arena(self) -> Arena:
        self._number += 1
        return Arena(
            f"iop-weights-{self._number}", shard_specs(self._config, self._ranks), size_min=self._pad
        )


def _host_file() -> int:
    """An unlinked temporary file: host storage that is no memory of this process."""
    fd, path = tempfile.mkstemp(prefix="iop-offload-")
    Path(path).unlink()
    return fd
