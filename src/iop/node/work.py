"""Runs and tunnels on this Node: admitted through their provider's gate, cancelled, and counted until
nothing is left.

Each stream is held between the connection and the adapter. The hold costs nothing per chunk (the
connection's own methods are handed on), but it sees the cancel and the end: it gives the place at the gate
back once, keeps a cancel from a frozen engine until that steps again, and lets a shutdown end what still
runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from iop.core.errors import IopError
from iop.core.ids import SessionId
from iop.net.ports import InboundRun, InboundTunnel
from iop.node.providers import Provider, ProviderSet
from iop.node.traces import TracedRun, TracedTunnel
from iop.obs.tracing import Tracer
from iop.wire import run_metadata
from iop.wire.messages import (
    ArtifactRequest,
    CancelReason,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
)

_log = logging.getLogger(__name__)

SESSION_END_S: Final = 30.0
"""How long one adapter may take to end a session; a command-line agent may need its whole kill ladder."""

_HOLDS_OFF: Final = frozenset(
    {CancelReason.CLIENT_GONE, CancelReason.TIMEOUT, CancelReason.EDGE_SHUTDOWN, CancelReason.CONNECTION_LOST}
)
"""Cancels that wait for a frozen engine's safe point; an operator's abort and our own shutdown do not."""


_ORDINARY: Final = frozenset({"", StreamErrorCode.CANCELLED.value})
"""Ends that are no news."""


class _Hold:
    """What runs and tunnels have in common."""

    __slots__ = ("_is_done", "_on_adapter_cancel", "_work", "is_long", "is_side", "provider", "session_id")

    def __init__(self, work: NodeWork, provider: Provider, *, session_id: str, is_long: bool) -> None:
        self._work = work
        self.provider = provider
        self.session_id = session_id
        self.is_long = is_long
        self.is_side = False
        self._on_adapter_cancel: Callable[[CancelReason], None] | None = None
        self._is_done = False

    def cancel(self, reason: CancelReason) -> None:
        """Tell the adapter, at most once."""
        on_cancel, self._on_adapter_cancel = self._on_adapter_cancel, None
        if on_cancel is not None:
            on_cancel(reason)

    def on_done(self) -> None:
        """Nothing of it is left at the engine."""
        if not self._is_done:
            self._is_done = True
            self._on_adapter_cancel = None
            self._work.remove(self)

    def _cancel_from_connection(self, reason: CancelReason) -> None:
        if self.provider.is_frozen and reason in _HOLDS_OFF:
            self._work.cancel_at_safe_point(self, reason)
        else:
            self.cancel(reason)


class HeldTunnel(_Hold):
    """A tunnel as its adapter sees it."""

    __slots__ = ("_tunnel", "body", "end", "request", "send_body", "send_usage", "start")

    def __init__(
        self, work: NodeWork, provider: Provider, tunnel: InboundTunnel, *, session_id: str, is_long: bool
    ) -> None:
        super().__init__(work, provider, session_id=session_id, is_long=is_long)
        self._tunnel = tunnel
        self.request: TunnelRequest = tunnel.request
        self.body: Sequence[bytes] = tunnel.body
        # The connection's own methods: a call per chunk through here would be paid for nothing.
        self.start = tunnel.start
        self.send_body = tunnel.send_body
        self.send_usage = tunnel.send_usage
        # Who asks for details pays for them.
        self.end = self._end_and_log if _log.isEnabledFor(logging.DEBUG) else tunnel.end

    @property
    def credit_bytes(self) -> int:
        """As the connection has it."""
        return self._tunnel.credit_bytes

    def fail(self, error: StreamError) -> None:
        """Log, and hand on."""
        _log_end(self.request, _request_id(self.request), error.code)
        self._tunnel.fail(error)

    def _end_and_log(self) -> None:
        _log_end(self.request, _request_id(self.request), "")
        self._tunnel.end()

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Put ourselves before the adapter's cancel."""
        self._on_adapter_cancel = on_cancel
        self._tunnel.bind(on_cancel=self._cancel_from_connection, on_writable=on_writable)


class HeldRun(_Hold):
    """A run as its adapter sees it."""

    __slots__ = ("_on_adapter_writable", "_reason", "_run", "is_terminal", "request")

    def __init__(self, work: NodeWork, provider: Provider, run: InboundRun) -> None:
        super().__init__(work, provider, session_id=run.request.session_id, is_long=run.request.long_context)
        self._run = run
        self.request: RunRequest = run.request
        self.is_terminal = False
        self._on_adapter_writable: Callable[[], None] = _nothing
        self._reason: CancelReason | None = None
        # The adapter binds when its task gets its first turn; a cancel may come before that.
        run.bind(on_cancel=self._cancel_from_connection, on_writable=self._on_writable)

    @property
    def credit_bytes(self) -> int:
        """As the connection has it."""
        return self._run.credit_bytes

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Take the adapter's callbacks; a cancel that came before reaches it now."""
        self._on_adapter_cancel = on_cancel
        self._on_adapter_writable = on_writable
        if self._reason is not None:
            self.cancel(self._reason)

    def cancel(self, reason: CancelReason) -> None:
        """Tell the adapter, at most once, perhaps when it binds."""
        self._reason = reason
        super().cancel(reason)

    def on_done(self) -> None:
        """As for all; and the adapter's run, which knows this, is not told of credit any more."""
        super().on_done()
        self._on_adapter_writable = _nothing

    def _on_writable(self) -> None:
        self._on_adapter_writable()

    def emit(self, event: RunEvent) -> None:
        """Hand on, and remember the end."""
        if event.type.is_terminal and not self.is_terminal:
            self.is_terminal = True
            code = "" if event.error is None else event.error.code
            if event.type is RunEventType.CANCELLED:
                code = StreamErrorCode.CANCELLED.value
            _log_end(self.request, self.request.metadata.get(run_metadata.REQUEST_ID, ""), code)
        self._run.emit(event)


class NodeWork:
    """All runs and tunnels of this Node, whichever connection they came by.

    Args:
        providers: who serves.
        tasks: owns the runs; outlives connections, so that a run whose connection went can be cleaned up
            (EN-117).
        tracer: records spans of each stream; None: none are.
    """

    def __init__(
        self, providers: ProviderSet, tasks: asyncio.TaskGroup, *, tracer: Tracer | None = None
    ) -> None:
        self._providers = providers
        self._tracer = tracer
        self._tasks = tasks
        self._held: dict[_Hold, None] = {}
        self._waiting_for_safe_point: dict[_Hold, CancelReason] = {}
        self._is_refusing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        """Streams that are not known to have left their engines."""
        return len(self._held)

    @property
    def is_refusing(self) -> bool:
        """Whether new work is refused: the node is stopping."""
        return self._is_refusing

    def sessions(self) -> Counter[str]:
        """Open streams by agent session."""
        return Counter(hold.session_id for hold in self._held if hold.session_id)

    def open_tunnel(self, tunnel: InboundTunnel) -> None:
        """Serve one tunnel, or refuse it before its start."""
        request = tunnel.request
        is_side = _is_side_work(request)
        provider = self._admit(request.adapter, is_long=request.long_context, is_side=is_side)
        if isinstance(provider, StreamError):
            tunnel.fail(provider)
            return
        traced = None
        if self._tracer is not None:
            tunnel = traced = TracedTunnel(self._tracer, tunnel)
        held = HeldTunnel(self, provider, tunnel, session_id=request.session_id, is_long=request.long_context)
        held.is_side = is_side
        self._hold(held)
        on_done = held.on_done if traced is None else traced.closing(held.on_done)
        try:
            provider.adapter.open_tunnel(held, on_done)
        except Exception:  # noqa: BLE001 - one broken adapter must not end the node
            _log.exception("tunnel.failed run_id=%s", request.run_id)
            tunnel.fail(StreamError(code=StreamErrorCode.INTERNAL, message="the adapter failed"))
            on_done()

    def open_run(self, run: InboundRun) -> None:
        """Serve one run in a task of its own, or refuse it before its start."""
        request = run.request
        provider = self._admit(request.adapter, is_long=request.long_context)
        if isinstance(provider, StreamError):
            run.emit(RunEvent(type=RunEventType.ERROR, error=provider))
            return
        traced = None
        if self._tracer is not None:
            run = traced = TracedRun(self._tracer, run)
        held = HeldRun(self, provider, run)
        self._hold(held)
        self._tasks.create_task(self._serve_run(held, traced), name=f"run.{request.run_id}")

    def open_artifact(self, request: ArtifactRequest, tunnel: InboundTunnel) -> None:
        """Stream an artifact; it needs no place at the gate, since no engine works for it."""
        provider = self._providers.get(request.adapter)
        if provider is None:
            tunnel.fail(_unknown_adapter())
            return
        provider.adapter.open_artifact(request.uri, tunnel, _nothing)

    def terminate_session(self, session_id: str) -> None:
        """End all streams of a session (EN-70). Unknown: no-op."""
        for hold in tuple(self._held):
            if session_id and hold.session_id == session_id:
                hold.cancel(CancelReason.SESSION_TERMINATED)

    async def forget_session(self, session_id: str) -> None:
        """Let every adapter drop what its engine keeps for a session. Bounded; failures are logged."""
        for provider in tuple(self._providers.providers.values()):
            if not provider.adapter.capabilities.sessions:
                continue
            try:
                async with asyncio.timeout(SESSION_END_S):
                    await provider.adapter.terminate_session(SessionId(session_id))
            except (IopError, TimeoutError) as exc:
                _log.warning("session.not_ended adapter=%s reason=%s", provider.name, exc)

    def freeze(self, provider: Provider) -> None:
        """The engine is about to be frozen by a KEEP pause: cancels wait for its safe point (SF-07)."""
        provider.is_frozen = True

    def thaw(self, provider: Provider) -> None:
        """The engine steps again: hand on the cancels that waited."""
        provider.is_frozen = False
        for hold, reason in tuple(self._waiting_for_safe_point.items()):
            if hold.provider is provider:
                del self._waiting_for_safe_point[hold]
                hold.cancel(reason)

    def cancel_at_safe_point(self, hold: _Hold, reason: CancelReason) -> None:
        """Keep a cancel until the engine thaws."""
        self._waiting_for_safe_point.setdefault(hold, reason)

    def remove(self, hold: _Hold) -> None:
        """It is over: its place is free."""
        self._waiting_for_safe_point.pop(hold, None)
        if hold in self._held:
            del self._held[hold]
            hold.provider.leave(is_long=hold.is_long, is_side=hold.is_side)
            if not self._held:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until nothing runs; the caller bounds it."""
        await self._idle.wait()

    async def cancel_all(self, reason: CancelReason, *, within_s: float) -> None:
        """Call everything off that runs, and wait for its ends, at most so long (EN-109)."""
        for hold in tuple(self._held):
            hold.cancel(reason)
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("work.left_running count=%s", len(self._held))

    def refuse_new_work(self) -> None:
        """From now on everything is refused before its start."""
        self._is_refusing = True

    def _hold(self, hold: _Hold) -> None:
        self._held[hold] = None
        self._idle.clear()

    def _admit(self, adapter: str, *, is_long: bool, is_side: bool = False) -> Provider | StreamError:
        """The provider, with a place at its gate taken, or why not; nothing has reached an engine then
        (EN-117).
        """
        if self._is_refusing:
            return StreamError(
                code=StreamErrorCode.NODE_SHUTDOWN,
                message="the node is shutting down",
                retryable=True,
                before_start=True,
            )
        provider = self._providers.get(adapter)
        if provider is None:
            self.counters["unknown_adapter"] += 1
            return _unknown_adapter()
        if not provider.enter(is_long=is_long, is_side=is_side):
            self.counters["busy"] += 1
            return StreamError(
                code=StreamErrorCode.BUSY,
                message="the provider's local capacity is in use",
                retryable=True,
                before_start=True,
            )
        return provider

    async def _serve_run(self, held: HeldRun, traced: TracedRun | None) -> None:
        try:
            async with asyncio.timeout(held.request.timeout_sec or None):
                await held.provider.adapter.run(held)
            if not held.is_terminal:
                held.emit(_run_error(StreamErrorCode.INTERNAL, "the adapter ended without a result"))
        except TimeoutError:
            held.emit(_run_error(StreamErrorCode.TIMEOUT, "the run's time is up"))
        except Exception:  # noqa: BLE001 - one broken adapter must not end the node
            _log.exception("run.failed run_id=%s", held.request.run_id)
            held.emit(_run_error(StreamErrorCode.INTERNAL, "the adapter failed"))
        finally:
            if traced is not None:
                traced.close()
            held.on_done()


def _request_id(request: TunnelRequest) -> str:
    """The id that the caller knows, as the Edge sends it to the engine."""
    for name, value in request.headers:
        if name.lower() == b"x-request-id":
            return value.decode("ascii", "replace")
    return ""


def _log_end(request: TunnelRequest | RunRequest, request_id: str, code: str) -> None:
    """Tell how a stream ended, under the ids of the Edge's own line (SF-32); ordinary ends only to who asks."""
    level = logging.DEBUG if code in _ORDINARY else logging.INFO
    if _log.isEnabledFor(level):
        _log.log(
            level,
            "stream.ended",
            extra={
                "request_id": request_id,
                "run_id": request.run_id,
                "adapter": request.adapter,
                "target": request.target,
                "error": code,
            },
        )


def _is_side_work(request: TunnelRequest) -> bool:
    """Counting tokens takes no generation slot (SF-14), whether it comes by name or by path."""
    return request.operation in {"count_tokens", "tokenize"} or (
        not request.operation and request.path.partition("?")[0] == "/v1/messages/count_tokens"
    )


def _run_error(code: StreamErrorCode, message: str) -> RunEvent:
    return RunEvent(type=RunEventType.ERROR, error=StreamError(code=code, message=message))


def _unknown_adapter() -> StreamError:
    return StreamError(
        code=StreamErrorCode.UNKNOWN_ADAPTER,
        message="the node's config in force has no such adapter running",
        retryable=True,
        before_start=True,
    )


def _nothing() -> None:
    """For work that holds no place."""
