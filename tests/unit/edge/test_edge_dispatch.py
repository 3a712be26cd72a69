"""Dispatch over scripted connections: leases, outcomes, repeats, cancels, limits."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from iop.core.errors import Draining, InvalidRequest, NotFound, Overloaded, Unavailable, Unsupported
from iop.edge.calls import CannotBeSaidError, Outcome, Route, RunCall
from iop.edge.pools import GateMode, ProviderGate
from iop.edge.snapshot import BreakerSpec, DispatchLimits, QueueSpec
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingRunSink,
    RecordingSink,
    adapter_spec,
    provider_key,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.testing.waiting import eventually
from iop.wire.messages import (
    AdapterStatus,
    CancelReason,
    CloseReason,
    RunEvent,
    RunEventType,
    StreamErrorCode,
    Usage,
)

ONE = {"n1/main": adapter_spec("main", capacity=1)}
TWO = {"n1/main": adapter_spec("main", capacity=1), "n2/main": adapter_spec("main", capacity=1)}
FAST = {"fast": ["n1/main"]}
BOTH = {"fast": ["n1/main", "n2/main"]}


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.clause("EN-54", "EN-60", "EN-112", "EN-118")
async def test_a_free_slot_is_used_without_waiting_and_the_lease_returns_at_the_end(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    targets = []

    def prepare(target):
        assert len(edge.pools.leases) == 1, "the body is built under the lease"
        targets.append(target)
        return tunnel_to(sink, b'{"model":"target"}')(target)

    handle = await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), prepare)
    stream = node.streams[0]
    assert targets[0].target == "target-of-n1/main"
    assert stream.sent_body == b'{"model":"target"}'
    assert stream.request.run_id == handle.run_id
    stream.start(200)
    stream.send(b"hello")
    stream.end()
    assert (sink.status, sink.body, sink.ends) == (200, b"hello", 1)
    assert handle.outcome is Outcome.COMPLETE
    assert len(edge.pools.leases) == 0
    assert edge.status.explain("r1")["outcome"] == "complete"


@pytest.mark.clause("EN-110")
async def test_a_request_waits_for_a_slot_and_gets_it_when_the_other_ends(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        assert edge.pools.queue_depth("fast") == 1
        assert not waiting.done()
        node.streams[0].end()
    assert waiting.result().run_id == node.streams[1].request.run_id
    assert edge.pools.queue_depth("fast") == 0


@pytest.mark.clause("EN-110")
async def test_queue_full_is_refused_at_once_and_queue_timeout_at_the_deadline(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST, queue=QueueSpec(max_waiters=1, timeout_s=0.5)))
    FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    async with asyncio.TaskGroup() as tasks:

        async def wait_in_vain() -> None:
            with pytest.raises(Overloaded) as late:
                await edge.dispatcher.dispatch(
                    request_of("fast", request_id="late"), tunnel_to(RecordingSink())
                )
            assert late.value.reason == "queue_timeout"

        tasks.create_task(wait_in_vain())
        await settle()
        with pytest.raises(Overloaded) as full:
            await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    assert full.value.reason == "queue_full"
    assert full.value.retry_after_s is not None
    record = edge.outcomes.find("late")
    assert record is not None and record.queue_ms >= 450, "who waited in vain is told for how long"


@pytest.mark.clause("EN-110", "EN-14", "EN-32")
async def test_a_pool_without_a_node_holds_its_waiters_until_one_comes_back(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        node = FakeEdgeConnection(edge.nodes)
        node.register()
        await settle()
        assert not waiting.done(), "a pending owner takes nothing (EN-11)"
        node.ready()
    assert len(node.streams) == 1


@pytest.mark.clause("EN-110")
async def test_a_pool_without_a_node_answers_no_capacity_after_the_grace(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST, queue=QueueSpec(no_capacity_grace_s=0.05)))
    with pytest.raises(Unavailable) as nobody:
        await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), tunnel_to(RecordingSink()))
    assert nobody.value.reason == "no_capacity"
    assert nobody.value.retry_after_s is not None
    assert edge.status.explain("r1")["outcome"] == "rejected"


@pytest.mark.clause("EN-62", "EN-112")
async def test_an_unknown_model_and_an_unknown_operation_are_refused(make_edge):
    only_chat = {"n1/main": adapter_spec("main", operations=frozenset({"chat_completions"}))}
    edge = await make_edge(snapshot_of(only_chat, FAST))
    FakeEdgeConnection(edge.nodes).connect()
    with pytest.raises(NotFound) as missing:
        await edge.dispatcher.dispatch(request_of("slow"), tunnel_to(RecordingSink()))
    assert missing.value.reason == "model_not_found"
    with pytest.raises(Unsupported) as cannot:
        await edge.dispatcher.dispatch(request_of("fast", operation="embeddings"), tunnel_to(RecordingSink()))
    assert cannot.value.details["offered"] == "chat_completions"


@pytest.mark.clause("EN-112")
async def test_a_builder_that_refuses_gives_the_lease_back_and_its_error_to_the_caller(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    FakeEdgeConnection(edge.nodes).connect()

    def refuse(_target):
        raise Unsupported("this target cannot say that", reason="cannot_say")

    with pytest.raises(Unsupported):
        await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), refuse)

    def break_down(_target):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await edge.dispatcher.dispatch(request_of("fast", request_id="r2"), break_down)
    assert len(edge.pools.leases) == 0
    assert edge.outcomes.live == 0
    assert edge.status.explain("r1")["reason"] == "cannot_say"


@pytest.mark.clause("EN-56", "EN-112")
async def test_a_cancel_is_recorded_at_once_and_the_lease_returns_when_the_node_confirms(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    stream = node.streams[0]
    stream.start()
    handle.cancel(CancelReason.CLIENT_GONE)
    handle.cancel(CancelReason.CLIENT_GONE)
    assert stream.cancelled == [CancelReason.CLIENT_GONE], "the second cancel never reaches the engine"
    assert handle.outcome is Outcome.CLIENT_CANCELLED
    assert len(edge.pools.leases) == 1
    stream.send(b"late bytes")
    assert stream.credit_returned == len(b"late bytes"), "dropped bytes return their credit"
    stream.fail(StreamErrorCode.CANCELLED)
    assert len(edge.pools.leases) == 0
    assert (sink.body, sink.ends) == (b"", 0)


@pytest.mark.clause("EN-112")
async def test_a_cancel_after_the_end_is_a_no_op(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    node.streams[0].end()
    handle.cancel(CancelReason.CLIENT_GONE)
    assert node.streams[0].cancelled == []
    assert handle.outcome is Outcome.COMPLETE


async def test_a_node_that_never_confirms_a_cancel_loses_the_lease_anyway(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST, limits=DispatchLimits(cancel_confirm_s=0.02)))
    FakeEdgeConnection(edge.nodes).connect()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    handle.cancel()
    async with asyncio.timeout(30):
        await edge.dispatcher.wait_idle()
    assert edge.dispatcher.overdue_cancels_total == 1


@pytest.mark.clause("EN-110", "EN-112")
async def test_a_waiter_whose_caller_left_is_removed_at_once(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(
            edge.dispatcher.dispatch(request_of("fast", request_id="gone"), tunnel_to(RecordingSink()))
        )
        await settle()
        waiting.cancel()
    assert edge.pools.queue_depth("fast") == 0
    assert edge.status.explain("gone")["outcome"] == "client_cancelled"


@pytest.mark.clause("EN-110", "EN-112")
@pytest.mark.parametrize("leaves_first", [False, True])
async def test_a_caller_who_leaves_in_the_turn_of_the_grant_gives_the_slot_to_the_next(
    make_edge, leaves_first
):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        second = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        turn = [node.streams[0].end, first.cancel]
        for act in reversed(turn) if leaves_first else turn:
            act()
        await settle()
        assert first.cancelled()
        assert second.done()
    assert len(edge.pools.leases) == 1
    node.streams[1].end()
    await settle()
    assert not list(edge.pools.leases)
    assert not edge.status.status()["counters"]["requests_live"]


@pytest.mark.clause("EN-110", "EN-112")
async def test_a_caller_who_leaves_in_the_turn_of_a_refusal_is_recorded_as_gone(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    FakeEdgeConnection(edge.nodes).connect()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(
            edge.dispatcher.dispatch(request_of("fast", request_id="gone"), tunnel_to(RecordingSink()))
        )
        await settle()
        waiting.cancel()
        edge.dispatcher.set_gates(
            [(next(iter(edge.pools.leases)).key, ProviderGate(mode=GateMode.REJECT, held_by=("epoch 1",)))]
        )
        await settle()
        assert waiting.cancelled()
    assert edge.pools.queue_depth("fast") == 0
    assert edge.status.explain("gone")["outcome"] == "client_cancelled"


@pytest.mark.clause("EN-30", "EN-31", "EN-34", "EN-112")
async def test_a_lost_node_returns_each_lease_once_and_settles_its_requests_at_once(make_edge):
    edge = await make_edge(snapshot_of({"n1/main": adapter_spec("main", capacity=3)}, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sinks = [RecordingSink() for _ in range(3)]
    handles = [await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink)) for sink in sinks]
    node.streams[0].start()
    node.lose()
    assert [handle.outcome for handle in handles] == [Outcome.NODE_LOST] * 3
    assert [sink.ends for sink in sinks] == [1, 1, 1]
    assert {sink.error.code for sink in sinks} == {"node_lost"}
    assert (len(edge.pools.leases), edge.pools.leases.returned_total) == (0, 3)
    assert not edge.pools.check(0.0)


@pytest.mark.clause("EN-31", "EN-112")
async def test_a_request_that_was_not_handed_over_is_dispatched_again_elsewhere(make_edge):
    edge = await make_edge(snapshot_of(TWO, BOTH))
    first = FakeEdgeConnection(edge.nodes, "n1").connect()
    first.hands_over = False
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), tunnel_to(sink))
    run_id = handle.run_id
    second = FakeEdgeConnection(edge.nodes, "n2").connect()
    first.lose()
    assert len(second.streams) == 1
    assert handle.run_id != run_id, "run ids are new per attempt (EN-118)"
    second.streams[0].start()
    second.streams[0].end()
    assert (sink.ends, sink.error, handle.outcome) == (1, None, Outcome.COMPLETE)
    assert edge.status.explain("r1")["attempts"] == 2


@pytest.mark.clause("EN-112")
async def test_a_handed_over_request_is_never_dispatched_again(make_edge):
    edge = await make_edge(snapshot_of(TWO, BOTH))
    first = FakeEdgeConnection(edge.nodes, "n1").connect()
    sink = RecordingSink()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    second = FakeEdgeConnection(edge.nodes, "n2").connect()
    first.lose()
    assert second.streams == []
    assert sink.error.code == "node_lost"


@pytest.mark.clause("EN-112", "EN-117")
async def test_a_busy_refusal_before_start_is_tried_on_another_provider(make_edge):
    edge = await make_edge(snapshot_of(TWO, BOTH))
    first = FakeEdgeConnection(edge.nodes, "n1").connect()
    second = FakeEdgeConnection(edge.nodes, "n2").connect()
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    first.streams[0].fail(StreamErrorCode.BUSY, before_start=True, retryable=True)
    assert len(second.streams) == 1
    second.streams[0].start()
    second.streams[0].end()
    assert (sink.ends, handle.outcome) == (1, Outcome.COMPLETE)


@pytest.mark.clause("EN-112")
async def test_attempts_are_bounded_and_the_last_error_reaches_the_sink(make_edge):
    limits = DispatchLimits(attempts_max=2, busy_backoff_s=0.001)
    edge = await make_edge(snapshot_of(ONE, FAST, limits=limits))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    node.streams[0].fail(StreamErrorCode.BUSY, before_start=True, retryable=True)
    await eventually(lambda: len(node.streams) == 2)
    node.streams[1].fail(StreamErrorCode.BUSY, before_start=True, retryable=True)
    assert (sink.ends, sink.error.code) == (1, "busy")
    assert handle.outcome is Outcome.UPSTREAM_ERROR
    assert len(edge.pools.leases) == 0


@pytest.mark.clause("EN-30", "EN-33", "EN-115")
async def test_a_takeover_fences_the_old_owner_first_and_its_late_close_changes_nothing(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    old = FakeEdgeConnection(edge.nodes, instance="a").connect()
    sink = RecordingSink()
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    new = FakeEdgeConnection(edge.nodes, instance="b").connect()
    assert old.close_reason is CloseReason.SUPERSEDED
    assert sink.error.code == "node_lost"
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    old.close_reason = None
    old.lose()  # its own end arrives late
    assert handle.outcome is None
    assert len(edge.pools.leases) == 1
    assert len(new.streams) == 1


@pytest.mark.clause("EN-112", "SF-12")
async def test_no_first_byte_in_time_ends_with_timeout_and_a_cancel_to_the_node(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST, limits=DispatchLimits(first_byte_timeout_s=0.02)))
    node = FakeEdgeConnection(edge.nodes).connect()
    ended = asyncio.Event()
    sink = RecordingSink(on_end_hook=ended.set)
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    async with asyncio.timeout(30):
        await ended.wait()
    assert (sink.error.code, handle.outcome) == ("timeout", Outcome.TIMEOUT)
    assert node.streams[0].cancelled == [CancelReason.TIMEOUT]
    assert len(edge.pools.leases) == 1
    node.streams[0].fail(StreamErrorCode.CANCELLED)
    assert len(edge.pools.leases) == 0


@pytest.mark.clause("SF-12", "AD-41", "SF-07")
async def test_time_frozen_by_keep_does_not_count_and_a_cancel_waits_for_the_safe_point(make_edge):
    limits = DispatchLimits(first_byte_timeout_s=0.3, cancel_confirm_s=0.01)
    edge = await make_edge(snapshot_of({"n1/main": adapter_spec("main")}, FAST, limits=limits))
    node = FakeEdgeConnection(edge.nodes).connect()
    key = provider_key("n1/main")
    kept_sink, gone_sink = RecordingSink(), RecordingSink()
    kept = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(kept_sink))
    gone = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(gone_sink))
    assert edge.dispatcher.freeze((key,)) == 2
    gone.cancel()
    assert gone.outcome is Outcome.CLIENT_CANCELLED
    await asyncio.sleep(0.4)  # real time must pass for its absence to be seen
    assert kept.outcome is None
    assert len(edge.pools.leases) == 2, "the lease of the one who left comes back at the safe point"
    assert node.streams[1].at_safe_point
    assert edge.dispatcher.thaw((key,)) == 2
    async with asyncio.timeout(30):
        await edge.dispatcher.wait_idle()  # both run into their bounds now
    assert kept.outcome is Outcome.TIMEOUT


@pytest.mark.clause("AD-41", "EN-112")
async def test_an_abort_tells_callers_why_and_counts_them(make_edge):
    edge = await make_edge(snapshot_of({"n1/main": adapter_spec("main")}, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    assert edge.dispatcher.abort((provider_key("n1/main"),)) == 1
    assert (sink.error.code, handle.outcome) == ("aborted_by_admin", Outcome.ABORTED_BY_ADMIN)
    node.streams[0].fail(StreamErrorCode.CANCELLED)
    assert (sink.ends, len(edge.pools.leases)) == (1, 0)


@pytest.mark.clause("AD-39", "SF-09")
async def test_a_queueing_gate_holds_requests_and_a_rejecting_one_refuses_them(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    key = provider_key("n1/main")
    closed = ProviderGate(mode=GateMode.QUEUE, held_by=("epoch 7",))
    edge.dispatcher.set_gates([(key, closed)])
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        assert edge.status.status()["models"][0]["paused"] is True
        assert edge.status.status()["nodes"][0]["providers"][0]["gates"] == ["epoch 7"]
        opened = ProviderGate(mode=GateMode.OPEN)
        edge.dispatcher.set_gates([(key, opened)])
    assert waiting.result().run_id == node.streams[0].request.run_id
    node.streams[0].end()
    rejecting = ProviderGate(mode=GateMode.REJECT, held_by=("epoch 8",))
    edge.dispatcher.set_gates([(key, rejecting)])
    with pytest.raises(Draining) as paused:
        await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    assert paused.value.reason == "paused"


@pytest.mark.clause("AD-39")
async def test_a_gate_that_closes_in_the_turn_of_the_grant_keeps_the_request_out(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    key = provider_key("n1/main")
    await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        node.streams[0].end()  # grants the waiter, whose task has not run yet
        closed = ProviderGate(mode=GateMode.QUEUE, held_by=("epoch 7",))
        edge.dispatcher.set_gates([(key, closed)])
        await settle()
        assert len(node.streams) == 1
        assert len(edge.pools.leases) == 0
        waiting.cancel()


@pytest.mark.clause("EN-116")
async def test_a_provider_that_fails_fast_is_left_alone_and_tried_with_one_request(make_edge):
    breaker = BreakerSpec(failures=3, window_s=10, open_s=0.5)
    edge = await make_edge(snapshot_of({"n1/main": adapter_spec("main", capacity=4)}, FAST, breaker=breaker))
    node = FakeEdgeConnection(edge.nodes).connect()
    for _ in range(3):
        await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        node.streams[-1].start(500)
        node.streams[-1].end()
    assert edge.status.status()["nodes"][0]["providers"][0]["health"] == "failing"
    async with asyncio.TaskGroup() as tasks:
        waiting = [
            tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
            for _ in range(2)
        ]
        await eventually(lambda: len(node.streams) == 4)
        await settle()
        assert len(node.streams) == 4, "one trial, not both"
        node.streams[-1].start(200)
        node.streams[-1].end()
        await settle()
        assert len(node.streams) == 5
    assert all(task.done() for task in waiting)


@pytest.mark.clause("EN-60", "EN-40")
async def test_a_provider_that_takes_runs_gets_a_run_under_the_same_lease(make_edge):
    edge = await make_edge(snapshot_of({"n1/main": adapter_spec("main", route=Route.RUN)}, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingRunSink()

    def prepare(target):
        assert target.route is Route.RUN
        return RunCall(input=b"say hi", sink=sink, metadata={"who": "me"})

    handle = await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), prepare)
    stream = node.streams[0]
    assert dict(stream.request.metadata) == {"who": "me", "iop-request-id": "r1"}
    stream.emit(RunEvent(type=RunEventType.START))
    stream.emit(RunEvent(type=RunEventType.DELTA, delta="hi"))
    stream.emit(RunEvent(type=RunEventType.COMPLETE, usage=Usage(prompt_tokens=2, completion_tokens=1)))
    assert [event.type.name for event in sink.events] == ["START", "DELTA", "COMPLETE"]
    assert handle.outcome is Outcome.COMPLETE
    assert edge.status.explain("r1")["usage"]["completion_tokens"] == 1


@pytest.mark.clause("EN-80", "EN-92")
async def test_an_adapter_that_did_not_start_is_no_candidate_until_a_refresh_brings_it_up(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes)
    node.register()
    node.ready(adapters=(AdapterStatus(name="main", started=False, reason="no file at 10.0.0.1:80"),))
    shown = edge.status.status()["nodes"][0]["providers"][0]
    assert (shown["status"], shown["capacity"]) == ("unavailable", 0)
    assert shown["reason"] == "did not start: no file at [address]"
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink())))
        await settle()
        assert node.streams == []
        node.refreshed_adapters = (AdapterStatus(name="main", started=True),)
        edge.apply_snapshot(snapshot_of({"n1/main": adapter_spec("main", capacity=2)}, FAST, revision=2))
        await eventually(lambda: node.streams)
    assert waiting.done()


@pytest.mark.clause("EN-60", "EN-61", "EN-62")
async def test_a_pool_may_mix_providers_of_every_type_and_each_is_spoken_to_in_its_way(make_edge):
    mixed = {
        "n1/http": adapter_spec("http", capacity=1),
        "n1/agent": adapter_spec("agent", capacity=1, route=Route.RUN),
    }
    edge = await make_edge(snapshot_of(mixed, {"fast": ["n1/http", "n1/agent"]}))
    node = FakeEdgeConnection(edge.nodes).connect()
    routes = []

    def prepare(target):
        routes.append((target.key.provider, target.route))
        if target.route is Route.RUN:
            return RunCall(input=b"hi", sink=RecordingRunSink())
        return tunnel_to(RecordingSink())(target)

    for _ in range(2):
        await edge.dispatcher.dispatch(request_of("fast"), prepare)
    assert sorted(routes, key=str) == [("agent", Route.RUN), ("http", Route.TUNNEL)]
    assert {type(stream.request).__name__ for stream in node.streams} == {"RunRequest", "TunnelRequest"}


@pytest.mark.clause("EN-109", "EN-112")
async def test_shutdown_refuses_waiters_lets_runs_finish_and_cancels_the_rest(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    async with asyncio.TaskGroup() as tasks:

        async def wait_in_vain() -> None:
            with pytest.raises(Draining) as refused:
                await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
            assert refused.value.reason == "edge_shutdown"

        tasks.create_task(wait_in_vain())
        await settle()
        closing = tasks.create_task(edge.shut_down(deadline_s=0.02))
        await eventually(lambda: node.streams[0].cancelled)
        node.streams[0].fail(StreamErrorCode.CANCELLED)
        await closing
    assert (sink.error.code, handle.outcome) == ("edge_shutdown", Outcome.EDGE_SHUTDOWN)
    assert node.close_reason is CloseReason.SHUTDOWN


@pytest.mark.clause("SF-14", "EN-112")
async def test_a_truncated_answer_is_recorded_as_such(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(sink))
    sink.on_end_hook = handle.note_truncated
    node.streams[0].start()
    node.streams[0].end()
    assert (handle.outcome, handle.record.reason) == (Outcome.UPSTREAM_TRUNCATED, "upstream_truncated")


@pytest.mark.case("P-13")
@pytest.mark.clause("EN-112", "EN-116")
async def test_an_answer_given_up_half_way_is_the_providers_fault_and_not_the_callers(make_edge):
    """As where an engine tells in its stream that it failed: nothing more of it is wanted."""
    breaker = BreakerSpec(failures=2, window_s=60.0, open_s=60.0)
    edge = await make_edge(snapshot_of(ONE, FAST, breaker=breaker))
    node = FakeEdgeConnection(edge.nodes).connect()
    for is_given_up in (False, False, True, True):
        assert edge.pools.provider_figures(provider_key("n1/main")).health == "online"
        handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        node.streams[-1].start()
        if is_given_up:
            handle.note_truncated()
        handle.cancel()
        node.streams[-1].fail(StreamErrorCode.CANCELLED)
        told = "upstream_truncated" if is_given_up else "client_gone"
        assert handle.record.reason == told
    assert edge.pools.provider_figures(provider_key("n1/main")).health == "failing"


@pytest.mark.case("P-18")
@pytest.mark.clause("EN-116")
async def test_a_quota_refusal_does_not_open_the_breaker_and_a_failure_does(make_edge):
    breaker = BreakerSpec(failures=2, window_s=60.0, open_s=60.0)
    edge = await make_edge(snapshot_of(ONE, FAST, breaker=breaker))
    node = FakeEdgeConnection(edge.nodes).connect()
    for status in (429, 429, 429, 400, 402, 500, 500):
        assert edge.pools.provider_figures(provider_key("n1/main")).health == "online"
        await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        node.streams[-1].start(status)
        node.streams[-1].end()
    assert edge.pools.provider_figures(provider_key("n1/main")).health == "failing"


@pytest.mark.case("P-18")
@pytest.mark.clause("EN-112")
async def test_a_providers_own_4xx_is_complete_and_its_5xx_an_upstream_error(make_edge):
    edge = await make_edge(snapshot_of(ONE, FAST))
    node = FakeEdgeConnection(edge.nodes).connect()
    outcomes = []
    for status in (404, 429, 503):
        handle = await edge.dispatcher.dispatch(request_of("fast"), tunnel_to(RecordingSink()))
        node.streams[-1].start(status)
        node.streams[-1].end()
        outcomes.append(handle.outcome)
    assert outcomes == [Outcome.COMPLETE, Outcome.COMPLETE, Outcome.UPSTREAM_ERROR]


@pytest.mark.clause("SF-10", "EN-112")
async def test_a_repeat_that_cannot_be_said_asks_who_offers_the_operation_itself(make_edge):
    """The first attempt is lost with its Node; the second provider would need a conversion that cannot be made."""
    only = {
        "n1/main": adapter_spec("main", operations=frozenset({"messages"})),
        "n2/main": adapter_spec("main", operations=frozenset({"chat_completions"})),
        "n3/main": adapter_spec("main", operations=frozenset({"messages"})),
    }
    edge = await make_edge(snapshot_of(only, {"fast": list(only)}))
    nodes = [FakeEdgeConnection(edge.nodes, name).connect() for name in ("n1", "n2", "n3")]
    nodes[0].hands_over = False
    sink = RecordingSink()
    asked = []

    def prepare(target):
        asked.append(target.key.node)
        if target.key.node == "n2":
            raise CannotBeSaidError(InvalidRequest("not in a chat", reason="UNSUPPORTED_FIELD"))
        return tunnel_to(sink)(target)

    handle = await edge.dispatcher.dispatch(request_of("fast", operation="messages"), prepare)
    nodes[0].lose()
    assert asked == ["n1", "n2", "n3"]
    nodes[2].streams[0].start()
    nodes[2].streams[0].end()
    assert handle.outcome is Outcome.COMPLETE
    assert (sink.ends, edge.outcomes.begun_total, len(edge.pools.leases)) == (1, 1, 0)


@pytest.mark.clause("EN-112", "SF-06")
@pytest.mark.parametrize("is_run", [False, True])
async def test_a_surface_that_fails_at_the_end_hears_of_an_error_and_nothing_hangs(make_edge, is_run):
    """Its caller would wait for an end that nobody gives any more; the provider is not to blame."""
    told = []

    class Broken(RecordingSink):
        def on_end(self) -> None:
            raise TypeError("a bug")

        def on_error(self, error) -> None:
            told.append(error.code)

        def on_run_event(self, event) -> None:
            if event.type is RunEventType.COMPLETE:
                raise TypeError("a bug")
            told.append(event.error.code)

    spec = adapter_spec("main", route=Route.RUN if is_run else Route.TUNNEL)
    edge = await make_edge(snapshot_of({"n1/main": spec}, FAST, breaker=BreakerSpec(failures=1)))
    node = FakeEdgeConnection(edge.nodes).connect()
    sink = Broken()
    call = (lambda _: RunCall(input=b"{}", sink=sink)) if is_run else tunnel_to(sink)
    handle = await edge.dispatcher.dispatch(request_of("fast", request_id="r1"), call)
    stream = node.streams[0]
    if not is_run:
        stream.start()
    end = partial(stream.emit, RunEvent(type=RunEventType.COMPLETE)) if is_run else stream.end
    with pytest.raises(TypeError):
        end()
    assert told == ["internal"]
    assert (handle.outcome, edge.status.explain("r1")["reason"]) == (Outcome.UPSTREAM_ERROR, "internal")
    assert edge.pools.provider_figures(provider_key("n1/main")).health == "online"
    assert len(edge.pools.leases) == 0
