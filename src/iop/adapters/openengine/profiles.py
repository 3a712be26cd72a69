"""Profiles that our steps started at an engine: which id it gave each, and which may still run (AD-46).

The engine's own list of operations is the memory. Whatever a step started is found there by the key of the step, also
when its answer never came, or came to a process that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from iop.adapters.openengine import steps
from iop.adapters.openengine.admin_rpc import AdminRpc
from iop.admin.enums import AdminOperationKind, AdminOperationState
from iop.admin.profile import AdminProfile
from iop.admin.requests import StartProfileRequest, StopProfileRequest
from iop.admin.results import ProfileArtifact, StartProfileResult, StopProfileResult
from iop.admin.steps import ParticipantOutcome, StartProfileStep, StepCall, StepResult, profile_id_of
from iop.core.errors import Conflict, NotFound, PreconditionFailed
from iop.core.ids import OperationId, ParticipantId

__all__ = ["ProfileBook"]

PROFILES_KEPT_MAX: Final = 256
"""Profiles whose engine-side id is remembered; an older one is looked up again when it is to be stopped."""

ARTIFACTS_KEPT_MAX: Final = 4096
"""Artifacts whose size and digest are remembered; older ones are held to them by who asked for them alone."""


class ProfileBook:
    """What is known of the profiles of one engine."""

    def __init__(self) -> None:
        self._engine_ids: dict[str, str] = {}
        self._running: dict[ParticipantId, frozenset[str]] = {}
        self._doubtful: set[str] = set()
        self._bounded: set[str] = set()
        self._artifacts: dict[str, ProfileArtifact] = {}
        self._has_asked = False

    def artifact(self, uri: str) -> ProfileArtifact | None:
        """As the engine named it when its profile was stopped."""
        return self._artifacts.get(uri)

    @property
    def running(self) -> Mapping[ParticipantId, frozenset[str]]:
        """Our ids of the profiles that each participant was told to record and not to stop."""
        return self._running

    def engine_restarted(self) -> None:
        """Nothing records any more in another process of the engine."""
        self._running.clear()
        self._doubtful.clear()
        self._bounded.clear()

    async def learn(self, rpc: AdminRpc) -> None:
        """Take over, once, what a process before us started.

        Raises:
            IopError: the engine could not be asked; ask again.
        """
        if self._has_asked:
            return
        started = await _started(rpc)
        stopped = await _stopped(rpc) if started else frozenset()
        self._has_asked = True
        for ours, result in started.items():
            if result.profile_id not in stopped and ours not in self._engine_ids:
                self.note_started(ours, result.profile_id, result.participant_ids)
                # The engine may have been restarted since, unseen.
                self._doubtful.add(ours)

    async def start(self, rpc: AdminRpc, call: StepCall, body: StartProfileStep) -> StepResult:
        """Begin one at the engine."""
        result = await rpc.start_profile(
            StartProfileRequest(
                options=steps.options_of(call),
                target=steps.targets_of(call),
                kinds=body.kinds,
                max_steps=body.max_steps,
                max_duration_ms=body.max_duration_ms,
                label=body.label,
            )
        )
        self.note_started(
            body.profile_id,
            result.profile_id,
            call.participant_ids,
            is_bounded=body.max_steps is not None or body.max_duration_ms is not None,
        )
        return steps.succeeded(call, None)

    async def stop(self, rpc: AdminRpc, call: StepCall, profile_id: str) -> StepResult:
        """End one, and keep what its artifacts are.

        Raises:
            NotFound: no step of ours is known to have started it.
        """
        engine_id = await self.engine_id(profile_id, rpc)
        if not engine_id:
            if profile_id == profile_id_of(call.operation_id):
                return steps.untouched(call)  # the undo of a start that never came to anything
            raise NotFound("the engine knows of no such profile of ours; stop it on the engine's own port")
        request = StopProfileRequest(options=steps.options_of(call), profile_id=engine_id)
        try:
            result: StopProfileResult = await rpc.stop_profile(request, timeout_s=call.timeout_s)
        except (PreconditionFailed, NotFound, Conflict):
            self.note_refused(profile_id)
            raise
        self.note_stopped(profile_id)
        for artifact in result.artifacts:
            self._artifacts.pop(artifact.uri, None)
            self._artifacts[artifact.uri] = artifact
        while len(self._artifacts) > ARTIFACTS_KEPT_MAX:
            self._artifacts.pop(next(iter(self._artifacts)))
        return StepResult(
            participants=tuple(
                ParticipantOutcome(
                    participant_id=each,
                    artifacts=tuple(
                        artifact for artifact in result.artifacts if artifact.participant_id == each
                    ),
                )
                for each in call.participant_ids
            )
        )

    async def note_ended(self, rpc: AdminRpc, profile: AdminProfile) -> None:
        """Find out whether those that end by themselves have: whoever could start another now records none (AD-46).

        Raises:
            IopError: the engine could not be asked.
        """
        unsure = self._bounded | self._doubtful
        if not unsure:
            return
        ids = tuple(sorted(each for each, profiles in self._running.items() if profiles & unsure))
        kinds = [
            p.info.capabilities.profiler_kinds for p in profile.participants if p.info.participant_id in ids
        ]
        common = sorted(frozenset.intersection(*kinds)) if kinds else []
        if common and await rpc.could_profile(ids, common[0]):
            for ours in unsure:
                self.note_stopped(ours)

    def note_started(
        self, ours: str, engine_id: str, participants: Iterable[ParticipantId], *, is_bounded: bool = False
    ) -> None:
        """A profile records now; a bounded one until it has recorded for so long."""
        self._remember(ours, engine_id)
        if is_bounded:
            self._bounded.add(ours)
        for each in participants:
            self._running[each] = self._running.get(each, frozenset()) | {ours}

    def note_stopped(self, ours: str) -> None:
        """It records no more."""
        self._doubtful.discard(ours)
        self._bounded.discard(ours)
        self._running = {each: profiles - {ours} for each, profiles in self._running.items()}

    def note_refused(self, ours: str) -> None:
        """The engine does not stop it: where only a process before us knew that it ran, it does not run."""
        if ours in self._doubtful:
            self.note_stopped(ours)

    async def engine_id(self, ours: str, rpc: AdminRpc) -> str:
        """The engine's id of a profile; empty when no step of ours is known to have started it."""
        found = self._engine_ids.get(ours)
        if found is None:
            started = (await _started(rpc)).get(ours)
            if started is None:
                return ""
            found = started.profile_id
            self._remember(ours, found)
        return found

    def _remember(self, ours: str, engine_id: str) -> None:
        while len(self._engine_ids) >= PROFILES_KEPT_MAX:
            self._engine_ids.pop(next(iter(self._engine_ids)))
        self._engine_ids[ours] = engine_id


async def _started(rpc: AdminRpc) -> Mapping[str, StartProfileResult]:
    """By our id, what the engine's newest operations started for steps of ours."""
    operations = await rpc.newest(AdminOperationKind.START_PROFILE, AdminOperationState.SUCCEEDED)
    return {
        profile_id_of(OperationId(each.idempotency_key.partition("/")[0])): each.result
        for each in operations
        if isinstance(each.result, StartProfileResult) and steps.is_nested_key(each.idempotency_key)
    }


async def _stopped(rpc: AdminRpc) -> frozenset[str]:
    operations = await rpc.newest(AdminOperationKind.STOP_PROFILE, AdminOperationState.SUCCEEDED)
    return frozenset(
        each.result.profile_id for each in operations if isinstance(each.result, StopProfileResult)
    )
