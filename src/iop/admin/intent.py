"""What a request means in the present state: who is selected, which epoch, which weights. Pure.

`Intent` is what all checks of a request look at; `OperationFacts` is what an accepted operation keeps of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import assert_never

from iop.admin.desired import (
    Desired,
    PauseRecord,
    ProfileRecord,
    ReleaseRecord,
    WeightRecord,
    covering_pauses,
    released_kinds,
)
from iop.admin.enums import BusyPolicy, CacheKind, ResourceKind, WeightRetention
from iop.admin.epochs import claim_pause
from iop.admin.permissions import Principal
from iop.admin.phases import (
    CacheFlush,
    UpdateFacts,
    flush_phases,
    pause_phases,
    reconfigure_phases,
    release_phases,
    restore_phases,
    resume_phases,
    start_profile_phases,
    stop_profile_phases,
    update_phases,
)
from iop.admin.profile import ParticipantInfo
from iop.admin.records import GroupMembers, Phase
from iop.admin.requests import (
    DiskSource,
    FlushCachesRequest,
    InlineTensorSource,
    ModelTargets,
    MutationRequest,
    PauseRequest,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    StartProfileRequest,
    StopProfileRequest,
    Target,
    UpdateWeightsRequest,
    WeightSource,
)
from iop.admin.steps import profile_id_of
from iop.admin.targets import (
    Selection,
    binding,
    by_group,
    is_of_untold_group,
    public_models,
    select,
    select_ids,
)
from iop.core.errors import NotFound, PreconditionFailed
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = ["Intent", "OperationFacts", "intent_of", "operation_facts", "rereadable"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A request, understood.

    Attributes:
        selection: who; None when that cannot be known (unknown name or epoch).
        not_found: why it cannot be known, if a name is unknown.
        needs_participants: an empty selection is refused.
        model: public id, of an update.
        weights: the published weights concerned, where known.
        is_irreversible: what is replaced or discarded could not be put back.
        binds: the selector, when it also binds participants that join later.
        released_away: whom a resume would let go on although it is away and holds resources back.
    """

    principal: str
    selection: Selection | None
    not_found: NotFound | None = None
    needs_participants: bool = True
    pause: PauseRecord | None = None
    release: ReleaseRecord | None = None
    profile: ProfileRecord | None = None
    model: str = ""
    weights: WeightRecord | None = None
    must_hold: bool = False
    is_irreversible: bool = False
    released_away: tuple[ParticipantId, ...] = ()
    binds: Target | None = None

    @property
    def previous_version(self) -> str:
        """The version published before; empty when unknown."""
        return self.weights.version if self.weights is not None else ""

    @property
    def previous_source(self) -> WeightSource | None:
        """Where the published weights can be read again, if anywhere."""
        return rereadable(self.weights)


def rereadable(weights: WeightRecord | None) -> WeightSource | None:
    """The source of published weights, if it can be read again: files, or spooled tensors (AD-32)."""
    if weights is None or not isinstance(weights.source, DiskSource | InlineTensorSource):
        return None
    return weights.source


def sourced(weights: WeightRecord | None, participants: Iterable[ParticipantInfo]) -> WeightRecord | None:
    """Weights with the source that an operation over these participants could put them back from.

    What an operation published has its own source. Of weights that engines came with, only they can tell it; it counts
    when all of them tell the same one, since a step goes to all of them alike.
    """
    if weights is None or weights.operation_id:
        return weights
    told = [p.startup_source for p in participants]
    common = told[0] if told and all(source == told[0] for source in told) else None
    return dataclasses.replace(weights, source=common)


def intent_of(
    request: MutationRequest,
    principal: Principal,
    desired: Desired,
    participants: Sequence[ParticipantInfo],
) -> Intent:
    """Understand a request. Never raises: what is unknown is told in the intent."""
    name = principal.name
    match request:
        case FlushCachesRequest() | PauseRequest() | StartProfileRequest() | ReconfigureServingRequest():
            return _selecting(name, request.target, participants)
        case ReleaseResourcesRequest():
            intent = _selecting(name, request.target, participants)
            discards = request.weight_retention is WeightRetention.DISCARD
            weights = _weights_of(intent.selection, desired)
            return dataclasses.replace(
                intent,
                weights=weights if ResourceKind.WEIGHTS in request.kinds else None,
                is_irreversible=discards and rereadable(weights) is None,
            )
        case UpdateWeightsRequest():
            return _updating(request, name, desired, participants)
        case ResumeRequest():
            pause = desired.pauses.get(request.pause_epoch)
            if pause is None:
                return Intent(principal=name, selection=None)
            covered = [p.participant_id for p in participants if pause.covers(p)]
            selection = select_ids(covered, participants)
            return Intent(
                principal=name,
                selection=selection,
                pause=pause,
                released_away=_released_away(pause, selection, desired, participants),
            )
        case RestoreResourcesRequest():
            release = desired.releases.get(request.resource_epoch)
            if release is None:
                return Intent(principal=name, selection=None)
            selection = select_ids(release.remaining, participants)
            return Intent(
                principal=name,
                selection=selection,
                release=release,
                weights=_weights_of(selection, desired),
            )
        case StopProfileRequest():
            return _stopping(request, name, desired, participants)
        case _:
            assert_never(request)


def _selecting(principal: str, target: Target, participants: Sequence[ParticipantInfo]) -> Intent:
    try:
        return Intent(
            principal=principal,
            selection=select(target, participants),
            binds=binding(target, participants),
        )
    except NotFound as unknown:
        return Intent(principal=principal, selection=None, not_found=unknown)


def _released_away(
    pause: PauseRecord, selection: Selection, desired: Desired, participants: Sequence[ParticipantInfo]
) -> tuple[ParticipantId, ...]:
    """Participants of a pause that are away while something of theirs is released under it (AD-42).

    The pause ends for them too: they would come back to serve without what they had released.
    """
    away = set(selection.skipped)
    held = {p for release in desired.releases.values() for p in release.remaining}
    return tuple(
        sorted(
            p
            for p in held
            if p in away
            or any(p.startswith(f"{group}/") for group in away)
            or (p in pause.participant_ids and is_of_untold_group(p, participants))
        )
    )


def _weights_of(selection: Selection | None, desired: Desired) -> WeightRecord | None:
    """The one model's weights that the selection serves; None when several or unknown."""
    models = {m for p in (selection.chosen if selection else ()) for m in p.models}
    found = [desired.weights[m] for m in sorted(models) if m in desired.weights]
    return sourced(found[0], selection.chosen) if selection is not None and len(found) == 1 else None


def _updating(
    request: UpdateWeightsRequest,
    principal: str,
    desired: Desired,
    participants: Sequence[ParticipantInfo],
) -> Intent:
    intent = _selecting(principal, ModelTargets(models=(request.model,)), participants)
    if intent.selection is None:
        return intent
    (model,) = public_models((request.model,), participants)
    weights = sourced(desired.weights.get(model), intent.selection.chosen)
    can_hold = all(p.capabilities.holds_previous_weights for p in intent.selection.chosen)
    has_source = rereadable(weights) is not None
    return dataclasses.replace(
        intent,
        model=model,
        weights=weights,
        must_hold=not has_source and can_hold,
        is_irreversible=not has_source and not can_hold,
    )


def _stopping(
    request: StopProfileRequest, principal: str, desired: Desired, participants: Sequence[ParticipantInfo]
) -> Intent:
    profile = desired.profiles.get(request.profile_id)
    if profile is None:
        unknown = NotFound(
            f"no such profile: {request.profile_id}",
            reason="PROFILE_NOT_FOUND",
            details={"profile_id": request.profile_id},
        )
        return Intent(principal=principal, selection=None, not_found=unknown)
    # A stopped profile names its artifacts again, whoever is offline by now (AD-46).
    selection = Selection(chosen=()) if profile.stopped else select_ids(profile.participant_ids, participants)
    return Intent(
        principal=principal,
        selection=selection,
        profile=profile,
        needs_participants=not profile.stopped,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """What an operation keeps of the state in which it was accepted."""

    phases: tuple[Phase, ...]
    pause_epoch: int = 0
    creates_pause: bool = False
    replaces_epochs: tuple[int, ...] = ()
    resource_epoch: int = 0
    gates_operation: bool = False
    profile_id: str = ""


def operation_facts(
    request: MutationRequest,
    operation_id: OperationId,
    intent: Intent,
    groups: tuple[GroupMembers, ...],
    desired: Desired,
) -> OperationFacts:
    """Allot epochs and lay out the phases. For a request that would be refused: a best guess, for plans."""
    assert intent.selection is not None
    chosen = intent.selection.chosen
    epoch = desired.last_epoch + 1
    match request:
        case FlushCachesRequest():
            return OperationFacts(phases=flush_phases(request))
        case PauseRequest():
            try:
                claim = claim_pause(
                    request.pause,
                    chosen,
                    principal=intent.principal,
                    desired=desired,
                    binds=intent.binds,
                )
            except PreconditionFailed:
                return OperationFacts(phases=pause_phases(request))
            return OperationFacts(
                phases=pause_phases(request),
                pause_epoch=claim.existing_epoch or epoch,
                creates_pause=not claim.existing_epoch,
                replaces_epochs=claim.replaces,
            )
        case ResumeRequest():
            wake = _wakeable(chosen, groups, desired, without_epoch=request.pause_epoch)
            return OperationFacts(phases=resume_phases(wake), pause_epoch=request.pause_epoch)
        case ReleaseResourcesRequest():
            phases = release_phases(
                request,
                weight_source=intent.previous_source,
                weight_version=intent.previous_version,
            )
            if request.pause is None:
                return OperationFacts(phases=phases, resource_epoch=epoch)
            return OperationFacts(
                phases=phases, pause_epoch=epoch, creates_pause=True, resource_epoch=epoch + 1
            )
        case RestoreResourcesRequest():
            has_weights = ResourceKind.WEIGHTS in request.kinds
            discarded = intent.release is not None and intent.release.retention is WeightRetention.DISCARD
            return OperationFacts(
                phases=restore_phases(
                    request,
                    weight_source=intent.previous_source if has_weights and discarded else None,
                    weight_version=intent.previous_version if has_weights else "",
                ),
                resource_epoch=request.resource_epoch,
            )
        case UpdateWeightsRequest():
            resolved = dataclasses.replace(request, model=intent.model)
            return OperationFacts(
                phases=update_phases(resolved, _update_facts(intent, groups, desired)),
                gates_operation=request.quiesce is not None,
            )
        case StartProfileRequest():
            profile_id = profile_id_of(operation_id)
            return OperationFacts(phases=start_profile_phases(request, profile_id), profile_id=profile_id)
        case StopProfileRequest():
            is_running = intent.profile is not None and not intent.profile.stopped
            phases = stop_profile_phases(request.profile_id) if is_running else ()
            return OperationFacts(phases=phases, profile_id=request.profile_id)
        case ReconfigureServingRequest():
            return OperationFacts(phases=reconfigure_phases(request))
        case _:
            assert_never(request)


def _wakeable(
    chosen: Sequence[ParticipantInfo],
    groups: tuple[GroupMembers, ...],
    desired: Desired,
    *,
    without_epoch: int = 0,
) -> tuple[int, ...] | None:
    """Indices of the groups that no other pause keeps asleep; None means all of them."""
    held: set[GroupId] = {
        p.group_id
        for p in chosen
        if any(pause.epoch != without_epoch for pause in covering_pauses(desired, p))
    }
    awake = tuple(index for index, group in enumerate(groups) if group.group_id not in held)
    return None if len(awake) == len(groups) else awake


_CACHE_OF_WEIGHTS = tuple(CacheKind)
_POLITE_LAST = (BusyPolicy.PREEMPT, BusyPolicy.WAIT, BusyPolicy.FAIL)


def _flushes(chosen: Sequence[ParticipantInfo], groups: tuple[GroupMembers, ...]) -> tuple[CacheFlush, ...]:
    """Everything that each group caches, also what others do not; equal ones together (AD-34)."""
    found: dict[tuple[tuple[CacheKind, ...], BusyPolicy], list[int]] = {}
    members = by_group(chosen)
    for index, group in enumerate(groups):
        offered = [p.capabilities for p in members[group.group_id]]
        kinds = tuple(k for k in _CACHE_OF_WEIGHTS if all(k in c.cache_kinds for c in offered))
        policies = [b for b in _POLITE_LAST if all(b in c.busy_policies for c in offered)]
        if kinds:
            found.setdefault((kinds, policies[0] if policies else BusyPolicy.FAIL), []).append(index)
    return tuple(
        CacheFlush(
            groups=None if len(indices) == len(groups) else tuple(indices), kinds=kinds, busy_policy=policy
        )
        for (kinds, policy), indices in found.items()
    )


def _update_facts(intent: Intent, groups: tuple[GroupMembers, ...], desired: Desired) -> UpdateFacts:
    assert intent.selection is not None
    chosen = intent.selection.chosen
    released = any(ResourceKind.WEIGHTS in released_kinds(desired, p.participant_id) for p in chosen)
    return UpdateFacts(
        previous_version=intent.previous_version,
        previous_source=intent.previous_source,
        must_hold=intent.must_hold,
        is_released=released,
        flushes=_flushes(chosen, groups),
        wake=_wakeable(chosen, groups, desired),
    )
