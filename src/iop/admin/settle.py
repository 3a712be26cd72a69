"""How operations end: the terminal event and the desired state after it, in one value. Pure.

Each function answers for one journal transaction; nothing here waits or asks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from iop.admin.desired import (
    Desired,
    ProfileRecord,
    QuarantineRecord,
    WeightRecord,
    with_item,
    without_item,
)
from iop.admin.enums import (
    AdminOperationKind,
    AdminOperationState,
    ChangeDisposition,
    ParticipantPhase,
    ResourceKind,
)
from iop.admin.journal import Advance, Snapshot
from iop.admin.outcome import caches_told, outcomes_of, result_of, work_of
from iop.admin.overrides import FileValues, overridden
from iop.admin.records import OperationRecord, StepRecord
from iop.admin.requests import (
    ReconfigureServingRequest,
    RestoreResourcesRequest,
    StartProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import (
    AdminError,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    ParticipantStatus,
    ParticipantUpdate,
)
from iop.admin.revisions import risen
from iop.admin.states import Input, step
from iop.admin.steps import PauseStep, ReconfigureStep, VerifyWeightsStep
from iop.core.ids import GroupId, ParticipantId

__all__ = [
    "Leftover",
    "after_success",
    "committed",
    "completed",
    "ended_badly",
    "keeps_what_is_done",
    "without_operation",
]

_KEEPING = frozenset(
    {
        AdminOperationKind.RESUME,
        AdminOperationKind.RESTORE_RESOURCES,
        AdminOperationKind.FLUSH_CACHES,
        AdminOperationKind.STOP_PROFILE,
    }
)


def keeps_what_is_done(kind: AdminOperationKind) -> bool:
    """Whether a partial failure leaves what succeeded in force instead of taking it back (AD-29)."""
    return kind in _KEEPING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What an operation that did not complete leaves behind.

    Attributes:
        quarantine: groups whose state is not known to be consistent, with why (AD-31).
        instances: engine processes as last seen.
        done: groups that reached the goal, for operations that keep what is done.
        changed: whether anything differs from before, beyond what was proven back.
        failed: participants that failed.
        is_profile_over: nobody who can be reached records the profile any more.
    """

    quarantine: Mapping[GroupId, str] = dataclasses.field(default_factory=dict)
    instances: Mapping[ParticipantId, str] = dataclasses.field(default_factory=dict)
    done: frozenset[GroupId] = frozenset()
    changed: bool = False
    failed: tuple[ParticipantId, ...] = ()
    is_profile_over: bool = False


def committed(
    snapshot: Snapshot, record: OperationRecord, steps: Sequence[StepRecord], *, phase_index: int
) -> Advance:
    """Pass the point of no return: the version is published in the journal first (AD-32)."""
    request = record.spec.request
    assert isinstance(request, UpdateWeightsRequest)
    verified = list(outcomes_of(record, steps, VerifyWeightsStep))
    digests = {o.participant_id: o.content_digest for o in verified if o.content_digest}
    weights = WeightRecord(
        model=record.spec.model,
        version=request.weight_version,
        operation_id=record.operation_id,
        source=request.source,
        content_digest=next(iter(digests.values()), b""),
        digests=digests,
    )
    desired = dataclasses.replace(
        snapshot.desired, weights=with_item(snapshot.desired.weights, weights.model, weights)
    )
    desired = _without_released(desired, _bound(desired, record), {ResourceKind.WEIGHTS})
    moves = dataclasses.replace(record.moves, committed=True, phase_index=phase_index)
    return Advance(moves=moves, desired=desired)


def _bound(desired: Desired, record: OperationRecord) -> frozenset[ParticipantId]:
    """Whom a published version binds among those that have something released: who is away gets it back, too, with
    the version, when it returns (AD-19, AD-45).
    """
    ids, skipped = frozenset(record.spec.participant_ids), record.spec.skipped
    held = {p for release in desired.releases.values() for p in release.remaining}
    return ids | {p for p in held if p in skipped or any(p.startswith(f"{s}/") for s in skipped)}


def completed(
    snapshot: Snapshot,
    record: OperationRecord,
    steps: Sequence[StepRecord],
    *,
    consistent: frozenset[GroupId],
    now_unix_nanos: int,
    file_values: FileValues,
) -> Advance:
    """End in success: every participant committed (AD-30).

    Args:
        file_values: what the config file says now.
        consistent: selected groups that were read back equal to what is desired after it; their quarantine ends
            (AD-31). Resume never opens a quarantine.
    """
    desired = after_success(
        snapshot.desired, record, steps, now_unix_nanos=now_unix_nanos, file_values=file_values
    )
    if record.spec.kind is not AdminOperationKind.RESUME:
        desired = _lift(desired, consistent)
    desired = risen(desired)
    result = result_of(record, steps, desired, now_unix_nanos=now_unix_nanos)
    moves = dataclasses.replace(
        record.moves,
        state=step(record.moves.state, Input.COMPLETED),
        phase_index=len(record.spec.phases),
        ended_at_unix_nanos=now_unix_nanos,
        revision_after=desired.revision,
        result=result,
    )
    statuses = tuple(
        dataclasses.replace(_status(record, p), phase=ParticipantPhase.COMMITTED)
        for p in record.spec.participant_ids
        if _status(record, p).phase is not ParticipantPhase.COMMITTED
    )
    updates = tuple(ParticipantUpdate(status=s) for s in statuses)
    ended = OperationCompleted(result=result, revision=desired.revision)
    return Advance(moves=moves, events=(*updates, ended), statuses=statuses, desired=desired)


def after_success(
    desired: Desired,
    record: OperationRecord,
    steps: Sequence[StepRecord],
    *,
    now_unix_nanos: int,
    file_values: FileValues,
) -> Desired:
    """The desired state once the operation has reached its goal everywhere.

    Args:
        file_values: what the config file says now, which reconfigured values are to hold over (AD-47).
    """
    spec = record.spec
    match spec.kind:
        case AdminOperationKind.PAUSE | AdminOperationKind.RELEASE_RESOURCES:
            return _settle_epochs(desired, record, steps)
        case AdminOperationKind.RESUME:
            return dataclasses.replace(desired, pauses=without_item(desired.pauses, spec.pause_epoch))
        case AdminOperationKind.RESTORE_RESOURCES:
            assert isinstance(spec.request, RestoreResourcesRequest)
            return _restored(desired, spec.resource_epoch, spec.request, only=None)
        case AdminOperationKind.START_PROFILE:
            assert isinstance(spec.request, StartProfileRequest)
            profile = ProfileRecord(
                profile_id=spec.profile_id,
                operation_id=spec.operation_id,
                participant_ids=spec.participant_ids,
                kinds=spec.request.kinds,
                started_at_unix_nanos=now_unix_nanos,
            )
            return dataclasses.replace(
                desired, profiles=with_item(desired.profiles, profile.profile_id, profile)
            )
        case AdminOperationKind.STOP_PROFILE:
            return _stopped(desired, record, steps)
        case AdminOperationKind.RECONFIGURE_SERVING:
            return _overridden(desired, record, steps, file_values)
        case _:
            return desired


def _settle_epochs(desired: Desired, record: OperationRecord, steps: Sequence[StepRecord]) -> Desired:
    spec = record.spec
    pauses, releases = dict(desired.pauses), dict(desired.releases)
    if spec.creates_pause and spec.pause_epoch in pauses:
        kept = work_of(record, steps, PauseStep).kept
        pauses[spec.pause_epoch] = dataclasses.replace(pauses[spec.pause_epoch], settled=True, kept=kept)
        for epoch in spec.replaces_epochs:
            pauses.pop(epoch, None)
    if spec.kind is AdminOperationKind.RELEASE_RESOURCES and spec.resource_epoch in releases:
        releases[spec.resource_epoch] = dataclasses.replace(releases[spec.resource_epoch], settled=True)
    return dataclasses.replace(desired, pauses=pauses, releases=releases)


def _restored(
    desired: Desired,
    epoch: int,
    request: RestoreResourcesRequest,
    *,
    only: Collection[ParticipantId] | None,
) -> Desired:
    """What is restored is no longer released: everywhere, or only on some participants."""
    release = desired.releases.get(epoch)
    if release is None:
        return desired
    remaining = {
        p: kinds - frozenset(request.kinds) if only is None or p in only else kinds
        for p, kinds in release.remaining.items()
    }
    remaining = {p: kinds for p, kinds in remaining.items() if kinds}
    if not remaining:
        return dataclasses.replace(desired, releases=without_item(desired.releases, epoch))
    left = dataclasses.replace(release, remaining=remaining)
    return dataclasses.replace(desired, releases=with_item(desired.releases, epoch, left))


def _without_released(
    desired: Desired, ids: frozenset[ParticipantId], kinds: Collection[ResourceKind]
) -> Desired:
    releases = {}
    for epoch, release in desired.releases.items():
        remaining = {
            p: held - frozenset(kinds) if p in ids else held for p, held in release.remaining.items()
        }
        remaining = {p: held for p, held in remaining.items() if held}
        if remaining:
            releases[epoch] = dataclasses.replace(release, remaining=remaining)
    return dataclasses.replace(desired, releases=releases)


def _stopped(desired: Desired, record: OperationRecord, steps: Sequence[StepRecord]) -> Desired:
    profile = desired.profiles.get(record.spec.profile_id)
    if profile is None or profile.stopped:
        return desired
    artifacts = tuple(a for o in outcomes_of(record, steps) for a in o.artifacts)
    profile = dataclasses.replace(
        profile,
        stopped=True,
        artifacts=artifacts,
        stopped_at_unix_nanos=record.spec.accepted_at_unix_nanos,
    )
    return dataclasses.replace(desired, profiles=with_item(desired.profiles, profile.profile_id, profile))


def _overridden(
    desired: Desired, record: OperationRecord, steps: Sequence[StepRecord], file_values: FileValues
) -> Desired:
    request = record.spec.request
    assert isinstance(request, ReconfigureServingRequest)
    late = {
        (o.participant_id, c.field)
        for o in outcomes_of(record, steps, ReconfigureStep)
        for c in o.changes
        if c.disposition is ChangeDisposition.NEEDS_RESTART
    }
    return overridden(
        desired,
        [g.group_id for g in record.spec.groups],
        request.changes,
        operation_id=record.operation_id,
        waiting={
            g.group_id: frozenset(field for p, field in late if p in g.participant_ids)
            for g in record.spec.groups
        },
        file_values=file_values,
    )


def _lift(desired: Desired, groups: frozenset[GroupId]) -> Desired:
    quarantines = {g: q for g, q in desired.quarantines.items() if g not in groups}
    return dataclasses.replace(desired, quarantines=quarantines)


def without_operation(desired: Desired, record: OperationRecord) -> Desired:
    """The desired state as if the operation had not been: what a rollback goes back to."""
    spec = record.spec
    pauses, releases = desired.pauses, desired.releases
    if spec.creates_pause:
        pauses = without_item(pauses, spec.pause_epoch)
    if spec.kind is AdminOperationKind.RELEASE_RESOURCES:
        releases = without_item(releases, spec.resource_epoch)
    return dataclasses.replace(desired, pauses=pauses, releases=releases)


def ended_badly(
    snapshot: Snapshot,
    record: OperationRecord,
    failure: AdminError,
    leftover: Leftover,
    *,
    now_unix_nanos: int,
    steps: Sequence[StepRecord] = (),
) -> Advance:
    """End failed, or cancelled when that is why it ended; who is not known to be consistent is quarantined."""
    if keeps_what_is_done(record.spec.kind) or record.moves.committed:
        desired = _after_partial(snapshot.desired, record, leftover, steps)
    else:
        desired = without_operation(snapshot.desired, record)
    desired = _quarantined(desired, record, leftover, now_unix_nanos=now_unix_nanos)
    has_left = leftover.changed or bool(leftover.quarantine) or record.moves.committed
    if has_left:
        desired = risen(desired)
    quarantined = tuple(
        p for g in record.spec.groups if g.group_id in leftover.quarantine for p in g.participant_ids
    )
    error = dataclasses.replace(
        failure,
        participants=leftover.failed or failure.participants,
        quarantined=quarantined,
        rolled_back=not has_left,
    )
    is_cancelled = record.moves.cancel_requested and record.moves.state in {
        AdminOperationState.CANCELLING,
        AdminOperationState.ROLLING_BACK,
    }
    moves = dataclasses.replace(
        record.moves,
        state=step(record.moves.state, Input.CANCELLED if is_cancelled else Input.FAILED),
        ended_at_unix_nanos=now_unix_nanos,
        revision_after=desired.revision,
        error=error if not is_cancelled or has_left else None,
        failure=None,
        result=caches_told(record, steps),
    )
    ended = (
        OperationCancelled(
            reason=record.moves.cancel_reason or "cancelled",
            revision=desired.revision,
            rolled_back=not has_left,
        )
        if is_cancelled
        else OperationFailed(error=error, revision=desired.revision)
    )
    statuses = tuple(
        dataclasses.replace(_status(record, p), phase=ParticipantPhase.QUARANTINED) for p in quarantined
    )
    updates = tuple(ParticipantUpdate(status=s) for s in statuses)
    return Advance(moves=moves, events=(*updates, ended), statuses=statuses, desired=desired)


def _after_partial(
    desired: Desired, record: OperationRecord, leftover: Leftover, steps: Sequence[StepRecord]
) -> Desired:
    """Resume and Restore keep what is done; the epoch stays valid for the rest (AD-29)."""
    spec = record.spec
    if spec.kind is AdminOperationKind.STOP_PROFILE and leftover.is_profile_over:
        # Its engine is gone or ended it by itself: what there is of it, is all there will be.
        return _stopped(desired, record, steps)
    done = {p for g in spec.groups if g.group_id in leftover.done for p in g.participant_ids}
    if spec.kind is AdminOperationKind.RESUME and done:
        pause = desired.pauses.get(spec.pause_epoch)
        if pause is None:
            return desired
        # Those that joined later count as named from here on: a rest has no selector any more.
        everybody = set(pause.participant_ids) | set(spec.participant_ids) | set(spec.skipped)
        rest = dataclasses.replace(pause, participant_ids=tuple(sorted(everybody - done)), binds=None)
        return dataclasses.replace(desired, pauses=with_item(desired.pauses, rest.epoch, rest))
    if spec.kind is AdminOperationKind.RESTORE_RESOURCES and done:
        assert isinstance(spec.request, RestoreResourcesRequest)
        return _restored(desired, spec.resource_epoch, spec.request, only=done)
    return desired


def _quarantined(
    desired: Desired, record: OperationRecord, leftover: Leftover, *, now_unix_nanos: int
) -> Desired:
    quarantines = dict(desired.quarantines)
    for group in record.spec.groups:
        why = leftover.quarantine.get(group.group_id)
        if why is None:
            continue
        quarantines[group.group_id] = QuarantineRecord(
            group_id=group.group_id,
            participant_ids=group.participant_ids,
            reason=why,
            operation_id=record.operation_id,
            since_unix_nanos=now_unix_nanos,
            instances={p: leftover.instances[p] for p in group.participant_ids if p in leftover.instances},
        )
    return dataclasses.replace(desired, quarantines=quarantines)


def _status(record: OperationRecord, participant_id: ParticipantId) -> ParticipantStatus:
    found = record.statuses.get(participant_id)
    return found or ParticipantStatus(participant_id=participant_id, phase=ParticipantPhase.PENDING)
