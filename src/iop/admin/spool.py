"""Inline tensors on disk: spooled before acceptance and kept until replaced, so that they can be put back (AD-32)."""

from __future__ import annotations

import dataclasses
import hashlib

from iop.admin.journal import Journal, Snapshot
from iop.admin.requests import (
    InlineTensor,
    InlineTensorSource,
    MutationRequest,
    UpdateWeightsRequest,
    WeightSource,
)
from iop.admin.steps import (
    ApplyWeightsStep,
    PrepareWeightsStep,
    RestoreStep,
    Step,
    UndoWeightsStep,
)
from iop.core.errors import Internal, InvalidRequest

__all__ = ["check_digests", "is_spooled", "referenced_blobs", "spool", "with_content"]


def is_spooled(request: MutationRequest) -> bool:
    """Whether a request brings tensors along."""
    return isinstance(request, UpdateWeightsRequest) and isinstance(request.source, InlineTensorSource)


def check_digests(request: MutationRequest) -> None:
    """Compare the digests that a caller gave of its tensors with their bytes.

    Raises:
        InvalidRequest: SOURCE_MISMATCH, one is not that of its bytes.
    """
    if isinstance(request, UpdateWeightsRequest) and isinstance(request.source, InlineTensorSource):
        for tensor in request.source.tensors:
            _digest_of(tensor)


async def spool(journal: Journal, request: MutationRequest) -> MutationRequest:
    """Keep the tensors of a request in the journal and return it with their digests instead of their bytes.

    Raises:
        InvalidRequest: SOURCE_MISMATCH, a digest that the caller gave is not that of its bytes.
        Unavailable: the store cannot be written.
    """
    if not isinstance(request, UpdateWeightsRequest) or not isinstance(request.source, InlineTensorSource):
        return request
    tensors = []
    for tensor in request.source.tensors:
        digest = _digest_of(tensor)
        await journal.put_blob(digest, tensor.data)
        tensors.append(dataclasses.replace(tensor, data=b"", sha256=digest))
    return dataclasses.replace(request, source=InlineTensorSource(tensors=tuple(tensors)))


def _digest_of(tensor: InlineTensor) -> bytes:
    digest = hashlib.sha256(tensor.data).digest()
    if tensor.sha256 and tensor.sha256 != digest:
        raise InvalidRequest(
            f"inline_tensors: the bytes of {tensor.spec.name!r} do not have the given sha256",
            reason="SOURCE_MISMATCH",
            details={"tensor": tensor.spec.name},
        )
    return digest


async def with_content(journal: Journal, body: Step) -> Step:
    """Put spooled tensors back into a step before it is sent."""
    match body:
        case PrepareWeightsStep() | ApplyWeightsStep():
            source = await _filled(journal, body.source)
            return body if source is body.source else dataclasses.replace(body, source=source)
        case UndoWeightsStep() if body.previous_source is not None:
            source = await _filled(journal, body.previous_source)
            return dataclasses.replace(body, previous_source=source)
        case RestoreStep() if body.weight_source is not None:
            source = await _filled(journal, body.weight_source)
            return dataclasses.replace(body, weight_source=source)
        case _:
            return body


async def _filled(journal: Journal, source: WeightSource) -> WeightSource:
    if not isinstance(source, InlineTensorSource):
        return source
    tensors = []
    for tensor in source.tensors:
        content = await journal.get_blob(tensor.sha256)
        if content is None:
            raise Internal("a spooled tensor is gone", details={"tensor": tensor.spec.name})
        tensors.append(dataclasses.replace(tensor, data=content))
    return InlineTensorSource(tensors=tuple(tensors))


def referenced_blobs(snapshot: Snapshot) -> frozenset[bytes]:
    """Digests that published weights or unfinished operations still need."""
    sources = [w.source for w in snapshot.desired.weights.values()]
    for record in snapshot.running.values():
        request = record.spec.request
        if isinstance(request, UpdateWeightsRequest):
            sources += [request.source, record.spec.previous_weights]
    return frozenset(
        tensor.sha256
        for source in sources
        if isinstance(source, InlineTensorSource)
        for tensor in source.tensors
    )
