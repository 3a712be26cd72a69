"""Dispatch: from a caller's request to a leased, open stream on a Node, and to its one outcome.

Skeleton of the public surface; see :class:`Dispatcher`.
"""

from __future__ import annotations

from iop.core.ids import RequestId, RunId
from iop.edge.calls import DispatchRequest, Outcome, PrepareCall, ServedTarget
from iop.wire.messages import CancelReason, Usage


class DispatchHandle:
    """One dispatched request: what surfaces tell callers about it, and how they steer it.

    The sink given by ``prepare`` gets the answer. Everything here is synchronous and safe after the end.
    """

    @property
    def target(self) -> ServedTarget:
        """Who serves the current attempt."""
        raise NotImplementedError

    @property
    def run_id(self) -> RunId:
        """Of the current attempt (EN-118)."""
        raise NotImplementedError

    @property
    def provider_name(self) -> str:
        """Opaque, stable name for ``x-iop-provider`` (SF-13); tells nothing about the Node."""
        raise NotImplementedError

    @property
    def weight_version(self) -> str:
        """Of the provider as known now; ``unknown`` where it is. Ask at the first byte and again at the end (AD-33)."""
        raise NotImplementedError

    @property
    def queue_ms(self) -> int:
        """Time between admission and the lease of the current attempt."""
        raise NotImplementedError

    @property
    def queue_position(self) -> int:
        """Waiters that stood ahead when the request was queued; 0 when it never waited."""
        raise NotImplementedError

    @property
    def outcome(self) -> Outcome | None:
        """The recorded outcome, once there is one (EN-112)."""
        raise NotImplementedError

    def consumed(self, size_bytes: int) -> None:
        """Body or delta bytes have been written to the caller: return their credit (EN-102)."""
        raise NotImplementedError

    def cancel(self, reason: CancelReason) -> None:
        """The caller left, or waited too long: end it (EN-56, SF-07).

        The first of terminal and cancel wins; a late or second cancel is a no-op (EN-112). After a winning cancel the
        sink is not called any more. The lease returns when the Node confirms, within a bound.
        """
        raise NotImplementedError

    def note_truncated(self) -> None:
        """The surface saw that the answer is not whole (SF-14); call from ``on_end`` or ``on_error`` or before."""
        raise NotImplementedError

    def note_usage(self, usage: Usage) -> None:
        """The surface observed usage in the body (EN-53); shown by ``iop explain``."""
        raise NotImplementedError


class Dispatcher:
    """Waits for a lease, opens the stream under it, and settles the request once, however it ends."""

    async def dispatch(self, request: DispatchRequest, prepare: PrepareCall) -> DispatchHandle:
        """Dispatch a request.

        Returns when the stream was opened on a Node; the answer comes to the sink of the prepared call in later turns
        of the loop, never before this returned. With a free slot nothing is awaited. An attempt that provably never reached its Node is repeated behind the scenes (EN-112):
        ``prepare`` is then called again and ``handle.target`` changes; the sink of the failed attempt gets nothing.

        Sink errors: ``StreamError.code`` is the stable reason (``node_lost``, ``timeout``, ``aborted_by_admin``,
        ``edge_shutdown``, or the Node's own: ``upstream_connect``, ``upstream_truncated``, ``busy``, ...).

        Raises:
            NotFound: ``model_not_found``.
            Unsupported: ``operation_not_supported``: no provider of the pool offers it; details name what is.
            Overloaded: ``queue_full`` at once, ``queue_timeout`` at the deadline; with ``retry_after_s`` (EN-110).
            Unavailable: ``no_capacity``: nobody lives in the pool, after the grace; with ``retry_after_s``.
            Draining: ``paused`` (AD-41) or ``edge_shutdown``; with ``retry_after_s``.
        Cancellation: safe; the waiter is removed at once and the request is recorded as ``client_cancelled``.
        """
        raise NotImplementedError

    def record_rejection(self, request_id: RequestId, model: str, reason: str) -> None:
        """Record a request that a surface refused before dispatch, for ``iop explain`` (EN-112)."""
        raise NotImplementedError
