"""One connection to the Edge as the Node's handler sees it: register, apply config, report ready, then serve.

What outlives the connection (providers, work, admin steps) lives in the node; the session only routes to it.
When the connection goes, the connection itself calls every open stream off first, so that nothing runs for
nobody (EN-117).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from iop.core.ids import NodeId
from iop.net.ports import (
    InboundAdminStep,
    InboundCommand,
    InboundRefresh,
    InboundRun,
    InboundTunnel,
    NodeConnection,
)
from iop.node.commands import CommandDesk
from iop.node.providers import ConfigRefusedError, ProviderSet
from iop.node.step_runner import StepRunner
from iop.node.supervisor import LinkEvent, Lost, Ready
from iop.node.work import NodeWork
from iop.wire.messages import (
    ArtifactRequest,
    CloseReason,
    NodeConfig,
    ReadyAck,
    ReadyRequest,
    RefreshOutcome,
    RefreshResponse,
    RegisterResponse,
)

_log = logging.getLogger(__name__)

COMMANDS_MAX: Final = 64
"""Queries under way on one connection; each may cost a task and a read-back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """What sessions route to."""

    providers: ProviderSet
    work: NodeWork
    steps: StepRunner
    commands: CommandDesk
    tasks: asyncio.TaskGroup


class NodeSession:
    """The `NodeHandler` of one connection.

    Args:
        node_id: this Node.
        parts: what to route to.
        on_link: told what the supervisor must know: ready once, and the one loss.
    """

    def __init__(self, node_id: NodeId, parts: NodeParts, on_link: Callable[[LinkEvent], None]) -> None:
        self._node_id = node_id
        self._parts = parts
        self._on_link = on_link
        self._connection: NodeConnection | None = None
        self._is_ready = False
        self._is_closed = False
        self._refusal = ""
        self._retry_after_s = 0.0
        self._commands_open = 0

    @property
    def connection(self) -> NodeConnection | None:
        """The connection while it is open and registered."""
        return None if self._is_closed else self._connection

    @property
    def is_closed(self) -> bool:
        """Whether the connection is over."""
        return self._is_closed

    @property
    def is_ready(self) -> bool:
        """Whether the Edge acked ready and the connection is open."""
        return self._is_ready and not self._is_closed

    # -- handshake --

    def on_registered(self, connection: NodeConnection, response: RegisterResponse) -> None:
        """Apply the config and report ready, or note why not (EN-10 to EN-12)."""
        self._connection = connection
        if not response.accepted or response.config is None:
            self._refuse(connection, response.reason_code or "refused", response.reason)
            self._retry_after_s = response.retry_after_ms / 1000
            return
        self._parts.tasks.create_task(
            self._become_ready(connection, response.node_id or self._node_id, response.config),
            name="session.configure",
        )

    def on_ready_ack(self, connection: NodeConnection, ack: ReadyAck) -> None:
        """Serve, or close and come again (EN-14, EN-15)."""
        if not ack.ready:
            self._refuse(connection, ack.reason_code or "not_ready", ack.reason)
        elif not self._is_ready:
            self._is_ready = True
            self._on_link(Ready())
            self.report()

    def on_closed(self, reason: CloseReason) -> None:
        """The connection is over; its streams were called off before."""
        if self._is_closed:
            return
        self._is_closed = True
        self._on_link(Lost(reason=self._refusal or reason.value, retry_after_s=self._retry_after_s))

    def report(self) -> None:
        """Send the providers' state unasked; droppable (EN-34)."""
        if self.is_ready and self._connection is not None:
            self._connection.send_report(self._parts.commands.report())

    # -- work --

    def on_tunnel(self, tunnel: InboundTunnel) -> None:
        """Serve one tunnel (EN-50)."""
        self._parts.work.open_tunnel(tunnel)

    def on_run(self, run: InboundRun) -> None:
        """Serve one run (EN-40)."""
        self._parts.work.open_run(run)

    def on_artifact(self, request: ArtifactRequest, tunnel: InboundTunnel) -> None:
        """Stream an artifact back (AD-46)."""
        self._parts.work.open_artifact(request, tunnel)

    def on_terminate_session(self, session_id: str) -> None:
        """End a session's streams, then the state that engines keep for it (EN-70)."""
        self._parts.work.terminate_session(session_id)
        self._parts.tasks.create_task(self._parts.work.forget_session(session_id), name="session.terminate")

    def on_command(self, command: InboundCommand) -> None:
        """Answer a query (EN-75)."""
        if self._commands_open >= COMMANDS_MAX:
            command.respond(self._parts.commands.refuse(command.request, "too many commands at once"))
            return
        self._commands_open += 1
        self._parts.tasks.create_task(self._answer(command), name="session.command")

    def on_refresh(self, refresh: InboundRefresh) -> None:
        """Apply a new config, or refuse it whole (EN-80)."""
        self._parts.tasks.create_task(self._refresh(refresh), name="session.refresh")

    def on_admin_step(self, step: InboundAdminStep) -> None:
        """Run a step once (EN-120)."""
        self._parts.steps.receive(step)

    # -- inside --

    def _refuse(self, connection: NodeConnection, code: str, reason: str) -> None:
        self._refusal = f"{code}: {reason}" if reason else code
        _log.warning("link.refused node_id=%s reason=%s", self._node_id, self._refusal)
        connection.close(CloseReason.REFUSED)

    async def _become_ready(self, connection: NodeConnection, node_id: NodeId, config: NodeConfig) -> None:
        statuses = await self._parts.providers.apply(config, is_whole=False)
        for status in statuses:
            if not status.started:
                _log.warning("adapter.not_started adapter=%s reason=%s", status.name, status.reason)
        if not self._is_closed:
            connection.send_ready(
                ReadyRequest(node_id=node_id, config_revision=config.config_revision, adapters=statuses)
            )

    async def _answer(self, command: InboundCommand) -> None:
        try:
            command.respond(await self._parts.commands.answer(command.request))
        finally:
            self._commands_open -= 1

    async def _refresh(self, refresh: InboundRefresh) -> None:
        providers = self._parts.providers
        config = refresh.config
        before = providers.config
        if config.config_revision <= before.config_revision:
            # The same or an older snapshot, come late: the one in force is what the Edge wants.
            refresh.respond(_applied(providers))
            return
        try:
            await providers.apply(config, is_whole=True)
        except ConfigRefusedError as exc:
            _log.warning("config.refused revision=%s reason=%s", config.config_revision, exc)
            refresh.respond(
                RefreshResponse(
                    outcome=RefreshOutcome.FAILED,
                    config_revision=providers.config.config_revision,
                    reason=str(exc),
                    adapters=exc.statuses,
                )
            )
            return
        _log.info("config.applied revision=%s", config.config_revision)
        if config.runtime != before.runtime:
            refresh.respond(
                RefreshResponse(
                    outcome=RefreshOutcome.RESTART_REQUIRED,
                    config_revision=config.config_revision,
                    reason="heartbeat, window and frame sizes change with the next registration",
                    adapters=providers.statuses,
                )
            )
        else:
            refresh.respond(_applied(providers))
        self.report()


def _applied(providers: ProviderSet) -> RefreshResponse:
    return RefreshResponse(
        outcome=RefreshOutcome.APPLIED,
        config_revision=providers.config.config_revision,
        adapters=providers.statuses,
    )
