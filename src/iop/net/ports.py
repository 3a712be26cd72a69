"""What the Edge and the Node see of a connection, and what a connection asks of them.

Everything here is called on the event loop, synchronously, from the connection's own read or write turn. Callbacks
must not block and must not raise; they hand bytes on and return. That is what keeps the relay path free of a task or a
queue per chunk: a provider's bytes go from socket callback to socket write. Flow control is by credit (EN-102): whoever
receives body bytes tells when it has got rid of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
    ReadyAck,
    ReadyRequest,
    RefreshResponse,
    RegisterRequest,
    RegisterResponse,
    RunEvent,
    RunRequest,
    StreamError,
    TunnelRequest,
    Usage,
)

# ---- the Edge's side ----


class TunnelSink(Protocol):
    """Receives one tunnel's answer, in order; after ``on_end`` or ``on_error`` nothing more (EN-52, EN-57)."""

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """The provider's status and headers, at most once."""
        ...

    def on_body(self, data: bytes) -> None:
        """Provider bytes. The sink calls ``OutboundStream.consumed`` when they have left its hands."""
        ...

    def on_usage(self, usage: Usage) -> None:
        """An observation; never part of the body (EN-53)."""
        ...

    def on_end(self) -> None:
        """The provider's answer is whole."""
        ...

    def on_error(self, error: StreamError) -> None:
        """The tunnel ended badly; ``node_lost`` when the connection went (EN-112)."""
        ...


class RunSink(Protocol):
    """Receives one run's events in order; the terminal one is the last (EN-40)."""

    def on_run_event(self, event: RunEvent) -> None:
        """One event. A lost connection arrives as an ERROR event with code ``node_lost``."""
        ...


class OutboundStream(Protocol):
    """The Edge's handle on a run or tunnel it opened."""

    @property
    def is_handed_over(self) -> bool:
        """Whether any part of the opening packet was handed to the socket; if not, it may go elsewhere (EN-112)."""
        ...

    def consumed(self, size_bytes: int) -> None:
        """Body or delta bytes have left the Edge: return their credit. Ignored after the end (EN-102)."""
        ...

    def cancel(self, reason: CancelReason, *, at_safe_point: bool = False) -> None:
        """Ask the Node to end it (EN-56, EN-70). Idempotent; unsent continuation frames are dropped (EN-106).

        The sink still gets its one terminal, unless it was detached.
        """
        ...

    def detach(self) -> None:
        """Stop calling the sink. Incoming bytes are consumed and dropped until the terminal."""
        ...


class EdgeConnection(Protocol):
    """One Node's socket as the Edge holds it."""

    @property
    def peer(self) -> str:
        """Address for the Edge's own log only (EN-04)."""
        ...

    @property
    def clock_skew_ms(self) -> int | None:
        """The Node's wall clock less ours as last seen; a warning, never a decision (EN-113)."""
        ...

    def respond_register(self, response: RegisterResponse) -> None:
        """Answer the registration; a refusal closes the connection after it was written (EN-10, EN-15)."""
        ...

    def respond_ready(self, ack: ReadyAck) -> None:
        """Answer a ready request; ``ready=False`` closes the connection after it was written (EN-14, EN-15)."""
        ...

    def open_tunnel(self, request: TunnelRequest, body: Sequence[bytes], sink: TunnelSink) -> OutboundStream:
        """Open a tunnel; the body goes inline or in continuation frames (EN-101).

        Raises LocalProtocolError when the connection is not ready (EN-13) or the run id is in use.
        """
        ...

    def open_run(self, request: RunRequest, sink: RunSink) -> OutboundStream:
        """Open a normalised run. Raises LocalProtocolError if the connection is not ready (EN-13)."""
        ...

    def fetch_artifact(self, request: ArtifactRequest, sink: TunnelSink) -> OutboundStream:
        """Fetch a profile artifact as a stream of tunnel frames (AD-46)."""
        ...

    def terminate_session(self, session_id: str, reason: CancelReason) -> None:
        """End all runs of a session and its state (EN-70)."""
        ...

    async def command(self, request: CommandRequest, *, timeout_s: float) -> CommandResponse:
        """Query the Node (EN-75). Raises DeadlineExceeded, or Unavailable when the connection ends first."""
        ...

    async def refresh(self, config: NodeConfig, *, timeout_s: float) -> RefreshResponse:
        """Push a new config (EN-80). Raises as :meth:`command`."""
        ...

    async def admin_step(
        self,
        step: AdminStep,
        *,
        payload: Sequence[bytes] = (),
        on_event: Callable[[AdminStepEvent], None] | None = None,
        timeout_s: float,
    ) -> AdminStepResult:
        """Run one admin step (EN-120). Raises as :meth:`command`; a lost connection leaves the outcome unknown."""
        ...

    def close(self, reason: CloseReason) -> None:
        """Say goodbye, flush what is written and close. Idempotent; ``on_closed`` follows exactly once."""
        ...


class EdgeHandler(Protocol):
    """What the Edge does with its connections. All calls for one connection come in order."""

    def on_register(self, connection: EdgeConnection, request: RegisterRequest) -> None:
        """First packet. Answer by ``respond_register``, at once or later within the handshake timeout."""
        ...

    def on_ready(self, connection: EdgeConnection, request: ReadyRequest) -> None:
        """The Node says it is ready, perhaps again (EN-12, EN-14). Answer by ``respond_ready``."""
        ...

    def on_report(self, connection: EdgeConnection, report: ProviderReport) -> None:
        """Unasked provider news; droppable (EN-34)."""
        ...

    def on_late_frame(self, connection: EdgeConnection) -> None:
        """A frame for a stream that had ended was dropped: count it (EN-57, EN-33)."""
        ...

    def on_closed(self, connection: EdgeConnection, reason: CloseReason) -> None:
        """The connection is over: exactly once, after every open stream's sink got its terminal (EN-31)."""
        ...


# ---- the Node's side ----


class InboundTunnel(Protocol):
    """One provider request that the Edge asked for. The handler owes it exactly one ``end`` or ``fail`` (EN-52)."""

    @property
    def request(self) -> TunnelRequest:
        """As sent, without its body."""
        ...

    @property
    def body(self) -> Sequence[bytes]:
        """The whole body in parts as received; complete before the handler is called (EN-106)."""
        ...

    @property
    def credit_bytes(self) -> int:
        """How many body bytes may be sent now; may go below zero by one read's worth, then stop reading (EN-102)."""
        ...

    @property
    def cancel_at_safe_point(self) -> bool:
        """Whether the cancel asked to wait until the engine, now frozen, steps again (SF-07, AD-41)."""
        ...

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Install callbacks. ``on_cancel`` at most once; ``on_writable`` when credit rose above zero again."""
        ...

    def start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Send RESPONSE_START."""
        ...

    def send_body(self, data: bytes) -> None:
        """Send provider bytes unchanged; frames are cut and coalesced by the connection."""
        ...

    def send_usage(self, usage: Usage) -> None:
        """Send an observation."""
        ...

    def end(self) -> None:
        """Send END. Later calls are ignored and counted (EN-57)."""
        ...

    def fail(self, error: StreamError) -> None:
        """Send ERROR. Later calls are ignored and counted (EN-57)."""
        ...


class InboundRun(Protocol):
    """One normalised run. The handler owes it a START, then exactly one terminal event (EN-40)."""

    @property
    def request(self) -> RunRequest:
        """With its whole input."""
        ...

    @property
    def credit_bytes(self) -> int:
        """How many delta bytes may be sent now (EN-102)."""
        ...

    @property
    def cancel_at_safe_point(self) -> bool:
        """As for tunnels."""
        ...

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Install callbacks, as for tunnels."""
        ...

    def emit(self, event: RunEvent) -> None:
        """Send one event; sequence numbers are set here. After a terminal one, ignored and counted."""
        ...


class InboundCommand(Protocol):
    """A command waiting for its answer."""

    @property
    def request(self) -> CommandRequest:
        """What is asked."""
        ...

    def respond(self, response: CommandResponse) -> None:
        """Answer once; later calls are ignored."""
        ...


class InboundRefresh(Protocol):
    """A config refresh waiting for its answer."""

    @property
    def config(self) -> NodeConfig:
        """What to apply."""
        ...

    def respond(self, response: RefreshResponse) -> None:
        """Answer once; later calls are ignored."""
        ...


class InboundAdminStep(Protocol):
    """An admin step waiting for its one result."""

    @property
    def step(self) -> AdminStep:
        """What to do."""
        ...

    @property
    def payload(self) -> Sequence[bytes]:
        """Tensor bytes of an inline update, complete."""
        ...

    def emit(self, event: AdminStepEvent) -> None:
        """Send progress."""
        ...

    def finish(self, result: AdminStepResult) -> None:
        """Send the one result; on a dead connection it is dropped, and the Node keeps it for the retry (EN-117)."""
        ...


class NodeConnection(Protocol):
    """The Edge as the Node holds it."""

    def register(self, request: RegisterRequest) -> None:
        """Send the first packet."""
        ...

    def send_ready(self, request: ReadyRequest) -> None:
        """Report ready; the answer comes to ``on_ready_ack``."""
        ...

    def send_report(self, report: ProviderReport) -> None:
        """Send unasked news; dropped silently when not ready or when the queue is full."""
        ...

    def close(self, reason: CloseReason) -> None:
        """Say goodbye, flush and close; ``on_closed`` follows exactly once."""
        ...


class NodeHandler(Protocol):
    """What the Node does with its connection."""

    def on_registered(self, connection: NodeConnection, response: RegisterResponse) -> None:
        """The Edge's answer to the registration."""
        ...

    def on_ready_ack(self, connection: NodeConnection, ack: ReadyAck) -> None:
        """The Edge's answer to ready."""
        ...

    def on_tunnel(self, tunnel: InboundTunnel) -> None:
        """A tunnel to serve; its body is complete."""
        ...

    def on_run(self, run: InboundRun) -> None:
        """A run to serve; its input is complete."""
        ...

    def on_artifact(self, request: ArtifactRequest, tunnel: InboundTunnel) -> None:
        """A profile artifact to stream back."""
        ...

    def on_terminate_session(self, session_id: str) -> None:
        """End all runs of this session and its state (EN-70)."""
        ...

    def on_command(self, command: InboundCommand) -> None:
        """A query to answer."""
        ...

    def on_refresh(self, refresh: InboundRefresh) -> None:
        """A new config to apply, or to refuse whole (EN-80)."""
        ...

    def on_admin_step(self, step: InboundAdminStep) -> None:
        """A step to run once (EN-120)."""
        ...

    def on_closed(self, reason: CloseReason) -> None:
        """The connection is over: exactly once, after every open stream got ``on_cancel`` (EN-117)."""
        ...
