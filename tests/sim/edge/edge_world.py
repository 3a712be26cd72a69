"""A fleet in one process on virtual time: the real Edge, scripted Nodes and callers, and faults from a seed.

Each step does one random thing, or several in one turn of the loop, lets everything that is ready run, and checks what
must always hold. A failure names the seed and shows the last steps; the same seed does the same again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from iop.core.errors import IopError
from iop.core.ids import NodeId, RunId
from iop.edge.edge import Edge
from iop.edge.handle import DispatchHandle, Phase
from iop.edge.pools import OPEN_GATE, GateMode, LeaseKind, ProviderGate
from iop.edge.snapshot import BreakerSpec, DispatchLimits, EdgeSnapshot, QueueSpec
from iop.net.admin_steps import AdminStepCodec
from iop.testing.edge_fleet import (
    FakeEdgeConnection,
    FakeStream,
    adapter_spec,
    provider_key,
    request_of,
    snapshot_of,
    tunnel_to,
)
from iop.testing.virtual_loop import VirtualLoop, run_virtual
from iop.wire.messages import (
    AdapterStatus,
    BodyFraming,
    CloseReason,
    Header,
    RefreshOutcome,
    StreamError,
    StreamErrorCode,
    Usage,
)

NODES = ("n1", "n2", "n3")
STEPS = 120
TURNS_MAX = 100
"""Loop turns after a step until nothing is left to do; the longest chain of consequences is far shorter."""

TOGETHER = 0.15
"""How often a step follows the one before it in the same turn, so that neither sees the other's consequences."""

CODEC = AdminStepCodec()
"""Without state, and dear to make: one for all seeds."""

WAIT_MAX_S = 60.0
"""No wait may be longer: each kind of waiting is bounded below, and together they are."""

QUEUE = QueueSpec(max_waiters=6, timeout_s=8.0, no_capacity_grace_s=5.0, paused_timeout_s=20.0)
LIMITS = DispatchLimits(
    first_byte_timeout_s=15.0,
    total_timeout_s=30.0,
    fairness_every=3,
    attempts_max=3,
    cancel_confirm_s=6.0,
    busy_backoff_s=0.5,
    recent_requests_max=50,
)
BREAKER = BreakerSpec(failures=3, window_s=10.0, open_s=4.0)


class SimulationError(AssertionError):
    """What must always hold did not; the text says what, when, and how it came about."""


class StillClock:
    """Wall time decides nothing, so it may stand still."""

    def monotonic(self) -> float:
        return 0.0

    def unix_nanos(self) -> int:
        return 1_800_000_000_000_000_000


@dataclass(slots=True, eq=False)
class Caller:
    """One request from outside, as its surface sees it; also its sink."""

    world: World
    number: int
    is_long: bool
    priority: int
    task: asyncio.Task[None] | None = None
    handle: DispatchHandle | None = None
    error: IopError | None = None
    opened: int = 0
    starts: int = 0
    body: bytes = b""
    ends: list[str] = field(default_factory=list)
    has_left: bool = False
    has_waited: bool = False
    has_begun: bool = False
    called_at: float = 0.0
    saw_live: bool = False
    ran_on: list[str] = field(default_factory=list)
    run_ids: set[str] = field(default_factory=set)

    def on_response_start(self, *, status: int, headers: tuple[Header, ...], framing: BodyFraming) -> None:
        self._must_listen("a start")
        self.starts += 1

    def on_body(self, data: bytes) -> None:
        self._must_listen("bytes")
        self.body += data
        assert self.handle is not None
        self.handle.consumed(len(data))

    def on_usage(self, usage: Usage) -> None:
        self._must_listen("usage")

    def on_end(self) -> None:
        self._must_listen("an end")
        self.ends.append("end")

    def on_error(self, error: StreamError) -> None:
        self._must_listen("an error")
        if error.code == "timeout" and self.ran_on and self.ran_on[-1] in self.world.frozen:
            self.world.fail(f"caller {self.number} ran out of time while frozen")
        self.ends.append(error.code)

    def _must_listen(self, what: str) -> None:
        if self.is_done:
            self.world.fail(f"caller {self.number} got {what} after its end")

    @property
    def is_done(self) -> bool:
        return self.error is not None or self.has_left or bool(self.ends)


class World:
    """One run of one seed."""

    def __init__(self, seed: int, *, steps: int = STEPS) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.steps = steps
        self.trace: deque[str] = deque(maxlen=60)
        self.callers: list[Caller] = []
        self.open_callers: list[Caller] = []
        """Those of whom something can still come: not ended, or with a stream that has not ended."""
        self.ended = 0
        """The others, of those whose task had begun."""
        self.connections: list[FakeEdgeConnection] = []
        self.revision = 1
        self.closed_gates: dict[str, ProviderGate] = {}
        self.frozen: set[str] = set()
        self.absent: set[str] = set()
        """Providers whose adapter does not run, as far as their Nodes have told."""
        self.shape = {f"{node}/main": (self.rng.randint(1, 3), self.rng.randint(0, 1)) for node in NODES}
        self.widest = dict(self.shape)
        self.failure = ""
        self._numbers = itertools.count(1)
        self._runs = itertools.count(1)
        self.edge: Edge
        self.loop: VirtualLoop
        self.tasks: asyncio.TaskGroup

    def fail(self, what: str) -> None:
        """Stop: something that must hold does not."""
        lines = "\n  ".join(self.trace)
        self.failure = self.failure or what
        raise SimulationError(
            f"seed {self.seed}, t={self.loop.time():.2f}: {self.failure}\nlast steps:\n  {lines}"
        )

    def snapshot(self) -> EdgeSnapshot:
        """The configuration of the moment."""
        adapters = {
            name: adapter_spec("main", capacity=capacity, long_capacity=long_capacity)
            for name, (capacity, long_capacity) in self.shape.items()
        }
        models = {
            "fast": list(adapters),
            "slow": [name for name in adapters if name.startswith(("n1", "n2"))],
        }
        return snapshot_of(
            adapters,
            {model: members for model, members in models.items() if members},
            revision=self.revision,
            queue=QUEUE,
            limits=LIMITS,
            breaker=BREAKER,
        )

    async def run(self) -> None:
        """All steps, then a calm end in which everything must come to its end."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        loop.set_exception_handler(self.note_exception)
        edge = Edge(
            self.snapshot(),
            clock=StillClock(),
            codec=CODEC,
            new_run_id=lambda: RunId(f"run-{next(self._runs)}"),
        )
        self.watch_fences(edge)
        self.watch_arrivals(edge)
        self.watch_adapters(edge)
        async with edge as self.edge, asyncio.TaskGroup() as self.tasks:
            for node in NODES:
                self.connect(node)
            for _ in range(self.steps):
                self.act(*self.rng.choices(ACTIONS, WEIGHTS)[0])
                if self.rng.random() < TOGETHER:
                    continue
                await self.settle()
                self.check()
                if self.rng.random() < 0.25:
                    # Time passes in small pieces, so that what timers cause is seen before the next thing happens.
                    await asyncio.sleep(self.rng.choice((0.1, 0.5, 2.0, 7.0)))
                    await self.settle()
                    self.check()
            await self.calm_down()

    def watch_fences(self, edge: Edge) -> None:
        """No slot of a generation that ends may be handed to anybody in that step (EN-31)."""
        fence = edge.pools.fence

        def watched(node, generation, *, now):
            lost, settled = fence(node, generation, now=now)
            for settlement in settled:
                lease = getattr(settlement, "lease", None)
                if lease is not None and lease.generation == generation:
                    self.fail(f"a slot of the fenced {node} was handed out")
            return lost, settled

        edge.pools.fence = watched  # type: ignore[method-assign]

    def watch_adapters(self, edge: Edge) -> None:
        """Know which adapters the pools were told to be absent (EN-80)."""
        activate, set_absent = edge.pools.activate, edge.pools.set_absent

        def note(node, absent):
            name = f"{node}/main"
            (self.absent.add if "main" in absent and name in self.shape else self.absent.discard)(name)

        def watched_activate(node, generation, *, now, absent=()):
            note(node, absent)
            return activate(node, generation, now=now, absent=absent)

        def watched_set_absent(node, generation, absent, *, now):
            if edge.pools.roster.generation_of(provider_key(f"{node}/main")) == generation:
                note(node, absent)
            return set_absent(node, generation, absent, now=now)

        edge.pools.activate = watched_activate  # type: ignore[method-assign]
        edge.pools.set_absent = watched_set_absent  # type: ignore[method-assign]

    def watch_arrivals(self, edge: Edge) -> None:
        """Whenever somebody asks for a lease, those who wait and could run have gone first (EN-110)."""
        for name in ("acquire", "acquire_again"):
            setattr(edge.pools, name, self.watched(edge, getattr(edge.pools, name)))

    def watched(self, edge: Edge, acquire: Callable) -> Callable:
        """One way to ask for a lease, looked at before it is answered."""

        def look(demand, *, now):
            if edge.pools.waiting:
                for broken in edge.pools.check(now):
                    self.fail(f"{demand.request_id} asks for a lease while {broken}")
            return acquire(demand, now=now)

        return look

    def note_exception(self, _loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """A callback raised: nothing of the Edge may."""
        self.failure = self.failure or f"{context['message']}: {context.get('exception')!r}"

    def act(self, name: str, action: Callable[[World], str | None]) -> None:
        """Do one thing, and remember it."""
        told = action(self)
        if told is not None:
            self.trace.append(f"t={self.loop.time():.2f} {name} {told}")

    async def settle(self) -> None:
        """Let everything that is ready run, and what follows from it."""
        for _ in range(TURNS_MAX):
            await asyncio.sleep(0)
            if self.loop.is_quiet():
                return
        self.fail("it does not come to rest")

    # ---- invariants ----

    def check(self) -> None:
        """What must hold between any two steps."""
        edge, now = self.edge, self.loop.time()
        if self.failure:
            self.fail(self.failure)  # it was raised in a callback, where nobody listens
        for broken in edge.pools.check(now):
            self.fail(broken)
        owners: dict[str, FakeEdgeConnection] = {}
        streams: list[FakeStream] = []
        for connection in self.connections:
            if connection.misuses:
                self.fail(f"something was sent to {connection.node} while it was not ready")
            if not connection.is_ready:
                continue
            if connection.node in owners:
                self.fail(f"{connection.node} has two dispatch-ready connections")
            owners[connection.node] = connection
            if edge.nodes.connection_of(connection.node) is not connection:
                self.fail(f"{connection.node}: the acknowledged connection is not the owner")
            streams += [stream for stream in connection.open_streams if not stream.is_orphan]
        leases = edge.pools.leases
        if len(leases) != len(streams):
            self.fail(f"{len(leases)} leases are out for {len(streams)} open streams")
        if leases.granted_total - leases.returned_total != len(leases):
            self.fail("leases were returned more often than granted, or lost")
        long_leases = Counter(lease.key for lease in leases if lease.kind is LeaseKind.LONG)
        for key in edge.pools.roster.providers:
            if long_leases[key] != leases.long_in_flight(key):
                self.fail(f"{key}: the long figure is off")
        self.check_callers(streams)
        done = self.ended + sum(caller.is_done and caller.has_begun for caller in self.open_callers)
        if edge.outcomes.begun_total - edge.outcomes.live != done:
            self.fail(f"{edge.outcomes.begun_total - edge.outcomes.live} outcomes for {done} ended requests")

    def check_callers(self, streams: list[FakeStream]) -> None:
        """Everybody who asked is waiting, running or answered, and nobody else is."""
        by_run = {stream.request.run_id: stream for stream in streams}
        still_open = []
        waiting = 0
        for caller in self.open_callers:
            handle = caller.handle
            is_done = caller.is_done
            stream = None
            if handle is not None and handle.attempt is not None:
                stream = by_run.get(handle.run_id)
                if stream is None and handle.phase is Phase.RUNNING:
                    self.fail(f"caller {caller.number} runs on nothing")
            if not is_done:
                still_open.append(caller)
                if handle is None or handle.phase is Phase.WAITING:
                    waiting += 1
                    self.check_waiting(caller)
                continue
            if len(caller.ends) > 1:
                self.fail(f"caller {caller.number} has {len(caller.ends)} ends")
            if caller.error is not None and caller.error.reason == "queue_timeout" and not caller.saw_live:
                self.fail(f"caller {caller.number} heard of contention in a pool without a provider")
            if caller.has_left and stream is not None and not stream.cancelled:
                self.fail(f"caller {caller.number} left and its Node was not told")
            if stream is None:
                self.ended += caller.has_begun
            else:
                still_open.append(caller)
        self.open_callers = still_open
        if waiting != self.edge.pools.waiting:
            self.fail(f"{waiting} callers wait, {self.edge.pools.waiting} are in the queues")
        for stream in streams:
            if stream.credit_returned != stream.sent_bytes:
                self.fail(
                    f"{stream.request.run_id}: {stream.sent_bytes} bytes came, credit for "
                    f"{stream.credit_returned} went back"
                )

    def check_waiting(self, caller: Caller) -> None:
        """Nobody waits for ever, and it is known what for."""
        waited_s = self.loop.time() - caller.called_at
        caller.saw_live = caller.saw_live or self.is_anybody_live(self.model_of(caller))
        if caller.opened == 0 and waited_s > WAIT_MAX_S:
            self.fail(f"caller {caller.number} has waited for {waited_s:.0f} s")

    def opened(self, caller: Caller, name: str) -> None:
        """A call is being built for a caller: judge that it may be, and that it was its turn."""
        gate = self.closed_gates.get(name)
        if gate is not None:
            self.fail(f"caller {caller.number} starts on {name}, which is {gate.mode.value}")
        if name in self.absent:
            self.fail(f"caller {caller.number} starts on {name}, whose adapter does not run")
        if caller.is_done:
            self.fail(f"caller {caller.number} starts although it has ended")
        if caller.starts:
            self.fail(f"caller {caller.number} starts again after its answer began")
        key, leases = provider_key(name), self.edge.pools.leases
        most, most_long = self.widest[name]
        out = leases.of(key)
        long_out = sum(lease.kind is LeaseKind.LONG for lease in out)
        if len(out) > most or long_out > most_long:
            self.fail(f"{name} holds {len(out)} leases, {long_out} long ones")
        for connection in self.connections if caller.run_ids else ():
            for stream in connection.streams:
                is_refused = stream.ended_with in {StreamErrorCode.BUSY, StreamErrorCode.CONNECT_FAILED}
                if stream.request.run_id in caller.run_ids and stream.is_handed_over and not is_refused:
                    self.fail(f"caller {caller.number} is sent again, {stream.request.run_id} may run still")
        if caller.opened:
            for other in self.open_callers:
                is_waiting = other.handle is not None and other.handle.phase is Phase.WAITING
                if is_waiting and other.number < caller.number and self.same_class(other, caller):
                    self.fail(f"caller {caller.number} returns before {other.number}")
        elif caller.has_waited:
            for other in self.open_callers:
                if (
                    other.opened == 0
                    and other.has_waited
                    and not other.is_done
                    and other.number < caller.number
                    and self.same_class(other, caller)
                ):
                    self.fail(f"caller {caller.number} overtook {other.number}")
        caller.opened += 1
        caller.ran_on.append(name)

    def same_class(self, one: Caller, other: Caller) -> bool:
        """Whether what fits one fits the other, and neither goes first."""
        return (one.is_long, one.priority, self.model_of(one)) == (
            other.is_long,
            other.priority,
            self.model_of(other),
        )

    def is_anybody_live(self, model: str) -> bool:
        """Whether some provider of the model is there."""
        spec = self.edge.snapshot.models.get(model)
        members = spec.members if spec is not None else ()
        return any(self.edge.pools.roster.generation_of(member.key) is not None for member in members)

    def model_of(self, caller: Caller) -> str:
        """Which model a caller asks for."""
        return "slow" if caller.number % 3 == 0 else "fast"

    # ---- actions: each returns what it did, or None ----

    def connect(self, node: str | None = None) -> str | None:
        node = node or self.rng.choice(NODES)
        connection = FakeEdgeConnection(self.edge.nodes, node, instance=self.rng.choice(("a", "b", "")))
        connection.hands_over = self.rng.random() < 0.7
        connection.defers_close = self.rng.random() < 0.5
        connection.refresh_answer = self.rng.choice((RefreshOutcome.APPLIED, RefreshOutcome.FAILED))
        connection.refreshed_adapters = self.adapters()
        self.connections.append(connection)
        connection.register()
        if self.rng.random() < 0.8 and connection.close_reason is None:
            connection.ready(adapters=self.adapters())
        return f"{node} ready={connection.is_ready}"

    def adapters(self) -> tuple[AdapterStatus, ...]:
        """How a Node's only adapter started, or after a refresh: mostly well."""
        return (AdapterStatus(name="main", started=self.rng.random() < 0.9),)

    def ready(self) -> str | None:
        connection = self.pick([c for c in self.connections if c.registered])
        if connection is None or connection.close_reason is not None:
            return None
        owner = self.edge.registry.owner_of(connection.node)
        ack = connection.ready(adapters=self.adapters())
        if ack.ready and self.edge.nodes.connection_of(connection.node) is not connection:
            self.fail(f"{connection.node}: ready=true for one that does not own it")
        return f"{connection.node} -> {ack.ready} (owner before: {owner})"

    def lose(self) -> str | None:
        connection = self.pick([c for c in self.connections if c.close_reason is None])
        if connection is None:
            return None
        connection.lose(self.rng.choice((CloseReason.CONNECTION_LOST, CloseReason.HEARTBEAT_TIMEOUT)))
        return str(connection.node)

    def late_close(self) -> str | None:
        connection = self.pick([c for c in self.connections if c.is_closing and c.close_reason is None])
        if connection is None:
            return None
        connection.lose()
        return str(connection.node)

    def race_gate(self) -> str | None:
        """A slot becomes free and its provider's gate closes before the one who got it can begin."""
        stream = self.pick([s for c in self.connections for s in c.open_streams])
        if stream is None:
            return None
        name = f"{stream.connection.node}/main"
        stream.end()
        if name not in self.shape:
            return None
        self.set_gate(name, ProviderGate(mode=GateMode.QUEUE, held_by=("epoch 2",)))
        return name

    def race_lose(self) -> str | None:
        """A slot becomes free and its Node is lost before the one who got it can begin."""
        stream = self.pick([s for c in self.connections for s in c.open_streams])
        if stream is None:
            return None
        stream.end()
        if self.rng.random() < 0.5:
            stream.connection.lose()
            return str(stream.connection.node)
        connection = FakeEdgeConnection(self.edge.nodes, stream.connection.node, instance="")
        connection.defers_close = True
        self.connections.append(connection)
        connection.register()
        if connection.close_reason is None:
            connection.ready()
        return f"{connection.node} to another"

    def race_leave(self) -> str | None:
        """A slot becomes free and one who waits leaves in the same turn, either of them first."""
        stream = self.pick([s for c in self.connections for s in c.open_streams])
        caller = self.pick([c for c in self.open_callers if c.handle is None and not c.is_done][:3])
        if stream is None or caller is None:
            return None
        acts: list[Callable[[], None]] = [stream.end, lambda: self.let_leave(caller)]
        if self.rng.random() < 0.5:
            acts.reverse()
        for act in acts:
            act()
        return f"{caller.number} and {stream.request.run_id}"

    def race_refresh(self) -> str | None:
        """A slot becomes free in the turn in which a refresh finds that its adapter is gone."""
        stream = self.pick([s for c in self.connections for s in c.open_streams])
        if stream is None or f"{stream.connection.node}/main" not in self.shape:
            return None
        stream.connection.refreshed_adapters = (AdapterStatus(name="main", started=False),)
        acts: list[Callable[[], object]] = [
            stream.end,
            lambda: self.resize(f"{stream.connection.node}/main"),
        ]
        if self.rng.random() < 0.5:
            acts.reverse()
        for act in acts:
            act()
        return str(stream.connection.node)

    def race_time(self) -> str | None:
        """The next timer is due in the very turn in which something else happens, either of them first."""
        at = self.loop.next_timer()
        if at is None or at - self.loop.time() > 20.0:
            return None
        name, action = self.rng.choice(RACING)
        if self.rng.random() < 0.5:
            self.loop.stand_still(at - self.loop.time())
            self.act(name, action)
            return f"before what was due at {at:.2f}"
        self.loop.call_at(at + 0.0005, self.act, name, action)
        self.loop.stand_still(at + 0.001 - self.loop.time())
        return f"after what was due at {at:.2f}"

    def call(self) -> str | None:
        caller = Caller(
            self,
            next(self._numbers),
            is_long=self.rng.random() < 0.25,
            priority=self.rng.choice((0, 0, 0, 1)),
        )
        caller.called_at = self.loop.time()
        self.callers.append(caller)
        self.open_callers.append(caller)
        caller.task = self.tasks.create_task(self._call(caller))
        return str(caller.number)

    async def _call(self, caller: Caller) -> None:
        caller.has_begun = True
        request = request_of(
            self.model_of(caller),
            tokens=5000 if caller.is_long else 1,
            priority=caller.priority,
            session=f"s{caller.number % 4}",
            request_id=f"req-{caller.number}",
        )
        send = tunnel_to(caller)

        def prepare(target):
            if caller.handle is not None:
                caller.run_ids.add(caller.handle.run_id)
            self.opened(caller, str(target.key))
            return send(target)

        def noticed() -> None:
            caller.has_waited = caller.opened == 0

        soon = self.loop.call_soon(noticed)
        try:
            caller.handle = await self.edge.dispatcher.dispatch(request, prepare)
        except IopError as error:
            caller.error = error
        finally:
            soon.cancel()

    def leave(self) -> str | None:
        caller = self.pick([c for c in self.open_callers if not c.is_done])
        if caller is None:
            return None
        self.let_leave(caller)
        return str(caller.number)

    def let_leave(self, caller: Caller) -> None:
        """A caller hangs up, twice where it can."""
        assert caller.task is not None
        if caller.handle is not None:
            caller.has_left = True
            caller.handle.cancel()
            caller.handle.cancel()
        elif not caller.task.done():
            caller.has_left = True
            caller.task.cancel()

    def progress(self) -> str | None:
        stream = self.pick([s for c in self.connections for s in c.open_streams])
        if stream is None:
            return None
        return self.advance(stream)

    def advance(self, stream: FakeStream) -> str:
        """A Node makes something of a stream."""
        if stream.cancelled and self.rng.random() < 0.7:
            stream.fail(StreamErrorCode.CANCELLED)
            return f"{stream.request.run_id} cancelled"
        what = self.rng.choices(("start", "send", "end", "broken", "busy", "error"), (3, 3, 4, 1, 1, 1))[0]
        match what:
            case "start":
                if not getattr(stream, "started", False):
                    stream.started = True
                    stream.start(self.rng.choice((200, 200, 200, 404, 500)))
            case "send":
                if getattr(stream, "started", False):
                    stream.send(b"x")
            case "end":
                stream.end()
            case "broken":
                stream.fail(StreamErrorCode.UPSTREAM_TRUNCATED)
            case "busy":
                if not getattr(stream, "started", False):
                    stream.fail(StreamErrorCode.BUSY, before_start=True, retryable=True)
            case "error":
                stream.fail(StreamErrorCode.CONNECT_FAILED, before_start=True, retryable=True)
        return f"{stream.request.run_id} {what}"

    def end_many(self) -> str | None:
        """Several ends in one turn, with a caller leaving in the middle."""
        streams = [s for c in self.connections for s in c.open_streams]
        for stream in streams[: self.rng.randint(1, 3)]:
            stream.end()
        if self.rng.random() < 0.5:
            self.leave()
        return str(len(streams))

    def gate(self) -> str | None:
        name = self.rng.choice(list(self.shape)) if self.shape else None
        if name is None:
            return None
        mode = self.rng.choice(
            (GateMode.OPEN, GateMode.OPEN, GateMode.QUEUE, GateMode.REJECT, GateMode.RECONCILING)
        )
        gate = OPEN_GATE if mode is GateMode.OPEN else ProviderGate(mode=mode, held_by=("epoch 1",))
        self.set_gate(name, gate)
        return f"{name} {mode.value}"

    def set_gate(self, name: str, gate: ProviderGate) -> None:
        """Close or open one provider."""
        if gate.is_open:
            self.closed_gates.pop(name, None)
        else:
            self.closed_gates[name] = gate
        self.edge.dispatcher.set_gates([(provider_key(name), gate)])

    def freeze(self) -> str | None:
        name = self.rng.choice(NODES) + "/main"
        if name in self.frozen:
            self.frozen.discard(name)
            self.edge.dispatcher.thaw((provider_key(name),))
            return f"thaw {name}"
        self.frozen.add(name)
        self.edge.dispatcher.freeze((provider_key(name),))
        return name

    def abort(self) -> str | None:
        name = self.rng.choice(NODES) + "/main"
        return f"{name} {self.edge.dispatcher.abort((provider_key(name),))}"

    def reconfigure(self) -> str | None:
        name = self.rng.choice(NODES) + "/main"
        if name in self.shape and self.rng.random() < 0.3 and len(self.shape) > 1:
            del self.shape[name]
            self.closed_gates.pop(name, None)
            self.absent.discard(name)
            self.apply()
        else:
            self.resize(name)
        return f"{name} {self.shape.get(name)}"

    def resize(self, name: str) -> None:
        """Another capacity for a provider, which may be new."""
        self.shape[name] = (self.rng.randint(1, 4), self.rng.randint(0, 1))
        before = self.widest.get(name, (0, 0))
        self.widest[name] = (max(before[0], self.shape[name][0]), max(before[1], self.shape[name][1]))
        self.apply()

    def apply(self) -> None:
        """Make the shape of the moment the configuration."""
        self.revision += 1
        self.edge.apply_snapshot(self.snapshot())

    def pick(self, things: list):
        return self.rng.choice(things) if things else None

    # ---- the end ----

    async def calm_down(self) -> None:
        """Heal everything: then every request must end, every lease return, every queue drain."""
        self.trace.append("calm down")
        for name in NODES:
            self.frozen.discard(f"{name}/main")
            self.edge.dispatcher.thaw((provider_key(f"{name}/main"),))
        for name in list(self.closed_gates):
            del self.closed_gates[name]
            self.edge.dispatcher.set_gates([(provider_key(name), OPEN_GATE)])
        for _ in range(400):
            await self.settle()
            self.check()
            streams = [s for c in self.connections for s in c.open_streams]
            if not streams and all(caller.is_done for caller in self.open_callers):
                break
            for stream in streams:
                if stream.cancelled:
                    stream.fail(StreamErrorCode.CANCELLED)
                else:
                    stream.end()
            await asyncio.sleep(0.3)
        else:
            left = [caller.number for caller in self.callers if not caller.is_done]
            self.fail(f"these never ended: {left}, waiting={self.edge.pools.waiting}")
        if len(self.edge.pools.leases) or self.edge.pools.waiting or self.edge.outcomes.live:
            self.fail("something was left over")
        await self.serve_again()

    async def serve_again(self) -> None:
        """After all that, a fleet that is whole serves: each provider takes as many as it has slots."""
        await asyncio.sleep(200.0)  # refusals of contended ids, breakers and holds are over by then
        for node in NODES:
            standing = self.edge.nodes.connection_of(NodeId(node))
            if standing is not None and f"{node}/main" in self.absent:
                standing.lose()  # it starts anew, its adapter with it
                standing = None
            if standing is not None:
                continue
            connection = FakeEdgeConnection(self.edge.nodes, node, instance="last")
            self.connections.append(connection)
            connection.connect()
        await self.settle()
        slots = sum(capacity for capacity, _ in self.shape.values())
        for _ in range(4):  # enough at once that whose breaker is half open gets its trial
            for _ in range(slots):
                await self.ask()
            while any(connection.open_streams for connection in self.connections):
                self.answer_all()
                await self.settle()
                self.check()
        for _ in range(slots):
            caller = await self.ask()
            if caller.handle is None:
                self.fail(f"a whole fleet does not serve: {caller.error!r}")
        self.answer_all()
        await self.settle()
        self.check()

    async def ask(self) -> Caller:
        """One more plain caller, for the model that all providers serve."""
        caller = Caller(self, 3 * next(self._numbers) + 1, is_long=False, priority=0)
        caller.called_at = self.loop.time()
        self.callers.append(caller)
        self.open_callers.append(caller)
        caller.task = self.tasks.create_task(self._call(caller))
        await self.settle()
        self.check()
        return caller

    def answer_all(self) -> None:
        """Every open stream ends well."""
        for connection in self.connections:
            for stream in list(connection.open_streams):
                stream.start()
                stream.end()


ACTIONS: list[tuple[str, Callable[[World], str | None]]] = [
    ("call", World.call),
    ("progress", World.progress),
    ("end_many", World.end_many),
    ("leave", World.leave),
    ("connect", World.connect),
    ("ready", World.ready),
    ("lose", World.lose),
    ("late_close", World.late_close),
    ("gate", World.gate),
    ("race_gate", World.race_gate),
    ("race_lose", World.race_lose),
    ("race_leave", World.race_leave),
    ("race_refresh", World.race_refresh),
    ("race_time", World.race_time),
    ("freeze", World.freeze),
    ("abort", World.abort),
    ("reconfigure", World.reconfigure),
]
WEIGHTS = (30, 26, 6, 8, 5, 3, 4, 2, 5, 2, 2, 2, 1, 3, 2, 2, 2)
RACING = [(name, action) for name, action in ACTIONS if not name.startswith("race_")]


def run_seed(seed: int, *, steps: int = STEPS) -> None:
    """Run one seed. Raises SimulationError, or whatever broke."""
    try:
        run_virtual(World(seed, steps=steps).run())
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(group: BaseExceptionGroup) -> BaseException:
    failure = group.subgroup(SimulationError)
    error: BaseException = failure or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
