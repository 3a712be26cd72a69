"""An Edge's and a Node's handler for tests of connections, and sinks that remember what they were given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from iop.net.ports import (
    EdgeConnection,
    InboundAdminStep,
    InboundCommand,
    InboundRefresh,
    InboundRun,
    InboundTunnel,
    NodeConnection,
    OutboundStream,
)
from iop.testing import packets as make
from iop.testing.waiting import PATIENCE_S
from iop.wire.messages import (
    AdminStepEvent,
    AdminStepResult,
    ArtifactRequest,
    BodyFraming,
    CancelReason,
    CloseReason,
    CommandResponse,
    Header,
    NodeConfig,
    ProviderReport,
    ReadyAck,
    ReadyRequest,
    RefreshOutcome,
    RefreshResponse,
    RegisterRequest,
    RegisterResponse,
    RunEvent,
    RunEventType,
    StreamError,
    Usage,
)


class RecordingSink:
    """A tunnel sink, and a run sink, that consumes at once unless told to hold.

    Attributes:
        stream: the handle; set it right after opening.
        is_holding: keep credit instead of returning it.
    """

    def __init__(self) -> None:
        self.stream: OutboundStream | None = None
        self.is_holding = False
        self.status = 0
        self.headers: Sequence[Header] = ()
        self.framing = BodyFraming.UNSPECIFIED
        self.body = bytearray()
        self.held = 0
        self.usage: list[Usage] = []
        self.run_events: list[RunEvent] = []
        self.terminals: list[StreamError | None] = []
        self.ended = asyncio.Event()

    @property
    def error(self) -> StreamError | None:
        """The terminal's error; None when it ended well."""
        (terminal,) = self.terminals
        return terminal

    async def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Until the terminal."""
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()

    def release(self) -> None:
        """Return what is held and hold no more."""
        self.is_holding = False
        held, self.held = self.held, 0
        if held and self.stream is not None:
            self.stream.consumed(held)

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Remember."""
        assert not self.status, "a second start"
        self.status, self.headers, self.framing = status, headers, framing

    def on_body(self, data: bytes) -> None:
        """Remember, and consume unless holding."""
        assert not self.terminals, "bytes behind the terminal"
        self.body += data
        self._take(len(data))

    def on_usage(self, usage: Usage) -> None:
        """Remember."""
        self.usage.append(usage)

    def on_end(self) -> None:
        """Remember."""
        self._end(None)

    def on_error(self, error: StreamError) -> None:
        """Remember."""
        self._end(error)

    def on_run_event(self, event: RunEvent) -> None:
        """Remember, and consume unless holding."""
        assert not self.terminals, "an event behind the terminal"
        self.run_events.append(event)
        if event.type.is_terminal:
            self._end(event.error)
        else:
            self._take(event.credit_bytes)

    def _take(self, size: int) -> None:
        if self.is_holding:
            self.held += size
        elif self.stream is not None:
            self.stream.consumed(size)

    def _end(self, error: StreamError | None) -> None:
        self.terminals.append(error)
        self.ended.set()


class PlainEdge:
    """An Edge that accepts everybody.

    Attributes:
        registration: what it answers, or None to let registrations wait.
        is_acking: whether it acks ready requests.
    """

    def __init__(self, registration: RegisterResponse | None = None) -> None:
        self.registration = registration or make.register_response()
        self.is_registering = True
        self.is_acking = True
        self.connections: list[EdgeConnection] = []
        self.ready: list[EdgeConnection] = []
        self.reports: list[ProviderReport] = []
        self.closed: list[tuple[EdgeConnection, CloseReason]] = []
        self.late_frames = 0
        self.became_ready = asyncio.Event()

    @property
    def node(self) -> EdgeConnection:
        """The one that is ready."""
        return self.ready[-1]

    def open_tunnel(
        self, body: Sequence[bytes] = (b"{}",), *, sink: RecordingSink | None = None, **changes: Any
    ) -> RecordingSink:
        """Open a tunnel to the ready Node."""
        sink = sink or RecordingSink()
        sink.stream = self.node.open_tunnel(make.tunnel_request(**changes), body, sink)
        return sink

    def open_run(self, *, sink: RecordingSink | None = None, **changes: Any) -> RecordingSink:
        """Open a run on the ready Node."""
        sink = sink or RecordingSink()
        sink.stream = self.node.open_run(make.run_request(**changes), sink)
        return sink

    def on_register(self, connection: EdgeConnection, request: RegisterRequest) -> None:
        """Accept."""
        self.connections.append(connection)
        if self.is_registering:
            connection.respond_register(self.registration)

    def on_ready(self, connection: EdgeConnection, request: ReadyRequest) -> None:
        """Ack."""
        if self.is_acking:
            connection.respond_ready(ReadyAck(ready=True))
            self.ready.append(connection)
            self.became_ready.set()

    def on_report(self, connection: EdgeConnection, report: ProviderReport) -> None:
        """Remember."""
        self.reports.append(report)

    def on_late_frame(self, connection: EdgeConnection) -> None:
        """Count."""
        self.late_frames += 1

    def on_closed(self, connection: EdgeConnection, reason: CloseReason) -> None:
        """Remember."""
        self.closed.append((connection, reason))


class PlainNode:
    """A Node that becomes ready at once and echoes request bodies, unless the path says otherwise.

    Paths: ``/hang`` starts and then waits for a cancel, ``/hold`` is kept in ``held`` unanswered.
    """

    def __init__(self) -> None:
        self.connection: NodeConnection | None = None
        self.registered: list[RegisterResponse] = []
        self.acks: list[ReadyAck] = []
        self.tunnels: list[InboundTunnel] = []
        self.held: dict[str, InboundTunnel] = {}
        self.runs: list[InboundRun] = []
        self.artifacts: list[ArtifactRequest] = []
        self.cancels: list[tuple[str, CancelReason]] = []
        self.writable: list[str] = []
        self.steps: list[InboundAdminStep] = []
        self.configs: list[NodeConfig] = []
        self.ended_sessions: list[str] = []
        self.closed: list[CloseReason] = []

    def on_registered(self, connection: NodeConnection, response: RegisterResponse) -> None:
        """Report ready."""
        self.connection = connection
        self.registered.append(response)
        if response.accepted:
            connection.send_ready(make.ready_request())

    def on_ready_ack(self, connection: NodeConnection, ack: ReadyAck) -> None:
        """Remember."""
        self.acks.append(ack)

    def on_tunnel(self, tunnel: InboundTunnel) -> None:
        """Echo, hang or hold."""
        self.tunnels.append(tunnel)
        run_id = tunnel.request.run_id

        def on_cancel(reason: CancelReason) -> None:
            self.cancels.append((run_id, reason))
            tunnel.fail(StreamError(code="cancelled"))

        tunnel.bind(on_cancel=on_cancel, on_writable=lambda: self.writable.append(run_id))
        if tunnel.request.path == "/hold":
            self.held[run_id] = tunnel
            return
        tunnel.start(status=200, headers=tunnel.request.headers, framing=BodyFraming.LENGTH)
        if tunnel.request.path == "/hang":
            return
        for part in tunnel.body:
            tunnel.send_body(part)
        tunnel.end()

    def on_run(self, run: InboundRun) -> None:
        """Echo the input as one delta."""
        self.runs.append(run)
        run.bind(
            on_cancel=lambda reason: self.cancels.append((run.request.run_id, reason)),
            on_writable=lambda: None,
        )
        run.emit(RunEvent(type=RunEventType.START))
        run.emit(RunEvent(type=RunEventType.DELTA, delta=run.request.input.decode()))
        run.emit(RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop",)))

    def on_artifact(self, request: ArtifactRequest, tunnel: InboundTunnel) -> None:
        """Stream its uri back."""
        self.artifacts.append(request)
        tunnel.start(status=200, headers=(), framing=BodyFraming.LENGTH)
        tunnel.send_body(request.uri.encode())
        tunnel.end()

    def on_terminate_session(self, session_id: str) -> None:
        """Remember."""
        self.ended_sessions.append(session_id)

    def on_command(self, command: InboundCommand) -> None:
        """Answer with the adapter's name; an adapter ``silent`` is not answered."""
        if command.request.adapter != "silent":
            command.respond(
                CommandResponse(
                    type=command.request.type, ok=True, figures={"adapter": command.request.adapter}
                )
            )

    def on_refresh(self, refresh: InboundRefresh) -> None:
        """Apply."""
        self.configs.append(refresh.config)
        refresh.respond(
            RefreshResponse(outcome=RefreshOutcome.APPLIED, config_revision=refresh.config.config_revision)
        )

    def on_admin_step(self, step: InboundAdminStep) -> None:
        """One progress report, then the result."""
        self.steps.append(step)
        asked = step.step
        step.emit(AdminStepEvent(operation_id=asked.operation_id, step=asked.step, progress=b""))
        step.finish(AdminStepResult(operation_id=asked.operation_id, step=asked.step))

    def on_closed(self, reason: CloseReason) -> None:
        """Remember."""
        self.closed.append(reason)
