"""Answers of the administration service: operations, their events, results, errors and plans.

Field names are the wire's; times are integer nanoseconds since 1970. Ids are opaque strings.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdminOperationState,
    CacheKind,
    CacheOutcome,
    CancelDisposition,
    ChangeDisposition,
    ParticipantPhase,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    VerificationMethod,
)
from iop.core.ids import OperationId, ParticipantId

__all__ = [
    "AdminError",
    "AdminOperation",
    "AdminOperationEvent",
    "CacheResult",
    "CancelResult",
    "ChangeResult",
    "EventBody",
    "FlushCachesResult",
    "OperationAccepted",
    "OperationCancelled",
    "OperationCompleted",
    "OperationFailed",
    "OperationPage",
    "OperationPlan",
    "OperationProgress",
    "OperationResult",
    "ParticipantError",
    "ParticipantStatus",
    "ParticipantUpdate",
    "PauseResult",
    "PlannedStep",
    "ProfileArtifact",
    "ReconfigureServingResult",
    "ReleaseResourcesResult",
    "ResourceAmount",
    "RestoreResourcesResult",
    "ResumeResult",
    "StartProfileResult",
    "StopProfileResult",
    "UpdateWeightsResult",
    "is_terminal",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantError:
    """Why one participant failed. `message` is the engine's own words, bounded and without secrets."""

    code: AdminErrorCode
    message: str
    step: ParticipantPhase
    retryable: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantStatus:
    """How far one participant has come (AD-23).

    Attributes:
        weight_version: as read back; empty when not read.
        verified_by: what the read-back rested on (AD-37).
    """

    participant_id: ParticipantId
    phase: ParticipantPhase
    error: ParticipantError | None = None
    weight_version: str = ""
    bytes_done: int | None = None
    bytes_total: int | None = None
    verified_by: VerificationMethod | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminError:
    """Why an accepted operation failed (AD-31).

    Attributes:
        participants: those that failed.
        quarantined: those left quarantined.
        rolled_back: every changed participant is proven back in its previous state.
    """

    code: AdminErrorCode
    message: str
    participants: tuple[ParticipantId, ...] = ()
    quarantined: tuple[ParticipantId, ...] = ()
    rolled_back: bool = False
    retryable: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """What became of one cache of one participant (AD-40)."""

    participant_id: ParticipantId
    kind: CacheKind
    outcome: CacheOutcome
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlushCachesResult:
    """Result of FlushCaches: all CLEARED when it completed; one that failed tells which were not (AD-40)."""

    caches: tuple[CacheResult, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PauseResult:
    """Result of Pause: its epoch (never zero) and what became of the work in flight."""

    pause_epoch: int
    mode: PauseMode
    drained: int = 0
    aborted: int = 0
    kept: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeResult:
    """Result of Resume: the epoch that ended and how much kept work goes on."""

    pause_epoch: int
    resumed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAmount:
    """Bytes released or restored, measured and not assumed (AD-43)."""

    participant_id: ParticipantId
    kind: ResourceKind
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseResourcesResult:
    """Result of ReleaseResources; `pause_epoch` only when the request carried a pause."""

    resource_epoch: int
    released: tuple[ResourceAmount, ...]
    pause_epoch: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResourcesResult:
    """Result of RestoreResources; `remaining` is still released under the epoch."""

    restored: tuple[ResourceAmount, ...]
    remaining: tuple[ResourceKind, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeightsResult:
    """Result of UpdateWeights."""

    model: str
    previous_weight_version: str
    weight_version: str
    aborted: int = 0
    kept: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartProfileResult:
    """Result of StartProfile; the wire's StartProfileResponse without `plan`."""

    operation_id: OperationId
    profile_id: str
    started_at_unix_nanos: int
    participant_ids: tuple[ParticipantId, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileArtifact:
    """One recorded file; `sha256` has 32 bytes."""

    participant_id: ParticipantId
    kind: ProfilerKind
    uri: str
    media_type: str
    size_bytes: int
    sha256: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopProfileResult:
    """Result of StopProfile; the wire's StopProfileResponse without `plan`."""

    operation_id: OperationId
    profile_id: str
    artifacts: tuple[ProfileArtifact, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeResult:
    """Judgement and effective value of one field on one participant (AD-47)."""

    participant_id: ParticipantId
    field: ReconfigurableField
    disposition: ChangeDisposition
    detail: str = ""
    effective_value: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigureServingResult:
    """Result of ReconfigureServing."""

    changes: tuple[ChangeResult, ...]


OperationResult: TypeAlias = (
    FlushCachesResult
    | PauseResult
    | ResumeResult
    | ReleaseResourcesResult
    | RestoreResourcesResult
    | UpdateWeightsResult
    | StartProfileResult
    | StopProfileResult
    | ReconfigureServingResult
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminOperation:
    """The whole state of one operation (AD-23).

    Attributes:
        idempotency_key: empty when the viewer may not see it (AD-04).
        revision_after: set when terminal.
        committed: the point of no return has been passed; cancel is too late.
        skipped: selected by `all` or model but OFFLINE at acceptance (AD-19).
        affected_models: every model that the participants serve.
    """

    operation_id: OperationId
    kind: AdminOperationKind
    state: AdminOperationState
    idempotency_key: str
    principal: str
    request_sha256: bytes
    revision_before: int
    accepted_at_unix_nanos: int
    revision_after: int | None = None
    started_at_unix_nanos: int | None = None
    ended_at_unix_nanos: int | None = None
    deadline_at_unix_nanos: int | None = None
    participants: tuple[ParticipantStatus, ...] = ()
    result: OperationResult | None = None
    error: AdminError | None = None
    last_sequence: int = 0
    cancel_requested: bool = False
    committed: bool = False
    superseded_by: OperationId | None = None
    reason: str = ""
    skipped: tuple[ParticipantId, ...] = ()
    affected_models: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a plan: `action` is the engine-level call in words."""

    phase: ParticipantPhase
    participant_ids: tuple[ParticipantId, ...]
    action: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationPlan:
    """Answer to `validate_only` (AD-105). No blockers: it would be accepted now."""

    steps: tuple[PlannedStep, ...]
    blockers: tuple[str, ...]
    pauses_inference: bool
    revision: int
    participant_ids: tuple[ParticipantId, ...] = ()
    skipped: tuple[ParticipantId, ...] = ()
    affected_models: tuple[str, ...] = ()
    irreversible: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationAccepted:
    """First event of every operation (AD-21)."""

    operation: AdminOperation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationProgress:
    """How far the operation is; `unit` is requests, participants, bytes or steps."""

    phase: ParticipantPhase
    done: int
    total: int
    unit: str
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantUpdate:
    """One participant moved on."""

    status: ParticipantStatus


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCompleted:
    """Terminal: done on every participant (AD-30)."""

    result: OperationResult
    revision: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationFailed:
    """Terminal: failed, and the error says what it left."""

    error: AdminError
    revision: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCancelled:
    """Terminal: called off, or superseded by a harder pause (AD-18)."""

    reason: str
    revision: int
    superseded_by: OperationId | None = None
    rolled_back: bool = False


EventBody: TypeAlias = (
    OperationAccepted
    | OperationProgress
    | ParticipantUpdate
    | OperationCompleted
    | OperationFailed
    | OperationCancelled
    | OperationPlan
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminOperationEvent:
    """One event; `sequence` counts from 1 without gaps. A plan has an empty id and sequence 0."""

    operation_id: str
    sequence: int
    timestamp_unix_nanos: int
    event: EventBody

    @property
    def is_terminal(self) -> bool:
        """Whether the stream ends after this event."""
        return is_terminal(self.event)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CancelResult:
    """Answer to CancelOperation (AD-24)."""

    disposition: CancelDisposition
    operation: AdminOperation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationPage:
    """One page of operations, newest first."""

    operations: tuple[AdminOperation, ...]
    next_page_token: str = ""


def is_terminal(body: EventBody) -> bool:
    """Whether this event ends its operation (AD-21)."""
    return isinstance(body, OperationCompleted | OperationFailed | OperationCancelled)
