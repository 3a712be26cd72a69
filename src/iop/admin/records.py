"""The durable form of one operation: its fixed part, its changing part, and its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from iop.admin.enums import AdminOperationKind, AdminOperationState, ParticipantPhase
from iop.admin.goals import Goal
from iop.admin.requests import MutationRequest, WeightSource
from iop.admin.results import (
    AdminError,
    AdminOperation,
    OperationResult,
    ParticipantStatus,
)
from iop.admin.steps import ParticipantReadBack, Step, StepResult
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = [
    "GroupMembers",
    "OperationMoves",
    "OperationRecord",
    "OperationSpec",
    "Phase",
    "StepRecord",
    "view_of",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    """One group of the operation with its participants, fixed at acceptance (AD-19)."""

    group_id: GroupId
    participant_ids: tuple[ParticipantId, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One ordered part of an operation: the same step on some or all groups, side by side.

    Attributes:
        doing: what participants show while it runs.
        done: what they show afterwards.
        action: the engine-level call in words, for plans.
        groups: indices into `OperationSpec.groups`; None means all.
        goal: what the read-back after the step must show (AD-37).
        undo: the step that takes it back, None where there is none.
        commits: the point of no return is journalled before this phase starts (AD-32).
    """

    doing: ParticipantPhase
    done: ParticipantPhase
    action: str
    body: Step
    goal: Goal
    groups: tuple[int, ...] | None = None
    undo: Step | None = None
    commits: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationSpec:
    """What was accepted; never changes.

    Attributes:
        ordinal: order of acceptance (AD-36).
        deadline_at_unix_nanos: the operation's own deadline (AD-25).
        pause_epoch: the epoch it allots, answers or ends; zero when none.
        creates_pause: `pause_epoch` is its own and ends if it fails.
        resource_epoch: likewise for a release.
        previous_weights: what UpdateWeights puts back, if it can be read again.
    """

    operation_id: OperationId
    kind: AdminOperationKind
    principal: str
    request: MutationRequest
    request_sha256: bytes
    ordinal: int
    revision_before: int
    accepted_at_unix_nanos: int
    deadline_at_unix_nanos: int
    groups: tuple[GroupMembers, ...]
    phases: tuple[Phase, ...]
    skipped: tuple[ParticipantId, ...] = ()
    affected_models: tuple[str, ...] = ()
    model: str = ""
    pause_epoch: int = 0
    creates_pause: bool = False
    replaces_epochs: tuple[int, ...] = ()
    resource_epoch: int = 0
    gates_operation: bool = False
    previous_version: str = ""
    previous_weights: WeightSource | None = None
    profile_id: str = ""

    @property
    def participant_ids(self) -> tuple[ParticipantId, ...]:
        """All participants, group by group."""
        return tuple(p for group in self.groups for p in group.participant_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationMoves:
    """What changes while an operation runs.

    Attributes:
        phase_index: the phase it is in; phases below it are done.
        next_step: number of the next step to allot.
        failure: why it is rolling back; becomes the terminal error.
    """

    state: AdminOperationState = AdminOperationState.PENDING
    phase_index: int = 0
    next_step: int = 1
    last_sequence: int = 0
    started_at_unix_nanos: int | None = None
    ended_at_unix_nanos: int | None = None
    revision_after: int | None = None
    result: OperationResult | None = None
    error: AdminError | None = None
    failure: AdminError | None = None
    cancel_requested: bool = False
    cancel_reason: str = ""
    committed: bool = False
    superseded_by: OperationId | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one group: written before it is sent (`result` None) and when it was answered.

    Attributes:
        is_undo: it takes `phase_index` back.
        before: the participants as read back before it, where that was asked.
    """

    step: int
    group_id: GroupId
    phase_index: int
    is_undo: bool = False
    before: tuple[ParticipantReadBack, ...] = ()
    result: StepResult | None = None
    after: tuple[ParticipantReadBack, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationRecord:
    """An operation as the journal holds it."""

    spec: OperationSpec
    moves: OperationMoves
    statuses: Mapping[ParticipantId, ParticipantStatus] = dataclasses.field(default_factory=dict)

    @property
    def operation_id(self) -> OperationId:
        """Its id."""
        return self.spec.operation_id


def view_of(record: OperationRecord) -> AdminOperation:
    """The operation as callers see it (AD-23)."""
    spec, moves = record.spec, record.moves
    return AdminOperation(
        operation_id=spec.operation_id,
        kind=spec.kind,
        state=moves.state,
        idempotency_key=spec.request.options.idempotency_key,
        principal=spec.principal,
        request_sha256=spec.request_sha256,
        revision_before=spec.revision_before,
        revision_after=moves.revision_after,
        accepted_at_unix_nanos=spec.accepted_at_unix_nanos,
        started_at_unix_nanos=moves.started_at_unix_nanos,
        ended_at_unix_nanos=moves.ended_at_unix_nanos,
        deadline_at_unix_nanos=spec.deadline_at_unix_nanos,
        participants=tuple(
            record.statuses.get(p, ParticipantStatus(participant_id=p, phase=ParticipantPhase.PENDING))
            for p in spec.participant_ids
        ),
        result=moves.result,
        error=moves.error,
        last_sequence=moves.last_sequence,
        cancel_requested=moves.cancel_requested,
        committed=moves.committed,
        superseded_by=moves.superseded_by,
        reason=spec.request.options.reason,
        skipped=spec.skipped,
        affected_models=spec.affected_models,
    )
