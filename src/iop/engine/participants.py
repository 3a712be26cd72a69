"""The engine's ranks as participants of the operation core: its `ParticipantDriver` (AD-36, AD-37, AD-39).

All ranks are one group: they only act together. A participant is named ``rank-0``, ``rank-1``, and so on. The engine
takes no inference until `apply_gates` has opened every rank's gate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final, assert_never

from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
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
    PauseSpec,
    ServingChange,
    WeightSource,
)
from iop.admin.results import CacheResult, ChangeResult, ParticipantError, ProfileArtifact, ResourceAmount
from iop.admin.steps import (
    BYTES_UNIT,
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
    StepProgress,
    StepResult,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
    WorkCounts,
)
from iop.core.errors import IopError, NotFound, PreconditionFailed, Unavailable, Unsupported
from iop.core.ids import ENGINE_GROUP, GroupId, ParticipantId
from iop.engine.engine import NAME, Engine
from iop.engine.operations import SLOTS_MAX
from iop.engine.reports import ArtifactFile, EngineState, RankState, RankWeights
from iop.engine.weights import DiskWeights, InlineTensor, InlineWeights
from iop.engine.weights import WeightSource as EngineWeights

__all__ = ["CAPABILITIES", "RankDriver"]

CAPABILITIES: Final = Capabilities(
    operations=frozenset(AdminOperationKind),
    cache_kinds=frozenset({CacheKind.PREFIX}),
    resource_kinds=frozenset({ResourceKind.WEIGHTS, ResourceKind.KV_CACHE}),
    pause_modes=frozenset(PauseMode),
    quiesce_modes=frozenset(PauseMode),
    weight_sources=frozenset({WeightSourceKind.DISK, WeightSourceKind.INLINE_TENSORS}),
    weight_formats=frozenset({WeightFormat.SAFETENSORS}),
    weight_retentions=frozenset(WeightRetention),
    tensor_dtypes=frozenset({TensorDtype.FLOAT32, TensorDtype.FLOAT16, TensorDtype.BFLOAT16}),
    cache_policies=frozenset(CachePolicy),
    busy_policies=frozenset(BusyPolicy),
    profiler_kinds=frozenset({ProfilerKind.CPU, ProfilerKind.MEMORY, ProfilerKind.SCHEDULER}),
    reconfigurable_fields=frozenset({ReconfigurableField.CAPACITY}),
    holds_previous_weights=True,
    capacity_max=SLOTS_MAX,
)

_REMEMBERED_MAX: Final = 4096
"""Answers kept for repeated steps; an operation has few, and old ones are fenced off anyway."""

_ARTIFACTS_MAX: Final = 4096
"""Artifacts that can be fetched; the oldest go first."""

_PIECE_BYTES: Final = 64 * 1024

SILENT_S: Final = 1.0
"""A rank that has owed an answer for so long when a step's time is up is what the step waited for."""

_CODES: Final[Mapping[str, AdminErrorCode]] = {
    "DRAIN_TIMEOUT": AdminErrorCode.DRAIN_TIMEOUT,
    "VERIFICATION_FAILED": AdminErrorCode.VERIFICATION_FAILED,
    "SOURCE_UNAVAILABLE": AdminErrorCode.SOURCE_UNAVAILABLE,
    "CHECKPOINT_NOT_FOUND": AdminErrorCode.SOURCE_UNAVAILABLE,
    "SOURCE_MISMATCH": AdminErrorCode.SOURCE_MISMATCH,
    "RANK_LOST": AdminErrorCode.PARTICIPANT_LOST,
    "ENGINE_FAILED": AdminErrorCode.PARTICIPANT_LOST,
    "ENGINE_CLOSED": AdminErrorCode.PARTICIPANT_LOST,
}


class RankDriver:
    """Implements ``ParticipantDriver`` over one started engine.

    Args:
        engine: started; its gate is closed until `apply_gates` opens it.
        checkpoint: absolute directory that the engine started from, as a source that can be read again.
    """

    def __init__(self, engine: Engine, *, checkpoint: Path) -> None:
        self._engine = engine
        self._info = engine.info
        self._checkpoint = checkpoint
        self._ids = tuple(ParticipantId(f"rank-{rank}") for rank in range(self._info.ranks))
        self._remembered: OrderedDict[tuple[str, int], StepResult] = OrderedDict()
        self._last = (0, 0)
        self._gates = dict.fromkeys(self._ids, AdmissionGate(is_open=False))
        self._artifacts: dict[str, ArtifactFile] = {}
        self._own_pause = False
        engine.set_gate(is_open=False)

    def participants(self) -> Sequence[ParticipantInfo]:
        """The ranks, in order."""
        connected = self._engine.state in {EngineState.SERVING, EngineState.PAUSED}
        return [
            ParticipantInfo(
                participant_id=one,
                group_id=ENGINE_GROUP,
                capabilities=CAPABILITIES,
                models=(self._info.model_id,),
                connected=connected,
                instance=self._info.instance_id,
                startup_source=DiskSource(path=str(self._checkpoint), format=WeightFormat.SAFETENSORS),
                rank=rank,
                engine_name=NAME,
                engine_version=self._info.version,
            )
            for rank, one in enumerate(self._ids)
        ]

    async def apply_gates(self, gates: Mapping[ParticipantId, AdmissionGate]) -> None:
        """Admit only while every rank's gate is open; over an overlap REJECT beats QUEUE (AD-39, AD-41)."""
        self._gates.update({one: gate for one, gate in gates.items() if one in self._gates})
        closed = [gate for gate in self._gates.values() if not gate.is_open]
        rejects = any(gate.admission is AdmissionPolicy.REJECT for gate in closed)
        if self._engine.state in {EngineState.SERVING, EngineState.PAUSED}:
            self._engine.set_gate(
                is_open=not closed, admission=AdmissionPolicy.REJECT if rejects else AdmissionPolicy.QUEUE
            )

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """Each rank's own word; when the engine has failed nobody is reachable (AD-37)."""
        try:
            states = await self._engine.read_back()
        except IopError:
            return [ParticipantReadBack(participant_id=one, reachable=False) for one in participant_ids]
        by_id = dict(zip(self._ids, states, strict=True))
        return [self._seen(one, by_id[one]) for one in participant_ids if one in by_id]

    def _seen(self, one: ParticipantId, state: RankState) -> ParticipantReadBack:
        released = {
            kind
            for kind, resident in (
                (ResourceKind.WEIGHTS, state.weights_resident),
                (ResourceKind.KV_CACHE, state.kv_resident),
            )
            if not resident
        }
        profile = self._engine.running_profile
        return ParticipantReadBack(
            participant_id=one,
            instance=self._info.instance_id,
            paused=state.paused,
            frozen=state.kept,
            released=frozenset(released),
            cached=((CacheKind.PREFIX, state.prefix_entries),),
            weight_version=state.weight_version,
            content_digest=bytes.fromhex(state.weight_digest),
            verified_by=VerificationMethod.DIGEST if state.weight_digest else None,
            profiles=frozenset({profile} if profile else ()),
            serving=((ReconfigurableField.CAPACITY, self._engine.info.slots),),
        )

    def groups(self) -> frozenset[GroupId]:
        """The one group that all ranks are."""
        return frozenset({ENGINE_GROUP})

    def file_values(self) -> FileValues:
        """The slots that the engine was started with (AD-47)."""
        return {ENGINE_GROUP: {ReconfigurableField.CAPACITY: self._info.slots}}

    def apply_overrides(self, overrides: FileValues) -> None:
        """Nothing: the ranks are told by steps, before the listeners open."""

    def silent(self, participant_ids: Sequence[ParticipantId]) -> Mapping[ParticipantId, str]:
        """Ranks that have not answered an order for a second or more."""
        silent = self._engine.silent_ranks(SILENT_S)
        return {
            one: "it did not answer in time"
            for rank, one in enumerate(self._ids)
            if rank in silent and one in participant_ids
        }

    async def execute(self, call: StepCall, report: ProgressSink) -> StepResult:
        """Execute one step on all ranks, or give its remembered answer again (AD-36).

        Raises:
            PreconditionFailed: STALE_STEP.
        """
        key = (call.operation_id, call.step)
        if key in self._remembered:
            return self._remembered[key]
        place = (call.ordinal, call.step)
        if not isinstance(call.body, JudgeReconfigureStep):
            if place < self._last:
                raise PreconditionFailed("A newer step was already taken.", reason="STALE_STEP")
            self._last = place
        try:
            result = await self._obey(call, report)
        except IopError as exc:
            result = self._failure(call, exc)
        self._remembered[key] = result
        while len(self._remembered) > _REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return result

    async def _obey(self, call: StepCall, report: ProgressSink) -> StepResult:
        engine, body, update_id = self._engine, call.body, call.operation_id
        match body:
            case PauseStep(pause=spec):
                return await self._pause(spec)
            case ResumeStep():
                kept = engine.counters().kept
                await engine.resume()
                self._own_pause = False
                return self._done(work=WorkCounts(resumed=kept))
            case FlushStep():
                return await self._flush(body, call.timeout_s)
            case ReleaseStep(kinds=kinds, weight_retention=retention):
                moved = (await engine.release(kinds=kinds, retention=retention)).moved
                return self._amounts(kinds, [(one.weight_bytes, one.kv_bytes) for one in moved])
            case RestoreStep(kinds=kinds):
                moved = (await engine.restore(kinds=kinds)).moved
                return self._amounts(kinds, [(one.weight_bytes, one.kv_bytes) for one in moved])
            case PrepareWeightsStep(source=source, weight_version=version):
                found = await engine.prepare_weights(update_id, source=_weights(source), version=version)
                for one in found:
                    report(self._loaded(one))
                return self._weights(found)
            case ApplyWeightsStep():
                return self._weights(await self._apply(update_id))
            case VerifyWeightsStep():
                return self._weights(await engine.verify_weights(update_id), verified=True)
            case CommitWeightsStep():
                # The core empties the caches itself, unless the update was asked to keep them (AD-34).
                found = await engine.commit_weights(update_id, cache_policy=CachePolicy.KEEP)
                await self._end_own_pause()
                return self._weights(found)
            case UndoWeightsStep():
                found = await engine.undo_weights(update_id)
                await self._end_own_pause()
                return self._weights(found)
            case StartProfileStep():
                bound = None if body.max_duration_ms is None else body.max_duration_ms / 1000
                await engine.start_profile(
                    body.profile_id, kinds=body.kinds, max_steps=body.max_steps, max_duration_s=bound
                )
                return self._done()
            case StopProfileStep(profile_id=profile_id):
                return self._told_artifacts(profile_id, await engine.stop_profile(profile_id))
            case JudgeReconfigureStep(changes=changes):
                return self._changes([self._judge(change) for change in changes])
            case ReconfigureStep(changes=changes):
                return await self._reconfigure(changes)
            case _:
                assert_never(body)

    async def _pause(self, spec: PauseSpec) -> StepResult:
        timeout_s = None if spec.drain_timeout_ms is None else spec.drain_timeout_ms / 1000
        report = await self._engine.pause(
            mode=spec.mode,
            admission=spec.admission,
            drain_timeout_s=timeout_s,
            on_drain_timeout=spec.on_drain_timeout,
        )
        self._own_pause = False
        return self._done(work=WorkCounts(drained=report.drained, aborted=report.aborted, kept=report.kept))

    async def _flush(self, body: FlushStep, timeout_s: float) -> StepResult:
        # Answering a little before the caller stops waiting tells more than silence.
        report = await self._engine.flush(
            kinds=body.kinds, busy=body.busy_policy, wait_timeout_s=max(0.1, 0.9 * timeout_s)
        )
        return StepResult(
            participants=tuple(
                ParticipantOutcome(
                    participant_id=one,
                    caches=tuple(
                        CacheResult(
                            participant_id=one, kind=found.kind, outcome=found.outcome, detail=found.reason
                        )
                        for found in report.outcomes
                        if found.rank == rank
                    ),
                )
                for rank, one in enumerate(self._ids)
            )
        )

    async def _apply(self, update_id: str) -> tuple[RankWeights, ...]:
        """Swap; a reconciliation does so without a pause of its own, so one is lent until commit or undo."""
        if self._engine.state is EngineState.SERVING:
            await self._engine.pause(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE)
            self._own_pause = True
        return await self._engine.apply_weights(update_id)

    async def _end_own_pause(self) -> None:
        if self._own_pause:
            self._own_pause = False
            await self._engine.resume()

    def _judge(self, change: ServingChange) -> tuple[ServingChange, ChangeDisposition, str]:
        if change.field is not ReconfigurableField.CAPACITY:
            return change, ChangeDisposition.REJECTED, "This engine cannot change it."
        value = change.value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= SLOTS_MAX:
            return change, ChangeDisposition.REJECTED, f"It must be from 1 to {SLOTS_MAX}."
        same = value == self._engine.info.slots
        return change, ChangeDisposition.UNCHANGED if same else ChangeDisposition.APPLIED, ""

    async def _reconfigure(self, changes: Sequence[ServingChange]) -> StepResult:
        """All or none: nothing is touched when any change is rejected."""
        judged = [self._judge(change) for change in changes]
        if all(disposition is not ChangeDisposition.REJECTED for _, disposition, _ in judged):
            for change, _, _ in judged:
                assert isinstance(change.value, int), "judged above"
                await self._engine.set_slots(change.value)
        return self._changes(judged)

    def artifact(self, uri: str) -> ArtifactFile:
        """The file behind an artifact's uri. Raises NotFound."""
        try:
            return self._artifacts[uri]
        except KeyError:
            raise NotFound("No artifact has this uri.", reason="ARTIFACT_NOT_FOUND") from None

    async def read_artifact(self, uri: str) -> AsyncIterator[bytes]:
        """The bytes of an artifact at the reader's pace (AD-46).

        Raises:
            NotFound: no artifact has this uri.
            Unavailable: its file cannot be read, or is not what was named any more.
        """
        file = self.artifact(uri)
        left = file.size_bytes
        try:
            # Reading a piece of a local file is as quick as a copy.
            with Path(file.path).open("rb") as source:  # noqa: ASYNC230
                while left and (piece := source.read(min(left, _PIECE_BYTES))):
                    left -= len(piece)
                    yield piece
        except OSError:
            left = -1
        if left:
            raise Unavailable("The artifact's file is not whole any more.", reason="ARTIFACT_LOST")

    def _done(self, *, work: WorkCounts | None = None) -> StepResult:
        return StepResult(
            participants=tuple(ParticipantOutcome(participant_id=one) for one in self._ids),
            work=work or WorkCounts(),
        )

    def _failure(self, call: StepCall, exc: IopError) -> StepResult:
        """The same error for every rank: the engine acts as a whole and undoes what it began, unless it is lost."""
        touched = isinstance(exc, Unavailable) or isinstance(
            call.body, ApplyWeightsStep | CommitWeightsStep | UndoWeightsStep | RestoreStep
        )
        code = _CODES.get(exc.reason, AdminErrorCode.PARTICIPANT_FAILED)
        error = ParticipantError(
            code=code, message=exc.message, step=_phase(call.body), retryable=exc.retryable
        )
        return StepResult(
            participants=tuple(
                ParticipantOutcome(participant_id=one, error=error, changed=touched) for one in self._ids
            )
        )

    def _amounts(self, kinds: Sequence[ResourceKind], moved: Sequence[tuple[int, int]]) -> StepResult:
        pairs = zip(self._ids, moved, strict=True)
        return StepResult(
            participants=tuple(
                ParticipantOutcome(
                    participant_id=one,
                    amounts=tuple(
                        ResourceAmount(
                            participant_id=one,
                            kind=kind,
                            bytes=weight_bytes if kind is ResourceKind.WEIGHTS else kv_bytes,
                        )
                        for kind in kinds
                    ),
                )
                for one, (weight_bytes, kv_bytes) in pairs
            )
        )

    def _loaded(self, one: RankWeights) -> StepProgress:
        """How much a rank has read of the new weights: all of its shard."""
        return StepProgress(
            participant_id=self._ids[one.rank],
            phase=ParticipantPhase.PREPARING,
            done=one.loaded_bytes,
            total=one.loaded_bytes,
            unit=BYTES_UNIT,
        )

    def _weights(self, found: Sequence[RankWeights], *, verified: bool = False) -> StepResult:
        return StepResult(
            participants=tuple(
                ParticipantOutcome(
                    participant_id=self._ids[one.rank],
                    weight_version=one.version,
                    content_digest=bytes.fromhex(one.digest),
                    verified_by=VerificationMethod.DIGEST if verified else None,
                )
                for one in found
            )
        )

    def _changes(self, judged: Sequence[tuple[ServingChange, ChangeDisposition, str]]) -> StepResult:
        slots = str(self._engine.info.slots)
        return StepResult(
            participants=tuple(
                ParticipantOutcome(
                    participant_id=one,
                    changes=tuple(
                        ChangeResult(
                            participant_id=one,
                            field=change.field,
                            disposition=disposition,
                            detail=detail,
                            effective_value=slots if change.field is ReconfigurableField.CAPACITY else "",
                        )
                        for change, disposition, detail in judged
                    ),
                )
                for one in self._ids
            )
        )

    def _told_artifacts(self, profile_id: str, files: Sequence[ArtifactFile]) -> StepResult:
        """Files of the engine's own process are told with rank 0."""
        told: dict[ParticipantId, list[ProfileArtifact]] = {one: [] for one in self._ids}
        for file in files:
            one = self._ids[max(0, file.rank)]
            uri = f"profile:{profile_id}/{one}/{Path(file.path).name}"
            self._artifacts.pop(uri, None)
            self._artifacts[uri] = file
            while len(self._artifacts) > _ARTIFACTS_MAX:
                self._artifacts.pop(next(iter(self._artifacts)))
            told[one].append(
                ProfileArtifact(
                    participant_id=one,
                    kind=file.kind,
                    uri=uri,
                    media_type=file.media_type,
                    size_bytes=file.size_bytes,
                    sha256=bytes.fromhex(file.sha256),
                )
            )
        return StepResult(
            participants=tuple(
                ParticipantOutcome(participant_id=one, artifacts=tuple(mine)) for one, mine in told.items()
            )
        )


def _weights(source: WeightSource) -> EngineWeights:
    match source:
        case DiskSource(path=path, format=format_, digests=digests):
            if format_ is not WeightFormat.SAFETENSORS:
                raise Unsupported("This engine reads safetensors only.", reason="FORMAT_UNSUPPORTED")
            return DiskWeights(path=Path(path), sha256={one.name: one.sha256.hex() for one in digests})
        case InlineTensorSource(tensors=tensors):
            return InlineWeights(
                tensors=tuple(
                    InlineTensor(
                        name=one.spec.name,
                        dtype=one.spec.dtype,
                        shape=one.spec.shape,
                        data=one.data,
                        sha256=one.sha256,
                    )
                    for one in tensors
                )
            )
        case DistributedSource() | IpcSource():
            raise Unsupported("This engine takes weights from disk or inline.", reason="SOURCE_UNSUPPORTED")
        case _:
            assert_never(source)


def _phase(body: Step) -> ParticipantPhase:
    match body:
        case PrepareWeightsStep() | JudgeReconfigureStep():
            return ParticipantPhase.PREPARING
        case PauseStep():
            return ParticipantPhase.QUIESCING
        case VerifyWeightsStep():
            return ParticipantPhase.VERIFYING
        case UndoWeightsStep():
            return ParticipantPhase.ROLLING_BACK
        case _:
            return ParticipantPhase.APPLYING
