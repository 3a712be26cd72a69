"""What the control adapters of the named HTTP engines share beyond the gate: looks at the engine, and steps
whose success is what it says afterwards (AD-37).

Theory of operation. Each look at the engine (`_observe`) tells its process, version, capabilities and load;
capabilities are what was found there, never what the kind could do. A step begins with a look: an engine that
cannot be seen was not touched. From the first mutating call on every failure is an outcome of the
participant, because its effect is not known any more.

Engines hold, refuse or run what comes while they are paused, each in its way, some without an end. So every pause
closes the gate of :mod:`iop.adapters.gate_control` as well, and an engine that says that it is paused, whoever did
that, gets nothing either.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from iop.adapters.base import AdapterServices, TunnelStream
from iop.adapters.engine_http import EngineHttp
from iop.adapters.engine_profiles import EngineProfiles
from iop.adapters.gate_control import ENGINE, GATE_CAPABILITIES, GateControl, StepFailed, succeeded
from iop.admin.enums import AdminOperationKind
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import DiskSource
from iop.admin.steps import ParticipantReadBack, StartProfileStep, StepCall, StepResult
from iop.core.errors import DeadlineExceeded, IopError, Overloaded, RemoteProtocolError, Unavailable
from iop.core.ids import GroupId, ParticipantId
from iop.wire.messages import OpenAICompatSettings

_log = logging.getLogger(__name__)

LOAD_MAX: Final = 2**31
"""Requests that an engine can have; what it tells above that is no count, and goes into no result."""

UNHEALTHY: Final = "ENGINE_UNHEALTHY"
"""Reason of an engine that answers, and says that it cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One look at the engine.

    Attributes:
        instance: of the engine's process; empty when it does not tell.
        in_flight: requests it works on, whoever sent them; `None` when not told.
        queued: requests it holds back; `None` when not told.
        missing: why an operation of this kind is not offered here, and how to enable it.
        lacking: the same of a part of one that is offered.
        startup_source: where the weights it started with can be read again, on this machine.
    """

    instance: str = ""
    engine_version: str = ""
    capabilities: Capabilities = GATE_CAPABILITIES
    models: tuple[str, ...] = ()
    in_flight: int | None = None
    queued: int | None = None
    missing: dict[AdminOperationKind, str] = field(default_factory=dict)
    lacking: dict[AdminOperationKind, str] = field(default_factory=dict)
    startup_source: DiskSource | None = None


class NativeControl(GateControl, abc.ABC):
    """An `EngineControl` over an engine's own routes.

    Args:
        settings: where the engine is.
        services: the Node's clock and change signal.
        targets: the engine's names of the models that this adapter serves.
    """

    NAME: ClassVar[str]

    def __init__(
        self, settings: OpenAICompatSettings, services: AdapterServices, *, targets: tuple[str, ...] = ()
    ) -> None:
        super().__init__(services, name=self.NAME)
        self._http = EngineHttp(settings)
        self._targets = targets
        self._seen: Observed | None = None
        self._failure = "the engine was not asked yet"
        self._is_unwell = False
        self._is_paused = False
        self._profiles: EngineProfiles | None = None

    # ---- for the adapter ----

    @property
    def is_gated(self) -> bool:
        """Also while somebody else's pause is in force, which that one may end as well."""
        return self._is_gated or self._is_paused

    @property
    def observed(self) -> Observed | None:
        """The last look; `None` before the first."""
        return self._seen

    @property
    def failure(self) -> str:
        """Why the engine's control routes do not answer; empty while they do."""
        return self._failure

    @property
    def is_unwell(self) -> bool:
        """Whether the engine itself says so; one that only answers late does not."""
        return self._is_unwell

    @property
    def why_no_more(self) -> str:
        """As found at the engine."""
        return "; ".join(dict.fromkeys(self._missing().values()))

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Open for questions."""
        await super().start(tasks)
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
                lacking=self._lacking_of(seen.capabilities, {**seen.lacking, **seen.missing}),
            ),
        )

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

    # ---- for the kinds ----

    @abc.abstractmethod
    async def _observe(self) -> Observed:
        """Look at the engine. Raises an IopError when it cannot be seen or is not ready."""

    async def _read(self) -> ParticipantReadBack:
        """How it stands, just after a look."""
        return self._told(paused=self._is_gated)

    async def _tell(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> None:
        """Tell the engine something whose status says whether it was taken. Raises StepFailed."""
        answer = await self._http.post(path, body, query=query, timeout_s=timeout_s)
        if not answer.is_ok:
            raise StepFailed(f"the engine refused: {answer.words}")

    # ---- profiles, of kinds that have them ----

    async def _start_profile(self, call: StepCall, step: StartProfileStep) -> StepResult:
        if self._profiles is None or self._tasks is None:
            return await super()._start_profile(call, step)
        await self._profiles.start(step, self._tasks)
        return succeeded()

    async def _stop_profile(self, call: StepCall, profile_id: str) -> StepResult:
        if self._profiles is None:
            return await super()._stop_profile(call, profile_id)
        return succeeded(artifacts=await self._profiles.stop(profile_id, timeout_s=call.timeout_s))

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """One file of a profile that was started here."""
        if self._profiles is None:
            super().open_artifact(uri, stream, on_done)
        else:
            self._profiles.open(uri, stream, on_done)

    # ---- the gate's questions, answered by looks ----

    async def _before_step(self, call: StepCall) -> None:
        try:
            await self._look_patiently(call.timeout_s)
        except (DeadlineExceeded, RemoteProtocolError, Overloaded) as exc:
            raise Unavailable(exc.message, reason=exc.reason) from exc

    def _found(self) -> Capabilities:
        return self._seen.capabilities if self._seen is not None else Capabilities()

    def _missing(self) -> Mapping[AdminOperationKind, str]:
        return self._seen.missing if self._seen is not None else {}

    def _load(self) -> int:
        seen = self._seen
        return min(LOAD_MAX, (seen.in_flight or 0) + (seen.queued or 0)) if seen is not None else 0

    async def _is_idle(self) -> bool:
        """Whether neither we nor, as far as it tells, anybody else has a request at the engine."""
        if not await super()._is_idle():
            return False
        seen = await self._look()
        return not seen.in_flight and not seen.queued

    def _told(self, **known: object) -> ParticipantReadBack:
        instance = self._seen.instance if self._seen is not None else ""
        if self._profiles is not None:
            known["profiles"] = self._profiles.running
        return ParticipantReadBack(participant_id=ENGINE, instance=instance, **known)  # type: ignore[arg-type]

    async def _look(self) -> Observed:
        before = self._seen
        try:
            seen = await self._observe()
        except IopError as exc:
            self._is_unwell = exc.reason == UNHEALTHY
            raise
        self._is_unwell = False
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
