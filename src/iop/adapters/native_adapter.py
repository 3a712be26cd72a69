"""An HTTP engine with a native control interface: tunnels as ever, behind the control's gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from iop.adapters.base import AdapterCapabilities, AdapterServices, AdapterSnapshot, TunnelStream
from iop.adapters.http_tunnel import refuse_tunnel
from iop.adapters.native_control import NativeControl
from iop.adapters.openai_compat import OpenAICompatAdapter
from iop.wire.messages import AdapterConfig, StreamErrorCode


class NativeHttpAdapter(OpenAICompatAdapter):
    """One engine of a kind whose control routes are known.

    Args:
        native: its control; also used for load and version.
    """

    def __init__(self, config: AdapterConfig, services: AdapterServices, native: NativeControl) -> None:
        super().__init__(config, services, control=native)
        self._native = native
        native.attach(self)

    @property
    def capabilities(self) -> AdapterCapabilities:
        """With admin, and why some of it is missing at this engine."""
        seen = self._native.observed
        missing = "; ".join(dict.fromkeys(seen.missing.values())) if seen is not None else ""
        return replace(super().capabilities, admin=True, admin_refusal=missing[:1024])

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

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """As ever while the gate is open; a paused engine is not sent anything, since it might never answer."""
        if self._native.is_gated:
            refuse_tunnel(stream, StreamErrorCode.BUSY, "the engine is paused", retryable=True)
            on_done()
            return
        super().open_tunnel(stream, on_done)
