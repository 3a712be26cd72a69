"""Admin steps carried to an engine's own OpenEngineAdmin, each read back from its profile (AD-36, AD-37).

The engine's ranks are the participants. The engine has epochs of its own: what we paused is found again,
also after a restart of this process, by the key of the engine's operation that made the pause, since every
key of ours has the form ``operation/step``. A pause that somebody else made on the engine's own port is
never ended by us; it shows in the read-back and the step fails, which is what the operation core needs to
know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from iop.adapters.base import AdapterServices, TunnelStream
from iop.adapters.http_tunnel import refuse_tunnel
from iop.adapters.openengine import steps
from iop.adapters.openengine.admin_rpc import OperationFailedError
from iop.adapters.openengine.artifact_fetch import ArtifactFetch
from iop.adapters.openengine.operations import EngineOperations
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    ChangeDisposition,
    PauseMode,
)
from iop.admin.participant import ProgressSink
from iop.admin.profile import ActivePause, AdminProfile, ParticipantInfo
from iop.admin.requests import (
    FlushCachesRequest,
    PauseRequest,
    ReleaseResourcesRequest,
    ServingChange,
)
from iop.admin.results import (
    AdminError,
    ChangeResult,
    OperationResult,
    ReconfigureServingResult,
    RestoreResourcesResult,
    ResumeResult,
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
    StepCall,
    StepResult,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
    WorkCounts,
)
from iop.core.errors import (
    IopError,
    PermissionDenied,
    PreconditionFailed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from iop.core.ids import ParticipantId
from iop.wire.messages import OpenEngineSettings, StreamErrorCode

_log = logging.getLogger(__name__)


class OpenEngineControl(EngineOperations):
    """The `EngineControl` over OpenEngineAdmin.

    Args:
        settings: where the engine's listeners are, and the token for the admin one.
        services: the Node's change signal.

    Raises:
        InvalidRequest: no admin target, or an authority that is not PEM.
    """

    def __init__(self, settings: OpenEngineSettings, services: AdapterServices) -> None:
        super().__init__(settings, services)
        self._services = services
        self._tasks: asyncio.TaskGroup | None = None

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open the channels; they connect when first used."""
        self._tasks = tasks
        self._link.start()

    async def aclose(self) -> None:
        """Close the channels; mutations go on at the engine."""
        await self._link.aclose()

    @property
    def failure(self) -> str:
        """Why the admin listener does not answer; empty while it does."""
        return self._link.failure

    async def probe(self) -> None:
        """Read instance and profile."""
        try:
            await self._link.refresh()
        except IopError as exc:
            self._link.note_failure(exc)

    def weight_version(self) -> str:
        """The label that all ranks share."""
        profile = self._link.profile
        if profile is None:
            return ""
        versions = {each.weight_version for each in profile.participants}
        return versions.pop() if len(versions) == 1 else ""

    def participants(self) -> Sequence[ParticipantInfo]:
        """As of the last read."""
        profile = self._link.profile
        if profile is None:
            return ()
        return steps.infos_of(profile, instance=self._link.instance, sources=self._link.sources)

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """From the engine's own admin listener, under the credential of its steps (AD-46)."""
        if not self._link.is_open or self._tasks is None:
            refuse_tunnel(stream, StreamErrorCode.UPSTREAM_ERROR, "the adapter is closed")
            on_done()
            return
        fetch = ArtifactFetch(self._link.rpc(), uri, stream, named=self._profiles.artifact(uri))
        fetch.bind()
        self._tasks.create_task(fetch.run(on_done), name="artifact")

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """From a profile read now; whoever it does not name cannot be told about.

        Nor can those that an operation of ours still acts on for nobody: for a step that was given up, perhaps by a
        process of ours that is gone. What the engine says of them is not what it will be.
        """
        try:
            unsettled = await self._unsettled()
            profile = await self._link.refresh()
            await self._profiles.note_ended(self._admin(), profile)
        except IopError as exc:
            self._link.note_failure(exc)
            return [ParticipantReadBack(participant_id=each, reachable=False) for each in participant_ids]
        told = [each for each in participant_ids if each not in unsettled]
        seen = {each.participant_id: each for each in self._read(profile, told)}
        return [
            seen.get(each) or ParticipantReadBack(participant_id=each, reachable=False)
            for each in participant_ids
        ]

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:
        """As :meth:`iop.adapters.base.Adapter.execute_step`."""
        own = steps.nested_key(call)
        failed = self._under_way.setdefault(own, {})
        try:
            async with asyncio.timeout(call.answer_within_s):
                # The profile is read once nothing older acts any more: what that did may end by itself meanwhile.
                profile = await self._profile_of_its_own(call)
                result = await self._dispatch(call, profile, report)
        except TimeoutError:
            if not failed:
                raise
            result = steps.failed_so_far(call, failed)
        except OperationFailedError as exc:
            result = steps.failed_by(call, exc.error, failed)
        except (Unauthenticated, PermissionDenied) as exc:
            return steps.refused(call, exc)
        except (Unavailable, Unsupported):
            raise
        except IopError as exc:
            result = steps.refused(call, exc)
        finally:
            self._under_way.pop(own, None)
        self._services.on_change()
        return result

    # -- steps --

    async def _dispatch(self, call: StepCall, profile: AdminProfile, report: ProgressSink) -> StepResult:
        match call.body:
            case PauseStep():
                return await self._pause(call, call.body, profile, report)
            case ResumeStep():
                return await self._resume(call, profile, report)
            case FlushStep(kinds=kinds, busy_policy=busy_policy):
                self._require(profile, call, AdminOperationKind.FLUSH_CACHES)
                request = FlushCachesRequest(
                    options=steps.options_of(call),
                    target=steps.targets_of(call),
                    kinds=kinds,
                    busy_policy=busy_policy,
                )
                return steps.succeeded(call, await self._mutate(call, request, report))
            case ReleaseStep():
                return await self._release(call, call.body, profile, report)
            case RestoreStep():
                return await self._restore(call, call.body, profile, report)
            case PrepareWeightsStep():
                return await self._prepare_weights(call, call.body, profile)
            case ApplyWeightsStep(weight_version=version) if self._serves(call, profile, version):
                return await self._verified_weights(call, version)
            case ApplyWeightsStep(model=model, source=source, weight_version=version):
                name = steps.engine_model(profile, call.participant_ids, model)
                update = steps.update_request(
                    call,
                    model=name,
                    source=source,
                    version=version,
                    pauses=steps.pauses_over(profile, call.participant_ids),
                )
                await self._mutate(call, update, report)
                return await self._verified_weights(call, version)
            case VerifyWeightsStep(weight_version=version) | CommitWeightsStep(weight_version=version):
                # The engine verified and published as one; what is asked here is what it says now.
                return await self._verified_weights(call, version)
            case UndoWeightsStep():
                return await self._undo_weights(call, call.body, profile, report)
            case StartProfileStep():
                self._require(profile, call, AdminOperationKind.START_PROFILE)
                return await self._profiles.start(self._admin(), call, call.body)
            case StopProfileStep(profile_id=profile_id):
                return await self._profiles.stop(self._admin(), call, profile_id)
            case JudgeReconfigureStep(changes=changes):
                return await self._judge(call, changes, profile)
            case ReconfigureStep(changes=changes):
                self._require(profile, call, AdminOperationKind.RECONFIGURE_SERVING)
                wanted = steps.reconfigure_request(call, changes)
                result = _with_changes(call, await self._mutate(call, wanted, report))
                self._note_serving(result, changes)
                return result

    def _note_serving(self, result: StepResult, changes: Iterable[ServingChange]) -> None:
        """Keep the values in effect: the engine read them back, and its profile does not tell them again."""
        for outcome in result.participants:
            values = self._serving.setdefault(outcome.participant_id, {})
            values.update(steps.effective_values(outcome.changes, changes))

    async def _judge(
        self, call: StepCall, changes: tuple[ServingChange, ...], profile: AdminProfile
    ) -> StepResult:
        """A dry run of the whole: an engine's server tells its blockers, not a judgement per field."""
        self._require(profile, call, AdminOperationKind.RECONFIGURE_SERVING)
        plan = await self._admin().plan(steps.reconfigure_request(call, changes, validate_only=True))
        # What an older step of ours still does there says nothing of the values; it is ended before this one begins.
        blockers = [each for each in plan.blockers if not each.startswith("OPERATION_IN_PROGRESS")]
        disposition = ChangeDisposition.REJECTED if blockers else ChangeDisposition.APPLIED
        return StepResult(
            participants=tuple(
                ParticipantOutcome(
                    participant_id=each,
                    changed=False,
                    changes=tuple(
                        ChangeResult(
                            participant_id=each,
                            field=change.field,
                            disposition=disposition,
                            detail="; ".join(blockers)[:512],
                        )
                        for change in changes
                    ),
                )
                for each in call.participant_ids
            )
        )

    async def _pause(
        self, call: StepCall, body: PauseStep, profile: AdminProfile, report: ProgressSink
    ) -> StepResult:
        self._require(profile, call, AdminOperationKind.PAUSE)
        standing = await self._ours(steps.pauses_over(profile, call.participant_ids))
        result = steps.succeeded(call, None)
        over = steps.over_standing(body.pause.mode, standing, call.participant_ids)
        if over is steps.Standing.THAWS:
            await self._end_pauses(call, standing, report, is_whole_step=False)
        if over is not steps.Standing.ENOUGH:
            request = PauseRequest(
                options=steps.options_of(call), target=steps.targets_of(call), pause=body.pause
            )
            result = steps.succeeded(call, await self._mutate(call, request, report))
        read = self._read(await self._link.refresh(), call.participant_ids)
        awake = [back.participant_id for back in read if not back.paused]
        if awake:
            return steps.not_verified(
                call, "the engine says that it is not paused", work=result.work, bad=awake
            )
        self._frozen = result.work.kept if body.pause.mode is PauseMode.KEEP else 0
        return result

    async def _resume(self, call: StepCall, profile: AdminProfile, report: ProgressSink) -> StepResult:
        ours = await self._ours(steps.pauses_over(profile, call.participant_ids))
        resumed = await self._end_pauses(call, ours, report, is_whole_step=len(ours) == 1)
        read = self._read(await self._link.refresh(), call.participant_ids)
        asleep = [back.participant_id for back in read if back.paused is not False]
        if asleep:
            return steps.not_verified(
                call,
                "the engine is paused by somebody else; end that pause on its own admin port",
                work=WorkCounts(resumed=resumed),
                bad=asleep,
            )
        self._frozen = 0
        outcomes = tuple(
            ParticipantOutcome(participant_id=each, changed=bool(ours)) for each in call.participant_ids
        )
        return StepResult(participants=outcomes, work=WorkCounts(resumed=resumed))

    async def _end_pauses(
        self, call: StepCall, pauses: Sequence[ActivePause], report: ProgressSink, *, is_whole_step: bool
    ) -> int:
        """End pauses of ours at the engine; how many frozen requests went on."""
        resumed = 0
        for pause in pauses:
            request = steps.resume_request(call, pause, is_whole_step=is_whole_step)
            result = await self._mutate(call, request, report)
            if isinstance(result, ResumeResult):
                resumed += result.resumed
        return resumed

    async def _release(
        self, call: StepCall, body: ReleaseStep, profile: AdminProfile, report: ProgressSink
    ) -> StepResult:
        self._require(profile, call, AdminOperationKind.RELEASE_RESOURCES)
        held = {kind for each in steps.releases_over(profile, call.participant_ids) for kind in each.kinds}
        kinds = tuple(kind for kind in body.kinds if kind not in held)
        result: OperationResult | None = None
        if kinds:
            request = ReleaseResourcesRequest(
                options=steps.options_of(call),
                target=steps.targets_of(call),
                kinds=kinds,
                weight_retention=body.weight_retention if _has_weights(kinds) else None,
            )
            result = await self._mutate(call, request, report)
        read = self._read(await self._link.refresh(), call.participant_ids)
        bad = [back.participant_id for back in read if not set(body.kinds) <= (back.released or frozenset())]
        if bad:
            return steps.not_verified(
                call, "the engine does not say that the resources are released", bad=bad
            )
        return steps.succeeded(call, result, read=read)

    async def _restore(
        self, call: StepCall, body: RestoreStep, profile: AdminProfile, report: ProgressSink
    ) -> StepResult:
        releases = await self._ours(
            [
                each
                for each in steps.releases_over(profile, call.participant_ids)
                if not set(body.kinds).isdisjoint(each.kinds)
            ]
        )
        amounts: list[Any] = []
        for release in releases:
            request = steps.restore_request(call, release, body.kinds, is_only=len(releases) == 1)
            result = await self._mutate(call, request, report)
            if isinstance(result, RestoreResourcesResult):
                amounts += result.restored
        read = self._read(await self._link.refresh(), call.participant_ids)
        bad = [
            back.participant_id for back in read if back.released is None or set(body.kinds) & back.released
        ]
        if bad:
            return steps.not_verified(call, "the engine says that resources are still released", bad=bad)
        return steps.succeeded(call, RestoreResourcesResult(restored=tuple(amounts)), read=read)

    # -- weights --

    async def _prepare_weights(
        self, call: StepCall, body: PrepareWeightsStep, profile: AdminProfile
    ) -> StepResult:
        """A dry run: what the engine would refuse is found before anything is paused."""
        self._require(profile, call, AdminOperationKind.UPDATE_WEIGHTS)
        if body.hold_previous:
            raise Unsupported(
                "an engine behind its own admin server cannot hold replaced weights for us",
                reason="CANNOT_HOLD_WEIGHTS",
            )
        if self._serves(call, profile, body.weight_version):
            return steps.untouched(call)
        model = steps.engine_model(profile, call.participant_ids, body.model)
        plan = await self._admin().plan(
            steps.update_request(
                call, model=model, source=body.source, version=body.weight_version, validate_only=True
            )
        )
        # Whether it stands still is for the pause that comes next.
        blockers = [each for each in plan.blockers if "pause" not in each.lower()]
        if blockers:
            error = AdminError(
                code=AdminErrorCode.SOURCE_UNAVAILABLE, message="; ".join(blockers), rolled_back=True
            )
            return steps.failed_by(call, error, {})
        return steps.untouched(call)

    async def _undo_weights(
        self, call: StepCall, body: UndoWeightsStep, profile: AdminProfile, report: ProgressSink
    ) -> StepResult:
        if self._serves(call, profile, body.previous_weight_version):
            return steps.untouched(call)
        if body.previous_source is None:
            raise PreconditionFailed("the previous weights cannot be read again", reason="IRREVERSIBLE")
        model = steps.engine_model(profile, call.participant_ids, body.model)
        update = steps.update_request(
            call,
            model=model,
            source=body.previous_source,
            version=body.previous_weight_version,
            pauses=steps.pauses_over(profile, call.participant_ids),
        )
        await self._mutate(call, update, report)
        return await self._verified_weights(call, body.previous_weight_version)

    def _serves(self, call: StepCall, profile: AdminProfile, version: str) -> bool:
        """Whether it publishes this version already: asking for that again is no change (AD-37)."""
        return all(
            back.weight_version == version and not (back.released and _has_weights(back.released))
            for back in self._read(profile, call.participant_ids)
        )

    async def _verified_weights(self, call: StepCall, version: str) -> StepResult:
        read = self._read(await self._link.refresh(), call.participant_ids)
        bad = [back.participant_id for back in read if back.weight_version != version]
        if bad:
            return steps.not_verified(call, "the engine serves another weight version", bad=bad)
        return steps.succeeded(call, None, read=read)


def _has_weights(kinds: Iterable[object]) -> bool:
    return any(getattr(kind, "name", "") == "WEIGHTS" for kind in kinds)


def _with_changes(call: StepCall, result: OperationResult) -> StepResult:
    changes: tuple[ChangeResult, ...] = result.changes if isinstance(result, ReconfigureServingResult) else ()
    return StepResult(
        participants=tuple(
            ParticipantOutcome(
                participant_id=each,
                changes=tuple(change for change in changes if change.participant_id == each),
            )
            for each in call.participant_ids
        )
    )
