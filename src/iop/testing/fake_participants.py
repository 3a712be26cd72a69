"""Fake participants: engines in memory that obey, fail, hang, vanish and lie on command.

`FakeFleet` is an `iop.admin.participant.ParticipantDriver`. Its engines keep real state (paused, frozen work, released
kinds, weights by content, caches), so that a test can compare what the core believes with what is. Faults are armed
per step kind and participant, and strike once unless told otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    CachePolicy,
    ChangeDisposition,
    ParticipantPhase,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    TensorDtype,
    VerificationMethod,
    WeightFormat,
    WeightRetention,
    WeightSourceKind,
)
from iop.admin.overrides import FileValues
from iop.admin.participant import AdmissionGate, ProgressSink
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import (
    DiskSource,
    DistributedSource,
    InlineTensorSource,
    IpcSource,
    ServingValue,
    WeightSource,
)
from iop.admin.results import (
    CacheResult,
    ChangeResult,
    ParticipantError,
    ProfileArtifact,
    ResourceAmount,
)
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    JudgeReconfigureStep,
    ParticipantOutcome,
    ParticipantReadBack,
    PauseStep,
    PrepareWeightsStep,
    ReconfigureStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    StartProfileStep,
    Step,
    StepCall,
    StepResult,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
    WorkCounts,
)
from iop.core.errors import PreconditionFailed, Unavailable
from iop.core.ids import GroupId, ParticipantId

__all__ = ["ALL_CAPABILITIES", "FakeFleet", "FakeRank", "Fault", "FaultKind"]

ALL_CAPABILITIES = Capabilities(
    operations=frozenset(AdminOperationKind),
    cache_kinds=frozenset(CacheKind),
    resource_kinds=frozenset(ResourceKind),
    pause_modes=frozenset(PauseMode),
    quiesce_modes=frozenset(PauseMode),
    weight_sources=frozenset({WeightSourceKind.DISK, WeightSourceKind.INLINE_TENSORS}),
    weight_formats=frozenset({WeightFormat.SAFETENSORS}),
    weight_retentions=frozenset(WeightRetention),
    tensor_dtypes=frozenset({TensorDtype.FLOAT32}),
    cache_policies=frozenset(CachePolicy),
    busy_policies=frozenset(BusyPolicy),
    profiler_kinds=frozenset({ProfilerKind.CPU, ProfilerKind.MEMORY}),
    reconfigurable_fields=frozenset(
        {ReconfigurableField.CAPACITY, ReconfigurableField.ENABLED, ReconfigurableField.SERVED_ALIASES}
    ),
    holds_previous_weights=True,
    capacity_max=64,
)


@enum.unique
class FaultKind(enum.Enum):
    """What goes wrong when a step reaches a participant."""

    ERROR = "error"
    HANG = "hang"
    LIE = "lie"
    DISCONNECT = "disconnect"
    RESTART = "restart"
    WRONG_DIGEST = "wrong_digest"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One armed fault.

    Attributes:
        step: the step type that triggers it, by class name; empty means any.
        once: disarm after it struck.
    """

    kind: FaultKind
    participant_id: str
    step: str = ""
    once: bool = True


@dataclasses.dataclass(slots=True)
class FakeRank:
    """The state of one rank; `content` names the weights in place, `label` the version it reports."""

    participant_id: ParticipantId
    group_id: GroupId
    models: tuple[str, ...]
    capabilities: Capabilities = ALL_CAPABILITIES
    instance: int = 1
    connection: int = 1
    connected: bool = True
    paused: bool = False
    released: set[ResourceKind] = dataclasses.field(default_factory=set)
    content: str = "base"
    label: str = "v0"
    startup_source: WeightSource | None = None
    staged: str | None = None
    staged_by: str = ""
    held: str | None = None
    cached: dict[CacheKind, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(CacheKind, 3))
    profiles: set[str] = dataclasses.field(default_factory=set)
    serving: dict[ReconfigurableField, ServingValue] = dataclasses.field(
        default_factory=lambda: {
            ReconfigurableField.CAPACITY: 8,
            ReconfigurableField.ENABLED: True,
            ReconfigurableField.SERVED_ALIASES: (),
        }
    )

    def restart(self) -> None:
        """A new engine process: everything that is not configuration is as at the start."""
        self.instance += 1
        self.paused = False
        self.released = set()
        self.content, self.label, self.staged, self.held = "base", "v0", None, None
        self.cached = dict.fromkeys(CacheKind, 0)
        self.profiles = set()
        self.serving = {
            ReconfigurableField.CAPACITY: 8,
            ReconfigurableField.ENABLED: True,
            ReconfigurableField.SERVED_ALIASES: (),
        }

    def digest(self) -> bytes:
        """Digest of the shard in place."""
        return hashlib.sha256(f"{self.content}:{self.participant_id}".encode()).digest()


def content_of(source: WeightSource) -> str:
    """A name for what a source holds; equal sources hold equal weights."""
    match source:
        case DiskSource(path=path):
            return path
        case InlineTensorSource(tensors=tensors):
            hashed = hashlib.sha256()
            for tensor in tensors:
                assert tensor.data, "spooled tensors are put back before a step is sent"
                hashed.update(tensor.data)
            return f"inline-{hashed.hexdigest()[:12]}"
        case DistributedSource(group_name=name):
            return f"group-{name}"
        case IpcSource():
            return "ipc"
        case _:
            assert_never(source)


class FakeFleet:
    """Groups of fake ranks behind the driver port."""

    def __init__(self, shape: Mapping[str, int], *, models: tuple[str, ...] = ("m",)) -> None:
        """Make groups.

        Args:
            shape: ranks of each group, by group id; ranks are named `GROUP/INDEX`.
            models: served by every rank.
        """
        self.ranks: dict[ParticipantId, FakeRank] = {}
        self.work: dict[GroupId, int] = {}
        self.frozen: dict[GroupId, int] = {}
        self.gates: dict[ParticipantId, AdmissionGate] = {}
        self.faults: list[Fault] = []
        self.effects: list[tuple[str, ParticipantId]] = []
        self._hanging: list[ParticipantId] = []
        self.calls: list[StepCall] = []
        self.on_call: Callable[[StepCall], None] = lambda _call: None
        self.release_hangs = asyncio.Event()
        self.gate_delay_s = 0.0
        self.config: dict[GroupId, dict[ReconfigurableField, ServingValue]] = {
            GroupId(group): {ReconfigurableField.CAPACITY: 8, ReconfigurableField.ENABLED: True}
            for group in shape
        }
        self.overrides: FileValues = {}
        self.disposition = ChangeDisposition.APPLIED
        self._infos: dict[ParticipantId, tuple[tuple[object, ...], ParticipantInfo]] = {}
        self._remembered: dict[tuple[str, int, GroupId], StepResult] = {}
        self._last: dict[ParticipantId, tuple[int, int]] = {}
        for group, count in shape.items():
            self.work[GroupId(group)] = 0
            self.frozen[GroupId(group)] = 0
            for index in range(count):
                rank = FakeRank(
                    participant_id=ParticipantId(f"{group}/{index}"), group_id=GroupId(group), models=models
                )
                self.ranks[rank.participant_id] = rank

    def arm(self, kind: FaultKind, participant_id: str, step: str = "", *, once: bool = True) -> None:
        """Arm a fault."""
        self.faults.append(Fault(kind=kind, participant_id=participant_id, step=step, once=once))

    def disconnect(self, group: str) -> None:
        """Lose a whole group."""
        for rank in self.members(group):
            rank.connected = False

    def reconnect(self, group: str) -> None:
        """Bring a group back as it was left."""
        for rank in self.members(group):
            rank.connected = True
            rank.connection += 1

    def restart(self, group: str) -> None:
        """Bring a group back with new engine processes."""
        for rank in self.members(group):
            rank.restart()
            rank.connected = True
            rank.connection += 1
            self._last.pop(rank.participant_id, None)
        self.work[GroupId(group)] = self.frozen[GroupId(group)] = 0

    def members(self, group: str) -> list[FakeRank]:
        """The ranks of a group."""
        return [r for r in self.ranks.values() if r.group_id == group]

    def is_open(self, participant_id: str) -> bool:
        """Whether outer admission lets inference in."""
        gate = self.gates.get(ParticipantId(participant_id))
        return gate is not None and gate.is_open

    # --- the port -----------------------------------------------------------------------------------------------------

    def participants(self) -> Sequence[ParticipantInfo]:
        """As the driver port says."""
        return [self._info(r) for r in self.ranks.values()]

    def _info(self, rank: FakeRank) -> ParticipantInfo:
        """Asked for at every turn, so made once for each way in which a rank stands."""
        stands = (
            rank.models,
            rank.capabilities,
            rank.connected,
            rank.instance,
            rank.connection,
            rank.startup_source,
        )
        known = self._infos.get(rank.participant_id)
        if known is None or known[0] != stands:
            info = ParticipantInfo(
                participant_id=rank.participant_id,
                group_id=rank.group_id,
                capabilities=rank.capabilities,
                models=rank.models,
                aliases=tuple((f"{m}-alias", m) for m in rank.models),
                connected=rank.connected,
                instance=f"{rank.instance}.{rank.connection}",
                startup_source=rank.startup_source,
                engine_name="fake",
            )
            known = self._infos[rank.participant_id] = (stands, info)
        return known[1]

    def groups(self) -> frozenset[GroupId]:
        """As the driver port says."""
        return frozenset(r.group_id for r in self.ranks.values())

    def file_values(self) -> FileValues:
        """As the driver port says; tests write `config`."""
        return {group: self.config.get(group, {}) for group in self.groups()}

    def apply_overrides(self, overrides: FileValues) -> None:
        """As the driver port says."""
        self.overrides = overrides

    def silent(self, participant_ids: Sequence[ParticipantId]) -> Mapping[ParticipantId, str]:
        """As the driver port says: those that hang."""
        return {p: "it hangs" for p in participant_ids if p in self._hanging}

    async def apply_gates(self, gates: Mapping[ParticipantId, AdmissionGate]) -> None:
        """As the driver port says; a change takes `gate_delay_s`."""
        changes = any(self.gates.get(p) != gate for p, gate in gates.items())
        await asyncio.sleep(self.gate_delay_s if changes else 0)
        self.gates.update(gates)

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """As the driver port says."""
        await asyncio.sleep(0)
        return [self._read_back(p) for p in participant_ids if p in self.ranks]

    def _read_back(self, participant_id: ParticipantId) -> ParticipantReadBack:
        rank = self.ranks[participant_id]
        if not rank.connected:
            return ParticipantReadBack(participant_id=participant_id, reachable=False)
        return ParticipantReadBack(
            participant_id=participant_id,
            instance=str(rank.instance),
            paused=rank.paused,
            frozen=self.frozen[rank.group_id],
            released=frozenset(rank.released),
            cached=tuple(rank.cached.items()),
            weight_version=rank.label,
            content_digest=rank.digest(),
            verified_by=VerificationMethod.DIGEST,
            profiles=frozenset(rank.profiles),
            serving=tuple(rank.serving.items()),
        )

    async def execute(self, call: StepCall, report: ProgressSink) -> StepResult:
        """As the driver port says."""
        await asyncio.sleep(0)
        self.calls.append(call)
        self.on_call(call)
        key = (call.operation_id, call.step, call.group_id)
        is_judgement = isinstance(call.body, JudgeReconfigureStep)
        if key in self._remembered and not is_judgement:
            return self._remembered[key]
        await self._until_connected(call)
        if not is_judgement:
            self._fence(call)
        outcomes = [await self._on_rank(call, self.ranks[p]) for p in call.participant_ids]
        if any(not self.ranks[p].connected for p in call.participant_ids):
            await self._until_connected(call)
        work = self._on_work(call, outcomes)
        result = StepResult(participants=tuple(outcomes), work=work)
        self._remembered[key] = result
        return result

    async def _until_connected(self, call: StepCall) -> None:
        """Wait for a briefly unreachable group; the core bounds the wait."""
        while not all(self.ranks[p].connected for p in call.participant_ids):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.2)

    def _fence(self, call: StepCall) -> None:
        place = (call.ordinal, call.step)
        for participant in call.participant_ids:
            if place < self._last.get(participant, (0, 0)):
                raise PreconditionFailed("an older step than the last one", reason="STALE_STEP")
        for participant in call.participant_ids:
            self._last[participant] = place

    def _strike(self, call: StepCall, rank: FakeRank) -> FaultKind | None:
        name = type(call.body).__name__
        for fault in self.faults:
            if fault.participant_id == rank.participant_id and fault.step in {"", name}:
                if fault.once:
                    self.faults.remove(fault)
                return fault.kind
        return None

    async def _on_rank(self, call: StepCall, rank: FakeRank) -> ParticipantOutcome:
        fault = self._strike(call, rank)
        match fault:
            case FaultKind.ERROR:
                return self._error(call, rank, "it said no")
            case FaultKind.HANG:
                self._hanging.append(rank.participant_id)
                try:
                    await self.release_hangs.wait()
                finally:
                    self._hanging.remove(rank.participant_id)
                raise Unavailable("hung", reason="HUNG")
            case FaultKind.DISCONNECT:
                rank.connected = False
                return self._error(call, rank, "connection lost", code=AdminErrorCode.PARTICIPANT_LOST)
            case FaultKind.RESTART:
                rank.restart()
                return self._error(call, rank, "the rank crashed")
            case FaultKind.LIE | FaultKind.WRONG_DIGEST | None:
                return self._obey(call.operation_id, call.body, rank, fault)

    def _error(
        self,
        call: StepCall,
        rank: FakeRank,
        message: str,
        *,
        code: AdminErrorCode = AdminErrorCode.PARTICIPANT_FAILED,
        changed: bool = True,
    ) -> ParticipantOutcome:
        error = ParticipantError(code=code, message=message, step=ParticipantPhase.APPLYING, retryable=True)
        return ParticipantOutcome(participant_id=rank.participant_id, error=error, changed=changed)

    def _obey(
        self, operation_id: str, body: Step, rank: FakeRank, fault: FaultKind | None
    ) -> ParticipantOutcome:
        me = rank.participant_id
        does = fault is not FaultKind.LIE
        if does:
            self.effects.append((type(body).__name__, me))
        match body:
            case PauseStep():
                rank.paused = rank.paused or does
            case ResumeStep():
                rank.paused = rank.paused and not does
            case FlushStep(kinds=kinds):
                for kind in kinds:
                    rank.cached[kind] = 0 if does else rank.cached[kind]
                told = tuple(
                    CacheResult(participant_id=me, kind=k, outcome=CacheOutcome.CLEARED) for k in kinds
                )
                return ParticipantOutcome(participant_id=me, caches=told)
            case ReleaseStep(kinds=kinds):
                rank.released |= set(kinds) if does else set()
                amounts = tuple(ResourceAmount(participant_id=me, kind=k, bytes=1024) for k in kinds)
                return ParticipantOutcome(participant_id=me, amounts=amounts)
            case RestoreStep(kinds=kinds):
                rank.released -= set(kinds) if does else set()
                amounts = tuple(ResourceAmount(participant_id=me, kind=k, bytes=1024) for k in kinds)
                return ParticipantOutcome(participant_id=me, amounts=amounts)
            case PrepareWeightsStep(source=source, hold_previous=holds):
                if does:
                    rank.staged, rank.staged_by = content_of(source), operation_id
                    rank.held = rank.content if holds else None
            case ApplyWeightsStep() if rank.staged_by != operation_id:
                error = ParticipantError(
                    code=AdminErrorCode.PARTICIPANT_FAILED,
                    message="nothing was staged for this operation",
                    step=ParticipantPhase.APPLYING,
                )
                return ParticipantOutcome(participant_id=me, error=error, changed=False)
            case ApplyWeightsStep(source=source, restores_weights=restores):
                if does:
                    rank.content = rank.staged or content_of(source)
                    if fault is FaultKind.WRONG_DIGEST:
                        rank.content += "-torn"
                    if restores:
                        rank.released.discard(ResourceKind.WEIGHTS)
            case VerifyWeightsStep():
                if rank.content != rank.staged:
                    error = ParticipantError(
                        code=AdminErrorCode.VERIFICATION_FAILED,
                        message="the digest differs",
                        step=ParticipantPhase.VERIFYING,
                    )
                    return ParticipantOutcome(participant_id=me, error=error, changed=False)
                return ParticipantOutcome(
                    participant_id=me,
                    changed=False,
                    content_digest=rank.digest(),
                    verified_by=VerificationMethod.DIGEST,
                )
            case CommitWeightsStep(weight_version=version):
                if does:
                    rank.label, rank.staged, rank.held = version, None, None
            case UndoWeightsStep(previous_source=source):
                if does and rank.staged is not None and rank.staged_by == operation_id:
                    rank.content = rank.held or (content_of(source) if source else rank.content)
                    rank.staged, rank.held = None, None
            case StartProfileStep(profile_id=profile):
                if does:
                    rank.profiles.add(profile)
            case StopProfileStep(profile_id=profile):
                if does:
                    rank.profiles.discard(profile)
                artifact = ProfileArtifact(
                    participant_id=me,
                    kind=ProfilerKind.CPU,
                    uri=f"profile:{profile}/{me}",
                    media_type="application/json",
                    size_bytes=2,
                    sha256=hashlib.sha256(b"{}").digest(),
                )
                return ParticipantOutcome(participant_id=me, artifacts=(artifact,))
            case JudgeReconfigureStep(changes=changes) | ReconfigureStep(changes=changes):
                is_late = self.disposition is ChangeDisposition.NEEDS_RESTART
                is_real = isinstance(body, ReconfigureStep) and does and not is_late
                results = []
                for change in changes:
                    is_rejected = change.field is ReconfigurableField.CAPACITY and change.value == 13
                    if is_real and not is_rejected:
                        rank.serving[change.field] = change.value
                    results.append(
                        ChangeResult(
                            participant_id=me,
                            field=change.field,
                            disposition=ChangeDisposition.REJECTED if is_rejected else self.disposition,
                            detail="13 is bad luck" if is_rejected else "",
                            effective_value=str(rank.serving.get(change.field, "")),
                        )
                    )
                return ParticipantOutcome(participant_id=me, changes=tuple(results))
            case _:
                assert_never(body)
        return ParticipantOutcome(participant_id=me)

    def _on_work(self, call: StepCall, outcomes: Sequence[ParticipantOutcome]) -> WorkCounts:
        if any(o.error is not None for o in outcomes):
            return WorkCounts()
        group = call.group_id
        match call.body:
            case PauseStep(pause=spec):
                running, self.work[group] = self.work[group], 0
                match spec.mode:
                    case PauseMode.DRAIN:
                        return WorkCounts(drained=running)
                    case PauseMode.ABORT:
                        ended = running + self.frozen[group]
                        self.frozen[group] = 0
                        return WorkCounts(aborted=ended)
                    case PauseMode.KEEP:
                        self.frozen[group] += running
                        return WorkCounts(kept=running)
            case ResumeStep():
                resumed, self.frozen[group] = self.frozen[group], 0
                self.work[group] += resumed
                return WorkCounts(resumed=resumed)
            case _:
                return WorkCounts()
