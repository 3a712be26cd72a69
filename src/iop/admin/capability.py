"""Is what is asked for offered by everybody who is asked (AD-15)? Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, assert_never

from iop.admin.enums import AdminOperationKind, ReconfigurableField, WeightSourceKind
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import (
    DiskSource,
    DistributedSource,
    FlushCachesRequest,
    InlineTensorSource,
    IpcSource,
    MutationRequest,
    PauseRequest,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
    WeightSource,
    kind_of,
)
from iop.core.errors import IopError, PreconditionFailed, Unsupported

__all__ = [
    "LIMIT_EXCEEDED",
    "cancellable_kinds",
    "capability_refusals",
    "limit_refusals",
    "source_kind",
    "union_of",
]


LIMIT_EXCEEDED: Final = "LIMIT_EXCEEDED"

HINTS_MAX: Final = 4
HINT_CHARS_MAX: Final = 400
"""A refusal lists a few ways to enable what it refuses; a fleet's participants lack things for the same few reasons."""


def source_kind(source: WeightSource) -> WeightSourceKind:
    """The wire's name of a source."""
    match source:
        case DiskSource():
            return WeightSourceKind.DISK
        case InlineTensorSource():
            return WeightSourceKind.INLINE_TENSORS
        case DistributedSource():
            return WeightSourceKind.DISTRIBUTED
        case IpcSource():
            return WeightSourceKind.IPC
        case _:
            assert_never(source)


def capability_refusals(request: MutationRequest, chosen: Sequence[ParticipantInfo]) -> Iterator[IopError]:
    """Everything that some chosen participant does not offer.

    Yields:
        Unsupported: UNSUPPORTED_BY_PARTICIPANT, naming the wish and who does not offer it.
    """
    kind = kind_of(request)
    yield from _told_how(
        kind, _offered(f"operation {kind.name}", chosen, lambda c: kind in c.operations), chosen
    )
    yield from _told_how(kind, _parts(request, chosen), chosen)


def _parts(request: MutationRequest, chosen: Sequence[ParticipantInfo]) -> Iterator[IopError]:
    match request:
        case FlushCachesRequest():
            for cache in request.kinds:
                yield from _offered(f"cache kind {cache.name}", chosen, _has("cache_kinds", cache))
            yield from _offered(
                f"busy policy {request.busy_policy.name}", chosen, _has("busy_policies", request.busy_policy)
            )
        case PauseRequest():
            yield from _offered(
                f"pause mode {request.pause.mode.name}", chosen, _has("pause_modes", request.pause.mode)
            )
        case ReleaseResourcesRequest():
            yield from _release(request, chosen)
        case RestoreResourcesRequest():
            for resource in request.kinds:
                yield from _offered(
                    f"resource kind {resource.name}", chosen, _has("resource_kinds", resource)
                )
        case UpdateWeightsRequest():
            yield from _update(request, chosen)
        case StartProfileRequest():
            for profiler in request.kinds:
                yield from _offered(
                    f"profiler kind {profiler.name}", chosen, _has("profiler_kinds", profiler)
                )
        case ReconfigureServingRequest():
            yield from _reconfigure(request, chosen)
        case ResumeRequest() | StopProfileRequest():
            return
        case _:
            assert_never(request)


def _has(field: str, member: object) -> Callable[[Capabilities], bool]:
    return lambda capabilities: member in getattr(capabilities, field)


def _offered(
    wish: str, chosen: Sequence[ParticipantInfo], offers: Callable[[Capabilities], bool]
) -> Iterator[IopError]:
    lacking = [p.participant_id for p in chosen if not offers(p.capabilities)]
    if lacking:
        yield Unsupported(
            f"{wish} is not offered by {', '.join(lacking)}",
            reason="UNSUPPORTED_BY_PARTICIPANT",
            details={"wish": wish, "participants": ",".join(lacking)},
        )


def _told_how(
    kind: AdminOperationKind, refusals: Iterable[IopError], chosen: Sequence[ParticipantInfo]
) -> Iterator[IopError]:
    """The refusals, with what those who lack it say about enabling it."""
    for refusal in refusals:
        named = set(refusal.details.get("participants", "").split(","))
        hints = [
            " ".join(lacking.how.split())[:HINT_CHARS_MAX]
            for participant in chosen
            if participant.participant_id in named
            for lacking in participant.lacking
            if lacking.operation is kind
        ]
        how = "; ".join(list(dict.fromkeys(hints))[:HINTS_MAX])
        if how:
            yield Unsupported(
                f"{refusal.message} ({how})", reason=refusal.reason, details={**refusal.details, "how": how}
            )
        else:
            yield refusal


def _release(request: ReleaseResourcesRequest, chosen: Sequence[ParticipantInfo]) -> Iterator[IopError]:
    for resource in request.kinds:
        yield from _offered(f"resource kind {resource.name}", chosen, _has("resource_kinds", resource))
    if request.weight_retention is not None:
        yield from _offered(
            f"weight retention {request.weight_retention.name}",
            chosen,
            _has("weight_retentions", request.weight_retention),
        )
    if request.pause is not None:
        yield from _offered(
            f"pause mode {request.pause.mode.name}", chosen, _has("pause_modes", request.pause.mode)
        )


def _update(request: UpdateWeightsRequest, chosen: Sequence[ParticipantInfo]) -> Iterator[IopError]:
    kind = source_kind(request.source)
    yield from _offered(f"weight source {kind.name}", chosen, _has("weight_sources", kind))
    match request.source:
        case DiskSource(format=fmt):
            yield from _offered(f"weight format {fmt.name}", chosen, _has("weight_formats", fmt))
        case InlineTensorSource(tensors=tensors):
            for dtype in sorted({t.spec.dtype for t in tensors}):
                yield from _offered(f"dtype {dtype.name}", chosen, _has("tensor_dtypes", dtype))
        case DistributedSource(backend=backend):
            yield from _offered(f"backend {backend.name}", chosen, _has("distributed_backends", backend))
        case IpcSource():
            pass
    yield from _offered(
        f"cache policy {request.cache_policy.name}", chosen, _has("cache_policies", request.cache_policy)
    )
    if request.quiesce is not None:
        mode = request.quiesce.mode
        yield from _offered(f"quiesce mode {mode.name}", chosen, _has("quiesce_modes", mode))


def _reconfigure(request: ReconfigureServingRequest, chosen: Sequence[ParticipantInfo]) -> Iterator[IopError]:
    for change in request.changes:
        yield from _offered(f"field {change.field.name}", chosen, _has("reconfigurable_fields", change.field))
        if change.field is ReconfigurableField.ROLE:
            yield from _offered(f"role {change.value}", chosen, _has("roles", change.value))


def limit_refusals(request: MutationRequest, chosen: Sequence[ParticipantInfo]) -> Iterator[IopError]:
    """Reconfigured values above what a participant advertises as its most.

    They come after the judgements of the participants, which tell of every field and not of these alone (AD-47).

    Yields:
        PreconditionFailed: LIMIT_EXCEEDED, with the limit.
    """
    if not isinstance(request, ReconfigureServingRequest):
        return
    for change in request.changes:
        match change.field:
            case ReconfigurableField.CAPACITY | ReconfigurableField.LONG_CONTEXT_CAPACITY:
                yield from _within(change.field, change.value, chosen, lambda c: c.capacity_max)
            case ReconfigurableField.DATA_PARALLEL_SIZE:
                yield from _within(change.field, change.value, chosen, lambda c: c.data_parallel_size_max)
            case _:
                pass


def _within(
    field: ReconfigurableField,
    value: object,
    chosen: Sequence[ParticipantInfo],
    limit_of: Callable[[Capabilities], int | None],
) -> Iterator[IopError]:
    for participant in chosen:
        limit = limit_of(participant.capabilities)
        if limit is not None and isinstance(value, int) and value > limit:
            yield PreconditionFailed(
                f"{field.name} of {participant.participant_id} is at most {limit}",
                reason="LIMIT_EXCEEDED",
                details={"field": field.name, "limit": str(limit), "participant": participant.participant_id},
            )


def union_of(capabilities: Iterable[Capabilities]) -> Capabilities:
    """What at least one participant offers: the server's own lists in the profile (AD-50)."""
    offered = list(capabilities)

    def union(field: str) -> frozenset[object]:
        return frozenset().union(*(getattr(c, field) for c in offered))

    fields = [
        f
        for f in Capabilities.__dataclass_fields__
        if f not in {"holds_previous_weights", "capacity_max", "data_parallel_size_max"}
    ]
    values = {f: union(f) for f in fields}
    return Capabilities(**values)  # type: ignore[arg-type]  # each field keeps its own element type


def cancellable_kinds() -> tuple[AdminOperationKind, ...]:
    """Kinds that CancelOperation supports: those with an undo for every step before their end (AD-24)."""
    return (
        AdminOperationKind.PAUSE,
        AdminOperationKind.RELEASE_RESOURCES,
        AdminOperationKind.UPDATE_WEIGHTS,
    )
