"""Who owns a Node id: the pure state machine of registration, readiness and fencing.

Each configured Node has at most one *owner*: the connection that last registered for it. An owner starts pending and
becomes ready by its own ready request; only then does anything but the handshake travel to it (EN-11 to EN-13). When
an owner goes, however that happens, its generation is fenced in the same call (EN-30, EN-31); whatever the fenced
connection does later finds that it is nobody (EN-33).

Connections are opaque tokens that the shell makes; generations are our own numbers and never leave the process (EN-16).
Every method takes the time and returns effects in the order in which they must be carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final, NewType, TypeAlias

from iop.core.ids import Generation, NodeId
from iop.edge.snapshot import EdgeSnapshot, NodeSpec
from iop.wire.messages import CloseReason, RefreshOutcome

ConnectionId = NewType("ConnectionId", int)
"""The shell's number of one accepted connection; never reused."""

TAKEOVERS_MAX: Final = 3
"""The third takeover within the window is refused (EN-115): two may be a restart, three are two processes."""

CONTENTION_WINDOW_S: Final = 60.0
CONTENTION_FIRST_S: Final = 1.0
CONTENTION_MAX_S: Final = 60.0
"""Refusal of a contended id doubles from the first value to the last (EN-115)."""


@unique
class NodeStep(Enum):
    """Where a Node's handshake stands; shown in status."""

    ABSENT = "absent"
    REGISTERED = "registered"
    CONFIGURING = "configuring"
    READY = "ready"
    CONTENDED = "contended"


@unique
class RefusalCode(Enum):
    """Why a registration is refused; stable on the wire."""

    BAD_TOKEN = "bad_token"  # noqa: S105
    UNKNOWN_NODE = "unknown_node"
    UNSUPPORTED_VERSION = "unsupported_version"
    IDENTITY_CONTENDED = "identity_contended"
    EDGE_SHUTDOWN = "edge_shutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Answer the registration with this Node's config; the claim is pending (EN-10, EN-11)."""

    connection: ConnectionId
    node: NodeSpec
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer the registration with a refusal."""

    connection: ConnectionId
    code: RefusalCode
    reason: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyAnswered:
    """Answer a ready request (EN-14, EN-15); ``code`` is empty when ready."""

    connection: ConnectionId
    ready: bool
    code: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """A generation ended: return its leases, take its resources offline, settle its dispatches, pump (EN-31)."""

    node: NodeId
    generation: Generation
    connection: ConnectionId
    reason: CloseReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """A generation's resources may take work now, gates permitting (EN-32)."""

    node: NodeId
    generation: Generation
    connection: ConnectionId


@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshWanted:
    """Push this config; tell :meth:`Registry.refreshed` what became of it (EN-17, EN-80)."""

    node: NodeSpec
    generation: Generation
    connection: ConnectionId
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Close this connection."""

    connection: ConnectionId
    reason: CloseReason


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """A lifecycle event for logs and subscribers; droppable (EN-34)."""

    name: str
    node: NodeId
    reason: str = ""


Effect: TypeAlias = (
    Accepted | Refused | ReadyAnswered | Fenced | Activated | RefreshWanted | Closed | NodeEvent
)


@dataclass(slots=True, kw_only=True)
class _Owner:
    connection: ConnectionId
    instance: str
    claimed_at: float
    revision: int
    fingerprint: str
    generation: Generation | None = None
    is_activated: bool = False
    refresh_in_flight: int | None = None

    @property
    def is_ready(self) -> bool:
        return self.generation is not None


@dataclass(slots=True, kw_only=True)
class _Entry:
    since: float
    owner: _Owner | None = None
    reason: str = ""
    takeovers: list[float] = field(default_factory=list)
    refused_until: float = 0.0
    refusal_s: float = 0.0
    refresh_result: str = ""
    connected_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What status shows of one Node's handshake.

    Attributes:
        connected: dispatch-ready and activated; false while pending (EN-13, EN-92).
        since: monotonic seconds of the last change of step.
        revision: config that the Node holds; zero when absent.
        refresh: what became of the last push: empty, ``pending``, ``applied`` or why not.
    """

    node: NodeId
    step: NodeStep
    connected: bool
    since: float
    reason: str
    revision: int
    refresh: str


class Registry:
    """Ownership of all configured Node ids.

    Args:
        snapshot: the first configuration.
        now: monotonic seconds.
        protocol_versions: lowest and highest wire version that is accepted (EN-105).
    """

    def __init__(
        self, snapshot: EdgeSnapshot, *, now: float, protocol_versions: tuple[int, int] = (1, 1)
    ) -> None:
        self._snapshot = snapshot
        self._versions = protocol_versions
        self._entries: dict[NodeId, _Entry] = {node: _Entry(since=now) for node in snapshot.nodes}
        self._node_of: dict[ConnectionId, NodeId] = {}
        self._generation = 0
        self._is_closing = False

    # ---- events ----

    def register(
        self,
        connection: ConnectionId,
        node_id: NodeId,
        *,
        is_authentic: bool,
        protocol_version: int,
        instance: str,
        now: float,
    ) -> list[Effect]:
        """A connection asks for a Node id; it is accepted as pending owner or refused (EN-10, EN-11).

        ``is_authentic`` says whether its credential matched one of the Node's hashes; the shell compares, so that
        secrets stay out of here.
        """
        low, high = self._versions
        if self._is_closing:
            return [self._refuse(connection, RefusalCode.EDGE_SHUTDOWN, "the Edge is shutting down", 1.0)]
        if not low <= protocol_version <= high:
            reason = f"wire protocol {protocol_version} is not supported; this Edge speaks {low} to {high}"
            return [self._refuse(connection, RefusalCode.UNSUPPORTED_VERSION, reason)]
        spec = self._snapshot.nodes.get(node_id)
        entry = self._entries.get(node_id)
        if spec is None or entry is None:
            return [
                self._refuse(connection, RefusalCode.UNKNOWN_NODE, "this Node id is not in the Edge's config")
            ]
        if not is_authentic:
            return [self._refuse(connection, RefusalCode.BAD_TOKEN, "the token does not match")]
        if connection in self._node_of:
            return [self._refuse(connection, RefusalCode.BAD_TOKEN, "this connection has registered already")]

        contention = self._contention(entry, instance, now)
        if contention > 0:
            reason = "several processes present this Node id; stop all but one"
            return [self._refuse(connection, RefusalCode.IDENTITY_CONTENDED, reason, contention)]

        effects: list[Effect] = []
        if entry.owner is not None:
            effects += self._remove_owner(node_id, entry, CloseReason.SUPERSEDED, now)
        entry.owner = _Owner(
            connection=connection,
            instance=instance,
            claimed_at=now,
            revision=self._snapshot.revision,
            fingerprint=spec.fingerprint,
        )
        entry.since, entry.reason, entry.refresh_result = now, "waiting for the Node to report ready", ""
        self._node_of[connection] = node_id
        effects.append(Accepted(connection=connection, node=spec, revision=self._snapshot.revision))
        return effects

    def ready(self, connection: ConnectionId, node_id: NodeId, *, now: float) -> list[Effect]:
        """The Node says that it runs its config (EN-12). Only the first one of the current owner moves anything."""
        entry = self._entries.get(node_id)
        owner = None if entry is None else entry.owner
        if entry is None or owner is None or owner.connection != connection:
            # EN-15, EN-16: decided by (node_id, current connection) alone.
            return [
                ReadyAnswered(
                    connection=connection,
                    ready=False,
                    code="superseded",
                    reason="this connection does not own the Node id; register again on a new one",
                )
            ]
        answer = ReadyAnswered(connection=connection, ready=True)
        if owner.is_ready:
            return [answer]
        self._generation += 1
        owner.generation = Generation(self._generation)
        entry.since = now
        spec = self._snapshot.nodes[node_id]
        if owner.fingerprint != spec.fingerprint:
            # EN-17: the config that it applied is not ours any more; it may work once it holds the current one.
            return [answer, self._push(node_id, entry, owner)]
        owner.revision = self._snapshot.revision
        return [answer, *self._activate(node_id, entry, owner, now)]

    def refreshed(
        self,
        connection: ConnectionId,
        node_id: NodeId,
        *,
        revision: int,
        outcome: RefreshOutcome,
        reason: str,
        now: float,
    ) -> list[Effect]:
        """A pushed refresh ended. Answers for a former owner, or an overtaken push, change nothing (EN-33)."""
        entry = self._entries.get(node_id)
        owner = None if entry is None else entry.owner
        if entry is None or owner is None or owner.connection != connection or not owner.is_ready:
            return []
        if owner.refresh_in_flight != revision:
            return []
        owner.refresh_in_flight = None
        effects: list[Effect] = []
        if outcome is RefreshOutcome.APPLIED:
            owner.revision = revision
            entry.refresh_result = "applied"
        else:
            # EN-80: the old config goes on running whole; what it and ours have in common may be used.
            words = "restart required" if outcome is RefreshOutcome.RESTART_REQUIRED else "failed"
            entry.refresh_result = f"{words}: {reason}" if reason else words
            effects.append(NodeEvent(name="node.refresh_refused", node=node_id, reason=entry.refresh_result))
        spec = self._snapshot.nodes.get(node_id)
        if spec is not None and spec.fingerprint != owner.fingerprint:
            # The config changed again while that push was under way.
            return [*effects, self._push(node_id, entry, owner)]
        if not owner.is_activated:
            effects += self._activate(node_id, entry, owner, now)
        return effects

    def closed(self, connection: ConnectionId, reason: CloseReason, *, now: float) -> list[Effect]:
        """A connection is over. Only the current owner's end has any effect (EN-17, EN-30, EN-33)."""
        node_id = self._node_of.pop(connection, None)
        if node_id is None:
            return []
        entry = self._entries.get(node_id)
        if entry is None or entry.owner is None or entry.owner.connection != connection:
            return []
        return self._remove_owner(node_id, entry, reason, now, says_close=False)

    def handle_deadline(self, now: float) -> list[Effect]:
        """Take claims away from pending owners that were not ready in time (EN-17)."""
        effects: list[Effect] = []
        for node_id, entry in self._entries.items():
            owner = entry.owner
            if owner is None or owner.is_ready:
                continue
            if now >= owner.claimed_at + self._snapshot.ready_timeout_s:
                effects += self._remove_owner(node_id, entry, CloseReason.NOT_READY_IN_TIME, now)
        return effects

    def next_deadline(self) -> float | None:
        """When :meth:`handle_deadline` has something to do."""
        claims = [
            entry.owner.claimed_at
            for entry in self._entries.values()
            if entry.owner is not None and not entry.owner.is_ready
        ]
        return min(claims) + self._snapshot.ready_timeout_s if claims else None

    def apply_snapshot(self, snapshot: EdgeSnapshot, *, now: float) -> list[Effect]:
        """Make a new configuration the running one and say who must hear of it (EN-80, EN-81, EN-114).

        Removed Nodes keep their connection until :meth:`forget` says that their last run ended.
        """
        self._snapshot = snapshot
        effects: list[Effect] = []
        for node_id, spec in snapshot.nodes.items():
            entry = self._entries.setdefault(node_id, _Entry(since=now))
            owner = entry.owner
            if owner is None or not owner.is_ready:
                continue  # EN-13: it hears of it at ready
            if spec.fingerprint == owner.fingerprint:
                if owner.refresh_in_flight is None:
                    owner.revision = snapshot.revision
            elif owner.refresh_in_flight is None:
                effects.append(self._push(node_id, entry, owner))
        for node_id in self._entries.keys() - snapshot.nodes.keys():
            entry = self._entries[node_id]
            if entry.owner is None:
                del self._entries[node_id]
            elif not entry.owner.is_ready:
                effects += self._remove_owner(node_id, entry, CloseReason.REFUSED, now)
                del self._entries[node_id]
        return effects

    def removed_nodes(self) -> list[tuple[NodeId, Generation]]:
        """Ready Nodes that the config does not name any more; close each when its last run ended (EN-114)."""
        return [
            (node_id, entry.owner.generation)
            for node_id, entry in self._entries.items()
            if node_id not in self._snapshot.nodes
            and entry.owner is not None
            and entry.owner.generation is not None
        ]

    def forget(self, node_id: NodeId, *, now: float) -> list[Effect]:
        """Close a removed Node for good."""
        entry = self._entries.get(node_id)
        if entry is None or node_id in self._snapshot.nodes:
            return []
        effects = self._remove_owner(node_id, entry, CloseReason.REFUSED, now) if entry.owner else []
        del self._entries[node_id]
        return effects

    def shut_down(self) -> None:
        """Refuse further registrations (EN-109)."""
        self._is_closing = True

    # ---- views ----

    def owner_of(self, node_id: NodeId) -> ConnectionId | None:
        """The dispatch-ready owner, if any: the only connection that may be sent more than the handshake (EN-13)."""
        entry = self._entries.get(node_id)
        if entry is None or entry.owner is None or not entry.owner.is_ready:
            return None
        return entry.owner.connection

    def generation_of(self, node_id: NodeId) -> Generation | None:
        """The generation of the dispatch-ready owner, if any."""
        entry = self._entries.get(node_id)
        return None if entry is None or entry.owner is None else entry.owner.generation

    def is_owner(self, connection: ConnectionId) -> bool:
        """Whether this connection owns its id, pending or ready."""
        node_id = self._node_of.get(connection)
        entry = None if node_id is None else self._entries.get(node_id)
        return entry is not None and entry.owner is not None and entry.owner.connection == connection

    def view(self, node_id: NodeId, *, now: float) -> NodeView:
        """One Node for status."""
        entry = self._entries[node_id]
        owner = entry.owner
        if entry.refused_until > now:
            step = NodeStep.CONTENDED
        elif owner is None:
            step = NodeStep.ABSENT
        elif not owner.is_ready:
            step = NodeStep.REGISTERED
        elif not owner.is_activated:
            step = NodeStep.CONFIGURING
        else:
            step = NodeStep.READY
        reason = entry.reason
        if step is NodeStep.CONTENDED:
            reason = "identity_contended: several processes present this Node id"
        elif owner is None and not entry.connected_once and not reason:
            reason = "it has not connected yet"
        return NodeView(
            node=node_id,
            step=step,
            connected=owner is not None and owner.is_activated,
            since=entry.since,
            reason=reason,
            revision=owner.revision if owner is not None else 0,
            refresh=entry.refresh_result,
        )

    def nodes(self) -> Mapping[NodeId, NodeSpec]:
        """The configured catalogue (EN-92)."""
        return self._snapshot.nodes

    # ---- inner moves ----

    def _refuse(
        self, connection: ConnectionId, code: RefusalCode, reason: str, retry_after_s: float = 0.0
    ) -> Refused:
        return Refused(connection=connection, code=code, reason=reason, retry_after_s=retry_after_s)

    def _contention(self, entry: _Entry, instance: str, now: float) -> float:
        """Seconds for which this registration is refused, or 0. Counts the takeover when it is allowed (EN-115)."""
        if now < entry.refused_until:
            return entry.refused_until - now
        owner = entry.owner
        if owner is None or (instance and instance == owner.instance):
            return 0.0  # nobody to take from, or one process whose old connection has not been noticed dead
        if now > entry.refused_until + CONTENTION_WINDOW_S:
            entry.refusal_s = 0.0  # quiet for a whole window after the last refusal: the quarrel is over
        entry.takeovers = [at for at in entry.takeovers if at > now - CONTENTION_WINDOW_S][-TAKEOVERS_MAX:]
        entry.takeovers.append(now)
        if entry.refusal_s == 0.0 and len(entry.takeovers) < TAKEOVERS_MAX:
            return 0.0
        entry.refusal_s = min(max(CONTENTION_FIRST_S, entry.refusal_s * 2), CONTENTION_MAX_S)
        entry.refused_until = now + entry.refusal_s
        return entry.refusal_s

    def _push(self, node_id: NodeId, entry: _Entry, owner: _Owner) -> RefreshWanted:
        assert owner.generation is not None
        spec = self._snapshot.nodes[node_id]
        owner.refresh_in_flight = self._snapshot.revision
        owner.fingerprint = spec.fingerprint
        entry.refresh_result = "pending"
        if not owner.is_activated:
            entry.reason = "waiting for the Node to apply the current config"
        return RefreshWanted(
            node=spec,
            generation=owner.generation,
            connection=owner.connection,
            revision=self._snapshot.revision,
        )

    def _activate(self, node_id: NodeId, entry: _Entry, owner: _Owner, now: float) -> list[Effect]:
        assert owner.generation is not None
        owner.is_activated = True
        entry.connected_once = True
        entry.since, entry.reason = now, ""
        return [
            Activated(node=node_id, generation=owner.generation, connection=owner.connection),
            NodeEvent(name="node.connected", node=node_id),
        ]

    def _remove_owner(
        self, node_id: NodeId, entry: _Entry, reason: CloseReason, now: float, *, says_close: bool = True
    ) -> list[Effect]:
        owner = entry.owner
        assert owner is not None
        entry.owner = None
        entry.since = now
        entry.reason = f"last connection ended: {reason.value}"
        self._node_of.pop(owner.connection, None)
        effects: list[Effect] = []
        if owner.generation is not None:
            effects.append(
                Fenced(node=node_id, generation=owner.generation, connection=owner.connection, reason=reason)
            )
            if owner.is_activated:
                effects.append(NodeEvent(name="node.disconnected", node=node_id, reason=reason.value))
        if says_close:
            effects.append(Closed(connection=owner.connection, reason=reason))
        return effects
