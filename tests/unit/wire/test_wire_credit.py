from __future__ import annotations

import pytest

from iop.core.errors import LocalProtocolError, RemoteProtocolError
from iop.wire.credit import ReceiveWindow, SendCredit


@pytest.mark.clause("EN-102")
def test_a_sender_spends_no_more_than_it_has_and_a_refused_spend_changes_nothing() -> None:
    credit = SendCredit(100)
    credit.spend(100)
    assert credit.available == 0
    with pytest.raises(LocalProtocolError):
        credit.spend(1)
    assert credit.available == 0


@pytest.mark.clause("EN-102")
@pytest.mark.parametrize("grant", [0, 31, 1 << 40])
def test_credit_that_the_peer_cannot_have_to_give_is_refused(grant: int) -> None:
    credit = SendCredit(100)
    credit.spend(30)
    with pytest.raises(RemoteProtocolError) as caught:
        credit.grant(grant)
    assert caught.value.reason == "CREDIT_OVERGRANTED"
    assert credit.available == 70
    credit.grant(30)
    assert credit.available == 100


@pytest.mark.clause("EN-102")
def test_a_receiver_refuses_bytes_beyond_the_credit_it_gave() -> None:
    window = ReceiveWindow(100)
    window.receive(100)
    with pytest.raises(RemoteProtocolError) as caught:
        window.receive(1)
    assert caught.value.reason == "CREDIT_OVERSPENT"


@pytest.mark.clause("EN-102")
def test_grants_are_gathered_until_half_a_window_and_none_is_invented() -> None:
    window = ReceiveWindow(100)
    window.receive(80)
    assert window.consume(49) == 0
    assert window.consume(1) == 50
    assert (window.available, window.held, window.owed) == (70, 30, 0)
    with pytest.raises(LocalProtocolError):
        window.consume(31)
    assert window.consume(30) == 0
    assert window.available + window.held + window.owed == window.window
