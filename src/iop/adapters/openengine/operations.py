"""Operations of ours at an engine's own OpenEngineAdmin: sent, followed, found again, and what was read back (AD-36).

The engine keeps them under keys of the form ``operation/step``, so that also a process of ours that is new finds what
an older one began there, and ends it before anything else is done to the same ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

from iop.adapters.base import AdapterServices
from iop.adapters.openengine import steps
from iop.adapters.openengine.admin_rpc import AdminRpc
from iop.adapters.openengine.link import AdminLink
from iop.adapters.openengine.profiles import ProfileBook
from iop.admin.enums import AdminOperationKind, ReconfigurableField
from iop.admin.participant import ProgressSink
from iop.admin.profile import ActivePause, ActiveRelease, AdminProfile
from iop.admin.requests import MutationRequest, ServingValue
from iop.admin.results import OperationProgress, OperationResult, ParticipantError, ParticipantStatus
from iop.admin.steps import BYTES_UNIT, JudgeReconfigureStep, ParticipantReadBack, StepCall, StepProgress
from iop.core.errors import DeadlineExceeded, NotFound, RemoteProtocolError, Unavailable, Unsupported
from iop.core.ids import ParticipantId
from iop.wire.messages import OpenEngineSettings

_log = logging.getLogger(__name__)

_Epoch = TypeVar("_Epoch", ActivePause, ActiveRelease)


class EngineOperations:
    """What the steps of one engine have in common.

    Args:
        settings: where the engine's listeners are, and the token for the admin one.
        services: the Node's change signal.

    Raises:
        InvalidRequest: no admin target, or an authority that is not PEM.
    """

    def __init__(self, settings: OpenEngineSettings, services: AdapterServices) -> None:
        self._profiles = ProfileBook()
        self._link = AdminLink(settings, services, on_restart=self._forget, on_look=self._profiles.learn)
        self._frozen = 0
        self._under_way: dict[str, dict[ParticipantId, ParticipantError]] = {}
        self._serving: dict[ParticipantId, dict[ReconfigurableField, ServingValue]] = {}

    async def _profile_of_its_own(self, call: StepCall) -> AdminProfile:
        """The engine's profile with no older step of ours under way.

        Raises:
            Unavailable: nobody answers in time, or not in the contract's words.
        """
        try:
            await self._end_what_was_given_up(call)
            return await self._link.refresh()
        except (DeadlineExceeded, RemoteProtocolError) as exc:
            raise Unavailable(exc.message, reason=exc.reason) from exc

    async def _end_what_was_given_up(self, call: StepCall) -> None:
        """End mutations of ours that still run on these ranks for an older step (AD-36).

        A step that nobody waits for any more leaves its mutation running. What that still does must not come after
        what this step does: its undo, perhaps.
        """
        if isinstance(call.body, JudgeReconfigureStep):
            return
        own = steps.nested_key(call)
        ids = set(call.participant_ids)
        older = [
            each
            for each in await self._admin().unfinished()
            if steps.is_nested_key(each.idempotency_key)
            and each.idempotency_key != own
            and not each.idempotency_key.startswith(f"{own}/")
            and not ids.isdisjoint(status.participant_id for status in each.participants)
        ]
        for each in older:
            _log.info("engine_operation.called_off op_id=%s", each.operation_id)
            await self._admin().call_off(each.operation_id)

    async def _unsettled(self) -> frozenset[ParticipantId]:
        """Whom operations of ours still act on that no step follows here; asked before the state is read."""
        running = await self._admin().unfinished()
        return frozenset(
            status.participant_id
            for each in running
            if steps.is_nested_key(each.idempotency_key) and not self._is_followed(each.idempotency_key)
            for status in each.participants
        )

    def _is_followed(self, key: str) -> bool:
        return any(key == own or key.startswith(f"{own}/") for own in self._under_way)

    def _admin(self) -> AdminRpc:
        return self._link.rpc()

    def _forget(self) -> None:
        """What another process of the engine told."""
        self._frozen = 0
        self._profiles.engine_restarted()
        self._serving.clear()

    async def _mutate(
        self, call: StepCall, request: MutationRequest, report: ProgressSink
    ) -> OperationResult:
        failed = self._under_way.setdefault(steps.nested_key(call), {})

        def on_progress(progress: OperationProgress | ParticipantStatus) -> None:
            if isinstance(progress, ParticipantStatus):
                if progress.error is not None and progress.participant_id in call.participant_ids:
                    failed.setdefault(progress.participant_id, progress.error)
                if progress.bytes_total and progress.participant_id in call.participant_ids:
                    report(steps.loaded(progress))
                return
            if progress.unit == BYTES_UNIT:
                return  # of one rank; its status tells it under the rank's name
            for each in call.participant_ids:
                report(
                    StepProgress(
                        participant_id=each,
                        phase=progress.phase,
                        done=progress.done,
                        total=progress.total,
                        unit=progress.unit,
                        message=progress.message[:256],
                    )
                )

        return await self._admin().mutate(request, on_progress)

    def _require(self, profile: AdminProfile, call: StepCall, kind: AdminOperationKind) -> None:
        """Refuse what the engine does not advertise, before it is touched."""
        for each in profile.participants:
            if (
                each.info.participant_id in call.participant_ids
                and kind not in each.info.capabilities.operations
            ):
                raise Unsupported(f"the engine does not offer {kind.name}", reason="NOT_OFFERED")

    async def _ours(self, found: Sequence[_Epoch]) -> list[_Epoch]:
        """Those pauses or releases that a step of ours made; only their maker and admins are shown the key."""
        ours = []
        for each in found:
            try:
                operation = await self._admin().operation(each.operation_id)
            except NotFound:
                continue
            if steps.is_nested_key(operation.idempotency_key):
                ours.append(each)
        return ours

    def _read(
        self, profile: AdminProfile, participant_ids: Iterable[ParticipantId]
    ) -> tuple[ParticipantReadBack, ...]:
        return steps.read_back_of(
            profile,
            participant_ids,
            instance=self._link.instance,
            profiles_running=self._profiles.running,
            frozen=self._frozen,
            serving=self._serving,
        )
