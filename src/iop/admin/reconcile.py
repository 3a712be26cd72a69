"""Is a group as it is meant to be, and what brings it there (AD-35)? Pure.

One comparison serves four purposes: a newcomer's or returner's reconciliation, drift found by the periodic read-back,
the proof that a rollback worked, and the end of a quarantine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from iop.admin.desired import Desired, QuarantineRecord, WeightRecord, covering_pauses, released_kinds
from iop.admin.enums import AdmissionPolicy, PauseMode, ResourceKind, WeightRetention
from iop.admin.goals import Goal
from iop.admin.intent import rereadable
from iop.admin.overrides import lacking
from iop.admin.profile import ParticipantInfo
from iop.admin.requests import PauseSpec, ServingChange
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    ParticipantReadBack,
    PauseStep,
    PrepareWeightsStep,
    ReconfigureStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    Step,
    VerifyWeightsStep,
)
from iop.core.ids import ParticipantId

__all__ = ["Remedy", "RemedyStep", "divergence", "is_restarted", "remedy_for"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RemedyStep:
    """One step of a reconciliation and what it must achieve."""

    body: Step
    goal: Goal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What brings a group to its desired state.

    Attributes:
        steps: in order; empty when nothing is wrong.
        incurable: why no step can, empty when steps can: the group is to be quarantined.
    """

    steps: tuple[RemedyStep, ...] = ()
    incurable: str = ""


def divergence(
    desired: Desired, members: Sequence[ParticipantInfo], seen: Mapping[ParticipantId, ParticipantReadBack]
) -> str:
    """How the first differing participant of a group differs from what is desired; empty when none does.

    A state that cannot be told counts as different (AD-37).
    """
    for member in members:
        read_back = seen.get(member.participant_id)
        if read_back is None or not read_back.reachable:
            return f"{member.participant_id} cannot be read back"
        difference = _differs(desired, member, read_back)
        if difference:
            return f"{member.participant_id}: {difference}"
    return ""


def _differs(desired: Desired, member: ParticipantInfo, seen: ParticipantReadBack) -> str:
    should_pause = bool(covering_pauses(desired, member))
    if seen.paused is None:
        return "whether it is paused could not be told"
    if seen.paused is not should_pause:
        return f"it is {'paused' if seen.paused else 'running'}"
    should_release = released_kinds(desired, member.participant_id)
    if seen.released is None:
        if should_release or member.capabilities.resource_kinds:
            return "what it has released could not be told"
    elif seen.released != should_release:
        return f"released are {sorted(k.name for k in seen.released)}, not {sorted(k.name for k in should_release)}"
    # Legality forbids reconfiguring what has released memory; it is caught up with after the restore (AD-48).
    if not should_release and (unserved := lacking(desired, member, seen)):
        return _words(unserved[0], seen)
    if ResourceKind.WEIGHTS in should_release:
        return ""
    for weights in _published(desired, member):
        if not _has_weights(weights, member, seen):
            return f"it serves weight version {seen.weight_version!r}, not {weights.version!r}"
    return ""


def _words(change: ServingChange, seen: ParticipantReadBack) -> str:
    effective = dict(seen.serving)
    if change.field not in effective:
        return f"{change.field.name} could not be told"
    return f"{change.field.name} is {effective[change.field]!r}, not {change.value!r}"


def _published(desired: Desired, member: ParticipantInfo) -> list[WeightRecord]:
    """Weights that some operation published; those an engine started with bind nobody."""
    records = (desired.weights.get(model) for model in member.models)
    return [w for w in records if w is not None and w.operation_id]


def _has_weights(weights: WeightRecord, member: ParticipantInfo, seen: ParticipantReadBack) -> bool:
    """Same label and, where content is told, the same content: labels recur, identities do not.

    Of who joined after the version was verified no content is known: it is loaded there once, and noted.
    """
    if seen.weight_version != weights.version:
        return False
    if not (weights.digests and seen.content_digest):
        return True
    return weights.digests.get(member.participant_id, b"") == seen.content_digest


def remedy_for(
    desired: Desired, members: Sequence[ParticipantInfo], seen: Mapping[ParticipantId, ParticipantReadBack]
) -> Remedy:
    """Steps that bring a group, all of whose members were reached, to the desired state.

    Pausing comes first and waking last, so that no token is made in a state that is not wanted.
    """
    difference = divergence(desired, members, seen)
    if not difference:
        return Remedy()
    pauses = [p for m in members for p in covering_pauses(desired, m)]
    is_paused = all(seen[m.participant_id].paused for m in members)
    stale = _stale_weights(desired, members, seen)
    if stale is not None and rereadable(stale) is None:
        return Remedy(incurable=f"weight version {stale.version!r} cannot be loaded again")
    release, restore = _resource_changes(desired, members, seen)
    steps: list[RemedyStep] = []
    has_inner_change = bool(release or restore or stale is not None)
    if (pauses or has_inner_change) and not is_paused:
        spec = pauses[0].spec if pauses else _REMEDY_PAUSE
        steps.append(RemedyStep(body=PauseStep(pause=spec), goal=Goal.PAUSED))
    if restore:
        steps.append(_restore(desired, members, restore))
    if reconfigure := _reconfigure(desired, members, seen):
        steps.append(reconfigure)
    if stale is not None:
        steps.extend(_reload(stale))
    if release:
        steps.append(_release(desired, release))
    was_woken = any(seen[m.participant_id].paused is not False for m in members)
    if not pauses and (has_inner_change or was_woken):
        steps.append(RemedyStep(body=ResumeStep(), goal=Goal.RUNNING))
    return Remedy(steps=tuple(steps), incurable="" if steps else difference)


def is_restarted(quarantine: QuarantineRecord, seen: Mapping[ParticipantId, ParticipantReadBack]) -> bool:
    """Whether every engine process is another one than when the group was quarantined (AD-31)."""
    return all(s.instance and quarantine.instances.get(p, s.instance) != s.instance for p, s in seen.items())


_REMEDY_PAUSE = PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.QUEUE)
"""How a group is stopped that runs on in a wrong state: its gate is closed, so nothing good is lost."""


def _stale_weights(
    desired: Desired, members: Sequence[ParticipantInfo], seen: Mapping[ParticipantId, ParticipantReadBack]
) -> WeightRecord | None:
    for member in members:
        gone = seen[member.participant_id].released or frozenset()
        if ResourceKind.WEIGHTS in released_kinds(desired, member.participant_id) & gone:
            continue  # what it gets back is judged when they are restored
        for weights in _published(desired, member):
            if not _has_weights(weights, member, seen[member.participant_id]):
                return weights
    return None


def _reconfigure(
    desired: Desired, members: Sequence[ParticipantInfo], seen: Mapping[ParticipantId, ParticipantReadBack]
) -> RemedyStep | None:
    """Tell a group the overrides that it does not serve (AD-47), unless it holds memory back by right."""
    lacked = {
        c.field: c
        for m in members
        if not (seen[m.participant_id].released or frozenset()) & released_kinds(desired, m.participant_id)
        for c in lacking(desired, m, seen[m.participant_id])
    }
    if not lacked:
        return None
    return RemedyStep(body=ReconfigureStep(changes=tuple(lacked.values())), goal=Goal.RECONFIGURED)


def _resource_changes(
    desired: Desired, members: Sequence[ParticipantInfo], seen: Mapping[ParticipantId, ParticipantReadBack]
) -> tuple[frozenset[ResourceKind], frozenset[ResourceKind]]:
    """Kinds to release and to restore on the group: it acts only as a whole."""
    release: frozenset[ResourceKind] = frozenset()
    restore: frozenset[ResourceKind] = frozenset()
    for member in members:
        wanted = released_kinds(desired, member.participant_id)
        actual = seen[member.participant_id].released or frozenset()
        release |= wanted - actual
        restore |= actual - wanted
    return release, restore


def _release(desired: Desired, kinds: frozenset[ResourceKind]) -> RemedyStep:
    retention = None
    if ResourceKind.WEIGHTS in kinds:
        said = [r.retention for r in desired.releases.values() if r.retention is not None]
        retention = said[0] if said else WeightRetention.OFFLOAD_TO_HOST
    body = ReleaseStep(kinds=tuple(sorted(kinds)), weight_retention=retention)
    return RemedyStep(body=body, goal=Goal.RELEASED)


def _restore(
    desired: Desired, members: Sequence[ParticipantInfo], kinds: frozenset[ResourceKind]
) -> RemedyStep:
    source = None
    if ResourceKind.WEIGHTS in kinds:
        records = [desired.weights[m] for p in members for m in p.models if m in desired.weights]
        source = rereadable(records[0]) if records else None
    return RemedyStep(body=RestoreStep(kinds=tuple(sorted(kinds)), weight_source=source), goal=Goal.RESTORED)


def _reload(weights: WeightRecord) -> tuple[RemedyStep, ...]:
    source = rereadable(weights)
    assert source is not None
    model, version = weights.model, weights.version
    return (
        RemedyStep(
            body=PrepareWeightsStep(model=model, source=source, weight_version=version),
            goal=Goal.ANSWERED,
        ),
        RemedyStep(
            body=ApplyWeightsStep(model=model, source=source, weight_version=version), goal=Goal.ANSWERED
        ),
        RemedyStep(body=VerifyWeightsStep(model=model, weight_version=version), goal=Goal.WEIGHTS_VERIFIED),
        RemedyStep(body=CommitWeightsStep(model=model, weight_version=version), goal=Goal.WEIGHTS_PUBLISHED),
    )
