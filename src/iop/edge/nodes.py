"""The shell around the registry: carries its effects to connections, pools and dispatch, in the turn of their cause.

Implements ``EdgeHandler``. A connection's callbacks become registry events; the effects that come back are carried out
in order, with no wait between them: when a generation is fenced, its leases are back, its resources are offline and its
dispatches are settled before anything else is looked at (EN-30, EN-31, EN-34).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from math import ceil
from typing import Final, Protocol, assert_never

from iop.core.errors import IopError, NotFound, Unavailable
from iop.core.ids import Generation, NodeId, ProviderId
from iop.edge.dispatch import Dispatcher
from iop.edge.pools import Pools
from iop.edge.registry import (
    Accepted,
    Activated,
    Closed,
    ConnectionId,
    Effect,
    Fenced,
    NodeEvent,
    NodeView,
    ReadyAnswered,
    RefreshWanted,
    Refused,
    Registry,
)
from iop.edge.scrub import scrub
from iop.edge.snapshot import EdgeSnapshot, NodeSpec
from iop.edge.tasks import TaskOwner
from iop.net.ports import EdgeConnection
from iop.wire.data_parallel import RANKS_CAPABILITY, read_ranks
from iop.wire.handshake import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN
from iop.wire.messages import (
    AdapterStatus,
    CancelReason,
    CloseReason,
    CommandRequest,
    CommandResponse,
    NodeConfig,
    ProviderReport,
    ProviderSnapshot,
    ReadyAck,
    ReadyRequest,
    RefreshOutcome,
    RegisterRequest,
    RegisterResponse,
)
from iop.wire.model_facts import ABSENT_OPERATIONS, NODE_STOPPING, read_names

log = logging.getLogger(__name__)

REFRESH_TIMEOUT_S: Final = 60.0
"""A Node starts adapters during a refresh, which may load for a while; a dead one is found by its heartbeat anyway."""

COMMAND_TIMEOUT_S: Final = 10.0
"""Queries are answered from a Node's memory; longer means that it does not answer."""

REMOVED_CHECK_S: Final = 1.0
"""How often removed Nodes are looked at whether their last run ended (EN-114)."""


class NodeWatcher(Protocol):
    """Who wants to know how Nodes come and go. Called synchronously; must not raise."""

    def node_ready(self, node: NodeId) -> None:
        """A generation was activated."""
        ...

    def node_lost(self, node: NodeId) -> None:
        """A generation was fenced."""
        ...

    def node_reported(self, node: NodeId, report: ProviderReport) -> None:
        """News of the current generation; droppable."""
        ...


@dataclass(slots=True, kw_only=True)
class _Session:
    connection: EdgeConnection
    node: NodeId | None = None
    adapters: tuple[AdapterStatus, ...] = ()
    probed: dict[str, ProviderSnapshot] = field(default_factory=dict)


class Nodes:
    """All Node connections of one Edge.

    Args:
        registry: who owns which Node id.
        pools: what comes online and goes offline with them.
        dispatcher: whom fences settle.
        tasks: owner of the pushes of refreshes.
    """

    def __init__(self, snapshot: EdgeSnapshot, *, registry: Registry, pools: Pools, tasks: TaskOwner) -> None:
        self.registry = registry
        self.late_frames_total = 0
        self.refused_registrations_total = 0
        self._snapshot = snapshot
        self._pools = pools
        self._dispatcher: Dispatcher | None = None
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._watchers: list[NodeWatcher] = []
        self._ids: dict[EdgeConnection, ConnectionId] = {}
        self._sessions: dict[ConnectionId, _Session] = {}
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, dispatcher: Dispatcher, watchers: Collection[NodeWatcher] = ()) -> None:
        """Say whom to tell; once, before the listener opens."""
        self._dispatcher = dispatcher
        self._watchers.extend(watchers)

    # ---- from connections (EdgeHandler) ----

    def on_register(self, connection: EdgeConnection, request: RegisterRequest) -> None:
        """First packet: claim the id or be refused (EN-10, EN-11)."""
        self._next_id += 1
        connection_id = ConnectionId(self._next_id)
        self._ids[connection] = connection_id
        self._sessions[connection_id] = _Session(connection=connection, node=request.node_id)
        effects = self.registry.register(
            connection_id,
            request.node_id,
            is_authentic=self._is_authentic(request),
            protocol_version=request.protocol_version,
            instance=request.instance_id,
            now=self._loop.time(),
        )
        self._carry_out(effects)

    def on_ready(self, connection: EdgeConnection, request: ReadyRequest) -> None:
        """The Node runs its config (EN-12, EN-14)."""
        connection_id = self._ids.get(connection)
        if connection_id is None:
            connection.respond_ready(ReadyAck(ready=False, reason_code="superseded", reason="not registered"))
            return
        self._note_adapters(connection_id, request.adapters)
        self._carry_out(self.registry.ready(connection_id, request.node_id, now=self._loop.time()))

    def on_report(self, connection: EdgeConnection, report: ProviderReport) -> None:
        """News; from anybody but the ready owner, dropped (EN-33)."""
        node = self._node_of_owner(connection)
        if node is not None:
            session = self._sessions[self._ids[connection]]
            spec = self._snapshot.nodes.get(node)
            configured = () if spec is None else spec.adapters
            session.probed = {
                shown.id: replace(shown, reason=scrub(shown.reason))
                for shown in report.providers
                if shown.id in configured
            }
            self._note_missing(node, session)
            self._note_ranks(node, session)
            if any(shown.capabilities.get(NODE_STOPPING) == "true" for shown in report.providers):
                self._note_leaving(node)
            for watcher in self._watchers:
                watcher.node_reported(node, report)

    def on_late_frame(self, connection: EdgeConnection) -> None:  # noqa: ARG002
        """Counted (EN-57)."""
        self.late_frames_total += 1

    def on_closed(self, connection: EdgeConnection, reason: CloseReason) -> None:
        """The connection is over; only the current owner's end changes anything (EN-30, EN-33)."""
        connection_id = self._ids.pop(connection, None)
        if connection_id is None:
            return
        self._carry_out(self.registry.closed(connection_id, reason, now=self._loop.time()))
        self._sessions.pop(connection_id, None)

    # ---- for the rest of the Edge ----

    def find_connection(self, node: NodeId, generation: Generation) -> EdgeConnection | None:
        """The connection of this generation, while it is the dispatch-ready owner."""
        if self.registry.generation_of(node) != generation:
            return None
        return self.connection_of(node)

    def connection_of(self, node: NodeId) -> EdgeConnection | None:
        """The connection of the dispatch-ready owner (EN-13)."""
        owner = self.registry.owner_of(node)
        session = None if owner is None else self._sessions.get(owner)
        return None if session is None else session.connection

    def adapters_of(self, node: NodeId) -> Mapping[str, AdapterStatus]:
        """How the adapters of the current generation started, by name."""
        owner = self.registry.owner_of(node)
        session = None if owner is None else self._sessions.get(owner)
        return {} if session is None else {adapter.name: adapter for adapter in session.adapters}

    def probed(self, node: NodeId, provider: ProviderId) -> ProviderSnapshot | None:
        """How the Node last found this engine, as far as it told; it chooses no provider (EN-34)."""
        owner = self.registry.owner_of(node)
        session = None if owner is None else self._sessions.get(owner)
        return None if session is None else session.probed.get(provider)

    def view(self, node: NodeId) -> NodeView:
        """One Node for status."""
        return self.registry.view(node, now=self._loop.time())

    def connected(self) -> list[NodeId]:
        """Nodes with an activated generation."""
        return [node for node in self.registry.nodes() if self.view(node).connected]

    async def command(self, node: NodeId, request: CommandRequest) -> CommandResponse:
        """Ask a Node (EN-75); the answer tells nothing of where things live (EN-04).

        Raises:
            NotFound: no such Node is configured.
            Unavailable: it is not ready, or was lost before it answered.
            DeadlineExceeded: no answer within COMMAND_TIMEOUT_S.
        """
        if node not in self.registry.nodes():
            raise NotFound("no Node of this id is configured", reason="unknown_node")
        connection = self.connection_of(node)
        if connection is None:
            raise Unavailable("the Node is not ready", reason="node_not_ready", retry_after_s=5.0)
        answer = await connection.command(request, timeout_s=COMMAND_TIMEOUT_S)
        return replace(
            answer,
            reason=scrub(answer.reason),
            figures={name: scrub(value) for name, value in answer.figures.items()},
            providers=tuple(
                replace(
                    provider,
                    reason=scrub(provider.reason),
                    capabilities={name: scrub(value) for name, value in provider.capabilities.items()},
                )
                for provider in answer.providers
            ),
        )

    def terminate_session(self, session_id: str) -> list[NodeId]:
        """End all runs of an agent's session and the state kept for it (EN-70).

        Which Node holds a session is the Nodes' own knowledge, and one that knows it not does nothing, so every
        ready Node is told.

        Returns:
            The Nodes told, in the order of the configuration.
        """
        told = []
        for node in self.registry.nodes():
            connection = self.connection_of(node)
            if connection is not None:
                connection.terminate_session(session_id, CancelReason.ABORTED_BY_ADMIN)
                told.append(node)
        return told

    def apply_snapshot(self, snapshot: EdgeSnapshot) -> None:
        """Push a new configuration to whom it concerns; each Node's answer shows in its view (EN-80, EN-114)."""
        self._snapshot = snapshot
        self._carry_out(self.registry.apply_snapshot(snapshot, now=self._loop.time()))

    def close_all(self, reason: CloseReason = CloseReason.SHUTDOWN) -> None:
        """Say goodbye to every connection (EN-109)."""
        self.registry.shut_down()
        for session in list(self._sessions.values()):
            session.connection.close(reason)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def run(self) -> None:
        """Let removed Nodes go when their last run ended, until cancelled (EN-114)."""
        while True:
            await asyncio.sleep(REMOVED_CHECK_S)
            for node, _ in self.registry.removed_nodes():
                if not self._pools.live_work_of_node(node):
                    self._carry_out(self.registry.forget(node, now=self._loop.time()))

    # ---- inner ----

    def _is_authentic(self, request: RegisterRequest) -> bool:
        """Compare the credential's digest with each accepted one, in constant time (EN-104)."""
        digest = sha256(request.token.encode("utf-8", "surrogatepass")).digest()
        spec = self._snapshot.nodes.get(request.node_id)
        accepted = spec.token_sha256 if spec is not None else (bytes(32),)
        matches = [hmac.compare_digest(digest, known) for known in accepted]
        return spec is not None and any(matches)

    def _node_of_owner(self, connection: EdgeConnection) -> NodeId | None:
        connection_id = self._ids.get(connection)
        session = None if connection_id is None else self._sessions.get(connection_id)
        if session is None or session.node is None or self.registry.owner_of(session.node) != connection_id:
            return None
        return session.node

    def _note_adapters(self, connection_id: ConnectionId, adapters: tuple[AdapterStatus, ...]) -> None:
        session = self._sessions.get(connection_id)
        if session is not None:
            session.adapters = tuple(replace(a, reason=scrub(a.reason)) for a in adapters)
        for adapter in adapters:
            if not adapter.started:
                log.warning(
                    "adapter.start_failed",
                    extra={"conn_id": connection_id, "adapter": adapter.name, "reason": adapter.reason},
                )

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._carry_out_one(effect)
        self._rearm()

    def _carry_out_one(self, effect: Effect) -> None:
        assert self._dispatcher is not None, "attach comes before connections"
        now = self._loop.time()
        match effect:
            case Fenced():
                lost, settled = self._pools.fence(effect.node, effect.generation, now=now)
                self._dispatcher.lose(lost, settled)
                for watcher in self._watchers:
                    watcher.node_lost(effect.node)
                log.info(
                    "node.fenced",
                    extra={
                        "node_id": effect.node,
                        "conn_id": effect.connection,
                        "reason": effect.reason.value,
                        "leases": len(lost),
                    },
                )
            case Closed():
                session = self._sessions.get(effect.connection)
                if session is not None:
                    session.connection.close(effect.reason)
            case Accepted():
                self._accept(effect)
            case Refused():
                self._refuse(effect)
            case ReadyAnswered():
                session = self._sessions.get(effect.connection)
                if session is not None:
                    session.connection.respond_ready(
                        ReadyAck(ready=effect.ready, reason=effect.reason, reason_code=effect.code)
                    )
            case Activated():
                absent = self._absent(effect.connection)
                self._dispatcher.apply(
                    self._pools.activate(effect.node, effect.generation, now=now, absent=absent)
                )
                for watcher in self._watchers:
                    watcher.node_ready(effect.node)
            case RefreshWanted():
                session = self._sessions.get(effect.connection)
                if session is not None:
                    name = f"refresh {effect.node.id} {effect.revision}"
                    self._tasks.start(partial(self._push, effect, session), name)
            case NodeEvent():
                log.info(effect.name, extra={"node_id": effect.node, "reason": effect.reason})
            case _:
                assert_never(effect)

    def _note_leaving(self, node: NodeId) -> None:
        """It will close when its work is done: others are asked, and nobody waits for it (EN-109)."""
        generation = self.registry.generation_of(node)
        if generation is not None and self._dispatcher is not None:
            self._dispatcher.set_leaving(node, generation)

    def _note_missing(self, node: NodeId, session: _Session) -> None:
        """Which routes the engines lack: whoever is asked for one that others of the pool have (EN-51)."""
        generation = self.registry.generation_of(node)
        if generation is None or self._dispatcher is None:
            return
        missing = {
            ProviderId(name): read_names(shown.capabilities.get(ABSENT_OPERATIONS, ""))
            for name, shown in session.probed.items()
        }
        settled = self._pools.set_missing(node, generation, missing, now=self._loop.time())
        if settled:
            self._dispatcher.apply(settled)

    def _note_ranks(self, node: NodeId, session: _Session) -> None:
        """Which data-parallel ranks the engines have; of an engine that was not asked yet, nothing is told (SF-21)."""
        generation = self.registry.generation_of(node)
        if generation is None or self._dispatcher is None:
            return
        told: dict[ProviderId, dict[str, frozenset[int]]] = {}
        for name, shown in session.probed.items():
            for capability, value in shown.capabilities.items():
                if capability.startswith(RANKS_CAPABILITY):
                    target = capability.removeprefix(RANKS_CAPABILITY)
                    told.setdefault(ProviderId(name), {})[target] = read_ranks(value)
        settled = self._pools.set_ranks(node, generation, told, now=self._loop.time())
        if settled:
            self._dispatcher.apply(settled)

    def _absent(self, connection: ConnectionId) -> set[ProviderId]:
        session = self._sessions[connection]
        return {ProviderId(adapter.name) for adapter in session.adapters if not adapter.started}

    def _accept(self, effect: Accepted) -> None:
        session = self._sessions[effect.connection]
        log.info(
            "node.registered",
            extra={
                "node_id": effect.node.id,
                "conn_id": effect.connection,
                "peer": session.connection.peer,
            },
        )
        session.connection.respond_register(
            RegisterResponse(
                accepted=True,
                node_id=effect.node.id,
                config=_wire_config(effect.node, effect.revision),
                protocol_version_min=PROTOCOL_VERSION_MIN,
                protocol_version_max=PROTOCOL_VERSION_MAX,
            )
        )

    def _refuse(self, effect: Refused) -> None:
        session = self._sessions[effect.connection]
        self.refused_registrations_total += 1
        # The peer's address stands here and nowhere else (EN-04, EN-115).
        log.warning(
            "node.registration_refused",
            extra={
                "node_id": session.node,
                "conn_id": effect.connection,
                "peer": session.connection.peer,
                "code": effect.code.value,
            },
        )
        session.connection.respond_register(
            RegisterResponse(
                accepted=False,
                reason=effect.reason,
                reason_code=effect.code.value,
                protocol_version_min=PROTOCOL_VERSION_MIN,
                protocol_version_max=PROTOCOL_VERSION_MAX,
                retry_after_ms=ceil(effect.retry_after_s * 1000),
            )
        )

    async def _push(self, effect: RefreshWanted, session: _Session) -> None:
        if self.registry.owner_of(effect.node.id) != effect.connection:
            return  # it was lost in the turn in which this was decided; nothing is sent to a former owner (EN-81)
        outcome, reason = RefreshOutcome.FAILED, ""
        try:
            answer = await session.connection.refresh(
                _wire_config(effect.node, effect.revision), timeout_s=REFRESH_TIMEOUT_S
            )
            outcome, reason = answer.outcome, scrub(answer.reason)
            if answer.adapters:
                self._note_adapters(effect.connection, answer.adapters)
        except IopError as error:
            reason = error.message
        log.info(
            "node.refreshed",
            extra={
                "node_id": effect.node.id,
                "config_revision": effect.revision,
                "outcome": outcome.name.lower(),
                "reason": reason,
            },
        )
        now = self._loop.time()
        self._carry_out(
            self.registry.refreshed(
                effect.connection,
                effect.node.id,
                revision=effect.revision,
                outcome=outcome,
                reason=reason,
                now=now,
            )
        )
        if self._dispatcher is not None and effect.connection in self._sessions:
            self._dispatcher.set_absent(effect.node.id, effect.generation, self._absent(effect.connection))

    def _rearm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.registry.next_deadline()
        if at is not None:
            self._timer = self._loop.call_at(at, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._timer = None
        self._carry_out(self.registry.handle_deadline(self._loop.time()))


def _wire_config(node: NodeSpec, revision: int) -> NodeConfig:
    return replace(node.wire, config_revision=revision)
