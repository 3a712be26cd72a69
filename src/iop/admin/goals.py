"""What a step must have achieved, judged from its answer and from what was read back afterwards (AD-37). Pure.

An answer that cannot be told counts as a failure: success is what was read back, not what was sent.
"""

from __future__ import annotations

import dataclasses
import enum

from iop.admin.enums import (
    AdminErrorCode,
    CacheOutcome,
    ChangeDisposition,
    ParticipantPhase,
)
from iop.admin.results import ParticipantError
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    ParticipantOutcome,
    ParticipantReadBack,
    ReconfigureStep,
    ReleaseStep,
    RestoreStep,
    StartProfileStep,
    Step,
    StopProfileStep,
    VerifyWeightsStep,
)

__all__ = ["Goal", "judge"]


@enum.unique
class Goal(enum.Enum):
    """What must hold after a step."""

    ANSWERED = "answered"
    CACHES_CLEARED = "caches_cleared"
    PAUSED = "paused"
    RUNNING = "running"
    RELEASED = "released"
    RESTORED = "restored"
    WEIGHTS_VERIFIED = "weights_verified"
    WEIGHTS_PUBLISHED = "weights_published"
    PROFILING = "profiling"
    PROFILE_STOPPED = "profile_stopped"
    RECONFIGURED = "reconfigured"


def judge(
    goal: Goal,
    body: Step,
    outcome: ParticipantOutcome,
    read_back: ParticipantReadBack,
    *,
    phase: ParticipantPhase,
) -> ParticipantError | None:
    """Why the participant did not reach the goal, or None when it did.

    Args:
        outcome: the step's answer for this participant.
        read_back: its state after the step.
        phase: what the error says about where it happened.
    """
    if outcome.error is not None:
        # A driver says APPLYING of whatever it did; which step that was is known here.
        is_vague = outcome.error.step is ParticipantPhase.APPLYING
        return dataclasses.replace(outcome.error, step=phase) if is_vague else outcome.error
    if not read_back.reachable:
        return ParticipantError(
            code=AdminErrorCode.PARTICIPANT_LOST,
            message="unreachable when its state was to be read back",
            step=phase,
            retryable=True,
        )
    shortfall = _shortfall(goal, body, outcome, read_back)
    if shortfall is None:
        return None
    code, message = shortfall
    return ParticipantError(code=code, message=message, step=phase, retryable=True)


_FAILED = AdminErrorCode.VERIFICATION_FAILED


def _shortfall(
    goal: Goal, body: Step, outcome: ParticipantOutcome, seen: ParticipantReadBack
) -> tuple[AdminErrorCode, str] | None:
    match goal:
        case Goal.ANSWERED:
            return None
        case Goal.CACHES_CLEARED:
            assert isinstance(body, FlushStep)
            return _caches(body, outcome, seen)
        case Goal.PAUSED:
            return _expect_flag(seen.paused, expected=True, name="paused")
        case Goal.RUNNING:
            return _expect_flag(seen.paused, expected=False, name="paused")
        case Goal.RELEASED:
            assert isinstance(body, ReleaseStep)
            if seen.released is None:
                return _FAILED, "whether resources are released could not be told"
            missing = frozenset(body.kinds) - seen.released
            return (_FAILED, f"not released: {_names(missing)}") if missing else None
        case Goal.RESTORED:
            assert isinstance(body, RestoreStep)
            if seen.released is None:
                return _FAILED, "whether resources are released could not be told"
            still = frozenset(body.kinds) & seen.released
            if still:
                return _FAILED, f"still released: {_names(still)}"
            return _version(body.weight_version, seen) if body.weight_version else None
        case Goal.WEIGHTS_VERIFIED:
            assert isinstance(body, VerifyWeightsStep | ApplyWeightsStep)
            if outcome.verified_by is None:
                return _FAILED, "the weights in place could not be verified"
            return None
        case Goal.WEIGHTS_PUBLISHED:
            assert isinstance(body, CommitWeightsStep)
            return _version(body.weight_version, seen)
        case Goal.PROFILING:
            assert isinstance(body, StartProfileStep)
            return _profiling(body, seen)
        case Goal.PROFILE_STOPPED:
            assert isinstance(body, StopProfileStep)
            if seen.profiles is None:
                return _FAILED, "whether the profiler runs could not be told"
            return (_FAILED, "the profiler still runs") if body.profile_id in seen.profiles else None
        case Goal.RECONFIGURED:
            assert isinstance(body, ReconfigureStep)
            return _serving(body, outcome, seen)


def _names(kinds: frozenset[enum.IntEnum] | frozenset[object]) -> str:
    return ", ".join(sorted(k.name for k in kinds if isinstance(k, enum.Enum)))


def _expect_flag(value: bool | None, *, expected: bool, name: str) -> tuple[AdminErrorCode, str] | None:
    if value is None:
        return _FAILED, f"whether it is {name} could not be told"
    if value is not expected:
        return _FAILED, f"it says that it is {'' if value else 'not '}{name}"
    return None


def _version(expected: str, seen: ParticipantReadBack) -> tuple[AdminErrorCode, str] | None:
    if seen.weight_version is None:
        return _FAILED, "its weight version could not be told"
    if seen.weight_version != expected:
        return _FAILED, f"it serves weight version {seen.weight_version!r}, not {expected!r}"
    return None


def _caches(
    body: FlushStep, outcome: ParticipantOutcome, seen: ParticipantReadBack
) -> tuple[AdminErrorCode, str] | None:
    """Every kind must be told CLEARED; a paused engine must also show nothing cached now."""
    told = {c.kind: c for c in outcome.caches}
    cached = dict(seen.cached)
    for kind in body.kinds:
        result = told.get(kind)
        if result is None or result.outcome is CacheOutcome.UNKNOWN:
            return _FAILED, f"whether {kind.name} was cleared could not be told"
        if result.outcome is CacheOutcome.REFUSED:
            return AdminErrorCode.REFUSED_BUSY, result.detail or f"{kind.name} was refused"
        # While it serves, an emptied cache fills again at once; only a stopped engine must still be empty.
        if seen.paused and cached.get(kind, 0) > 0:
            return _FAILED, f"{kind.name} still holds {cached[kind]} entries"
    return None


def _profiling(body: StartProfileStep, seen: ParticipantReadBack) -> tuple[AdminErrorCode, str] | None:
    if seen.profiles is None:
        return _FAILED, "whether the profiler runs could not be told"
    # A profile with a bound may be over before anybody looks.
    if body.profile_id not in seen.profiles and body.max_steps is None and body.max_duration_ms is None:
        return _FAILED, "the profiler does not run"
    return None


def _serving(
    body: ReconfigureStep, outcome: ParticipantOutcome, seen: ParticipantReadBack
) -> tuple[AdminErrorCode, str] | None:
    effective = dict(seen.serving)
    waits = {c.field for c in outcome.changes if c.disposition is ChangeDisposition.NEEDS_RESTART}
    for result in outcome.changes:
        if result.disposition is ChangeDisposition.REJECTED:
            return AdminErrorCode.PARTICIPANT_FAILED, f"{result.field.name}: {result.detail}"
    for change in body.changes:
        if change.field in waits:
            continue
        if change.field not in effective:
            return _FAILED, f"{change.field.name} could not be read back"
        if effective[change.field] != change.value:
            return _FAILED, f"{change.field.name} is {effective[change.field]!r}"
    return None
