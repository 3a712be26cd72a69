"""Weights of a vLLM engine replaced from disk by its workers' own `reload_weights`, or by a trainer over its
weight-transfer engine (AD-32, AD-45).

The engine neither pauses nor checks nor keeps the old tensors: a path that cannot be loaded leaves it without
weights, healthy to the eye, and dead at the next request. So the files are looked at first, and afterwards the
weights are proven by their checksum and, where nothing is frozen, by a real completion. The call never has a
timeout of its own at the engine: a late reply would be taken for the answer to the next request and kill it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from iop.adapters import checkpoint
from iop.adapters.device_handles import SharedWeights
from iop.adapters.engine_http import EngineHttp
from iop.adapters.gate_control import StepFailed, not_verified, succeeded
from iop.adapters.staged_weights import StagedWeights
from iop.adapters.trainer_group import check_group
from iop.adapters.vllm import transfer
from iop.adapters.vllm.answers import Checksums, Completion
from iop.adapters.vllm.offer import NEEDS_TRANSFER
from iop.admin.enums import AdminErrorCode, VerificationMethod, WeightSourceKind
from iop.admin.requests import DiskSource, DistributedSource, IpcSource, WeightSource
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    PrepareWeightsStep,
    StepCall,
    StepResult,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.core.errors import PreconditionFailed, Unsupported

RELOAD_METHOD: Final = "reload_weights"
"""The only worker method that is ever called by name: `/collective_rpc` would take any."""

CHECKSUM_TIMEOUT_S: Final = 600.0
"""It reads all weights."""

PROBE_TIMEOUT_S: Final = 60.0

NOTHING: Final = hashlib.sha256(b"").hexdigest()
"""Checksum of a tensor that the engine repacked elsewhere: tells nothing."""


class WeightSwap:
    """The weight steps of one engine.

    Attributes:
        sources: from where weights can come, beside tensors sent along.
        has_resumed: the engine was let run for a probe and must be paused again.
    """

    def __init__(self, http: EngineHttp, staged: StagedWeights) -> None:
        self._http = http
        self._staged = staged
        self._model = ""
        self._path = ""
        self._read_from = ""  # where the weights in place can be read again; a trainer's cannot
        self.startup_path = ""
        self.sources: frozenset[WeightSourceKind] = frozenset()
        self.has_resumed = False
        self._operation = ""
        self._before: tuple[str, bytes] = ("", b"")
        self._is_changed = False

    def begin(self, *, model: str, path: str) -> None:
        """Another process of the engine: it serves what it was started with.

        Args:
            model: a name that it answers to.
            path: directory of its weights; empty when this machine does not see it.
        """
        self._model, self._path, self._read_from, self.startup_path = model, path, path, path
        self._operation, self._before, self._is_changed = "", ("", b""), False

    async def execute(
        self,
        call: StepCall,
        step: PrepareWeightsStep | ApplyWeightsStep | VerifyWeightsStep | CommitWeightsStep | UndoWeightsStep,
        *,
        has_checksums: bool,
        can_probe: bool,
    ) -> StepResult:
        """One step.

        Args:
            has_checksums: the engine tells checksums of its weights.
            can_probe: it stands still with nothing frozen, so that it may run for one completion.
        """
        match step:
            case PrepareWeightsStep(source=source, hold_previous=hold):
                if hold:
                    raise Unsupported("vLLM cannot hold replaced weights", reason="CANNOT_HOLD_WEIGHTS")
                source = await self._staged.on_disk(source, self._path, call.operation_id)
                await self._checked(source)
                self._operation, self._is_changed = call.operation_id, False
                return succeeded(changed=False)
            case ApplyWeightsStep(source=source):
                # Again: the path may have gone since, and the engine would not survive that.
                source = await self._staged.on_disk(source, self._path, call.operation_id)
                checked = await self._checked(source)
                digest = await self.digest() if has_checksums else b""
                if not self._is_changed or self._operation != call.operation_id:
                    self._before = (self._read_from, digest)
                self._operation, self._is_changed = call.operation_id, True
                if isinstance(checked, DiskSource):
                    await self.reload(checked.path, timeout_s=call.timeout_s)
                else:
                    read_from, self._read_from = self._read_from, ""
                    try:
                        await transfer.receive(self._http, checked, timeout_s=call.timeout_s)
                    except StepFailed as exc:
                        if not exc.changed:  # what is in place is what was
                            self._read_from = read_from
                        raise
                return succeeded()
            case VerifyWeightsStep():
                return await self._verify(has_checksums=has_checksums, can_probe=can_probe)
            case CommitWeightsStep(weight_version=version):
                answer = await self._http.post(
                    "/update_weight_version", {"new_version": version}, timeout_s=PROBE_TIMEOUT_S
                )
                if not answer.is_ok:
                    raise StepFailed(f"the engine refused the version label: {answer.words}")
                self._is_changed = False
                await asyncio.to_thread(self._staged.keep_only, self._path)
                return succeeded(weight_version=version)
            case UndoWeightsStep():
                return await self._undo(call, step, has_checksums=has_checksums)

    async def reload(self, path: str, *, timeout_s: float) -> None:
        """Load a directory's weights in place. The path sticks at the engine."""
        body: Mapping[str, object] = {"method": RELOAD_METHOD, "kwargs": {"weights_path": path}}
        answer = await self._http.post("/collective_rpc", body, timeout_s=timeout_s)
        if not answer.is_ok:
            raise StepFailed(f"the engine could not load the weights: {answer.words}")
        self._path = self._read_from = path

    async def _checked(self, source: WeightSource) -> DiskSource | DistributedSource | SharedWeights:
        """The source, looked at as far as can be without touching the engine. Raises StepFailed or Unsupported."""
        match source:
            case DiskSource():
                await asyncio.to_thread(checkpoint.check, source, self._path)
                return source
            case DistributedSource() if WeightSourceKind.DISTRIBUTED in self.sources:
                check_group(source, ranks=await transfer.world_size(self._http), current=await self._layout())
                return source
            case IpcSource() if WeightSourceKind.IPC in self.sources:
                ranks, current = await transfer.world_size(self._http), await self._layout()
                return await asyncio.to_thread(SharedWeights.read, source, ranks=ranks, current=current)
            case _:
                raise Unsupported(
                    f"this vLLM takes no weights from there: {NEEDS_TRANSFER}", reason="WEIGHT_SOURCE"
                )

    async def _layout(self) -> checkpoint.Layout:
        return await asyncio.to_thread(checkpoint.read_layout, Path(self._path)) if self._path else {}

    async def _verify(self, *, has_checksums: bool, can_probe: bool) -> StepResult:
        digest = await self.digest() if has_checksums else b""
        if can_probe:
            await self._probe()
        if not digest and not can_probe:
            raise not_verified(
                "weights under frozen requests are verified by checksum, which this engine does not tell"
            )
        method = VerificationMethod.CHECKSUM if digest else VerificationMethod.PROBE
        return succeeded(content_digest=digest, verified_by=method)

    async def _undo(self, call: StepCall, step: UndoWeightsStep, *, has_checksums: bool) -> StepResult:
        if not self._is_changed or self._operation != call.operation_id:
            return succeeded(changed=False)
        path, digest = self._before
        source = step.previous_source
        if source is not None:
            source = await self._staged.on_disk(source, self._path, f"before {call.operation_id}")
        if isinstance(source, DiskSource):
            path = source.path
        if not path:
            raise PreconditionFailed("the previous weights cannot be read again", reason="IRREVERSIBLE")
        await self.reload(path, timeout_s=call.timeout_s)
        if has_checksums and digest and await self.digest() != digest:
            raise StepFailed(
                "the previous weights were loaded, but their checksum is another one",
                code=AdminErrorCode.ROLLBACK_FAILED,
            )
        self._is_changed = False
        return succeeded()

    async def digest(self) -> bytes:
        """One digest over the checksums of all tensors on all ranks; empty when they tell nothing."""
        answer = await self._http.post(
            "/weight_checker", {"action": "checksum"}, timeout_s=CHECKSUM_TIMEOUT_S
        )
        if not answer.is_ok:
            return b""
        told = answer.read(Checksums).checksums
        if not any(value != NOTHING for value in told.values()):
            return b""
        lines = "".join(f"{name}={value}\n" for name, value in sorted(told.items()))
        return hashlib.sha256(lines.encode()).digest()

    async def _probe(self) -> None:
        """Let it run for one real completion: only that shows that it lives."""
        self.has_resumed = True
        resumed = await self._http.post("/resume", timeout_s=PROBE_TIMEOUT_S)
        if not resumed.is_ok:
            raise not_verified(f"the engine could not be resumed for a probe: {resumed.words}")
        answer = await self._http.post(
            "/v1/completions",
            {"model": self._model, "prompt": "Hello", "max_tokens": 1, "temperature": 0},
            timeout_s=PROBE_TIMEOUT_S,
        )
        if not answer.is_ok or not answer.read(Completion).choices:
            raise not_verified(f"the engine does not answer with its new weights: {answer.words}")
