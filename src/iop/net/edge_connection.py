"""One Node's socket as the Edge holds it: ``ports.EdgeConnection`` over an ``EdgeSession``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from iop.core.errors import DeadlineExceeded, Unavailable
from iop.net.connection import Connection
from iop.net.ports import EdgeHandler, RunSink, TunnelSink
from iop.wire import events
from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    ArtifactRequest,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    NodeConfig,
    ReadyAck,
    RefreshResponse,
    RegisterResponse,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
)
from iop.wire.session import SessionSettings
from iop.wire.session_edge import EdgeSession
from iop.wire.stream_edge import EdgeStream
from iop.wire.streams import StreamKind

_LOST: Final = "The connection to the Node ended before it answered."


class OutboundHandle:
    """``ports.OutboundStream``: the Edge's handle on one stream."""

    __slots__ = ("_connection", "_sink", "_stream")

    def __init__(self, connection: EdgeWire, stream: EdgeStream, sink: Any) -> None:
        self._connection = connection
        self._stream = stream
        self._sink = sink

    @property
    def is_handed_over(self) -> bool:
        """Whether any part of the opening packet was handed to the socket (EN-112)."""
        return self._stream.is_handed_over

    def consumed(self, size_bytes: int) -> None:
        """Return credit for bytes that have left the Edge (EN-102)."""
        if self._stream.owner is self._sink:
            self._connection.consumed(self._stream, size_bytes)

    def cancel(self, reason: CancelReason, *, at_safe_point: bool = False) -> None:
        """Call the stream off (EN-56); the sink's terminal follows from a turn of the connection."""
        self._connection.cancel_stream(self._stream, reason, at_safe_point=at_safe_point)

    def detach(self) -> None:
        """Stop calling the sink; what still comes is consumed and dropped."""
        if self._stream.owner is self._sink:
            self._stream.owner = None
            # What the sink took and did not return yet would otherwise be missing from the window for good.
            self._connection.consumed(self._stream, self._stream.window.held)


class EdgeWire(Connection[EdgeSession]):
    """``ports.EdgeConnection``.

    Args:
        handler: hears of this connection.
        settings: limits and times.
        loop: the running loop.
        unix_nanos: wall clock.
        on_made: called once the transport is there.
        on_gone: called once the transport is gone.
        on_registered: called when the registration was accepted; the peer is a stranger no more.
    """

    def __init__(
        self,
        *,
        handler: EdgeHandler,
        settings: SessionSettings,
        loop: asyncio.AbstractEventLoop,
        unix_nanos: Callable[[], int] = time.time_ns,
        on_made: Callable[[], None] | None = None,
        on_gone: Callable[[], None] | None = None,
        on_registered: Callable[[], None] | None = None,
    ) -> None:
        session = EdgeSession(settings=settings, now=loop.time())
        super().__init__(session=session, loop=loop, unix_nanos=unix_nanos, on_made=on_made, on_gone=on_gone)
        self._handler = handler
        self._on_registered = on_registered
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._deliver.update(
            {
                events.Registered: lambda event: handler.on_register(self, event.request),
                events.ReadyReported: lambda event: handler.on_ready(self, event.request),
                events.ReportReceived: lambda event: handler.on_report(self, event.report),
                events.LateFrameDropped: lambda _event: handler.on_late_frame(self),
                events.BodyReceived: self._on_body,
                events.ResponseStarted: self._on_response_start,
                events.UsageReceived: self._on_usage,
                events.TunnelEnded: self._on_tunnel_end,
                events.RunEventReceived: self._on_run_event,
                events.CommandAnswered: self._on_answer,
                events.RefreshAnswered: self._on_answer,
                events.StepProgressed: self._on_step_event,
                events.StepEnded: self._on_step_end,
            }
        )

    # ---- handshake ----

    def respond_register(self, response: RegisterResponse) -> None:
        """Answer the registration (EN-10)."""
        if self.session.is_closed:
            return
        self._undelivered += self.session.respond_register(response, now=self._loop.time())
        if response.accepted and self._on_registered is not None:
            self._on_registered()
            self._on_registered = None
        self._arm()
        self._mark()

    def respond_ready(self, ack: ReadyAck) -> None:
        """Answer a ready request (EN-14)."""
        if self.session.is_closed:
            return
        self._undelivered += self.session.respond_ready(ack)
        self._mark()

    # ---- streams ----

    def open_tunnel(self, request: TunnelRequest, body: Sequence[bytes], sink: TunnelSink) -> OutboundHandle:
        """Open a tunnel (EN-50, EN-101)."""
        return self._opened(self.session.open_tunnel(request, body), sink)

    def open_run(self, request: RunRequest, sink: RunSink) -> OutboundHandle:
        """Open a normalised run (EN-40)."""
        return self._opened(self.session.open_run(request), sink)

    def fetch_artifact(self, request: ArtifactRequest, sink: TunnelSink) -> OutboundHandle:
        """Fetch a profile artifact (AD-46)."""
        return self._opened(self.session.fetch_artifact(request), sink)

    def terminate_session(self, session_id: str, reason: CancelReason) -> None:
        """End all runs of a session and its state (EN-70)."""
        self.session.terminate_session(session_id, reason)
        self._mark()

    def cancel_stream(self, stream: EdgeStream, reason: CancelReason, *, at_safe_point: bool) -> None:
        """See ``OutboundHandle.cancel``."""
        self._undelivered += self.session.cancel(stream, reason, at_safe_point=at_safe_point)
        self._mark()

    def consumed(self, stream: EdgeStream, size_bytes: int) -> None:
        """See ``OutboundHandle.consumed``."""
        self.session.consumed(stream, size_bytes)
        if self.session.has_output:
            self._mark()

    # ---- calls ----

    async def command(self, request: CommandRequest, *, timeout_s: float) -> CommandResponse:
        """Query the Node (EN-75).

        Raises:
            LocalProtocolError: not ready.
            DeadlineExceeded: no answer in time; a late one is dropped and counted.
            Unavailable: the connection ended first.
        """
        response: CommandResponse = await self._answer(self.session.send_command(request), timeout_s)
        return response

    async def refresh(self, config: NodeConfig, *, timeout_s: float) -> RefreshResponse:
        """Push a new config (EN-80). Raises as :meth:`command`."""
        response: RefreshResponse = await self._answer(self.session.send_refresh(config), timeout_s)
        return response

    async def admin_step(
        self,
        step: AdminStep,
        *,
        payload: Sequence[bytes] = (),
        on_event: Callable[[AdminStepEvent], None] | None = None,
        timeout_s: float,
    ) -> AdminStepResult:
        """Run one admin step (EN-120). Raises as :meth:`command`; then its outcome is unknown until read back."""
        stream = self.session.start_step(step, payload)
        future: asyncio.Future[AdminStepResult] = self._loop.create_future()
        stream.owner = future, on_event
        self._mark()
        try:
            result: AdminStepResult = await _within(future, timeout_s)
        finally:
            self.session.forget_step(stream)
        return result

    async def _answer(self, call_id: int, timeout_s: float) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[call_id] = future
        self._mark()
        try:
            return await _within(future, timeout_s)
        finally:
            self._calls.pop(call_id, None)
            self.session.forget_call(call_id)

    # ---- events ----

    def _opened(self, stream: EdgeStream, sink: TunnelSink | RunSink) -> OutboundHandle:
        stream.owner = sink
        self._mark()
        return OutboundHandle(self, stream, sink)

    def _on_body(self, event: events.BodyReceived) -> None:
        stream = event.stream
        sink = stream.owner
        if sink is not None:
            sink.on_body(event.data)
        else:
            self._drop(stream, len(event.data))

    def _on_response_start(self, event: events.ResponseStarted) -> None:
        sink: TunnelSink | None = event.stream.owner
        if sink is not None:
            sink.on_response_start(status=event.status, headers=event.headers, framing=event.framing)

    def _on_usage(self, event: events.UsageReceived) -> None:
        sink: TunnelSink | None = event.stream.owner
        if sink is not None:
            sink.on_usage(event.usage)

    def _on_tunnel_end(self, event: events.TunnelEnded) -> None:
        sink: TunnelSink | None = event.stream.owner
        event.stream.owner = None
        if sink is None:
            return
        if event.error is None:
            sink.on_end()
        else:
            sink.on_error(event.error)

    def _on_run_event(self, event: events.RunEventReceived) -> None:
        stream = event.stream
        sink: RunSink | None = stream.owner
        if event.event.type.is_terminal:
            stream.owner = None
        if sink is not None:
            sink.on_run_event(event.event)
        else:
            self._drop(stream, event.event.credit_bytes)

    def _drop(self, stream: EdgeStream, size_bytes: int) -> None:
        """Nobody takes it. If its sink went in this very turn, it was given back with what that held."""
        self.session.consumed(stream, min(size_bytes, stream.window.held))

    def _on_answer(self, event: events.CommandAnswered | events.RefreshAnswered) -> None:
        _settle(self._calls.get(event.call_id), event.response)

    def _on_step_event(self, event: events.StepProgressed) -> None:
        _, on_event = event.stream.owner
        if on_event is not None:
            on_event(event.event)

    def _on_step_end(self, event: events.StepEnded) -> None:
        future, _ = event.stream.owner
        _settle(future, event.result)

    def _tell_closed(self, reason: CloseReason) -> None:
        self._handler.on_closed(self, reason)

    def _on_callback_failed(self, event: events.Event) -> None:
        stream = getattr(event, "stream", None)
        if not isinstance(stream, EdgeStream) or stream.kind is StreamKind.STEP or stream.owner is None:
            return
        # Whatever comes next would pretend that nothing is missing, so this is the sink's terminal.
        sink, stream.owner = stream.owner, None
        if not stream.is_ended:
            self.session.consumed(stream, stream.window.held)
            self._undelivered += self.session.cancel(stream, CancelReason.CLIENT_GONE)
        error = StreamError(code=StreamErrorCode.INTERNAL, message="The answer could not be handed on.")
        if stream.kind is StreamKind.RUN:
            sink.on_run_event(RunEvent(type=RunEventType.ERROR, error=error))
        else:
            sink.on_error(error)


async def _within(future: asyncio.Future[Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await future
    except TimeoutError as exc:
        raise DeadlineExceeded(f"The Node did not answer within {timeout_s:g} s.") from exc


def _settle(future: asyncio.Future[Any] | None, response: object) -> None:
    if future is None or future.done():
        return
    if response is None:
        future.set_exception(Unavailable(_LOST, reason="NODE_LOST"))
    else:
        future.set_result(response)
