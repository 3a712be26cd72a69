"""Weights of an SGLang server, replaced from disk or by a trainer (AD-32, AD-45).

The cache is emptied by a step of its own: a refused flush would look like a refused update. What a failed load leaves
is not known, since the server's own rolling back reads the new path again. A broadcast happens between a begin and an
end, in a group that is left afterwards whatever became of it. A trainer's device handles are pickles, which any Python
could hide in: what goes to the server is written anew from what they say.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from iop.adapters import checkpoint
from iop.adapters.device_handles import SharedWeights
from iop.adapters.engine_http import EngineAnswer, EngineHttp
from iop.adapters.gate_control import StepFailed, not_verified, succeeded
from iop.adapters.staged_weights import StagedWeights
from iop.adapters.trainer_group import DTYPES, check_group
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
from iop.core.errors import DeadlineExceeded, IopError, Unsupported

CHECKSUM_TIMEOUT_S: Final = 600.0
"""It reads all weights."""

SHORT_TIMEOUT_S: Final = 60.0
"""Of calls that move no weights."""


NEEDS_RANK: Final = (
    "for a broadcast start a newer SGLang without data parallelism, for device handles with a single rank "
    "on a GPU"
)


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class _Checked(msgspec.Struct):
    success: bool
    per_engine_checksum: str | None = None


class WeightSwap:
    """The weight steps of one engine.

    Attributes:
        path: where its weights are, as it says.
        ranks: how many of them take part in a group.
        sources: from where weights can come, beside tensors sent along.
    """

    def __init__(self, http: EngineHttp, staged: StagedWeights) -> None:
        self._http = http
        self._staged = staged
        self.path = ""
        self.ranks = 1
        self.sources: frozenset[WeightSourceKind] = frozenset()
        self._previous: tuple[str, str, str] = ("", "", "")

    async def execute(
        self,
        call: StepCall,
        step: PrepareWeightsStep | ApplyWeightsStep | VerifyWeightsStep | CommitWeightsStep | UndoWeightsStep,
    ) -> StepResult:
        """One step."""
        match step:
            case PrepareWeightsStep(source=source, hold_previous=hold):
                if hold:
                    raise Unsupported("SGLang cannot hold replaced weights", reason="CANNOT_HOLD_WEIGHTS")
                source = await self._staged.on_disk(source, self.path, call.operation_id)
                await self._checked(source)
                return succeeded(changed=False)
            case ApplyWeightsStep(source=source):
                source = await self._staged.on_disk(source, self.path, call.operation_id)
                checked = await self._checked(source)
                if self._previous[0] != call.operation_id:
                    self._previous = (call.operation_id, self.path, await self._checksum())
                match checked:
                    case DiskSource(path=path):
                        await self.load_from(path, timeout_s=call.timeout_s)
                    case DistributedSource():
                        await self._receive(checked, timeout_s=call.timeout_s)
                    case SharedWeights():
                        await self._update("/update_weights_from_tensor", _handles(checked), call.timeout_s)
                return succeeded()
            case VerifyWeightsStep():
                digest = hashlib.sha256((await self._checksum()).encode()).digest()
                return succeeded(content_digest=digest, verified_by=VerificationMethod.CHECKSUM)
            case CommitWeightsStep(weight_version=version):
                # Without the second field every request would be aborted for a label.
                answer = await self._http.post(
                    "/update_weight_version",
                    {"new_version": version, "abort_all_requests": False},
                    timeout_s=SHORT_TIMEOUT_S,
                )
                if not answer.is_ok:
                    raise StepFailed(f"the engine refused the version label: {answer.words}")
                await asyncio.to_thread(self._staged.keep_only, self.path)
                return succeeded(weight_version=version)
            case UndoWeightsStep(previous_source=source):
                return await self._undo(call, source)

    async def load_from(self, path: str, *, timeout_s: float) -> None:
        """Load a directory's weights in place; the server shows the path as its name from then on."""
        answer = await self._http.post(
            "/update_weights_from_disk",
            {"model_path": path, "flush_cache": False, "abort_all_requests": False},
            timeout_s=timeout_s,
        )
        if not _is_live(answer):
            raise StepFailed(
                f"the engine could not load the weights, and what it holds now is not known: {answer.words}"
            )

    async def _checked(self, source: WeightSource) -> DiskSource | DistributedSource | SharedWeights:
        """The source, looked at as far as can be without touching the engine. Raises StepFailed or Unsupported."""
        match source:
            case DiskSource():
                await asyncio.to_thread(checkpoint.check, source, self.path)
                return source
            case DistributedSource() if WeightSourceKind.DISTRIBUTED in self.sources:
                check_group(source, ranks=self.ranks, current=await self._layout())
                return source
            case IpcSource() if WeightSourceKind.IPC in self.sources:
                current = await self._layout()
                return await asyncio.to_thread(SharedWeights.read, source, ranks=self.ranks, current=current)
            case _:
                raise Unsupported(
                    f"this SGLang takes no weights from there: {NEEDS_RANK}", reason="WEIGHT_SOURCE"
                )

    async def _layout(self) -> checkpoint.Layout:
        is_here = self.path.startswith("/")
        return await asyncio.to_thread(checkpoint.read_layout, Path(self.path)) if is_here else {}

    async def _receive(self, source: DistributedSource, *, timeout_s: float) -> None:
        """Join the group, take what is broadcast, and leave it again."""
        group = {"group_name": source.group_name}
        joining = {
            **group,
            "master_address": source.master_host,
            "master_port": source.master_port,
            "rank_offset": source.rank_offset,
            "world_size": source.world_size,
            "backend": source.backend.name.lower(),
        }
        try:
            await self._tell("/init_weights_update_group", joining, timeout_s, changed=False)
        except DeadlineExceeded:
            raise StepFailed("the group did not form, and the engine waits for it: restart it") from None
        try:
            tensors = {
                "names": [tensor.name for tensor in source.tensors],
                "dtypes": [DTYPES[tensor.dtype] for tensor in source.tensors],
                "shapes": [list(tensor.shape) for tensor in source.tensors],
                "abort_all_requests": False,
            }
            await self._update("/update_weights_from_distributed", {**group, **tensors}, timeout_s)
        finally:
            await self._leave(group)

    async def _update(self, path: str, body: Mapping[str, object], timeout_s: float) -> None:
        """One update between a begin and an end. The cache is emptied by a step of its own."""
        begin = {"selector": "target"}
        answer = await self._http.post("/begin_weight_update", begin, timeout_s=SHORT_TIMEOUT_S)
        if answer.status == 400:  # one that broke off, of a process before us perhaps, is still open
            await self._end_update()
            answer = await self._http.post("/begin_weight_update", begin, timeout_s=SHORT_TIMEOUT_S)
        _check(answer, "/begin_weight_update", changed=False)
        is_live = False
        try:
            answer = await self._http.post(path, {**body, "flush_cache": False}, timeout_s=timeout_s)
            is_live = _is_live(answer)
            if not is_live:
                raise StepFailed(f"the update failed, and the weights are partly new now: {answer.words}")
        finally:
            if not is_live:
                await self._end_update()
        await self._tell("/end_weight_update", {}, timeout_s)

    async def _end_update(self) -> None:
        """Of one that came to nothing: left open, it would have the next one refused."""
        try:
            await self._http.post("/end_weight_update", {}, timeout_s=SHORT_TIMEOUT_S)
        except IopError:
            return  # what became of the weights is the step's word

    async def _leave(self, group: Mapping[str, object]) -> None:
        try:
            await self._http.post("/destroy_weights_update_group", group, timeout_s=SHORT_TIMEOUT_S)
        except IopError:
            return  # what became of the weights is the step's word; the next group has another name

    async def _tell(
        self, path: str, body: Mapping[str, object], timeout_s: float, *, changed: bool = True
    ) -> None:
        _check(await self._http.post(path, body, timeout_s=timeout_s), path, changed=changed)

    async def _undo(self, call: StepCall, source: WeightSource | None) -> StepResult:
        operation, path, checksum = self._previous
        if operation != call.operation_id:
            return succeeded(changed=False)
        if source is not None:
            source = await self._staged.on_disk(source, self.path, f"before {call.operation_id}")
        await self.load_from(
            source.path if isinstance(source, DiskSource) else path, timeout_s=call.timeout_s
        )
        if await self._checksum() != checksum:
            raise StepFailed(
                "the previous weights were loaded, but their checksum is another one",
                code=AdminErrorCode.ROLLBACK_FAILED,
            )
        self._previous = ("", "", "")
        return succeeded()

    async def _checksum(self) -> str:
        told, words = await self._told_checksum()
        if not told:
            raise not_verified(f"the engine does not tell the checksum of its weights: {words}")
        return told

    async def checksum(self) -> str:
        """Of the weights in place; empty when the engine does not tell it."""
        told, _ = await self._told_checksum()
        return told

    async def _told_checksum(self) -> tuple[str, str]:
        answer = await self._http.post(
            "/weights_checker", {"action": "checksum"}, timeout_s=CHECKSUM_TIMEOUT_S
        )
        told = answer.read(_Checked) if answer.is_ok else None
        is_told = told is not None and told.success
        return (told.per_engine_checksum or "") if told is not None and is_told else "", answer.words


def _check(answer: EngineAnswer, path: str, *, changed: bool) -> None:
    if answer.status == 404 and path in {"/begin_weight_update", "/end_weight_update"}:
        return  # older servers have no such bracket
    if not answer.is_ok or not answer.read(_Updated).success:
        raise StepFailed(f"the engine refused {path}: {answer.words}", changed=changed)


def _handles(weights: SharedWeights) -> Mapping[str, object]:
    """One text a rank."""
    return {"serialized_named_tensors": [base64.b64encode(weights.named_tensors()).decode()]}


def _is_live(answer: EngineAnswer) -> bool:
    """Whether the new weights are in place: a refused flush makes it a failure of which only the words tell."""
    told = answer.read(_Updated) if answer.status in {200, 400} else None
    return told is not None and (told.success or "were updated" in told.message)
