"""What adapters have in common: their health, their gate, and what they leave to their control."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Sequence
from typing import Final

from iop.adapters.base import AdapterServices, EngineControl, Health, TunnelStream
from iop.adapters.gate_control import GateControl
from iop.admin.participant import ProgressSink
from iop.admin.profile import ParticipantInfo
from iop.admin.steps import ParticipantReadBack, StepCall, StepResult
from iop.core.ids import ParticipantId, SessionId
from iop.wire.messages import AdapterConfig

_log = logging.getLogger(__name__)

REFUSAL_CHARS_MAX: Final = 1024


class Controlled(abc.ABC):
    """The half of an adapter that is the same for every kind.

    Args:
        config: its adapter config.
        services: the Node's clock and change signal.
        control: the engine's own interface, or the gate of its adapter.
    """

    def __init__(self, config: AdapterConfig, services: AdapterServices, control: EngineControl) -> None:
        self._config = config
        self._services = services
        self._control = control
        self._own_gate = control if isinstance(control, GateControl) else None
        if self._own_gate is not None:
            self._own_gate.attach(self)
        self._health = Health.UNKNOWN
        self._reason = "not probed yet"

    @property
    @abc.abstractmethod
    def in_flight(self) -> int:
        """How much of what it began is left at the engine."""

    @abc.abstractmethod
    def cancel_all(self) -> None:
        """End all of it; each stream ends as cancelled."""

    @property
    def _is_gated(self) -> bool:
        """Whether nothing may pass now: a paused engine might never answer."""
        return self._own_gate is not None and self._own_gate.is_gated

    @property
    def _refusal(self) -> str:
        """Why it offers no more, or why the engine's admin listener does not answer."""
        why = self._control.failure if self._own_gate is None else self._own_gate.why_no_more
        return why[:REFUSAL_CHARS_MAX]

    def _observe(self, health: Health, reason: str) -> None:
        """Note how the engine is; a change is told."""
        if (health, reason) == (self._health, self._reason):
            return
        _log.info(
            "adapter.health_changed adapter=%s from=%s to=%s reason=%s",
            self._config.name,
            self._health.value,
            health.value,
            reason,
        )
        self._health = health
        self._reason = reason
        self._services.on_change()

    def participants(self) -> Sequence[ParticipantInfo]:
        """As :meth:`iop.adapters.base.Adapter.participants`."""
        return self._control.participants()

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:
        """As :meth:`iop.adapters.base.Adapter.execute_step`."""
        return await self._control.execute_step(call, report)

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """As :meth:`iop.adapters.base.Adapter.read_back`."""
        return await self._control.read_back(participant_ids)

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """As :meth:`iop.adapters.base.Adapter.open_artifact`."""
        self._control.open_artifact(uri, stream, on_done)

    async def terminate_session(self, session_id: SessionId) -> None:  # noqa: B027 - few have anything to end
        """Nothing to end by default: a session is only a routing key here."""
