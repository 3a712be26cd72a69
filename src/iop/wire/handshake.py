"""The handshake of a connection, one table for both sides (EN-02, EN-10 to EN-15).

::

    CONNECTED --register--> REGISTERING --accept--> PENDING --ready--> READY_SENT --ack--> READY
                                 |                                     |  ^ready repeated    |  ^ready, ack repeated
                                 +--refuse--> CLOSED <--nack-----------+---------------------+

Who sends and who receives an input is the session's knowledge, not the table's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, unique
from types import MappingProxyType
from typing import Final

from iop.wire.messages import Readiness

PROTOCOL_VERSION: Final = 1
"""The version that this build speaks."""

PROTOCOL_VERSION_MIN: Final = 1
PROTOCOL_VERSION_MAX: Final = 1
"""The range that an Edge of this build accepts (EN-105)."""


@unique
class HandshakeInput(Enum):
    """What moves a handshake, whichever side it comes from."""

    REGISTER = "register"
    ACCEPT = "accept"
    REFUSE = "refuse"
    READY = "ready"
    ACK = "ack"
    NACK = "nack"
    CLOSE = "close"


NEXT: Final[Mapping[tuple[Readiness, HandshakeInput], Readiness]] = MappingProxyType(
    {
        (Readiness.CONNECTED, HandshakeInput.REGISTER): Readiness.REGISTERING,
        (Readiness.REGISTERING, HandshakeInput.ACCEPT): Readiness.PENDING,
        (Readiness.REGISTERING, HandshakeInput.REFUSE): Readiness.CLOSED,
        (Readiness.PENDING, HandshakeInput.READY): Readiness.READY_SENT,
        (Readiness.READY_SENT, HandshakeInput.READY): Readiness.READY_SENT,
        (Readiness.READY_SENT, HandshakeInput.ACK): Readiness.READY,
        (Readiness.READY_SENT, HandshakeInput.NACK): Readiness.CLOSED,
        (Readiness.READY, HandshakeInput.READY): Readiness.READY,
        (Readiness.READY, HandshakeInput.ACK): Readiness.READY,
        (Readiness.READY, HandshakeInput.NACK): Readiness.CLOSED,
        **{(state, HandshakeInput.CLOSE): Readiness.CLOSED for state in Readiness},
    }
)


def step(state: Readiness, given: HandshakeInput) -> Readiness | None:
    """The next state, or None where the input is not legal."""
    return NEXT.get((state, given))


def is_version_supported(version: int) -> bool:
    """Whether an Edge of this build can talk to a Node that speaks ``version`` (EN-105)."""
    return PROTOCOL_VERSION_MIN <= version <= PROTOCOL_VERSION_MAX
