"""Attempts without a known key are counted by where they come from, in bounded memory (SF-11, SF-12)."""

from __future__ import annotations

import pytest

from iop.api.strangers import ADDRESSES_MAX, Strangers, address_of_peer, place_of
from iop.core.errors import Overloaded, Unauthenticated

WRONG = Unauthenticated("nobody has this key", reason="INVALID_API_KEY")


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.mark.clause("SF-11", "SF-12")
def test_a_place_has_its_rate_and_gets_it_back_with_time() -> None:
    clock = Clock()
    strangers = Strangers(6, now=clock)
    assert [strangers.judge("192.0.2.1", WRONG) is WRONG for _ in range(8)] == [True] * 6 + [False] * 2
    late = strangers.judge("192.0.2.1", WRONG)
    assert isinstance(late, Overloaded)
    assert (late.reason, late.retry_after_s) == ("TOO_MANY_ATTEMPTS", pytest.approx(10.0))
    assert strangers.judge("192.0.2.2", WRONG) is WRONG, "another place"
    clock.at += 10.1
    assert strangers.judge("192.0.2.1", WRONG) is WRONG
    assert strangers.judge("192.0.2.1", WRONG) is not WRONG
    clock.at += 1e6
    assert [strangers.judge("192.0.2.1", WRONG) is WRONG for _ in range(7)] == [True] * 6 + [False]
    assert strangers.kept_off_total == 5


@pytest.mark.clause("SF-12")
def test_a_flood_of_addresses_takes_bounded_memory_and_forgets_the_quietest_first() -> None:
    strangers = Strangers(1, now=lambda: 0.0)
    for number in range(ADDRESSES_MAX):
        strangers.judge(f"10.0.{number >> 8}.{number & 255}", WRONG)
    assert strangers.judge("10.0.0.0", WRONG) is not WRONG, (
        "its attempt is remembered, and this one is news of it"
    )
    strangers.judge("192.0.2.1", WRONG)
    assert len(strangers) == ADDRESSES_MAX
    assert strangers.judge("10.0.0.0", WRONG) is not WRONG
    assert strangers.judge("10.0.0.1", WRONG) is WRONG, "forgotten"


@pytest.mark.clause("SF-12")
@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:0:1::5", "20010db800000001/64"),
        ("2001:db8:0:1:ffff::9", "20010db800000001/64"),
        ("fe80::1%eth0", "fe80000000000000/64"),
        ("", ""),
        ("x" * 500, "x" * 64),
    ],
)
def test_a_place_is_an_address_or_an_ipv6_network(address: str, place: str) -> None:
    assert place_of(address) == place


@pytest.mark.clause("SF-23")
@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:4711", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::1"),
        ("ipv6:[::1]:4711", "::1"),
        ("unix:", "unix"),
        ("", ""),
    ],
)
def test_the_address_is_read_of_how_grpc_names_a_peer(peer: str, address: str) -> None:
    assert address_of_peer(peer) == address
