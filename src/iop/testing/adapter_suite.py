"""The shared suite that every engine adapter passes, with the doubles it needs.

A test module subclasses :class:`TunnelSuite`, :class:`RunSuite`, :class:`PauseSuite` or :class:`AdminSuite`, supplies
a harness (the adapter and an engine that the test controls) and inherits the tests. The doubles record what an adapter
sends and hold it to
the rules as it sends: a second terminal, a frame after the end or a body before the head fails at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import pytest

from iop.adapters.base import Adapter, AdapterServices
from iop.admin.enums import (
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import DiskSource, PauseSpec, ServingChange
from iop.admin.steps import (
    FlushStep,
    JudgeReconfigureStep,
    PauseStep,
    PrepareWeightsStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    StartProfileStep,
    Step,
    StepCall,
    StepProgress,
    StepResult,
    StopProfileStep,
)
from iop.core.errors import PreconditionFailed, Unavailable, Unsupported
from iop.core.ids import GroupId, OperationId, RunId
from iop.testing.waiting import PATIENCE_S, SOON_S, eventually
from iop.wire.messages import (
    BodyFraming,
    CancelReason,
    Header,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    TunnelRequest,
    Usage,
)


class SystemTestClock:
    """The running loop's clock."""

    def monotonic(self) -> float:
        """Loop time."""
        return asyncio.get_running_loop().time()

    def unix_nanos(self) -> int:
        """A fixed wall clock: tests never look at it."""
        return 1_800_000_000_000_000_000


def adapter_services(on_change: Callable[[], None] = lambda: None) -> AdapterServices:
    """Services for an adapter under test."""
    return AdapterServices(clock=SystemTestClock(), on_change=on_change)


class TunnelRecorder:
    """A tunnel stream that keeps what it was given and checks the order of calls (EN-52)."""

    def __init__(
        self, request: TunnelRequest, body: Sequence[bytes] = (), *, window_bytes: int = 256 * 1024
    ) -> None:
        self.request = request
        self.body = body
        self.credit_bytes = window_bytes
        self.status: int | None = None
        self.headers: list[Header] = []
        self.framing: BodyFraming | None = None
        self.pieces: list[bytes] = []
        self.usage: list[Usage] = []
        self.error: StreamError | None = None
        self.ended = False
        self.done_count = 0
        self.late_calls = 0
        self._on_cancel: Callable[[CancelReason], None] | None = None
        self._on_writable: Callable[[], None] | None = None

    @property
    def received(self) -> bytes:
        """All body bytes so far."""
        return b"".join(self.pieces)

    @property
    def is_terminal(self) -> bool:
        """Whether END or ERROR came."""
        return self.ended or self.error is not None

    @property
    def is_bound(self) -> bool:
        """Whether a cancel would find its way."""
        return self._on_cancel is not None

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Keep the callbacks."""
        self._on_cancel = on_cancel
        self._on_writable = on_writable

    def start(self, *, status: int, headers: Sequence[Header], framing: BodyFraming) -> None:
        """Record the head; only one, and before any body."""
        assert self.status is None, "two response heads"
        assert not self.pieces, "a head after body"
        assert not self.is_terminal, "a head after the end"
        self.status, self.headers, self.framing = status, list(headers), framing

    def send_body(self, data: bytes) -> None:
        """Record body bytes and spend credit."""
        assert self.status is not None, "body before the head"
        assert not self.is_terminal, "body after the end"
        assert data, "an empty piece"
        self.pieces.append(data)
        self.credit_bytes -= len(data)

    def send_usage(self, usage: Usage) -> None:
        """Record an observation."""
        assert not self.is_terminal, "usage after the end"
        self.usage.append(usage)

    def end(self) -> None:
        """The answer is whole."""
        if self.is_terminal:
            self.late_calls += 1
            return
        assert self.status is not None, "an end without a head"
        self.ended = True

    def fail(self, error: StreamError) -> None:
        """The answer ended badly."""
        if self.is_terminal:
            self.late_calls += 1
            return
        self.error = error

    def on_done(self) -> None:
        """Given to the adapter: nothing of it is left."""
        self.done_count += 1

    def cancel(self, reason: CancelReason = CancelReason.CLIENT_GONE) -> None:
        """Cancel, as the connection would: at most once."""
        on_cancel, self._on_cancel = self._on_cancel, None
        if on_cancel is not None:
            on_cancel(reason)

    def grant(self, size_bytes: int) -> None:
        """Return credit, as the Edge would."""
        was_blocked = self.credit_bytes <= 0
        self.credit_bytes += size_bytes
        if was_blocked and self.credit_bytes > 0 and self._on_writable is not None:
            self._on_writable()

    async def finished(self) -> None:
        """Wait for the terminal and for the adapter to be done with it."""
        await eventually(lambda: self.is_terminal and self.done_count > 0)
        assert self.done_count == 1


class RunRecorder:
    """A run stream that keeps its events and checks their order (EN-40)."""

    def __init__(self, request: RunRequest, *, window_bytes: int = 256 * 1024) -> None:
        self.request = request
        self.credit_bytes = window_bytes
        self.events: list[RunEvent] = []
        self.late_events = 0
        self._on_cancel: Callable[[CancelReason], None] | None = None
        self._on_writable: Callable[[], None] | None = None

    @property
    def terminal(self) -> RunEvent | None:
        """The terminal event, once there."""
        return self.events[-1] if self.events and self.events[-1].type.is_terminal else None

    @property
    def text(self) -> str:
        """Joined deltas of output 0."""
        return "".join(event.delta for event in self.events if event.output_index == 0)

    def bind(self, *, on_cancel: Callable[[CancelReason], None], on_writable: Callable[[], None]) -> None:
        """Keep the callbacks."""
        self._on_cancel = on_cancel
        self._on_writable = on_writable

    def emit(self, event: RunEvent) -> None:
        """Record one event."""
        if self.terminal is not None:
            self.late_events += 1
            return
        if event.type is RunEventType.START:
            assert not self.events, "START is the first event"
        elif event.type in {RunEventType.DELTA, RunEventType.COMPLETE}:
            assert self.events, "START comes first"
        self.events.append(event)
        self.credit_bytes -= len(event.delta.encode()) + len(event.reasoning_delta.encode())

    def cancel(self, reason: CancelReason = CancelReason.CLIENT_GONE) -> None:
        """Cancel, as the connection would."""
        on_cancel, self._on_cancel = self._on_cancel, None
        if on_cancel is not None:
            on_cancel(reason)

    def grant(self, size_bytes: int) -> None:
        """Return credit."""
        was_blocked = self.credit_bytes <= 0
        self.credit_bytes += size_bytes
        if was_blocked and self.credit_bytes > 0 and self._on_writable is not None:
            self._on_writable()


# ---- a raw HTTP engine whose every byte the test decides ----


@dataclass(slots=True)
class UpstreamRequest:
    """One request as the upstream read it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: UpstreamConnection

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(slots=True)
class UpstreamConnection:
    """One connection of the upstream; scripts write to it and see when the peer leaves."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_closed: bool = False
    request_count: int = 0

    async def write(self, data: bytes) -> None:
        """Write and wait for the socket."""
        self.writer.write(data)
        await self.writer.drain()

    def close(self) -> None:
        """Close politely."""
        self.writer.close()

    def reset(self) -> None:
        """Close with a reset."""
        self.writer.transport.abort()

    async def wait_closed_by_peer(self) -> None:
        """Wait until the peer closed; bounded."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if not await self.reader.read(65536):
                        break
                except ConnectionError:
                    break
        self.is_closed = True


UpstreamScript = Callable[[UpstreamRequest], Awaitable[None]]


@dataclass(slots=True)
class ScriptedUpstream:
    """A raw HTTP/1.1 server: reads whole requests, then lets ``script`` write whatever bytes it likes."""

    script: UpstreamScript
    requests: list[UpstreamRequest] = field(default_factory=list)
    connections: list[UpstreamConnection] = field(default_factory=list)
    port: int = 0
    tls: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedUpstream]:
        """Listen on a free port until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for connection in self.connections:
                connection.writer.transport.abort()
            async with asyncio.timeout(PATIENCE_S):
                await server.wait_closed()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = UpstreamConnection(len(self.connections), reader, writer)
        self.connections.append(connection)
        try:
            while True:
                request = await self._read(connection)
                if request is None:
                    break
                connection.request_count += 1
                self.requests.append(request)
                await self.script(request)
                if writer.is_closing():
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            connection.is_closed = True
            writer.close()

    @staticmethod
    async def _read(connection: UpstreamConnection) -> UpstreamRequest | None:
        head = await connection.reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = [
            (name, value.strip()) for name, _, value in (line.partition(":") for line in lines[1:] if line)
        ]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        body = await connection.reader.readexactly(length)
        return UpstreamRequest(method, path, headers, body, connection)


def plain_answer(body: bytes = b'{"ok":true}', *, status: str = "200 OK", extra: bytes = b"") -> bytes:
    """A length-delimited answer."""
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status.encode(),
        extra,
        len(body),
        body,
    )


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


# ---- the shared tests ----


class TunnelHarness(Protocol):
    """An adapter in front of a scripted upstream."""

    adapter: Adapter
    upstream: ScriptedUpstream

    def request(self, *, stream: bool = True, operation: str = "chat_completions") -> TunnelRequest:
        """A well-formed tunnel request."""
        ...

    def unreachable(self) -> contextlib.AbstractAsyncContextManager[Adapter]:
        """The same adapter kind in front of nobody."""
        ...


class TunnelSuite:
    """What every adapter that tunnels must do. Subclasses supply ``harness`` as an async fixture."""

    async def test_answer_passes_byte_for_byte(self, harness: TunnelHarness) -> None:
        """EN-53."""
        events = [b'data: {"a":"\xf0\x9f\x9a\x80"}\r\n\r\n', b": comment\n", b"data: [DONE]\n\n"]

        async def script(request: UpstreamRequest) -> None:
            await request.connection.write(CHUNKED_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK)

        harness.upstream.script = script
        tunnel = TunnelRecorder(harness.request(), (b'{"mod', b'el":"m"}'))
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        assert tunnel.is_bound
        await tunnel.finished()
        assert tunnel.ended
        assert tunnel.status == 200
        assert tunnel.framing is BodyFraming.CHUNKED
        assert tunnel.received == b"".join(events)
        assert harness.upstream.requests[-1].body == b'{"model":"m"}'

    async def test_cancel_in_mid_stream_closes_the_engine_connection(self, harness: TunnelHarness) -> None:
        """EN-56, SF-07."""

        async def script(request: UpstreamRequest) -> None:
            await request.connection.write(CHUNKED_HEAD + chunk(b"data: 1\n\n"))
            await request.connection.wait_closed_by_peer()

        harness.upstream.script = script
        tunnel = TunnelRecorder(harness.request())
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        await eventually(lambda: bool(tunnel.pieces))
        tunnel.cancel()
        await eventually(lambda: harness.upstream.requests[-1].connection.is_closed, within_s=SOON_S)
        await tunnel.finished()
        assert tunnel.error is not None
        assert tunnel.error.code == "cancelled"
        assert not tunnel.error.before_start

    async def test_cancel_before_the_head_closes_the_engine_connection(self, harness: TunnelHarness) -> None:
        """EN-56."""

        async def script(request: UpstreamRequest) -> None:
            await request.connection.wait_closed_by_peer()

        harness.upstream.script = script
        tunnel = TunnelRecorder(harness.request())
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        await eventually(lambda: bool(harness.upstream.requests))
        tunnel.cancel()
        await eventually(lambda: harness.upstream.requests[-1].connection.is_closed, within_s=SOON_S)
        await tunnel.finished()
        assert tunnel.error is not None
        assert tunnel.error.code == "cancelled"
        assert tunnel.status is None

    async def test_a_cancel_after_the_end_changes_nothing(self, harness: TunnelHarness) -> None:
        """EN-57."""

        async def script(request: UpstreamRequest) -> None:
            await request.connection.write(plain_answer())

        harness.upstream.script = script
        tunnel = TunnelRecorder(harness.request(stream=False))
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        await tunnel.finished()
        tunnel.cancel()
        assert tunnel.ended
        assert tunnel.late_calls == 0
        assert tunnel.done_count == 1

    async def test_a_reader_that_stops_costs_its_window_and_one_read(self, harness: TunnelHarness) -> None:
        """EN-102."""
        whole = 8 * 1024 * 1024
        piece = b"x" * 4096

        async def script(request: UpstreamRequest) -> None:
            await request.connection.write(CHUNKED_HEAD)
            for _ in range(whole // len(piece)):
                await request.connection.write(chunk(piece))
            await request.connection.write(LAST_CHUNK)

        harness.upstream.script = script
        window = 64 * 1024
        tunnel = TunnelRecorder(harness.request(), window_bytes=window)
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        await eventually(lambda: tunnel.credit_bytes <= 0)
        stopped_at = len(tunnel.received)
        assert stopped_at <= window + 64 * 1024
        other = TunnelRecorder(harness.request(), window_bytes=whole * 2)
        harness.adapter.open_tunnel(other, other.on_done)
        await other.finished()
        assert len(tunnel.received) == stopped_at, "a stopped reader was sent more"
        while not tunnel.is_terminal:
            tunnel.grant(window)
            await asyncio.sleep(0)
        assert len(tunnel.received) == whole
        assert tunnel.ended

    async def test_an_unreachable_engine_is_told_as_unsent(self, harness: TunnelHarness) -> None:
        """EN-112: may be dispatched again."""
        async with harness.unreachable() as adapter:
            tunnel = TunnelRecorder(harness.request())
            adapter.open_tunnel(tunnel, tunnel.on_done)
            await tunnel.finished()
            assert tunnel.error is not None
            assert tunnel.error.code == "connect_failed"
            assert tunnel.error.before_start
            assert tunnel.error.retryable
            assert "127.0.0.1" not in tunnel.error.message

    async def test_a_cut_answer_is_told_as_truncated(self, harness: TunnelHarness) -> None:
        """EN-112."""

        async def script(request: UpstreamRequest) -> None:
            await request.connection.write(CHUNKED_HEAD + chunk(b"data: 1\n\n"))
            request.connection.reset()

        harness.upstream.script = script
        tunnel = TunnelRecorder(harness.request())
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        await tunnel.finished()
        assert tunnel.error is not None
        assert tunnel.error.code == "upstream_truncated"
        assert not tunnel.error.before_start

    async def test_closing_the_adapter_ends_its_tunnels(self, harness: TunnelHarness) -> None:
        """EN-109."""

        async def script(request: UpstreamRequest) -> None:
            await request.connection.write(CHUNKED_HEAD)
            await request.connection.wait_closed_by_peer()

        harness.upstream.script = script
        tunnel = TunnelRecorder(harness.request())
        harness.adapter.open_tunnel(tunnel, tunnel.on_done)
        await eventually(lambda: tunnel.status is not None)
        await harness.adapter.aclose()
        await tunnel.finished()
        assert tunnel.error is not None
        late = TunnelRecorder(harness.request())
        harness.adapter.open_tunnel(late, late.on_done)
        await late.finished()
        assert late.error is not None
        assert late.error.before_start


class RunHarness(Protocol):
    """An adapter in front of an engine that the test can hold."""

    adapter: Adapter

    def request(self, *, max_tokens: int = 8) -> RunRequest:
        """A run that gives ``max_tokens`` deltas unless it is held."""
        ...

    def hold(self) -> None:
        """Let the engine stop after its next delta, until cancelled."""
        ...

    def engine_in_flight(self) -> int:
        """Requests at the engine now."""
        ...

    def unreachable(self) -> contextlib.AbstractAsyncContextManager[Adapter]:
        """The same adapter kind in front of nobody."""
        ...


class RunSuite:
    """What every adapter with normalised runs must do. Subclasses supply ``harness`` as an async fixture."""

    async def test_a_run_starts_streams_and_completes_once(self, harness: RunHarness) -> None:
        """EN-40."""
        run = RunRecorder(harness.request(max_tokens=5))
        async with asyncio.timeout(PATIENCE_S):
            await harness.adapter.run(run)
        kinds = [event.type for event in run.events]
        assert kinds[0] is RunEventType.START
        assert kinds[-1] is RunEventType.COMPLETE
        assert set(kinds[1:-1]) == {RunEventType.DELTA}
        assert run.text
        terminal = run.events[-1]
        assert terminal.finish_reasons
        assert terminal.usage is not None
        assert terminal.usage.completion_tokens == 5
        assert run.late_events == 0

    async def test_a_cancelled_run_leaves_the_engine_within_a_second(self, harness: RunHarness) -> None:
        """EN-56, EN-70, SF-07."""
        harness.hold()
        run = RunRecorder(harness.request())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(harness.adapter.run(run))
            await eventually(lambda: any(event.delta for event in run.events))
            assert harness.engine_in_flight() == 1
            run.cancel()
            await eventually(lambda: harness.engine_in_flight() == 0, within_s=SOON_S)
        assert run.terminal is not None
        assert run.terminal.type is RunEventType.CANCELLED

    async def test_a_run_whose_task_is_cancelled_leaves_the_engine(self, harness: RunHarness) -> None:
        """EN-117: the connection dropped."""
        harness.hold()
        run = RunRecorder(harness.request())
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(harness.adapter.run(run))
            await eventually(lambda: harness.engine_in_flight() == 1)
            task.cancel()
            await eventually(lambda: harness.engine_in_flight() == 0, within_s=SOON_S)

    async def test_a_run_on_an_unreachable_engine_fails_unsent(self, harness: RunHarness) -> None:
        """EN-112."""
        async with harness.unreachable() as adapter:
            run = RunRecorder(harness.request())
            async with asyncio.timeout(PATIENCE_S):
                await adapter.run(run)
            assert run.terminal is not None
            assert run.terminal.type is RunEventType.ERROR
            assert run.terminal.error is not None
            assert run.terminal.error.before_start
            assert run.terminal.error.retryable

    async def test_a_run_stops_at_its_window_and_goes_on(self, harness: RunHarness) -> None:
        """EN-102."""
        run = RunRecorder(harness.request(max_tokens=64), window_bytes=16)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(harness.adapter.run(run))
            await eventually(lambda: run.credit_bytes <= 0)
            seen = len(run.text)
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert len(run.text) == seen
            while run.terminal is None:
                run.grant(64)
                await asyncio.sleep(0.001)
        assert run.terminal.type is RunEventType.COMPLETE


class AdminHarness(Protocol):
    """An adapter with admin in front of an engine that is running."""

    adapter: Adapter

    def unreachable(self) -> contextlib.AbstractAsyncContextManager[Adapter]:
        """The same adapter kind in front of nobody."""
        ...


def step_call(
    adapter: Adapter, body: Step, *, operation: str = "op-1", ordinal: int = 1, step: int = 1
) -> StepCall:
    """A step for all participants of the adapter's first group."""
    first = adapter.participants()[0]
    ids = tuple(each.participant_id for each in adapter.participants() if each.group_id == first.group_id)
    return StepCall(
        operation_id=OperationId(operation),
        ordinal=ordinal,
        step=step,
        group_id=GroupId(first.group_id),
        participant_ids=ids,
        body=body,
        timeout_s=PATIENCE_S,
    )


def assert_all_ok(result: StepResult) -> None:
    """Every participant succeeded."""
    assert [outcome.error for outcome in result.participants if outcome.error is not None] == []


EVERY_OPERATION: Final[Mapping[AdminOperationKind, Step]] = {
    AdminOperationKind.FLUSH_CACHES: FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL),
    AdminOperationKind.RELEASE_RESOURCES: ReleaseStep(
        kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.DISCARD
    ),
    AdminOperationKind.RESTORE_RESOURCES: RestoreStep(kinds=(ResourceKind.WEIGHTS,)),
    AdminOperationKind.UPDATE_WEIGHTS: PrepareWeightsStep(
        model="m",
        source=DiskSource(path="/nowhere", format=WeightFormat.SAFETENSORS),
        weight_version="v",
    ),
    AdminOperationKind.START_PROFILE: StartProfileStep(profile_id="p", kinds=(ProfilerKind.CPU,), label="x"),
    AdminOperationKind.STOP_PROFILE: StopProfileStep(profile_id="p"),
    AdminOperationKind.RECONFIGURE_SERVING: JudgeReconfigureStep(
        changes=(ServingChange(field=ReconfigurableField.DATA_PARALLEL_SIZE, value=2),)
    ),
}
"""One step of each operation beside pause and resume."""


class PauseSuite:
    """What every adapter must do about a pause, whatever its engine can. Subclasses supply ``harness``."""

    async def test_participants_are_told_with_what_they_offer(self, harness: AdminHarness) -> None:
        """AD-50."""
        await harness.adapter.probe()
        participants = harness.adapter.participants()
        assert participants
        assert all(each.group_id and each.participant_id for each in participants)
        assert all(each.capabilities.operations for each in participants)

    async def test_pause_and_resume_are_read_back(self, harness: AdminHarness) -> None:
        """AD-37."""
        await harness.adapter.probe()
        pause = PauseStep(pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE))
        reports: list[StepProgress] = []
        call = step_call(harness.adapter, pause)
        assert_all_ok(await harness.adapter.execute_step(call, reports.append))
        assert all(each.paused for each in await harness.adapter.read_back(call.participant_ids))
        resume = step_call(harness.adapter, ResumeStep(), operation="op-2", ordinal=2)
        assert_all_ok(await harness.adapter.execute_step(resume, reports.append))
        assert not any(each.paused for each in await harness.adapter.read_back(call.participant_ids))

    async def test_resume_of_a_running_engine_is_a_no_op(self, harness: AdminHarness) -> None:
        """AD-37."""
        await harness.adapter.probe()
        result = await harness.adapter.execute_step(step_call(harness.adapter, ResumeStep()), lambda _: None)
        assert_all_ok(result)

    async def test_what_is_not_offered_is_refused_before_anything_is_touched(
        self, harness: AdminHarness
    ) -> None:
        """AD-15."""
        await harness.adapter.probe()
        offered = harness.adapter.participants()[0].capabilities.operations
        for operation, step in EVERY_OPERATION.items():
            if operation not in offered:
                with pytest.raises(Unsupported, match=operation.name.lower().replace("_", " ")):
                    await harness.adapter.execute_step(step_call(harness.adapter, step), lambda _: None)


class AdminSuite(PauseSuite):
    """What every adapter with an engine's control must do besides. Subclasses supply ``harness``."""

    async def test_flush_says_cleared_only_after_read_back(self, harness: AdminHarness) -> None:
        """AD-40."""
        await harness.adapter.probe()
        flush = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.WAIT)
        result = await harness.adapter.execute_step(step_call(harness.adapter, flush), lambda _: None)
        assert_all_ok(result)
        for outcome in result.participants:
            assert [cache.outcome for cache in outcome.caches] == [CacheOutcome.CLEARED]

    async def test_an_unreachable_engine_is_told_not_guessed(self, harness: AdminHarness) -> None:
        """AD-37."""
        await harness.adapter.probe()
        call = step_call(harness.adapter, ResumeStep())
        async with harness.unreachable() as adapter:
            answers = await adapter.read_back(call.participant_ids)
            assert [each.reachable for each in answers] == [False] * len(call.participant_ids)
            try:
                result = await adapter.execute_step(call, lambda _: None)
            except (Unavailable, PreconditionFailed):
                return
            assert all(outcome.error is not None for outcome in result.participants)


def tunnel_request(
    *, adapter: str = "main", operation: str = "chat_completions", stream: bool = True
) -> TunnelRequest:
    """A tunnel request with the headers of an ordinary caller."""
    return TunnelRequest(
        run_id=RunId("run-1"),
        adapter=adapter,
        target="m",
        operation=operation,
        headers=((b"Content-Type", b"application/json"), (b"X-Custom", b"kept")),
        stream=stream,
    )
