"""The Edge's running configuration as one numbered immutable value (EN-114).

The application builds it from the settings tree, after validation; whoever needs configuration gets the whole snapshot
and keeps it: a request lives under the one it was admitted with. Secrets are here as hashes, or inside the wire
payload that goes to the one Node that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from iop.core.errors import InvalidRequest
from iop.core.ids import ModelId, NodeId, ProviderId
from iop.core.limits import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, READY_TIMEOUT_S
from iop.edge.calls import ProviderKey, Route
from iop.wire.messages import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """One adapter instance on one Node as the config wants it (EN-85).

    Attributes:
        category: ``api``, ``cli`` or ``local_inference`` (EN-90).
        capacity: concurrent requests; EN-95's gate on the Node has the same number.
        long_capacity: how many of them may be long-context ones (EN-111).
        operations: what it serves; ``None``: everything that its route can say.
        profile_operations: those of them that its protocol profile names (EN-51); the rest travel by path.
        is_administered: whether its engine takes admin steps; if so it starts behind a reconcile gate (EN-32, AD-35).
        workspace: for CLI agents (EN-42).
        weights_source: where the weights that its engine starts with can be read again by it, as the operator says;
            empty: only the engine can tell (AD-32).
    """

    provider: ProviderId
    type: str
    category: str
    route: Route
    capacity: int
    long_capacity: int = 0
    enabled: bool = True
    operations: frozenset[str] | None = None
    profile_operations: frozenset[str] = frozenset()
    is_administered: bool = False
    workspace: str = ""
    weights_source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One configured Node.

    Attributes:
        token_sha256: digests of the accepted credentials (EN-104); more than one while a token is rotated.
        adapters: by provider id, in config order.
        wire: the payload that the Node gets; its revision field is set when it is sent (EN-10).
        fingerprint: changes whenever ``wire`` does; tells whether a refresh is needed (EN-17).
    """

    id: NodeId
    token_sha256: tuple[bytes, ...] = field(repr=False)
    adapters: Mapping[ProviderId, AdapterSpec]
    wire: NodeConfig = field(repr=False)
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMember:
    """One line of ``models[].providers`` (EN-62)."""

    key: ProviderKey
    target: str
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """How a model's requests wait (EN-110). Times in seconds.

    Attributes:
        max_waiters: beyond it ``queue_full``; each waiter costs a connection and its request body.
        timeout_s: contended time after which ``queue_timeout``.
        no_capacity_grace_s: how long a pool without a live provider holds its waiters; above the reconnect interval,
            or a Node that comes back finds nobody.
        paused_timeout_s: time under a pause after which ``paused``.
        comment_s: how often a waiting stream is told its place by a comment; 0: never, its answer then begins with its
            provider's.
    """

    max_waiters: int = 1000
    timeout_s: float = 30.0
    no_capacity_grace_s: float = 15.0
    paused_timeout_s: float = 600.0
    comment_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One public model: a pool of providers and a queue.

    ``conversion_drops`` names request fields that may be let go where a provider speaks another dialect (SF-10),
    ``rewrites`` what is changed of chats and streams (SF-15).
    """

    id: ModelId
    members: tuple[PoolMember, ...]
    aliases: tuple[str, ...] = ()
    long_context_tokens: int | None = None
    queue: QueueSpec = QueueSpec()
    response_model: str = "provider"
    created_unix_s: int = 0
    conversion_drops: frozenset[str] = frozenset()
    rewrites: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSpec:
    """When a failing provider is left alone (EN-116)."""

    failures: int = 5
    window_s: float = 10.0
    open_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatSpec:
    """Told to Nodes at registration (EN-103)."""

    interval_s: float = HEARTBEAT_INTERVAL_S
    timeout_s: float = HEARTBEAT_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """Bounds of one request's life at the Edge; seconds.

    Attributes:
        first_byte_timeout_s: from lease to the provider's first byte (SF-12).
        total_timeout_s: from lease to the end (SF-12).
        fairness_every: under contention, every Nth pick goes to the other of long and short (EN-111).
        attempts_max: attempts of one request, where repeating is allowed (EN-112). More would hide a sick Node.
        cancel_confirm_s: how long a lease waits for the Node to confirm a cancel before it comes back anyway. Shorter
            overbooks slow engines; longer lets a Node that forgets its terminals hold capacity.
        busy_backoff_s: how long a provider whose own gate was full gets nothing new (EN-117).
        recent_requests_max: how many ended requests ``iop explain`` can tell of.
    """

    first_byte_timeout_s: float = 600.0
    total_timeout_s: float = 3600.0
    fairness_every: int = 4
    attempts_max: int = 4
    cancel_confirm_s: float = 30.0
    busy_backoff_s: float = 0.05
    recent_requests_max: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSnapshot:
    """Everything that registry, pools and dispatch are configured with.

    Attributes:
        revision: rises with every applied config; shown as ``config_revision``.
        nodes: all configured Nodes; the catalogue of EN-92.
        models: by public id.
        chars_per_token: UTF-8 bytes per estimated prompt token (EN-111).
        shows_provider: whether ``x-iop-provider`` is sent (SF-13).

    Raises:
        InvalidRequest: an alias or a pool member does not resolve; the whole snapshot is refused (EN-114).
    """

    revision: int
    nodes: Mapping[NodeId, NodeSpec] = field(default_factory=dict)
    models: Mapping[ModelId, ModelSpec] = field(default_factory=dict)
    breaker: BreakerSpec = BreakerSpec()
    heartbeat: HeartbeatSpec = HeartbeatSpec()
    limits: DispatchLimits = DispatchLimits()
    ready_timeout_s: float = READY_TIMEOUT_S
    participant_lost_s: float = 30.0
    chars_per_token: float = 4.0
    shows_provider: bool = True
    aliases: Mapping[str, ModelId] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names: dict[str, ModelId] = {}
        for model in self.models.values():
            for name in (model.id, *model.aliases):
                if names.setdefault(name, model.id) != model.id:
                    raise InvalidRequest(
                        f"models: the name {name!r} is used by two models", reason="duplicate_model_name"
                    )
            for member in model.members:
                node = self.nodes.get(member.key.node)
                if node is None or member.key.provider not in node.adapters:
                    raise InvalidRequest(
                        f"models.{model.id}.providers: {member.key} is no configured adapter",
                        reason="unknown_provider",
                    )
        object.__setattr__(self, "aliases", MappingProxyType(names))

    def find_model(self, name: str) -> ModelSpec | None:
        """The model of this id or alias, if any."""
        model = self.aliases.get(name)
        return None if model is None else self.models[model]

    def find_adapter(self, key: ProviderKey) -> AdapterSpec | None:
        """The configured adapter of this resource, if any."""
        node = self.nodes.get(key.node)
        return None if node is None else node.adapters.get(key.provider)

    def models_of(self, key: ProviderKey) -> tuple[ModelSpec, ...]:
        """The models whose pool names this resource."""
        return tuple(m for m in self.models.values() if any(p.key == key for p in m.members))
