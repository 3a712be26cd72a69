"""The settings of every process, as frozen trees: what each key means, its unit, its default and its bounds.

The reference page of settings is made from these classes, and a test holds the two equal. A field's metadata has
``doc`` and, where they apply, ``min`` and ``max`` (inclusive), ``name`` (must be a plain name) and ``scheme`` (allowed
schemes of a URL). A field without a default is required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from iop.config.values import Address, Secret, SecretHash, StoreUrl
from iop.core.limits import (
    BODY_BYTES_MAX,
    FRAME_BYTES_MAX,
    GIB,
    HANDSHAKE_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT_S,
    KIB,
    MIB,
    READY_TIMEOUT_S,
    STREAM_WINDOW_BYTES,
)

__all__ = [
    "ADAPTER_TYPES",
    "Adapter",
    "AdapterTls",
    "AdminSection",
    "ApiKey",
    "Breaker",
    "CliSettings",
    "Dispatch",
    "EdgeConfig",
    "EdgeListeners",
    "EdgeTls",
    "EngineAdmin",
    "EngineConfig",
    "EngineListeners",
    "EngineTls",
    "Heartbeat",
    "Limits",
    "ListenerTls",
    "Model",
    "ModelProvider",
    "NodeConfig",
    "NodeEntry",
    "NodeTls",
    "PrincipalEntry",
    "ProfileOperation",
    "ProtocolProfile",
    "Queue",
    "Reconnect",
    "Tracing",
    "Wire",
]

AdapterType: TypeAlias = Literal[
    "openai_compat", "vllm", "sglang", "trtllm", "llamacpp", "ollama", "openengine", "cli"
]
ADAPTER_TYPES: Final = (
    "openai_compat",
    "vllm",
    "sglang",
    "trtllm",
    "llamacpp",
    "ollama",
    "openengine",
    "cli",
)

DURATION_MAX: Final = 31_536_000.0
"""A year. Longer waits are mistakes of unit."""

COUNT_MAX: Final = 1_000_000
BYTES_MAX: Final = 64 * GIB


def _loopback(port: int) -> Address:
    return Address(host="127.0.0.1", port=port)


def _seconds(doc: str, *, low: float = 0.0) -> dict[str, Any]:
    return {"doc": doc, "min": low, "max": DURATION_MAX}


def _count(doc: str, *, low: int = 0, high: int = COUNT_MAX) -> dict[str, Any]:
    return {"doc": doc, "min": low, "max": high}


def _bytes(doc: str, *, low: int = 1, high: int = BYTES_MAX) -> dict[str, Any]:
    return {"doc": doc, "min": low, "max": high}


def _doc(doc: str) -> dict[str, Any]:
    return {"doc": doc}


def _name(doc: str) -> dict[str, Any]:
    return {"doc": doc, "name": True}


# --- shared -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerTls:
    """TLS of one listener. The files are read again when they change."""

    cert: Path = field(metadata=_doc("certificate chain, PEM"))
    key: Path = field(metadata=_doc("private key, PEM"))
    client_ca: Path | None = field(
        default=None, metadata=_doc("authorities of client certificates; set: callers must have one")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalEntry:
    """Who may operate: known by a token, a client certificate's name, or either (AD-03, AD-04)."""

    name: str = field(metadata=_name("how the principal shows in operations and audit"))
    token: SecretHash | None = field(default=None, metadata=_doc("bearer token: sha256:HEX, file: or env:"))
    mtls_san: str | None = field(
        default=None, metadata=_doc("subject alternative name of its client certificate")
    )
    role: Literal["viewer", "operator", "admin"] | None = field(
        default=None, metadata=_doc("a preset of permissions")
    )
    permissions: tuple[str, ...] = field(default=(), metadata=_doc("single permissions instead of a role"))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSection:
    """Who may operate, and the bounds of operations."""

    principals: tuple[PrincipalEntry, ...] = field(
        default=(), metadata=_doc("nobody: the listener refuses all")
    )
    participant_lost_sec: float = field(
        default=30.0,
        metadata=_seconds("an unreachable participant fails its step after this (AD-25)", low=0.1),
    )
    readback_sec: float = field(
        default=30.0,
        metadata=_seconds("connected participants are read back at least this often (AD-35)", low=0.1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracing:
    """Spans of requests, sent to a collector over OTLP/HTTP (SF-13, SF-32). Needs ``iop[tracing]``."""

    endpoint: str | None = field(
        default=None,
        metadata={
            "doc": "the collector's traces URL, path included; absent: no spans are made",
            "scheme": ("http", "https"),
        },
    )
    sample_ratio: float = field(
        default=1.0,
        metadata={
            "doc": "share of new traces that is recorded; a caller's own decision is kept",
            "min": 0.0,
            "max": 1.0,
        },
    )
    interval_sec: float = field(
        default=5.0, metadata=_seconds("a finished span waits at most this long for company", low=0.05)
    )


# --- edge.yaml --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeListeners:
    """Where the Edge listens. ``null`` turns a listener off; port 0 means any free one."""

    http: Address | None = field(default=_loopback(8080), metadata=_doc("OpenAI and Anthropic HTTP"))
    openengine: Address | None = field(default=_loopback(9090), metadata=_doc("gRPC Inference and Control"))
    admin: Address | None = field(default=_loopback(9091), metadata=_doc("gRPC OpenEngineAdmin (AD-02)"))
    ops: Address | None = field(default=_loopback(9092), metadata=_doc("metrics, health, status, console"))
    nodes: Address | None = field(default=_loopback(7070), metadata=_doc("the Edge-Node wire (EN-02)"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTls:
    """TLS by listener."""

    http: ListenerTls | None = field(default=None, metadata=_doc("TLS of the public HTTP API"))
    openengine: ListenerTls | None = field(default=None, metadata=_doc("TLS of the OpenEngine listener"))
    admin: ListenerTls | None = field(default=None, metadata=_doc("TLS of the admin listener"))
    ops: ListenerTls | None = field(default=None, metadata=_doc("TLS of the ops listener"))
    nodes: ListenerTls | None = field(default=None, metadata=_doc("TLS of the Edge-Node wire (EN-104)"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Liveness of Node connections, told to Nodes at registration (EN-103)."""

    interval_sec: float = field(
        default=HEARTBEAT_INTERVAL_S, metadata=_seconds("how often an idle side speaks", low=0.05)
    )
    timeout_sec: float = field(
        default=HEARTBEAT_TIMEOUT_S, metadata=_seconds("silence after which a peer is dead", low=0.1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """When a failing provider is left alone (EN-116)."""

    failures: int = field(default=5, metadata=_count("this many failures within the window open it", low=1))
    window_sec: float = field(default=10.0, metadata=_seconds("the window", low=0.001))
    open_sec: float = field(
        default=10.0, metadata=_seconds("how long it stays open before one trial", low=0.001)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Limits of Node connections."""

    ready_timeout_sec: float = field(
        default=READY_TIMEOUT_S,
        metadata=_seconds("a registered Node that is not ready by then loses its claim", low=0.1),
    )
    handshake_timeout_sec: float = field(
        default=HANDSHAKE_TIMEOUT_S,
        metadata=_seconds("a connection that has not registered by then is closed", low=0.1),
    )
    connections: int = field(
        default=10_000, metadata=_count("most open Node connections, strangers included", low=1)
    )
    frame_bytes: int = field(
        default=FRAME_BYTES_MAX, metadata=_bytes("largest frame (EN-100)", low=128 * KIB, high=256 * MIB)
    )
    window_bytes: int = field(
        default=STREAM_WINDOW_BYTES,
        metadata=_bytes("credit of one stream (EN-102)", low=16 * KIB, high=64 * MIB),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How requests find a provider."""

    text_bytes_per_token: float = field(
        default=4.0,
        metadata={
            "doc": "estimate of prompt tokens: UTF-8 bytes over this (EN-111)",
            "min": 0.1,
            "max": 64.0,
        },
    )
    other_class_every: int = field(
        default=4,
        metadata=_count(
            "under contention every Nth pick goes to the other of long and short (EN-111)", low=2
        ),
    )
    show_provider: bool = field(
        default=True,
        metadata=_doc("tell callers by an opaque name who served them: x-iop-provider (SF-13, EN-04)"),
    )
    shutdown_grace_sec: float = field(
        default=30.0, metadata=_seconds("at shutdown runs may finish for this long (EN-109)")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A caller of the public API (SF-11, SF-16)."""

    name: str = field(metadata=_name("shows in logs and metrics"))
    key: SecretHash = field(metadata=_doc("the key: sha256:HEX, file: or env:"))
    models: tuple[str, ...] = field(default=(), metadata=_doc("models it may use; empty: all"))
    requests_per_minute: int | None = field(default=None, metadata=_count("most requests per minute", low=1))
    concurrent: int | None = field(default=None, metadata=_count("most requests at once", low=1))
    may: tuple[Literal["session", "priority"], ...] = field(
        default=(), metadata=_doc("headers of ours that it may send")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTls:
    """How an https engine is trusted."""

    ca: Path | None = field(default=None, metadata=_doc("authorities, PEM; absent: the system's"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOperation:
    """Where one named operation lives at the engine."""

    method: Literal["GET", "POST"] = field(default="POST", metadata=_doc("HTTP method"))
    path: str = field(metadata=_doc("path, beginning with /"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolProfile:
    """A protocol profile written out (EN-51, EN-55)."""

    operations: Mapping[str, ProfileOperation] = field(
        default_factory=dict,
        metadata=_doc("by operation: models, chat_completions, messages, count_tokens, tokenize, responses"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdmin:
    """An engine's own OpenEngineAdmin."""

    target: Address = field(metadata=_doc("its address, as the Node sees it"))
    token: Secret | None = field(default=None, metadata=_doc("bearer token: file: or env:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CliSettings:
    """How a command-line agent is run."""

    command: tuple[str, ...] = field(metadata=_doc("program and arguments; never a shell line"))
    prompt: Literal["stdin", "argument"] = field(default="stdin", metadata=_doc("how it gets its prompt"))
    output: Literal["text", "json_lines"] = field(default="text", metadata=_doc("how its output is read"))
    environment: tuple[str, ...] = field(default=(), metadata=_doc("environment variables that it may see"))
    workspace: Path | None = field(default=None, metadata=_doc("its working directory (EN-42, SF-16)"))
    start_timeout_sec: float = field(default=30.0, metadata=_seconds("until its first output", low=0.1))
    idle_timeout_sec: float = field(default=300.0, metadata=_seconds("between outputs", low=0.1))
    total_timeout_sec: float = field(default=3600.0, metadata=_seconds("altogether", low=0.1))
    output_bytes: int = field(default=64 * MIB, metadata=_bytes("most output of one run"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter instance on a Node: a provider (EN-85)."""

    name: str = field(
        default="", metadata={"doc": "stable identity on the Node; empty: the type", "name": "or empty"}
    )
    type: AdapterType = field(metadata=_doc("which kind of engine"))
    endpoint: str | None = field(
        default=None, metadata={"doc": "base URL, as the Node sees it", "scheme": ("http", "https")}
    )
    api_key: Secret | None = field(
        default=None, metadata=_doc("what the engine wants as bearer: file: or env:")
    )
    tls: AdapterTls | None = field(default=None, metadata=_doc("for https endpoints"))
    profile: str | ProtocolProfile = field(
        default="openai", metadata=_doc("a named protocol profile, or one written out")
    )
    openengine: Address | None = field(default=None, metadata=_doc("this engine's OpenEngine listener"))
    admin: EngineAdmin | None = field(default=None, metadata=_doc("this engine's OpenEngineAdmin listener"))
    cli: CliSettings | None = field(default=None, metadata=_doc("for type cli"))
    weights_source: str | None = field(
        default=None,
        metadata=_doc(
            "directory of safetensors that the engine was started from, as it sees it; where it does not tell that,"
            " its first weight update is irreversible without this"
        ),
    )
    keep_alive: str | None = field(
        default=None, metadata=_doc("for type ollama: how long it keeps a model loaded")
    )
    capacity: int = field(default=8, metadata=_count("runs and tunnels at once", low=1, high=100_000))
    long_context_capacity: int = field(
        default=0, metadata=_count("how many of them may be long-context ones", high=100_000)
    )
    enabled: bool = field(default=True, metadata=_doc("false: configured, and not used"))

    @property
    def provider_id(self) -> str:
        """The adapter's identity on its Node (EN-85)."""
        return self.name or self.type


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """A Node as the Edge knows it."""

    id: str = field(metadata=_name("the Node's id"))
    token: SecretHash = field(metadata=_doc("the secret that the Node presents: file:, env: or sha256:HEX"))
    adapters: tuple[Adapter, ...] = field(default=(), metadata=_doc("its providers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Waiting for a lease (EN-110)."""

    max: int = field(default=1000, metadata=_count("most waiting requests; beyond: 429 queue_full"))
    timeout_sec: float = field(default=30.0, metadata=_seconds("longest wait; beyond: 429 queue_timeout"))
    no_capacity_grace_sec: float = field(
        default=15.0, metadata=_seconds("wait while no provider lives; beyond: 503 no_capacity")
    )
    paused_timeout_sec: float = field(
        default=600.0, metadata=_seconds("wait for a pause to end; beyond: 503 paused")
    )
    comment_sec: float = field(
        default=0.0,
        metadata=_seconds("tell waiting streams their place by a comment this often, from 1; 0: never"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProvider:
    """One candidate for a model (EN-62)."""

    node: str = field(metadata=_doc("a Node's id"))
    adapter: str = field(metadata=_doc("an adapter's name on it"))
    target: str = field(metadata=_doc("the model's name at the engine"))
    weight: int = field(
        default=1, metadata=_count("share of the load relative to the others", low=1, high=1000)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as callers name it."""

    id: str = field(metadata=_doc("what callers say"))
    aliases: tuple[str, ...] = field(default=(), metadata=_doc("other names for it"))
    long_context_tokens: int | None = field(
        default=None,
        metadata=_count(
            "estimated prompts above this need a long slot; absent: none does", low=1, high=10**9
        ),
    )
    queue: Queue = field(default=Queue(), metadata=_doc("waiting for a lease"))
    response_model: Literal["provider", "alias"] = field(
        default="provider", metadata=_doc("whose model name answers carry (SF-15)")
    )
    conversion_drops: tuple[str, ...] = field(
        default=(),
        metadata=_doc(
            "request fields let go where a provider speaks another dialect and cannot say them (SF-10)"
        ),
    )
    rewrites: tuple[Literal["merge_system", "reasoning_names", "include_usage"], ...] = field(
        default=(), metadata=_doc("what is changed of its chats and streams, by rules (SF-15)")
    )
    providers: tuple[ModelProvider, ...] = field(metadata=_doc("candidates, at least one"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the public HTTP API (SF-12)."""

    body_bytes: int = field(default=BODY_BYTES_MAX, metadata=_bytes("largest request body; beyond: 413"))
    buffered_bytes: int = field(
        default=GIB, metadata=_bytes("request bytes held in total; beyond: 503 overloaded")
    )
    header_bytes: int = field(
        default=64 * KIB, metadata=_bytes("request line and headers; beyond: 431", high=MIB)
    )
    json_depth: int = field(default=128, metadata=_count("deepest nesting of a JSON body", low=2, high=1000))
    connections: int = field(default=10_000, metadata=_count("open client connections", low=1))
    strangers_per_minute: int = field(
        default=60,
        metadata=_count(
            "attempts without a known API key that one address has, as many at once; beyond: 429", low=1
        ),
    )
    sse_event_bytes: int = field(
        default=16 * MIB, metadata=_bytes("largest event of a stream; beyond: event_too_large", low=KIB)
    )
    first_byte_timeout_sec: float = field(
        default=600.0, metadata=_seconds("until the provider's first byte; beyond: 504", low=0.01)
    )
    total_timeout_sec: float = field(default=3600.0, metadata=_seconds("for the whole answer", low=0.01))


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """edge.yaml."""

    listen: EdgeListeners = field(default=EdgeListeners(), metadata=_doc("addresses"))
    insecure: bool = field(
        default=False, metadata=_doc("allow listeners off loopback without TLS or keys; warns at every start")
    )
    tls: EdgeTls = field(default=EdgeTls(), metadata=_doc("TLS by listener"))
    heartbeat: Heartbeat = field(default=Heartbeat(), metadata=_doc("liveness of Node connections"))
    wire: Wire = field(default=Wire(), metadata=_doc("limits of Node connections"))
    breaker: Breaker = field(default=Breaker(), metadata=_doc("when a failing provider is left alone"))
    dispatch: Dispatch = field(default=Dispatch(), metadata=_doc("how requests find a provider"))
    store: StoreUrl = field(
        default=StoreUrl(url="sqlite:///edge.db"),
        metadata=_doc("the journal: sqlite:///PATH or postgresql://..."),
    )
    api_keys: tuple[ApiKey, ...] = field(
        default=(), metadata=_doc("empty: the public API is open, on loopback only")
    )
    admin: AdminSection = field(default=AdminSection(), metadata=_doc("operators"))
    nodes: tuple[NodeEntry, ...] = field(default=(), metadata=_doc("the Nodes that may register"))
    models: tuple[Model, ...] = field(default=(), metadata=_doc("what callers may ask for"))
    limits: Limits = field(default=Limits(), metadata=_doc("limits of the public HTTP API"))
    tracing: Tracing = field(default=Tracing(), metadata=_doc("spans of requests; needs a restart"))


# --- node.yaml --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTls:
    """How the Node trusts its Edge and proves itself."""

    ca: Path = field(metadata=_doc("authorities of the Edge's certificate, PEM"))
    cert: Path | None = field(default=None, metadata=_doc("the Node's own certificate, for mutual TLS"))
    key: Path | None = field(default=None, metadata=_doc("its private key"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconnect:
    """The one policy of the first connect and of every later one (EN-23)."""

    interval_sec: float = field(default=10.0, metadata=_seconds("the wait, jittered by 0.5 to 1.5"))
    max_attempts: int = field(default=10, metadata=_count("attempts from dial to ready; 0: without limit"))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """node.yaml. All else comes from the Edge."""

    edge: Address = field(metadata=_doc("the Edge's nodes listener"))
    node: str = field(metadata=_name("this Node's id"))
    token: Secret = field(metadata=_doc("this Node's secret: file: or env:"))
    tls: NodeTls | None = field(default=None, metadata=_doc("TLS to the Edge"))
    reconnect: Reconnect = field(default=Reconnect(), metadata=_doc("when to try again"))
    tracing: Tracing = field(default=Tracing(), metadata=_doc("spans of what runs on this Node"))


# --- engine.yaml ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineListeners:
    """Where the reference engine listens."""

    http: Address | None = field(default=_loopback(8000), metadata=_doc("OpenAI HTTP"))
    openengine: Address | None = field(default=_loopback(8001), metadata=_doc("gRPC Inference and Control"))
    admin: Address | None = field(default=_loopback(8002), metadata=_doc("gRPC OpenEngineAdmin"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTls:
    """TLS by listener."""

    admin: ListenerTls | None = field(default=None, metadata=_doc("TLS of the admin listener"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """engine.yaml, for the reference engine."""

    listen: EngineListeners = field(default=EngineListeners(), metadata=_doc("addresses"))
    insecure: bool = field(
        default=False, metadata=_doc("allow listeners off loopback without TLS; warns at every start")
    )
    tls: EngineTls = field(default=EngineTls(), metadata=_doc("TLS by listener"))
    ranks: int = field(default=2, metadata=_count("rank processes, tensor-parallel", low=1, high=64))
    slots: int = field(default=16, metadata=_count("sequences computed side by side", low=1, high=1024))
    model_id: str = field(default="iop-tiny", metadata=_doc("the name that the model is served under"))
    checkpoint: Path | None = field(
        default=None, metadata=_doc("directory of the weights; absent: the built-in one")
    )
    store: StoreUrl = field(
        default=StoreUrl(url="sqlite:///engine.db"),
        metadata=_doc("the journal: sqlite:///PATH or postgresql://..."),
    )
    admin: AdminSection | None = field(
        default=None, metadata=_doc("operators; absent: development tokens are made")
    )
