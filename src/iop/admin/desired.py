"""Durable state beside the operations: what the fleet is meant to be like.

`Desired` is one immutable value. Planner and settlement compute a new one; the journal stores the difference in the
same transaction as the events that explain it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from iop.admin.enums import PauseMode, ProfilerKind, ReconfigurableField, ResourceKind, WeightRetention
from iop.admin.profile import ParticipantInfo
from iop.admin.requests import AllTargets, ModelTargets, PauseSpec, ServingChange, Target, WeightSource
from iop.admin.results import ProfileArtifact
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = [
    "Desired",
    "OverrideRecord",
    "PauseRecord",
    "ProfileRecord",
    "QuarantineRecord",
    "ReleaseRecord",
    "WeightRecord",
    "covering_pauses",
    "released_kinds",
    "with_item",
    "without_groups",
    "without_item",
]

K = TypeVar("K")
V = TypeVar("V")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PauseRecord:
    """One pause from its acceptance to its end.

    Attributes:
        binds: the selector, when it also binds participants that join later (AD-19).
        settled: the pausing operation completed; before that the gate is closed already.
        kept: requests that it froze.
    """

    epoch: int
    spec: PauseSpec
    participant_ids: tuple[ParticipantId, ...]
    operation_id: OperationId
    principal: str
    binds: Target | None = None
    settled: bool = False
    kept: int = 0

    def covers(self, participant: ParticipantInfo) -> bool:
        """Whether the pause holds this participant, named or bound later."""
        if participant.participant_id in self.participant_ids:
            return True
        # A group whose members nobody had told was skipped under its own id.
        if ParticipantId(participant.group_id) in self.participant_ids:
            return True
        match self.binds:
            case AllTargets():
                return True
            case ModelTargets(models=models):
                return not set(models).isdisjoint(participant.models)
            case _:
                return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRecord:
    """One release; `remaining` says what is still released, per participant."""

    epoch: int
    kinds: tuple[ResourceKind, ...]
    remaining: Mapping[ParticipantId, frozenset[ResourceKind]]
    operation_id: OperationId
    principal: str
    retention: WeightRetention | None = None
    settled: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRecord:
    """One group that takes no inference because its state is not known to be consistent (AD-31).

    Attributes:
        instances: the engine process of each participant when it was quarantined, where known; another one means
            that the engine was restarted.
    """

    group_id: GroupId
    participant_ids: tuple[ParticipantId, ...]
    reason: str
    operation_id: OperationId
    since_unix_nanos: int
    instances: Mapping[ParticipantId, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """The published weights of one model; `operation_id` is empty for those it started with.

    Attributes:
        source: where they can be read again, if anywhere.
        content_digest: digest of the first rank's shard set as the engines agree on it, where obtainable.
        digests: per participant, since each rank holds its own shard.
    """

    model: str
    version: str
    operation_id: str = ""
    source: WeightSource | None = None
    content_digest: bytes = b""
    digests: Mapping[ParticipantId, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """One profile, running until `stopped`.

    Attributes:
        stopped_at_unix_nanos: when its stop was accepted; zero while it runs.
    """

    profile_id: str
    operation_id: OperationId
    participant_ids: tuple[ParticipantId, ...]
    kinds: tuple[ProfilerKind, ...]
    started_at_unix_nanos: int
    stopped: bool = False
    artifacts: tuple[ProfileArtifact, ...] = ()
    stopped_at_unix_nanos: int = 0

    @property
    def last_unix_nanos(self) -> int:
        """When an operation last had to do with it."""
        return max(self.started_at_unix_nanos, self.stopped_at_unix_nanos)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OverrideRecord:
    """Serving values of one group that override the file (AD-47).

    Attributes:
        changes: what holds.
        operation_id: the last operation that changed any of it.
        file_values: what the config file said when each was set; a field that it has no key for is absent.
        made_by: the operation that set each field.
        waiting: fields that the engine takes at its next start.
        returning: values of the file that hold again, and that the engine is still to be told.
    """

    group_id: GroupId
    changes: tuple[ServingChange, ...]
    operation_id: OperationId
    file_values: tuple[ServingChange, ...] = ()
    made_by: Mapping[ReconfigurableField, OperationId] = dataclasses.field(default_factory=dict)
    waiting: frozenset[ReconfigurableField] = frozenset()
    returning: tuple[ServingChange, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """Everything that outlives operations. Maps are never mutated.

    Attributes:
        last_epoch: pauses and releases share one counter, so that an epoch names one thing.
        last_ordinal: order of operations and reconciliations; also rises over a store reset, since it is never less
            than the wall clock in microseconds was.
    """

    revision: int = 0
    last_epoch: int = 0
    last_ordinal: int = 0
    pauses: Mapping[int, PauseRecord] = dataclasses.field(default_factory=dict)
    releases: Mapping[int, ReleaseRecord] = dataclasses.field(default_factory=dict)
    quarantines: Mapping[GroupId, QuarantineRecord] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, WeightRecord] = dataclasses.field(default_factory=dict)
    profiles: Mapping[str, ProfileRecord] = dataclasses.field(default_factory=dict)
    overrides: Mapping[GroupId, OverrideRecord] = dataclasses.field(default_factory=dict)

    def next_ordinal(self, *, now_us: int) -> int:
        """The ordinal that the next operation gets."""
        return max(self.last_ordinal + 1, now_us)


def with_item(items: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """A copy with one item set."""
    return MappingProxyType({**items, key: value})


def without_item(items: Mapping[K, V], key: K) -> Mapping[K, V]:
    """A copy without one item."""
    return MappingProxyType({k: v for k, v in items.items() if k != key})


_HARDNESS = {PauseMode.KEEP: 0, PauseMode.DRAIN: 1, PauseMode.ABORT: 2}


def covering_pauses(desired: Desired, participant: ParticipantInfo) -> tuple[PauseRecord, ...]:
    """Pauses that hold a participant, hardest first."""
    found = [p for p in desired.pauses.values() if p.covers(participant)]
    return tuple(sorted(found, key=lambda p: (-_HARDNESS[p.spec.mode], p.epoch)))


def released_kinds(desired: Desired, participant_id: ParticipantId) -> frozenset[ResourceKind]:
    """Resources of one participant that are meant to be released."""
    kinds: frozenset[ResourceKind] = frozenset()
    for release in desired.releases.values():
        kinds |= release.remaining.get(participant_id, frozenset())
    return kinds


def without_groups(desired: Desired, groups: frozenset[GroupId]) -> Desired | None:
    """The desired state without groups that are quarantined and left for good; None when that changes nothing.

    Only what a quarantine names is known here by participant, so pauses and releases lose just those; a pause or a
    release that then covers nobody ends.
    """
    gone = {p for g in groups if g in desired.quarantines for p in desired.quarantines[g].participant_ids}
    if not gone:
        return None
    pauses = {}
    for epoch, pause in desired.pauses.items():
        left = tuple(p for p in pause.participant_ids if p not in gone)
        if left or pause.binds is not None:
            pauses[epoch] = dataclasses.replace(pause, participant_ids=left)
    releases = {}
    for epoch, release in desired.releases.items():
        remaining = {p: kinds for p, kinds in release.remaining.items() if p not in gone}
        if remaining:
            releases[epoch] = dataclasses.replace(release, remaining=remaining)
    quarantines = {g: q for g, q in desired.quarantines.items() if g not in groups}
    return dataclasses.replace(desired, pauses=pauses, releases=releases, quarantines=quarantines)
