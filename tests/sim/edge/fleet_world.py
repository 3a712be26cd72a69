"""The real Edge and real sessions on both ends of faulty memory links, on virtual time, from a seed.

Nodes are scripted handlers on the shipped Node connection: they dial, serve and are lost as real ones are. What is
proven here and not in ``edge_world`` is what only the wire can break: that a request is executed at most once whatever
happens to its connection, that cancels arrive, that credit bounds memory, and that late frames have no effect.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_world import CODEC, SimulationError, StillClock

from iop.core.errors import IopError
from iop.core.ids import NodeId, RunId
from iop.edge.edge import Edge
from iop.edge.handle import DispatchHandle
from iop.edge.snapshot import DispatchLimits, QueueSpec
from iop.net.edge_connection import EdgeWire
from iop.net.node_connection import InboundTunnelHandle, NodeWire
from iop.testing.edge_fleet import TOKEN, adapter_spec, request_of, snapshot_of, tunnel_to
from iop.testing.memory_transport import MemoryLink
from iop.testing.virtual_loop import VirtualLoop, run_virtual
from iop.wire.messages import (
    BodyFraming,
    CloseReason,
    NodeRuntime,
    ReadyRequest,
    RefreshOutcome,
    RefreshResponse,
    RegisterRequest,
    StreamError,
    StreamErrorCode,
    Usage,
)
from iop.wire.session import SessionSettings

NODES = ("n1", "n2", "n3")
STEPS = 60

TOGETHER = 0.15
"""How often a step follows the one before it in the same turn of the loop."""

WINDOW_BYTES = 16 * 1024
FRAME_SLACK_BYTES = 64 * 1024
"""One read's worth of frames may be past a window: the Node learns of its end only then."""

SETTINGS = SessionSettings(
    heartbeat_interval_s=1.0, heartbeat_timeout_s=3.0, stream_window_bytes=WINDOW_BYTES
)
RUNTIME = NodeRuntime(heartbeat_interval_ms=1000, heartbeat_timeout_ms=3000, stream_window_bytes=WINDOW_BYTES)


@dataclass(slots=True, eq=False)
class Caller:
    """One request and how it is read."""

    world: FleetWorld
    number: int
    body: bytes
    is_slow: bool
    task: asyncio.Task[None] | None = None
    handle: DispatchHandle | None = None
    error: IopError | None = None
    got: int = 0
    held: int = 0
    ends: list[str] = field(default_factory=list)
    has_left: bool = False
    executions: int = 0
    served: list[Serving] = field(default_factory=list)

    @property
    def pattern(self) -> bytes:
        """The byte that its answer is made of."""
        return bytes([self.number % 251])

    def on_response_start(self, *, status: int, headers, framing: BodyFraming) -> None:
        self._must_listen()

    def on_body(self, data: bytes) -> None:
        self._must_listen()
        if data.strip(self.pattern):
            self.world.fail(f"caller {self.number} got somebody else's bytes")
        self.got += len(data)
        self.held += len(data)
        if self.held > WINDOW_BYTES + FRAME_SLACK_BYTES:
            self.world.fail(f"caller {self.number} was sent {self.held} bytes ahead of its reading")
        if not self.is_slow:
            self.read()

    def on_usage(self, usage: Usage) -> None:
        self._must_listen()

    def on_end(self) -> None:
        self._must_listen()
        self.ends.append("end")

    def on_error(self, error: StreamError) -> None:
        self._must_listen()
        self.ends.append(error.code)

    def read(self) -> None:
        """Take what lies there, and return its credit."""
        held, self.held = self.held, 0
        if held and self.handle is not None:
            self.handle.consumed(held)

    def _must_listen(self) -> None:
        if self.is_done:
            self.world.fail(f"caller {self.number} heard something after its end")

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.has_left or bool(self.ends)


@dataclass(slots=True, eq=False)
class Serving:
    """A Node at work on one tunnel."""

    process: SimProcess
    tunnel: InboundTunnelHandle
    caller: Caller
    answer: bytes
    sent: int = 0
    is_over: bool = False
    was_cancelled: bool = False

    def go_on(self) -> None:
        """Send what credit allows, and end when all is sent."""
        if self.is_over:
            return
        if self.sent == 0:
            self.tunnel.start(status=200, headers=(), framing=BodyFraming.CHUNKED)
        while self.sent < len(self.answer) and self.tunnel.credit_bytes > 0:
            piece = self.answer[self.sent : self.sent + 4096]
            self.tunnel.send_body(piece)
            self.sent += len(piece)
        if self.sent >= len(self.answer):
            self.is_over = True
            self.tunnel.end()

    def cancelled(self, _reason) -> None:
        self.was_cancelled = True
        if not self.is_over:
            self.is_over = True
            self.tunnel.fail(StreamError(code=StreamErrorCode.CANCELLED))

    def break_off(self, code: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.tunnel.fail(StreamError(code=code))


class SimProcess:
    """One Node process: dials, registers, serves, is lost."""

    def __init__(self, world: FleetWorld, node: str, instance: str) -> None:
        self.world = world
        self.node = NodeId(node)
        self.instance = instance
        self.link: MemoryLink[NodeWire, EdgeWire] | None = None
        self.is_ready = False
        self.is_gone = False
        self.work: list[Serving] = []

    def dial(self) -> None:
        world = self.world
        loop = asyncio.get_running_loop()
        self.link = MemoryLink(
            lambda: NodeWire(handler=self, settings=SETTINGS, loop=loop, unix_nanos=lambda: 1),
            lambda: EdgeWire(handler=world.edge.nodes, settings=SETTINGS, loop=loop, unix_nanos=lambda: 1),
        )
        for faults in (self.link.to_left, self.link.to_right):
            faults.delay_s = world.rng.choice((0.0, 0.0, 0.01, 0.2))
            faults.piece_bytes_max = world.rng.choice((None, None, 700, 5000))
            faults.capacity_bytes = world.rng.choice((4096, 64 * 1024, 256 * 1024))
        self.link.left.register(
            RegisterRequest(node_id=self.node, token=TOKEN, protocol_version=1, instance_id=self.instance)
        )

    def on_registered(self, connection, response) -> None:
        if response.accepted:
            connection.send_ready(
                ReadyRequest(node_id=self.node, config_revision=response.config.config_revision)
            )

    def on_ready_ack(self, connection, ack) -> None:
        self.is_ready = ack.ready

    def on_tunnel(self, tunnel) -> None:
        world = self.world
        number = int(b"".join(tunnel.body).rstrip(b"."))
        caller = world.by_number[number]
        if world.rng.random() < 0.1:
            tunnel.fail(StreamError(code=StreamErrorCode.BUSY, before_start=True, retryable=True))
            return
        caller.executions += 1
        if caller.executions > 1:
            world.fail(f"caller {number} was executed {caller.executions} times")
        answer = caller.pattern * world.rng.choice((10, 3000, 40_000, 120_000))
        serving = Serving(self, tunnel, caller, answer)
        self.work.append(serving)
        caller.served.append(serving)
        tunnel.bind(on_cancel=serving.cancelled, on_writable=serving.go_on)

    def on_refresh(self, refresh) -> None:
        refresh.respond(
            RefreshResponse(outcome=RefreshOutcome.APPLIED, config_revision=refresh.config.config_revision)
        )

    def on_closed(self, reason: CloseReason) -> None:
        self.is_gone = True
        self.is_ready = False


class FleetWorld:
    """One run of one seed."""

    def __init__(self, seed: int, *, steps: int = STEPS) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.steps = steps
        self.trace: deque[str] = deque(maxlen=60)
        self.failure = ""
        self.callers: list[Caller] = []
        self.open_callers: list[Caller] = []
        """Those who have not ended. Whatever an ended one still hears is found at once."""
        self.by_number: dict[int, Caller] = {}
        self.processes: list[SimProcess] = []
        self._numbers = itertools.count(1)
        self._runs = itertools.count(1)
        self.edge: Edge
        self.loop: VirtualLoop
        self.tasks: asyncio.TaskGroup

    def fail(self, what: str) -> None:
        """Stop: something that must hold does not."""
        self.failure = self.failure or what
        lines = "\n  ".join(self.trace)
        raise SimulationError(
            f"seed {self.seed}, t={self.loop.time():.2f}: {self.failure}\nlast steps:\n  {lines}"
        )

    async def run(self) -> None:
        """All steps, then a calm end."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        loop.set_exception_handler(self.note_exception)
        snapshot = snapshot_of(
            {f"{node}/main": adapter_spec("main", capacity=2) for node in NODES},
            {"fast": [f"{node}/main" for node in NODES]},
            queue=QueueSpec(max_waiters=10, timeout_s=20, no_capacity_grace_s=6),
            limits=DispatchLimits(
                first_byte_timeout_s=40.0, total_timeout_s=900.0, attempts_max=3, cancel_confirm_s=10.0
            ),
            runtime=RUNTIME,
        )
        edge = Edge(
            snapshot,
            clock=StillClock(),
            codec=CODEC,
            new_run_id=lambda: RunId(f"run-{next(self._runs)}"),
        )
        async with edge as self.edge, asyncio.TaskGroup() as self.tasks:
            for node in NODES:
                self.start(node)
            await asyncio.sleep(0.5)
            for _ in range(self.steps):
                name, action = self.rng.choices(ACTIONS, WEIGHTS)[0]
                told = action(self)
                if told is not None:
                    self.trace.append(f"t={self.loop.time():.2f} {name} {told}")
                if self.rng.random() < TOGETHER:
                    continue
                await asyncio.sleep(self.rng.choice((0.0, 0.0, 0.001, 0.05, 0.5, 2.0)))
                self.check()
            await self.calm_down()
            for process in self.processes:
                if process.link is not None and not process.is_gone:
                    process.link.left.close(CloseReason.SHUTDOWN)
            await asyncio.sleep(5.0)

    def note_exception(self, _loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """A callback raised: nothing of Edge or Node may."""
        self.failure = self.failure or f"{context['message']}: {context.get('exception')!r}"

    def check(self) -> None:
        """What must hold between any two steps."""
        if self.failure:
            self.fail(self.failure)
        for broken in self.edge.pools.check(self.moment()):
            self.fail(broken)
        leases = self.edge.pools.leases
        if leases.granted_total - leases.returned_total != len(leases):
            self.fail("leases were returned more often than granted, or lost")
        ended = [caller for caller in self.open_callers if caller.is_done]
        if not ended:
            return
        for caller in ended:
            if len(caller.ends) > 1:
                self.fail(f"caller {caller.number} has {len(caller.ends)} ends")
            if caller.ends == ["end"]:
                answers = [len(serving.answer) for serving in caller.served]
                if caller.got not in answers:
                    self.fail(f"caller {caller.number} got {caller.got} of {answers} bytes and an end")
        self.open_callers = [caller for caller in self.open_callers if not caller.is_done]

    def moment(self) -> float:
        """Until when the pools must have acted: now, or just before a timer of theirs that is due in this very turn."""
        now, timer = self.loop.time(), self.edge.dispatcher._timer
        if timer is None or timer.cancelled() or timer.when() > now:
            return now
        return math.nextafter(timer.when(), 0.0)

    # ---- actions ----

    def start(self, node: str | None = None) -> str | None:
        node = node or self.rng.choice(NODES)
        process = SimProcess(self, node, self.rng.choice(("a", "b")))
        self.processes.append(process)
        process.dial()
        return node

    def call(self) -> str | None:
        number = next(self._numbers)
        size = self.rng.choice((8, 8, 100_000))
        caller = Caller(self, number, str(number).encode().ljust(size, b"."), self.rng.random() < 0.3)
        self.callers.append(caller)
        self.open_callers.append(caller)
        self.by_number[number] = caller
        caller.task = self.tasks.create_task(self._call(caller))
        return f"{number} {size} slow={caller.is_slow}"

    async def _call(self, caller: Caller) -> None:
        try:
            caller.handle = await self.edge.dispatcher.dispatch(
                request_of("fast", request_id=f"req-{caller.number}"), tunnel_to(caller, caller.body)
            )
        except IopError as error:
            caller.error = error

    def leave(self) -> str | None:
        caller = self.pick([c for c in self.open_callers if not c.is_done])
        if caller is None:
            return None
        self.let_leave(caller)
        return str(caller.number)

    def let_leave(self, caller: Caller) -> None:
        """A caller hangs up."""
        assert caller.task is not None
        caller.has_left = True
        if caller.handle is not None:
            caller.handle.cancel()
        else:
            caller.task.cancel()

    def race_leave(self) -> str | None:
        """One who waits leaves while a Node's end is on its way, in any turn around that of the grant."""
        serving = self.pick(self.unfinished())
        waiting = self.pick([c for c in self.open_callers if not c.is_done and c.handle is None][:3])
        if serving is None or waiting is None:
            return None
        serving.go_on()
        self.after_turns(self.rng.randint(0, 4), lambda: None if waiting.is_done else self.let_leave(waiting))
        return f"{waiting.number} and {serving.caller.number}"

    def after_turns(self, turns: int, act: Callable[[], None]) -> None:
        """Do something a few turns of the loop later."""
        if turns:
            self.loop.call_soon(self.after_turns, turns - 1, act)
        else:
            act()

    def serve(self) -> str | None:
        serving = self.pick(self.unfinished())
        if serving is None:
            return None
        serving.go_on()
        return f"{serving.caller.number} {serving.sent}/{len(serving.answer)}"

    def break_off(self) -> str | None:
        serving = self.pick(self.unfinished())
        if serving is None or serving.sent == 0:
            return None
        serving.break_off(StreamErrorCode.UPSTREAM_TRUNCATED)
        return str(serving.caller.number)

    def read(self) -> str | None:
        caller = self.pick([c for c in self.callers if c.held])
        if caller is None:
            return None
        caller.read()
        return str(caller.number)

    def cut(self) -> str | None:
        process = self.pick([p for p in self.processes if not p.is_gone])
        if process is None or process.link is None:
            return None
        process.link.cut()
        return str(process.node)

    def stall(self) -> str | None:
        process = self.pick([p for p in self.processes if not p.is_gone])
        if process is None or process.link is None:
            return None
        process.link.stall()
        return str(process.node)

    def heal(self) -> str | None:
        process = self.pick([p for p in self.processes if p.link is not None])
        if process is None or process.link is None:
            return None
        process.link.heal()
        return str(process.node)

    def freeze_edge(self) -> str | None:
        """The Edge's own loop stands still, beyond the heartbeat timeout (EN-113)."""
        self.loop.stand_still(self.rng.choice((0.5, 4.0)))
        return ""

    def pick(self, things: list):
        return self.rng.choice(things) if things else None

    def unfinished(self) -> list[Serving]:
        return [w for p in self.processes for w in p.work if not w.is_over and not p.is_gone]

    async def calm_down(self) -> None:
        """Heal everything; then every request ends and nothing is left over, at the Edge or at a Node."""
        self.trace.append("calm down")
        for process in self.processes:
            if process.link is not None:
                process.link.heal()
                for faults in (process.link.to_left, process.link.to_right):
                    faults.delay_s = min(faults.delay_s, 0.01)
        for _ in range(600):
            await asyncio.sleep(0.3)
            self.check()
            for caller in self.callers:
                if caller.held:
                    caller.read()
            for serving in self.unfinished():
                serving.go_on()
            if all(caller.is_done for caller in self.open_callers) and not len(self.edge.pools.leases):
                break
        else:
            left = [caller.number for caller in self.callers if not caller.is_done]
            self.fail(f"never ended: callers {left}, {len(self.edge.pools.leases)} leases")
        if self.edge.outcomes.live or self.edge.pools.waiting:
            self.fail("something was left over")
        await asyncio.sleep(10.0)  # what was said to a fenced Node may still be on its way there
        for process in self.processes:
            for serving in process.work:
                if serving.caller.has_left and not process.is_gone and not serving.is_over:
                    self.fail(f"{process.node} still works for caller {serving.caller.number}, who left")


ACTIONS = [
    ("call", FleetWorld.call),
    ("serve", FleetWorld.serve),
    ("read", FleetWorld.read),
    ("leave", FleetWorld.leave),
    ("race_leave", FleetWorld.race_leave),
    ("break_off", FleetWorld.break_off),
    ("start", FleetWorld.start),
    ("cut", FleetWorld.cut),
    ("stall", FleetWorld.stall),
    ("heal", FleetWorld.heal),
    ("freeze_edge", FleetWorld.freeze_edge),
]
WEIGHTS = (20, 22, 8, 6, 2, 2, 5, 3, 3, 3, 1)


def run_fleet_seed(seed: int, *, steps: int = STEPS) -> None:
    """Run one seed. Raises SimulationError, or whatever broke."""
    try:
        run_virtual(FleetWorld(seed, steps=steps).run())
    except BaseExceptionGroup as group:
        failure = group.subgroup(SimulationError)
        error: BaseException = failure or group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
