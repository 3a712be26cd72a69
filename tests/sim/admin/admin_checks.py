"""What must hold of a world at rest, whatever happened before; and the operations that simulations try."""

from __future__ import annotations

from iop.admin.desired import covering_pauses
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
from iop.admin.reconcile import divergence
from iop.admin.records import OperationRecord
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    FlushCachesRequest,
    MutationOptions,
    MutationRequest,
    PauseRequest,
    PauseSpec,
    ReconfigureServingRequest,
    ReleaseResourcesRequest,
    RestoreResourcesRequest,
    ResumeRequest,
    ServingChange,
    StartProfileRequest,
    StopProfileRequest,
    UpdateWeightsRequest,
)
from iop.admin.results import (
    EventBody,
    OperationAccepted,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
)
from iop.admin.targets import by_group
from iop.testing.admin_world import AdminWorld

DRAIN = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE)
KEEP = PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE)
ABORT = PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT)


def opts(key: str, **more: object) -> MutationOptions:
    return MutationOptions(idempotency_key=key, **more)  # type: ignore[arg-type]


def pause(key: str, spec: PauseSpec = DRAIN, **more: object) -> PauseRequest:
    return PauseRequest(options=opts(key, **more), target=AllTargets(), pause=spec)


def resume(key: str, epoch: int) -> ResumeRequest:
    return ResumeRequest(options=opts(key), pause_epoch=epoch)


def flush(key: str) -> FlushCachesRequest:
    return FlushCachesRequest(
        options=opts(key),
        target=AllTargets(),
        kinds=(CacheKind.PREFIX,),
        busy_policy=BusyPolicy.WAIT,
    )


def release(key: str, *kinds: ResourceKind, spec: PauseSpec | None = DRAIN) -> ReleaseResourcesRequest:
    kinds = kinds or (ResourceKind.KV_CACHE,)
    return ReleaseResourcesRequest(
        options=opts(key),
        target=AllTargets(),
        kinds=kinds,
        weight_retention=WeightRetention.OFFLOAD_TO_HOST if ResourceKind.WEIGHTS in kinds else None,
        pause=spec,
    )


def restore(key: str, epoch: int, *kinds: ResourceKind) -> RestoreResourcesRequest:
    return RestoreResourcesRequest(
        options=opts(key), resource_epoch=epoch, kinds=kinds or (ResourceKind.KV_CACHE,)
    )


def update(
    key: str, version: str, *, quiesce: PauseSpec | None = DRAIN, **more: object
) -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        options=opts(key, **more),
        model="m",
        source=DiskSource(path=f"/weights/{version}", format=WeightFormat.SAFETENSORS),
        weight_version=version,
        cache_policy=CachePolicy.FLUSH,
        quiesce=quiesce,
    )


def start_profile(key: str) -> StartProfileRequest:
    return StartProfileRequest(options=opts(key), target=AllTargets(), kinds=(ProfilerKind.CPU,))


def stop_profile(key: str, profile_id: str) -> StopProfileRequest:
    return StopProfileRequest(options=opts(key), profile_id=profile_id)


def reconfigure(key: str, capacity: int = 4) -> ReconfigureServingRequest:
    return ReconfigureServingRequest(
        options=opts(key),
        target=AllTargets(),
        changes=(ServingChange(field=ReconfigurableField.CAPACITY, value=capacity),),
    )


OPERATIONS = (
    "flush",
    "pause",
    "resume",
    "release",
    "restore",
    "update",
    "start_profile",
    "stop_profile",
    "reconfigure",
)


async def prepare(world: AdminWorld, name: str) -> MutationRequest:
    """Bring the world to where the named operation is legal, and return its request."""
    match name:
        case "flush":
            return flush("op")
        case "pause":
            return pause("op")
        case "resume":
            await world.run(pause("before"))
            return resume("op", 1)
        case "release":
            return release("op")
        case "restore":
            await world.run(release("before"))
            return restore("op", 2)
        case "update":
            await world.run(update("before", "v1"))
            return update("op", "v2")
        case "start_profile":
            return start_profile("op")
        case "stop_profile":
            events = await world.run(start_profile("before"))
            return stop_profile("op", f"profile-{events[0].operation_id}")
        case "reconfigure":
            return reconfigure("op")
        case _:
            raise AssertionError(name)


async def at_rest(world: AdminWorld, *, within_s: float = 1000.0) -> None:
    """Let time pass until no operation runs and reconciliation had its turn."""
    until = world.clock.monotonic() + within_s
    while (await world.journal.snapshot()).running:
        assert world.clock.monotonic() < until, "an operation runs for ever"
        await world.settle(5.0)
    world.core.participants_changed()
    await world.settle(5.0)


def _left_something(record: OperationRecord, ended: EventBody) -> bool:
    """Whether the end says that something is different from before (AD-13)."""
    match ended:
        case OperationCompleted():
            return True
        case OperationFailed(error=error):
            return not error.rolled_back
        case OperationCancelled(rolled_back=rolled_back):
            return not rolled_back
        case _:
            raise AssertionError(f"{record.operation_id} did not end")


def _check_operation(world: AdminWorld, record: OperationRecord) -> bool:
    """Events, terminal event and steps of one operation; returns whether it left something."""
    events = world.store.events[record.operation_id]
    assert record.moves.state.is_terminal
    assert [e.sequence for e in events] == list(range(1, len(events) + 1))
    assert [e.is_terminal for e in events] == [False] * (len(events) - 1) + [True]
    assert [isinstance(e.event, OperationAccepted) for e in events] == [True] + [False] * (len(events) - 1)
    ended = events[-1].event
    if isinstance(ended, OperationCompleted):
        steps = list(world.store.step_records[record.operation_id].values())
        for index, phase in enumerate(record.spec.phases):
            groups = record.spec.groups
            chosen = groups if phase.groups is None else [groups[i] for i in phase.groups]
            for group in chosen:
                assert any(
                    s.phase_index == index
                    and s.group_id == group.group_id
                    and s.result is not None
                    and all(o.error is None for o in s.result.participants)
                    for s in steps
                ), f"{record.operation_id} completed without phase {index} on {group.group_id}"
    return _left_something(record, ended)


async def check_at_rest(world: AdminWorld) -> None:
    """Every promise that can be checked on a world in which nothing runs."""
    store = world.store
    left = sum(_check_operation(world, record) for record in store.records.values())
    assert store.desired.revision == left
    assert all(p.settled for p in store.desired.pauses.values())
    assert all(r.settled for r in store.desired.releases.values())
    desired = store.desired
    fleet = world.fleet
    for group, members in by_group(fleet.participants()).items():
        if not all(p.connected for p in members):
            continue
        seen = {r.participant_id: r for r in [fleet._read_back(p.participant_id) for p in members]}
        is_quarantined = group in desired.quarantines
        if not is_quarantined:
            assert divergence(desired, members, seen) == ""
        for p in members:
            should_be_open = not is_quarantined and not covering_pauses(desired, p)
            assert fleet.is_open(p.participant_id) is should_be_open, (
                p.participant_id,
                fleet.gates.get(p.participant_id),
            )
            weights = desired.weights.get("m")
            rank = fleet.ranks[p.participant_id]
            assert not (rank.released and fleet.is_open(p.participant_id)), "it serves without its memory"
            is_loaded = ResourceKind.WEIGHTS not in rank.released
            if not is_quarantined and is_loaded and weights is not None and weights.operation_id:
                assert rank.content == f"/weights/{weights.version}"
