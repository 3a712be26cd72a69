"""What a server and its participants can do and how they stand: the admin profile (AD-50)."""

from __future__ import annotations

import dataclasses

from iop.admin.enums import (
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    DistributedBackend,
    EngineRole,
    ParticipantState,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
    WeightFormat,
    WeightRetention,
    WeightSourceKind,
)
from iop.admin.requests import WeightSource
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = [
    "ActivePause",
    "ActiveRelease",
    "AdminLimits",
    "AdminParticipant",
    "AdminProfile",
    "Capabilities",
    "Lacking",
    "ModelWeights",
    "ParticipantInfo",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one participant offers. An empty set means: nothing of that sort (AD-15).

    Attributes:
        holds_previous_weights: it can keep replaced weights until commit, so that any version can be put back
            (AD-32). Not on the wire; drives `ModelWeights.reversible`.
    """

    operations: frozenset[AdminOperationKind] = frozenset()
    cache_kinds: frozenset[CacheKind] = frozenset()
    resource_kinds: frozenset[ResourceKind] = frozenset()
    pause_modes: frozenset[PauseMode] = frozenset()
    quiesce_modes: frozenset[PauseMode] = frozenset()
    weight_sources: frozenset[WeightSourceKind] = frozenset()
    weight_formats: frozenset[WeightFormat] = frozenset()
    weight_retentions: frozenset[WeightRetention] = frozenset()
    tensor_dtypes: frozenset[TensorDtype] = frozenset()
    distributed_backends: frozenset[DistributedBackend] = frozenset()
    cache_policies: frozenset[CachePolicy] = frozenset()
    busy_policies: frozenset[BusyPolicy] = frozenset()
    profiler_kinds: frozenset[ProfilerKind] = frozenset()
    reconfigurable_fields: frozenset[ReconfigurableField] = frozenset()
    roles: frozenset[EngineRole] = frozenset()
    holds_previous_weights: bool = False
    capacity_max: int | None = None
    data_parallel_size_max: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """Why an operation, or a part of it, is not offered, and how to enable it, in words for people."""

    operation: AdminOperationKind
    how: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantInfo:
    """One participant as its driver knows it; the driver's part of the profile.

    Attributes:
        group_id: participants of one group act only together (the ranks of one engine).
        models: public ids of the models served.
        aliases: other names for them, as (alias, model) pairs.
        connected: whether steps can reach it now.
        startup_source: where the weights that its engine started with can be read again, if anywhere.
        instance: changes whenever it came back: its engine process was restarted or its connection renewed.
    """

    participant_id: ParticipantId
    group_id: GroupId
    capabilities: Capabilities
    models: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    connected: bool = True
    instance: str = ""
    startup_source: WeightSource | None = None
    node: str = ""
    provider: str = ""
    rank: int | None = None
    engine_name: str = ""
    engine_version: str = ""
    lacking: tuple[Lacking, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminParticipant:
    """One participant as the profile shows it: what it is, and what holds of it."""

    info: ParticipantInfo
    state: ParticipantState
    weight_version: str = ""
    quarantine_reason: str = ""
    paused: bool = False
    released: bool = False
    quarantined: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActivePause:
    """A pause that has not ended; `admission` is what it asked for new requests."""

    pause_epoch: int
    mode: PauseMode
    admission: AdmissionPolicy
    participant_ids: tuple[ParticipantId, ...]
    operation_id: OperationId
    principal: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActiveRelease:
    """Resources that are released under one epoch."""

    resource_epoch: int
    kinds: tuple[ResourceKind, ...]
    participant_ids: tuple[ParticipantId, ...]
    operation_id: OperationId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """The desired and published weights of one model; `operation_id` is empty for start-up weights."""

    model: str
    weight_version: str
    operation_id: str = ""
    content_digest: bytes = b""
    reversible: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminLimits:
    """Limits that a server enforces and advertises.

    Attributes:
        max_concurrent_operations: more at once is RESOURCE_EXHAUSTED (AD-18). Each costs one task and its journal rows.
        idempotency_retention_ms: how long a key is kept at least (AD-12).
        operation_retention_ms: how long a finished operation can be read.
        max_inline_tensor_bytes: bounds what one request makes us hold (AD-104).
        max_event_history: beyond it only terminal events are added; bounds a row count per operation.
        default_deadline_ms: used when a request has no deadline (AD-25).
    """

    max_concurrent_operations: int = 16
    max_idempotency_key_bytes: int = 128
    idempotency_retention_ms: int = 7 * 24 * 3600 * 1000
    operation_retention_ms: int = 30 * 24 * 3600 * 1000
    max_inline_tensor_bytes: int = 64 * 1024 * 1024
    max_deadline_ms: int = 24 * 3600 * 1000
    max_event_history: int = 20_000
    default_deadline_ms: int = 600_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdminProfile:
    """Everything GetAdminProfile tells; the capability sets are unions over participants."""

    capabilities: Capabilities
    cancellable: tuple[AdminOperationKind, ...]
    limits: AdminLimits
    revision: int
    pauses: tuple[ActivePause, ...] = ()
    releases: tuple[ActiveRelease, ...] = ()
    weights: tuple[ModelWeights, ...] = ()
    participants: tuple[AdminParticipant, ...] = ()
    profile_revision: int = 1
    validate_only_supported: bool = True
