"""The assembled Edge: pure cores, their shells, and the order in which they start and stop (EN-109)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from iop.core.clock import Clock
from iop.core.errors import InvalidRequest
from iop.core.ids import RunId
from iop.edge.artifacts import Artifacts
from iop.edge.calls import ProviderKey
from iop.edge.dispatch import Dispatcher
from iop.edge.nodes import Nodes
from iop.edge.outcomes import UNKNOWN_VERSION, OutcomeBook
from iop.edge.participants import Participants, StepCodec
from iop.edge.pools import Pools
from iop.edge.registry import Registry
from iop.edge.snapshot import EdgeSnapshot
from iop.edge.status import Status
from iop.edge.tasks import TaskOwner
from iop.obs.tracing import Tracer
from iop.wire.handshake import PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN

log = logging.getLogger(__name__)


class Edge:
    """One gateway's inside. Made and entered on the loop that its connections run on.

    ::

        async with Edge(snapshot, clock=clock, codec=codec, new_run_id=new_run_id) as edge:
            listener = Listener(handler=edge.nodes, ...)

    Args:
        snapshot: the first configuration.
        clock: wall time, for what people read.
        codec: the wire form of admin records.
        new_run_id: makes a fresh id per dispatch attempt (EN-118).
        tracer: records spans of each request; None: none are (SF-13).
        instance: this process's name among chained Edges (SF-24).

    Attributes:
        nodes: the ``EdgeHandler`` for the listener.
        dispatcher: what surfaces call.
        participants: the ``ParticipantDriver`` of the operation core.
        artifacts: what profiles left on Nodes, to be fetched.
        status: what operators read.
    """

    def __init__(
        self,
        snapshot: EdgeSnapshot,
        *,
        clock: Clock,
        codec: StepCodec,
        new_run_id: Callable[[], RunId],
        tracer: Tracer | None = None,
        instance: str = "",
    ) -> None:
        now = asyncio.get_running_loop().time
        labels: dict[ProviderKey, str] = {}
        self._snapshot = snapshot
        self._tasks = TaskOwner()
        self._stack = AsyncExitStack()
        self.registry = Registry(
            snapshot, now=now(), protocol_versions=(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MAX)
        )
        self.pools = Pools(snapshot, now=now())
        self.outcomes = OutcomeBook(snapshot.limits.recent_requests_max)
        self.nodes = Nodes(snapshot, registry=self.registry, pools=self.pools, tasks=self._tasks)
        self.dispatcher = Dispatcher(
            snapshot,
            pools=self.pools,
            outcomes=self.outcomes,
            find_connection=self.nodes.find_connection,
            new_run_id=new_run_id,
            weight_version=lambda key: labels.get(key, UNKNOWN_VERSION),
            tracer=tracer,
            instance=instance,
        )
        self.artifacts = Artifacts(self.nodes.connection_of, new_run_id)
        self.participants = Participants(
            snapshot,
            nodes=self.nodes,
            dispatcher=self.dispatcher,
            codec=codec,
            tasks=self._tasks,
            weight_labels=labels,
            artifacts=self.artifacts,
        )
        self.nodes.attach(self.dispatcher, (self.participants,))
        self.status = Status(
            find_snapshot=lambda: self._snapshot,
            nodes=self.nodes,
            pools=self.pools,
            dispatcher=self.dispatcher,
            participants=self.participants,
            outcomes=self.outcomes,
            now=now,
            clock=clock,
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._tasks)
        self._tasks.start(self.nodes.run, "edge nodes")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.nodes.close_all()
        await self._stack.__aexit__(kind, value, trace)

    @property
    def snapshot(self) -> EdgeSnapshot:
        """The running configuration."""
        return self._snapshot

    def apply_snapshot(self, snapshot: EdgeSnapshot) -> None:
        """Make a validated configuration the running one, whole, in one turn; Nodes hear of it (EN-114).

        Raises:
            InvalidRequest: its revision is not newer; nothing was changed.
        """
        if snapshot.revision <= self._snapshot.revision:
            raise InvalidRequest(
                f"config revision {snapshot.revision} is not newer than {self._snapshot.revision}",
                reason="stale_config_revision",
            )
        self._snapshot = snapshot
        self.dispatcher.apply_snapshot(snapshot)
        self.nodes.apply_snapshot(snapshot)
        self.participants.apply_snapshot(snapshot)
        log.info("config.applied", extra={"config_revision": snapshot.revision})

    async def shut_down(self, *, deadline_s: float) -> None:
        """Stop admission, let runs finish, cancel the rest, then say goodbye to the Nodes (EN-109).

        The surfaces stay up meanwhile, so that callers hear how their requests end.
        """
        self.registry.shut_down()
        await self.dispatcher.shut_down(deadline_s=deadline_s)
        self.nodes.close_all()
