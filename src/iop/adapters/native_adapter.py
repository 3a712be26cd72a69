"""An HTTP engine with a native control interface: tunnels as ever, behind the control's gate."""

from __future__ import annotations

from dataclasses import replace

from iop.adapters.base import AdapterServices, AdapterSnapshot, Health
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
        """With the engine's own load and version, and what it says of its health.

        A server whose engine process has died may list its models until it ends itself.
        """
        shown = super().snapshot()
        if self._native.is_unwell and shown.health is Health.READY:
            shown = replace(shown, health=Health.NOT_READY, reason=self._native.failure)
        seen = self._native.observed
        if seen is None:
            return shown
        return replace(
            shown,
            engine_version=seen.engine_version,
            engine_in_flight=seen.in_flight,
            engine_queued=seen.queued,
        )
