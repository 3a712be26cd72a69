"""The admin profile, put together from what is desired and what was read back (AD-50). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from iop.admin.capability import cancellable_kinds, union_of
from iop.admin.desired import Desired, covering_pauses, released_kinds
from iop.admin.intent import rereadable, sourced
from iop.admin.profile import (
    ActivePause,
    ActiveRelease,
    AdminLimits,
    AdminParticipant,
    AdminProfile,
    ModelWeights,
    ParticipantInfo,
)
from iop.admin.states import participant_state
from iop.admin.steps import ParticipantReadBack
from iop.core.ids import ParticipantId

__all__ = ["profile_of"]


def profile_of(
    desired: Desired,
    participants: Sequence[ParticipantInfo],
    *,
    limits: AdminLimits,
    seen: Mapping[ParticipantId, ParticipantReadBack],
) -> AdminProfile:
    """The whole profile; weight versions of participants are as last read back."""
    capabilities = union_of(p.capabilities for p in participants)
    return AdminProfile(
        capabilities=capabilities,
        cancellable=tuple(k for k in cancellable_kinds() if k in capabilities.operations),
        limits=limits,
        revision=desired.revision,
        pauses=tuple(
            ActivePause(
                pause_epoch=pause.epoch,
                mode=pause.spec.mode,
                admission=pause.spec.admission,
                participant_ids=pause.participant_ids
                + tuple(
                    p.participant_id
                    for p in participants
                    if pause.covers(p) and p.participant_id not in pause.participant_ids
                ),
                operation_id=pause.operation_id,
                principal=pause.principal,
            )
            for pause in sorted(desired.pauses.values(), key=lambda p: p.epoch)
        ),
        releases=tuple(
            ActiveRelease(
                resource_epoch=release.epoch,
                kinds=tuple(sorted(frozenset().union(*release.remaining.values()))),
                participant_ids=tuple(release.remaining),
                operation_id=release.operation_id,
            )
            for release in sorted(desired.releases.values(), key=lambda r: r.epoch)
        ),
        weights=tuple(_weights(desired, participants, model) for model in sorted(desired.weights)),
        participants=tuple(_participant(desired, p, seen.get(p.participant_id)) for p in participants),
    )


def _weights(desired: Desired, participants: Sequence[ParticipantInfo], model: str) -> ModelWeights:
    record = desired.weights[model]
    serving = [p for p in participants if model in p.models]
    can_hold = bool(serving) and all(p.capabilities.holds_previous_weights for p in serving)
    return ModelWeights(
        model=model,
        weight_version=record.version,
        operation_id=record.operation_id,
        content_digest=record.content_digest,
        reversible=can_hold or rereadable(sourced(record, serving)) is not None,
    )


def _participant(
    desired: Desired, info: ParticipantInfo, seen: ParticipantReadBack | None
) -> AdminParticipant:
    quarantine = desired.quarantines.get(info.group_id)
    is_paused = bool(covering_pauses(desired, info))
    is_released = bool(released_kinds(desired, info.participant_id))
    return AdminParticipant(
        info=info,
        state=participant_state(
            connected=info.connected,
            quarantined=quarantine is not None,
            released=is_released,
            paused=is_paused,
        ),
        weight_version=(seen.weight_version if seen is not None else None) or "",
        quarantine_reason=quarantine.reason if quarantine is not None else "",
        paused=is_paused,
        released=is_released,
        quarantined=quarantine is not None,
    )
