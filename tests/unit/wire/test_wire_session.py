"""The handshake, liveness and closing of sessions, with bytes carried by hand."""

from __future__ import annotations

import dataclasses

import pytest

from iop.core.errors import LocalProtocolError
from iop.core.limits import HANDSHAKE_BYTES_MAX
from iop.testing import packets as make
from iop.testing.packets import SessionPair
from iop.wire import codec, events
from iop.wire import messages as m
from iop.wire import packets as p
from iop.wire.frames import frame
from iop.wire.session import SECOND_LOOK_S, SECOND_LOOKS_MAX, SessionSettings
from iop.wire.session_edge import EdgeSession

SETTINGS = SessionSettings(heartbeat_interval_s=5, heartbeat_timeout_s=15)


def closed(found: list[events.Event]) -> events.Closed:
    (event,) = [event for event in found if isinstance(event, events.Closed)]
    assert found[-1] is event, "Closed is the last event"
    return event


def edge() -> EdgeSession:
    return EdgeSession(settings=SETTINGS, now=0.0)


# ---- handshake ----


@pytest.mark.clause("EN-10", "EN-11", "EN-12")
def test_registration_makes_pending_and_the_ack_makes_ready() -> None:
    pair = SessionPair(SETTINGS)
    pair.node.register(make.register_request())
    pair.carry()
    assert pair.edge_events == [events.Registered(make.register_request())]
    pair.edge.respond_register(make.register_response(), now=0)
    pair.carry()
    assert pair.edge.readiness is pair.node.readiness is m.Readiness.PENDING
    pair.node.send_ready(make.ready_request(), now=0)
    pair.carry()
    assert pair.edge_events[-1] == events.ReadyReported(make.ready_request())
    assert pair.node.readiness is m.Readiness.READY_SENT
    pair.edge.respond_ready(m.ReadyAck(ready=True))
    pair.carry()
    assert pair.edge.readiness is pair.node.readiness is m.Readiness.READY
    assert pair.node_events[-1] == events.ReadyAnswered(m.ReadyAck(ready=True))


@pytest.mark.clause("EN-02")
@pytest.mark.parametrize(
    "first",
    [
        make.ready_request(),
        p.Heartbeat(sequence=1),
        p.StreamCredit(stream_id="r", bytes=1),
        m.ProviderReport(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_anything_but_a_registration_first_is_refused_and_closed(first: p.Message) -> None:
    subject = edge()
    event = closed(subject.receive_data(frame(codec.encode(first)), now=0))
    assert event.reason is m.CloseReason.PROTOCOL_ERROR
    assert subject.is_closed


@pytest.mark.clause("EN-02", "EN-10")
def test_a_second_registration_on_one_connection_is_refused() -> None:
    subject = edge()
    data = frame(codec.encode(make.register_request(), 1))
    found = subject.receive_data(data + data, now=0)
    assert isinstance(found[0], events.Registered)
    assert closed(found).reason is m.CloseReason.PROTOCOL_ERROR


@pytest.mark.clause("EN-13", "EN-81")
@pytest.mark.parametrize("state", ["connected", "registering", "pending", "ready_sent"])
def test_nothing_is_sent_to_a_node_that_is_not_ready(state: str) -> None:
    pair = SessionPair(SETTINGS)
    if state != "connected":
        pair.node.register(make.register_request())
        pair.carry()
    if state in {"pending", "ready_sent"}:
        pair.edge.respond_register(make.register_response(), now=0)
        pair.carry()
    if state == "ready_sent":
        pair.node.send_ready(make.ready_request(), now=0)
        pair.carry()
    assert pair.edge.readiness.value == state
    for action in (
        lambda: pair.edge.open_tunnel(make.tunnel_request()),
        lambda: pair.edge.open_run(make.run_request()),
        lambda: pair.edge.fetch_artifact(m.ArtifactRequest(run_id=make.RunId("r"), adapter="a", uri="u")),
        lambda: pair.edge.send_command(m.CommandRequest(type=m.CommandType.USAGE)),
        lambda: pair.edge.send_refresh(make.node_config()),
        lambda: pair.edge.start_step(make.admin_step()),
        lambda: pair.edge.terminate_session("s", m.CancelReason.CLIENT_GONE),
    ):
        with pytest.raises(LocalProtocolError):
            action()
    assert not pair.edge.has_output
    assert not pair.node.send_report(m.ProviderReport())


@pytest.mark.clause("EN-13")
def test_a_node_breaks_off_with_an_edge_that_sends_work_before_the_ack() -> None:
    pair = SessionPair(SETTINGS)
    pair.node.register(make.register_request())
    pair.carry()
    pair.edge.respond_register(make.register_response(), now=0)
    pair.carry()
    pair.node.send_ready(make.ready_request(), now=0)
    data = frame(codec.encode(p.OpenTunnel(request=make.tunnel_request())))
    assert closed(pair.node.receive_data(data, now=0)).reason is m.CloseReason.PROTOCOL_ERROR


@pytest.mark.clause("EN-14")
def test_a_repeated_ready_is_answered_each_time() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.node.send_ready(make.ready_request(), now=0)
    pair.node.send_ready(make.ready_request(), now=0)
    pair.carry()
    assert pair.edge_events == [events.ReadyReported(make.ready_request())] * 2
    pair.edge.respond_ready(m.ReadyAck(ready=True))
    pair.edge.respond_ready(m.ReadyAck(ready=True))
    pair.carry()
    assert pair.node_events == [events.ReadyAnswered(m.ReadyAck(ready=True))] * 2
    assert pair.node.readiness is m.Readiness.READY
    with pytest.raises(LocalProtocolError):
        pair.edge.respond_ready(m.ReadyAck(ready=True))


@pytest.mark.clause("EN-15")
def test_a_stale_ready_is_told_why_and_both_sides_close() -> None:
    pair = SessionPair(SETTINGS)
    pair.node.register(make.register_request())
    pair.carry()
    pair.edge.respond_register(make.register_response(), now=0)
    pair.carry()
    pair.node.send_ready(make.ready_request(), now=0)
    pair.carry()
    ack = m.ReadyAck(ready=False, reason="Another connection took over.", reason_code="superseded")
    assert closed(pair.edge.respond_ready(ack)).reason is m.CloseReason.REFUSED
    pair.carry()
    assert pair.node_events[-2] == events.ReadyAnswered(ack)
    assert closed(pair.node_events).reason is m.CloseReason.REFUSED


@pytest.mark.clause("EN-15")
def test_a_refused_registration_reaches_the_node_and_closes_both() -> None:
    pair = SessionPair(SETTINGS)
    pair.node.register(make.register_request())
    pair.carry()
    refusal = m.RegisterResponse(accepted=False, reason_code="bad_token", reason="no", retry_after_ms=50)
    assert closed(pair.edge.respond_register(refusal, now=0)).reason is m.CloseReason.REFUSED
    pair.carry()
    answer = pair.node_events[0]
    assert isinstance(answer, events.RegisterAnswered)
    assert (answer.response.reason_code, answer.response.retry_after_ms) == ("bad_token", 50)
    assert closed(pair.node_events).reason is m.CloseReason.REFUSED


@pytest.mark.clause("EN-105")
@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
def test_an_incompatible_version_is_refused_with_the_supported_range(version: int) -> None:
    pair = SessionPair(SETTINGS)
    pair.node.register(make.register_request(protocol_version=version))
    pair.carry()
    assert not pair.of(events.Registered, pair.edge_events)
    response = pair.node_events[0].response  # type: ignore[union-attr]
    assert not response.accepted
    assert response.reason_code == "unsupported_version"
    assert "1 to 1" in response.reason
    assert (response.protocol_version_min, response.protocol_version_max) == (1, 1)


@pytest.mark.clause("EN-102", "EN-103")
def test_the_edges_own_figures_go_out_with_the_config_and_rule_both_sides() -> None:
    settings = SessionSettings(heartbeat_interval_s=2, heartbeat_timeout_s=7, stream_window_bytes=50_000)
    pair = SessionPair(settings)
    pair.node.settings = SessionSettings()
    pair.node.register(make.register_request())
    pair.carry()
    runtime = m.NodeRuntime(heartbeat_timeout_ms=9000)
    pair.edge.respond_register(make.register_response(config=make.node_config(runtime=runtime)), now=0)
    pair.carry()
    assert pair.node.settings == pair.edge.settings
    assert pair.node.settings == dataclasses.replace(settings, heartbeat_timeout_s=9)


@pytest.mark.clause("EN-17")
def test_a_stranger_has_until_the_handshake_timeout() -> None:
    subject = edge()
    at = subject.next_deadline()
    assert at == SETTINGS.handshake_timeout_s
    subject.receive_data(frame(codec.encode(make.register_request()))[:7], now=at - 1)
    assert subject.next_deadline() == at, "bytes do not buy a stranger time"
    assert subject.handle_deadline(now=at - 0.001) == []
    assert closed(subject.handle_deadline(now=at)).reason is m.CloseReason.HANDSHAKE_TIMEOUT


@pytest.mark.clause("EN-17")
def test_a_pending_node_has_until_the_ready_timeout() -> None:
    subject = EdgeSession(
        settings=dataclasses.replace(SETTINGS, heartbeat_timeout_s=1000, ready_timeout_s=60), now=0
    )
    subject.receive_data(frame(codec.encode(make.register_request(), 1)), now=3)
    subject.respond_register(make.register_response(), now=4)
    assert subject.handle_deadline(now=63.9) == []
    assert closed(subject.handle_deadline(now=64)).reason is m.CloseReason.NOT_READY_IN_TIME


@pytest.mark.clause("EN-100")
def test_a_stranger_may_send_small_frames_only_and_a_registered_node_large_ones() -> None:
    header = (HANDSHAKE_BYTES_MAX + 1).to_bytes(4, "big")
    assert closed(edge().receive_data(header, now=0)).detail.startswith("FRAME_TOO_LARGE")
    pair = SessionPair.ready(SETTINGS)
    assert pair.edge.receive_data(header, now=0) == []
    header = (SETTINGS.frame_bytes_max + 1).to_bytes(4, "big")
    assert closed(SessionPair.ready(SETTINGS).edge.receive_data(header, now=0)).detail.startswith(
        "FRAME_TOO_LARGE"
    )


@pytest.mark.clause("EN-100")
@pytest.mark.parametrize(
    "data", [bytes(4), frame(b"\xff\xff"), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"]
)
def test_garbage_ends_the_session_with_a_typed_reason_and_a_goodbye(data: bytes) -> None:
    subject = edge()
    event = closed(subject.receive_data(data, now=0))
    assert event.reason is m.CloseReason.PROTOCOL_ERROR
    _, goodbye = codec.decode(subject.data_to_send()[4:])
    assert isinstance(goodbye, p.Goodbye)
    assert goodbye.reason_code == "protocol_error"
    assert subject.receive_data(frame(codec.encode(make.register_request())), now=0) == []


@pytest.mark.clause("EN-100")
def test_members_of_a_newer_peer_are_ignored_and_counted() -> None:
    pair = SessionPair.ready(SETTINGS)
    assert pair.node.receive_data(frame(b"\xba\x3f\x01x"), now=0) == []
    assert pair.node.counters.unknown_messages == 1
    assert not pair.node.is_closed


def test_a_message_for_the_other_side_ends_the_session() -> None:
    pair = SessionPair.ready(SETTINGS)
    data = frame(codec.encode(p.OpenTunnel(request=make.tunnel_request())))
    assert closed(pair.edge.receive_data(data, now=0)).detail.startswith("WRONG_DIRECTION")


# ---- liveness ----


def beats(data: bytes) -> list[p.Heartbeat]:
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        _, message = codec.decode(data[4 : 4 + size])
        if isinstance(message, p.Heartbeat):
            found.append(message)
        data = data[4 + size :]
    return found


@pytest.mark.clause("EN-103")
def test_both_sides_beat_every_interval() -> None:
    pair = SessionPair.ready(SETTINGS)
    for side in (pair.edge, pair.node):
        assert side.next_deadline() == 5
        side.handle_deadline(now=5, unix_nanos=77)
        assert beats(side.data_to_send()) == [p.Heartbeat(sequence=1, clock_unix_nanos=77)]
        assert side.next_deadline() == 10


@pytest.mark.clause("EN-103")
def test_beats_do_not_pile_up_for_a_peer_that_does_not_read() -> None:
    pair = SessionPair.ready(SETTINGS)
    for n in range(1, 4):
        pair.edge.receive_data(frame(codec.encode(p.Heartbeat(sequence=n))), now=5 * n)
        pair.edge.handle_deadline(now=5 * n)
    assert len(beats(pair.edge.data_to_send())) == 1


def run_until(session: EdgeSession, end: float, lateness: float = 0.0) -> tuple[float, list[events.Event]]:
    """Fire deadlines as a punctual, or a late, loop would."""
    found: list[events.Event] = []
    now = 0.0
    while not session.is_closed:
        at = session.next_deadline()
        if at is None or at > end:
            break
        now = max(now, at) + lateness
        found += session.handle_deadline(now=now)
    return now, found


@pytest.mark.clause("EN-103")
def test_a_silent_peer_is_dead_at_the_timeout_and_not_before() -> None:
    pair = SessionPair.ready(SETTINGS)
    _, found = run_until(pair.edge, 14.99)
    assert found == []
    now, found = run_until(pair.edge, 100)
    assert closed(found).reason is m.CloseReason.HEARTBEAT_TIMEOUT
    assert now == pytest.approx(15)


@pytest.mark.clause("EN-103", "EN-113")
def test_any_frame_refreshes_liveness() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request())
    pair.carry()
    pair.edge.receive_data(frame(codec.encode(p.StreamCredit(stream_id="run-x", bytes=1))), now=12)
    _, found = run_until(pair.edge, 26.9)
    assert found == []
    now, found = run_until(pair.edge, 100)
    assert closed(found).reason is m.CloseReason.HEARTBEAT_TIMEOUT
    assert now == pytest.approx(27)


@pytest.mark.clause("EN-113")
def test_after_a_stall_of_our_own_what_waits_is_read_before_anyone_is_declared_dead() -> None:
    pair = SessionPair.ready(SETTINGS)
    # The loop stood still for a minute; the timer fires before the socket is polled.
    assert pair.edge.handle_deadline(now=60) == []
    second = pair.edge.next_deadline()
    assert second is not None
    assert second <= 60 + SECOND_LOOK_S
    # Then the socket is polled, and the peer turns out to have spoken all the while.
    pair.edge.receive_data(frame(codec.encode(p.Heartbeat(sequence=1))), now=60.01)
    _, found = run_until(pair.edge, 75)
    assert found == []
    assert not pair.edge.is_closed


@pytest.mark.clause("EN-113")
def test_a_second_look_that_comes_late_is_no_look() -> None:
    pair = SessionPair.ready(SETTINGS)
    assert pair.edge.handle_deadline(now=14.9) == []
    assert pair.edge.handle_deadline(now=60) == [], "stopped between the two looks"
    now, found = run_until(pair.edge, 61)
    assert closed(found).reason is m.CloseReason.HEARTBEAT_TIMEOUT
    assert now == pytest.approx(60 + SECOND_LOOK_S)


@pytest.mark.clause("EN-113")
def test_a_loop_that_is_always_late_does_not_keep_the_dead_alive() -> None:
    pair = SessionPair.ready(SETTINGS)
    now, found = run_until(pair.edge, 1000, lateness=3)
    assert closed(found).reason is m.CloseReason.HEARTBEAT_TIMEOUT
    assert now < 15 + (SECOND_LOOKS_MAX + 4) * 4


@pytest.mark.clause("EN-113")
def test_the_peers_wall_clock_is_told_and_decides_nothing() -> None:
    pair = SessionPair.ready(SETTINGS)
    found = pair.edge.receive_data(
        frame(codec.encode(p.Heartbeat(sequence=1, clock_unix_nanos=10**19))), now=1
    )
    assert found == [events.PeerClockSeen(10**19)]
    assert pair.edge.next_deadline() == 5


# ---- closing ----


@pytest.mark.clause("EN-109", "EN-115")
def test_a_goodbye_tells_the_peer_why_and_comes_after_everything_else() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request())
    pair.carry()
    stream = pair.of(events.StreamOpened, pair.node_events)[0].stream
    pair.node.fail(stream, m.StreamError(code="node_shutdown"))
    pair.node.close(m.CloseReason.SHUTDOWN, "Node stops.")
    pair.carry()
    ended = pair.of(events.TunnelEnded, pair.edge_events)
    assert [event.error.code for event in ended] == ["node_shutdown"]
    event = closed(pair.edge_events)
    assert (event.reason, event.detail, event.by_peer) == (m.CloseReason.SHUTDOWN, "Node stops.", True)


@pytest.mark.clause("EN-17")
def test_an_end_of_file_closes_and_within_a_frame_it_is_a_protocol_error() -> None:
    assert closed(SessionPair.ready(SETTINGS).edge.receive_eof()).reason is m.CloseReason.PEER_CLOSED
    pair = SessionPair.ready(SETTINGS)
    pair.edge.receive_data(b"\x00\x00\x00", now=0)
    assert closed(pair.edge.receive_eof()).reason is m.CloseReason.PROTOCOL_ERROR


def test_closing_twice_and_losing_the_transport_afterwards_tell_closed_once() -> None:
    pair = SessionPair.ready(SETTINGS)
    found = pair.edge.close(m.CloseReason.SUPERSEDED)
    found += pair.edge.close(m.CloseReason.SHUTDOWN)
    found += pair.edge.receive_eof() + pair.edge.connection_lost() + pair.edge.handle_deadline(now=99)
    assert closed(found).reason is m.CloseReason.SUPERSEDED
    assert pair.edge.next_deadline() is None


@pytest.mark.clause("EN-33", "EN-57")
def test_nothing_that_comes_after_closing_has_an_effect() -> None:
    pair = SessionPair.ready(SETTINGS)
    pair.edge.open_tunnel(make.tunnel_request())
    pair.carry()
    stream = pair.of(events.StreamOpened, pair.node_events)[0].stream
    pair.node.start(stream, status=200, headers=(), framing=m.BodyFraming.LENGTH)
    pair.node.send_body(stream, b"late")
    pair.node.end(stream)
    pair.edge_events += pair.edge.close(m.CloseReason.SUPERSEDED)
    before = len(pair.edge_events)
    pair.to_edge()
    assert pair.edge_events[before:] == [events.LateFrameDropped()] * 3, "counted, and nothing else"


def test_a_goodbye_of_a_newer_peer_has_an_unknown_reason() -> None:
    pair = SessionPair.ready(SETTINGS)
    found = pair.edge.receive_data(
        frame(codec.encode(p.Goodbye(reason_code="tired", reason="x" * 9999))), now=0
    )
    assert closed(found).reason is m.CloseReason.UNKNOWN
    assert len(closed(found).detail) <= 512
