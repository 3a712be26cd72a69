"""Messages together with the stream bookkeeping that travels with them; the session's own vocabulary.

What is in ``messages`` is for everybody; what is here only ``wire`` looks at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, unique
from typing import NamedTuple, TypeAlias

from iop.wire.messages import (
    AdminStep,
    AdminStepEvent,
    AdminStepResult,
    ArtifactRequest,
    BodyFraming,
    CommandRequest,
    CommandResponse,
    Header,
    NodeConfig,
    ProviderReport,
    ReadyAck,
    ReadyRequest,
    RefreshResponse,
    RegisterRequest,
    RegisterResponse,
    RunEvent,
    RunRequest,
    StreamError,
    TunnelRequest,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life (EN-103)."""

    sequence: int = 0
    clock_unix_nanos: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The last packet of a side that closes on purpose (EN-109)."""

    reason_code: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTunnel:
    """A tunnel request with what of its body fits (EN-101)."""

    request: TunnelRequest
    body: bytes = field(default=b"", repr=False)
    body_continues: bool = False
    body_bytes_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run request with what of its input fits; ``request.input`` holds that part."""

    request: RunRequest
    input_continues: bool = False
    input_bytes_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStep:
    """An admin step and whether payload follows."""

    step: AdminStep
    payload_continues: bool = False
    payload_bytes_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyChunk:
    """A continuation frame (EN-101)."""

    stream_id: str
    offset: int = 0
    data: bytes = field(default=b"", repr=False)
    last: bool = False


@unique
class FrameKind(IntEnum):
    """Kinds of tunnel frames (EN-52)."""

    UNSPECIFIED = 0
    RESPONSE_START = 1
    BODY = 2
    END = 3
    ERROR = 4
    USAGE = 5


class TunnelFrame(NamedTuple):
    """One ordered piece of a provider's answer (EN-52). A tuple, because three are made per request on each side."""

    run_id: str
    kind: FrameKind
    sequence: int
    status: int = 0
    headers: tuple[Header, ...] = ()
    body: bytes = b""
    error: StreamError | None = None
    usage: Usage | None = None
    framing: BodyFraming = BodyFraming.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFrame:
    """One ordered event of a run (EN-40)."""

    run_id: str
    sequence: int
    event: RunEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCredit:
    """Bytes that the receiver has got rid of since its last grant (EN-102)."""

    stream_id: str
    bytes: int


@unique
class CancelKind(IntEnum):
    """What a cancel ends (EN-70)."""

    UNSPECIFIED = 0
    CANCEL_RUN = 1
    TERMINATE_SESSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Ends a run or a session (EN-70)."""

    kind: CancelKind
    run_id: str = ""
    session_id: str = ""
    reason_code: str = ""
    at_safe_point: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRefresh:
    """A new config for a ready Node (EN-80)."""

    config: NodeConfig


@dataclass(frozen=True, slots=True)
class Unknown:
    """A member of ``Packet.message`` that only a newer peer knows; ignored and counted (EN-100)."""


Message: TypeAlias = (
    RegisterRequest
    | RegisterResponse
    | ReadyRequest
    | ReadyAck
    | Heartbeat
    | Goodbye
    | OpenRun
    | RunFrame
    | OpenTunnel
    | BodyChunk
    | TunnelFrame
    | StreamCredit
    | Cancel
    | CommandRequest
    | CommandResponse
    | ArtifactRequest
    | ConfigRefresh
    | RefreshResponse
    | AdminStep
    | OpenStep
    | AdminStepEvent
    | AdminStepResult
    | ProviderReport
    | Unknown
)
