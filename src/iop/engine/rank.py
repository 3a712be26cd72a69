"""A rank process: holds a shard and its KV, computes steps, obeys administrative orders. Run as ``python -m
iop.engine.rank``.

It lives exactly as long as the engine: the engine's end of the socket closing ends it, also while it waits for another
rank, and the kernel ends it when the engine's process dies. It answers each order once, in order.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from iop.admin.enums import ProfilerKind, WeightRetention
from iop.core.errors import IopError, PreconditionFailed
from iop.engine.arena import Arena, resident_bytes
from iop.engine.checkpoint import load_config
from iop.engine.collective import EngineGoneError, Exchange
from iop.engine.framing import FrameBuffer, FrameError, encode_frame
from iop.engine.model import Shard, StepItem, kv_specs
from iop.engine.rank_profile import RankProfile
from iop.engine.shard_store import ShardStore

__all__ = ["main"]

_PR_SET_PDEATHSIG: Final = 1
_RECEIVE_BYTES: Final = 256 * 1024


class Rank:
    """State of this process; ``orders`` maps each order's name to what does it."""

    def __init__(self, setup: Mapping[str, Any], control: socket.socket) -> None:
        self._setup = setup
        self._rank, self._ranks = int(setup["rank"]), int(setup["ranks"])
        config = load_config(Path(setup["checkpoint"]))
        self._shard = Shard(config, rank=self._rank, ranks=self._ranks, block_tokens=setup["block_tokens"])
        self._kv_specs = kv_specs(
            config, ranks=self._ranks, blocks=setup["blocks"], block_tokens=setup["block_tokens"]
        )
        self._store = ShardStore(
            config, rank=self._rank, ranks=self._ranks, pad_to_bytes=setup["pad_to_bytes"]
        )
        self._store.load(Path(setup["weights"]), setup["version"])
        self._kv: Arena | None = Arena("iop-kv", self._kv_specs)
        self._exchange = Exchange(
            setup["memory_fd"],
            rank=self._rank,
            ranks=self._ranks,
            rows=setup["rows"],
            width=config.width,
            vocabulary=config.vocabulary,
            signals={(pair[0], pair[1]): pair[2] for pair in setup["signals"]},
            alive_fd=control.fileno(),
        )
        self._pause: dict[str, int] | None = None
        self._profile: RankProfile | None = None
        self.orders: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "step": self._step,
            "pause": self._on_pause,
            "resume": self._on_resume,
            "zero": self._zero,
            "state": self._state,
            "release": self._release,
            "restore": self._restore,
            "prepare": lambda order: {
                "digest": self._store.prepare(order["id"], Path(order["path"]), order["version"]),
                "bytes": self._store.loaded(order["id"]),
            },
            "apply": lambda order: {"digest": self._store.apply(order["id"])},
            "verify": lambda order: {"digest": self._store.verify(order["id"])},
            "undo": lambda order: {"digest": self._store.undo(order["id"])},
            "commit": lambda order: {"digest": self._store.commit(order["id"])},
            "start_profile": self._start_profile,
            "stop_profile": self._stop_profile,
        }

    def _step(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if self._pause is not None:
            raise PreconditionFailed("This rank is paused.", reason="PAUSED")
        if self._kv is None:
            raise PreconditionFailed(
                "The KV cache is released; restore it first.", reason="RESOURCES_RELEASED"
            )
        items = [
            StepItem(tokens=tokens, start=start, first_block=first, blocks=blocks, logits_from=logits_from)
            for tokens, start, first, blocks, logits_from in order["items"]
        ]
        rows = self._shard.run(
            items, self._store.arrays(), self._kv.arrays, self._exchange.sum, self._exchange.logits
        )
        return {"rows": rows}

    def _on_pause(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self._pause = {"mode": order["mode"], "admission": order["admission"]}
        return {}

    def _on_resume(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self._pause = None
        return {}

    def _zero(self, order: Mapping[str, Any]) -> dict[str, Any]:
        blocks = np.array(order["blocks"], dtype=np.int64)
        for array in self._kv.arrays.values() if self._kv is not None else ():
            array[:, blocks] = 0
        return {}

    def _state(self, _: Mapping[str, Any]) -> dict[str, Any]:
        live = self._store.live
        filled = 0
        if self._kv is not None:
            # Every stored position has a scale above zero, so this tells from the arena itself what is in it.
            filled = int(self._kv.arrays["k.scale"][0].any(axis=(1, 2, 3)).sum())
        return {
            "pid": os.getpid(),
            "pause": self._pause,
            "kv_resident": self._kv is not None,
            "kv_filled": filled,
            "kv_bytes": resident_bytes("iop-kv"),
            "weights_resident": live.arena is not None,
            "retention": None if live.retention is None else int(live.retention),
            "weight_bytes": self._store.resident(),
            "digest": self._store.digest_now(),
            "version": self._store.version,
        }

    def _release(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if self._pause is None:
            raise PreconditionFailed("Only a paused rank releases memory.", reason="NOT_PAUSED")
        weights = kv = 0
        if order["weights"] is not None:
            weights = self._store.release(WeightRetention(order["weights"]))
        if order["kv"] and self._kv is not None:
            before = resident_bytes("iop-kv")
            self._kv.close()
            self._kv = None
            kv = before - resident_bytes("iop-kv")
        return {"weight_bytes": weights, "kv_bytes": kv}

    def _restore(self, order: Mapping[str, Any]) -> dict[str, Any]:
        weights = self._store.restore() if order["weights"] else 0
        kv = 0
        if order["kv"] and self._kv is None:
            self._kv = Arena("iop-kv", self._kv_specs)
            kv = resident_bytes("iop-kv")
        return {"weight_bytes": weights, "kv_bytes": kv}

    def _start_profile(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self._profile = RankProfile(
            [ProfilerKind(kind) for kind in order["kinds"]], Path(order["folder"]), self._rank
        )
        self._profile.start()
        return {}

    def _stop_profile(self, _: Mapping[str, Any]) -> dict[str, Any]:
        profile, self._profile = self._profile, None
        return {"files": [] if profile is None else profile.stop()}


def main() -> None:
    """Serve orders until the engine is gone."""
    setup: dict[str, Any] = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != setup["parent"]:
        return  # The engine died before the line above took effect.
    control = socket.socket(fileno=setup["control_fd"])
    try:
        rank = Rank(setup, control)
    except IopError as exc:
        control.sendall(encode_frame(_error(exc)))
        return
    control.sendall(encode_frame({"ok": True}))
    try:
        _serve(rank, control)
    except (EngineGoneError, FrameError, OSError):
        return


def _serve(rank: Rank, control: socket.socket) -> None:
    buffer = FrameBuffer()
    while data := control.recv(_RECEIVE_BYTES):
        for order in buffer.feed(data):
            try:
                answer = {"ok": True, **rank.orders[order["op"]](order)}
            except IopError as exc:
                answer = _error(exc)
            control.sendall(encode_frame(answer))


def _error(exc: IopError) -> dict[str, Any]:
    return {"ok": False, "code": exc.code.value, "reason": exc.reason, "message": exc.message}


if __name__ == "__main__":
    main()
