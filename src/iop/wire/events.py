"""What a session tells its shell. Streams in events are the session's own objects; their ``owner`` is the shell's.

Events of every request are tuples, since making a frozen dataclass costs several times as much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from iop.wire.messages import (
    AdminStepEvent,
    AdminStepResult,
    BodyFraming,
    CancelReason,
    CloseReason,
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
    StreamError,
    Usage,
)
from iop.wire.stream_edge import EdgeStream
from iop.wire.stream_node import NodeStream

# ---- both sides ----


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is over for us; always the last event. What is still to be sent may be flushed.

    Attributes:
        by_peer: the peer's word or doing, not ours.
    """

    reason: CloseReason
    detail: str
    by_peer: bool


@dataclass(frozen=True, slots=True)
class PeerClockSeen:
    """The peer told its wall clock (EN-113)."""

    unix_nanos: int


# ---- on the Edge ----


@dataclass(frozen=True, slots=True)
class Registered:
    """A Node of a supported version wants to register."""

    request: RegisterRequest


@dataclass(frozen=True, slots=True)
class ReadyReported:
    """The Node says it is ready, perhaps again."""

    request: ReadyRequest


class ResponseStarted(NamedTuple):
    """Status and headers of a tunnel."""

    stream: EdgeStream
    status: int
    headers: tuple[Header, ...]
    framing: BodyFraming


class BodyReceived(NamedTuple):
    """Body bytes of a tunnel."""

    stream: EdgeStream
    data: bytes


@dataclass(frozen=True, slots=True)
class UsageReceived:
    """An observation on a tunnel."""

    stream: EdgeStream
    usage: Usage


class TunnelEnded(NamedTuple):
    """The one terminal of a tunnel; no error: whole."""

    stream: EdgeStream
    error: StreamError | None


class RunEventReceived(NamedTuple):
    """One event of a run; the terminal one is its last."""

    stream: EdgeStream
    event: RunEvent


@dataclass(frozen=True, slots=True)
class CommandAnswered:
    """Answer to the command with this call id; None: the connection ended first."""

    call_id: int
    response: CommandResponse | None


@dataclass(frozen=True, slots=True)
class RefreshAnswered:
    """Answer to the refresh with this call id; None: the connection ended first."""

    call_id: int
    response: RefreshResponse | None


@dataclass(frozen=True, slots=True)
class StepProgressed:
    """Progress of an admin step."""

    stream: EdgeStream
    event: AdminStepEvent


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The result of an admin step; None: the connection ended first, and the outcome is unknown."""

    stream: EdgeStream
    result: AdminStepResult | None


@dataclass(frozen=True, slots=True)
class ReportReceived:
    """Unasked provider news."""

    report: ProviderReport


@dataclass(frozen=True, slots=True)
class LateFrameDropped:
    """A frame for a stream or call that is over (EN-57)."""


# ---- on the Node ----


@dataclass(frozen=True, slots=True)
class RegisterAnswered:
    """The Edge's answer to the registration."""

    response: RegisterResponse


@dataclass(frozen=True, slots=True)
class ReadyAnswered:
    """The Edge's answer to ready."""

    ack: ReadyAck


class StreamOpened(NamedTuple):
    """A tunnel, run, artifact request or admin step whose body is complete; ``stream.kind`` tells which."""

    stream: NodeStream


@dataclass(frozen=True, slots=True)
class StreamCancelled:
    """A stream that the shell knows is called off; at most once per stream."""

    stream: NodeStream
    reason: CancelReason


class StreamWritable(NamedTuple):
    """A stream's credit is above zero again."""

    stream: NodeStream


@dataclass(frozen=True, slots=True)
class SessionTerminated:
    """An agent's session is to end with its state (EN-70); its streams were cancelled before."""

    session_id: str


@dataclass(frozen=True, slots=True)
class CommandReceived:
    """A query; answer with this call id."""

    call_id: int
    request: CommandRequest


@dataclass(frozen=True, slots=True)
class RefreshReceived:
    """A new config; answer with this call id."""

    call_id: int
    config: NodeConfig


Event: TypeAlias = (
    Closed
    | PeerClockSeen
    | Registered
    | ReadyReported
    | ResponseStarted
    | BodyReceived
    | UsageReceived
    | TunnelEnded
    | RunEventReceived
    | CommandAnswered
    | RefreshAnswered
    | StepProgressed
    | StepEnded
    | ReportReceived
    | LateFrameDropped
    | RegisterAnswered
    | ReadyAnswered
    | StreamOpened
    | StreamCancelled
    | StreamWritable
    | SessionTerminated
    | CommandReceived
    | RefreshReceived
)
