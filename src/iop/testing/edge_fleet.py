"""Building blocks for tests of the Edge: small configurations, a scripted connection, sinks that remember.

``FakeEdgeConnection`` plays a Node's socket without a wire: tests look at what was opened and let the Node answer. It
follows ``iop.net.ports.EdgeConnection``: nothing but the handshake before ready, exactly one terminal per stream, a
``node_lost`` to every open stream before ``on_closed``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from iop.core.errors import LocalProtocolError, Unavailable
from iop.core.ids import ModelId, NodeId, ProviderId, RequestId
from iop.edge.calls import DispatchRequest, ProviderKey, Route, ServedTarget, TunnelCall
from iop.edge.snapshot import (
    AdapterSpec,
    BreakerSpec,
    DispatchLimits,
    EdgeSnapshot,
    ModelSpec,
    NodeSpec,
    PoolMember,
    QueueSpec,
)
from iop.net.ports import EdgeHandler, RunSink, TunnelSink
from iop.wire.messages import (
    AdapterStatus,
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
    NodeRuntime,
    ReadyAck,
    ReadyRequest,
    RefreshOutcome,
    RefreshResponse,
    RegisterRequest,
    RegisterResponse,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
    Usage,
)

TOKEN = "a-node-token"
"""The credential of every Node that :func:`snapshot_of` makes."""


def provider_key(text: str) -> ProviderKey:
    """``node/provider`` as a key."""
    node, _, provider = text.partition("/")
    return ProviderKey(node=NodeId(node), provider=ProviderId(provider))


def adapter_spec(
    name: str,
    *,
    capacity: int = 2,
    long_capacity: int = 0,
    route: Route = Route.TUNNEL,
    operations: frozenset[str] | None = None,
    enabled: bool = True,
    is_administered: bool = False,
) -> AdapterSpec:
    """One adapter with small numbers."""
    return AdapterSpec(
        provider=ProviderId(name),
        type="openai_compat" if route is Route.TUNNEL else "ollama",
        category="api",
        route=route,
        capacity=capacity,
        long_capacity=long_capacity,
        enabled=enabled,
        operations=operations,
        is_administered=is_administered,
    )


def snapshot_of(
    adapters: Mapping[str, AdapterSpec],
    models: Mapping[str, Sequence[str]],
    *,
    revision: int = 1,
    queue: QueueSpec | None = None,
    limits: DispatchLimits | None = None,
    breaker: BreakerSpec | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    long_context_tokens: int | None = 1000,
    fingerprint: str = "",
    runtime: NodeRuntime | None = None,
) -> EdgeSnapshot:
    """A configuration from ``node/provider`` keys and models that name them; ``node/provider*3`` is weight 3."""
    nodes: dict[NodeId, NodeSpec] = {}
    by_node: dict[str, dict[ProviderId, AdapterSpec]] = {}
    for text, spec in adapters.items():
        by_node.setdefault(text.partition("/")[0], {})[spec.provider] = spec
    for node, specs in by_node.items():
        nodes[NodeId(node)] = NodeSpec(
            id=NodeId(node),
            token_sha256=(sha256(TOKEN.encode()).digest(),),
            adapters=specs,
            wire=NodeConfig(config_revision=0, runtime=runtime or NodeRuntime()),
            fingerprint=fingerprint or repr(specs),
        )
    return EdgeSnapshot(
        revision=revision,
        nodes=nodes,
        models={
            ModelId(model): ModelSpec(
                id=ModelId(model),
                aliases=tuple((aliases or {}).get(model, ())),
                members=tuple(_member(text) for text in members),
                queue=queue or QueueSpec(),
                long_context_tokens=long_context_tokens,
            )
            for model, members in models.items()
        },
        limits=limits or DispatchLimits(),
        breaker=breaker or BreakerSpec(),
    )


def _member(text: str) -> PoolMember:
    name, _, weight = text.partition("*")
    return PoolMember(key=provider_key(name), target=f"target-of-{name}", weight=int(weight or 1))


_numbers = itertools.count(1)


def request_of(
    model: str,
    *,
    operation: str = "chat_completions",
    tokens: int = 0,
    priority: int = 0,
    session: str = "",
    request_id: str = "",
) -> DispatchRequest:
    """A caller's request with a fresh id."""
    return DispatchRequest(
        request_id=RequestId(request_id or f"req-{next(_numbers)}"),
        model=model,
        operation=operation,
        estimated_prompt_tokens=tokens,
        priority=priority,
        session=session,
    )


@dataclass(slots=True)
class RecordingSink:
    """A tunnel sink that remembers; ``ends`` counts terminals of any kind."""

    status: int = 0
    body: bytes = b""
    usage: Usage | None = None
    error: StreamError | None = None
    ends: int = 0
    on_end_hook: Callable[[], None] | None = None

    def on_response_start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Remember the status."""
        assert not self.ends, "an answer after its end"
        self.status = status

    def on_body(self, data: bytes) -> None:
        """Append."""
        assert not self.ends, "bytes after the end"
        self.body += data

    def on_usage(self, usage: Usage) -> None:
        """Remember."""
        self.usage = usage

    def on_end(self) -> None:
        """Count."""
        self.ends += 1
        if self.on_end_hook is not None:
            self.on_end_hook()

    def on_error(self, error: StreamError) -> None:
        """Count and remember."""
        self.ends += 1
        self.error = error
        if self.on_end_hook is not None:
            self.on_end_hook()


@dataclass(slots=True)
class RecordingRunSink:
    """A run sink that remembers."""

    events: list[RunEvent] = field(default_factory=list)

    def on_run_event(self, event: RunEvent) -> None:
        """Append."""
        self.events.append(event)


def tunnel_to(sink: TunnelSink, body: bytes = b"{}") -> Callable[[ServedTarget], TunnelCall]:
    """A ``prepare`` that sends ``body`` to whoever serves."""

    def prepare(_target: ServedTarget) -> TunnelCall:
        return TunnelCall(
            operation="chat_completions", method="POST", path="/v1/chat/completions", sink=sink, body=(body,)
        )

    return prepare


class FakeStream:
    """One stream that the Edge opened, as the test's Node sees it and as the Edge holds it."""

    def __init__(
        self,
        connection: FakeEdgeConnection,
        request: TunnelRequest | RunRequest,
        body: Sequence[bytes],
        *,
        tunnel: TunnelSink | None = None,
        run: RunSink | None = None,
    ) -> None:
        self.request = request
        self.sent_body = b"".join(body)
        self.cancelled: list[CancelReason] = []
        self.at_safe_point = False
        self.credit_returned = 0
        self.is_handed_over = connection.hands_over
        self.is_over = False
        self.sent_bytes = 0
        self.ended_with: str | None = None
        self.connection = connection
        self._tunnel = tunnel
        self._run = run

    # the Edge's side

    def consumed(self, size_bytes: int) -> None:
        """Count credit."""
        self.credit_returned += size_bytes

    def cancel(self, reason: CancelReason, *, at_safe_point: bool = False) -> None:
        """Remember; with ``confirms_cancels`` the Node ends the stream in the next step of the test."""
        if not self.is_over:
            self.cancelled.append(reason)
            self.at_safe_point = at_safe_point

    def detach(self) -> None:
        """The sink hears nothing more."""
        self._tunnel = self._run = None

    # the Node's side

    def start(self, status: int = 200, headers: Sequence[Header] = ()) -> None:
        """RESPONSE_START."""
        if self._tunnel is not None:
            self._tunnel.on_response_start(status=status, headers=headers, framing=BodyFraming.CHUNKED)

    @property
    def is_orphan(self) -> bool:
        """Whether the Edge has detached from it."""
        return self._tunnel is None and self._run is None

    def send(self, data: bytes) -> None:
        """BODY."""
        if not self.is_orphan:
            self.sent_bytes += len(data)
        if self._tunnel is not None:
            self._tunnel.on_body(data)

    def end(self) -> None:
        """END."""
        if self._over() and self._tunnel is not None:
            self._tunnel.on_end()

    def fail(
        self,
        code: str = StreamErrorCode.UPSTREAM_ERROR,
        *,
        before_start: bool = False,
        retryable: bool = False,
    ) -> None:
        """ERROR, of a tunnel or a run."""
        if not self._over():
            return
        self.ended_with = code
        error = StreamError(code=code, retryable=retryable, before_start=before_start)
        if self._tunnel is not None:
            self._tunnel.on_error(error)
        elif self._run is not None:
            kind = RunEventType.CANCELLED if code == StreamErrorCode.CANCELLED else RunEventType.ERROR
            self._run.on_run_event(RunEvent(type=kind, error=error))

    def fail_with(self, error: StreamError) -> None:
        """ERROR of a tunnel, as given."""
        if self._over() and self._tunnel is not None:
            self._tunnel.on_error(error)

    def emit(self, event: RunEvent) -> None:
        """One run event."""
        if event.type.is_terminal and not self._over():
            return
        if self._run is not None:
            self._run.on_run_event(event)

    def _over(self) -> bool:
        if self.is_over:
            return False
        self.is_over = True
        self.connection.open_streams.remove(self)
        return True


class FakeEdgeConnection:
    """``EdgeConnection`` without a wire; ``streams`` are all that were ever opened."""

    def __init__(
        self, handler: EdgeHandler, node: str = "n1", *, token: str = TOKEN, instance: str = ""
    ) -> None:
        self.node = NodeId(node)
        self.token = token
        self.instance = instance
        self.peer = "192.0.2.1:1"
        self.clock_skew_ms: int | None = None
        self.hands_over = True
        self.is_ready = False
        self.close_reason: CloseReason | None = None
        self.misuses = 0
        self.defers_close = False
        self.is_closing = False
        self.registered: list[RegisterResponse] = []
        self.acks: list[ReadyAck] = []
        self.streams: list[FakeStream] = []
        self.open_streams: list[FakeStream] = []
        self.refreshes: list[NodeConfig] = []
        self.refresh_answer = RefreshOutcome.APPLIED
        self.refreshed_adapters: tuple[AdapterStatus, ...] = ()
        self.steps: list[AdminStep] = []
        self.answer_step: Callable[[AdminStep], AdminStepResult] | None = None
        self.answer_command: Callable[[CommandRequest], CommandResponse] | None = None
        self._handler = handler

    # what the test's Node does

    def register(self, *, version: int = 1) -> RegisterResponse | None:
        """Register; the answer if there was one."""
        before = len(self.registered)
        self._handler.on_register(
            self,
            RegisterRequest(
                node_id=self.node, token=self.token, protocol_version=version, instance_id=self.instance
            ),
        )
        return self.registered[-1] if len(self.registered) > before else None

    def ready(self, revision: int = 1, adapters: tuple[AdapterStatus, ...] = ()) -> ReadyAck:
        """Report ready; the answer."""
        self._handler.on_ready(
            self, ReadyRequest(node_id=self.node, config_revision=revision, adapters=adapters)
        )
        return self.acks[-1]

    def connect(self) -> FakeEdgeConnection:
        """Register and report ready."""
        self.register()
        self.ready()
        return self

    def lose(self, reason: CloseReason = CloseReason.CONNECTION_LOST) -> None:
        """The socket breaks: open streams hear ``node_lost``, then the handler hears of the close."""
        if self.close_reason is not None:
            return
        self.close_reason = reason
        self.is_ready = False
        for stream in list(self.open_streams):
            stream.fail(StreamErrorCode.NODE_LOST, retryable=True)
        self._handler.on_closed(self, reason)

    # what the Edge does

    def respond_register(self, response: RegisterResponse) -> None:
        """Remember; a refusal closes."""
        self.registered.append(response)
        if not response.accepted:
            self.lose(CloseReason.REFUSED)

    def respond_ready(self, ack: ReadyAck) -> None:
        """Remember; a refusal closes."""
        self.acks.append(ack)
        self.is_ready = ack.ready and not self.is_closing
        if not ack.ready:
            self.lose(CloseReason.REFUSED)

    def open_tunnel(self, request: TunnelRequest, body: Sequence[bytes], sink: TunnelSink) -> FakeStream:
        """Open one."""
        return self._opened(FakeStream(self, request, body, tunnel=sink))

    def open_run(self, request: RunRequest, sink: RunSink) -> FakeStream:
        """Open one."""
        return self._opened(FakeStream(self, request, (request.input,), run=sink))

    def fetch_artifact(self, request: ArtifactRequest, sink: TunnelSink) -> FakeStream:
        """Open one that fetches."""
        opened = TunnelRequest(run_id=request.run_id, adapter=request.adapter, path=request.uri)
        return self._opened(FakeStream(self, opened, (), tunnel=sink))

    def terminate_session(self, session_id: str, reason: CancelReason) -> None:
        """Not played."""

    async def command(self, request: CommandRequest, *, timeout_s: float) -> CommandResponse:
        """Answer as scripted."""
        if self.close_reason is not None or self.answer_command is None:
            raise Unavailable("the connection ended")
        return self.answer_command(request)

    async def refresh(self, config: NodeConfig, *, timeout_s: float) -> RefreshResponse:
        """Answer as scripted."""
        self._require_ready()
        self.refreshes.append(config)
        return RefreshResponse(
            outcome=self.refresh_answer,
            config_revision=config.config_revision,
            adapters=self.refreshed_adapters,
        )

    async def admin_step(
        self,
        step: AdminStep,
        *,
        payload: Sequence[bytes] = (),
        on_event: Callable[[AdminStepEvent], None] | None = None,
        timeout_s: float,
    ) -> AdminStepResult:
        """Answer as scripted."""
        self._require_ready()
        self.steps.append(step)
        if self.answer_step is None:
            raise Unavailable("the connection ended")
        return self.answer_step(step)

    def close(self, reason: CloseReason) -> None:
        """Close; with ``defers_close`` nothing is heard of it before the test calls ``lose``."""
        if self.defers_close:
            self.is_closing, self.is_ready = True, False
        else:
            self.lose(reason)

    def _require_ready(self) -> None:
        if not self.is_ready:
            self.misuses += 1
            raise LocalProtocolError("the connection is not ready")

    def _opened(self, stream: FakeStream) -> FakeStream:
        self._require_ready()
        self.streams.append(stream)
        self.open_streams.append(stream)
        return stream
