"""The ordered phases of each kind of operation, with what takes each back (AD-29, AD-32). Pure.

Only facts that were fixed at acceptance go in, so the same operation has the same phases after a restart.
"""

from __future__ import annotations

import dataclasses

from iop.admin.enums import BusyPolicy, CacheKind, CachePolicy, ParticipantPhase
from iop.admin.goals import Goal
from iop.admin.records import Phase
from iop.admin.requests import (
    FlushCachesRequest,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    StartProfileRequest,
    UpdateWeightsRequest,
    WeightSource,
)
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    PauseStep,
    PrepareWeightsStep,
    ReconfigureStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    StartProfileStep,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)

__all__ = [
    "CacheFlush",
    "UpdateFacts",
    "flush_phases",
    "pause_phases",
    "reconfigure_phases",
    "release_phases",
    "restore_phases",
    "resume_phases",
    "start_profile_phases",
    "stop_profile_phases",
    "update_phases",
]

_P = ParticipantPhase
Groups = tuple[int, ...] | None


def _pause(spec: PauseSpec) -> Phase:
    verb = {1: "drain", 2: "abort", 3: "freeze"}[spec.mode]
    return Phase(
        doing=_P.QUIESCING,
        done=_P.QUIESCED,
        action=f"close admission, {verb} work in flight, stop stepping",
        body=PauseStep(pause=spec),
        goal=Goal.PAUSED,
        undo=ResumeStep(),
    )


def _resume(groups: Groups) -> Phase:
    return Phase(
        doing=_P.APPLYING,
        done=_P.APPLIED,
        action="step again, then open admission",
        body=ResumeStep(),
        goal=Goal.RUNNING,
        groups=groups,
    )


def flush_phases(request: FlushCachesRequest) -> tuple[Phase, ...]:
    """Empty the caches. No undo: a cache refills by itself."""
    names = ", ".join(k.name for k in request.kinds)
    return (
        Phase(
            doing=_P.APPLYING,
            done=_P.APPLIED,
            action=f"empty {names}; when busy: {request.busy_policy.name}",
            body=FlushStep(kinds=request.kinds, busy_policy=request.busy_policy),
            goal=Goal.CACHES_CLEARED,
        ),
    )


def pause_phases(request: PauseRequest) -> tuple[Phase, ...]:
    """Close gates, quiesce, read back."""
    return (_pause(request.pause),)


def resume_phases(groups: Groups) -> tuple[Phase, ...]:
    """Wake the groups that nothing else keeps paused; gates open when the epoch ends."""
    return (_resume(groups),) if groups is None or groups else ()


def release_phases(
    request: ReleaseResourcesRequest, *, weight_source: WeightSource | None, weight_version: str
) -> tuple[Phase, ...]:
    """Pause if asked, then release. The undo reloads discarded weights from their source."""
    names = ", ".join(k.name for k in request.kinds)
    release = Phase(
        doing=_P.APPLYING,
        done=_P.APPLIED,
        action=f"release {names}",
        body=ReleaseStep(kinds=request.kinds, weight_retention=request.weight_retention),
        goal=Goal.RELEASED,
        undo=RestoreStep(kinds=request.kinds, weight_source=weight_source, weight_version=weight_version),
    )
    return (release,) if request.pause is None else (_pause(request.pause), release)


def restore_phases(
    request: RestoreResourcesRequest, *, weight_source: WeightSource | None, weight_version: str
) -> tuple[Phase, ...]:
    """Restore; discarded weights are reloaded from their source and verified by version (AD-44)."""
    names = ", ".join(k.name for k in request.kinds)
    return (
        Phase(
            doing=_P.APPLYING,
            done=_P.APPLIED,
            action=f"restore {names}",
            body=RestoreStep(kinds=request.kinds, weight_source=weight_source, weight_version=weight_version),
            goal=Goal.RESTORED,
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlush:
    """What is emptied on some groups: engines of several kinds have several caches."""

    groups: Groups
    kinds: tuple[CacheKind, ...]
    busy_policy: BusyPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """What an update needs to know about the fleet, fixed at acceptance.

    Attributes:
        previous_version: the version published now; empty when unknown.
        previous_source: where it can be read again, None when it must be held.
        must_hold: keep the old weights until commit.
        is_released: the weights are released now, so the update also restores them.
        flushes: caches that hold something computed under the old weights.
        wake: groups that nothing else keeps paused.
    """

    previous_version: str
    previous_source: WeightSource | None
    must_hold: bool
    is_released: bool
    flushes: tuple[CacheFlush, ...]
    wake: Groups


def update_phases(request: UpdateWeightsRequest, facts: UpdateFacts) -> tuple[Phase, ...]:
    """Prepare, quiesce, apply, verify; commit; then invalidate caches and open (AD-32)."""
    undo = UndoWeightsStep(
        model=request.model,
        previous_source=facts.previous_source,
        previous_weight_version=facts.previous_version,
    )
    phases = [
        Phase(
            doing=_P.PREPARING,
            done=_P.PREPARED,
            action="check and stage the new weights",
            body=PrepareWeightsStep(
                model=request.model,
                source=request.source,
                weight_version=request.weight_version,
                hold_previous=facts.must_hold,
            ),
            goal=Goal.ANSWERED,
            undo=undo,
        )
    ]
    if request.quiesce is not None:
        phases.append(_pause(request.quiesce))
    phases += [
        Phase(
            doing=_P.APPLYING,
            done=_P.APPLIED,
            action="put the new weights in place",
            body=ApplyWeightsStep(
                model=request.model,
                source=request.source,
                weight_version=request.weight_version,
                restores_weights=facts.is_released,
            ),
            goal=Goal.ANSWERED,
            undo=undo,
        ),
        Phase(
            doing=_P.VERIFYING,
            done=_P.VERIFIED,
            action="read the weights back and compare",
            body=VerifyWeightsStep(model=request.model, weight_version=request.weight_version),
            goal=Goal.WEIGHTS_VERIFIED,
        ),
        Phase(
            doing=_P.VERIFIED,
            done=_P.COMMITTED,
            action=f"publish weight version {request.weight_version}",
            body=CommitWeightsStep(model=request.model, weight_version=request.weight_version),
            goal=Goal.WEIGHTS_PUBLISHED,
            commits=True,
        ),
    ]
    if request.cache_policy is CachePolicy.FLUSH:
        phases += [
            Phase(
                doing=_P.COMMITTED,
                done=_P.COMMITTED,
                action="empty caches of the old weights",
                body=FlushStep(kinds=flush.kinds, busy_policy=flush.busy_policy),
                goal=Goal.CACHES_CLEARED,
                groups=flush.groups,
            )
            for flush in facts.flushes
        ]
    if request.quiesce is not None and (facts.wake is None or facts.wake):
        phases.append(dataclasses.replace(_resume(facts.wake), doing=_P.COMMITTED, done=_P.COMMITTED))
    return tuple(phases)


def start_profile_phases(request: StartProfileRequest, profile_id: str) -> tuple[Phase, ...]:
    """Start recording."""
    return (
        Phase(
            doing=_P.APPLYING,
            done=_P.APPLIED,
            action="start the profilers",
            body=StartProfileStep(
                profile_id=profile_id,
                kinds=request.kinds,
                max_steps=request.max_steps,
                max_duration_ms=request.max_duration_ms,
                label=request.label,
            ),
            goal=Goal.PROFILING,
            undo=StopProfileStep(profile_id=profile_id),
        ),
    )


def stop_profile_phases(profile_id: str) -> tuple[Phase, ...]:
    """Stop recording and collect the artifacts."""
    return (
        Phase(
            doing=_P.APPLYING,
            done=_P.APPLIED,
            action="stop the profilers and collect artifacts",
            body=StopProfileStep(profile_id=profile_id),
            goal=Goal.PROFILE_STOPPED,
        ),
    )


def reconfigure_phases(request: ReconfigureServingRequest) -> tuple[Phase, ...]:
    """Change serving values; the undo is made from the values read back before."""
    names = ", ".join(c.field.name for c in request.changes)
    step = ReconfigureStep(changes=request.changes)
    return (
        Phase(
            doing=_P.APPLYING,
            done=_P.APPLIED,
            action=f"set {names}",
            body=step,
            goal=Goal.RECONFIGURED,
            undo=step,
        ),
    )
