"""Limits of one HTTP listener (SF-12) and the counters that hold buffered request bytes within them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from iop.core.limits import BODY_BYTES_MAX, GIB, KIB, MIB

__all__ = ["ByteBudget", "HttpLimits"]

WRITE_HIGH_BYTES: Final = 64 * KIB
"""Unsent answer bytes at which a stream counts as slow. Larger costs memory per stopped reader; smaller,
wake-ups.
"""

WRITE_LOW_BYTES: Final = 16 * KIB
"""Unsent answer bytes below which a slow stream may go on."""

BACKLOG_BYTES_MAX: Final = 64 * KIB
"""Bytes of later, pipelined requests held while one is answered; at this many the socket is read no
further.
"""

PIPELINED_MAX: Final = 64
"""Whole requests that one read may bring; more is no client's habit but a flood, and closes the connection.
"""

HEADERS_MAX: Final = 128
"""Header fields of one request. Real clients send about twenty; each costs objects."""

TARGET_BYTES_MAX: Final = 8 * KIB
"""Longest request target."""

READ_BURST_BYTES: Final = 64 * KIB
"""One read that brings this much shows that more waits; the loop turns to others before the next."""

DROPPED_BODY_BYTES_MAX: Final = 256 * KIB
"""Body of a refused request that is read and dropped to keep its connection; a larger one costs the
connection.
"""

RESERVE_STEP_BYTES: Final = 64 * KIB
"""How much budget a body of undeclared length takes at a time."""

MADE_BYTES_FREE: Final = 64 * KIB
"""What may be made of one body, as by a conversion, and be held beside it without being counted."""

HEAD_TIMEOUT_S: Final = 30.0
"""From the first byte of a request to the end of its header; what a trickling client can hold a connection
open for.
"""

BODY_STALL_TIMEOUT_S: Final = 60.0
"""Silence within a request body after which the request is refused."""

IDLE_TIMEOUT_S: Final = 75.0
"""Silence between requests after which a kept-alive connection is closed."""

LINGER_TIMEOUT_S: Final = 10.0
"""How long the rest of a refused body is read and dropped, so that a reset does not eat the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one listener allows; the config's ``limits`` section in the units used here.

    ``first_byte_timeout_s`` runs from dispatch to the provider's first answer byte, ``total_timeout_s``
    from the request's end to the answer's end; time frozen by a KEEP pause does not count.
    """

    body_bytes: int = BODY_BYTES_MAX
    buffered_bytes: int = GIB
    header_bytes: int = 64 * KIB
    json_depth: int = 128
    connections: int = 10_000
    sse_event_bytes: int = 16 * MIB
    first_byte_timeout_s: float = 600.0
    total_timeout_s: float = 3600.0
    head_timeout_s: float = HEAD_TIMEOUT_S
    body_stall_timeout_s: float = BODY_STALL_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    linger_timeout_s: float = LINGER_TIMEOUT_S

    @property
    def key_buffered_bytes(self) -> int:
        """What one API key may have buffered at once: a quarter of all, but always one largest body."""
        return max(self.body_bytes, self.buffered_bytes // 4)


class ByteBudget:
    """Counts bytes held against a bound; what was reserved is released once by whoever reserved it."""

    __slots__ = ("_held", "_limit", "rejected")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self.rejected = 0

    @property
    def held_bytes(self) -> int:
        """Bytes reserved now."""
        return self._held

    def reserve(self, size_bytes: int) -> bool:
        """Take ``size_bytes`` if they fit, else change nothing, count the refusal and return False."""
        if self._held + size_bytes > self._limit:
            self.rejected += 1
            return False
        self._held += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Give back what was reserved."""
        self._held -= size_bytes
        assert self._held >= 0, "released more than was reserved"
