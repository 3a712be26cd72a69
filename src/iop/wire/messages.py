"""What travels between Edge and Node, as plain data.

Field names, units and meanings are those of ``runtime.proto``. Stream bookkeeping (sequence numbers, credit,
continuation frames, call ids) is the session's business and has no field here. Bodies travel beside their
requests, not in them.

Admin steps pass through undecoded: this layer and the admin vocabulary know nothing of each other, so the admin
parts of a message are the serialised protobuf of the record that ``runtime.proto`` names (``AdminStepRequest``,
``AdminStepProgress``, ``AdminStepOutcome``, ``ParticipantInfo``, ``ParticipantReadBack``).
``iop.net.admin_steps`` turns them into the types of ``iop.admin`` and back, for the Edge's participant driver and
for the Node alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum, unique
from typing import TypeAlias

from iop.core.ids import NodeId, RunId

Header: TypeAlias = tuple[bytes, bytes]
"""One HTTP header as received: (name, value). Names keep their spelling, repeated names their order."""


@unique
class BodyFraming(IntEnum):
    """How the provider delimits a body; one that only CLOSE ends may have been cut unnoticed (SF-03)."""

    UNSPECIFIED = 0
    LENGTH = 1
    CHUNKED = 2
    CLOSE = 3
    NONE = 4


@unique
class CancelReason(StrEnum):
    """Why a stream is called off. ``NODE_*`` and ``SESSION_TERMINATED`` arise on the Node and never travel.

    Attributes:
        CLIENT_GONE: the caller left, or writing to it failed (EN-56).
        CONNECTION_LOST: the wire connection ended; nobody hears the rest (EN-117).
        UNKNOWN: a newer peer's reason.
    """

    CLIENT_GONE = "client_gone"
    TIMEOUT = "timeout"
    ABORTED_BY_ADMIN = "aborted_by_admin"
    EDGE_SHUTDOWN = "edge_shutdown"
    SESSION_TERMINATED = "session_terminated"
    NODE_SHUTDOWN = "node_shutdown"
    CONNECTION_LOST = "connection_lost"
    UNKNOWN = "unknown"


@unique
class CloseReason(StrEnum):
    """Why a connection ends. The first group may be said to the peer in a Goodbye; the rest is only observed.

    Attributes:
        PEER_CLOSED: end of file without a Goodbye.
        CONNECTION_LOST: the transport failed.
        UNKNOWN: a newer peer's reason.
    """

    SHUTDOWN = "shutdown"
    SUPERSEDED = "superseded"
    PROTOCOL_ERROR = "protocol_error"
    NOT_READY_IN_TIME = "not_ready_in_time"
    REFUSED = "refused"
    HEARTBEAT_TIMEOUT = "heartbeat_timeout"

    HANDSHAKE_TIMEOUT = "handshake_timeout"
    PEER_CLOSED = "peer_closed"
    CONNECTION_LOST = "connection_lost"
    UNKNOWN = "unknown"


# ---- registration and readiness (EN-10 to EN-17) ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRequest:
    """The Node's first packet (EN-10). ``token`` is never shown."""

    node_id: NodeId
    token: str = field(repr=False)
    protocol_version: int
    software_version: str = ""
    instance_id: str = ""
    clock_unix_nanos: int = 0
    adapter_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterResponse:
    """The Edge's answer; accepted only claims the id as pending (EN-11).

    Attributes:
        reason_code: stable: ``bad_token``, ``unknown_node``, ``unsupported_version``, ``identity_contended``.
        config: set exactly when accepted.
        retry_after_ms: zero: the Node's own policy rules (EN-115).
    """

    accepted: bool
    reason: str = ""
    reason_code: str = ""
    node_id: NodeId = field(default=NodeId(""))
    config: NodeConfig | None = None
    protocol_version_min: int = 0
    protocol_version_max: int = 0
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """How one configured adapter is after start; ``reason`` is free of addresses and secrets."""

    name: str
    started: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyRequest:
    """Config applied, adapters started, handlers installed (EN-12)."""

    node_id: NodeId
    config_revision: int
    adapters: tuple[AdapterStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyAck:
    """The Edge's answer to ready; ``ready=False``: close and reconnect (EN-14, EN-15)."""

    ready: bool
    reason: str = ""
    reason_code: str = ""


# ---- configuration (EN-55, EN-85, EN-86) ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOperation:
    """Method and path of one named operation."""

    method: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolProfile:
    """A resolved protocol profile: operations by name (EN-51, EN-55)."""

    name: str
    operations: Mapping[str, ProfileOperation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICompatSettings:
    """An HTTP engine as the Node sees it."""

    endpoint: str
    api_key: str = field(default="", repr=False)
    tls_ca_pem: bytes = b""
    protocol_profile: ProtocolProfile | None = None
    connect_timeout_sec: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngineSettings:
    """An engine's OpenEngine listeners; empty targets: none."""

    target: str = ""
    admin_target: str = ""
    admin_token: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    tls_ca_pem: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSettings:
    """A command-line agent as a provider (EN-42, EN-43)."""

    command: tuple[str, ...]
    prompt: str = "stdin"
    output: str = "text"
    environment: tuple[str, ...] = ()
    start_timeout_sec: int = 0
    idle_timeout_sec: int = 0
    total_timeout_sec: int = 0
    output_bytes_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaSettings:
    """An Ollama server."""

    endpoint: str
    keep_alive: str = ""


AdapterSettings: TypeAlias = OpenAICompatSettings | OpenEngineSettings | CliSettings | OllamaSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """One adapter instance (EN-85).

    Attributes:
        capacity: most runs and tunnels at once, the Node's own gate (EN-95).
        settings: absent only when a newer Edge sent a kind that this build does not know.
        engine_control: the engine's OpenEngine listeners beside the adapter's own protocol.
    """

    name: str
    type: str
    enabled: bool = True
    capacity: int = 1
    long_context_capacity: int = 0
    targets: tuple[str, ...] = ()
    settings: AdapterSettings | None = None
    engine_control: OpenEngineSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRuntime:
    """Runtime settings that the Edge decides; zero means the Node's default."""

    concurrency: int = 0
    heartbeat_interval_ms: int = 0
    heartbeat_timeout_ms: int = 0
    stream_window_bytes: int = 0
    frame_bytes_max: int = 0
    body_bytes_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """All that a Node needs to know, as one numbered snapshot (EN-114)."""

    config_revision: int
    adapters: tuple[AdapterConfig, ...] = ()
    runtime: NodeRuntime = NodeRuntime()


@unique
class RefreshOutcome(IntEnum):
    """What became of a refresh (EN-80)."""

    UNSPECIFIED = 0
    APPLIED = 1
    RESTART_REQUIRED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshResponse:
    """``config_revision`` is the one in force now: the old one when the refresh failed."""

    outcome: RefreshOutcome
    config_revision: int
    reason: str = ""
    adapters: tuple[AdapterStatus, ...] = ()


# ---- runs and tunnels (EN-40 to EN-57) ----


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One normalised execution. ``input`` is for the adapter to interpret (EN-43) and may exceed a frame."""

    run_id: RunId
    adapter: str
    target: str
    workspace: str = ""
    input: bytes = field(default=b"", repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    session_id: str = ""
    timeout_sec: int = 0
    stream: bool = False
    long_context: bool = False
    traceparent: str = ""
    tracestate: str = ""


@unique
class RunEventType(IntEnum):
    """Kinds of run events (EN-40)."""

    UNSPECIFIED = 0
    START = 1
    DELTA = 2
    COMPLETE = 3
    ERROR = 4
    CANCELLED = 5

    @property
    def is_terminal(self) -> bool:
        """Whether it is the last event of its run."""
        return self >= RunEventType.COMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts; ``None`` means unknown, zero means none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    reasoning_tokens: int | None = None


@unique
class StreamErrorCode(StrEnum):
    """Known values of ``StreamError.code``; a newer peer may send others."""

    CANCELLED = "cancelled"
    BUSY = "busy"
    CONNECT_FAILED = "connect_failed"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    TIMEOUT = "timeout"
    NO_OUTPUT = "no_output"
    UNKNOWN_ADAPTER = "unknown_adapter"
    UNKNOWN_OPERATION = "unknown_operation"
    INVALID_REQUEST = "invalid_request"
    NODE_SHUTDOWN = "node_shutdown"
    NODE_LOST = "node_lost"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamError:
    """Why a stream ended badly.

    Attributes:
        code: a ``StreamErrorCode`` value, or one that only a newer peer knows.
        before_start: the engine provably never saw the request (EN-112, EN-117).
    """

    code: str
    message: str = ""
    retryable: bool = False
    before_start: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One step of a run. Text in ``delta`` and ``reasoning_delta`` counts against credit, as UTF-8 bytes."""

    type: RunEventType
    delta: str = field(default="", repr=False)
    output_index: int = 0
    reasoning_delta: str = field(default="", repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    finish_reasons: tuple[str, ...] = ()
    usage: Usage | None = None
    error: StreamError | None = None

    @property
    def credit_bytes(self) -> int:
        """What it costs of its stream's credit, and what its consumer returns (EN-102)."""
        return _utf8_bytes(self.delta) + _utf8_bytes(self.reasoning_delta)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelRequest:
    """One HTTP request at a provider, without its body (EN-50).

    Attributes:
        operation: named profile operation; empty: ``method`` and ``path`` count (EN-51).
    """

    run_id: RunId
    adapter: str
    target: str = ""
    operation: str = ""
    method: str = ""
    path: str = ""
    headers: tuple[Header, ...] = field(default=(), repr=False)
    stream: bool = False
    timeout_sec: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    session_id: str = ""
    long_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRequest:
    """Asks for a profile artifact on the Node (AD-46)."""

    run_id: RunId
    adapter: str
    uri: str


# ---- commands and reports (EN-75, EN-90) ----


@unique
class CommandType(IntEnum):
    """What a command asks (EN-75)."""

    UNSPECIFIED = 0
    USAGE = 1
    CAPABILITIES = 2
    SESSIONS = 3
    TRANSPORT = 4
    PROVIDERS = 5
    PARTICIPANTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A query; an empty adapter means all."""

    type: CommandType
    adapter: str = ""
    timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSnapshot:
    """One resource under a Node (EN-90, EN-91)."""

    id: str
    type: str = ""
    category: str = ""
    status: str = ""
    health: str = ""
    capacity: int = 0
    in_flight: int = 0
    queued: int = 0
    long_capacity: int = 0
    long_in_flight: int = 0
    long_queued: int = 0
    weight_version: str = ""
    reason: str = ""
    models: tuple[str, ...] = ()
    capabilities: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParticipantReport:
    """One rank behind an adapter. ``info`` and ``read_back`` are serialised records; empty when not told."""

    adapter: str
    info: bytes = b""
    read_back: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResponse:
    """The Node's answer to a command."""

    type: CommandType
    ok: bool
    reason: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    providers: tuple[ProviderSnapshot, ...] = ()
    participants: tuple[ParticipantReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderReport:
    """Unasked news; nothing correct depends on it (EN-34)."""

    providers: tuple[ProviderSnapshot, ...] = ()
    participants: tuple[ParticipantReport, ...] = ()


# ---- admin steps (EN-120) ----


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminStep:
    """One step for the participants of one group; done once per (operation_id, step) (AD-36).

    Attributes:
        ordinal: order of operations on this server; a step below the last (ordinal, step) seen is refused.
        participant_ids: Node-local ids, as ``ParticipantReport.info`` names them.
        request: serialised ``AdminStepRequest``.
    """

    operation_id: str
    ordinal: int
    step: int
    adapter: str
    group_id: str
    participant_ids: tuple[str, ...]
    timeout_ms: int
    request: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminStepEvent:
    """Progress of a step; ``progress`` is a serialised ``AdminStepProgress``.

    Attributes:
        adapter: with ``group_id`` the step's own; the Node's session sets them.
    """

    operation_id: str
    step: int
    progress: bytes
    adapter: str = ""
    group_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminStepResult:
    """The one end of a step; a repeated step gets the same again.

    Attributes:
        outcome: serialised ``AdminStepOutcome``; empty when refused.
        refused_code: ``stale_step``, ``unknown_participant``, ``unsupported``, ``busy`` or ``unavailable``; empty
            when the step was not refused.
        adapter: with ``group_id`` the step's own; the Node's session sets them.
    """

    operation_id: str
    step: int
    outcome: bytes = b""
    refused_code: str = ""
    refused_reason: str = ""
    adapter: str = ""
    group_id: str = ""


class Readiness(Enum):
    """How far a connection's handshake has come, the same words on both sides (EN-10 to EN-15)."""

    CONNECTED = "connected"
    REGISTERING = "registering"
    PENDING = "pending"
    READY_SENT = "ready_sent"
    READY = "ready"
    CLOSED = "closed"
