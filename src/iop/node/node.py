"""The Node assembled: one supervisor, one link at a time, and all that outlives links (EN-20 to EN-25,
EN-109).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, assert_never

from iop.adapters.base import AdapterServices
from iop.core.clock import Clock
from iop.core.errors import InvalidRequest, IopError
from iop.core.ids import NodeId
from iop.net.ports import NodeConnection, NodeHandler
from iop.node.commands import CommandDesk
from iop.node.providers import AdapterMaker, ProviderSet
from iop.node.session import NodeParts, NodeSession
from iop.node.step_runner import StepCodec, StepRunner
from iop.node.supervisor import (
    CloseLink,
    Connected,
    Dial,
    Exit,
    FatalLocalError,
    LinkEffect,
    LinkEvent,
    LinkState,
    Lost,
    Ready,
    ReconnectPolicy,
    Start,
    Stop,
    Supervision,
    TimerFired,
    Wait,
    step,
)
from iop.node.tasks import OwnedTasks
from iop.node.work import NodeWork
from iop.obs.tracing import Tracer
from iop.wire.messages import CancelReason, CloseReason, RegisterRequest

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 10.0
"""Until the socket to the Edge must be open, TLS included."""

REPORT_DELAY_S: Final = 0.05
"""Changes within this time go in one report."""

STOP_GRACE_S: Final = 30.0
"""How long runs may finish at a shutdown (EN-109) before they are cancelled."""

STOP_CANCEL_S: Final = 2.0
"""How long cancelled work may take to end, and adapters to close."""


class Dialer(Protocol):
    """Opens connections to the Edge."""

    async def dial(self, handler: NodeHandler) -> NodeConnection:
        """Open one; from then on `handler` is called, `on_closed` exactly once and last.

        Raises:
            InvalidRequest: a local error that no retry can mend, such as an unreadable key (EN-22).
            IopError: anything remote.
        Cancellation: safe; the socket is closed and the handler is not called.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Who this Node says it is.

    Attributes:
        token: its secret; never shown.
        instance_id: new for every process (EN-115).
        software_version: for people.
        protocol_version: of the wire.
    """

    node_id: NodeId
    token: str = field(repr=False)
    instance_id: str
    software_version: str
    protocol_version: int
    adapter_types: tuple[str, ...] = ()


class Node:
    """The Node role. Create it, :meth:`run` it once, :meth:`stop` it from the same loop.

    Args:
        identity: for the registration.
        dialer: opens links.
        policy: when to dial.
        make_adapter: makes adapters from configs.
        codec: admin records to bytes and back.
        clock: time.
        rng: for jitter.
        environment: variables that a config may let through to command-line agents.
        stop_grace_s: how long runs may finish at a shutdown.
        tracer: records spans of each stream; None: none are (SF-13).
    """

    def __init__(
        self,
        identity: NodeIdentity,
        *,
        dialer: Dialer,
        policy: ReconnectPolicy,
        make_adapter: AdapterMaker,
        codec: StepCodec,
        clock: Clock,
        rng: random.Random,
        environment: Mapping[str, str] | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        tracer: Tracer | None = None,
    ) -> None:
        self._identity = identity
        self._dialer = dialer
        self._make_adapter = make_adapter
        self._codec = codec
        self._clock = clock
        self._rng = rng
        self._environment = dict(environment or {})
        self._stop_grace_s = stop_grace_s
        self._tracer = tracer
        self._supervision = Supervision(policy=policy)
        self._events: deque[LinkEvent] = deque()
        self._has_events = asyncio.Event()
        self._session: NodeSession | None = None
        self._link: NodeConnection | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._stops = 0
        self._grace: asyncio.Timeout | None = None
        self._report_timer: asyncio.TimerHandle | None = None
        self._transport: dict[str, str] = {}
        self._ready_count = 0
        self._was_ready = asyncio.Event()
        self._parts: NodeParts | None = None

    @property
    def state(self) -> LinkState:
        """Where the link stands."""
        return self._supervision.state

    @property
    def work(self) -> NodeWork | None:
        """What runs, once running."""
        return self._parts.work if self._parts is not None else None

    @property
    def providers(self) -> ProviderSet | None:
        """Who serves, once running."""
        return self._parts.providers if self._parts is not None else None

    async def wait_ready(self) -> None:
        """Wait until the Edge has acknowledged readiness for the first time; the caller bounds it."""
        await self._was_ready.wait()

    def stop(self) -> None:
        """Shut down: finish what runs within the grace, then end (EN-109). A second call skips the grace."""
        self._stops += 1
        if self._stops == 1:
            self._post(Stop())
        elif self._grace is not None:
            self._grace.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> int:
        """Serve until stopped or until nothing more can be done. Returns the process's exit code (EN-24)."""
        async with OwnedTasks() as tasks:
            services = AdapterServices(
                clock=self._clock, environment=self._environment, on_change=self._on_change
            )
            providers = ProviderSet(self._make_adapter, services, tasks)
            work = NodeWork(providers, tasks, tracer=self._tracer)
            steps = StepRunner(providers, work, self._codec, tasks)
            commands = CommandDesk(providers, work, steps, self._codec, self._transport)
            self._parts = NodeParts(
                providers=providers, work=work, steps=steps, commands=commands, tasks=tasks
            )
            try:
                return await self._supervise(tasks)
            finally:
                if self._report_timer is not None:
                    self._report_timer.cancel()
                work.refuse_new_work()
                await providers.aclose(within_s=STOP_CANCEL_S)
                tasks.cancel_children()

    # -- the supervisor's shell --

    async def _supervise(self, tasks: asyncio.TaskGroup) -> int:
        self._post(Start())
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            while self._events:
                event = self._events.popleft()
                effect = self._step(event)
                if isinstance(effect, Exit):
                    log = _log.info if effect.code == 0 else _log.error
                    log(
                        "node.stopped node_id=%s code=%s reason=%s",
                        self._identity.node_id,
                        effect.code,
                        effect.reason,
                    )
                    return effect.code
                if effect is not None:
                    self._carry_out(effect, tasks)

    def _post(self, event: LinkEvent) -> None:
        self._events.append(event)
        self._has_events.set()

    def _step(self, event: LinkEvent) -> LinkEffect | None:
        before = self._supervision
        self._supervision, effect = step(
            before, event, now=self._clock.monotonic(), random=self._rng.random()
        )
        if self._supervision.state is not before.state:
            if isinstance(event, Ready):
                self._ready_count += 1
                self._was_ready.set()
            reason = event.reason if isinstance(event, Lost | FatalLocalError) else ""
            _log.info(
                "link.%s node_id=%s attempts=%s reason=%s",
                self._supervision.state.value,
                self._identity.node_id,
                self._supervision.attempts,
                reason,
            )
        self._transport["state"] = self._supervision.state.value
        self._transport["attempts"] = str(self._supervision.attempts)
        self._transport["ready_count"] = str(self._ready_count)
        return effect

    def _carry_out(self, effect: Dial | Wait | CloseLink, tasks: asyncio.TaskGroup) -> None:
        match effect:
            case Dial():
                self._dialling = tasks.create_task(self._dial(), name="link.dial")
            case Wait(until=until):
                delay_s = max(0.0, until - self._clock.monotonic())
                tasks.create_task(self._fire_timer(delay_s), name="link.timer")
            case CloseLink():
                tasks.create_task(self._close_link(), name="link.close")
            case _:
                assert_never(effect)

    async def _fire_timer(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._post(TimerFired())

    async def _dial(self) -> None:
        """Open one link and register; its end comes through the session."""
        assert self._parts is not None
        session = NodeSession(self._identity.node_id, self._parts, self._post)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._dialer.dial(session)
        except InvalidRequest as exc:
            self._post(FatalLocalError(reason=exc.message))
            return
        except IopError as exc:
            self._post(Lost(reason=exc.message))
            return
        except TimeoutError:
            self._post(Lost(reason="the edge accepted no connection in time"))
            return
        except asyncio.CancelledError:
            self._post(Lost(reason="called off"))
            raise
        if session.is_closed:
            return
        self._session = session
        self._link = connection
        self._post(Connected())
        identity = self._identity
        connection.register(
            RegisterRequest(
                node_id=identity.node_id,
                token=identity.token,
                protocol_version=identity.protocol_version,
                software_version=identity.software_version,
                instance_id=identity.instance_id,
                clock_unix_nanos=self._clock.unix_nanos(),
                adapter_types=identity.adapter_types,
            )
        )

    async def _close_link(self) -> None:
        """Drain, report the rest as cancelled, say goodbye (EN-109)."""
        assert self._parts is not None
        if self._dialling is not None and not self._dialling.done():
            self._dialling.cancel()
            return
        link = self._link
        assert link is not None
        work = self._parts.work
        try:
            await self._drain(work)
        finally:
            link.close(CloseReason.SHUTDOWN)

    async def _drain(self, work: NodeWork) -> None:
        assert self._parts is not None
        work.refuse_new_work()
        if self._session is not None:
            self._session.report()
        # A second stop makes this end at once.
        self._grace = asyncio.timeout(0 if self._stops > 1 else self._stop_grace_s)
        try:
            async with self._grace:
                await work.wait_idle()
                await self._parts.steps.wait_idle()
        except TimeoutError:
            _log.info("work.cut_short node_id=%s in_flight=%s", self._identity.node_id, work.in_flight)
        finally:
            self._grace = None
        await work.cancel_all(CancelReason.NODE_SHUTDOWN, within_s=STOP_CANCEL_S)

    # -- reports --

    def _on_change(self) -> None:
        if self._report_timer is None and self._session is not None and self._session.is_ready:
            self._report_timer = asyncio.get_running_loop().call_later(REPORT_DELAY_S, self._report)

    def _report(self) -> None:
        self._report_timer = None
        if self._session is not None:
            self._session.report()
