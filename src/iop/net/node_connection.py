"""The Edge as the Node holds it: ``ports.NodeConnection`` and the inbound objects over a ``NodeSession``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from iop.net.connection import Connection
from iop.net.ports import NodeHandler
from iop.wire import events
from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    ArtifactRequest,
    BodyFraming,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    Header,
    NodeConfig,
    ProviderReport,
    ReadyRequest,
    RefreshResponse,
    RegisterRequest,
    RunEvent,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
    Usage,
)
from iop.wire.session import SessionSettings
from iop.wire.session_node import NodeSession
from iop.wire.stream_node import NodeStream
from iop.wire.streams import StreamKind

_BUG: Final = "The Node failed to serve this; its log says why."


class InboundStream:
    """What tunnels and runs share: callbacks, credit, cancellation."""

    __slots__ = ("_connection", "_on_cancel", "_on_writable", "_stream", "_untold")

    def __init__(self, connection: NodeWire, stream: NodeStream) -> None:
        self._connection = connection
        self._stream = stream
        self._on_cancel: Callable[[CancelReason], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._untold: CancelReason | None = None

    @property
    def credit_bytes(self) -> int:
        """How many bytes may be sent now; below zero: stop reading (EN-102)."""
        return self._stream.credit_bytes

    @property
    def is_cancelled(self) -> bool:
        """Whether it was called off; what is sent now is dropped, the terminal is still owed."""
        return self._stream.cancel_reason is not None

    @property
    def cancel_at_safe_point(self) -> bool:
        """With a cancel: the engine is frozen and must not be told before it steps again (SF-07)."""
        return self._stream.cancel_at_safe_point

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Install callbacks; a cancel that came before is told from a turn of its own."""
        self._on_cancel = on_cancel
        self._on_writable = on_writable
        if self._untold is not None:
            reason, self._untold = self._untold, None
            self._connection.later(lambda: on_cancel(reason))

    def tell_cancelled(self, reason: CancelReason) -> None:
        """The connection's word that it is called off; kept for a handler that has not bound yet."""
        if self._on_cancel is not None:
            self._on_cancel(reason)
        else:
            self._untold = reason

    def tell_writable(self) -> None:
        """The connection's word that credit is above zero again."""
        if self._on_writable is not None:
            self._on_writable()

    def _let_go(self) -> None:
        """Nobody calls an ended stream off: forget who listened and who is told, which know this, so that all die
        without a search.
        """
        self._on_cancel = self._on_writable = None
        self._stream.owner = None


class InboundTunnelHandle(InboundStream):
    """``ports.InboundTunnel``."""

    __slots__ = ()

    @property
    def request(self) -> TunnelRequest:
        """As sent, without its body."""
        return cast("TunnelRequest", self._stream.request)

    @property
    def body(self) -> Sequence[bytes]:
        """The whole body in parts."""
        return self._stream.body

    def start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Send RESPONSE_START."""
        self._connection.session.start(self._stream, status=status, headers=tuple(headers), framing=framing)
        self._connection.mark()

    def send_body(self, data: bytes) -> None:
        """Send provider bytes unchanged."""
        self._connection.session.send_body(self._stream, data)
        self._connection.mark()

    def send_usage(self, usage: Usage) -> None:
        """Send an observation."""
        self._connection.session.send_usage(self._stream, usage)
        self._connection.mark()

    def end(self) -> None:
        """Send END."""
        self._connection.session.end(self._stream)
        self._connection.mark()
        self._let_go()

    def fail(self, error: StreamError) -> None:
        """Send ERROR."""
        self._connection.session.fail(self._stream, error)
        self._connection.mark()
        self._let_go()


class InboundRunHandle(InboundStream):
    """``ports.InboundRun``."""

    __slots__ = ()

    @property
    def request(self) -> RunRequest:
        """With its whole input."""
        return cast("RunRequest", self._stream.request)

    def emit(self, event: RunEvent) -> None:
        """Send one event."""
        self._connection.session.emit(self._stream, event)
        self._connection.mark()
        if event.type.is_terminal:
            self._let_go()


class InboundCommandHandle:
    """``ports.InboundCommand``."""

    __slots__ = ("_call_id", "_connection", "request")

    def __init__(self, connection: NodeWire, event: events.CommandReceived) -> None:
        self._connection = connection
        self._call_id = event.call_id
        self.request: CommandRequest = event.request

    def respond(self, response: CommandResponse) -> None:
        """Answer once."""
        self._connection.session.respond_command(self._call_id, response)
        self._connection.mark()


class InboundRefreshHandle:
    """``ports.InboundRefresh``."""

    __slots__ = ("_call_id", "_connection", "config")

    def __init__(self, connection: NodeWire, event: events.RefreshReceived) -> None:
        self._connection = connection
        self._call_id = event.call_id
        self.config: NodeConfig = event.config

    def respond(self, response: RefreshResponse) -> None:
        """Answer once."""
        self._connection.session.respond_refresh(self._call_id, response)
        self._connection.mark()


class InboundAdminStepHandle:
    """``ports.InboundAdminStep``."""

    __slots__ = ("_connection", "_stream")

    def __init__(self, connection: NodeWire, stream: NodeStream) -> None:
        self._connection = connection
        self._stream = stream

    @property
    def step(self) -> AdminStep:
        """What to do."""
        return cast("AdminStep", self._stream.request)

    @property
    def payload(self) -> Sequence[bytes]:
        """Tensor bytes, complete."""
        return self._stream.body

    def emit(self, event: AdminStepEvent) -> None:
        """Send progress."""
        self._connection.session.emit_step(self._stream, event)
        self._connection.mark()

    def finish(self, result: AdminStepResult) -> None:
        """Send the one result; dropped on a dead connection (EN-117)."""
        self._connection.session.finish_step(self._stream, result)
        self._connection.mark()


class NodeWire(Connection[NodeSession]):
    """``ports.NodeConnection``.

    Args:
        handler: hears of this connection.
        settings: limits and times until the Edge's config tells its own.
        loop: the running loop.
        unix_nanos: wall clock.
        on_gone: called once the transport is gone.
    """

    def __init__(
        self,
        *,
        handler: NodeHandler,
        settings: SessionSettings,
        loop: asyncio.AbstractEventLoop,
        unix_nanos: Callable[[], int] = time.time_ns,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        session = NodeSession(settings=settings, now=loop.time())
        super().__init__(session=session, loop=loop, unix_nanos=unix_nanos, on_gone=on_gone)
        self._handler = handler
        self._deliver.update(
            {
                events.RegisterAnswered: self._on_register_answer,
                events.ReadyAnswered: lambda event: handler.on_ready_ack(self, event.ack),
                events.StreamOpened: self._on_stream,
                events.StreamCancelled: self._on_cancelled,
                events.StreamWritable: self._on_writable,
                events.SessionTerminated: lambda event: handler.on_terminate_session(event.session_id),
                events.CommandReceived: lambda event: handler.on_command(InboundCommandHandle(self, event)),
                events.RefreshReceived: lambda event: handler.on_refresh(InboundRefreshHandle(self, event)),
                events.LateFrameDropped: lambda _event: None,
            }
        )

    def register(self, request: RegisterRequest) -> None:
        """Send the first packet (EN-02)."""
        self.session.register(request)
        self._mark()

    def send_ready(self, request: ReadyRequest) -> None:
        """Report ready (EN-12)."""
        if self.session.is_closed:
            return
        self.session.send_ready(request, now=self._loop.time())
        self._arm()
        self._mark()

    def send_report(self, report: ProviderReport) -> None:
        """Send unasked news, if the connection is ready and not behind."""
        if self.session.send_report(report):
            self._mark()

    def mark(self) -> None:
        """Something was queued: have a turn soon."""
        self._mark()

    def later(self, callback: Callable[[], None]) -> None:
        """Call back from a turn of its own."""
        self._loop.call_soon(callback)

    def _on_register_answer(self, event: events.RegisterAnswered) -> None:
        self._arm()
        self._handler.on_registered(self, event.response)

    def _on_stream(self, event: events.StreamOpened) -> None:
        stream = event.stream
        if stream.kind is StreamKind.STEP:
            self._handler.on_admin_step(InboundAdminStepHandle(self, stream))
        elif stream.kind is StreamKind.RUN:
            run = InboundRunHandle(self, stream)
            stream.owner = run
            self._handler.on_run(run)
        else:
            tunnel = InboundTunnelHandle(self, stream)
            stream.owner = tunnel
            if stream.kind is StreamKind.ARTIFACT:
                self._handler.on_artifact(cast("ArtifactRequest", stream.request), tunnel)
            else:
                self._handler.on_tunnel(tunnel)

    def _on_cancelled(self, event: events.StreamCancelled) -> None:
        if event.stream.owner is not None:
            event.stream.owner.tell_cancelled(event.reason)

    def _on_writable(self, event: events.StreamWritable) -> None:
        if event.stream.owner is not None:
            event.stream.owner.tell_writable()

    def _tell_closed(self, reason: CloseReason) -> None:
        self._handler.on_closed(reason)

    def _on_callback_failed(self, event: events.Event) -> None:
        stream = getattr(event, "stream", None)
        if not isinstance(stream, NodeStream) or stream.is_terminated:
            return
        if isinstance(stream.request, AdminStep):
            step = stream.request
            refusal = AdminStepResult(
                operation_id=step.operation_id,
                step=step.step,
                refused_code="unavailable",
                refused_reason=_BUG,
            )
            self.session.finish_step(stream, refusal)
        else:
            self.session.fail(stream, StreamError(code=StreamErrorCode.INTERNAL, message=_BUG))
