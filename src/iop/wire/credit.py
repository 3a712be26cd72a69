"""Credit of one direction of one stream (EN-102).

The law, at every moment, over both ends and what is under way between them::

    credit the sender holds + bytes under way + bytes the receiver holds + credit owed or under way back = window

Neither class can break it: spending more than there is, granting more than was received and returning more than was
granted are all refused.
"""

from __future__ import annotations

from typing import Final

from iop.core.errors import LocalProtocolError, RemoteProtocolError

GRANT_DIVISOR: Final = 2
"""A grant is sent when this fraction of the window waits for it: few packets, and never an empty sender."""


class SendCredit:
    """What a sender may still send."""

    __slots__ = ("available", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.available = window

    def spend(self, size_bytes: int) -> None:
        """Take credit for bytes that are sent now. Raises LocalProtocolError if there is not enough."""
        if not 0 <= size_bytes <= self.available:
            raise LocalProtocolError("More body bytes than credit.", reason="CREDIT_OVERSPENT")
        self.available -= size_bytes

    def grant(self, size_bytes: int) -> None:
        """Take a peer's grant. Raises RemoteProtocolError for credit that the peer cannot have to give."""
        if not 0 < size_bytes <= self.window - self.available:
            raise RemoteProtocolError(
                f"Credit for {size_bytes} bytes was granted; {self.window - self.available} were outstanding.",
                reason="CREDIT_OVERGRANTED",
            )
        self.available += size_bytes


class ReceiveWindow:
    """What a receiver must still be ready to take, and what it owes."""

    __slots__ = ("available", "held", "owed", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.available = window
        self.held = 0
        self.owed = 0

    def receive(self, size_bytes: int) -> None:
        """Account for bytes that came in. Raises RemoteProtocolError if the peer had no credit for them."""
        if size_bytes > self.available:
            raise RemoteProtocolError(
                f"{size_bytes} bytes came with credit for {self.available}.", reason="CREDIT_OVERSPENT"
            )
        self.available -= size_bytes
        self.held += size_bytes

    def consume(self, size_bytes: int) -> int:
        """Bytes have been got rid of; returns the grant to send now, or zero.

        Raises:
            LocalProtocolError: more than was received; nothing changed.
        """
        if not 0 <= size_bytes <= self.held:
            raise LocalProtocolError("More bytes consumed than received.", reason="CREDIT_INVENTED")
        self.held -= size_bytes
        self.owed += size_bytes
        if self.owed * GRANT_DIVISOR < self.window:
            return 0
        grant = self.owed
        self.owed = 0
        self.available += grant
        return grant
