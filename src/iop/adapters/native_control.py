"""What the control adapters of the named HTTP engines share: one participant, a gate of our own, and steps
whose success is what the engine says afterwards (AD-37).

Theory of operation. Each look at the engine (`_observe`) tells its process, version, capabilities and load;
capabilities are what was found there, never what the kind could do. A step begins with a look: an engine that
cannot be seen was not touched. From the first mutating call on every failure is an outcome of the
participant, because its effect is not known any more.

The gate. Engines hold, refuse or run what comes while they are paused, each in its way, some without an end.
So a pause first closes the gate of this adapter, which then lets no tunnel through; engines without a pause
of their own are paused by it alone.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol

from iop.adapters.base import AdapterServices, TunnelStream
from iop.adapters.engine_http import EngineHttp
from iop.adapters.http_tunnel import refuse_tunnel
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    DrainTimeoutAction,
    ParticipantPhase,
    PauseMode,
)
from iop.admin.participant import ProgressSink
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import DiskSource
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
from iop.core.errors import (
    DeadlineExceeded,
    IopError,
    NotFound,
    Overloaded,
    PreconditionFailed,
    RemoteProtocolError,
    Unavailable,
    Unsupported,
)
from iop.core.ids import GroupId, ParticipantId
from iop.wire.messages import OpenAICompatSettings, StreamErrorCode

_log = logging.getLogger(__name__)

ENGINE: Final = ParticipantId("engine")
"""The one participant: these engines act as one, also with several ranks inside."""

POLL_S: Final = 0.1
"""Between two looks for an effect that an engine does not wait for itself."""

ABORT_CONFIRM_S: Final = 10.0
"""How long requests may take to end after their connections were closed."""

GATE_MODES: Final = frozenset({PauseMode.DRAIN, PauseMode.ABORT})
"""What the gate alone can do."""

GATE_OPERATIONS: Final = frozenset({AdminOperationKind.PAUSE, AdminOperationKind.RESUME})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One look at the engine.

    Attributes:
        instance: of the engine's process; empty when it does not tell.
        in_flight: requests it works on, whoever sent them; `None` when not told.
        queued: requests it holds back; `None` when not told.
        missing: why an operation of this kind is not offered here, and how to enable it.
        startup_source: where the weights it started with can be read again, on this machine.
    """

    instance: str = ""
    engine_version: str = ""
    capabilities: Capabilities = GATE_CAPABILITIES
    models: tuple[str, ...] = ()
    in_flight: int | None = None
    queued: int | None = None
    missing: dict[AdminOperationKind, str] = field(default_factory=dict)
    startup_source: DiskSource | None = None


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


class NativeControl(abc.ABC):
    """An `EngineControl` over an engine's own routes.

    Args:
        settings: where the engine is.
        services: the Node's clock and change signal.
        targets: the engine's names of the models that this adapter serves.
    """

    OFFERS: ClassVar[tuple[Offer, ...]] = (
        Offer(operation=AdminOperationKind.PAUSE, detail="drain, abort (at the Node's gate)"),
        Offer(operation=AdminOperationKind.RESUME, detail="at the Node's gate"),
    )
    NAME: ClassVar[str]

    def __init__(
        self, settings: OpenAICompatSettings, services: AdapterServices, *, targets: tuple[str, ...] = ()
    ) -> None:
        self._http = EngineHttp(settings)
        self._services = services
        self._targets = targets
        self._traffic: Traffic | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._seen: Observed | None = None
        self._failure = "the engine was not asked yet"
        self._is_gated = False

    def attach(self, traffic: Traffic) -> None:
        """Get to know the adapter's own requests, before `start`."""
        self._traffic = traffic

    # ---- for the adapter ----

    @property
    def is_gated(self) -> bool:
        """Whether tunnels must not pass now."""
        return self._is_gated

    @property
    def observed(self) -> Observed | None:
        """The last look; `None` before the first."""
        return self._seen

    @property
    def failure(self) -> str:
        """Why the engine's control routes do not answer; empty while they do."""
        return self._failure

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open for questions."""
        self._tasks = tasks
        self._http.start(tasks)

    async def aclose(self) -> None:
        """Close connections; what the engine does goes on."""
        await self._http.aclose()

    async def probe(self) -> None:
        """Look at the engine."""
        try:
            await self._look()
        except IopError as exc:
            self._note_failure(exc.message)

    def weight_version(self) -> str:
        """The engine's published label; these engines mostly have none."""
        return ""

    def participants(self) -> Sequence[ParticipantInfo]:
        """The engine, once it was seen."""
        seen = self._seen
        if seen is None:
            return ()
        return (
            ParticipantInfo(
                participant_id=ENGINE,
                group_id=GroupId("engine"),
                capabilities=seen.capabilities,
                models=seen.models,
                instance=seen.instance,
                engine_name=self.NAME,
                engine_version=seen.engine_version,
                startup_source=seen.startup_source,
            ),
        )

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:  # noqa: ARG002
        """None by default."""
        refuse_tunnel(stream, StreamErrorCode.INVALID_REQUEST, "this engine keeps no artifacts")
        on_done()

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """Look, and tell how it stands."""
        answer: ParticipantReadBack | None = None
        try:
            await self._look()
            answer = await self._read()
        except IopError as exc:
            self._note_failure(exc.message)
        return [
            answer
            if answer is not None and each == ENGINE
            else ParticipantReadBack(participant_id=each, reachable=False)
            for each in participant_ids
        ]

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:  # noqa: ARG002 - the Protocol's
        """As :meth:`iop.adapters.base.Adapter.execute_step`."""
        if call.participant_ids != (ENGINE,):
            raise PreconditionFailed("the engine has one participant", reason="UNKNOWN_PARTICIPANT")
        try:
            await self._look_patiently(call.timeout_s)
        except (DeadlineExceeded, RemoteProtocolError, Overloaded) as exc:
            raise Unavailable(exc.message, reason=exc.reason) from exc
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

    @abc.abstractmethod
    async def _observe(self) -> Observed:
        """Look at the engine. Raises an IopError when it cannot be seen or is not ready."""

    async def _read(self) -> ParticipantReadBack:
        """How it stands, just after a look."""
        return self._told(paused=self._is_gated)

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

    # ---- shared parts ----

    async def _gate_pause(self, call: StepCall, step: PauseStep) -> StepResult:
        """Let nothing in, then wait until the engine is idle, or end what runs.

        A drain that fails opens the gate again: nothing was changed.
        """
        if step.pause.mode not in GATE_MODES:
            raise Unsupported(f"{self.NAME} cannot freeze requests", reason="NOT_OFFERED")
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

    def _load(self) -> int:
        seen = self._seen
        return (seen.in_flight or 0) + (seen.queued or 0) if seen is not None else 0

    async def _is_idle(self) -> bool:
        """Whether neither we nor, as far as it tells, anybody else has a request at the engine."""
        if self._traffic is not None and self._traffic.in_flight:
            return False
        seen = await self._look()
        return not seen.in_flight and not seen.queued

    async def _until(self, holds: Callable[[], Awaitable[bool]], *, poll_s: float = POLL_S) -> None:
        """Ask until it holds; the caller bounds it."""
        while True:
            if await holds():
                return
            await asyncio.sleep(poll_s)

    def _require(self, operation: AdminOperationKind) -> None:
        """Refuse what was not found at the engine, before it is touched."""
        if self._seen is None or operation not in self._seen.capabilities.operations:
            raise self._not_offered(operation)

    def _not_offered(self, operation: AdminOperationKind) -> Unsupported:
        why = self._seen.missing.get(operation, "") if self._seen is not None else ""
        name = operation.name.lower().replace("_", " ")
        return Unsupported(
            f"{self.NAME} does not offer {name} here" + (f": {why}" if why else ""), reason="NOT_OFFERED"
        )

    def _told(self, **known: object) -> ParticipantReadBack:
        instance = self._seen.instance if self._seen is not None else ""
        return ParticipantReadBack(participant_id=ENGINE, instance=instance, **known)  # type: ignore[arg-type]

    async def _look(self) -> Observed:
        before = self._seen
        seen = await self._observe()
        self._seen = seen
        if self._failure:
            self._failure = ""
            self._services.on_change()
        elif before is not None and (
            before.instance != seen.instance or before.capabilities != seen.capabilities
        ):
            _log.info("engine.changed kind=%s", self.NAME)
            self._services.on_change()
        return seen

    async def _look_patiently(self, timeout_s: float) -> Observed:
        """Look until it answers: a server that sends much answers late, which is no failure yet.

        Raises as a look does; DeadlineExceeded when the time is up.
        """
        clock = self._services.clock
        deadline = clock.monotonic() + timeout_s
        while True:
            try:
                return await self._look()
            except DeadlineExceeded:
                if clock.monotonic() >= deadline:
                    raise

    def _note_failure(self, message: str) -> None:
        if message != self._failure:
            _log.warning("engine_control.unreachable kind=%s reason=%s", self.NAME, message)
            self._failure = message
            self._services.on_change()

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
                raise self._not_offered(AdminOperationKind.RECONFIGURE_SERVING)


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
