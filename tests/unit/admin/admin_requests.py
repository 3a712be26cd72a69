"""Requests that the tests of the operation core share."""

from __future__ import annotations

from iop.admin.enums import (
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CachePolicy,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    FlushCachesRequest,
    InlineTensorSource,
    MutationOptions,
    ParticipantTargets,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    ServingChange,
    StartProfileRequest,
    StopProfileRequest,
    Target,
    UpdateWeightsRequest,
)

DRAIN = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE)
KEEP = PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE)
ABORT = PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT)
ALL = AllTargets()
A = ParticipantTargets(participant_ids=("a/0", "a/1"))
B = ParticipantTargets(participant_ids=("b/0", "b/1"))


def options(key: str, **more: object) -> MutationOptions:
    return MutationOptions(idempotency_key=key, **more)  # type: ignore[arg-type]


def pause(key: str = "pause", spec: PauseSpec = DRAIN, target: Target = ALL, **more: object) -> PauseRequest:
    return PauseRequest(options=options(key, **more), target=target, pause=spec)


def resume(epoch: int, key: str = "resume", **more: object) -> ResumeRequest:
    return ResumeRequest(options=options(key, **more), pause_epoch=epoch)


def flush(key: str = "flush", target: Target = ALL, **more: object) -> FlushCachesRequest:
    return FlushCachesRequest(
        options=options(key, **more),
        target=target,
        kinds=(CacheKind.PREFIX,),
        busy_policy=BusyPolicy.WAIT,
    )


def release(
    key: str = "release",
    *kinds: ResourceKind,
    spec: PauseSpec | None = DRAIN,
    target: Target = ALL,
    retention: WeightRetention = WeightRetention.OFFLOAD_TO_HOST,
) -> ReleaseResourcesRequest:
    kinds = kinds or (ResourceKind.KV_CACHE,)
    return ReleaseResourcesRequest(
        options=options(key),
        target=target,
        kinds=kinds,
        weight_retention=retention if ResourceKind.WEIGHTS in kinds else None,
        pause=spec,
    )


def restore(epoch: int, key: str = "restore", *kinds: ResourceKind) -> RestoreResourcesRequest:
    return RestoreResourcesRequest(
        options=options(key), resource_epoch=epoch, kinds=kinds or (ResourceKind.KV_CACHE,)
    )


def update(
    version: str,
    key: str = "",
    *,
    quiesce: PauseSpec | None = DRAIN,
    source: DiskSource | InlineTensorSource | None = None,
    expected: str | None = None,
    irreversible: bool = False,
    model: str = "m",
    **more: object,
) -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        options=options(key or f"update-{version}", **more),
        model=model,
        source=source or DiskSource(path=f"/weights/{version}", format=WeightFormat.SAFETENSORS),
        weight_version=version,
        expected_weight_version=expected,
        cache_policy=CachePolicy.FLUSH,
        quiesce=quiesce,
        allow_irreversible=irreversible,
    )


def start_profile(key: str = "start", target: Target = ALL) -> StartProfileRequest:
    return StartProfileRequest(options=options(key), target=target, kinds=(ProfilerKind.CPU,))


def stop_profile(profile_id: str, key: str = "stop") -> StopProfileRequest:
    return StopProfileRequest(options=options(key), profile_id=profile_id)


def reconfigure(capacity: int, key: str = "reconfigure", **more: object) -> ReconfigureServingRequest:
    return ReconfigureServingRequest(
        options=options(key, **more),
        target=ALL,
        changes=(ServingChange(field=ReconfigurableField.CAPACITY, value=capacity),),
    )
