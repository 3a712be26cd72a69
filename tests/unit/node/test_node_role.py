"""The assembled Node against an Edge that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from node_doubles import (
    NODE_ID,
    REFUSED,
    FakeAdapter,
    FakeCodec,
    FakeConnection,
    FakeDialer,
    FakeMaker,
    InboundCommand,
    InboundRefresh,
    InboundStep,
    adapter_config,
    inbound_step,
    node_config,
    run_request,
    tunnel_request,
)

from iop.adapters.base import Health
from iop.admin.enums import AdmissionPolicy, PauseMode
from iop.admin.requests import PauseSpec
from iop.admin.steps import PauseStep
from iop.core.errors import InvalidRequest, Unavailable, Unsupported
from iop.node.node import Node, NodeIdentity
from iop.node.supervisor import LinkState, ReconnectPolicy
from iop.testing.adapter_suite import RunRecorder, SystemTestClock, TunnelRecorder
from iop.testing.waiting import PATIENCE_S, eventually
from iop.wire.messages import (
    AdapterConfig,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    CommandType,
    NodeConfig,
    NodeRuntime,
    ReadyAck,
    RefreshOutcome,
    RefreshResponse,
    RegisterResponse,
    RunEventType,
    StreamError,
)

FAST = ReconnectPolicy(interval_s=0.01, attempts_max=None)


class Rig:
    """A running Node and the test's hands on it."""

    def __init__(self, policy: ReconnectPolicy, *, stop_grace_s: float = 5.0) -> None:
        self.dialer = FakeDialer()
        self.maker = FakeMaker()
        self.codec = FakeCodec()
        self.node = Node(
            NodeIdentity(
                node_id=NODE_ID,
                token="secret-token",
                instance_id="i-1",
                software_version="0",
                protocol_version=1,
                adapter_types=("fake",),
            ),
            dialer=self.dialer,
            policy=policy,
            make_adapter=self.maker,
            codec=self.codec,
            clock=SystemTestClock(),
            rng=random.Random(1),
            stop_grace_s=stop_grace_s,
        )
        self.exit_code: int | None = None

    async def main(self) -> None:
        self.exit_code = await self.node.run()

    async def connected(self, count: int = 1) -> FakeConnection:
        await eventually(lambda: len(self.dialer.connections) >= count)
        connection = self.dialer.connections[count - 1]
        await eventually(lambda: bool(connection.registered))
        return connection

    async def ready(self, config: NodeConfig | None = None, *, count: int = 1) -> FakeConnection:
        connection = await self.connected(count)
        connection.handler.on_registered(
            connection, RegisterResponse(accepted=True, node_id=NODE_ID, config=config or node_config(1))
        )
        await eventually(lambda: bool(connection.readies))
        connection.handler.on_ready_ack(connection, ReadyAck(ready=True))
        await eventually(lambda: self.node.state is LinkState.READY)
        return connection

    @property
    def adapter(self) -> FakeAdapter:
        return self.maker.made[-1]

    def tunnel(self, connection: FakeConnection, run_id: str = "run-1", **values: object) -> TunnelRecorder:
        tunnel = TunnelRecorder(tunnel_request(run_id, **values))
        connection.handler.on_tunnel(tunnel)  # type: ignore[arg-type]
        return tunnel

    def run(self, connection: FakeConnection, run_id: str = "run-1", **values: object) -> RunRecorder:
        run = RunRecorder(run_request(run_id, **values))
        connection.handler.on_run(run)  # type: ignore[arg-type]
        return run

    async def refresh(self, connection: FakeConnection, config: NodeConfig) -> RefreshResponse:
        inbound = InboundRefresh(config=config)
        connection.handler.on_refresh(inbound)
        await eventually(lambda: bool(inbound.refreshes))
        return inbound.refreshes[0]

    async def command(self, connection: FakeConnection, request: CommandRequest) -> CommandResponse:
        inbound = InboundCommand(request=request)
        connection.handler.on_command(inbound)
        await eventually(lambda: bool(inbound.answers))
        return inbound.answers[0]

    async def step(self, connection: FakeConnection, inbound: InboundStep) -> InboundStep:
        connection.handler.on_admin_step(inbound)
        await eventually(lambda: bool(inbound.results))
        return inbound

    def in_flight(self) -> int:
        assert self.node.work is not None
        return self.node.work.in_flight


@contextlib.asynccontextmanager
async def running(policy: ReconnectPolicy = FAST, *, stop_grace_s: float = 5.0) -> AsyncIterator[Rig]:
    rig = Rig(policy, stop_grace_s=stop_grace_s)
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(rig.main())
        try:
            yield rig
        finally:
            rig.node.stop()
            rig.node.stop()
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.done(), "the node did not stop"


@pytest.mark.clause("EN-02", "EN-10", "EN-12")
async def test_it_registers_starts_its_adapters_and_then_reports_ready() -> None:
    async with running() as rig:
        connection = await rig.connected()
        assert connection.registered[0].node_id == NODE_ID
        assert connection.registered[0].adapter_types == ("fake",)
        assert "secret-token" not in repr(connection.registered[0])
        assert rig.maker.made == []
        connection.handler.on_registered(
            connection,
            RegisterResponse(
                accepted=True, config=node_config(7, adapter_config(), adapter_config("b", type="none"))
            ),
        )
        await eventually(lambda: bool(connection.readies))
        ready = connection.readies[0]
        assert ready.config_revision == 7
        assert [(each.name, each.started) for each in ready.adapters] == [("main", True), ("b", False)]
        assert rig.adapter.is_started
        assert rig.adapter.probes == 1
        assert rig.node.state is LinkState.HANDSHAKING
        assert connection.reports == []
        connection.handler.on_ready_ack(connection, ReadyAck(ready=True))
        await eventually(lambda: bool(connection.reports))
        assert [each.id for each in connection.reports[0].providers] == ["main", "b"]
        assert [each.info for each in connection.reports[0].participants] == [b"r0", b"r1"]


@pytest.mark.clause("EN-20", "EN-21", "EN-23", "EN-25")
async def test_it_keeps_dialling_an_edge_that_is_not_there() -> None:
    async with running() as rig:
        rig.dialer.failures = [REFUSED] * 5
        await rig.ready()
        assert rig.dialer.dials == 6


@pytest.mark.clause("EN-23", "EN-24")
async def test_a_used_up_budget_ends_with_1() -> None:
    async with running(ReconnectPolicy(interval_s=0, attempts_max=3)) as rig:
        rig.dialer.failures = [REFUSED] * 9
        await eventually(lambda: rig.exit_code is not None)
        assert rig.exit_code == 1
        assert rig.dialer.dials == 3


@pytest.mark.clause("EN-22", "EN-24")
async def test_a_fatal_local_error_ends_with_1_at_once() -> None:
    async with running() as rig:
        rig.dialer.failures = [InvalidRequest("tls.key: not a private key")]
        await eventually(lambda: rig.exit_code is not None)
        assert rig.exit_code == 1
        assert rig.dialer.dials == 1


@pytest.mark.clause("EN-22", "EN-15")
@pytest.mark.parametrize("code", ["bad_token", "unknown_node", "unsupported_version", "identity_contended"])
async def test_every_refusal_by_the_edge_is_retried(code: str) -> None:
    async with running() as rig:
        for count in (1, 2):
            connection = await rig.connected(count)
            connection.handler.on_registered(connection, RegisterResponse(accepted=False, reason_code=code))
            await asyncio.sleep(0)
            assert connection.closed_with is CloseReason.REFUSED
        await rig.ready(count=3)


@pytest.mark.clause("EN-15")
async def test_a_refused_ready_closes_and_reconnects() -> None:
    async with running() as rig:
        connection = await rig.connected()
        connection.handler.on_registered(connection, RegisterResponse(accepted=True, config=node_config(1)))
        await eventually(lambda: bool(connection.readies))
        connection.handler.on_ready_ack(connection, ReadyAck(ready=False, reason_code="superseded"))
        await rig.ready(count=2)
        assert connection.closed_with is CloseReason.REFUSED


@pytest.mark.clause("EN-24")
async def test_stopping_while_dialling_ends_with_0() -> None:
    async with running() as rig:
        rig.dialer.hold = asyncio.Event()
        await eventually(lambda: rig.dialer.dials == 1)
        rig.node.stop()
        await eventually(lambda: rig.exit_code is not None)
        assert rig.exit_code == 0


@pytest.mark.clause("EN-24", "EN-20")
async def test_stopping_while_waiting_ends_with_0() -> None:
    async with running(ReconnectPolicy(interval_s=1000, attempts_max=None)) as rig:
        rig.dialer.failures = [REFUSED]
        await eventually(lambda: rig.node.state is LinkState.WAITING)
        rig.node.stop()
        await eventually(lambda: rig.exit_code is not None)
        assert rig.exit_code == 0


@pytest.mark.clause("EN-23", "EN-25")
async def test_after_a_ready_session_it_is_back_within_a_second() -> None:
    async with running(ReconnectPolicy(interval_s=1000, attempts_max=None)) as rig:
        connection = await rig.ready()
        connection.lose()
        await rig.ready(count=2)
        assert len(rig.maker.made) == 1, "an unchanged adapter goes on over a reconnect"


@pytest.mark.clause("EN-109")
async def test_a_graceful_stop_lets_runs_finish_and_refuses_new_ones() -> None:
    async with running() as rig:
        connection = await rig.ready()
        old = rig.tunnel(connection)
        rig.node.stop()
        await eventually(lambda: rig.node.state is LinkState.STOPPING)
        await eventually(lambda: connection.reports[-1].providers[0].status == "draining")
        new = rig.tunnel(connection, "run-2")
        assert new.error is not None
        assert new.error.code == "node_shutdown"
        assert new.error.before_start
        assert new.error.retryable
        assert connection.closed_with is None
        rig.adapter.finish()
        assert old.ended
        await eventually(lambda: rig.exit_code is not None)
        assert connection.closed_with is CloseReason.SHUTDOWN
        assert rig.exit_code == 0
        assert rig.adapter.is_closed


@pytest.mark.clause("EN-109")
async def test_after_the_grace_the_rest_is_reported_cancelled() -> None:
    async with running(stop_grace_s=0.02) as rig:
        connection = await rig.ready()
        tunnel = rig.tunnel(connection)
        run = rig.run(connection, "run-2")
        rig.node.stop()
        await eventually(lambda: rig.exit_code is not None)
        assert tunnel.error is not None
        assert tunnel.error.code == "cancelled"
        assert run.terminal is not None
        assert run.terminal.type is RunEventType.CANCELLED
        assert rig.adapter.cancels == [CancelReason.NODE_SHUTDOWN]


async def test_a_second_stop_skips_the_grace() -> None:
    async with running(stop_grace_s=1000) as rig:
        connection = await rig.ready()
        tunnel = rig.tunnel(connection)
        rig.node.stop()
        await eventually(lambda: rig.node.state is LinkState.STOPPING)
        await asyncio.sleep(0)
        rig.node.stop()
        await eventually(lambda: rig.exit_code is not None)
        assert tunnel.is_terminal


@pytest.mark.clause("EN-95", "EN-117")
async def test_runs_and_tunnels_share_one_gate_and_a_full_one_says_busy() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.tunnel(connection, "run-1")
        run = rig.run(connection, "run-2")
        await eventually(lambda: bool(run.events))
        tunnel = rig.tunnel(connection, "run-3")
        assert tunnel.error is not None
        assert (tunnel.error.code, tunnel.error.retryable, tunnel.error.before_start) == ("busy", True, True)
        refused = rig.run(connection, "run-4")
        assert refused.terminal is not None
        assert refused.terminal.error is not None
        assert refused.terminal.error.code == "busy"
        rig.adapter.finish()
        assert not rig.tunnel(connection, "run-5").is_terminal


@pytest.mark.clause("EN-95")
async def test_a_long_request_needs_a_long_place() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.tunnel(connection, "run-1", long_context=True)
        assert rig.tunnel(connection, "run-2", long_context=True).error is not None
        assert not rig.tunnel(connection, "run-3").is_terminal


@pytest.mark.clause("EN-117")
async def test_a_place_is_held_until_the_engine_is_done() -> None:
    async with running() as rig:
        connection = await rig.ready(node_config(1, adapter_config(capacity=1)))
        tunnel = rig.tunnel(connection)
        stream, on_done = rig.adapter.tunnels.pop()
        stream.fail(StreamError(code="upstream_error"))
        assert tunnel.is_terminal
        assert rig.tunnel(connection, "run-2").error is not None
        on_done()
        assert not rig.tunnel(connection, "run-3").is_terminal


async def test_an_unknown_adapter_is_refused_before_start() -> None:
    async with running() as rig:
        connection = await rig.ready()
        tunnel = rig.tunnel(connection, adapter="other")
        assert tunnel.error is not None
        assert tunnel.error.code == "unknown_adapter"
        assert tunnel.error.before_start


@pytest.mark.clause("EN-85")
async def test_an_unnamed_adapter_is_named_by_its_type() -> None:
    async with running() as rig:
        connection = await rig.ready(node_config(1, adapter_config("")))
        assert not rig.tunnel(connection, adapter="fake").is_terminal
        assert connection.readies[0].adapters[0].name == "fake"


@pytest.mark.clause("EN-86")
async def test_legacy_concurrency_gates_nothing() -> None:
    async with running() as rig:
        config = replace(node_config(1), runtime=NodeRuntime(concurrency=1))
        connection = await rig.ready(config)
        assert not rig.tunnel(connection, "run-1").is_terminal
        assert not rig.tunnel(connection, "run-2").is_terminal


@pytest.mark.clause("EN-117", "EN-70")
async def test_a_cancel_reaches_the_adapter_and_frees_the_place() -> None:
    async with running() as rig:
        connection = await rig.ready()
        tunnel = rig.tunnel(connection)
        run = rig.run(connection, "run-2")
        await eventually(lambda: bool(run.events))
        tunnel.cancel(CancelReason.CONNECTION_LOST)
        run.cancel(CancelReason.CONNECTION_LOST)
        await eventually(lambda: rig.in_flight() == 0)
        assert rig.adapter.cancels == [CancelReason.CONNECTION_LOST]
        assert rig.adapter.runs_cancelled == 1


async def test_a_run_that_is_cancelled_before_its_first_turn_ends_cancelled() -> None:
    async with running() as rig:
        connection = await rig.ready()
        run = rig.run(connection)
        run.cancel()
        await eventually(lambda: run.terminal is not None)
        assert run.terminal is not None
        assert run.terminal.type is RunEventType.CANCELLED


@pytest.mark.parametrize("target", ["broken", "silent"])
async def test_an_adapter_that_breaks_still_gives_one_terminal(target: str) -> None:
    async with running() as rig:
        connection = await rig.ready()
        run = rig.run(connection, target=target)
        await eventually(lambda: run.terminal is not None and rig.in_flight() == 0)
        assert run.terminal is not None
        assert run.terminal.error is not None
        assert run.terminal.error.code == "internal"


async def test_a_run_ends_when_its_time_is_up() -> None:
    async with running() as rig:
        connection = await rig.ready()
        run = RunRecorder(run_request())
        run.request = replace(run.request, timeout_sec=1)
        connection.handler.on_run(run)  # type: ignore[arg-type]
        await eventually(lambda: run.terminal is not None)
        assert run.terminal is not None
        assert run.terminal.error is not None
        assert run.terminal.error.code == "timeout"
        assert rig.adapter.runs_cancelled == 1


@pytest.mark.clause("EN-70")
async def test_terminating_a_session_ends_its_streams_and_its_state_only() -> None:
    async with running() as rig:
        connection = await rig.ready()
        mine = rig.tunnel(connection, "run-1", session_id="s1")
        other = rig.tunnel(connection, "run-2", session_id="s2")
        connection.handler.on_terminate_session("s1")
        connection.handler.on_terminate_session("unknown")
        connection.handler.on_terminate_session("")
        await eventually(lambda: "unknown" in rig.adapter.ended_sessions)
        assert mine.is_terminal
        assert not other.is_terminal
        assert rig.adapter.ended_sessions[0] == "s1"


@pytest.mark.clause("SF-07", "AD-41")
async def test_a_leaver_of_a_frozen_engine_is_told_at_its_safe_point() -> None:
    async with running() as rig:
        connection = await rig.ready()
        keep = PauseStep(pause=PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE))
        rig.codec.steps[b"keep"] = keep
        tunnel = rig.tunnel(connection)
        await rig.step(connection, inbound_step(b"keep"))
        tunnel.cancel(CancelReason.CLIENT_GONE)
        assert rig.adapter.cancels == []
        assert rig.in_flight() == 1
        await rig.step(connection, inbound_step(operation="op-2", ordinal=2))
        assert rig.adapter.cancels == [CancelReason.CLIENT_GONE]
        assert rig.in_flight() == 0


@pytest.mark.clause("AD-41")
async def test_an_operators_abort_does_not_wait_for_a_safe_point() -> None:
    async with running() as rig:
        connection = await rig.ready()
        keep = PauseStep(pause=PauseSpec(mode=PauseMode.KEEP, admission=AdmissionPolicy.QUEUE))
        rig.codec.steps[b"keep"] = keep
        tunnel = rig.tunnel(connection)
        await rig.step(connection, inbound_step(b"keep"))
        tunnel.cancel(CancelReason.ABORTED_BY_ADMIN)
        assert tunnel.is_terminal


# ---- config refresh ----


@pytest.mark.clause("EN-80", "EN-114")
async def test_a_refresh_starts_what_is_new_and_retires_what_is_gone() -> None:
    async with running() as rig:
        connection = await rig.ready(node_config(1, adapter_config("a"), adapter_config("b")))
        first_a, first_b = rig.maker.made
        on_a = rig.tunnel(connection, "run-1", adapter="a")
        response = await rig.refresh(connection, node_config(2, adapter_config("b"), adapter_config("c")))
        assert response.outcome is RefreshOutcome.APPLIED
        assert response.config_revision == 2
        assert rig.tunnel(connection, "run-2", adapter="a").error is not None
        assert not rig.tunnel(connection, "run-3", adapter="c").is_terminal
        assert not on_a.is_terminal
        assert not first_a.is_closed
        assert not first_b.is_closed
        assert [adapter.config.name for adapter in rig.maker.made] == ["a", "b", "c"]
        first_a.finish()
        assert on_a.ended
        await eventually(lambda: first_a.is_closed)


@pytest.mark.clause("EN-80", "EN-114")
async def test_a_changed_adapter_is_replaced_and_its_streams_finish_on_the_old_one() -> None:
    async with running() as rig:
        connection = await rig.ready()
        old = rig.adapter
        streams = [rig.tunnel(connection, f"run-{n}") for n in range(2)]
        await rig.refresh(connection, node_config(2, adapter_config(targets=("http://new",))))
        assert rig.adapter is not old
        fresh = rig.tunnel(connection, "run-9")
        assert len(rig.adapter.tunnels) == 1
        assert not any(stream.is_terminal for stream in [*streams, fresh])
        old.finish()
        old.finish()
        assert all(stream.ended for stream in streams)
        await eventually(lambda: old.is_closed)


@pytest.mark.clause("EN-80")
@pytest.mark.parametrize(
    "bad",
    [
        adapter_config("new", targets=("http://bad",)),
        adapter_config("new", type="unknown"),
        adapter_config("main", targets=("http://bad",)),
    ],
)
async def test_a_failed_refresh_leaves_the_old_config_running_whole(bad: AdapterConfig) -> None:
    async with running() as rig:
        connection = await rig.ready(node_config(1, adapter_config(), adapter_config("b")))
        before = list(rig.maker.made)
        wanted = node_config(2, adapter_config("c"), bad)
        response = await rig.refresh(connection, wanted)
        assert response.outcome is RefreshOutcome.FAILED
        assert response.config_revision == 1
        assert response.reason
        assert not any(adapter.is_closed for adapter in before)
        assert not rig.tunnel(connection, "run-1").is_terminal
        assert not rig.tunnel(connection, "run-2", adapter="b").is_terminal
        assert rig.tunnel(connection, "run-3", adapter="c").error is not None
        for adapter in rig.maker.made:
            if adapter not in before:
                await eventually(lambda adapter=adapter: adapter.is_closed)  # type: ignore[misc]


@pytest.mark.clause("EN-80", "EN-114")
async def test_the_same_or_an_older_revision_has_no_effect() -> None:
    async with running() as rig:
        connection = await rig.ready(node_config(5))
        for revision in (5, 4):
            response = await rig.refresh(connection, node_config(revision, adapter_config("other")))
            assert response.outcome is RefreshOutcome.APPLIED
            assert response.config_revision == 5
        assert len(rig.maker.made) == 1


@pytest.mark.clause("EN-114")
async def test_a_changed_capacity_only_moves_the_gate() -> None:
    async with running() as rig:
        connection = await rig.ready()
        await rig.refresh(connection, node_config(2, adapter_config(capacity=3)))
        assert len(rig.maker.made) == 1
        for n in range(3):
            assert not rig.tunnel(connection, f"run-{n}").is_terminal
        assert rig.tunnel(connection, "run-9").error is not None


@pytest.mark.clause("EN-80")
async def test_changed_runtime_settings_ask_for_a_new_registration() -> None:
    async with running() as rig:
        connection = await rig.ready()
        config = replace(node_config(2), runtime=NodeRuntime(heartbeat_interval_ms=1000))
        response = await rig.refresh(connection, config)
        assert response.outcome is RefreshOutcome.RESTART_REQUIRED
        assert response.config_revision == 2


async def test_a_disabled_adapter_is_not_started_and_is_no_failure() -> None:
    async with running() as rig:
        connection = await rig.ready()
        response = await rig.refresh(
            connection, node_config(2, adapter_config(), adapter_config("b", enabled=False))
        )
        assert response.outcome is RefreshOutcome.APPLIED
        assert [(each.name, each.started, each.reason) for each in response.adapters] == [
            ("main", True, ""),
            ("b", False, "disabled"),
        ]


# ---- commands ----


@pytest.mark.clause("EN-75", "EN-90")
async def test_commands_tell_state_and_never_execute() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.tunnel(connection, session_id="s1")
        usage = await rig.command(connection, CommandRequest(type=CommandType.USAGE))
        assert usage.figures["main.in_flight"] == "1"
        sessions = await rig.command(connection, CommandRequest(type=CommandType.SESSIONS))
        assert sessions.figures == {"sessions": "1", "session.s1": "1"}
        transport = await rig.command(connection, CommandRequest(type=CommandType.TRANSPORT))
        assert transport.figures["state"] == "ready"
        providers = await rig.command(connection, CommandRequest(type=CommandType.PROVIDERS))
        assert [(each.id, each.category, each.health) for each in providers.providers] == [
            ("main", "local_inference", "ready")
        ]
        capabilities = await rig.command(
            connection, CommandRequest(type=CommandType.CAPABILITIES, adapter="main")
        )
        assert capabilities.providers[0].capabilities["runs"] == "true"
        participants = await rig.command(connection, CommandRequest(type=CommandType.PARTICIPANTS))
        assert [(each.info, each.read_back) for each in participants.participants] == [
            (b"r0", b"running"),
            (b"r1", b"running"),
        ]
        assert not (await rig.command(connection, CommandRequest(type=CommandType.USAGE, adapter="x"))).ok
        assert not (await rig.command(connection, CommandRequest(type=CommandType.UNSPECIFIED))).ok


@pytest.mark.clause("EN-34")
async def test_changes_are_reported_together() -> None:
    async with running() as rig:
        connection = await rig.ready()
        await eventually(lambda: len(connection.reports) >= 1)
        before = len(connection.reports)
        for _ in range(100):
            rig.adapter.services.on_change()
        await eventually(lambda: len(connection.reports) > before)
        await asyncio.sleep(0.1)
        assert len(connection.reports) == before + 1


async def test_an_engine_that_falls_ill_is_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iop.node.providers.PROBE_RETRY_S", 0.01)
    async with running() as rig:
        connection = await rig.ready()
        assert rig.adapter.probes == 1
        rig.adapter.health = Health.OFFLINE
        rig.adapter.services.on_change()
        await eventually(lambda: rig.adapter.probes >= 3)
        await eventually(lambda: connection.reports[-1].providers[0].status == "unavailable")
        assert connection.reports[-1].providers[0].health == "offline"


# ---- admin steps ----


@pytest.mark.clause("EN-108", "EN-120", "AD-36")
async def test_a_step_has_one_effect_however_often_it_comes() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.adapter.step_gate.clear()
        first, second = inbound_step(), inbound_step()
        connection.handler.on_admin_step(first)
        connection.handler.on_admin_step(second)
        await eventually(lambda: len(rig.adapter.steps) == 1)
        rig.adapter.step_gate.set()
        await eventually(lambda: bool(first.results and second.results))
        third = await rig.step(connection, inbound_step())
        assert first.results == second.results == third.results
        assert len(first.results) == 1
        assert len(rig.adapter.steps) == 1


@pytest.mark.clause("EN-117", "AD-36")
async def test_a_step_outlives_its_connection_and_answers_the_retry() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.adapter.step_gate.clear()
        connection.handler.on_admin_step(inbound_step())
        await eventually(lambda: len(rig.adapter.steps) == 1)
        connection.lose()
        again = await rig.ready(count=2)
        retry = inbound_step()
        again.handler.on_admin_step(retry)
        rig.adapter.step_gate.set()
        await eventually(lambda: bool(retry.results))
        assert retry.results[0].outcome == b"result-1"
        assert len(rig.adapter.steps) == 1


@pytest.mark.clause("EN-120")
async def test_an_older_step_is_refused_and_never_reaches_the_engine() -> None:
    async with running() as rig:
        connection = await rig.ready()
        await rig.step(connection, inbound_step(operation="op-9", ordinal=9))
        stale = await rig.step(connection, inbound_step(operation="op-8", ordinal=8))
        assert stale.results[0].refused_code == "stale_step"
        assert len(rig.adapter.steps) == 1


@pytest.mark.clause("EN-120")
@pytest.mark.parametrize(
    ("inbound", "code"),
    [
        (inbound_step(adapter="other"), "unavailable"),
        (inbound_step(ids=("r0", "r9")), "unknown_participant"),
        (inbound_step(ids=()), "unknown_participant"),
        (inbound_step(b"nonsense"), "unsupported"),
    ],
)
async def test_a_step_that_cannot_be_done_is_refused_untouched(inbound: InboundStep, code: str) -> None:
    inbound.results.clear()
    async with running() as rig:
        connection = await rig.ready()
        await rig.step(connection, inbound)
        assert inbound.results[0].refused_code == code
        assert rig.adapter.steps == []


@pytest.mark.parametrize(
    ("error", "code"), [(Unsupported("no"), "unsupported"), (Unavailable("away"), "unavailable")]
)
async def test_an_engine_that_was_not_touched_leaves_the_step_open(error: Exception, code: str) -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.adapter.step_error = error
        refused = await rig.step(connection, inbound_step())
        assert refused.results[0].refused_code == code
        rig.adapter.step_error = None
        done = await rig.step(connection, inbound_step())
        assert done.results[0].outcome == b"result-1"


@pytest.mark.clause("EN-120")
async def test_a_step_whose_time_is_up_fails_every_participant() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.adapter.step_gate.clear()
        await rig.step(connection, inbound_step(timeout_ms=20))
        outcomes = rig.codec.results[0].participants
        assert [(each.participant_id, each.changed) for each in outcomes] == [("r0", True), ("r1", True)]
        assert all(
            each.error is not None and each.error.code.name == "DEADLINE_EXCEEDED" for each in outcomes
        )


async def test_an_adapter_that_breaks_in_a_step_fails_it() -> None:
    async with running() as rig:
        connection = await rig.ready()
        rig.adapter.step_error = RuntimeError("boom")
        await rig.step(connection, inbound_step())
        assert all(each.error is not None for each in rig.codec.results[0].participants)


@pytest.mark.clause("AD-46")
async def test_an_artifact_comes_back_as_a_stream() -> None:
    from iop.core.ids import RunId
    from iop.wire.messages import ArtifactRequest

    async with running() as rig:
        connection = await rig.ready()
        tunnel = TunnelRecorder(tunnel_request())
        request = ArtifactRequest(run_id=RunId("a"), adapter="main", uri="profile/1")
        connection.handler.on_artifact(request, tunnel)  # type: ignore[arg-type]
        assert tunnel.received == b"profile/1"
        assert rig.in_flight() == 0
