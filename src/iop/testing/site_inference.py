"""Inference of the conformance suite's right server: words at a steady pace, which pauses queue, refuse, end or freeze.

It serves on a listener of its own beside the admin one, over the fleet's group ``a``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final, Self

from iop.admin.enums import AdmissionPolicy, EngineRole
from iop.api.grpc.auth import ApiKeyDirectory
from iop.api.grpc.listeners import inference_listener
from iop.api.grpc.ports import (
    AbortOutcome,
    GenerateCall,
    GenerationEvent,
    HealthReport,
    HealthState,
    LoadInfo,
    MayUse,
    ModelInfo,
    OutputFinish,
    OutputFinished,
    OutputTokens,
    RequestFailed,
    ScoredToken,
    ServerInfo,
    Usage,
    any_model,
)
from iop.api.grpc.server import GrpcListener, ListenerSettings
from iop.core.errors import Draining, InvalidRequest, NotFound
from iop.core.ids import GroupId, ParticipantId

if TYPE_CHECKING:
    from iop.testing.conformance_site import SiteFleet

__all__ = ["GROUP", "SiteInference"]

GROUP: Final = GroupId("a")
PACE_S: Final = 0.004
"""Between two words: a request of 300 is met by whatever comes within a second."""


class SiteInference:
    """What callers of the site get; a wrong server overrides one of its steps.

    Attributes:
        admin_profile_revision: what core discovery tells of the admin service; None: nothing.
        pace_s: between two words.
        longest: words of the longest request that is taken.
    """

    admin_profile_revision: int | None = 1
    pace_s: float = PACE_S
    longest: int = 100_000

    def __init__(self, fleet: SiteFleet) -> None:
        self.fleet = fleet

    # ---- what a wrong server does otherwise ----

    async def admit(self) -> None:
        """Wait for the gate to open, or be refused.

        Raises:
            Draining: a pause that turns requests away.
        """
        while True:
            gate = self.fleet.gates.get(ParticipantId(f"{GROUP}/0"))
            if gate is not None and gate.is_open:
                return
            if gate is not None and gate.admission is AdmissionPolicy.REJECT:
                raise Draining("paused", reason="PAUSED")
            await asyncio.sleep(PACE_S)

    async def turn(self) -> None:
        """Wait while frozen."""
        await self.fleet.thawed.wait()

    def ending(self) -> GenerationEvent:
        """What a request is told that a pause ended."""
        return RequestFailed(code="DRAINING", message="ended by an operator", retryable=True)

    # ---- the ports ----

    @property
    def is_serving(self) -> bool:
        """Always."""
        return True

    def model_info(self, _model: str) -> ModelInfo:
        """Of the one model."""
        return ModelInfo(
            model_id="m", served_model_name="m", max_context_length=self.longest, supports_text_input=True
        )

    def server_info(self) -> ServerInfo:
        """What it is."""
        return ServerInfo(engine_name="site", engine_version="1", instance_id="site", supported_models=("m",))

    async def generate(self, call: GenerateCall) -> _Words:
        """A word for each token that is asked for."""
        if (call.stopping.max_tokens or 0) > self.longest:
            raise InvalidRequest("longer than the context", reason="CONTEXT_LENGTH_EXCEEDED")
        await self.admit()
        return _Words(self, call.stopping.max_tokens or 4)

    async def load(self, *, include_per_rank: bool) -> LoadInfo:
        """How many requests run."""
        return LoadInfo(instance_id="site", running_requests=self.fleet.work[GROUP])

    async def health(
        self,
        *,
        model: str,
        role: EngineRole | None,
        include_probe: bool,
        may_use: MayUse = any_model,
    ) -> HealthReport:
        """Always ready."""
        return HealthReport(state=HealthState.READY)

    async def abort(self, request_id: str, *, caller: str | None) -> AbortOutcome:
        """Nobody's."""
        raise NotFound("no such request")

    async def abort_all(self) -> int:
        """Nothing."""
        return 0

    def listener(self) -> GrpcListener:
        """Inference and core discovery on a free port."""
        return inference_listener(
            self,
            self,
            ApiKeyDirectory(),
            ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.0),
            admin_profile_revision=self.admin_profile_revision,
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen; gives the address."""
        listener = self.listener()
        async with listener.serving():
            yield listener.address


class _Words:
    """One request that runs."""

    def __init__(self, inference: SiteInference, count: int) -> None:
        self.weight_version = ""
        self.metadata: tuple[tuple[str, str], ...] = ()
        self._inference, self._fleet = inference, inference.fleet
        self._left, self._told = count, 0
        self._aborts = self._fleet.aborts
        self._is_over = False
        self._fleet.begin()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[GenerationEvent, Usage | None]:
        if self._is_over:
            raise StopAsyncIteration
        if self._told == self._left:
            self._end(was_counted=False)
            usage = Usage(prompt_tokens=1, completion_tokens=self._told)
            return OutputFinished(output_index=0, reason=OutputFinish.LENGTH), usage
        await asyncio.sleep(self._inference.pace_s)
        await self._inference.turn()
        if self._fleet.aborts != self._aborts:
            self._end(was_counted=True)
            return self._inference.ending(), None
        self._told += 1
        token = ScoredToken(token_id=self._told)
        return OutputTokens(output_index=0, tokens=(token,), text=f"w{self._told} "), None

    async def aclose(self) -> None:
        """The caller left."""
        if not self._is_over:
            self._end(was_counted=self._fleet.aborts != self._aborts)

    def _end(self, *, was_counted: bool) -> None:
        self._is_over = True
        self._fleet.end(was_counted=was_counted)
