"""Counts and durations of RPCs (SF-32)."""

from __future__ import annotations

from iop.obs.metrics import Metrics

__all__ = ["RpcMetrics"]


class RpcMetrics:
    """One set of series for all gRPC listeners of a process; pass `on_ended` to each.

    Only methods that exist have series, so a stranger cannot make more of them. Calls without a known credential show
    as UNAUTHENTICATED (AD-101).
    """

    def __init__(self, metrics: Metrics) -> None:
        self._calls = metrics.counter("iop_grpc_calls_total", "RPCs ended, by status.", ("rpc", "code"))
        self._durations = metrics.histogram(
            "iop_grpc_call_duration_seconds", "Duration of RPCs, streams to their end.", ("rpc",)
        )

    def on_ended(self, method: str, code: str, seconds: float) -> None:
        """Note one call; `method` is `/package.Service/Method`."""
        rpc = method.removeprefix("/")
        self._calls.labels(rpc, code).inc()
        self._durations.labels(rpc).observe(seconds)
