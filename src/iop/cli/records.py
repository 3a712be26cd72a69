"""Admin records as JSON values and as lines for people. Field names are the wire's."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any, assert_never, get_args

from iop.admin.results import (
    AdminOperation,
    FlushCachesResult,
    OperationAccepted,
    OperationCancelled,
    OperationCompleted,
    OperationFailed,
    OperationPlan,
    OperationProgress,
    OperationResult,
    ParticipantUpdate,
    PauseResult,
    ReconfigureServingResult,
    ReleaseResourcesResult,
    ResourceAmount,
    RestoreResourcesResult,
    ResumeResult,
    StartProfileResult,
    StopProfileResult,
    UpdateWeightsResult,
)

__all__ = ["describe", "describe_result", "event_name", "to_json"]

_RESULTS = get_args(OperationResult)
_EVENTS = {
    OperationAccepted: "accepted",
    OperationProgress: "progress",
    ParticipantUpdate: "participant",
    OperationCompleted: "completed",
    OperationFailed: "failed",
    OperationCancelled: "cancelled",
    OperationPlan: "plan",
}


def event_name(body: object) -> str:
    """The member of the event's ``oneof``."""
    return _EVENTS[type(body)]


def to_json(value: object) -> Any:
    """A record as a JSON value: enums by name, bytes as hex, results under the member of their ``oneof``."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shape = {
            item.name: to_json(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if getattr(value, item.name) is not None
        }
        for name in ("result", "event"):
            inner = getattr(value, name, None)
            if isinstance(inner, _RESULTS):
                shape[name] = {_result_name(inner): shape[name]}
            elif type(inner) in _EVENTS:
                shape[event_name(inner)] = shape.pop(name)
        return shape
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((to_json(item) for item in value), key=str)
    return value


def _result_name(result: object) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(result).__name__.removesuffix("Result")).lower()


def describe_result(operation: AdminOperation) -> list[str]:
    """What a finished operation did, in lines for people."""
    return describe(operation.result)


def describe(result: OperationResult | None) -> list[str]:
    """What an operation did, in lines for people; with the command that goes on from there."""
    if isinstance(result, StartProfileResult):
        return [
            f"recording: profile {result.profile_id} on {', '.join(result.participant_ids)}",
            f"to end it: iop admin profile-stop {result.profile_id}",
        ]
    if isinstance(result, StopProfileResult):
        return [
            f"recorded: profile {result.profile_id}",
            *(
                f"  {item.participant_id}: {item.kind.name.lower()} {item.uri}"
                f" ({item.media_type}, {item.size_bytes} bytes, sha256 {item.sha256.hex()})"
                for item in result.artifacts
            ),
        ]
    if isinstance(result, PauseResult):
        return [
            f"paused: epoch {result.pause_epoch}, mode {result.mode.name.lower()};"
            f" drained {result.drained}, aborted {result.aborted}, kept {result.kept}",
            f"to end it: iop admin resume --epoch {result.pause_epoch}",
        ]
    if isinstance(result, ResumeResult):
        kept = f"; {result.resumed} kept requests go on" if result.resumed else ""
        return [f"resumed: epoch {result.pause_epoch} has ended{kept}"]
    if isinstance(result, FlushCachesResult):
        return [
            f"{cache.participant_id}: {cache.kind.name.lower()} {cache.outcome.name.lower()}"
            f"{f' ({cache.detail})' if cache.detail else ''}"
            for cache in result.caches
        ]
    if isinstance(result, ReleaseResourcesResult):
        kinds = dict.fromkeys(amount.kind.name.lower().replace("_", "-") for amount in result.released)
        asked = " ".join(f"--kind {kind}" for kind in kinds)
        paused = f", pause epoch {result.pause_epoch}" if result.pause_epoch is not None else ""
        return [
            f"released: epoch {result.resource_epoch}{paused}",
            *_amounts(result.released),
            f"to take it back: iop admin restore --epoch {result.resource_epoch} {asked}",
        ]
    if isinstance(result, RestoreResourcesResult):
        left = ", ".join(kind.name.lower() for kind in result.remaining)
        return [
            *_amounts(result.restored),
            f"still released: {left}" if left else "nothing is released any more",
        ]
    if isinstance(result, UpdateWeightsResult):
        return [
            f"{result.model}: {result.previous_weight_version} -> {result.weight_version};"
            f" aborted {result.aborted}, kept {result.kept}"
        ]
    if isinstance(result, ReconfigureServingResult):
        return [
            f"{change.participant_id}: {change.field.name.lower()} {change.disposition.name.lower()}"
            f" {change.effective_value} {change.detail}".rstrip()
            for change in result.changes
        ]
    if result is None:
        return []
    assert_never(result)


def _amounts(amounts: tuple[ResourceAmount, ...]) -> list[str]:
    return [
        f"  {item.participant_id}: {item.kind.name.lower()} {item.bytes / 2**20:.1f} MiB" for item in amounts
    ]
