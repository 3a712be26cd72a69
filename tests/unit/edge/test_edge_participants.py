"""Admin participants over scripted Nodes: discovery, gates, steps, quiescing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from iop.admin.enums import (
    AdminErrorCode,
    AdmissionPolicy,
    DrainTimeoutAction,
    PauseMode,
    ReconfigurableField,
    WeightFormat,
)
from iop.admin.participant import AdmissionGate
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import DiskSource, PauseSpec
from iop.admin.steps import (
    FlushStep,
    ParticipantOutcome,
    ParticipantReadBack,
    PauseStep,
    ResumeStep,
    StepCall,
    StepResult,
    WorkCounts,
)
from iop.core.errors import PreconditionFailed
from iop.core.ids import GroupId, OperationId, ParticipantId
from iop.edge.calls import Outcome
from iop.edge.pools import GateMode
from iop.net.admin_steps import AdminStepCodec
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingSink,
    adapter_spec,
    provider_key,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.testing.waiting import eventually
from iop.wire.messages import (
    AdminStepResult,
    CommandResponse,
    CommandType,
    ParticipantReport,
    ProviderReport,
    StreamErrorCode,
)

CODEC = AdminStepCodec()
KEY = provider_key("n1/main")
GROUP = GroupId("n1/main")
RANKS = (ParticipantId("n1/main/0"), ParticipantId("n1/main/1"))
ADMINISTERED = {"n1/main": adapter_spec("main", capacity=4, is_administered=True)}
FAST = {"fast": ["n1/main"]}
OPEN = AdmissionGate(is_open=True)


class EngineBehind:
    """What the Node's engine says of its two ranks."""

    def __init__(self) -> None:
        self.instance = "boot-1"
        self.version = "v1"
        self.told = True
        self.asked = 0
        self.result = StepResult(
            participants=tuple(
                ParticipantOutcome(participant_id=ParticipantId(f"rank-{rank}")) for rank in (0, 1)
            )
        )
        self.refusal = ""

    def reports(self):
        return tuple(
            ParticipantReport(
                adapter="main",
                info=CODEC.encode_info(
                    ParticipantInfo(
                        participant_id=ParticipantId(f"rank-{rank}"),
                        group_id=GroupId("engine"),
                        capabilities=Capabilities(pause_modes=frozenset(PauseMode)),
                        rank=rank,
                        instance=self.instance,
                        models=("Real-Name",),
                    )
                ),
                read_back=CODEC.encode_read_back(
                    ParticipantReadBack(
                        participant_id=ParticipantId(f"rank-{rank}"),
                        instance=self.instance,
                        paused=False,
                        weight_version=self.version,
                    )
                ),
            )
            for rank in (1, 0)
        )

    def command(self, request):
        assert request.type is CommandType.PARTICIPANTS
        self.asked += 1
        if not self.told:
            return CommandResponse(type=request.type, ok=False, reason="the engine does not answer")
        return CommandResponse(type=request.type, ok=True, participants=self.reports())

    def step(self, step):
        if self.refusal:
            return AdminStepResult(
                operation_id=step.operation_id,
                step=step.step,
                refused_code=self.refusal,
                refused_reason="because",
            )
        return AdminStepResult(
            operation_id=step.operation_id, step=step.step, outcome=CODEC.encode_result(self.result)
        )


def connect(edge, engine, **more):
    node = FakeEdgeConnection(edge.nodes, **more)
    node.answer_command = engine.command
    node.answer_step = engine.step
    return node.connect()


def call(body, *, step=1, timeout_s=5.0):
    return StepCall(
        operation_id=OperationId("op-1"),
        ordinal=7,
        step=step,
        group_id=GROUP,
        participant_ids=RANKS,
        body=body,
        timeout_s=timeout_s,
    )


def pause(mode, **more):
    return PauseStep(pause=PauseSpec(mode=mode, admission=AdmissionPolicy.QUEUE, **more))


@pytest.fixture
async def fleet(make_edge):
    """An Edge, its engine and Node, ranks known and gates open."""
    edge = await make_edge(snapshot_of(ADMINISTERED, FAST))
    engine = EngineBehind()
    node = connect(edge, engine)
    await eventually(lambda: edge.participants.participants()[0].connected)
    await edge.participants.apply_gates(dict.fromkeys(RANKS, OPEN))
    return edge, engine, node


@pytest.mark.clause("EN-32", "AD-35", "AD-19")
async def test_a_node_that_came_takes_nothing_until_every_rank_was_opened(make_edge):
    edge = await make_edge(snapshot_of(ADMINISTERED, FAST))
    changes = []
    edge.participants.attach(lambda: changes.append(len(edge.participants.participants())))
    (untold,) = edge.participants.participants()
    assert (untold.participant_id, untold.group_id, untold.connected) == (GROUP, GROUP, False)
    assert (untold.models, untold.node, untold.provider) == (("fast",), "n1", "main")
    node = connect(edge, EngineBehind())
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await eventually(lambda: changes and changes[-1] == 2)
        infos = edge.participants.participants()
        assert [info.participant_id for info in infos] == list(RANKS)
        assert {info.group_id for info in infos} == {GROUP}
        assert infos[0].models == ("fast",)
        assert (infos[0].node, infos[0].provider, infos[0].connected) == ("n1", "main", True)
        await edge.participants.apply_gates({RANKS[0]: OPEN})
        await asyncio.sleep(0)
        assert not waiting.done()
        assert edge.pools.roster.gate_of(KEY).held_by == ("reconciliation",)
        await edge.participants.apply_gates({RANKS[1]: OPEN})
    assert len(node.streams) == 1


async def test_a_silent_engine_is_asked_again_and_status_says_why_it_takes_nothing(make_edge):
    edge = await make_edge(snapshot_of(ADMINISTERED, FAST))
    engine = EngineBehind()
    engine.told = False
    connect(edge, engine)
    await eventually(lambda: engine.asked == 1)
    provider = edge.status.status()["nodes"][0]["providers"][0]
    assert provider["gates"] == ["reconciliation"]
    assert "the engine does not answer" in provider["reason"]
    engine.told = True
    await eventually(edge.participants.participants)


@pytest.mark.clause("AD-39", "AD-31")
@pytest.mark.parametrize(
    ("gate", "mode"),
    [
        (AdmissionGate(is_open=False, held_by=("epoch 3",)), GateMode.QUEUE),
        (
            AdmissionGate(is_open=False, admission=AdmissionPolicy.REJECT, held_by=("epoch 3",)),
            GateMode.REJECT,
        ),
        (
            AdmissionGate(is_open=False, admission=AdmissionPolicy.REJECT, held_by=("quarantine",)),
            GateMode.QUARANTINED,
        ),
        (AdmissionGate(is_open=False, held_by=("reconciliation",)), GateMode.RECONCILING),
    ],
)
async def test_one_closed_rank_closes_its_provider_and_says_who_holds_it(fleet, gate, mode):
    edge, _, _ = fleet
    await edge.participants.apply_gates({RANKS[1]: gate})
    assert edge.pools.roster.gate_of(KEY).mode is mode
    assert edge.pools.roster.gate_of(KEY).held_by == gate.held_by
    await edge.participants.apply_gates({RANKS[1]: OPEN})
    assert edge.pools.roster.gate_of(KEY).is_open


@pytest.mark.clause("AD-36", "EN-120")
async def test_a_step_travels_in_the_nodes_words_and_its_answer_comes_back_in_ours(fleet):
    edge, _, node = fleet
    result = await edge.participants.execute(call(FlushStep(kinds=(), busy_policy=1)), lambda _: None)
    (sent,) = node.steps
    assert (sent.operation_id, sent.ordinal, sent.step) == ("op-1", 7, 1)
    assert (sent.adapter, sent.group_id, sent.participant_ids) == ("main", "engine", ("rank-0", "rank-1"))
    assert [outcome.participant_id for outcome in result.participants] == list(RANKS)


@pytest.mark.clause("AD-36", "EN-117")
async def test_a_step_cut_by_a_lost_connection_is_sent_again_with_the_same_number(fleet):
    edge, engine, node = fleet
    node.answer_step = None  # no answer: the connection breaks under it
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(edge.participants.execute(call(ResumeStep(), step=4), lambda _: None))
        await eventually(lambda: node.steps)
        node.lose()
        again = connect(edge, engine)
    assert [step.step for step in again.steps] == [4]
    assert all(outcome.error is None for outcome in running.result().participants)


@pytest.mark.clause("AD-36")
async def test_refusals_of_the_node_become_errors_of_the_core(fleet):
    edge, engine, _ = fleet
    engine.refusal = "stale_step"
    with pytest.raises(PreconditionFailed) as stale:
        await edge.participants.execute(call(ResumeStep()), lambda _: None)
    assert stale.value.reason == "STALE_STEP"
    engine.refusal = "unsupported"
    result = await edge.participants.execute(call(ResumeStep()), lambda _: None)
    assert {(o.error.message, o.changed) for o in result.participants} == {("because", False)}


@pytest.mark.clause("AD-25", "AD-36")
async def test_a_step_waits_for_an_engine_that_is_away_as_for_its_node(fleet, monkeypatch):
    monkeypatch.setattr("iop.edge.participants.AWAY_RETRY_S", 0.001)
    edge, engine, node = fleet
    engine.refusal = "unavailable"
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(edge.participants.execute(call(ResumeStep(), step=4), lambda _: None))
        await eventually(lambda: len(node.steps) > 2)
        engine.refusal = ""
    assert {step.step for step in node.steps} == {4}
    assert all(outcome.error is None for outcome in running.result().participants)


@pytest.mark.clause("AD-25")
async def test_an_engine_that_stays_away_is_lost(fleet, monkeypatch):
    monkeypatch.setattr("iop.edge.participants.AWAY_RETRY_S", 0.001)
    edge, engine, _ = fleet
    edge.apply_snapshot(replace(snapshot_of(ADMINISTERED, FAST, revision=2), participant_lost_s=0.01))
    engine.refusal = "unavailable"
    result = await edge.participants.execute(call(ResumeStep()), lambda _: None)
    assert {o.error.code for o in result.participants} == {AdminErrorCode.PARTICIPANT_LOST}


@pytest.mark.clause("AD-41", "AD-39")
async def test_a_draining_pause_waits_for_the_edges_own_work_before_the_engine_is_told(fleet):
    edge, engine, node = fleet
    engine.result = StepResult(participants=engine.result.participants, work=WorkCounts(drained=1))
    sink = RecordingSink()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(edge.participants.execute(call(pause(PauseMode.DRAIN)), lambda _: None))
        for _ in range(20):
            await asyncio.sleep(0)
        assert node.steps == []
        node.streams[0].start()
        node.streams[0].end()
    assert len(node.steps) == 1
    assert running.result().work.drained == 2, "one here, one that used the engine directly"


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-41")
async def test_a_drain_that_runs_out_of_time_fails_or_aborts_as_asked(fleet):
    edge, _, node = fleet
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast", request_id="req-7"), tunnel_to(sink))
    fails = pause(PauseMode.DRAIN, drain_timeout_ms=20, on_drain_timeout=DrainTimeoutAction.FAIL)
    result = await edge.participants.execute(call(fails), lambda _: None)
    assert {o.error.code for o in result.participants} == {AdminErrorCode.DRAIN_TIMEOUT}
    assert {o.error.message for o in result.participants} == {"work was still running: req-7"}
    assert node.steps == []
    assert handle.outcome is None
    aborts = pause(PauseMode.DRAIN, drain_timeout_ms=20, on_drain_timeout=DrainTimeoutAction.ABORT)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(edge.participants.execute(call(aborts), lambda _: None))
        await eventually(lambda: node.streams[0].cancelled)
        node.streams[0].fail(StreamErrorCode.CANCELLED)
    assert running.result().work.aborted == 1
    assert handle.outcome is Outcome.ABORTED_BY_ADMIN


@pytest.mark.clause("AD-41")
async def test_a_request_that_ended_before_the_engine_stood_still_is_not_told_as_kept(fleet):
    edge, engine, node = fleet
    early = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))

    def ends_one(step):
        node.streams[0].start()
        node.streams[0].end()
        return engine.step(step)

    node.answer_step = ends_one
    result = await edge.participants.execute(call(pause(PauseMode.KEEP)), lambda _: None)
    assert early.outcome is Outcome.COMPLETE
    assert result.work.kept == 1


@pytest.mark.clause("AD-41", "SF-12")
async def test_keep_freezes_the_edges_clocks_until_the_engine_resumed(fleet):
    edge, engine, node = fleet
    engine.result = StepResult(participants=engine.result.participants, work=WorkCounts(kept=1))
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    result = await edge.participants.execute(call(pause(PauseMode.KEEP)), lambda _: None)
    assert result.work.kept == 1, "the same request in both counts"
    assert edge.dispatcher.is_frozen(KEY)
    await edge.participants.execute(call(ResumeStep(), step=2), lambda _: None)
    assert not edge.dispatcher.is_frozen(KEY)
    node.streams[0].start()
    node.streams[0].end()
    assert handle.outcome is Outcome.COMPLETE


@pytest.mark.clause("AD-47")
async def test_what_a_reconfigured_engine_serves_is_what_the_edge_admits(fleet):
    edge, _, _ = fleet
    driver = edge.participants
    said = driver.file_values()[GROUP]
    assert (said[ReconfigurableField.CAPACITY], said[ReconfigurableField.ENABLED]) == (4, True)
    driver.apply_overrides(
        {GROUP: {ReconfigurableField.CAPACITY: 9, ReconfigurableField.LONG_CONTEXT_CAPACITY: 2}}
    )
    figures = edge.pools.provider_figures(KEY)
    assert (figures.capacity, figures.long_capacity) == (9, 2)
    driver.apply_overrides({GROUP: {ReconfigurableField.ENABLED: False}})
    figures = edge.pools.provider_figures(KEY)
    assert figures.status == "disabled"
    driver.apply_overrides({})
    figures = edge.pools.provider_figures(KEY)
    assert (figures.status, figures.capacity, figures.long_capacity) == ("available", 4, 0)


@pytest.mark.clause("AD-32")
async def test_what_the_operator_says_of_the_weights_counts_where_the_engine_tells_nothing(fleet):
    edge, _, _ = fleet
    assert {info.startup_source for info in edge.participants.participants()} == {None}
    spec = edge.snapshot.nodes[KEY.node].adapters[KEY.provider]
    node = replace(
        edge.snapshot.nodes[KEY.node], adapters={KEY.provider: replace(spec, weights_source="/models/a")}
    )
    edge.apply_snapshot(replace(edge.snapshot, revision=2, nodes={KEY.node: node}))
    told = {info.startup_source for info in edge.participants.participants()}
    assert told == {DiskSource(path="/models/a", format=WeightFormat.SAFETENSORS)}, "from the reload on"


@pytest.mark.clause("AD-47", "EN-114")
async def test_a_reload_that_keeps_the_key_keeps_the_override_and_one_that_changes_it_does_not(fleet):
    edge, _, _ = fleet
    over = {GROUP: {ReconfigurableField.CAPACITY: 9}}
    edge.participants.apply_overrides(over)
    spec = edge.snapshot.nodes[KEY.node].adapters[KEY.provider]
    for revision, (capacity, expected) in enumerate(((4, 9), (5, 5)), start=2):
        node = replace(
            edge.snapshot.nodes[KEY.node], adapters={KEY.provider: replace(spec, capacity=capacity)}
        )
        edge.apply_snapshot(replace(edge.snapshot, revision=revision, nodes={KEY.node: node}))
        assert edge.pools.provider_figures(KEY).capacity == expected
    edge.participants.apply_overrides(over)
    assert edge.pools.provider_figures(KEY).capacity == 9, (
        "said anew after a reload, also if it was said before"
    )


@pytest.mark.clause("AD-35")
async def test_read_back_asks_the_engine_and_the_lost_are_unreachable(fleet):
    edge, engine, node = fleet
    engine.version = "v2"
    backs = await edge.participants.read_back([*RANKS, ParticipantId("n9/x/0")])
    assert [(back.participant_id, back.reachable) for back in backs] == [
        (RANKS[0], True),
        (RANKS[1], True),
        ("n9/x/0", False),
    ]
    assert backs[0].paused is False
    assert edge.participants.weight_version(KEY) == "v2"
    node.lose()
    backs = await edge.participants.read_back(RANKS)
    assert [back.reachable for back in backs] == [False, False]
    assert [info.connected for info in edge.participants.participants()] == [False, False]
    assert edge.participants.weight_version(KEY) == "unknown"


@pytest.mark.clause("AD-35", "AD-33")
async def test_a_restarted_engine_is_gated_again_although_its_node_stayed(fleet):
    edge, engine, node = fleet
    assert edge.pools.roster.gate_of(KEY).is_open
    engine.instance = "boot-2"
    edge.nodes.on_report(node, ProviderReport(participants=engine.reports()))
    assert edge.pools.roster.gate_of(KEY).held_by == ("reconciliation",)
    await edge.participants.apply_gates(dict.fromkeys(RANKS, OPEN))
    assert edge.pools.roster.gate_of(KEY).is_open


@pytest.mark.clause("EN-33")
async def test_reports_of_a_superseded_connection_are_dropped(fleet):
    edge, engine, node = fleet
    connect(edge, engine, instance="other")
    await eventually(lambda: edge.participants.participants()[0].connected)
    await edge.participants.apply_gates(dict.fromkeys(RANKS, OPEN))
    engine.instance = "boot-2"
    edge.nodes.on_report(node, ProviderReport(participants=engine.reports()))
    assert edge.pools.roster.gate_of(KEY).is_open


async def test_a_malformed_report_disturbs_nobody(fleet):
    edge, _, node = fleet
    bad = ParticipantReport(adapter="main", info=b"\xff\xff\xff")
    edge.nodes.on_report(node, ProviderReport(participants=(bad,)))
    assert edge.pools.roster.gate_of(KEY).is_open
    assert len(edge.participants.participants()) == 2
