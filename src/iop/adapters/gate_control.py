"""Pausing a provider by not letting anything in: what every adapter can do, whatever its engine (AD-41).

The gate of an adapter is closed first by every pause. Work of ours that is left is waited for or ended; then the
provider is paused, and says so when it is asked. Engines with a control interface of their own build on this (see
:mod:`iop.adapters.native_control`); everything else has this alone. Steps that nobody offers are refused here, in
the kind's name and with the way to enable them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from iop.adapters.base import AdapterServices, TunnelStream
from iop.adapters.http_tunnel import refuse_tunnel
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    DrainTimeoutAction,
    ParticipantPhase,
    PauseMode,
)
from iop.admin.participant import ProgressSink
from iop.admin.profile import Capabilities, Lacking, ParticipantInfo
from iop.admin.results import ParticipantError
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
from iop.core.errors import IopError, NotFound, PreconditionFailed, Unsupported
from iop.core.ids import GroupId, ParticipantId
from iop.wire.messages import StreamErrorCode

ENGINE: Final = ParticipantId("engine")
"""The one participant: these engines act as one, also with several ranks inside."""

POLL_S: Final = 0.1
"""Between two looks for an effect that an engine does not wait for itself."""

ABORT_CONFIRM_S: Final = 10.0
"""How long requests may take to end after their connections were closed."""

GATE_MODES: Final = frozenset({PauseMode.DRAIN, PauseMode.ABORT})
"""What the gate alone can do."""

GATE_OPERATIONS: Final = frozenset({AdminOperationKind.PAUSE, AdminOperationKind.RESUME})


NEVER_AT_A_GATE: Final = tuple(kind for kind in AdminOperationKind if kind not in GATE_OPERATIONS)

GATE_CAPABILITIES: Final = Capabilities(operations=GATE_OPERATIONS, pause_modes=GATE_MODES)
"""Of an engine at which nothing was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One line of what a kind can do, for people and for refusals.

    Attributes:
        detail: which variants, in words.
        needs: how the engine must be started for it; empty: nothing special.
    """

    operation: AdminOperationKind
    detail: str
    needs: str = ""


class StepFailed(Exception):
    """The engine failed or refused a step."""

    def __init__(
        self,
        message: str,
        *,
        code: AdminErrorCode = AdminErrorCode.PARTICIPANT_FAILED,
        changed: bool = True,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.changed = changed
        self.retryable = retryable


class Traffic(Protocol):
    """The adapter's own requests at the engine."""

    @property
    def in_flight(self) -> int:
        """How many are there."""
        ...

    def cancel_all(self) -> None:
        """Close their connections."""
        ...


GATE_OFFERS: Final = (
    Offer(operation=AdminOperationKind.PAUSE, detail="drain, abort (at the Node's gate)"),
    Offer(operation=AdminOperationKind.RESUME, detail="at the Node's gate"),
)
"""What every kind offers."""


class GateControl:
    """An `EngineControl` without an engine's help.

    Args:
        services: the Node's clock and change signal.
        name: of the provider's kind, for people.
        why_no_more: why it offers nothing but a pause, and how to get more.
    """

    OFFERS: ClassVar[tuple[Offer, ...]] = GATE_OFFERS

    def __init__(self, services: AdapterServices, *, name: str, why_no_more: str = "") -> None:
        self._services = services
        self._name = name
        self._why_no_more = why_no_more
        self._traffic: Traffic | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._is_gated = False
        # A gate dies with its adapter: another adapter is another instance, which the Edge pauses again (AD-35).
        self._life = f"{services.clock.unix_nanos():x}"

    def attach(self, traffic: Traffic) -> None:
        """Get to know the adapter's own requests, before `start`."""
        self._traffic = traffic

    # ---- for the adapter ----

    @property
    def is_gated(self) -> bool:
        """Whether nothing must pass now."""
        return self._is_gated

    @property
    def why_no_more(self) -> str:
        """Why operations of other kinds are missing; empty when none is."""
        return self._why_no_more

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Keep where background work is born."""
        self._tasks = tasks

    async def aclose(self) -> None:
        """Nothing to close."""

    @property
    def failure(self) -> str:
        """Nothing can fail here."""
        return ""

    async def probe(self) -> None:
        """Nobody to ask."""

    def weight_version(self) -> str:
        """The engine's published label; most have none."""
        return ""

    def participants(self) -> Sequence[ParticipantInfo]:
        """The provider as one."""
        return (
            ParticipantInfo(
                participant_id=ENGINE,
                group_id=GroupId("engine"),
                capabilities=GATE_CAPABILITIES,
                instance=self._life,
                engine_name=self._name,
                lacking=self._lacking_of(
                    GATE_CAPABILITIES, dict.fromkeys(NEVER_AT_A_GATE, self._why_no_more)
                ),
            ),
        )

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:  # noqa: ARG002
        """None by default."""
        refuse_tunnel(stream, StreamErrorCode.INVALID_REQUEST, "this engine keeps no artifacts")
        on_done()

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """How the gate stands."""
        return [
            self._told(paused=self._is_gated)
            if each == ENGINE
            else ParticipantReadBack(participant_id=each, reachable=False)
            for each in participant_ids
        ]

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:  # noqa: ARG002 - the Protocol's
        """As :meth:`iop.adapters.base.Adapter.execute_step`."""
        if call.participant_ids != (ENGINE,):
            raise PreconditionFailed("the engine has one participant", reason="UNKNOWN_PARTICIPANT")
        await self._before_step(call)
        try:
            result = await self._dispatch(call)
        except StepFailed as exc:
            result = failed(exc)
        except (Unsupported, PreconditionFailed):
            raise
        except IopError as exc:
            result = failed(StepFailed(exc.message, retryable=exc.retryable))
        self._services.on_change()
        return result

    # ---- for the kinds ----

    async def _before_step(self, call: StepCall) -> None:
        """Look at the engine before it is touched. Raises Unavailable when it cannot be seen."""

    def _found(self) -> Capabilities:
        """As last seen."""
        return GATE_CAPABILITIES

    def _missing(self) -> Mapping[AdminOperationKind, str]:
        """Why an operation of this kind is not offered here."""
        return {}

    def _load(self) -> int:
        """Requests at the engine, as last seen."""
        return self._traffic.in_flight if self._traffic is not None else 0

    async def _is_idle(self) -> bool:
        """Whether nothing of ours is at the engine."""
        return self._traffic is None or self._traffic.in_flight == 0

    async def _pause(self, call: StepCall, step: PauseStep) -> StepResult:
        """By the gate."""
        return await self._gate_pause(call, step)

    async def _resume(self, call: StepCall) -> StepResult:  # noqa: ARG002 - for the kinds
        """Open the gate."""
        changed, self._is_gated = self._is_gated, False
        return succeeded(changed=changed)

    async def _flush(self, call: StepCall, step: FlushStep) -> StepResult:  # noqa: ARG002 - for the kinds
        raise self._not_offered(AdminOperationKind.FLUSH_CACHES)

    async def _release(self, call: StepCall, step: ReleaseStep) -> StepResult:  # noqa: ARG002
        raise self._not_offered(AdminOperationKind.RELEASE_RESOURCES)

    async def _restore(self, call: StepCall, step: RestoreStep) -> StepResult:  # noqa: ARG002
        raise self._not_offered(AdminOperationKind.RESTORE_RESOURCES)

    async def _weights(
        self,
        call: StepCall,  # noqa: ARG002
        step: PrepareWeightsStep  # noqa: ARG002
        | ApplyWeightsStep
        | VerifyWeightsStep
        | CommitWeightsStep
        | UndoWeightsStep,
    ) -> StepResult:
        raise self._not_offered(AdminOperationKind.UPDATE_WEIGHTS)

    async def _start_profile(self, call: StepCall, step: StartProfileStep) -> StepResult:  # noqa: ARG002
        raise self._not_offered(AdminOperationKind.START_PROFILE)

    async def _stop_profile(self, call: StepCall, profile_id: str) -> StepResult:  # noqa: ARG002
        raise self._not_offered(AdminOperationKind.STOP_PROFILE)

    async def _reconfigure(
        self,
        call: StepCall,  # noqa: ARG002
        step: JudgeReconfigureStep | ReconfigureStep,  # noqa: ARG002
    ) -> StepResult:
        raise self._not_offered(AdminOperationKind.RECONFIGURE_SERVING)

    # ---- shared parts ----

    async def _gate_pause(self, call: StepCall, step: PauseStep) -> StepResult:
        """Let nothing in, then wait until the engine is idle, or end what runs.

        A drain that fails opens the gate again: nothing was changed.
        """
        if step.pause.mode not in GATE_MODES:
            raise Unsupported(f"{self._name} cannot freeze requests", reason="NOT_OFFERED")
        was_gated, self._is_gated = self._is_gated, True
        before = self._load()
        if step.pause.mode is PauseMode.ABORT:
            aborted = await self._end_all(was_gated=was_gated)
            return succeeded(work=WorkCounts(aborted=aborted))
        limit_ms = step.pause.drain_timeout_ms
        limit_s = call.timeout_s if limit_ms is None else min(call.timeout_s, limit_ms / 1000)
        try:
            async with asyncio.timeout(limit_s):
                await self._until(self._is_idle)
        except TimeoutError:
            if step.pause.on_drain_timeout is DrainTimeoutAction.ABORT:
                aborted = await self._end_all(was_gated=was_gated)
                return succeeded(work=WorkCounts(drained=max(0, before - aborted), aborted=aborted))
            self._is_gated = was_gated
            raise StepFailed(
                "requests still run at the engine",
                code=AdminErrorCode.DRAIN_TIMEOUT,
                changed=False,
                retryable=True,
            ) from None
        except BaseException:
            self._is_gated = was_gated
            raise
        return succeeded(work=WorkCounts(drained=before))

    async def _end_all(self, *, was_gated: bool) -> int:
        """Close our connections and wait until the engine is idle; how many there were."""
        count = self._traffic.in_flight if self._traffic is not None else 0
        if self._traffic is not None:
            self._traffic.cancel_all()
        try:
            async with asyncio.timeout(ABORT_CONFIRM_S):
                await self._until(self._is_idle)
        except TimeoutError:
            self._is_gated = was_gated
            raise StepFailed(
                "requests that did not come through this Node still run at the engine",
                code=AdminErrorCode.REFUSED_BUSY,
                retryable=True,
            ) from None
        return count

    async def _until(self, holds: Callable[[], Awaitable[bool]], *, poll_s: float = POLL_S) -> None:
        """Ask until it holds; the caller bounds it."""
        while True:
            if await holds():
                return
            await asyncio.sleep(poll_s)

    def _require(self, operation: AdminOperationKind) -> None:
        """Refuse what was not found at the engine, before it is touched."""
        if operation not in self._found().operations:
            raise self._not_offered(operation)

    def _not_offered(self, operation: AdminOperationKind) -> Unsupported:
        why = self._missing().get(operation, self._why_no_more)
        name = operation.name.lower().replace("_", " ")
        return Unsupported(
            f"{self._name} does not offer {name} here" + (f": {why}" if why else ""), reason="NOT_OFFERED"
        )

    def _lacking_of(
        self, capabilities: Capabilities, reasons: Mapping[AdminOperationKind, str]
    ) -> tuple[Lacking, ...]:
        """What a refusal says of each; operations without a reason are left out."""
        told = dict(reasons)
        if PauseMode.KEEP not in capabilities.pause_modes:
            told.setdefault(AdminOperationKind.PAUSE, f"{self._name} cannot freeze requests")
        return tuple(Lacking(operation=kind, how=told[kind]) for kind in sorted(told) if told[kind])

    def _told(self, **known: object) -> ParticipantReadBack:
        return ParticipantReadBack(participant_id=ENGINE, instance=self._life, **known)  # type: ignore[arg-type]

    async def _dispatch(self, call: StepCall) -> StepResult:
        match call.body:
            case PauseStep():
                return await self._pause(call, call.body)
            case ResumeStep():
                return await self._resume(call)
            case FlushStep():
                self._require(AdminOperationKind.FLUSH_CACHES)
                return await self._flush(call, call.body)
            case ReleaseStep():
                self._require(AdminOperationKind.RELEASE_RESOURCES)
                return await self._release(call, call.body)
            case RestoreStep():
                self._require(AdminOperationKind.RESTORE_RESOURCES)
                return await self._restore(call, call.body)
            case (
                PrepareWeightsStep()
                | ApplyWeightsStep()
                | VerifyWeightsStep()
                | CommitWeightsStep()
                | UndoWeightsStep()
            ):
                self._require(AdminOperationKind.UPDATE_WEIGHTS)
                return await self._weights(call, call.body)
            case StartProfileStep():
                self._require(AdminOperationKind.START_PROFILE)
                return await self._start_profile(call, call.body)
            case StopProfileStep(profile_id=profile_id):
                self._require(AdminOperationKind.STOP_PROFILE)
                return await self._stop_profile(call, profile_id)
            case JudgeReconfigureStep() | ReconfigureStep():
                self._require(AdminOperationKind.RECONFIGURE_SERVING)
                return await self._reconfigure(call, call.body)


def outcome(**known: object) -> ParticipantOutcome:
    """The engine's outcome."""
    return ParticipantOutcome(participant_id=ENGINE, **known)  # type: ignore[arg-type]


def succeeded(*, work: WorkCounts | None = None, **known: object) -> StepResult:
    """A step that did what it should."""
    return StepResult(participants=(outcome(**known),), work=work or WorkCounts())


def failed(failure: StepFailed, **known: object) -> StepResult:
    """A step that did not."""
    is_check = failure.code is AdminErrorCode.VERIFICATION_FAILED
    error = ParticipantError(
        code=failure.code,
        message=failure.message[:512],
        step=ParticipantPhase.VERIFYING if is_check else ParticipantPhase.APPLYING,
        retryable=failure.retryable,
    )
    return StepResult(participants=(outcome(error=error, changed=failure.changed, **known),))


def not_verified(message: str) -> StepFailed:
    """The engine answered, but says otherwise when asked (AD-37)."""
    return StepFailed(message, code=AdminErrorCode.VERIFICATION_FAILED)


def unknown_profile() -> NotFound:
    """Stopping what this Node did not start."""
    return NotFound("the node does not know this profile", reason="UNKNOWN_PROFILE")
