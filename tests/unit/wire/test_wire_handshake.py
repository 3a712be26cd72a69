from __future__ import annotations

import itertools

import pytest

from iop.wire.handshake import NEXT, HandshakeInput, is_version_supported, step
from iop.wire.messages import Readiness

PATH = [HandshakeInput.REGISTER, HandshakeInput.ACCEPT, HandshakeInput.READY, HandshakeInput.ACK]


@pytest.mark.clause("EN-10", "EN-11", "EN-12")
def test_the_straight_path_leads_from_connected_over_pending_to_ready() -> None:
    state = Readiness.CONNECTED
    seen = [state]
    for given in PATH:
        after = step(state, given)
        assert after is not None
        state = after
        seen.append(state)
    assert seen == [
        Readiness.CONNECTED,
        Readiness.REGISTERING,
        Readiness.PENDING,
        Readiness.READY_SENT,
        Readiness.READY,
    ]


@pytest.mark.clause("EN-13")
def test_only_an_ack_makes_a_connection_ready() -> None:
    into_ready = {given for (state, given), after in NEXT.items() if after is Readiness.READY != state}
    assert into_ready == {HandshakeInput.ACK}


@pytest.mark.clause("EN-14")
def test_a_repeated_ready_keeps_a_ready_connection_ready() -> None:
    assert step(Readiness.READY, HandshakeInput.READY) is Readiness.READY
    assert step(Readiness.READY, HandshakeInput.ACK) is Readiness.READY


@pytest.mark.clause("EN-15")
def test_a_refused_ready_closes_from_wherever_ready_could_be_said() -> None:
    assert step(Readiness.READY_SENT, HandshakeInput.NACK) is Readiness.CLOSED
    assert step(Readiness.READY, HandshakeInput.NACK) is Readiness.CLOSED


def test_every_state_and_input_is_legal_or_refused_and_closed_is_final() -> None:
    for state, given in itertools.product(Readiness, HandshakeInput):
        after = step(state, given)
        if state is Readiness.CLOSED:
            assert after is (Readiness.CLOSED if given is HandshakeInput.CLOSE else None)
        if given is HandshakeInput.CLOSE:
            assert after is Readiness.CLOSED
    assert sum(step(state, given) is not None for state in Readiness for given in HandshakeInput) == len(NEXT)


@pytest.mark.clause("EN-105")
def test_versions_outside_the_range_are_not_supported() -> None:
    assert is_version_supported(1)
    assert not is_version_supported(0)
    assert not is_version_supported(2)
