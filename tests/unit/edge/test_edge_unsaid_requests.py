"""Whom a request goes to that the first provider had no words for (SF-10)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from iop.core.errors import InvalidRequest
from iop.core.ids import NodeId, ProviderId
from iop.edge.calls import CannotBeSaidError, Outcome, ProviderKey, Route, RunCall
from iop.edge.snapshot import DispatchLimits
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    RecordingRunSink,
    RecordingSink,
    adapter_spec,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.wire.messages import RunEvent, RunEventType, StreamErrorCode

INVALID = StreamErrorCode.INVALID_REQUEST
RUN = adapter_spec("main", capacity=9, route=Route.RUN)
TUNNEL = adapter_spec("main", capacity=1)


async def fleet(make_edge, *specs, limits=None):
    """An Edge with a Node for each of these providers of one model, in order; the first ones have the most room."""
    adapters = {f"n{number}/main": spec for number, spec in enumerate(specs, 1)}
    edge = await make_edge(snapshot_of(adapters, {"fast": list(adapters)}, limits=limits))
    return edge, [FakeEdgeConnection(edge.nodes, name.partition("/")[0]).connect() for name in adapters]


def name_of(edge, node):
    return edge.pools.roster.name_of(ProviderKey(node=NodeId(node), provider=ProviderId("main")))


async def outcome_of(dispatched):
    try:
        return await dispatched
    except InvalidRequest as error:
        return error


def to_both(run_sink, tunnel_sink):
    def prepare(target):
        if target.route is Route.RUN:
            return RunCall(input=b"{}", sink=run_sink)
        return tunnel_to(tunnel_sink)(target)

    return prepare


@pytest.mark.clause("SF-10", "EN-112")
async def test_runs_of_one_type_are_asked_once_and_then_the_tunnel(make_edge):
    edge, nodes = await fleet(make_edge, RUN, RUN, RUN, TUNNEL)
    run_sink, sink = RecordingRunSink(), RecordingSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), to_both(run_sink, sink))
    asked = next(node for node in nodes if node.streams)
    asked.streams[0].fail(INVALID, before_start=True)
    assert [len(node.streams) for node in nodes[:3]].count(1) == 1
    nodes[3].streams[0].start()
    nodes[3].streams[0].end()
    assert (run_sink.events, sink.ends, handle.outcome) == ([], 1, Outcome.COMPLETE)
    assert len(edge.pools.leases) == 0


@pytest.mark.clause("SF-10", "SF-24")
async def test_openengine_servers_differ_in_what_they_take_and_are_each_asked_within_the_limit(make_edge):
    server = replace(RUN, type="openengine")
    edge, nodes = await fleet(make_edge, *[server] * 4, limits=DispatchLimits(attempts_max=3))
    run_sink = RecordingRunSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), to_both(run_sink, RecordingSink()))
    for _ in range(3):
        assert run_sink.events == []
        newest = next(s for node in nodes for s in node.streams if not s.is_over)
        newest.fail(INVALID, before_start=True)
    assert sorted(len(node.streams) for node in nodes) == [0, 1, 1, 1]
    assert [event.type for event in run_sink.events] == [RunEventType.ERROR]
    assert (handle.outcome, len(edge.pools.leases)) == (Outcome.UPSTREAM_ERROR, 0)


@pytest.mark.clause("SF-10", "EN-110")
async def test_nobody_waits_to_be_refused_by_another_server_of_the_same_type(make_edge):
    server = replace(RUN, type="openengine", capacity=1)
    edge, nodes = await fleet(make_edge, server, server)
    busy = [await edge.dispatcher.dispatch(request_of("fast"), to_both(RecordingRunSink(), RecordingSink()))]
    run_sink = RecordingRunSink()
    busy.append(await edge.dispatcher.dispatch(request_of("fast"), to_both(run_sink, RecordingSink())))
    nodes[1].streams[0].fail(INVALID, before_start=True)
    assert run_sink.events[-1].type is RunEventType.ERROR
    assert (edge.pools.waiting, busy[0].outcome, len(nodes[0].streams)) == (0, None, 1)


@pytest.mark.clause("SF-10", "EN-112")
@pytest.mark.parametrize(
    ("code", "is_begun", "is_before"),
    [(INVALID, False, False), (INVALID, True, True), (StreamErrorCode.CONNECT_FAILED, False, True)],
)
async def test_what_the_engine_itself_refused_or_began_is_not_asked_of_another(
    make_edge, code, is_begun, is_before
):
    edge, nodes = await fleet(make_edge, RUN, TUNNEL)
    run_sink = RecordingRunSink()
    handle = await edge.dispatcher.dispatch(request_of("fast"), to_both(run_sink, RecordingSink()))
    if is_begun:
        nodes[0].streams[0].emit(RunEvent(type=RunEventType.DELTA, delta="x"))
    nodes[0].streams[0].fail(code, before_start=is_before)
    assert (nodes[1].streams, handle.attempts) == ([], 1)
    assert run_sink.events[-1].type is RunEventType.ERROR


@pytest.mark.clause("SF-10")
async def test_every_way_is_tried_once_and_the_last_refusal_is_told(make_edge):
    """The caller's own dialect is not there: what chats cannot say, responses and the run may."""
    chats = adapter_spec("main", capacity=90, operations=frozenset({"chat_completions"}))
    responses = adapter_spec("main", capacity=50, operations=frozenset({"responses"}))
    edge, _ = await fleet(make_edge, chats, chats, responses, RUN)
    asked = []

    def prepare(target):
        asked.append(target.key.node)
        raise CannotBeSaidError(InvalidRequest(f"not at {target.key.node}", reason="UNSUPPORTED_FIELD"))

    with pytest.raises(InvalidRequest, match="not at n4"):
        await edge.dispatcher.dispatch(request_of("fast", request_id="r1", operation="messages"), prepare)
    assert asked == ["n1", "n3", "n4"]
    told = edge.status.explain("r1")
    assert (told["outcome"], told["reason"], len(edge.pools.leases)) == ("rejected", "UNSUPPORTED_FIELD", 0)
    assert {each["why"] for each in told["candidates"][:3]} == {"cannot be told a field of this request"}


@pytest.mark.clause("SF-10", "EN-101")
async def test_what_cannot_be_put_as_a_run_is_converted_for_one_server_not_for_each(make_edge):
    """A conversion may cost milliseconds, and says the same for every server that a run would go to."""
    server = replace(RUN, type="openengine")
    edge, _ = await fleet(make_edge, *[server] * 5, RUN)
    asked = []

    def prepare(target):
        asked.append(target.key.node)
        raise CannotBeSaidError(InvalidRequest("not here", reason="UNSUPPORTED_FIELD"))

    with pytest.raises(InvalidRequest, match="not here"):
        await edge.dispatcher.dispatch(request_of("fast", operation="messages"), prepare)
    assert len(asked) == 1
    assert len(edge.pools.leases) == 0


@pytest.mark.clause("SF-10", "EN-114")
@pytest.mark.parametrize("is_told_by_run", [False, True])
async def test_who_waited_for_one_that_left_the_pool_hears_what_was_in_the_way(make_edge, is_told_by_run):
    """Not that the pool lacks the operation, which it offers."""
    chats = adapter_spec("main", capacity=90, operations=frozenset({"chat_completions"}))
    first, second = (
        (RUN, replace(TUNNEL, capacity=1)) if is_told_by_run else (chats, replace(RUN, capacity=1))
    )
    edge, nodes = await fleet(make_edge, first, second)
    operation = "chat_completions" if is_told_by_run else "messages"
    other = RecordingRunSink(), RecordingSink()
    busy = structs.replace(request_of("fast", operation=operation), preferred_provider=name_of(edge, "n2"))
    await edge.dispatcher.dispatch(busy, to_both(*other))
    run_sink = RecordingRunSink()

    def prepare(target):
        if target.route is Route.RUN and is_told_by_run:
            return RunCall(input=b"{}", sink=run_sink)
        raise CannotBeSaidError(InvalidRequest("not `seed`", reason="UNSUPPORTED_FIELD"))

    async with asyncio.TaskGroup() as tasks:
        dispatched = edge.dispatcher.dispatch(request_of("fast", operation=operation), prepare)
        asked = tasks.create_task(outcome_of(dispatched))
        await asyncio.sleep(0)
        if is_told_by_run:
            nodes[0].streams[0].fail(INVALID, before_start=True)
        assert edge.pools.waiting == 1
        edge.apply_snapshot(snapshot_of({"n1/main": first}, {"fast": ["n1/main"]}, revision=2))
    told = asked.result()
    if is_told_by_run:
        assert run_sink.events[-1].error.code == INVALID
    else:
        assert (type(told), told.reason) == (InvalidRequest, "UNSUPPORTED_FIELD")
