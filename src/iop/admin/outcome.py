"""From the answers of steps to the result of an operation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import assert_never

from iop.admin.desired import Desired
from iop.admin.enums import AdminErrorCode, CacheKind, CacheOutcome
from iop.admin.records import OperationRecord, StepRecord
from iop.admin.requests import (
    FlushCachesRequest,
    PauseRequest,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import (
    CacheResult,
    FlushCachesResult,
    OperationResult,
    PauseResult,
    ReconfigureServingResult,
    ReleaseResourcesResult,
    RestoreResourcesResult,
    ResumeResult,
    StartProfileResult,
    StopProfileResult,
    UpdateWeightsResult,
)
from iop.admin.steps import (
    ParticipantOutcome,
    PauseStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    Step,
    WorkCounts,
)
from iop.core.ids import ParticipantId

__all__ = ["answered", "caches_told", "outcomes_of", "result_of", "work_of"]


def answered(steps: Iterable[StepRecord]) -> tuple[StepRecord, ...]:
    """The last answer of each group in each phase, undo steps left out."""
    last: dict[tuple[int, str], StepRecord] = {}
    for record in steps:
        if not record.is_undo and record.result is not None:
            last[record.phase_index, record.group_id] = record
    return tuple(last[key] for key in sorted(last))


def outcomes_of(
    record: OperationRecord, steps: Iterable[StepRecord], *kinds: type[Step]
) -> Iterator[ParticipantOutcome]:
    """Answers per participant, of phases whose step is of one of the kinds (all, if none are given)."""
    for step in answered(steps):
        body = record.spec.phases[step.phase_index].body
        if step.result is not None and (not kinds or isinstance(body, kinds)):
            yield from step.result.participants


def caches_told(record: OperationRecord, steps: Iterable[StepRecord]) -> FlushCachesResult | None:
    """What became of every cache that a flush which failed was to empty; None for other kinds (AD-40).

    A cache of which nobody said anything, or whose word was not borne out, is UNKNOWN.
    """
    request = record.spec.request
    if not isinstance(request, FlushCachesRequest):
        return None
    told = {o.participant_id: o for o in outcomes_of(record, steps)}
    return FlushCachesResult(
        caches=tuple(
            _cache_told(participant, kind, told.get(participant))
            for participant in record.spec.participant_ids
            for kind in request.kinds
        )
    )


def _cache_told(
    participant: ParticipantId, kind: CacheKind, outcome: ParticipantOutcome | None
) -> CacheResult:
    found = next((c for c in outcome.caches if c.kind is kind), None) if outcome is not None else None
    error = outcome.error if outcome is not None else None
    if found is not None and (error is None or found.outcome is not CacheOutcome.CLEARED):
        return found
    # One kind that was refused fails the whole answer; the others are as it told.
    if found is not None and error is not None and error.code is AdminErrorCode.REFUSED_BUSY:
        return found
    return CacheResult(
        participant_id=participant,
        kind=kind,
        outcome=CacheOutcome.UNKNOWN,
        detail=error.message if error is not None else "it gave no answer",
    )


def work_of(record: OperationRecord, steps: Iterable[StepRecord], kind: type[Step]) -> WorkCounts:
    """What became of requests, summed over groups."""
    drained = aborted = kept = resumed = 0
    for step in answered(steps):
        if step.result is None or not isinstance(record.spec.phases[step.phase_index].body, kind):
            continue
        drained += step.result.work.drained
        aborted += step.result.work.aborted
        kept += step.result.work.kept
        resumed += step.result.work.resumed
    return WorkCounts(drained=drained, aborted=aborted, kept=kept, resumed=resumed)


def result_of(
    record: OperationRecord, steps: Sequence[StepRecord], desired: Desired, *, now_unix_nanos: int
) -> OperationResult:
    """The result of an operation that reached its end on every participant.

    Args:
        desired: the state after the operation.
    """
    spec, request = record.spec, record.spec.request
    match request:
        case FlushCachesRequest():
            found = [c for o in outcomes_of(record, steps) for c in o.caches if c.kind in request.kinds]
            return FlushCachesResult(caches=tuple(found))
        case PauseRequest():
            work = work_of(record, steps, PauseStep)
            return PauseResult(
                pause_epoch=spec.pause_epoch,
                mode=request.pause.mode,
                drained=work.drained,
                aborted=work.aborted,
                kept=work.kept,
            )
        case ResumeRequest():
            work = work_of(record, steps, ResumeStep)
            return ResumeResult(pause_epoch=spec.pause_epoch, resumed=work.resumed)
        case ReleaseResourcesRequest():
            amounts = [a for o in outcomes_of(record, steps, ReleaseStep) for a in o.amounts]
            return ReleaseResourcesResult(
                resource_epoch=spec.resource_epoch,
                released=tuple(amounts),
                pause_epoch=spec.pause_epoch or None,
            )
        case RestoreResourcesRequest():
            amounts = [a for o in outcomes_of(record, steps, RestoreStep) for a in o.amounts]
            release = desired.releases.get(spec.resource_epoch)
            still = frozenset().union(*release.remaining.values()) if release else frozenset()
            return RestoreResourcesResult(restored=tuple(amounts), remaining=tuple(sorted(still)))
        case UpdateWeightsRequest():
            work = work_of(record, steps, PauseStep)
            return UpdateWeightsResult(
                model=spec.model,
                previous_weight_version=spec.previous_version,
                weight_version=request.weight_version,
                aborted=work.aborted,
                kept=work.kept,
            )
        case StartProfileRequest():
            profile = desired.profiles.get(spec.profile_id)
            return StartProfileResult(
                operation_id=spec.operation_id,
                profile_id=spec.profile_id,
                started_at_unix_nanos=profile.started_at_unix_nanos if profile else now_unix_nanos,
                participant_ids=spec.participant_ids,
            )
        case StopProfileRequest():
            profile = desired.profiles.get(spec.profile_id)
            return StopProfileResult(
                operation_id=spec.operation_id,
                profile_id=spec.profile_id,
                artifacts=profile.artifacts if profile else (),
            )
        case ReconfigureServingRequest():
            changes = [c for o in outcomes_of(record, steps) for c in o.changes]
            return ReconfigureServingResult(changes=tuple(changes))
        case _:
            assert_never(request)
