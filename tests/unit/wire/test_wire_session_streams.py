"""Tunnels, runs, credit, cancel, calls and steps of two joined sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from iop.core.errors import InvalidRequest, LocalProtocolError, Overloaded
from iop.core.limits import CONTROL_AHEAD_BYTES_MAX, INLINE_BODY_BYTES_MAX, MIB
from iop.testing import packets as make
from iop.testing.packets import SessionPair
from iop.wire import codec, events
from iop.wire import messages as m
from iop.wire import packets as p
from iop.wire.frames import frame
from iop.wire.session import SessionSettings
from iop.wire.stream_edge import EdgeStream
from iop.wire.stream_node import NodeStream
from iop.wire.streams import StreamKind

WINDOW = 8192
SETTINGS = SessionSettings(stream_window_bytes=WINDOW)
CANCELLED = m.StreamError(code="cancelled")


def opened(pair: SessionPair) -> NodeStream:
    """The stream that the Node heard of last."""
    stream: NodeStream = pair.of(events.StreamOpened, pair.node_events)[-1].stream
    return stream


def tunnel(
    pair: SessionPair, run_id: str = "run-1", body: list[bytes] | None = None
) -> tuple[EdgeStream, NodeStream]:
    stream = pair.edge.open_tunnel(make.tunnel_request(run_id), body or [b"{}"])
    pair.carry()
    return stream, opened(pair)


def started(pair: SessionPair, run_id: str = "run-1") -> tuple[EdgeStream, NodeStream]:
    ours, theirs = tunnel(pair, run_id)
    pair.node.start(theirs, status=200, headers=((b"a", b"b"),), framing=m.BodyFraming.CHUNKED)
    pair.carry()
    return ours, theirs


def messages(data: bytes) -> list[p.Message]:
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(codec.decode(data[4 : 4 + size])[1])
        data = data[4 + size :]
    return found


def body_of(pair: SessionPair) -> bytes:
    return b"".join(event.data for event in pair.of(events.BodyReceived, pair.edge_events))


def reason_of(found: list[events.Event]) -> str:
    (event,) = [event for event in found if isinstance(event, events.Closed)]
    return event.detail.split(":")[0]


def to_edge(pair: SessionPair, *frames: p.Message) -> list[events.Event]:
    return pair.edge.receive_data(b"".join(frame(codec.encode(message)) for message in frames), now=pair.now)


def to_node(pair: SessionPair, *frames: p.Message) -> list[events.Event]:
    return pair.node.receive_data(b"".join(frame(codec.encode(message)) for message in frames), now=pair.now)


# ---- tunnels ----


@pytest.mark.clause("EN-50", "EN-52", "EN-53")
def test_a_tunnel_carries_request_and_answer_unchanged_and_in_order() -> None:
    pair = SessionPair.ready(SETTINGS)
    request = make.tunnel_request(metadata={"a": "b"}, session_id="s", timeout_sec=9, stream=True)
    ours = pair.edge.open_tunnel(request, [b'{"model"', b': "m"}'])
    pair.carry()
    theirs = opened(pair)
    assert theirs.request == request
    assert b"".join(theirs.body) == b'{"model": "m"}'
    pair.node.start(theirs, status=201, headers=((b"X", b"1"), (b"X", b"2")), framing=m.BodyFraming.LENGTH)
    pair.node.send_body(theirs, b"data: \xff\n\n")
    pair.node.send_usage(theirs, m.Usage(prompt_tokens=3))
    pair.node.send_body(theirs, b"end")
    pair.node.end(theirs)
    pair.carry()
    assert pair.edge_events == [
        events.ResponseStarted(ours, 201, ((b"X", b"1"), (b"X", b"2")), m.BodyFraming.LENGTH),
        events.BodyReceived(ours, b"data: \xff\n\n"),
        events.UsageReceived(ours, m.Usage(prompt_tokens=3)),
        events.BodyReceived(ours, b"end"),
        events.TunnelEnded(ours, None),
    ]
    assert pair.edge.streams_open == pair.node.streams_open == 0


@pytest.mark.clause("EN-53")
def test_small_pieces_of_one_turn_share_a_frame_and_a_small_answer_one_write() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = tunnel(pair)
    pair.node.start(theirs, status=200, headers=(), framing=m.BodyFraming.LENGTH)
    for piece in (b"one ", b"two ", b"three"):
        pair.node.send_body(theirs, piece)
    pair.node.end(theirs)
    sent = messages(pair.node.data_to_send())
    assert [message.kind for message in sent] == [  # type: ignore[union-attr]
        p.FrameKind.RESPONSE_START,
        p.FrameKind.BODY,
        p.FrameKind.END,
    ]
    assert sent[1].body == b"one two three"  # type: ignore[union-attr]
    assert [message.sequence for message in sent] == [1, 2, 3]  # type: ignore[union-attr]


@pytest.mark.clause("EN-52")
@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([(2, 2)], "SEQUENCE_GAP"),
        ([(1, 1), (2, 3)], "SEQUENCE_GAP"),
        ([(1, 1), (2, 1)], "SEQUENCE_GAP"),
        ([(1, 1), (1, 2)], "DOUBLE_START"),
        ([(2, 1)], "NOT_STARTED"),
        ([(3, 1)], "NOT_STARTED"),
    ],
)
def test_an_answer_out_of_order_ends_the_connection(frames: list[tuple[int, int]], reason: str) -> None:
    pair = SessionPair.ready(SETTINGS)
    tunnel(pair)
    sent = [
        p.TunnelFrame(
            run_id="run-1", kind=p.FrameKind(kind), sequence=sequence, body=b"x" if kind == 2 else b""
        )
        for kind, sequence in frames
    ]
    assert reason_of(to_edge(pair, *sent)) == reason


@pytest.mark.clause("EN-33", "EN-57")
@pytest.mark.parametrize("reason", [m.CloseReason.HEARTBEAT_TIMEOUT, m.CloseReason.SUPERSEDED])
def test_what_a_node_says_after_it_was_declared_dead_is_counted_and_changes_nothing(
    reason: m.CloseReason,
) -> None:
    pair = SessionPair.ready(SETTINGS)
    started(pair)
    pair.edge.close(reason)
    pair.edge_events.clear()
    assert pair.edge.is_lingering
    late = p.TunnelFrame(run_id="run-1", kind=p.FrameKind.BODY, sequence=2, body=b"late")
    end = p.TunnelFrame(run_id="run-1", kind=p.FrameKind.END, sequence=3)
    assert to_edge(pair, late, p.Heartbeat(sequence=1), end) == [events.LateFrameDropped()] * 2
    assert pair.edge.counters.late_frames == 2
    assert pair.edge.receive_data(b"\xff" * 8, now=1.0) == []
    assert not pair.edge.is_lingering, "rubbish ends the patience"


@pytest.mark.clause("EN-33")
def test_an_edge_that_ends_for_other_reasons_does_not_linger() -> None:
    for reason in (m.CloseReason.SHUTDOWN, m.CloseReason.PROTOCOL_ERROR):
        pair = SessionPair.ready(SETTINGS)
        pair.edge.close(reason)
        assert not pair.edge.is_lingering


@pytest.mark.clause("EN-57", "EN-33")
def test_frames_behind_the_terminal_are_dropped_and_counted() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = started(pair)
    pair.node.end(theirs)
    pair.carry()
    before = len(pair.edge_events)
    late = p.TunnelFrame(run_id="run-1", kind=p.FrameKind.BODY, sequence=3, body=b"late")
    end = p.TunnelFrame(run_id="run-1", kind=p.FrameKind.END, sequence=4)
    assert to_edge(pair, late, end) == [events.LateFrameDropped()] * 2
    assert pair.edge.counters.late_frames == 2
    assert len(pair.of(events.TunnelEnded, pair.edge_events)) == 1
    assert before == len(pair.edge_events)
    assert ours.is_ended


@pytest.mark.clause("EN-57")
def test_the_nodes_own_calls_behind_its_terminal_are_ignored_and_counted() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = started(pair)
    pair.node.end(theirs)
    pair.node.send_body(theirs, b"late")
    pair.node.end(theirs)
    pair.node.fail(theirs, CANCELLED)
    pair.carry()
    assert pair.node.counters.late_local_calls == 3
    assert [event.error for event in pair.of(events.TunnelEnded, pair.edge_events)] == [None]


def test_a_node_that_forgets_the_start_is_told_so_and_nothing_is_sent() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = tunnel(pair)
    for action in (lambda: pair.node.send_body(theirs, b"x"), lambda: pair.node.end(theirs)):
        with pytest.raises(LocalProtocolError):
            action()
    assert not pair.node.has_output
    pair.node.start(theirs, status=200, headers=(), framing=m.BodyFraming.NONE)
    with pytest.raises(LocalProtocolError):
        pair.node.start(theirs, status=200, headers=(), framing=m.BodyFraming.NONE)


def test_run_ids_in_use_and_too_many_streams_are_refused_locally() -> None:
    pair = SessionPair.ready(SessionSettings(streams_max=2))
    pair.edge.open_tunnel(make.tunnel_request("a"))
    with pytest.raises(LocalProtocolError):
        pair.edge.open_run(make.run_request("a"))
    pair.edge.open_run(make.run_request("b"))
    with pytest.raises(Overloaded):
        pair.edge.open_tunnel(make.tunnel_request("c"))


def test_a_hostile_edge_cannot_open_streams_without_end() -> None:
    pair = SessionPair.ready(SessionSettings(streams_max=2))
    found = to_node(pair, *(p.OpenTunnel(request=make.tunnel_request(f"r{n}")) for n in range(3)))
    assert reason_of(found) == "TOO_MANY_STREAMS"


@pytest.mark.clause("EN-108")
def test_a_repeated_opening_packet_has_one_effect_while_open_and_after_the_end() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = started(pair)
    again = p.OpenTunnel(request=make.tunnel_request())
    assert to_node(pair, again) == []
    pair.node.end(theirs)
    pair.carry()
    assert to_node(pair, again, p.OpenRun(request=make.run_request())) == []
    assert pair.node.counters.duplicate_packets == 3
    assert not pair.node.has_output


# ---- continuation frames ----


@pytest.mark.clause("EN-101", "EN-102")
@pytest.mark.parametrize("size", [INLINE_BODY_BYTES_MAX + 1, MIB, 3 * MIB + 17])
def test_a_large_body_arrives_whole_in_parts_under_a_window_of_its_own(size: int) -> None:
    pair = SessionPair.ready(SETTINGS)
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    pair.edge.open_tunnel(make.tunnel_request(), [body[:1000], body[1000:]])
    pair.to_node()
    assert pair.of(events.StreamOpened, pair.node_events) == [], "not before its body is whole"
    pair.carry()
    assert b"".join(opened(pair).body) == body


@pytest.mark.clause("EN-101")
def test_a_body_goes_inline_up_to_the_limit_and_no_packet_stands_ahead_with_more() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request("a"), [bytes(60_000)])
    (message,) = messages(pair.edge.data_to_send(1 << 20))
    assert isinstance(message, p.OpenTunnel)
    assert not message.body_continues
    pair.edge.open_tunnel(make.tunnel_request("b"), [bytes(INLINE_BODY_BYTES_MAX + 1)])
    opening, *chunks = messages(pair.edge.data_to_send(1 << 20))
    assert opening.body_continues  # type: ignore[union-attr]
    assert opening.body_bytes_total == INLINE_BODY_BYTES_MAX + 1  # type: ignore[union-attr]
    assert sum(len(chunk.data) for chunk in chunks) == WINDOW, "the rest waits for credit"  # type: ignore[union-attr]


@pytest.mark.clause("EN-101")
def test_an_upload_does_not_hold_up_another_stream() -> None:
    pair = SessionPair.ready(SessionSettings(stream_window_bytes=4 * MIB))
    pair.edge.open_tunnel(make.tunnel_request("big"), [bytes(32 * MIB)])
    pair.to_node()
    pair.edge.open_tunnel(make.tunnel_request("small"), [b"{}"])
    kinds = [type(message).__name__ for message in messages(pair.edge.data_to_send(CONTROL_AHEAD_BYTES_MAX))]
    assert "OpenTunnel" in kinds, "within one write of 64 KiB"


@pytest.mark.clause("EN-101")
@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(1, 10, False)], "BODY_GAP"),
        ([(0, 10, False), (0, 10, False)], "BODY_GAP"),
        ([(0, 101, False)], "BODY_TOO_LONG"),
        ([(0, 10, True)], "BODY_TOO_SHORT"),
    ],
)
def test_a_body_that_is_not_as_announced_ends_the_connection(
    chunks: list[tuple[int, int, bool]], reason: str
) -> None:
    pair = SessionPair.ready(SETTINGS)
    opening = p.OpenTunnel(request=make.tunnel_request(), body_continues=True, body_bytes_total=100)
    sent = [
        p.BodyChunk(stream_id="run-1", offset=offset, data=bytes(size), last=last)
        for offset, size, last in chunks
    ]
    assert reason_of(to_node(pair, opening, *sent)) == reason


@pytest.mark.clause("EN-102")
def test_continuation_frames_beyond_their_credit_end_the_connection() -> None:
    pair = SessionPair.ready(SETTINGS)
    opening = p.OpenTunnel(request=make.tunnel_request(), body_continues=True, body_bytes_total=10 * WINDOW)
    assert reason_of(to_node(pair, opening, p.BodyChunk(stream_id="run-1", data=bytes(WINDOW + 1)))) == (
        "CREDIT_OVERSPENT"
    )


@pytest.mark.clause("EN-101")
def test_a_body_over_the_nodes_limit_is_refused_before_start() -> None:
    pair = SessionPair.ready(SessionSettings(body_bytes_max=1000))
    opening = p.OpenTunnel(request=make.tunnel_request(), body_continues=True, body_bytes_total=1001)
    assert to_node(pair, opening) == []
    (answer,) = messages(pair.node.data_to_send())
    assert answer.error.code == "invalid_request"  # type: ignore[union-attr]
    assert answer.error.before_start  # type: ignore[union-attr]
    chunk = p.BodyChunk(stream_id="run-1", data=b"x")
    assert to_node(pair, chunk) == [events.LateFrameDropped()]


# ---- credit ----


@pytest.mark.clause("EN-102")
def test_a_reader_that_stops_costs_its_window_and_stalls_nobody() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, slow = started(pair, "slow")
    quick_ours, quick = started(pair, "quick")
    pair.node.send_body(slow, bytes(3 * WINDOW))
    pair.carry()
    assert len(body_of(pair)) == WINDOW
    assert slow.credit_bytes == -2 * WINDOW
    pair.edge_events.clear()
    for _ in range(10):
        pair.node.send_body(quick, bytes(WINDOW // 2))
        pair.carry()
        pair.edge.consumed(quick_ours, WINDOW // 2)
        pair.carry()
    assert len(body_of(pair)) == 5 * WINDOW


@pytest.mark.clause("EN-102")
def test_credit_returns_as_the_reader_consumes_and_the_sender_hears_when_it_may_go_on() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = started(pair)
    pair.node.send_body(theirs, bytes(WINDOW + 100))
    pair.carry()
    assert not pair.of(events.StreamWritable, pair.node_events)
    pair.edge.consumed(ours, WINDOW // 2 - 1)
    pair.carry()
    assert theirs.credit_bytes == -100, "too little to be worth a packet"
    pair.edge.consumed(ours, 1)
    pair.carry()
    assert pair.of(events.StreamWritable, pair.node_events) == [events.StreamWritable(theirs)]
    assert theirs.credit_bytes == WINDOW // 2 - 100
    assert len(body_of(pair)) == WINDOW + 100


@pytest.mark.clause("EN-102")
def test_a_node_that_overspends_ends_its_connection() -> None:
    pair = SessionPair.ready(SETTINGS)
    started(pair)
    frames = [
        p.TunnelFrame(run_id="run-1", kind=p.FrameKind.BODY, sequence=n + 2, body=bytes(WINDOW // 2))
        for n in range(3)
    ]
    assert reason_of(to_edge(pair, *frames)) == "CREDIT_OVERSPENT"


@pytest.mark.clause("EN-102")
@pytest.mark.parametrize("grant", [0, 1, (1 << 32) - 1])
def test_credit_out_of_nothing_ends_the_connection(grant: int) -> None:
    pair = SessionPair.ready(SETTINGS)
    started(pair)
    assert reason_of(to_node(pair, p.StreamCredit(stream_id="run-1", bytes=grant))) == "CREDIT_OVERGRANTED"


@pytest.mark.clause("EN-102")
def test_credit_for_an_ended_run_is_ignored() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = started(pair)
    pair.node.end(theirs)
    pair.carry()
    assert to_node(pair, p.StreamCredit(stream_id="run-1", bytes=5)) == []
    assert to_edge(pair, p.StreamCredit(stream_id="run-1", bytes=5)) == []
    pair.edge.consumed(ours, 123)
    assert not pair.edge.has_output


@pytest.mark.clause("EN-102")
def test_consuming_more_than_was_received_is_refused_and_changes_nothing() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, _ = started(pair)
    with pytest.raises(LocalProtocolError):
        pair.edge.consumed(ours, 1)
    assert not pair.edge.has_output


@pytest.mark.clause("EN-102")
def test_terminals_need_no_credit_of_their_own() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = started(pair)
    pair.node.send_body(theirs, bytes(WINDOW))
    pair.node.fail(theirs, m.StreamError(code="upstream_truncated"))
    pair.carry()
    assert theirs.credit_bytes == 0
    assert pair.of(events.TunnelEnded, pair.edge_events)[0].error.code == "upstream_truncated"


# ---- cancel ----


@pytest.mark.clause("EN-56", "EN-70")
def test_a_cancel_reaches_the_handler_once_and_its_terminal_comes_back() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = started(pair)
    for _ in range(2):
        pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE, at_safe_point=True)
    pair.carry()
    assert pair.of(events.StreamCancelled, pair.node_events) == [
        events.StreamCancelled(theirs, m.CancelReason.CLIENT_GONE)
    ]
    assert theirs.cancel_at_safe_point
    pair.node.fail(theirs, CANCELLED)
    pair.carry()
    assert pair.of(events.TunnelEnded, pair.edge_events)[0].error.code == "cancelled"
    assert pair.edge.streams_open == pair.node.streams_open == 0


@pytest.mark.clause("EN-70", "EN-112")
def test_a_second_cancel_packet_never_reaches_the_handler() -> None:
    pair = SessionPair.ready(SETTINGS)
    started(pair)
    cancel = p.Cancel(kind=p.CancelKind.CANCEL_RUN, run_id="run-1", reason_code="timeout")
    other = p.Cancel(kind=p.CancelKind.CANCEL_RUN, run_id="run-1", reason_code="a-reason-of-tomorrow")
    found = to_node(pair, cancel, other, cancel)
    assert [event.reason for event in pair.of(events.StreamCancelled, found)] == [m.CancelReason.TIMEOUT]


@pytest.mark.clause("EN-106")
def test_a_cancel_never_overtakes_its_opening_packet() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours = pair.edge.open_tunnel(make.tunnel_request())
    assert not ours.is_handed_over
    found = pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE)
    assert [type(event) for event in found] == [events.TunnelEnded]
    assert found[0].error.before_start  # type: ignore[union-attr]
    assert pair.edge.data_to_send() == b"", "the Node never hears of either"
    second = pair.edge.open_run(make.run_request("run-2"))
    pair.to_node()
    assert second.is_handed_over
    pair.edge.cancel(second, m.CancelReason.TIMEOUT)
    pair.to_node()
    assert [type(event) for event in pair.node_events] == [events.StreamOpened, events.StreamCancelled]


@pytest.mark.clause("EN-106")
def test_a_cancel_drops_unsent_continuation_frames_and_goes_ahead_of_other_streams() -> None:
    pair = SessionPair.ready(SessionSettings(stream_window_bytes=MIB))
    other = pair.edge.open_tunnel(make.tunnel_request("other"), [bytes(MIB)])
    ours = pair.edge.open_tunnel(make.tunnel_request("gone"), [bytes(MIB)])
    pair.to_node()
    assert ours.is_handed_over
    pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE)
    first, *rest = messages(pair.edge.data_to_send(1 << 22))
    assert isinstance(first, p.Cancel)
    assert {message.stream_id for message in rest} == {"other"}  # type: ignore[union-attr]
    assert ours.upload_bytes_left == 0
    assert other.upload_bytes_left == 0


@pytest.mark.clause("EN-106")
def test_a_node_cancelled_before_the_body_is_whole_opens_nothing_and_sends_the_one_terminal() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours = pair.edge.open_tunnel(make.tunnel_request(), [bytes(10 * WINDOW)])
    pair.to_node(2 * WINDOW)
    pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE)
    pair.carry()
    assert pair.node_events == [], "the handler hears neither of the tunnel nor of its end"
    (ended,) = pair.of(events.TunnelEnded, pair.edge_events)
    assert ended.error.code == "cancelled"
    assert ended.error.before_start


@pytest.mark.clause("EN-102")
def test_a_cancel_wakes_a_sender_that_waits_for_credit() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = started(pair)
    pair.node.send_body(theirs, bytes(2 * WINDOW))
    pair.carry()
    assert theirs.credit_bytes < 0
    pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE)
    pair.carry()
    assert pair.of(events.StreamCancelled, pair.node_events)
    pair.node.send_body(theirs, b"nobody reads this")
    pair.node.fail(theirs, CANCELLED)
    pair.carry()
    assert pair.of(events.TunnelEnded, pair.edge_events)[0].error.code == "cancelled"
    assert len(body_of(pair)) == WINDOW


@pytest.mark.clause("EN-52", "EN-102")
def test_an_end_that_waits_behind_dropped_bytes_becomes_a_cancellation() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = started(pair)
    pair.node.send_body(theirs, bytes(2 * WINDOW))
    pair.node.end(theirs)
    pair.carry()
    assert not ours.is_ended
    pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE)
    pair.carry()
    (ended,) = pair.of(events.TunnelEnded, pair.edge_events)
    assert ended.error.code == "cancelled", "END would claim that the body was whole"
    assert pair.of(events.StreamCancelled, pair.node_events) == [], "its handler had finished"


@pytest.mark.clause("EN-70")
def test_cancels_of_unknown_runs_and_of_unknown_kinds_are_no_ops() -> None:
    pair = SessionPair.ready(SETTINGS)
    found = to_node(
        pair,
        p.Cancel(kind=p.CancelKind.CANCEL_RUN, run_id="nobody"),
        p.Cancel(kind=p.CancelKind.UNSPECIFIED, run_id="nobody"),
    )
    assert found == []
    assert not pair.node.has_output


@pytest.mark.clause("EN-70")
def test_terminating_a_session_cancels_its_streams_and_only_those() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_run(make.run_request("a", session_id="s1"))
    pair.edge.open_tunnel(make.tunnel_request("b", session_id="s1"))
    pair.edge.open_run(make.run_request("c", session_id="s2"))
    pair.carry()
    pair.node_events.clear()
    pair.edge.terminate_session("s1", m.CancelReason.CLIENT_GONE)
    pair.carry()
    cancelled = pair.of(events.StreamCancelled, pair.node_events)
    assert {event.stream.stream_id for event in cancelled} == {"a", "b"}
    assert {event.reason for event in cancelled} == {m.CancelReason.SESSION_TERMINATED}
    assert pair.node_events[-1] == events.SessionTerminated("s1")


# ---- losing the connection ----


@pytest.mark.clause("EN-31", "EN-112")
def test_when_the_connection_ends_every_stream_gets_its_one_terminal_and_knows_whether_it_was_handed_over() -> (
    None
):
    pair = SessionPair.ready(SETTINGS)
    started(pair, "sent")
    run = pair.edge.open_run(make.run_request("unsent"))
    call = pair.edge.send_command(m.CommandRequest(type=m.CommandType.USAGE))
    step = pair.edge.start_step(make.admin_step())
    found = pair.edge.connection_lost()
    (ended,) = pair.of(events.TunnelEnded, found)
    assert (ended.error.code, ended.error.before_start) == ("node_lost", False)
    (lost,) = pair.of(events.RunEventReceived, found)
    assert lost.stream is run
    assert lost.event.type is m.RunEventType.ERROR
    assert lost.event.error.before_start
    assert events.CommandAnswered(call, None) in found
    assert events.StepEnded(step, None) in found
    assert isinstance(found[-1], events.Closed)
    assert pair.edge.streams_open == 0


@pytest.mark.clause("EN-117")
def test_when_the_connection_ends_the_nodes_streams_are_cancelled_and_its_steps_go_on() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = started(pair)
    pair.edge.start_step(make.admin_step())
    pair.carry()
    found = pair.node.receive_eof()
    assert found[:-1] == [events.StreamCancelled(theirs, m.CancelReason.CONNECTION_LOST)]
    step = opened(pair)
    pair.node.finish_step(step, m.AdminStepResult(operation_id="op-1", step=1))
    assert pair.node.counters.late_local_calls == 1


# ---- runs ----


def run(pair: SessionPair, **changes: Any) -> tuple[EdgeStream, NodeStream]:
    ours = pair.edge.open_run(make.run_request(**changes))
    pair.carry()
    return ours, opened(pair)


@pytest.mark.clause("EN-40", "EN-43", "EN-44")
def test_a_run_carries_its_request_and_events_in_order() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = run(pair, workspace="/w", metadata={"k": "v"}, session_id="s")
    assert theirs.kind is StreamKind.RUN
    assert theirs.request == make.run_request(workspace="/w", metadata={"k": "v"}, session_id="s")
    sent = [
        m.RunEvent(type=m.RunEventType.START),
        m.RunEvent(type=m.RunEventType.DELTA, delta="grüß "),
        m.RunEvent(type=m.RunEventType.DELTA, delta="Gott", output_index=1),
        m.RunEvent(type=m.RunEventType.COMPLETE, finish_reasons=("stop", "length")),
    ]
    for event in sent:
        pair.node.emit(theirs, event)
    pair.carry()
    assert pair.edge_events == [events.RunEventReceived(ours, event) for event in sent]
    assert pair.edge.streams_open == pair.node.streams_open == 0


@pytest.mark.clause("EN-101")
def test_a_large_run_input_arrives_whole() -> None:
    pair = SessionPair.ready(SETTINGS)
    text = bytes(range(256)) * 1000
    _, theirs = run(pair, input=text)
    assert theirs.request.input == text  # type: ignore[union-attr]


@pytest.mark.clause("EN-40")
@pytest.mark.parametrize("kind", [m.RunEventType.DELTA, m.RunEventType.COMPLETE])
def test_a_run_that_goes_on_before_its_start_is_refused_on_both_sides(kind: m.RunEventType) -> None:
    pair = SessionPair.ready(SETTINGS)
    _, theirs = run(pair)
    with pytest.raises(LocalProtocolError):
        pair.node.emit(theirs, m.RunEvent(type=kind))
    assert (
        reason_of(to_edge(pair, p.RunFrame(run_id="run-1", sequence=1, event=m.RunEvent(type=kind))))
        == "NOT_STARTED"
    )


@pytest.mark.clause("EN-40", "EN-117")
def test_a_run_may_be_refused_before_its_start() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = run(pair)
    busy = m.StreamError(code="busy", retryable=True, before_start=True)
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.ERROR, error=busy))
    pair.carry()
    assert pair.edge_events == [
        events.RunEventReceived(ours, m.RunEvent(type=m.RunEventType.ERROR, error=busy))
    ]


@pytest.mark.clause("EN-102")
def test_deltas_spend_credit_in_utf8_bytes_and_long_ones_travel_in_pieces() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = run(pair)
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.START))
    text = "ä" * WINDOW
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.DELTA, delta=text, reasoning_delta="r" * 10))
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.COMPLETE, delta="!"))
    got: list[m.RunEvent] = []
    while not ours.is_ended:
        pair.carry()
        fresh = [event.event for event in pair.edge_events]  # type: ignore[union-attr]
        assert fresh, "credit never comes to a standstill"
        assert sum(event.credit_bytes for event in fresh) <= WINDOW
        pair.edge_events.clear()
        got += fresh
        for event in fresh:
            pair.edge.consumed(ours, event.credit_bytes)
    assert "".join(event.delta for event in got) == text + "!"
    assert "".join(event.reasoning_delta for event in got) == "r" * 10
    assert got[-1] == m.RunEvent(type=m.RunEventType.COMPLETE)


@pytest.mark.clause("EN-102")
def test_a_cancelled_run_drops_waiting_deltas_and_does_not_claim_to_be_complete() -> None:
    pair = SessionPair.ready(SETTINGS)
    ours, theirs = run(pair)
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.START))
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.DELTA, delta="x" * 3 * WINDOW))
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.COMPLETE))
    pair.carry()
    pair.edge.cancel(ours, m.CancelReason.CLIENT_GONE)
    pair.carry()
    assert pair.edge_events[-1].event.type is m.RunEventType.CANCELLED  # type: ignore[union-attr]


def test_tunnel_frames_for_a_run_and_run_events_for_a_tunnel_end_the_connection() -> None:
    pair = SessionPair.ready(SETTINGS)
    run(pair)
    assert reason_of(
        to_edge(pair, p.TunnelFrame(run_id="run-1", kind=p.FrameKind.BODY, sequence=1, body=b"x"))
    ) == ("WRONG_KIND")
    pair = SessionPair.ready(SETTINGS)
    tunnel(pair)
    event = m.RunEvent(type=m.RunEventType.START)
    assert reason_of(to_edge(pair, p.RunFrame(run_id="run-1", sequence=1, event=event))) == "WRONG_KIND"


# ---- calls, steps, reports ----


@pytest.mark.clause("EN-75")
def test_commands_are_paired_with_their_answers_whatever_the_order() -> None:
    pair = SessionPair.ready(SETTINGS)
    first = pair.edge.send_command(m.CommandRequest(type=m.CommandType.USAGE))
    second = pair.edge.send_command(m.CommandRequest(type=m.CommandType.PROVIDERS, adapter="a"))
    pair.carry()
    asked = pair.of(events.CommandReceived, pair.node_events)
    assert [event.request.type for event in asked] == [m.CommandType.USAGE, m.CommandType.PROVIDERS]
    for event in reversed(asked):
        pair.node.respond_command(event.call_id, m.CommandResponse(type=event.request.type, ok=True))
        pair.node.respond_command(event.call_id, m.CommandResponse(type=event.request.type, ok=False))
    pair.carry()
    assert pair.edge_events == [
        events.CommandAnswered(second, m.CommandResponse(type=m.CommandType.PROVIDERS, ok=True)),
        events.CommandAnswered(first, m.CommandResponse(type=m.CommandType.USAGE, ok=True)),
    ]
    assert pair.node.counters.late_local_calls == 2


@pytest.mark.clause("EN-80", "EN-81")
def test_a_refresh_carries_a_config_and_its_outcome_back() -> None:
    pair = SessionPair.ready(SETTINGS)
    call = pair.edge.send_refresh(make.node_config(config_revision=5))
    pair.carry()
    (asked,) = pair.of(events.RefreshReceived, pair.node_events)
    assert asked.config.config_revision == 5
    answer = m.RefreshResponse(outcome=m.RefreshOutcome.FAILED, config_revision=1, reason="no such engine")
    pair.node.respond_refresh(asked.call_id, answer)
    pair.carry()
    assert pair.edge_events == [events.RefreshAnswered(call, answer)]


@pytest.mark.clause("EN-75")
def test_an_answer_that_nobody_waits_for_any_more_is_dropped_and_counted() -> None:
    pair = SessionPair.ready(SETTINGS)
    call = pair.edge.send_command(m.CommandRequest(type=m.CommandType.USAGE))
    pair.carry()
    pair.edge.forget_call(call)
    pair.node.respond_command(call, m.CommandResponse(type=m.CommandType.USAGE, ok=True))
    pair.carry()
    assert pair.edge_events == [events.LateFrameDropped()]


def test_an_answer_of_the_wrong_kind_is_no_answer() -> None:
    pair = SessionPair.ready(SETTINGS)
    call = pair.edge.send_command(m.CommandRequest(type=m.CommandType.USAGE))
    pair.carry()
    wrong = m.RefreshResponse(outcome=m.RefreshOutcome.APPLIED, config_revision=1)
    found = pair.edge.receive_data(frame(codec.encode(wrong, call)), now=0)
    assert found == [events.LateFrameDropped()]


@pytest.mark.clause("EN-120", "EN-106")
def test_an_admin_step_goes_ahead_of_streams_and_brings_events_then_one_result() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request(), [b"x" * 50_000])
    ours = pair.edge.start_step(make.admin_step(), [b"tensor", b"bytes" * 5000])
    first, *_ = messages(pair.edge.data_to_send(100))
    assert isinstance(first, p.OpenStep)
    pair.node_events += to_node(pair, first)
    pair.carry()
    theirs = [event.stream for event in pair.of(events.StreamOpened, pair.node_events)][-1]
    assert theirs.kind is StreamKind.STEP
    assert b"".join(theirs.body) == b"tensor" + b"bytes" * 5000
    pair.node.emit_step(theirs, m.AdminStepEvent(operation_id="op-1", step=1, progress=b""))
    result = m.AdminStepResult(operation_id="op-1", step=1)
    pair.node.finish_step(theirs, result)
    pair.node.finish_step(theirs, result)
    pair.carry()
    step_events = [event for event in pair.edge_events if not isinstance(event, events.LateFrameDropped)]
    assert step_events == [
        events.StepProgressed(
            ours,
            m.AdminStepEvent(operation_id="op-1", step=1, progress=b"", adapter="engine", group_id="engine"),
        ),
        events.StepEnded(ours, replace(result, adapter="engine", group_id="engine")),
    ]


@pytest.mark.clause("EN-120", "AD-104")
def test_one_operation_may_step_several_groups_of_a_node_side_by_side() -> None:
    pair = SessionPair.ready(SETTINGS)
    steps = [
        replace(make.admin_step(), adapter=adapter, group_id=group)
        for adapter, group in (("a", "g"), ("b", "g"), ("a", "h"))
    ]
    ours = [pair.edge.start_step(step, [step.adapter.encode() * 3000]) for step in steps]
    pair.carry()
    theirs = [event.stream for event in pair.of(events.StreamOpened, pair.node_events)]
    assert [stream.request for stream in theirs] == steps
    assert [b"".join(stream.body) for stream in theirs] == [b"a" * 3000, b"b" * 3000, b"a" * 3000]
    for stream in reversed(theirs):
        pair.node.finish_step(stream, m.AdminStepResult(operation_id="op-1", step=1))
    pair.carry()
    ended = pair.of(events.StepEnded, pair.edge_events)
    assert [event.stream for event in ended] == ours[::-1]


@pytest.mark.clause("EN-108", "EN-120")
def test_a_repeated_step_has_one_effect_while_open_and_may_be_asked_again_afterwards() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.start_step(make.admin_step())
    pair.carry()
    with pytest.raises(LocalProtocolError):
        pair.edge.start_step(make.admin_step())
    assert to_node(pair, p.OpenStep(step=make.admin_step())) == []
    pair.node.finish_step(opened(pair), m.AdminStepResult(operation_id="op-1", step=1))
    pair.carry()
    pair.edge.start_step(make.admin_step())
    pair.carry()
    assert len(pair.of(events.StreamOpened, pair.node_events)) == 2, (
        "the Node's step book answers from memory"
    )


@pytest.mark.clause("EN-34")
def test_reports_are_dropped_rather_than_queued_for_an_edge_that_does_not_read() -> None:
    pair = SessionPair.ready(SETTINGS)
    big = m.ProviderReport(providers=(m.ProviderSnapshot(id="a", reason="x" * 100_000),))
    sent = sum(pair.node.send_report(big) for _ in range(100))
    assert sent < 5
    pair.carry()
    assert len(pair.of(events.ReportReceived, pair.edge_events)) == sent


# ---- what is larger than a frame ----


@pytest.mark.clause("EN-100", "EN-101")
def test_what_is_larger_than_a_frame_is_refused_here_rather_than_by_the_peer() -> None:
    limit = 65_536
    pair = SessionPair.ready(SessionSettings(frame_bytes_max=limit))
    with pytest.raises(InvalidRequest):
        pair.edge.open_tunnel(make.tunnel_request(metadata={"a": "x" * limit}))
    with pytest.raises(LocalProtocolError):
        pair.edge.send_command(m.CommandRequest(type=m.CommandType.USAGE, adapter="x" * limit))
    assert pair.edge.streams_open == 0
    assert not pair.edge.has_output
    _, theirs = tunnel(pair)
    pair.node.start(theirs, status=200, headers=((b"a", bytes(limit)),), framing=m.BodyFraming.LENGTH)
    pair.node.send_body(theirs, b"x")
    pair.node.end(theirs)
    pair.carry()
    (ended,) = pair.of(events.TunnelEnded, pair.edge_events)
    assert ended.error.code == "internal"
    assert pair.node.streams_open == 0
    assert not pair.edge.is_closed


@pytest.mark.clause("EN-100")
def test_a_run_event_larger_than_a_frame_ends_its_run_alone() -> None:
    pair = SessionPair.ready(SessionSettings(frame_bytes_max=65_536))
    ours, theirs = run(pair)
    pair.node.emit(theirs, m.RunEvent(type=m.RunEventType.START))
    pair.node.emit(
        theirs, m.RunEvent(type=m.RunEventType.COMPLETE, metadata={"openai_tool_calls": "x" * 70_000})
    )
    pair.carry()
    last = pair.edge_events[-1]
    assert isinstance(last, events.RunEventReceived)
    assert last.event.type is m.RunEventType.ERROR
    assert ours.is_ended
    assert not pair.edge.is_closed
