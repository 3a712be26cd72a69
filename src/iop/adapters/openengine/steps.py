"""Admin steps as mutations of an engine's own OpenEngineAdmin, and its profile as read-back. Pure but for
protobuf.

Every step becomes at most one mutation with the key ``operation_id/step``, so that repeating the step
repeats the mutation's answer and not its effect (AD-12, AD-36). What the engine's server does inside one
mutation (two phases, undo, verification) is its own affair; we read its profile back afterwards.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    CacheOutcome,
    CachePolicy,
    ParticipantPhase,
    PauseMode,
    ReconfigurableField,
    VerificationMethod,
)
from iop.admin.profile import (
    ActivePause,
    ActiveRelease,
    AdminParticipant,
    AdminProfile,
    ModelWeights,
    ParticipantInfo,
)
from iop.admin.requests import (
    DiskSource,
    FlushCachesRequest,
    MutationOptions,
    ParticipantTargets,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    ServingChange,
    ServingValue,
    UpdateWeightsRequest,
    WeightSource,
)
from iop.admin.results import (
    AdminError,
    ChangeResult,
    FlushCachesResult,
    OperationResult,
    ParticipantError,
    ParticipantStatus,
    PauseResult,
    ReleaseResourcesResult,
    RestoreResourcesResult,
    ResumeResult,
)
from iop.admin.steps import (
    BYTES_UNIT,
    ParticipantOutcome,
    ParticipantReadBack,
    StepCall,
    StepProgress,
    StepResult,
    WorkCounts,
    a_little_less,
)
from iop.core.errors import IopError, PreconditionFailed
from iop.core.ids import ParticipantId

KEY_BYTES_MAX: Final = 128
"""Longest idempotency key of the contract (AD-11)."""

DEADLINE_MS_MAX: Final = 24 * 3600 * 1000
"""Longest operation deadline of the contract."""


def nested_key(call: StepCall, *, suffix: str = "") -> str:
    """The key of a step's mutation at the engine.

    Raises:
        PreconditionFailed: the operation's id does not fit a key.
    """
    key = f"{call.operation_id}/{call.step}{suffix}"
    if len(key) > KEY_BYTES_MAX or not key.isascii() or not key.isprintable():
        raise PreconditionFailed("the operation's id cannot be a key at the engine", reason="BAD_NESTED_KEY")
    return key


def is_nested_key(key: str) -> bool:
    """Whether an engine's operation was one of our steps: ``operation/number``."""
    operation, _, rest = key.partition("/")
    return bool(operation) and rest.partition("/")[0].isdigit()


def options_of(call: StepCall, *, suffix: str = "", validate_only: bool = False) -> MutationOptions:
    """What every nested mutation carries: its key, and a deadline of its own.

    The engine's time is up before ours is, so that what it says of its ranks then can still be passed on (AD-31).
    """
    return MutationOptions(
        idempotency_key=nested_key(call, suffix=suffix),
        deadline_ms=max(1, min(int(a_little_less(call.answer_within_s) * 1000), DEADLINE_MS_MAX)),
        validate_only=validate_only,
    )


def targets_of(call: StepCall) -> ParticipantTargets:
    """The step's own group, named."""
    return ParticipantTargets(participant_ids=call.participant_ids)


@enum.unique
class Standing(enum.Enum):
    """What pauses of ours that stand at the engine mean for a pause that is asked for now."""

    ENOUGH = "enough"
    """It stands as still as wanted, or harder; a softer mode would be refused, and would change nothing."""
    THAWS = "thaws"
    """Frozen work is to drain: it must go on first."""
    OPEN = "open"
    """The engine takes the pause as it is asked for."""


_HARDNESS: Final = {PauseMode.KEEP: 0, PauseMode.DRAIN: 1, PauseMode.ABORT: 2}


def over_standing(
    mode: PauseMode, standing: Sequence[ActivePause], participant_ids: Sequence[ParticipantId]
) -> Standing:
    """Judge a pause over those of ours that an older step left: one that was given up, or whose undo never came.

    Args:
        mode: wanted now.
        standing: in force at the engine.
        participant_ids: who is to be paused.
    """
    covering = [pause for pause in standing if set(participant_ids) <= set(pause.participant_ids)]
    hardest = max((_HARDNESS[pause.mode] for pause in covering), default=-1)
    if hardest > _HARDNESS[mode]:
        return Standing.ENOUGH
    if mode is PauseMode.DRAIN and any(pause.mode is PauseMode.KEEP for pause in standing):
        return Standing.THAWS
    return Standing.OPEN


# ---- the profile, read ----


def infos_of(
    profile: AdminProfile, *, instance: str, sources: Mapping[str, tuple[str, DiskSource]]
) -> tuple[ParticipantInfo, ...]:
    """The engine's participants as ours.

    Args:
        sources: by model, a version and where it can be read again; of no use for any other version.
    """
    return tuple(
        replace(each.info, instance=instance, startup_source=_source_of(each, sources))
        for each in profile.participants
    )


def _source_of(
    participant: AdminParticipant, sources: Mapping[str, tuple[str, DiskSource]]
) -> DiskSource | None:
    told = [sources[model] for model in participant.info.models if model in sources]
    if len(told) != 1 or told[0][0] != participant.weight_version:
        return None
    return told[0][1]


def read_back_of(
    profile: AdminProfile,
    participant_ids: Iterable[ParticipantId],
    *,
    instance: str,
    profiles_running: Mapping[ParticipantId, frozenset[str]],
    frozen: int,
    serving: Mapping[ParticipantId, Mapping[ReconfigurableField, ServingValue]] = MappingProxyType({}),
) -> tuple[ParticipantReadBack, ...]:
    """How these participants stand by the engine's own profile.

    Args:
        profile: read just now.
        participant_ids: whom to tell about; one that the profile lacks is not reachable.
        instance: of the engine's process.
        profiles_running: profiles that we started, by our ids.
        frozen: requests that a KEEP pause of ours left in the engine.
        serving: values in effect, as far as the engine told them; its profile does not.
    """
    known = {each.info.participant_id: each for each in profile.participants}
    answers = []
    for participant_id in participant_ids:
        participant = known.get(participant_id)
        if participant is None or not participant.info.connected:
            answers.append(
                ParticipantReadBack(participant_id=participant_id, reachable=False, instance=instance)
            )
            continue
        if participant.quarantined:
            answers.append(_in_quarantine(participant, instance=instance))
            continue
        weights = weights_of(profile, participant.info.models)
        answers.append(
            ParticipantReadBack(
                participant_id=participant_id,
                instance=instance,
                paused=participant.paused,
                frozen=frozen if participant.paused else 0,
                released=frozenset(
                    kind for release in releases_over(profile, (participant_id,)) for kind in release.kinds
                ),
                weight_version=participant.weight_version or (weights.weight_version if weights else None),
                content_digest=weights.content_digest if weights else b"",
                verified_by=_method(weights),
                profiles=profiles_running.get(participant_id, frozenset()),
                serving=tuple(serving.get(participant_id, {}).items()),
            )
        )
    return tuple(answers)


def _in_quarantine(participant: AdminParticipant, *, instance: str) -> ParticipantReadBack:
    """A participant of which the engine itself does not know that it is as it should be (AD-31).

    It takes no inference, whatever its pause says. What cannot be told counts as different, so that it is not opened
    here either, and whatever heals it there is tried.
    """
    return ParticipantReadBack(
        participant_id=participant.info.participant_id, instance=instance, paused=participant.paused
    )


def weights_of(profile: AdminProfile, models: Sequence[str]) -> ModelWeights | None:
    """The engine's entry for the weights of these models; the only one where names do not tell."""
    for weights in profile.weights:
        if weights.model in models:
            return weights
    return profile.weights[0] if len(profile.weights) == 1 else None


def engine_model(profile: AdminProfile, participant_ids: Sequence[ParticipantId], wanted: str) -> str:
    """The engine's own name for the model that an operation names by its public id.

    Raises:
        PreconditionFailed: the engine serves several models and none has that name.
    """
    models = {
        model
        for each in profile.participants
        if each.info.participant_id in participant_ids
        for model in each.info.models
    }
    if wanted in models:
        return wanted
    if len(models) == 1:
        return models.pop()
    raise PreconditionFailed("the engine serves no model of that name", reason="UNKNOWN_MODEL")


def pauses_over(profile: AdminProfile, participant_ids: Sequence[ParticipantId]) -> tuple[ActivePause, ...]:
    """Pauses in force over any of these participants, oldest first."""
    return tuple(
        sorted(
            (pause for pause in profile.pauses if not set(participant_ids).isdisjoint(pause.participant_ids)),
            key=lambda pause: pause.pause_epoch,
        )
    )


def releases_over(
    profile: AdminProfile, participant_ids: Sequence[ParticipantId]
) -> tuple[ActiveRelease, ...]:
    """Releases in force over any of these participants, oldest first."""
    return tuple(
        sorted(
            (each for each in profile.releases if not set(participant_ids).isdisjoint(each.participant_ids)),
            key=lambda each: each.resource_epoch,
        )
    )


def _method(weights: ModelWeights | None) -> VerificationMethod | None:
    if weights is None:
        return None
    return VerificationMethod.DIGEST if weights.content_digest else VerificationMethod.LABEL


# ---- results ----


def succeeded(
    call: StepCall, result: OperationResult | None, *, read: Sequence[ParticipantReadBack] = ()
) -> StepResult:
    """What a completed mutation says, as a step's result; one outcome per participant of the call."""
    outcomes = {each: ParticipantOutcome(participant_id=each) for each in call.participant_ids}
    for back in read:
        if back.participant_id in outcomes:
            outcomes[back.participant_id] = replace(
                outcomes[back.participant_id],
                weight_version=back.weight_version or "",
                content_digest=back.content_digest,
                verified_by=back.verified_by,
            )
    work = WorkCounts()
    match result:
        case PauseResult(drained=drained, aborted=aborted, kept=kept):
            work = WorkCounts(drained=drained, aborted=aborted, kept=kept)
        case ResumeResult(resumed=resumed):
            work = WorkCounts(resumed=resumed)
        case FlushCachesResult():
            outcomes = {each: _flushed(outcome, result) for each, outcome in outcomes.items()}
        case ReleaseResourcesResult(released=amounts) | RestoreResourcesResult(restored=amounts):
            outcomes = {
                each: replace(
                    outcome, amounts=tuple(amount for amount in amounts if amount.participant_id == each)
                )
                for each, outcome in outcomes.items()
            }
        case _:
            pass
    return StepResult(participants=tuple(outcomes.values()), work=work)


def loaded(status: ParticipantStatus) -> StepProgress:
    """How much a rank has loaded, as its engine's status of it tells."""
    return StepProgress(
        participant_id=status.participant_id,
        phase=status.phase,
        done=status.bytes_done or 0,
        total=status.bytes_total or 0,
        unit=BYTES_UNIT,
    )


def _flushed(outcome: ParticipantOutcome, result: FlushCachesResult) -> ParticipantOutcome:
    """Anything but CLEARED is no success, whatever the operation called itself (AD-37, AD-40)."""
    mine = tuple(cache for cache in result.caches if cache.participant_id == outcome.participant_id)
    bad = next((cache for cache in mine if cache.outcome is not CacheOutcome.CLEARED), None)
    error = None
    if not mine or bad is not None:
        is_refused = bad is not None and bad.outcome is CacheOutcome.REFUSED
        error = ParticipantError(
            code=AdminErrorCode.REFUSED_BUSY if is_refused else AdminErrorCode.VERIFICATION_FAILED,
            message=bad.detail
            if bad is not None and bad.detail
            else "the engine did not tell that it was cleared",
            step=ParticipantPhase.APPLYING,
            retryable=is_refused,
        )
    return replace(outcome, caches=mine, error=error)


def failed_by(
    call: StepCall, error: AdminError, failed: Mapping[ParticipantId, ParticipantError]
) -> StepResult:
    """A failed mutation: who failed has its error; the rest is as the engine left it.

    A flush that was refused, and whatever the engine proved to be rolled back, changed nothing.

    Args:
        failed: what the engine told of its ranks on the way, which says more of each than the operation's error.
    """
    guilty = set(error.participants) or set(call.participant_ids)
    told = ParticipantError(
        code=error.code, message=error.message, step=ParticipantPhase.APPLYING, retryable=error.retryable
    )

    def of(each: ParticipantId) -> ParticipantError:
        mine = failed.get(each, told)
        return replace(mine, message=f"engine: {mine.message}"[:512])

    return StepResult(
        participants=tuple(
            ParticipantOutcome(
                participant_id=each,
                error=of(each) if each in guilty or not guilty & set(call.participant_ids) else None,
                changed=not error.rolled_back,
            )
            for each in call.participant_ids
        )
    )


def failed_so_far(call: StepCall, errors: Mapping[ParticipantId, ParticipantError]) -> StepResult:
    """A mutation that still runs, or takes back, when its step's time is up: the ranks that failed, as they were told.

    Args:
        errors: of at least one rank of the call. The other ranks are only held up with them.
    """
    held_up = ParticipantError(
        code=AdminErrorCode.INTERRUPTED,
        message=f"engine: held up by {', '.join(sorted(errors))}"[:512],
        step=ParticipantPhase.APPLYING,
        retryable=True,
    )
    return StepResult(
        participants=tuple(
            ParticipantOutcome(participant_id=each, error=errors.get(each, held_up))
            for each in call.participant_ids
        )
    )


def refused(call: StepCall, error: IopError) -> StepResult:
    """A mutation that the engine refused before it accepted it: nothing was changed."""
    told = ParticipantError(
        code=AdminErrorCode.PARTICIPANT_FAILED,
        message=error.message[:512],
        step=ParticipantPhase.APPLYING,
        retryable=error.retryable,
    )
    return StepResult(
        participants=tuple(
            ParticipantOutcome(participant_id=each, error=told, changed=False)
            for each in call.participant_ids
        )
    )


def untouched(call: StepCall) -> StepResult:
    """Nothing had to be done."""
    return StepResult(
        participants=tuple(
            ParticipantOutcome(participant_id=each, changed=False) for each in call.participant_ids
        )
    )


def not_verified(
    call: StepCall,
    message: str,
    *,
    work: WorkCounts | None = None,
    bad: Sequence[ParticipantId] | None = None,
) -> StepResult:
    """The mutation completed, but the read-back says otherwise (AD-37)."""
    told = ParticipantError(
        code=AdminErrorCode.VERIFICATION_FAILED, message=message, step=ParticipantPhase.VERIFYING
    )
    return StepResult(
        participants=tuple(
            ParticipantOutcome(participant_id=each, error=told if bad is None or each in bad else None)
            for each in call.participant_ids
        ),
        work=work or WorkCounts(),
    )


# ---- requests ----


def resume_request(call: StepCall, pause: ActivePause, *, is_whole_step: bool) -> ResumeRequest:
    """End one pause. Unless that is the whole step, it has a key of its own."""
    suffix = "" if is_whole_step else f"/{pause.pause_epoch}"
    return ResumeRequest(options=options_of(call, suffix=suffix), pause_epoch=pause.pause_epoch)


def restore_request(
    call: StepCall, release: ActiveRelease, kinds: Iterable[int], *, is_only: bool
) -> RestoreResourcesRequest:
    """Take back what one release holds of the wanted kinds."""
    suffix = "" if is_only else f"/{release.resource_epoch}"
    wanted = set(kinds)
    return RestoreResourcesRequest(
        options=options_of(call, suffix=suffix),
        resource_epoch=release.resource_epoch,
        kinds=tuple(kind for kind in release.kinds if kind in wanted),
    )


def reconfigure_request(
    call: StepCall, changes: tuple[ServingChange, ...], *, validate_only: bool = False
) -> ReconfigureServingRequest:
    """Change serving values, or ask whether that would go."""
    return ReconfigureServingRequest(
        options=options_of(call, suffix="/check" if validate_only else "", validate_only=validate_only),
        target=targets_of(call),
        changes=changes,
    )


def effective_values(
    results: Iterable[ChangeResult], changes: Iterable[ServingChange]
) -> dict[ReconfigurableField, ServingValue]:
    """What the engine says is in effect now, as far as its words can be read as values of that field."""
    wished = {change.field: change.value for change in changes}
    values: dict[ReconfigurableField, ServingValue] = {}
    for result in results:
        wish, text = wished.get(result.field), result.effective_value
        match wish:
            case bool():
                if text.lower() in {"true", "false"}:
                    values[result.field] = text.lower() == "true"
            case int() if not isinstance(wish, enum.Enum):
                if text.isascii() and text.isdigit():
                    values[result.field] = int(text)
            case None:
                pass
            case _ if text == str(wish):
                values[result.field] = wish
            case _:
                pass
    return values


def update_request(
    call: StepCall,
    *,
    model: str,
    source: WeightSource,
    version: str,
    pauses: Sequence[ActivePause] = (),
    validate_only: bool = False,
) -> UpdateWeightsRequest:
    """Replace the engine's weights; the operation core has paused before and flushes after, by steps of
    their own.

    Args:
        call: the step.
        model: the engine's own name of it.
        source: of the new weights.
        version: their label.
        pauses: in force at the engine. Work frozen by one of them goes on under the new weights only where that was
            asked for (AD-33); the core has judged that for the fleet, so the engine is told so.
        validate_only: ask whether it would go.
    """
    kept = next((pause for pause in pauses if pause.mode is PauseMode.KEEP), None)
    return UpdateWeightsRequest(
        options=options_of(call, suffix="/check" if validate_only else "", validate_only=validate_only),
        model=model,
        source=source,
        weight_version=version,
        cache_policy=CachePolicy.KEEP,
        quiesce=None if kept is None else PauseSpec(mode=PauseMode.KEEP, admission=kept.admission),
        # The core has judged reversibility for the whole fleet; the engine sees only its own part of it.
        allow_irreversible=True,
    )


STEP_KINDS: Final[Mapping[type, AdminOperationKind]] = {
    PauseRequest: AdminOperationKind.PAUSE,
    ResumeRequest: AdminOperationKind.RESUME,
    FlushCachesRequest: AdminOperationKind.FLUSH_CACHES,
    ReleaseResourcesRequest: AdminOperationKind.RELEASE_RESOURCES,
    RestoreResourcesRequest: AdminOperationKind.RESTORE_RESOURCES,
    UpdateWeightsRequest: AdminOperationKind.UPDATE_WEIGHTS,
}
"""The operation that each nested mutation is, for the capability check."""
