"""Named limits with their defaults. Each says what breaks when it is larger or smaller."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

FRAME_BYTES_MAX: Final = 16 * MIB
"""Largest wire frame (EN-100). Larger lets one peer make us allocate more; smaller refuses big config payloads."""

INLINE_BODY_BYTES_MAX: Final = 64 * KIB
"""Request bodies above this travel as continuation frames (EN-101). Larger makes other streams wait behind a body."""

BODY_BYTES_MAX: Final = 256 * MIB
"""Largest request body end to end (EN-101); beyond it callers get 413."""

STREAM_WINDOW_BYTES: Final = 256 * KIB
"""Credit of one stream (EN-102): what a reader that stopped reading costs. Smaller costs throughput on long links."""

CONTROL_AHEAD_BYTES_MAX: Final = 64 * KIB
"""Most bytes of our own queue ahead of a control packet (EN-106). Larger delays cancels; smaller costs more writes."""

HANDSHAKE_BYTES_MAX: Final = 64 * KIB
"""Largest frame from a peer that has not registered yet. A stranger gets little."""

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""A connection that has not registered by then is closed; bounds what strangers can hold open."""

READY_TIMEOUT_S: Final = 60.0
"""A pending owner that is not ready by then loses its claim (EN-17)."""

HEARTBEAT_INTERVAL_S: Final = 5.0
"""How often an idle side speaks (EN-103)."""

HEARTBEAT_TIMEOUT_S: Final = 15.0
"""Silence after which a peer is dead (EN-103); must exceed twice the interval to survive one lost beat."""

STREAMS_MAX: Final = 4096
"""Open runs and tunnels on one connection. More is a peer's bug, since capacity is leased below it."""
