"""An HTTP engine with a native control interface: tunnels as ever, behind the control's gate."""

from __future__ import annotations

from dataclasses import replace

from iop.adapters.base import AdapterServices, AdapterSnapshot
from iop.adapters.native_control import NativeControl
from iop.adapters.openai_compat import OpenAICompatAdapter
from iop.wire.messages import AdapterConfig


class NativeHttpAdapter(OpenAICompatAdapter):
    """One engine of a kind whose control routes are known.

    Args:
        native: its control; also used for load and version.
    """

    def __init__(self, config: AdapterConfig, services: AdapterServices, native: NativeControl) -> None:
        super().__init__(config, services, control=native)
        self._native = native

    def snapshot(self) -> AdapterSnapshot:
        """With the engine's own load and version."""
        seen = self._native.observed
        if seen is None:
            return super().snapshot()
        return replace(
            super().snapshot(),
            engine_version=seen.engine_version,
            engine_in_flight=seen.in_flight,
            engine_queued=seen.queued,
        )
