"""Two sessions back to back under random interleaving: order, one terminal, credit, no cancel lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from iop.testing import packets as make
from iop.testing.packets import SessionPair
from iop.wire import events
from iop.wire import messages as m
from iop.wire.session import SessionSettings
from iop.wire.stream_edge import EdgeStream
from iop.wire.stream_node import NodeStream
from iop.wire.streams import StreamKind

WINDOW = 4096
SETTINGS = SessionSettings(stream_window_bytes=WINDOW)


class Fate:
    """What a test knows of one stream."""

    def __init__(self, stream: EdgeStream, body: bytes) -> None:
        self.stream = stream
        self.request_body = body
        self.theirs: NodeStream | None = None
        self.has_started = False
        self.sent = bytearray()
        self.received = bytearray()
        self.unconsumed = 0
        self.terminals = 0
        self.is_whole = False
        self.was_ended_whole = False
        self.was_cancelled = False
        self.cancels_heard = 0


class TwoSessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair = SessionPair.ready(SETTINGS)
        self.to_node = bytearray()
        self.to_edge = bytearray()
        self.fates: dict[str, Fate] = {}
        self.letter = 0

    # ---- what may happen ----

    @initialize()
    def begin(self) -> None:
        self.count = 0

    def _name(self) -> str:
        self.count += 1
        return f"run-{self.count}"

    def _pick(
        self, data: st.DataObject, *, at_node: bool = False, kind: StreamKind | None = None
    ) -> Fate | None:
        names = [
            name
            for name, fate in self.fates.items()
            if (not at_node or (fate.theirs is not None and not fate.theirs.is_terminated))
            and (kind is None or fate.stream.kind is kind)
        ]
        return self.fates[data.draw(st.sampled_from(names))] if names else None

    @rule(size=st.sampled_from([0, 10, 60_000, 70_000, 100_000]))
    def open_tunnel(self, size: int) -> None:
        name = self._name()
        body = bytes(n % 251 for n in range(size))
        stream = self.pair.edge.open_tunnel(make.tunnel_request(name), [body[:7], body[7:]])
        self.fates[name] = Fate(stream, body)

    @rule(size=st.sampled_from([0, 10, 70_000]))
    def open_run(self, size: int) -> None:
        name = self._name()
        body = bytes(size)
        self.fates[name] = Fate(self.pair.edge.open_run(make.run_request(name, input=body)), body)

    @rule(limit=st.sampled_from([1, 500, 5000, 65536]))
    def edge_writes(self, limit: int) -> None:
        self.to_node += self.pair.edge.data_to_send(limit)

    @rule(limit=st.sampled_from([1, 500, 5000, 65536]))
    def node_writes(self, limit: int) -> None:
        self.to_edge += self.pair.node.data_to_send(limit)

    @rule(size=st.integers(1, 70_000))
    def node_reads(self, size: int) -> None:
        piece = bytes(self.to_node[:size])
        del self.to_node[:size]
        self._node_heard(self.pair.node.receive_data(piece, now=0))

    @rule(size=st.integers(1, 70_000))
    def edge_reads(self, size: int) -> None:
        piece = bytes(self.to_edge[:size])
        del self.to_edge[:size]
        self._edge_heard(self.pair.edge.receive_data(piece, now=0))

    @precondition(lambda self: self.fates)
    @rule(data=st.data(), size=st.sampled_from([1, 100, 3000, 9000]))
    def node_sends(self, data: st.DataObject, size: int) -> None:
        fate = self._pick(data, at_node=True)
        if fate is None or fate.theirs is None:
            return
        node = self.pair.node
        self._start(fate)
        self.letter = (self.letter + 1) % 26
        piece = bytes([97 + self.letter]) * size
        if fate.stream.kind is StreamKind.RUN:
            node.emit(fate.theirs, m.RunEvent(type=m.RunEventType.DELTA, delta=piece.decode()))
        else:
            node.send_body(fate.theirs, piece)
        fate.sent += piece

    @precondition(lambda self: self.fates)
    @rule(data=st.data(), well=st.booleans())
    def node_ends(self, data: st.DataObject, well: bool) -> None:
        fate = self._pick(data, at_node=True)
        if fate is not None:
            self._end(fate, well=well)

    @precondition(lambda self: self.fates)
    @rule(data=st.data(), share=st.sampled_from([0.3, 0.5, 1.0]))
    def edge_consumes(self, data: st.DataObject, share: float) -> None:
        fate = self._pick(data)
        if fate is not None and fate.unconsumed:
            size = max(1, int(fate.unconsumed * share))
            self.pair.edge.consumed(fate.stream, size)
            fate.unconsumed -= size

    @precondition(lambda self: self.fates)
    @rule(data=st.data())
    def edge_cancels(self, data: st.DataObject) -> None:
        fate = self._pick(data)
        if fate is not None:
            fate.was_cancelled = fate.was_cancelled or not fate.stream.is_ended
            self._edge_heard(self.pair.edge.cancel(fate.stream, m.CancelReason.CLIENT_GONE))

    # ---- what the shells do ----

    def _start(self, fate: Fate) -> None:
        if fate.has_started or fate.theirs is None:
            return
        fate.has_started = True
        if fate.stream.kind is StreamKind.RUN:
            self.pair.node.emit(fate.theirs, m.RunEvent(type=m.RunEventType.START))
        else:
            self.pair.node.start(fate.theirs, status=200, headers=(), framing=m.BodyFraming.CHUNKED)

    def _end(self, fate: Fate, *, well: bool) -> None:
        assert fate.theirs is not None
        node = self.pair.node
        error = m.StreamError(code="upstream_error")
        if well:
            self._start(fate)
            fate.was_ended_whole = True
        if fate.stream.kind is StreamKind.RUN:
            kind = m.RunEventType.COMPLETE if well else m.RunEventType.ERROR
            node.emit(fate.theirs, m.RunEvent(type=kind, error=None if well else error))
        elif well:
            node.end(fate.theirs)
        else:
            node.fail(fate.theirs, error)

    def _node_heard(self, found: list[events.Event]) -> None:
        for event in found:
            assert not isinstance(event, events.Closed), event
            if isinstance(event, events.StreamOpened):
                fate = self.fates[event.stream.stream_id]
                assert fate.theirs is None, "opened twice"
                fate.theirs = event.stream
                request: Any = event.stream.request
                body = request.input if fate.stream.kind is StreamKind.RUN else b"".join(event.stream.body)
                assert body == fate.request_body
            elif isinstance(event, events.StreamCancelled):
                fate = self.fates[event.stream.stream_id]
                fate.cancels_heard += 1
                assert fate.was_cancelled
                assert fate.cancels_heard == 1

    def _edge_heard(self, found: list[events.Event]) -> None:
        for event in found:
            assert not isinstance(event, events.Closed | events.LateFrameDropped), event
            stream: EdgeStream = event.stream  # type: ignore[union-attr]
            fate = self.fates[stream.stream_id]
            assert not fate.terminals, "nothing after the terminal"
            if isinstance(event, events.BodyReceived):
                fate.received += event.data
                fate.unconsumed += len(event.data)
            elif isinstance(event, events.TunnelEnded):
                fate.terminals += 1
                fate.is_whole = event.error is None
            elif isinstance(event, events.RunEventReceived):
                fate.received += event.event.delta.encode()
                fate.unconsumed += event.event.credit_bytes
                if event.event.type.is_terminal:
                    fate.terminals += 1
                    fate.is_whole = event.event.type is m.RunEventType.COMPLETE

    # ---- what must hold ----

    @invariant()
    def bytes_arrive_in_order_and_unchanged(self) -> None:
        for fate in self.fates.values():
            assert fate.sent.startswith(fate.received)
            assert fate.terminals <= 1
            if fate.is_whole:
                assert fate.was_ended_whole
                assert fate.received == fate.sent

    @invariant()
    def credit_is_never_created(self) -> None:
        for fate in self.fates.values():
            window = fate.stream.window
            assert window.available >= 0
            if fate.theirs is not None:
                available = fate.theirs._credit.available
                assert 0 <= available <= WINDOW
                assert available + window.held + window.owed <= WINDOW
                assert fate.theirs.window.available >= 0

    @invariant()
    def a_stalled_reader_holds_at_most_its_window(self) -> None:
        for fate in self.fates.values():
            assert fate.unconsumed <= WINDOW

    def teardown(self) -> None:
        """Let everything come to rest, look at the credit, then to its end; nothing may be left."""
        self._settle(end=False)
        for fate in self.fates.values():
            if fate.theirs is not None and not fate.stream.is_ended:
                window = fate.stream.window
                assert fate.theirs._credit.available + window.held + window.owed == WINDOW
            if fate.was_cancelled and fate.theirs is not None and not fate.theirs.is_terminated:
                assert fate.cancels_heard == 1, "no cancel is lost"
        self._settle(end=True)
        for fate in self.fates.values():
            assert fate.terminals == 1
            if fate.was_ended_whole and not fate.was_cancelled:
                assert fate.is_whole
        assert self.pair.edge.streams_open == self.pair.node.streams_open == 0

    def _settle(self, *, end: bool) -> None:
        while True:
            for fate in self.fates.values():
                if fate.unconsumed:
                    self.pair.edge.consumed(fate.stream, fate.unconsumed)
                    fate.unconsumed = 0
                if end and fate.theirs is not None and not fate.theirs.is_terminated:
                    self._end(fate, well=True)
            self.edge_writes(65536)
            self.node_writes(65536)
            if not self.to_node and not self.to_edge:
                return
            self.node_reads(1 << 20)
            self.edge_reads(1 << 20)


TestTwoSessions = TwoSessions.TestCase
TestTwoSessions.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTwoSessions = pytest.mark.clause("EN-40", "EN-52", "EN-57", "EN-101", "EN-102", "EN-106", "EN-108")(
    TestTwoSessions
)
