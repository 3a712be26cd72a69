"""A trainer's broadcast, or its device memory, taken by vLLM's weight-transfer engine (AD-45).

An update is a session: once begun it ends by being finished or by failing, and what a failure leaves is partly new. The
version label is not given here, since it is published last (AD-38).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Final

from iop.adapters.device_handles import SharedWeights
from iop.adapters.engine_http import EngineHttp
from iop.adapters.gate_control import StepFailed
from iop.adapters.trainer_group import DTYPES
from iop.adapters.vllm.answers import WorldSize
from iop.admin.requests import DistributedSource
from iop.core.errors import DeadlineExceeded, IopError

SHORT_TIMEOUT_S: Final = 60.0
"""Of calls that move no weights."""


async def world_size(http: EngineHttp) -> int:
    """How many ranks of the engine join a group."""
    return (await http.get("/get_world_size")).read(WorldSize).world_size


async def receive(http: EngineHttp, source: DistributedSource | SharedWeights, *, timeout_s: float) -> None:
    """Join the trainer, take what it broadcasts or shares, and leave it again.

    Raises:
        StepFailed: with what is known of the weights.
    """
    joining = {"init_info": _joining(source)}
    try:
        await _tell(http, "/init_weight_transfer_engine", joining, timeout_s, changed=False)
    except DeadlineExceeded:
        raise StepFailed("the group did not form, and the engine waits for it: restart it") from None
    try:
        await _tell(http, "/start_weight_update", None, SHORT_TIMEOUT_S, changed=False)
        await _tell(http, "/update_weights", {"update_info": _tensors(source)}, timeout_s)
        await _tell(http, "/finish_weight_update", {"weight_version": None}, timeout_s)
    finally:
        await _leave(http)


def _joining(source: DistributedSource | SharedWeights) -> Mapping[str, object]:
    if isinstance(source, SharedWeights):
        return {"packed": False}
    return {
        "master_address": source.master_host,
        "master_port": source.master_port,
        "rank_offset": source.rank_offset,
        "world_size": source.world_size,
    }


def _tensors(source: DistributedSource | SharedWeights) -> Mapping[str, object]:
    if isinstance(source, SharedWeights):
        return {
            "names": [tensor.name for tensor in source.tensors],
            "dtype_names": [tensor.dtype for tensor in source.tensors],
            "shapes": [list(tensor.shape) for tensor in source.tensors],
            "ipc_handles_pickled": base64.b64encode(source.by_device()).decode(),
        }
    return {
        "names": [tensor.name for tensor in source.tensors],
        "dtype_names": [DTYPES[tensor.dtype] for tensor in source.tensors],
        "shapes": [list(tensor.shape) for tensor in source.tensors],
    }


async def _leave(http: EngineHttp) -> None:
    try:
        await http.post("/shutdown_weight_transfer_engine", timeout_s=SHORT_TIMEOUT_S)
    except IopError:
        return  # what became of the weights is the step's word


async def _tell(
    http: EngineHttp, path: str, body: Mapping[str, object] | None, timeout_s: float, *, changed: bool = True
) -> None:
    answer = await http.post(path, body, timeout_s=timeout_s)
    if not answer.is_ok:
        what = "the weights are partly new now" if changed else "no weights were touched"
        raise StepFailed(f"the engine refused {path}, and {what}: {answer.words}", changed=changed)
