"""Steps: what the operation core asks of the participants of one group.

A step is plain data, so that it can be carried over a wire and journalled. It is idempotent by
`(operation_id, step)`: whoever executes it remembers the answer and gives it again (AD-36). Executors refuse a step
whose `(ordinal, step)` is smaller than the last one seen for any of its participants: that one was superseded.

Each step kind has an undo, named at its class, or none.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from iop.admin.enums import (
    BusyPolicy,
    CacheKind,
    ParticipantPhase,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    VerificationMethod,
    WeightRetention,
)
from iop.admin.requests import PauseSpec, ServingChange, ServingValue, WeightSource
from iop.admin.results import (
    CacheResult,
    ChangeResult,
    ParticipantError,
    ProfileArtifact,
    ResourceAmount,
)
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = [
    "ApplyWeightsStep",
    "CommitWeightsStep",
    "FlushStep",
    "JudgeReconfigureStep",
    "ParticipantOutcome",
    "ParticipantReadBack",
    "PauseStep",
    "PrepareWeightsStep",
    "ReconfigureStep",
    "ReleaseStep",
    "RestoreStep",
    "ResumeStep",
    "StartProfileStep",
    "Step",
    "StepCall",
    "StepProgress",
    "StepResult",
    "StopProfileStep",
    "UndoWeightsStep",
    "VerifyWeightsStep",
    "WorkCounts",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PauseStep:
    """Stop stepping, after ending work in flight as `pause.mode` says. Undo: `ResumeStep`. No-op when paused so."""

    pause: PauseSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeStep:
    """Step again; frozen work goes on. Undo: none. No-op when running."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlushStep:
    """Empty caches. Undo: none."""

    kinds: tuple[CacheKind, ...]
    busy_policy: BusyPolicy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseStep:
    """Give memory back. Undo: `RestoreStep` of the same kinds. `weight_retention` set when kinds hold WEIGHTS."""

    kinds: tuple[ResourceKind, ...]
    weight_retention: WeightRetention | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStep:
    """Take memory back. Undo: none.

    Attributes:
        weight_source: where discarded weights are reloaded from; absent when they were offloaded.
        weight_version: label that the restored weights carry; empty when weights are not restored.
    """

    kinds: tuple[ResourceKind, ...]
    weight_source: WeightSource | None = None
    weight_version: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrepareWeightsStep:
    """Check the source (visible, shapes, digests, space) and stage it; touch nothing served. Undo: `UndoWeightsStep`.

    What is staged or held belongs to the operation that asked: the next operation's prepare discards it, and an undo
    of an operation that staged nothing here does nothing.

    Attributes:
        hold_previous: keep the old weights until commit, because their source cannot be read again.
    """

    model: str
    source: WeightSource
    weight_version: str
    hold_previous: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApplyWeightsStep:
    """Put the staged weights in place, behind closed gates. The reported label stays. Undo: `UndoWeightsStep`."""

    model: str
    source: WeightSource
    weight_version: str
    restores_weights: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyWeightsStep:
    """Read the weights in place back, by content where possible, and compare with the staged source. Undo: none."""

    model: str
    weight_version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommitWeightsStep:
    """Publish the label and drop what was held for undo; disturbs nothing (AD-38). Undo: none, it rolls forward."""

    model: str
    weight_version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UndoWeightsStep:
    """Put the previous weights back where they were replaced, drop what was staged. No-op where nothing changed.

    The reported label is not touched: it was never changed before commit (AD-38).

    Attributes:
        previous_source: where they can be read from; absent when they are held.
    """

    model: str
    previous_source: WeightSource | None
    previous_weight_version: str


def profile_id_of(operation_id: OperationId) -> str:
    """The id of the profile that an operation starts: known before it runs, and told by it ever after."""
    return f"profile-{operation_id}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartProfileStep:
    """Begin to record. Undo: `StopProfileStep`."""

    profile_id: str
    kinds: tuple[ProfilerKind, ...]
    max_steps: int | None = None
    max_duration_ms: int | None = None
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopProfileStep:
    """Stop recording and name the artifacts; for a stopped profile, name them again. Undo: none."""

    profile_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReconfigureStep:
    """Judge each change without making it (AD-47). Undo: none needed."""

    changes: tuple[ServingChange, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReconfigureStep:
    """Make the changes, all or none. Undo: `ReconfigureStep` with the values read back before."""

    changes: tuple[ServingChange, ...]


Step: TypeAlias = (
    PauseStep
    | ResumeStep
    | FlushStep
    | ReleaseStep
    | RestoreStep
    | PrepareWeightsStep
    | ApplyWeightsStep
    | VerifyWeightsStep
    | CommitWeightsStep
    | UndoWeightsStep
    | StartProfileStep
    | StopProfileStep
    | JudgeReconfigureStep
    | ReconfigureStep
)


ANSWER_MARGIN_S = 2.0
"""How much earlier than its caller's, at most, the time of who is asked is up."""


def a_little_less(timeout_s: float) -> float:
    """The time for whoever is asked within a bound, so that its answer is there before the bound is."""
    return max(0.9 * timeout_s, timeout_s - ANSWER_MARGIN_S)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One step for the participants of one group (AD-36).

    Attributes:
        operation_id: the operation, or `reconcile-...` for a reconciliation.
        ordinal: order of operations on this server, rising also over restarts and store resets.
        step: number within the operation, rising; the repeat of a step after a reconnect has the same number.
        participant_ids: all of one group.
        timeout_s: seconds left for it; the caller stops waiting then, the step may still take effect.
    """

    operation_id: OperationId
    ordinal: int
    step: int
    group_id: GroupId
    participant_ids: tuple[ParticipantId, ...]
    body: Step
    timeout_s: float

    @property
    def answer_within_s(self) -> float:
        """Seconds after which whoever executes it says what it knows by then.

        A little before the caller stops waiting: an answer that names a rank tells more than silence (AD-31).
        """
        return a_little_less(self.timeout_s)


BYTES_UNIT = "bytes"
"""The unit of progress that a participant's status keeps: how much it has loaded (AD-23)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """A report while a step runs; numbers are of this participant alone."""

    participant_id: ParticipantId
    phase: ParticipantPhase
    done: int = 0
    total: int = 0
    unit: str = "steps"
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkCounts:
    """What became of requests, counted once per group (not per rank)."""

    drained: int = 0
    aborted: int = 0
    kept: int = 0
    resumed: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantOutcome:
    """What a step did on one participant.

    Attributes:
        error: absent on success. A refusal hidden in a 200 body is an error (AD-37).
        changed: whether its state may differ from before the step; True unless surely untouched.
        verified_by: what a weight verification rested on.
    """

    participant_id: ParticipantId
    error: ParticipantError | None = None
    changed: bool = True
    caches: tuple[CacheResult, ...] = ()
    amounts: tuple[ResourceAmount, ...] = ()
    changes: tuple[ChangeResult, ...] = ()
    artifacts: tuple[ProfileArtifact, ...] = ()
    weight_version: str = ""
    content_digest: bytes = b""
    verified_by: VerificationMethod | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Answer to one `StepCall`: one outcome per participant of the call."""

    participants: tuple[ParticipantOutcome, ...]
    work: WorkCounts = WorkCounts()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantReadBack:
    """The engine's own word on one participant's state; `None` means: could not be told (AD-37).

    Attributes:
        instance: changes whenever the engine process was restarted, and only then; empty when not told.
        paused: whether the engine steps no more.
        frozen: requests frozen in it by a KEEP pause.
        released: resources that are released now.
        cached: entries per cache kind; an emptied cache has 0. Kinds that cannot be told are absent.
        weight_version: the published label.
        content_digest: digest of the weights in place, where obtainable.
        profiles: ids of running profiles.
        serving: effective values of reconfigurable fields.
    """

    participant_id: ParticipantId
    reachable: bool = True
    instance: str = ""
    paused: bool | None = None
    frozen: int = 0
    released: frozenset[ResourceKind] | None = None
    cached: tuple[tuple[CacheKind, int], ...] = ()
    weight_version: str | None = None
    content_digest: bytes = b""
    verified_by: VerificationMethod | None = None
    profiles: frozenset[str] | None = None
    serving: tuple[tuple[ReconfigurableField, ServingValue], ...] = ()
