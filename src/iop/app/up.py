"""``iop up``: Edge, one Node and the reference engine as three processes under one parent.

The parts start in the order engine, Edge, Node, each when the one before serves, since port 0 makes addresses known
only then. They stop the other way about: the Edge first, so that running streams can finish; or all at once when one
of them ended by itself. Whatever happens to the parent, no part outlives it: see ``iop.app.process``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from iop.admin.participant import RECONCILIATION
from iop.app.addresses import binding
from iop.app.development import SHUTDOWN_GRACE_S, make_tokens, write_edge, write_engine, write_node
from iop.app.home import RUN_FILE, RunFile, open_home, write_private
from iop.app.part import Part, how_it_ended
from iop.app.process import Process
from iop.app.sources import OsSecrets
from iop.client.ops import OpsClient, OpsTarget
from iop.config import EdgeConfig, EngineConfig, NodeConfig, Sources, load_edge, load_engine
from iop.config.loader import variable_names
from iop.config.values import Address
from iop.core.errors import IopError, Unavailable

__all__ = ["Started", "Up", "UpOptions", "environment_of"]

START_TIMEOUT_S: Final = 60.0
"""A part that does not serve by then never will; a cold disk needs some seconds."""

PART_GRACE_S: Final = 5.0
"""How long a part that serves nobody may take to stop before it is killed."""

STATUS_TIMEOUT_S: Final = 3.0
"""The question is a courtesy; nothing waits longer for it."""

RECONCILED_TIMEOUT_S: Final = 5.0
"""A sound engine takes milliseconds; for one that does not answer nobody waits longer to be told where things are."""

RECONCILED_POLL_S: Final = 0.05
"""How late the end of it may be seen; asked a few times, at start-up only."""

LISTENERS: Final = ("http", "openengine", "admin", "ops", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What the flags said. Addresses by listener; those not given have the documented defaults.

    Attributes:
        edge: addresses of the Edge's listeners.
        engine: addresses of the engine's listeners.
        engine_settings: ``ranks``, ``checkpoint``; None values mean the default.
    """

    edge: Mapping[str, str] = field(default_factory=dict)
    engine: Mapping[str, str] = field(default_factory=dict)
    engine_settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Everything serves: what runs, the model, how long it took, and which models an earlier run left paused."""

    run: RunFile
    model: str
    elapsed_s: float
    home: Path
    paused: tuple[str, ...] = ()


class Up:
    """The role of the parent.

    Args:
        options: what the flags said.
        environment: the process's variables; those of the config reach the parts too.
        on_step: told what is being started, for people.
        on_stop: told that all is being stopped because somebody wished it.
        on_ready: told once, when everything serves.
        on_lost: told the part that ended by itself, and how.
    """

    def __init__(
        self,
        options: UpOptions,
        *,
        environment: Mapping[str, str],
        on_step: Callable[[str], None],
        on_stop: Callable[[], None],
        on_ready: Callable[[Started], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._options = options
        self._environment = environment
        self._on_step = on_step
        self._on_stop = on_stop
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._parts: list[Part] = []

    async def __call__(self, process: Process) -> int:
        """Start all, supervise, stop all.

        Raises:
            Unavailable: another ``iop up`` holds the state directory.
            PartFailed: a part could not start.
        """
        home = open_home(self._environment)
        process.before_kill(self._kill_all)
        with _only_one(home), _removed_at_end(home / RUN_FILE):
            process.before_kill(lambda: (home / RUN_FILE).unlink(missing_ok=True))
            try:
                started = await self._start(home)
                # Said before it is announced: who waits for the ready file finds the whole text.
                self._on_ready(started)
                process.announce(
                    {key: value for key, value in _facts(started.run).items() if key != "tokens"}
                )
                lost = await self._supervise(process)
            except BaseException:
                await self._stop(in_order=False)
                raise
            if lost is None:
                self._on_stop()
            await self._stop(in_order=lost is None)
        if lost is not None:
            self._on_lost(lost)
            return 1
        return 0

    async def _start(self, home: Path) -> Started:
        begun = time.monotonic()
        directory, logs = home / "up", home / "log"
        for path in (directory, logs):
            path.mkdir(mode=0o700, exist_ok=True)
        tokens = make_tokens()
        options = self._options
        _check_addresses(options, self._environment)

        engine_file = write_engine(
            directory, tokens=tokens, listen=options.engine, settings=options.engine_settings
        )
        engine = await self._start_part(
            "engine", ["engine", "--config", str(engine_file), "--no-run-file"], logs
        )
        edge_file = write_edge(directory, tokens=tokens, listen=options.edge, engine=engine)
        # As flags too, since those stand above the environment and the file does not.
        flags = [part for name, text in options.edge.items() for part in (f"--{name}", text)]
        edge = await self._start_part("edge", ["edge", "--config", str(edge_file), *flags], logs)
        node_file = write_node(directory, tokens=tokens, edge=str(edge["nodes"]))
        await self._start_part("node", ["node", "--config", str(node_file)], logs)

        run = RunFile(
            addresses={name: str(edge[name]) for name in LISTENERS if edge.get(name)},
            engine={name: str(engine[name]) for name in ("http", "openengine", "admin") if engine.get(name)},
            pids={part.name: part.pid for part in self._parts},
            tokens=tokens.roles,
        )
        write_private(home / RUN_FILE, run.to_json(with_tokens=True))
        elapsed_s = time.monotonic() - begun
        paused = await _paused_models(run)
        return Started(run=run, model=str(engine["model"]), elapsed_s=elapsed_s, home=home, paused=paused)

    async def _start_part(self, name: str, arguments: list[str], logs: Path) -> Mapping[str, Any]:
        self._on_step(name)
        part = Part(name, arguments, log=logs / f"{name}.log")
        self._parts.append(part)
        await part.start(environment_of(name, self._environment))
        return await part.ready(START_TIMEOUT_S)

    async def _supervise(self, process: Process) -> str | None:
        """Wait for the wish to stop, or for a part to end by itself: then say which and how."""
        lost: list[str] = []
        something = asyncio.Event()

        async def watch(part: Part) -> None:
            code = await part.wait()
            lost.append(f"{part.name} ended by itself ({how_it_ended(code)}); its log is {part.log}")
            something.set()

        async def heed() -> None:
            await process.stopping.wait()
            something.set()

        async with asyncio.TaskGroup() as tasks:
            watchers = [tasks.create_task(watch(part), name=f"watch-{part.name}") for part in self._parts]
            watchers.append(tasks.create_task(heed(), name="watch-signals"))
            await something.wait()
            for watcher in watchers:
                watcher.cancel()
        return None if process.stopping.is_set() or not lost else lost[0]

    async def _stop(self, *, in_order: bool) -> None:
        """Stop every part; when it returns none is left."""
        by_name = {part.name: part for part in self._parts}
        if not in_order:
            for part in self._parts:
                part.ask_to_stop()
        for name in ("edge", "node", "engine"):
            if name in by_name:
                grace_s = PART_GRACE_S + (SHUTDOWN_GRACE_S if name == "edge" and in_order else 0)
                await by_name[name].stop(grace_s)

    def _kill_all(self) -> None:
        for part in self._parts:
            part.kill_nowait()


def environment_of(part: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What one part sees of the parent's variables.

    A key such as ``listen.http`` is in several configs, and one variable cannot mean it in all of them at once: under
    ``iop up`` it means the Edge's. The engine keeps what only an engine has; the Node's config is wholly ours.
    """
    hidden: frozenset[str] = frozenset()
    if part == "engine":
        hidden = variable_names(EdgeConfig) | variable_names(NodeConfig)
    elif part == "node":
        hidden = variable_names(EdgeConfig) | variable_names(NodeConfig) | variable_names(EngineConfig)
    return {name: text for name, text in environment.items() if name not in hidden}


def _check_addresses(options: UpOptions, environment: Mapping[str, str]) -> None:
    """Find a taken address before anything is started; each part still says by itself if it loses a race for one.

    Raises:
        ConfigInvalid: a flag is no address.
        Unavailable: an address cannot be had.
    """
    engine = load_engine(Sources(secrets=OsSecrets({}), flags=_as_flags(options.engine, "engine-"))).config
    listen = {name: text for name, text in environment.items() if name.startswith("IOP_LISTEN__")}
    flags = _as_flags(options.edge, "")
    edge = load_edge(Sources(secrets=OsSecrets({}), environment=listen, flags=flags)).config
    for prefix, listeners in (("engine-", engine.listen), ("", edge.listen)):
        for item in dataclasses.fields(listeners):
            address: Address | None = getattr(listeners, item.name)
            if address is not None and address.path is None and address.port != 0:
                with binding(f"{prefix}{item.name}", address):
                    _try_bind(address)


def _try_bind(address: Address) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind((address.host, address.port))
        trial.listen(1)


async def _paused_models(run: RunFile) -> tuple[str, ...]:
    """Models that wait for a resume: pauses outlive restarts (AD-26), and a newcomer would see a chat that hangs."""
    if "ops" not in run.addresses:
        return ()
    target = OpsTarget(address=run.addresses["ops"], token=run.tokens["viewer"], timeout_s=STATUS_TIMEOUT_S)
    try:
        status = await settled_status(OpsClient(target).status)
    except IopError:
        return ()
    return tuple(str(model["id"]) for model in status["models"] if model["paused"])


async def settled_status(ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """The Edge's status once no provider is held for reconciliation, which hides what else holds it (AD-35).

    Bounded: the last answer then, whatever it says.

    Raises:
        IopError: whatever ``ask``, which is called in a thread, raises.
    """
    asked_until = time.monotonic() + RECONCILED_TIMEOUT_S
    while True:
        status = await asyncio.to_thread(ask)
        gates = [gate for node in status["nodes"] for each in node["providers"] for gate in each["gates"]]
        if RECONCILIATION not in gates or time.monotonic() >= asked_until:
            return status
        await asyncio.sleep(RECONCILED_POLL_S)


def _as_flags(listen: Mapping[str, str], prefix: str) -> dict[str, tuple[str, str]]:
    return {f"listen.{name}": (text, f"--{prefix}{name}") for name, text in listen.items()}


def _facts(run: RunFile) -> dict[str, Any]:
    return {"version": 1, **run.addresses, "engine": dict(run.engine), "pids": dict(run.pids)}


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    """Hold the state directory: two fleets would share journals and run.json."""
    descriptor = os.open(home / "up.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise Unavailable(
                f"iop up runs already with this state directory (pid {pid}). Stop it, or set IOP_HOME to another.",
                reason="ALREADY_RUNNING",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _removed_at_end(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
