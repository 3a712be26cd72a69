"""Requests of the administration service, decoded: what callers ask for.

Field names are the wire's. An absent optional field is `None`; zero is a value. What the types cannot say is checked
by `iop.admin.shape`.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from iop.admin.enums import (
    AdminOperationKind,
    AdminOperationState,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    DistributedBackend,
    DrainTimeoutAction,
    EngineRole,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
    WeightFormat,
    WeightRetention,
)

__all__ = [
    "AllTargets",
    "DiskSource",
    "DistributedSource",
    "FileDigest",
    "FlushCachesRequest",
    "InlineTensor",
    "InlineTensorSource",
    "IpcSource",
    "IpcTensor",
    "ListOperationsRequest",
    "ModelTargets",
    "MutationOptions",
    "MutationRequest",
    "ParticipantTargets",
    "PauseRequest",
    "PauseSpec",
    "ReconfigureServingRequest",
    "ReleaseResourcesRequest",
    "RestoreResourcesRequest",
    "ResumeRequest",
    "ServingChange",
    "ServingValue",
    "StartProfileRequest",
    "StopProfileRequest",
    "Target",
    "TensorSpec",
    "UpdateWeightsRequest",
    "WeightSource",
    "kind_of",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MutationOptions:
    """What every mutation carries.

    Attributes:
        idempotency_key: printable ASCII, 1..128 bytes (AD-11).
        expected_revision: compare-and-swap on the server's revision; zero is a value (AD-13).
        deadline_ms: the operation's own deadline from acceptance, not the RPC's (AD-25).
        validate_only: answer the plan, change and journal nothing (AD-105).
        reason: free text for the audit, at most 1024 bytes.
    """

    idempotency_key: str
    expected_revision: int | None = None
    deadline_ms: int | None = None
    validate_only: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllTargets:
    """Everything, said explicitly (AD-10)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelTargets:
    """All participants that serve any of these models (public id or alias)."""

    models: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantTargets:
    """Named participants; a group is named whole or not at all (AD-19)."""

    participant_ids: tuple[str, ...]


Target: TypeAlias = AllTargets | ModelTargets | ParticipantTargets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PauseSpec:
    """How to pause (AD-41).

    Attributes:
        drain_timeout_ms: DRAIN only; absent means no bound but the operation's deadline.
        on_drain_timeout: set exactly when `drain_timeout_ms` is.
    """

    mode: PauseMode
    admission: AdmissionPolicy
    drain_timeout_ms: int | None = None
    on_drain_timeout: DrainTimeoutAction | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlushCachesRequest:
    """Empty caches (AD-40)."""

    options: MutationOptions
    target: Target
    kinds: tuple[CacheKind, ...]
    busy_policy: BusyPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequest:
    """Stop inference on the targets under a new epoch (AD-41)."""

    options: MutationOptions
    target: Target
    pause: PauseSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequest:
    """End one pause; the target is what that pause covered (AD-14, AD-42)."""

    options: MutationOptions
    pause_epoch: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseResourcesRequest:
    """Give memory back while paused (AD-43).

    Attributes:
        weight_retention: set exactly when `kinds` holds WEIGHTS.
        pause: absent means the targets are already paused.
    """

    options: MutationOptions
    target: Target
    kinds: tuple[ResourceKind, ...]
    weight_retention: WeightRetention | None = None
    pause: PauseSpec | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResourcesRequest:
    """Take back what was released under one epoch, in whole or part (AD-44)."""

    options: MutationOptions
    resource_epoch: int
    kinds: tuple[ResourceKind, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Expected SHA-256 (32 bytes) of one file, named relative to the source path."""

    name: str
    sha256: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, element type and shape of one tensor."""

    name: str
    dtype: TensorDtype
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskSource:
    """Weights in files; `path` is absolute and visible to every participant."""

    path: str
    format: WeightFormat
    digests: tuple[FileDigest, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InlineTensor:
    """One tensor sent along.

    Attributes:
        data: little-endian, row-major, `product(shape) * size(dtype)` bytes. Not shown by repr.
        sha256: 32 bytes, or empty.
    """

    spec: TensorSpec
    data: bytes = dataclasses.field(repr=False)
    sha256: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InlineTensorSource:
    """Weights sent along; the total is bounded by `AdminLimits.max_inline_tensor_bytes`."""

    tensors: tuple[InlineTensor, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSource:
    """Weights broadcast over a process group that the trainer leads."""

    backend: DistributedBackend
    master_host: str
    master_port: int
    world_size: int
    rank_offset: int
    group_name: str
    tensors: tuple[TensorSpec, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IpcTensor:
    """One tensor behind a device IPC handle."""

    spec: TensorSpec
    handle: bytes = dataclasses.field(repr=False)
    device: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IpcSource:
    """Weights behind device IPC handles."""

    tensors: tuple[IpcTensor, ...]


WeightSource: TypeAlias = DiskSource | InlineTensorSource | DistributedSource | IpcSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeightsRequest:
    """Swap one model's weights on all participants that serve it, or on none (AD-32, AD-45).

    Attributes:
        expected_weight_version: refused with ABORTED when the current one differs.
        quiesce: required unless every participant is already paused.
        allow_irreversible: go on although the published version could not be put back.
    """

    options: MutationOptions
    model: str
    source: WeightSource
    weight_version: str
    cache_policy: CachePolicy
    expected_weight_version: str | None = None
    quiesce: PauseSpec | None = None
    allow_irreversible: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartProfileRequest:
    """Begin to record profiles (AD-46)."""

    options: MutationOptions
    target: Target
    kinds: tuple[ProfilerKind, ...]
    max_steps: int | None = None
    max_duration_ms: int | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopProfileRequest:
    """End a profile and name its artifacts (AD-46)."""

    options: MutationOptions
    profile_id: str


ServingValue: TypeAlias = int | bool | EngineRole | tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingChange:
    """One field to change. `value` is a count, an `EngineRole`, a bool (ENABLED) or names (SERVED_ALIASES)."""

    field: ReconfigurableField
    value: ServingValue


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigureServingRequest:
    """Change serving values, all or none (AD-47)."""

    options: MutationOptions
    target: Target
    changes: tuple[ServingChange, ...]


MutationRequest: TypeAlias = (
    FlushCachesRequest
    | PauseRequest
    | ResumeRequest
    | ReleaseResourcesRequest
    | RestoreResourcesRequest
    | UpdateWeightsRequest
    | StartProfileRequest
    | StopProfileRequest
    | ReconfigureServingRequest
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListOperationsRequest:
    """Page through operations, newest first; empty filters match all."""

    page_size: int = 0
    page_token: str = ""
    kinds: tuple[AdminOperationKind, ...] = ()
    states: tuple[AdminOperationState, ...] = ()


_KINDS = {
    FlushCachesRequest: AdminOperationKind.FLUSH_CACHES,
    PauseRequest: AdminOperationKind.PAUSE,
    ResumeRequest: AdminOperationKind.RESUME,
    ReleaseResourcesRequest: AdminOperationKind.RELEASE_RESOURCES,
    RestoreResourcesRequest: AdminOperationKind.RESTORE_RESOURCES,
    UpdateWeightsRequest: AdminOperationKind.UPDATE_WEIGHTS,
    StartProfileRequest: AdminOperationKind.START_PROFILE,
    StopProfileRequest: AdminOperationKind.STOP_PROFILE,
    ReconfigureServingRequest: AdminOperationKind.RECONFIGURE_SERVING,
}


def kind_of(request: MutationRequest) -> AdminOperationKind:
    """The operation kind that a request asks for."""
    return _KINDS[type(request)]
