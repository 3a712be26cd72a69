"""How often one address may come without a key that is known here (SF-11, SF-12).

Only refused attempts are counted, so whoever has a key pays nothing and is never kept out by a neighbour behind the
same address. A guess costs an attempt; beyond the rate the answer is "later", and whoever ignores that is the same
guesser still.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final
from urllib.parse import unquote

from iop.core.errors import IopError, Overloaded, Unauthenticated

__all__ = ["ADDRESSES_MAX", "Strangers", "address_of_peer", "place_of"]

ADDRESSES_MAX: Final = 4096
"""Addresses remembered; the one that was quiet longest is forgotten first, and then has its full rate again."""

PREFIX_BITS: Final = 64
"""One caller commonly holds a whole IPv6 network of this size, so that it counts as one place."""


class Strangers:
    """Counts attempts without a known key by where they come from.

    Args:
        per_minute: attempts that one place has; as many at once.
        now: monotonic seconds.

    Attributes:
        kept_off_total: attempts beyond the rate.
    """

    def __init__(self, per_minute: int, *, now: Callable[[], float]) -> None:
        self.kept_off_total = 0
        self._rate_per_s = per_minute / 60.0
        self._most = float(per_minute)
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def judge(self, address: str, error: Unauthenticated) -> IopError:
        """What an attempt that failed by ``error`` is answered: that, or, beyond the rate, when to come again."""
        now = self._now()
        place = place_of(address)
        left, since = self._left.pop(place, (self._most, now))
        left = min(self._most, left + (now - since) * self._rate_per_s)
        is_over = left < 1.0
        self._left[place] = (left if is_over else left - 1.0, now)
        if len(self._left) > ADDRESSES_MAX:
            self._left.popitem(last=False)
        if not is_over:
            return error
        self.kept_off_total += 1
        return Overloaded(
            "Too many attempts without a known API key came from this address.",
            reason="TOO_MANY_ATTEMPTS",
            retry_after_s=(1.0 - left) / self._rate_per_s,
        )


def place_of(address: str) -> str:
    """What counts as one place: an IPv4 address, an IPv6 network, or whatever else it is that has no address."""
    try:
        return str(IPv4Address(address))
    except AddressValueError:
        pass
    try:
        six = IPv6Address(address.partition("%")[0])
    except AddressValueError:
        return address[:64]
    if six.ipv4_mapped is not None:
        return str(six.ipv4_mapped)
    return f"{int(six) >> (128 - PREFIX_BITS):x}/{PREFIX_BITS}"


def address_of_peer(peer: str) -> str:
    """The address in how gRPC names a peer: ``ipv4:192.0.2.1:4711``, ``ipv6:%5B2001:db8::1%5D:4711``, ``unix:``."""
    kind, _, rest = peer.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return kind
    return unquote(rest).rpartition(":")[0].strip("[]")
