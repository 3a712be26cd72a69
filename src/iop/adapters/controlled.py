"""What adapters leave to their control: admin steps, read-backs and artifacts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iop.adapters.base import EngineControl, TunnelStream
from iop.admin.participant import ProgressSink
from iop.admin.profile import ParticipantInfo
from iop.admin.steps import ParticipantReadBack, StepCall, StepResult
from iop.core.ids import ParticipantId, SessionId


class Controlled:
    """The admin half of an adapter, by its control.

    Args:
        control: the engine's own interface, or the gate of its adapter.
    """

    def __init__(self, control: EngineControl) -> None:
        self._control = control

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

    async def terminate_session(self, session_id: SessionId) -> None:
        """Nothing to end by default: a session is only a routing key here."""
