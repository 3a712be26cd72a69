"""Doubles around the Node: an adapter, a connection and a dialer that tests drive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from iop.adapters.base import (
    AdapterCapabilities,
    AdapterServices,
    AdapterSnapshot,
    Category,
    Health,
    RunStream,
    TunnelStream,
)
from iop.admin.participant import ProgressSink
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.steps import (
    ParticipantOutcome,
    ParticipantReadBack,
    ResumeStep,
    Step,
    StepCall,
    StepProgress,
    StepResult,
)
from iop.core.errors import InvalidRequest, IopError, Unavailable
from iop.core.ids import GroupId, NodeId, ParticipantId, RunId, SessionId
from iop.net.ports import NodeConnection, NodeHandler
from iop.wire.messages import (
    AdapterConfig,
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    BodyFraming,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    NodeConfig,
    ProviderReport,
    ReadyRequest,
    RefreshResponse,
    RegisterRequest,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
    TunnelRequest,
)


def adapter_config(name: str = "main", **values: object) -> AdapterConfig:
    return AdapterConfig(name=name, **{"type": "fake", "capacity": 2, "long_context_capacity": 1, **values})  # type: ignore[arg-type]


def node_config(revision: int, *adapters: AdapterConfig) -> NodeConfig:
    return NodeConfig(config_revision=revision, adapters=adapters or (adapter_config(),))


def tunnel_request(run_id: str = "run-1", **values: object) -> TunnelRequest:
    return TunnelRequest(run_id=RunId(run_id), **{"adapter": "main", **values})  # type: ignore[arg-type]


def run_request(run_id: str = "run-1", **values: object) -> RunRequest:
    return RunRequest(run_id=RunId(run_id), **{"adapter": "main", "target": "m", **values})  # type: ignore[arg-type]


class FakeAdapter:
    """Serves what the test lets go on."""

    def __init__(self, config: AdapterConfig, services: AdapterServices) -> None:
        self.config = config
        self.services = services
        self.tunnels: list[tuple[TunnelStream, Callable[[], None]]] = []
        self.cancels: list[CancelReason] = []
        self.is_started = False
        self.is_closed = False
        self.probes = 0
        self.health = Health.READY
        self.steps: list[StepCall] = []
        self.step_gate = asyncio.Event()
        self.step_gate.set()
        self.step_error: Exception | None = None
        self.step_failures: tuple[ParticipantOutcome, ...] | None = None
        self.runs_cancelled = 0
        self.ended_sessions: list[str] = []
        self.ranks = ("r0", "r1")

    @property
    def capabilities(self) -> AdapterCapabilities:
        return AdapterCapabilities(
            kind="fake", category=Category.LOCAL_INFERENCE, tunnels=True, runs=True, admin=True, sessions=True
        )

    def snapshot(self) -> AdapterSnapshot:
        return AdapterSnapshot(health=self.health, models=("m",))

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        if "http://bad" in self.config.targets:
            raise InvalidRequest("endpoint: cannot work")
        await asyncio.sleep(0)
        self.is_started = True

    async def aclose(self) -> None:
        self.is_closed = True
        for stream, on_done in self.tunnels:
            stream.fail(StreamError(code=StreamErrorCode.CANCELLED))
            on_done()
        self.tunnels.clear()

    async def probe(self) -> None:
        await asyncio.sleep(0.001)
        self.probes += 1

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        self.tunnels.append((stream, on_done))
        stream.bind(on_cancel=lambda reason: self._cancel(stream, on_done, reason), on_writable=lambda: None)

    def _cancel(self, stream: TunnelStream, on_done: Callable[[], None], reason: CancelReason) -> None:
        self.cancels.append(reason)
        stream.fail(StreamError(code=StreamErrorCode.CANCELLED))
        self.tunnels.remove((stream, on_done))
        on_done()

    def finish(self, index: int = 0) -> None:
        stream, on_done = self.tunnels.pop(index)
        stream.start(status=200, headers=[], framing=BodyFraming.LENGTH)
        stream.send_body(b"ok")
        stream.end()
        on_done()

    async def run(self, stream: RunStream) -> None:
        cancelled = asyncio.Event()
        stream.bind(on_cancel=lambda _: cancelled.set(), on_writable=lambda: None)
        if stream.request.target == "broken":
            raise RuntimeError("boom")
        if stream.request.target == "silent":
            return
        stream.emit(RunEvent(type=RunEventType.START))
        try:
            await cancelled.wait()
        finally:
            self.runs_cancelled += 1
        stream.emit(RunEvent(type=RunEventType.CANCELLED))

    def open_artifact(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        stream.start(status=200, headers=[], framing=BodyFraming.LENGTH)
        stream.send_body(uri.encode())
        stream.end()
        on_done()

    async def terminate_session(self, session_id: SessionId) -> None:
        self.ended_sessions.append(session_id)

    def participants(self) -> Sequence[ParticipantInfo]:
        return [
            ParticipantInfo(
                participant_id=ParticipantId(rank), group_id=GroupId("engine"), capabilities=Capabilities()
            )
            for rank in self.ranks
        ]

    async def execute_step(self, call: StepCall, report: ProgressSink) -> StepResult:
        self.steps.append(call)
        await self.step_gate.wait()
        if self.step_error is not None:
            raise self.step_error
        if self.step_failures is not None:
            return StepResult(participants=self.step_failures)
        return StepResult(
            participants=tuple(ParticipantOutcome(participant_id=each) for each in call.participant_ids)
        )

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        return [ParticipantReadBack(participant_id=each, paused=False) for each in participant_ids]


class FakeMaker:
    """Makes fake adapters and remembers them."""

    def __init__(self) -> None:
        self.made: list[FakeAdapter] = []

    def __call__(self, config: AdapterConfig, services: AdapterServices) -> FakeAdapter:
        if config.type != "fake":
            raise InvalidRequest(f"no adapter of type {config.type}")
        adapter = FakeAdapter(config, services)
        self.made.append(adapter)
        return adapter


class FakeCodec:
    """Steps as a table instead of bytes."""

    def __init__(self) -> None:
        self.steps: dict[bytes, Step] = {b"resume": ResumeStep()}
        self.results: list[StepResult] = []

    def decode_step(self, request: bytes, payload: Sequence[bytes]) -> Step:
        try:
            return self.steps[request]
        except KeyError:
            raise InvalidRequest("unknown step") from None

    def encode_progress(self, progress: StepProgress) -> bytes:
        return progress.message.encode()

    def encode_result(self, result: StepResult) -> bytes:
        self.results.append(result)
        return b"result-%d" % len(self.results)

    def encode_info(self, info: ParticipantInfo) -> bytes:
        return info.participant_id.encode()

    def encode_read_back(self, read_back: ParticipantReadBack) -> bytes:
        return b"paused" if read_back.paused else b"running"


@dataclass
class InboundStep:
    """An admin step that came in."""

    step: AdminStep
    payload: Sequence[bytes] = ()
    events: list[AdminStepEvent] = field(default_factory=list)
    results: list[AdminStepResult] = field(default_factory=list)

    def emit(self, event: AdminStepEvent) -> None:
        self.events.append(event)

    def finish(self, result: AdminStepResult) -> None:
        self.results.append(result)


def inbound_step(
    request: bytes = b"resume",
    *,
    operation: str = "op",
    ordinal: int = 1,
    step: int = 1,
    adapter: str = "main",
    ids: tuple[str, ...] = ("r0", "r1"),
    timeout_ms: int = 5000,
) -> InboundStep:
    return InboundStep(
        AdminStep(
            operation_id=operation,
            ordinal=ordinal,
            step=step,
            adapter=adapter,
            group_id="engine",
            participant_ids=ids,
            timeout_ms=timeout_ms,
            request=request,
        )
    )


@dataclass
class InboundQuery:
    """A command or refresh that came in."""

    request: CommandRequest = field(default_factory=lambda: CommandRequest(type=0))  # type: ignore[arg-type]
    config: NodeConfig = field(default_factory=lambda: NodeConfig(config_revision=0))
    answers: list[CommandResponse] = field(default_factory=list)
    refreshes: list[RefreshResponse] = field(default_factory=list)


class InboundCommand(InboundQuery):
    def respond(self, response: CommandResponse) -> None:
        self.answers.append(response)


class InboundRefresh(InboundQuery):
    def respond(self, response: RefreshResponse) -> None:
        self.refreshes.append(response)


class FakeConnection:
    """The Edge as the Node holds it; the test is the Edge."""

    def __init__(self, handler: NodeHandler) -> None:
        self.handler = handler
        self.registered: list[RegisterRequest] = []
        self.readies: list[ReadyRequest] = []
        self.reports: list[ProviderReport] = []
        self.closed_with: CloseReason | None = None

    def register(self, request: RegisterRequest) -> None:
        self.registered.append(request)

    def send_ready(self, request: ReadyRequest) -> None:
        self.readies.append(request)

    def send_report(self, report: ProviderReport) -> None:
        self.reports.append(report)

    def close(self, reason: CloseReason) -> None:
        if self.closed_with is None:
            self.closed_with = reason
            asyncio.get_running_loop().call_soon(self.handler.on_closed, reason)

    def lose(self, reason: CloseReason = CloseReason.CONNECTION_LOST) -> None:
        """The socket goes."""
        self.closed_with = reason
        self.handler.on_closed(reason)


class FakeDialer:
    """Gives one connection per dial, or the next of ``failures``."""

    def __init__(self) -> None:
        self.connections: list[FakeConnection] = []
        self.failures: list[IopError | None] = []
        self.dials = 0
        self.hold: asyncio.Event | None = None

    async def dial(self, handler: NodeHandler) -> NodeConnection:
        self.dials += 1
        if self.hold is not None:
            await self.hold.wait()
        if self.failures:
            failure = self.failures.pop(0)
            if failure is not None:
                raise failure
        connection = FakeConnection(handler)
        self.connections.append(connection)
        return connection


REFUSED = Unavailable("connection refused")
NODE_ID = NodeId("gpu-1")
