"""The Edge as the participants of a real operation core: pauses, gates, reconnects; on virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import AdminErrorCode, AdmissionPolicy, DrainTimeoutAction, PauseMode
from iop.admin.profile import Capabilities, ParticipantInfo
from iop.admin.requests import (
    AllTargets,
    MutationOptions,
    PauseRequest,
    PauseSpec,
    ResumeRequest,
)
from iop.admin.results import OperationCompleted, OperationFailed
from iop.admin.steps import ParticipantOutcome, ParticipantReadBack, PauseStep, ResumeStep, StepResult
from iop.core.errors import Draining
from iop.core.ids import GroupId, OperationId, ParticipantId, RunId
from iop.edge.calls import Outcome
from iop.edge.edge import Edge
from iop.edge.snapshot import QueueSpec
from iop.net.admin_steps import AdminStepCodec
from iop.testing.admin_world import ADMIN, LoopClock, digest_of
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingSink,
    adapter_spec,
    provider_key,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.virtual_loop import run_virtual
from iop.wire.messages import AdminStepResult, CommandResponse, ParticipantReport

CODEC = AdminStepCodec()
KEY = provider_key("n1/main")
SNAPSHOT = snapshot_of(
    {"n1/main": adapter_spec("main", capacity=2, is_administered=True)},
    {"fast": ["n1/main"]},
    queue=QueueSpec(no_capacity_grace_s=60),
)


class Engine:
    """One rank that really pauses and resumes."""

    def __init__(self) -> None:
        self.paused = False

    def command(self, request):
        info = ParticipantInfo(
            participant_id=ParticipantId("rank-0"),
            group_id=GroupId("engine"),
            capabilities=Capabilities(
                operations=frozenset({2, 3}),
                pause_modes=frozenset(PauseMode),  # pause, resume
            ),
            rank=0,
            instance="boot-1",
        )
        back = ParticipantReadBack(
            participant_id=info.participant_id,
            instance="boot-1",
            paused=self.paused,
            released=frozenset(),
            weight_version="v1",
            profiles=frozenset(),
        )
        report = ParticipantReport(
            adapter="main", info=CODEC.encode_info(info), read_back=CODEC.encode_read_back(back)
        )
        return CommandResponse(type=request.type, ok=True, participants=(report,))

    def step(self, step):
        body = CODEC.decode_step(step.request)
        if isinstance(body, PauseStep):
            self.paused = True
        elif isinstance(body, ResumeStep):
            self.paused = False
        outcome = ParticipantOutcome(participant_id=ParticipantId("rank-0"), weight_version="v1")
        result = StepResult(participants=(outcome,))
        return AdminStepResult(
            operation_id=step.operation_id, step=step.step, outcome=CODEC.encode_result(result)
        )


class Fleet:
    """Edge, core and one engine."""

    def __init__(self, store: MemoryStore) -> None:
        runs, operations = itertools.count(1), itertools.count(len(store.records) + 1)
        clock = LoopClock()
        self.engine = Engine()
        self.edge = Edge(SNAPSHOT, clock=clock, codec=CODEC, new_run_id=lambda: RunId(f"run-{next(runs)}"))
        self.core = AdminCore(
            journal=MemoryJournal(store, unix_nanos=clock.unix_nanos),
            driver=self.edge.participants,
            clock=clock,
            new_id=lambda: OperationId(f"op-{next(operations)}"),
            owner="test",
        )
        self.edge.participants.attach(self.core.participants_changed)
        self._keys = itertools.count(len(store.records) + 1)

    def connect(self, instance: str = "") -> FakeEdgeConnection:
        node = FakeEdgeConnection(self.edge.nodes, instance=instance)
        node.answer_command = self.engine.command
        node.answer_step = self.engine.step
        return node.connect()

    async def end_of(self, make):
        request = make(MutationOptions(idempotency_key=f"key-{next(self._keys)}"))
        call = MutationCall(principal=ADMIN, request=request, request_sha256=digest_of(request))
        events = [event async for event in self.core.submit(call)]
        return events[-1].event

    async def operate(self, make):
        ended = await self.end_of(make)
        assert isinstance(ended, OperationCompleted), ended
        return ended.result

    async def pause(self, mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE, **more):
        spec = PauseSpec(mode=mode, admission=admission, **more)
        return await self.operate(
            lambda options: PauseRequest(options=options, target=AllTargets(), pause=spec)
        )

    async def resume(self, epoch):
        return await self.operate(lambda options: ResumeRequest(options=options, pause_epoch=epoch))

    async def is_open(self):
        async with asyncio.timeout(100):
            while not self.edge.pools.roster.gate_of(KEY).is_open:  # noqa: ASYNC110 - a level
                await asyncio.sleep(0.01)


def play(scenario, store=None):
    async def main():
        fleet = Fleet(store or MemoryStore())
        async with asyncio.timeout(10_000), fleet.edge, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(fleet.core.run())
            await fleet.core.wait_ready()
            try:
                await scenario(fleet)
            finally:
                running.cancel()

    run_virtual(main())


@pytest.mark.clause("EN-32", "AD-35")
def test_a_node_that_comes_is_reconciled_and_then_serves_who_waited():
    async def scenario(fleet):
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(
                fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
            )
            await asyncio.sleep(1)
            node = fleet.connect()
            assert not fleet.edge.pools.roster.gate_of(KEY).is_open
        assert waiting.result().run_id == node.streams[0].request.run_id

    play(scenario)


@pytest.mark.clause("AD-35", "AD-39", "EN-30")
def test_reconnects_as_fast_as_they_can_come_never_leave_the_gate_closed():
    async def scenario(fleet):
        fleet.connect("same")
        await fleet.is_open()
        for turns in range(40):
            fleet.connect("same")
            for _ in range(turns):
                await asyncio.sleep(0)
            fleet.connect("same")
            async with asyncio.timeout(5):
                await fleet.is_open()

    play(scenario)


@pytest.mark.clause("AD-41", "AD-42", "SF-09")
def test_a_draining_pause_lets_the_stream_finish_queues_the_next_and_resume_lets_it_go():
    async def scenario(fleet):
        node = fleet.connect()
        await fleet.is_open()
        first = await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(fleet.pause())
            await asyncio.sleep(1)
            waiting = tasks.create_task(
                fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
            )
            await asyncio.sleep(1)
            assert not fleet.engine.paused, "the engine is told after the Edge's own work has ended"
            node.streams[0].start()
            node.streams[0].end()
            result = await pausing
            assert fleet.engine.paused
            assert (first.outcome, result.drained) == (Outcome.COMPLETE, 1)
            await asyncio.sleep(100)
            assert not waiting.done()
            await fleet.resume(result.pause_epoch)
        assert not fleet.engine.paused
        assert waiting.result().outcome is None

    play(scenario)


@pytest.mark.clause("AD-35", "AD-41")
def test_a_pause_outlives_the_reconnect_of_its_node_and_rejects_as_it_was_asked_to():
    async def scenario(fleet):
        node = fleet.connect()
        await fleet.is_open()
        result = await fleet.pause(PauseMode.ABORT, AdmissionPolicy.REJECT)
        node.lose()
        await asyncio.sleep(1)
        fleet.connect()
        await asyncio.sleep(5)
        assert fleet.edge.pools.roster.gate_of(KEY).held_by == (f"epoch {result.pause_epoch}",)
        with pytest.raises(Draining):
            await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        await fleet.resume(result.pause_epoch)
        await fleet.is_open()
        await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))

    play(scenario)


@pytest.mark.clause("AD-26", "AD-35")
def test_after_an_edge_restart_a_pause_is_in_force_before_the_node_may_serve():
    store = MemoryStore()
    epochs = []

    async def before(fleet):
        fleet.connect()
        await fleet.is_open()
        epochs.append((await fleet.pause()).pause_epoch)

    async def after(fleet):
        fleet.engine.paused = True
        node = fleet.connect()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(
                fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
            )
            await asyncio.sleep(50)
            assert node.streams == []
            await fleet.resume(epochs[0])
        assert waiting.result().outcome is None
        assert not fleet.engine.paused

    play(before, store)
    play(after, store)


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-41", "SF-07", "SF-12")
def test_a_caller_who_leaves_a_frozen_request_gets_the_outcome_at_once_and_the_lease_comes_at_resume():
    async def scenario(fleet):
        node = fleet.connect()
        await fleet.is_open()
        handle = await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        result = await fleet.pause(PauseMode.KEEP)
        assert result.kept == 1
        handle.cancel()
        assert handle.outcome is Outcome.CLIENT_CANCELLED
        await asyncio.sleep(5000)
        assert len(fleet.edge.pools.leases) == 1
        assert node.streams[0].at_safe_point
        await fleet.resume(result.pause_epoch)
        node.streams[0].fail("cancelled")
        assert len(fleet.edge.pools.leases) == 0

    play(scenario)


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-41", "AD-42", "SF-09")
@pytest.mark.parametrize("admission", list(AdmissionPolicy))
def test_who_comes_during_a_keep_waits_or_is_refused_and_a_second_keep_changes_nothing(admission):
    async def scenario(fleet):
        node = fleet.connect()
        await fleet.is_open()
        kept = await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        first = await fleet.pause(PauseMode.KEEP, admission)
        second = await fleet.pause(PauseMode.KEEP, admission)
        assert second == first and first.kept == 1, "the same pause"
        assert kept.is_frozen and kept.outcome is None
        async with asyncio.TaskGroup() as tasks:
            newcomer = fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
            if admission is AdmissionPolicy.REJECT:
                with pytest.raises(Draining) as refused:
                    await newcomer
                assert refused.value.reason == "paused"
            else:
                waiting = tasks.create_task(newcomer)
                await asyncio.sleep(100)
                assert not waiting.done()
            assert kept.is_frozen
            await fleet.resume(first.pause_epoch)
        assert not kept.is_frozen
        if admission is AdmissionPolicy.QUEUE:
            assert waiting.result().outcome is None
        node.streams[0].start()
        node.streams[0].end()
        assert kept.outcome is Outcome.COMPLETE

    play(scenario)


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-18", "AD-41", "EN-112")
def test_an_abort_on_top_of_a_keep_ends_what_was_kept():
    async def scenario(fleet):
        node = fleet.connect()
        await fleet.is_open()
        sink = RecordingSink()
        kept = await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
        await fleet.pause(PauseMode.KEEP)
        async with asyncio.TaskGroup() as tasks:
            aborting = tasks.create_task(fleet.pause(PauseMode.ABORT, AdmissionPolicy.REJECT))
            await asyncio.sleep(1)
            assert kept.outcome is Outcome.ABORTED_BY_ADMIN
            assert sink.error.code == "aborted_by_admin"
            node.streams[0].fail("cancelled")
        assert aborting.result().aborted == 1
        assert len(fleet.edge.pools.leases) == 0

    play(scenario)


@pytest.mark.case("P-23")
@pytest.mark.clause("AD-41", "AD-42")
@pytest.mark.parametrize("then", list(DrainTimeoutAction))
def test_a_drain_whose_time_is_over_tells_what_ran_and_what_became_of_it(then):
    async def scenario(fleet):
        node = fleet.connect()
        await fleet.is_open()
        running = await fleet.edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        spec = PauseSpec(
            mode=PauseMode.DRAIN,
            admission=AdmissionPolicy.QUEUE,
            drain_timeout_ms=5000,
            on_drain_timeout=then,
        )
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(
                fleet.end_of(lambda options: PauseRequest(options=options, target=AllTargets(), pause=spec))
            )
            await asyncio.sleep(6)
            if then is DrainTimeoutAction.ABORT:
                assert running.outcome is Outcome.ABORTED_BY_ADMIN
                node.streams[0].fail("cancelled")
        ended = pausing.result()
        if then is DrainTimeoutAction.ABORT:
            assert isinstance(ended, OperationCompleted)
            assert (ended.result.aborted, ended.result.drained) == (1, 0)
        else:
            assert isinstance(ended, OperationFailed)
            assert ended.error.code is AdminErrorCode.DRAIN_TIMEOUT
            assert ended.error.participants == ("n1/main/0",) and ended.error.rolled_back
            assert "still running" in ended.error.message
            assert running.outcome is None and not fleet.engine.paused
            await fleet.is_open()

    play(scenario)
