"""State legality, epochs and conflicts: the checks of a request against what else is going on (AD-14, AD-18, AD-48).

Pure. Each check yields refusals instead of raising, so that a plan can list them all.
"""

from __future__ import annotations

from collections.abc import Iterator

from iop.admin.desired import Desired, covering_pauses, released_kinds
from iop.admin.enums import PauseMode
from iop.admin.epochs import claim_pause, find_pause, find_release, has_frozen_work
from iop.admin.intent import Intent
from iop.admin.journal import Snapshot
from iop.admin.permissions import Principal
from iop.admin.profile import ParticipantInfo
from iop.admin.records import OperationRecord
from iop.admin.requests import (
    MutationRequest,
    PauseRequest,
    PauseSpec,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    StartProfileRequest,
    UpdateWeightsRequest,
    kind_of,
)
from iop.admin.states import Legality, legality_of, participant_state
from iop.core.errors import Conflict, IopError, PreconditionFailed

__all__ = ["conflict_refusals", "epoch_refusals", "state_refusals", "superseded_by"]


def epoch_refusals(request: MutationRequest, intent: Intent, desired: Desired) -> Iterator[IopError]:
    """Stale epochs, and the compare-and-swap on the weight version (AD-14, AD-45)."""
    try:
        match request:
            case ResumeRequest(pause_epoch=epoch):
                find_pause(desired, epoch)
            case RestoreResourcesRequest(resource_epoch=epoch, kinds=kinds):
                find_release(desired, epoch, kinds)
            case UpdateWeightsRequest():
                _check_weight_version(request, intent, desired)
            case _:
                pass
    except IopError as refusal:
        yield refusal


def _check_weight_version(request: UpdateWeightsRequest, intent: Intent, desired: Desired) -> None:
    current = intent.previous_version
    if request.expected_weight_version is not None and request.expected_weight_version != current:
        raise Conflict(
            f"the weight version is {current!r}, not {request.expected_weight_version!r}",
            reason="WEIGHT_VERSION_MISMATCH",
            details={"current_weight_version": current},
        )
    if intent.selection is None or request.weight_version != current:
        return
    # Whoever is quarantined may hold anything: the published version is then what it is to get (AD-31).
    if not any(p.group_id in desired.quarantines for p in intent.selection.chosen):
        raise PreconditionFailed(
            f"{current!r} is the weight version already; publish under another one",
            reason="SAME_WEIGHT_VERSION",
            details={"current_weight_version": current},
        )


def state_refusals(
    request: MutationRequest, principal: Principal, intent: Intent, desired: Desired
) -> Iterator[IopError]:
    """What the state of the selected participants forbids (AD-41 to AD-48)."""
    if intent.selection is None:
        return
    chosen = intent.selection.chosen
    yield from _table_refusals(request, chosen, desired)
    match request:
        case ResumeRequest() if intent.released_away:
            yield PreconditionFailed(
                f"resources are released and their participants are away: {', '.join(intent.released_away)}",
                reason="RESOURCES_RELEASED",
                details={"participants": ",".join(intent.released_away)},
            )
        case PauseRequest(pause=pause):
            try:
                claim_pause(pause, chosen, principal=principal.name, desired=desired, binds=intent.binds)
            except PreconditionFailed as refusal:
                yield refusal
        case ReleaseResourcesRequest():
            yield from _release_refusals(request, intent, desired)
        case UpdateWeightsRequest():
            yield from _update_refusals(request, intent, desired)
        case _:
            pass


def _table_refusals(
    request: MutationRequest, chosen: tuple[ParticipantInfo, ...], desired: Desired
) -> Iterator[IopError]:
    refused: dict[Legality, list[str]] = {}
    # What rests on a pause must not rest on one whose operation still runs: it goes if that fails (AD-29).
    rests = isinstance(request, ReleaseResourcesRequest | UpdateWeightsRequest)
    for participant in chosen:
        # Quarantine refuses nothing by itself (AD-31): judge by what else holds.
        state = participant_state(
            connected=True,
            quarantined=False,
            released=bool(released_kinds(desired, participant.participant_id)),
            paused=any(pause.settled or not rests for pause in covering_pauses(desired, participant)),
        )
        answer = legality_of(state, kind_of(request))
        if answer is Legality.LEGAL or (answer is Legality.LEGAL_WITH_PAUSE and _own_pause(request)):
            continue
        refused.setdefault(answer, []).append(participant.participant_id)
    for answer, ids in refused.items():
        yield PreconditionFailed(
            f"{_WORDS[answer]}: {', '.join(ids)}",
            reason=answer.value,
            details={"participants": ",".join(ids)},
        )


_WORDS = {
    Legality.LEGAL_WITH_PAUSE: "not paused, and the request carries no pause",
    Legality.STALE_EPOCH: "no active epoch covers",
    Legality.RESOURCES_RELEASED: "resources are released; restore them first",
    Legality.SKIPPED: "offline",
}


def _own_pause(request: MutationRequest) -> PauseSpec | None:
    match request:
        case ReleaseResourcesRequest(pause=pause):
            return pause
        case UpdateWeightsRequest(quiesce=quiesce):
            return quiesce
        case _:
            return None


def _drain_refusals(
    pause: PauseSpec | None, chosen: tuple[ParticipantInfo, ...], desired: Desired
) -> Iterator[IopError]:
    if pause is None or pause.mode is not PauseMode.DRAIN:
        return
    frozen = {p.epoch for info in chosen for p in covering_pauses(desired, info) if has_frozen_work(p)}
    for epoch in sorted(frozen):
        yield PreconditionFailed(
            f"work is frozen under pause epoch {epoch}, and frozen work cannot drain",
            reason="PAUSE_MODE",
            details={"pause_epoch": str(epoch)},
        )


def _release_refusals(
    request: ReleaseResourcesRequest, intent: Intent, desired: Desired
) -> Iterator[IopError]:
    assert intent.selection is not None
    chosen = intent.selection.chosen
    yield from _drain_refusals(request.pause, chosen, desired)
    wanted = frozenset(request.kinds)
    already = sorted({k.name for p in chosen for k in wanted & released_kinds(desired, p.participant_id)})
    if already:
        yield PreconditionFailed(
            f"already released: {', '.join(already)}",
            reason="ALREADY_RELEASED",
            details={"kinds": ",".join(already)},
        )
    if intent.is_irreversible:
        yield _irreversible("the weights could not be reloaded; offload them instead", intent)


def _update_refusals(request: UpdateWeightsRequest, intent: Intent, desired: Desired) -> Iterator[IopError]:
    assert intent.selection is not None
    chosen = intent.selection.chosen
    yield from _drain_refusals(request.quiesce, chosen, desired)
    frozen = {p.epoch for info in chosen for p in covering_pauses(desired, info) if has_frozen_work(p)}
    if request.quiesce is None and frozen:
        yield PreconditionFailed(
            "work is frozen under a KEEP pause and would go on under other weights; say how to quiesce it",
            reason="KEPT_WORK",
            details={"pause_epochs": ",".join(map(str, sorted(frozen)))},
        )
    if intent.is_irreversible and not request.allow_irreversible:
        yield _irreversible(
            "the weights in place could not be put back if the update failed; set allow_irreversible to go on",
            intent,
        )


def _irreversible(why: str, intent: Intent) -> PreconditionFailed:
    """Refuse, and say what would make it reversible where that is known."""
    assert intent.selection is not None
    if intent.weights is None or intent.weights.operation_id:
        return PreconditionFailed(why, reason="IRREVERSIBLE")
    told = {p.participant_id: p.startup_source for p in intent.selection.chosen}
    silent = sorted(p for p, source in told.items() if source is None)
    if silent:
        remedy = (
            f"{', '.join(silent)} do not tell where the weights that they serve can be read again: write it into the"
            " config as weights_source of their adapter"
        )
    else:
        remedy = "the engines tell different places where the weights that they serve can be read again"
    return PreconditionFailed(
        f"{why}; {remedy}",
        reason="IRREVERSIBLE",
        details={"participants": ",".join(silent or sorted(told)), "key": "weights_source"},
    )


def superseded_by(
    request: MutationRequest, principal: Principal, intent: Intent, snapshot: Snapshot
) -> tuple[OperationRecord, ...]:
    """Running pauses that this request ends and takes the gates of (AD-18's exception)."""
    return tuple(r for r in _overlapping(intent, snapshot) if _supersedes(request, principal, intent, r))


def _overlapping(intent: Intent, snapshot: Snapshot) -> Iterator[OperationRecord]:
    if intent.selection is None:
        return
    ids = {p.participant_id for p in intent.selection.chosen}
    for record in snapshot.running.values():
        if not ids.isdisjoint(record.spec.participant_ids):
            yield record


def _supersedes(
    request: MutationRequest, principal: Principal, intent: Intent, older: OperationRecord
) -> bool:
    before = older.spec.request
    if not isinstance(request, PauseRequest) or not isinstance(before, PauseRequest):
        return False
    assert intent.selection is not None
    ids = {p.participant_id for p in intent.selection.chosen}
    return (
        request.pause.mode is PauseMode.ABORT
        and before.pause.mode is not PauseMode.ABORT
        and older.spec.creates_pause
        and (older.spec.principal == principal.name or principal.may_everything)
        # Only a pause that covers all of the older one can take over its gates: none is open between.
        and set(older.spec.participant_ids) <= ids
    )


def conflict_refusals(
    request: MutationRequest,
    principal: Principal,
    intent: Intent,
    snapshot: Snapshot,
    *,
    ended_profiles: frozenset[str],
) -> Iterator[IopError]:
    """Overlap with what runs already (AD-18)."""
    for record in _overlapping(intent, snapshot):
        if not _supersedes(request, principal, intent, record):
            yield PreconditionFailed(
                f"operation {record.operation_id} is running on some of the participants",
                reason="OPERATION_IN_PROGRESS",
                details={"operation_id": record.operation_id},
            )
    if not isinstance(request, StartProfileRequest) or intent.selection is None:
        return
    ids = {p.participant_id for p in intent.selection.chosen}
    for profile in snapshot.desired.profiles.values():
        is_running = not profile.stopped and profile.profile_id not in ended_profiles
        if is_running and not ids.isdisjoint(profile.participant_ids):
            yield PreconditionFailed(
                f"profile {profile.profile_id} is running on some of the participants",
                reason="PROFILE_ACTIVE",
                details={"profile_id": profile.profile_id},
            )
