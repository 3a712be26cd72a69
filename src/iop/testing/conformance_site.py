"""A right admin server in one process, for the conformance suite: core, gRPC surface, a fleet in memory, every hook.

    async with ConformanceSite().running() as site:
        bench = Bench(site.target(), site.hooks)

`Recipe` says what the server is made of; `iop.testing.wrong_servers` spoils one part at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from iop.admin.core import AdminCore, CoreTiming
from iop.admin.enums import AdminErrorCode, BusyPolicy, CacheOutcome, ParticipantPhase, PauseMode
from iop.admin.participant import ProgressSink
from iop.admin.permissions import PRESETS, Permission
from iop.admin.profile import AdminLimits
from iop.admin.results import CacheResult, ParticipantError
from iop.admin.steps import (
    CommitWeightsStep,
    FlushStep,
    ParticipantOutcome,
    PauseStep,
    PrepareWeightsStep,
    ResumeStep,
    Step,
    StepCall,
    StepResult,
    WorkCounts,
)
from iop.api.grpc.auth import PrincipalDirectory, PrincipalGrant, secret_sha256
from iop.api.grpc.listeners import admin_listener, admin_receive_bytes_max
from iop.api.grpc.server import ListenerSettings
from iop.conformance.bench import Target
from iop.conformance.hooks import HookName, HookPhase
from iop.core.ids import OperationId
from iop.testing.admin_world import LoopClock
from iop.testing.fake_participants import FakeFleet, FakeRank, FaultKind, content_of
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.site_inference import GROUP, PACE_S, SiteInference
from iop.testing.tcp_relay import TcpRelay
from iop.testing.waiting import free_ports

__all__ = ["CHECKPOINTS", "TOKENS", "ConformanceSite", "Recipe", "SiteFleet"]

TOKENS: Final[Mapping[str, str]] = {role: f"{role}-token" for role in PRESETS}
CHECKPOINTS: Final = ("first", "second")
FAILING: Final = "a/1"
FAILING_STEPS: Final = ("PauseStep", "FlushStep", "VerifyWeightsStep", "ReleaseStep", "ReconfigureStep")
COMMIT_S: Final = 0.05
"""How long the fleet takes to publish a version: long enough to be seen past its point of no return."""


class SiteFleet(FakeFleet):
    """A fleet whose drains wait for requests that run, or can be made to.

    Attributes:
        free: cleared while a drain is to wait, as if requests ran.
        thawed: cleared while a KEEP pause freezes the requests of the group that has any.
        aborts: how many pauses ended its requests.
    """

    def __init__(self) -> None:
        super().__init__({"a": 2, "b": 2})
        self.free = asyncio.Event()
        self.free.set()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.aborts = 0
        self._found = 0

    def begin(self) -> None:
        """A request runs."""
        self.work[GROUP] += 1

    def end(self, *, was_counted: bool) -> None:
        """It does not any more; one that a pause ended was counted out by it."""
        if not was_counted:
            counter = self.work if self.work[GROUP] else self.frozen
            counter[GROUP] = max(0, counter[GROUP] - 1)

    async def drained(self) -> None:
        """Wait until no request runs."""
        while self.work[GROUP]:  # noqa: ASYNC110 - what is waited for is a figure, and the core bounds the wait
            await asyncio.sleep(PACE_S)

    async def execute(self, call: StepCall, report: ProgressSink) -> StepResult:
        """As the driver port says; a drain waits for work that runs."""
        match call.body:
            case PauseStep(pause=spec) if spec.mode is PauseMode.DRAIN:
                await self.free.wait()
                if call.group_id == GROUP:
                    self._found = self.work[GROUP]
                    await self.drained()
            case CommitWeightsStep():
                await asyncio.sleep(COMMIT_S)
            case _:
                pass
        result = await super().execute(call, report)
        if call.group_id == GROUP and all(o.error is None for o in result.participants):
            self._stand(call.body)
        return result

    def _on_work(self, call: StepCall, outcomes: Sequence[ParticipantOutcome]) -> WorkCounts:
        """A drain counts those that it found, not those that it left."""
        counts = super()._on_work(call, outcomes)
        if counts.drained or call.group_id != GROUP or not isinstance(call.body, PauseStep):
            return counts
        found, self._found = self._found, 0
        return replace(counts, drained=found)

    def _stand(self, body: Step) -> None:
        """What a pause, or its end, does to requests."""
        match body:
            case PauseStep(pause=spec) if spec.mode is PauseMode.KEEP:
                self.thawed.clear()
            case PauseStep(pause=spec) if spec.mode is PauseMode.ABORT:
                self.aborts += 1
                self.thawed.set()
            case ResumeStep():
                self.thawed.set()
            case _:
                pass

    def _obey(
        self, operation_id: str, body: Step, rank: FakeRank, fault: FaultKind | None
    ) -> ParticipantOutcome:
        me = rank.participant_id
        match body:
            case FlushStep(kinds=kinds, busy_policy=BusyPolicy.FAIL) if not self.free.is_set():
                error = ParticipantError(
                    code=AdminErrorCode.REFUSED_BUSY, message="requests run", step=ParticipantPhase.APPLYING
                )
                told = tuple(
                    CacheResult(participant_id=me, kind=k, outcome=CacheOutcome.REFUSED, detail="busy")
                    for k in kinds
                )
                return ParticipantOutcome(participant_id=me, error=error, changed=False, caches=told)
            case PrepareWeightsStep(source=source) if content_of(source).startswith("/nonexistent"):
                error = ParticipantError(
                    code=AdminErrorCode.SOURCE_UNAVAILABLE,
                    message="no such directory",
                    step=ParticipantPhase.PREPARING,
                )
                return ParticipantOutcome(participant_id=me, error=error, changed=False)
            case _:
                return super()._obey(operation_id, body, rank, fault)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a server is made of. Every part can be replaced by a spoilt one."""

    core: Callable[..., AdminCore] = AdminCore
    journal: Callable[..., MemoryJournal] = MemoryJournal
    fleet: Callable[[], SiteFleet] = SiteFleet
    presets: Mapping[str, frozenset[Permission]] = field(default_factory=lambda: PRESETS)
    inference: Callable[[SiteFleet], SiteInference] = SiteInference
    limits: AdminLimits = field(default_factory=AdminLimits)


class ConformanceSite:
    """One server with its fleet and its store, behind a relay that can be cut."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        self._recipe = recipe or Recipe()
        self.fleet = self._recipe.fleet()
        self.store = MemoryStore()
        self._ids = itertools.count(1)
        self._address = f"127.0.0.1:{free_ports(1)[0]}"
        self._relay: TcpRelay | None = None
        self._inference = ""
        self._weights: tuple[str, str] = ("", "")
        self._restarting = asyncio.Event()
        self._serving = asyncio.Event()
        self._down = asyncio.Event()
        self.hooks = SiteHooks(self)

    def target(self) -> Target:
        """Where it is, with everything that the suite can be lent."""
        assert self._relay is not None, "used outside of running()"
        return Target(
            address=self._relay.address,
            tokens=TOKENS,
            checkpoints=self._weights,
            inference=self._inference,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[ConformanceSite]:
        """Serve for the block."""
        with tempfile.TemporaryDirectory() as home:
            self._weights = _write_weights(Path(home))
            inference = self._recipe.inference(self.fleet)
            async with inference.serving() as self._inference, asyncio.TaskGroup() as tasks:
                server = tasks.create_task(self._serve(), name="site")
                await self._serving.wait()
                async with TcpRelay(self._address).running() as self._relay:
                    yield self
                server.cancel()

    async def _serve(self) -> None:
        while True:
            self._restarting.clear()
            await self._serve_once()

    async def _serve_once(self) -> None:
        clock = LoopClock()
        core = self._recipe.core(
            journal=self._recipe.journal(self.store, unix_nanos=clock.unix_nanos),
            driver=self.fleet,
            clock=clock,
            new_id=lambda: OperationId(f"op-{next(self._ids)}"),
            owner="site",
            timing=CoreTiming(first_look_timeout_s=0.5, reconcile_wait_s=0.5),
            limits=self._recipe.limits,
        )
        settings = ListenerSettings(
            address=self._address,
            stop_grace_s=0.0,
            receive_bytes_max=admin_receive_bytes_max(self._recipe.limits),
        )
        listener = admin_listener(core, _principals(self._recipe.presets), settings)
        async with asyncio.TaskGroup() as tasks:
            runner = tasks.create_task(core.run(), name="core")
            await core.wait_ready()
            async with listener.serving():
                self._address = listener.address
                self._down.clear()
                self._serving.set()
                try:
                    await self._restarting.wait()
                finally:
                    # As if killed: whatever it is doing stays undone until the next one recovers it.
                    runner.cancel()
                    self._serving.clear()
                    self._down.set()

    async def restart(self) -> None:
        """End the server in mid-flight and start the next one on the same store and address."""
        self._restarting.set()
        await self._down.wait()
        await self._serving.wait()

    def cut(self) -> None:
        """Break all connections."""
        assert self._relay is not None
        self._relay.cut()


class SiteHooks:
    """Every hook, without a process."""

    def __init__(self, site: ConformanceSite) -> None:
        self._site = site

    def has(self, name: HookName) -> bool:
        """All of them."""
        return name in HookName

    async def run(self, name: HookName, phase: HookPhase = HookPhase.ONCE) -> None:
        """As the port says."""
        match name, phase:
            case HookName.RESTART, _:
                await self._site.restart()
            case HookName.CUT, _:
                self._site.cut()
            case HookName.HOLD, HookPhase.BEGIN:
                self._site.fleet.free.clear()
            case HookName.HOLD, _:
                self._site.fleet.free.set()
            case HookName.FAIL_RANK, HookPhase.BEGIN:
                for step in FAILING_STEPS:
                    self._site.fleet.arm(FaultKind.ERROR, FAILING, step, once=False)
            case HookName.FAIL_RANK, _:
                self._site.fleet.faults.clear()


def _write_weights(home: Path) -> tuple[str, str]:
    """Two checkpoints of one small model; the fleet goes by where they are, the suite reads them."""
    paths = []
    for index, name in enumerate(CHECKPOINTS):
        directory = home / name
        directory.mkdir()
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        data = struct.pack("<2f", index, 1.0)
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
        paths.append(str(directory))
    return paths[0], paths[1]


def _principals(presets: Mapping[str, frozenset[Permission]]) -> PrincipalDirectory:
    return PrincipalDirectory(
        [
            PrincipalGrant(name=role, permissions=presets[role], token_sha256=secret_sha256(token))
            for role, token in TOKENS.items()
        ]
    )
