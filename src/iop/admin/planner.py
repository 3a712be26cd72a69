"""The planner: from a request and the state of things to an accepted operation, a refusal, or a plan. Pure.

`accept` runs inside the journal's acceptance transaction, so what it checks is what holds when the operation becomes
durable. `explain` makes the same checks and lists them all (AD-105). Checks run in the order of AD-17: the caller has
done authentication, permission, shape; the journal does idempotency; here follow capability, participants, revision,
epoch, state legality, conflict, limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from iop.admin.capability import capability_refusals, limit_refusals
from iop.admin.desired import Desired, PauseRecord, ReleaseRecord, with_item, without_item
from iop.admin.enums import AdminOperationState, CancelDisposition
from iop.admin.intent import Intent, intent_of, operation_facts
from iop.admin.journal import Acceptance, Advance, Snapshot
from iop.admin.legality import conflict_refusals, epoch_refusals, state_refusals, superseded_by
from iop.admin.permissions import Principal
from iop.admin.profile import AdminLimits, ParticipantInfo
from iop.admin.records import OperationMoves, OperationRecord, OperationSpec, view_of
from iop.admin.requests import (
    MutationRequest,
    PauseRequest,
    PauseSpec,
    ReleaseResourcesRequest,
    Target,
    kind_of,
)
from iop.admin.results import (
    OperationAccepted,
    OperationCancelled,
    OperationPlan,
    PlannedStep,
)
from iop.admin.revisions import check_revision, risen
from iop.admin.states import Input, step
from iop.admin.targets import affected_models, binding, check_participants, group_members, widened
from iop.core.errors import IopError, Overloaded, PreconditionFailed
from iop.core.ids import OperationId, ParticipantId

__all__ = ["PlanInput", "accept", "explain", "judge_cancel", "refusals", "request_cancel"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """All that a decision may depend on, beside the journal's own state.

    Attributes:
        participants: as the driver knows them now.
        ended_profiles: profiles that reached their bound: read back as running nowhere, not stopped yet.
        blockers: refusals found by asking participants before (AD-47's judgements, for instance).
    """

    principal: Principal
    request: MutationRequest
    request_sha256: bytes
    operation_id: OperationId
    participants: Sequence[ParticipantInfo]
    limits: AdminLimits
    now_unix_nanos: int
    blockers: tuple[IopError, ...] = ()
    ended_profiles: frozenset[str] = frozenset()


def refusals(inp: PlanInput, snapshot: Snapshot) -> Iterator[IopError]:
    """Everything that speaks against acceptance now, in the order of AD-17."""
    intent = intent_of(inp.request, inp.principal, snapshot.desired, inp.participants)
    chosen = intent.selection.chosen if intent.selection is not None else ()
    if intent.not_found is not None:
        yield intent.not_found
    yield from capability_refusals(inp.request, chosen)
    if intent.selection is not None and intent.needs_participants:
        try:
            check_participants(intent.selection)
        except PreconditionFailed as refusal:
            yield refusal
    try:
        check_revision(
            inp.request.options, current=snapshot.desired.revision, has_running=bool(snapshot.running)
        )
    except IopError as refusal:
        yield refusal
    yield from epoch_refusals(inp.request, intent, snapshot.desired)
    yield from state_refusals(inp.request, inp.principal, intent, snapshot.desired)
    yield from inp.blockers or limit_refusals(inp.request, chosen)
    yield from conflict_refusals(
        inp.request, inp.principal, intent, snapshot, ended_profiles=inp.ended_profiles
    )
    # What it supersedes ends in the same transaction (AD-18).
    others = len(snapshot.running) - len(superseded_by(inp.request, inp.principal, intent, snapshot))
    if others >= inp.limits.max_concurrent_operations:
        yield Overloaded(
            f"at most {inp.limits.max_concurrent_operations} operations at once",
            reason="TOO_MANY_OPERATIONS",
            details={"limit": str(inp.limits.max_concurrent_operations)},
        )


def explain(inp: PlanInput, snapshot: Snapshot) -> OperationPlan:
    """What would happen, and what speaks against it (AD-105). Changes nothing."""
    blockers = tuple(f"{r.reason}: {r.message}" for r in refusals(inp, snapshot))
    intent = intent_of(inp.request, inp.principal, snapshot.desired, inp.participants)
    if intent.selection is None:
        return OperationPlan(
            steps=(), blockers=blockers, pauses_inference=False, revision=snapshot.desired.revision
        )
    spec = _spec(inp, intent, snapshot)
    steps = tuple(
        PlannedStep(
            phase=phase.doing,
            participant_ids=_phase_participants(spec, phase.groups),
            action=phase.action,
        )
        for phase in spec.phases
    )
    return OperationPlan(
        steps=steps,
        blockers=blockers,
        pauses_inference=_pauses_inference(inp.request),
        revision=snapshot.desired.revision,
        participant_ids=spec.participant_ids,
        skipped=spec.skipped,
        affected_models=spec.affected_models,
        irreversible=intent.is_irreversible,
    )


def accept(inp: PlanInput, snapshot: Snapshot) -> Acceptance:
    """Accept the operation.

    Raises:
        IopError: the first refusal in the order of AD-17.
    """
    for refusal in refusals(inp, snapshot):
        raise refusal
    intent = intent_of(inp.request, inp.principal, snapshot.desired, inp.participants)
    spec = _spec(inp, intent, snapshot)
    older = superseded_by(inp.request, inp.principal, intent, snapshot)
    desired = snapshot.desired
    others: dict[OperationId, Advance] = {}
    for record in older:
        desired = risen(_without_epochs_of(desired, record))
        others[record.operation_id] = _supersede(record, spec, desired)
    spec = dataclasses.replace(spec, revision_before=desired.revision)
    desired = dataclasses.replace(_with_epochs_of(desired, spec, inp.participants), last_ordinal=spec.ordinal)
    for record in older:
        # The gate that is handed over is that of whoever joins later, too (AD-18, AD-19).
        binds = snapshot.desired.pauses[record.spec.pause_epoch].binds
        desired = _bound_by(desired, spec.pause_epoch, binds)
    record = OperationRecord(spec=spec, moves=OperationMoves())
    view = dataclasses.replace(view_of(record), last_sequence=1)
    first = Advance(
        moves=record.moves,
        events=(OperationAccepted(operation=view),),
        statuses=view.participants,
        desired=desired,
    )
    return Acceptance(spec=spec, first=first, others=others)


def judge_cancel(record: OperationRecord) -> CancelDisposition:
    """What CancelOperation answers for an operation of a cancellable kind (AD-24)."""
    if record.moves.state.is_terminal:
        return CancelDisposition.ALREADY_TERMINAL
    if record.moves.committed:
        return CancelDisposition.TOO_LATE
    return CancelDisposition.CANCELLING


def request_cancel(record: OperationRecord, *, reason: str) -> Advance | None:
    """Note that an operation was called off; None when there is nothing to note.

    One that is rolling back already goes where a cancel would take it.
    """
    if judge_cancel(record) is not CancelDisposition.CANCELLING:
        return None
    if record.moves.state not in {AdminOperationState.PENDING, AdminOperationState.RUNNING}:
        return None
    moves = dataclasses.replace(
        record.moves,
        state=step(record.moves.state, Input.CANCEL_REQUESTED),
        cancel_requested=True,
        cancel_reason=reason,
    )
    return Advance(moves=moves)


def _pauses_inference(request: MutationRequest) -> bool:
    match request:
        case PauseRequest():
            return True
        case ReleaseResourcesRequest(pause=pause):
            return pause is not None
        case _:
            return getattr(request, "quiesce", None) is not None


def _phase_participants(spec: OperationSpec, groups: tuple[int, ...] | None) -> tuple[ParticipantId, ...]:
    chosen = range(len(spec.groups)) if groups is None else groups
    return tuple(p for index in chosen for p in spec.groups[index].participant_ids)


def _spec(inp: PlanInput, intent: Intent, snapshot: Snapshot) -> OperationSpec:
    assert intent.selection is not None
    options = inp.request.options
    deadline_ms = options.deadline_ms or inp.limits.default_deadline_ms
    groups = group_members(intent.selection.chosen)
    facts = operation_facts(inp.request, inp.operation_id, intent, groups, snapshot.desired)
    return OperationSpec(
        operation_id=inp.operation_id,
        kind=kind_of(inp.request),
        principal=inp.principal.name,
        request=inp.request,
        request_sha256=inp.request_sha256,
        ordinal=snapshot.desired.next_ordinal(now_us=inp.now_unix_nanos // 1000),
        revision_before=snapshot.desired.revision,
        accepted_at_unix_nanos=inp.now_unix_nanos,
        deadline_at_unix_nanos=inp.now_unix_nanos + deadline_ms * 1_000_000,
        groups=groups,
        phases=facts.phases,
        skipped=intent.selection.skipped,
        affected_models=affected_models(intent.selection.chosen),
        model=intent.model,
        pause_epoch=facts.pause_epoch,
        creates_pause=facts.creates_pause,
        replaces_epochs=facts.replaces_epochs,
        resource_epoch=facts.resource_epoch,
        gates_operation=facts.gates_operation,
        previous_version=intent.previous_version,
        previous_weights=intent.previous_source,
        profile_id=facts.profile_id,
    )


def _with_epochs_of(
    desired: Desired, spec: OperationSpec, participants: Sequence[ParticipantInfo]
) -> Desired:
    """Epochs are allotted, and their gates closed, in the acceptance transaction (AD-14)."""
    request = spec.request
    last = max(desired.last_epoch, spec.pause_epoch if spec.creates_pause else 0)
    if isinstance(request, PauseRequest):
        if spec.creates_pause:
            desired = _with_pause(desired, spec, request.pause, request.target, participants)
        else:
            desired = _bound_by(desired, spec.pause_epoch, binding(request.target, participants))
    if isinstance(request, ReleaseResourcesRequest):
        if request.pause is not None and spec.creates_pause:
            desired = _with_pause(desired, spec, request.pause, request.target, participants)
        release = ReleaseRecord(
            epoch=spec.resource_epoch,
            kinds=request.kinds,
            remaining={p: frozenset(request.kinds) for p in spec.participant_ids},
            operation_id=spec.operation_id,
            principal=spec.principal,
            retention=request.weight_retention,
        )
        last = max(last, release.epoch)
        desired = dataclasses.replace(desired, releases=with_item(desired.releases, release.epoch, release))
    return dataclasses.replace(desired, last_epoch=last)


def _with_pause(
    desired: Desired,
    spec: OperationSpec,
    pause: PauseSpec,
    target: Target,
    participants: Sequence[ParticipantInfo],
) -> Desired:
    record = PauseRecord(
        epoch=spec.pause_epoch,
        spec=pause,
        participant_ids=spec.participant_ids,
        operation_id=spec.operation_id,
        principal=spec.principal,
        binds=binding(target, participants),
    )
    return dataclasses.replace(desired, pauses=with_item(desired.pauses, record.epoch, record))


def _bound_by(desired: Desired, epoch: int, binds: Target | None) -> Desired:
    """A pause that is answered again binds whom the selectors of both bind (AD-19, AD-41)."""
    pause = desired.pauses[epoch]
    bound = dataclasses.replace(pause, binds=widened(pause.binds, binds))
    return dataclasses.replace(desired, pauses=with_item(desired.pauses, epoch, bound))


def _without_epochs_of(desired: Desired, record: OperationRecord) -> Desired:
    return dataclasses.replace(desired, pauses=without_item(desired.pauses, record.spec.pause_epoch))


def _supersede(record: OperationRecord, successor: OperationSpec, desired: Desired) -> Advance:
    """End the older pause, naming its successor; its gate is the successor's from here on (AD-18)."""
    moves = dataclasses.replace(
        record.moves,
        state=AdminOperationState.CANCELLED,
        ended_at_unix_nanos=successor.accepted_at_unix_nanos,
        revision_after=desired.revision,
        superseded_by=successor.operation_id,
    )
    ended = OperationCancelled(
        reason="superseded by a harder pause",
        revision=desired.revision,
        superseded_by=successor.operation_id,
        rolled_back=False,
    )
    return Advance(moves=moves, events=(ended,))
