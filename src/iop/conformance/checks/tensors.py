"""Weights inside the request (AD-45), and weights that could not be put back (AD-32, AD-43)."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc

from iop.conformance.bench import SETTLE_TIMEOUT_S, Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, CheckSkipped, check, require
from iop.conformance.offer import Offer

Status = grpc.StatusCode

_DTYPES: Final[Mapping[str, int]] = MappingProxyType(
    {"F32": pb.TENSOR_DTYPE_FLOAT32, "F16": pb.TENSOR_DTYPE_FLOAT16, "BF16": pb.TENSOR_DTYPE_BFLOAT16}
)
HEADER_BYTES_MAX: Final = 16 * 1024 * 1024


def _tensors(directory: str, *, at_most: int) -> list[Any]:
    """The tensors of a checkpoint that can be read here.

    Raises:
        CheckNotRun: it cannot, or has more than one request may hold.
    """
    try:
        files = sorted(Path(directory).glob("*.safetensors"))
        found = [tensor for file in files for tensor in _tensors_of(file)]
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise CheckNotRun(f"the checkpoint cannot be read here: {type(error).__name__}") from None
    if not found:
        raise CheckNotRun("needs a --checkpoint-b with .safetensors files that can be read here")
    if sum(len(tensor.data) for tensor in found) > at_most:
        raise CheckNotRun(f"the checkpoint has more than limits.max_inline_tensor_bytes: {at_most}")
    return found


def _tensors_of(file: Path) -> list[Any]:
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        if size > HEADER_BYTES_MAX:
            raise ValueError("no safetensors")
        header = json.loads(opened.read(size))
        body = opened.read()
    tensors = []
    for name, told in header.items():
        if name == "__metadata__":
            continue
        begin, end = told["data_offsets"]
        data = body[begin:end]
        spec = pb.TensorSpec(name=name, dtype=_DTYPES[told["dtype"]], shape=told["shape"])
        tensors.append(pb.InlineTensor(spec=spec, data=data, sha256=hashlib.sha256(data).digest()))
    return tensors


async def _offered(bench: Bench) -> Offer:
    offer = await bench.offer()
    offer.need("UpdateWeights")
    if pb.WEIGHT_SOURCE_KIND_INLINE_TENSORS not in offer.common("UpdateWeights", "weight_sources"):
        raise CheckSkipped("inline tensors are not offered")
    return offer


def _request(bench: Bench, offer: Offer, tensors: list[Any], version: str) -> Any:
    request = offer.update(bench.key(), version=version)
    request.inline_tensors.CopyFrom(pb.InlineTensorSource(tensors=tensors))
    return request


async def _published(bench: Bench, model: str) -> tuple[str, set[str]]:
    profile = await bench.profile()
    published = next((w.weight_version for w in profile.weights if w.model == model), "")
    return published, {p.weight_version for p in profile.participants if model in p.models and p.connected}


@check("AD-45-inline", clauses=["AD-12", "AD-32", "AD-38"], timeout_s=180.0)
async def tensors_in_the_request_are_published(bench: Bench) -> None:
    """An update by inline tensors reaches every rank and publishes its version, and its retry is a replay."""
    offer = await _offered(bench)
    if bench.target.checkpoints is None:
        raise CheckNotRun("needs --checkpoint-a PATH and --checkpoint-b PATH")
    first, second = bench.target.checkpoints
    tensors = _tensors(second, at_most=offer.profile.limits.max_inline_tensor_bytes)
    version = f"conformance-{bench.key()}"
    request = _request(bench, offer, tensors, version)
    answer = await bench.call("UpdateWeights", request, timeout_s=SETTLE_TIMEOUT_S)
    told = answer.completed.result.update_weights.weight_version
    require(told == version, saw=f"version {told!r}", wants=version)
    found = await _published(bench, offer.model)
    require(found == (version, {version}), saw=f"versions {found}", wants=f"{version} everywhere")
    again = await bench.call("UpdateWeights", request, timeout_s=SETTLE_TIMEOUT_S)
    require(
        again.operation_id == answer.operation_id,
        saw="another operation, or none, for the same tensors under the same key",
        wants="the same operation",
    )
    back = offer.update(bench.key(), version=f"conformance-{bench.key()}", path=first)
    require(
        (await bench.call("UpdateWeights", back, timeout_s=SETTLE_TIMEOUT_S)).completed,
        saw="nothing",
        wants="completion",
    )


@check("AD-45-inline-shape", clauses=["AD-10"])
async def tensors_have_the_bytes_that_they_say(bench: Bench) -> None:
    """Inline tensors of which one has no name, no type or other bytes than its shape needs are INVALID_ARGUMENT."""
    offer = await _offered(bench)
    dtypes = offer.common("UpdateWeights", "tensor_dtypes")
    dtype = pb.TENSOR_DTYPE_FLOAT32 if pb.TENSOR_DTYPE_FLOAT32 in dtypes else next(iter(dtypes), 0)

    def tensor(name: str, kind: int, data: bytes, digest: bytes = b"") -> Any:
        spec = pb.TensorSpec(name=name, dtype=kind, shape=[2])
        return pb.InlineTensor(spec=spec, data=data, sha256=digest)

    wrong = {
        "no tensors": [],
        "a tensor without a name": [tensor("", dtype, b"12345678")],
        "a tensor without a type": [tensor("w", 0, b"12345678")],
        "bytes that the shape does not need": [tensor("w", dtype, b"123")],
        "a digest that is none": [tensor("w", dtype, b"12345678", b"short")],
    }
    for what, tensors in wrong.items():
        request = _request(bench, offer, tensors, "conformance-never")
        answer = await bench.call("UpdateWeights", request, timeout_s=bench.patience_s)
        answer.refused(Status.INVALID_ARGUMENT, where=what)


@check("AD-45-inline-digest", clauses=["AD-32", "AD-38"], timeout_s=120.0)
async def tensors_are_held_to_their_digest(bench: Bench) -> None:
    """Inline tensors whose bytes are not those of their digest are published nowhere."""
    offer = await _offered(bench)
    before = await _published(bench, offer.model)
    data = b"\x00" * 8
    spec = pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[2])
    tensor = pb.InlineTensor(spec=spec, data=data, sha256=hashlib.sha256(b"other").digest())
    request = _request(bench, offer, [tensor], "conformance-never")
    answer = await bench.call("UpdateWeights", request, timeout_s=SETTLE_TIMEOUT_S)
    if answer.is_ok:
        end = answer.terminal.WhichOneof("event")
        require(end == "failed", saw=f"the update end {end}", wants="failed (SOURCE_MISMATCH), or a refusal")
    after = await _published(bench, offer.model)
    require(after == before, saw=f"versions {after}", wants=f"{before}, as before")


@check("AD-32-irreversible", clauses=["AD-50"])
async def what_cannot_be_put_back_is_not_replaced(bench: Bench) -> None:
    """Without allow_irreversible an update is refused where the profile says reversible: false, and nowhere else."""
    offer = await bench.offer()
    offer.need("UpdateWeights")
    model = offer.model
    weights = next((w for w in offer.profile.weights if w.model == model), None)
    if weights is None:
        raise CheckSkipped("the profile tells no weights of the model")
    request = offer.update(bench.key(), version="conformance-never")
    request.allow_irreversible = False
    if not weights.reversible:
        answer = await bench.call("UpdateWeights", request, timeout_s=SETTLE_TIMEOUT_S)
        answer.refused(
            Status.FAILED_PRECONDITION, reason="IRREVERSIBLE", where="weights that cannot be put back"
        )
        return
    request.options.validate_only = True
    planned = await bench.call("UpdateWeights", request)
    blockers = [text for text in planned.messages[-1].plan.blockers if "IRREVERSIBLE" in text]
    require(
        not blockers, saw=f"{blockers} with reversible: true", wants="an update that can be put back to go on"
    )


@check("AD-43-irreversible")
async def what_cannot_be_reloaded_is_not_discarded(bench: Bench) -> None:
    """DISCARD of weights that the profile says cannot be put back is refused (IRREVERSIBLE)."""
    offer = await bench.offer()
    offer.need("ReleaseResources")
    if pb.RESOURCE_KIND_WEIGHTS not in offer.common("ReleaseResources", "resource_kinds"):
        raise CheckSkipped("weights are not released")
    if pb.WEIGHT_RETENTION_DISCARD not in offer.common("ReleaseResources", "weight_retentions"):
        raise CheckSkipped("DISCARD is not offered")
    if all(weights.reversible for weights in offer.profile.weights):
        raise CheckSkipped("all weights in force can be put back")
    request = offer.release(bench.key(), with_pause=True)
    request.kinds[:] = [pb.RESOURCE_KIND_WEIGHTS]
    request.weight_retention = pb.WEIGHT_RETENTION_DISCARD
    answer = await bench.call("ReleaseResources", request, timeout_s=SETTLE_TIMEOUT_S)
    answer.refused(
        Status.FAILED_PRECONDITION, reason="IRREVERSIBLE", where="weights that could not be reloaded"
    )
