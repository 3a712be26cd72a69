"""A whole administration server in memory, on virtual time: core, journal, fleet, and the ways to break them.

    def test_x() -> None:
        async def scenario(world: AdminWorld) -> None:
            async with world.server():
                ...
        run_world(scenario, shape={"g": 2})

A `crash` ends the server as kill -9 would: nothing is cleaned up, and the next `server()` starts from what the journal
and the fleet hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from iop.admin.core import AdminCore, CoreTiming, MutationCall
from iop.admin.permissions import PRESETS, Principal
from iop.admin.profile import AdminLimits
from iop.admin.requests import MutationRequest
from iop.admin.results import AdminOperationEvent
from iop.core.ids import OperationId
from iop.testing.fake_participants import FakeFleet
from iop.testing.memory_journal import MemoryJournal, MemoryStore
from iop.testing.virtual_loop import run_virtual

__all__ = ["ADMIN", "OPERATOR", "VIEWER", "AdminWorld", "Crashed", "digest_of", "run_world"]

T = TypeVar("T")

ADMIN = Principal(name="root", permissions=PRESETS["admin"])
OPERATOR = Principal(name="ops", permissions=PRESETS["operator"])
VIEWER = Principal(name="guest", permissions=PRESETS["viewer"])


VIRTUAL_S_MAX = 1_000_000.0
"""A scenario that takes longer, in virtual seconds, waits for something that does not come."""


class Crashed(BaseException):
    """The process died here."""


class LoopClock:
    """`iop.core.clock.Clock` over the running loop; wall time starts at a fixed day."""

    def monotonic(self) -> float:
        """Loop seconds."""
        return asyncio.get_running_loop().time()

    def unix_nanos(self) -> int:
        """A fixed day plus loop time."""
        return 1_700_000_000_000_000_000 + int(self.monotonic() * 1e9)


def digest_of(request: MutationRequest) -> bytes:
    """A stand-in for the surface's digest: equal for equal payloads without key and validate_only (AD-12)."""
    options = dataclasses.replace(request.options, idempotency_key="", validate_only=False)
    text = repr((type(request).__name__, dataclasses.replace(request, options=options)))
    return hashlib.sha256(text.encode()).digest()


class AdminWorld:
    """Fleet and store that outlive servers, and the server of the moment."""

    def __init__(
        self,
        shape: Mapping[str, int],
        *,
        timing: CoreTiming | None = None,
        limits: AdminLimits | None = None,
        models: tuple[str, ...] = ("m",),
    ) -> None:
        self.fleet = FakeFleet(shape, models=models)
        self.store = MemoryStore()
        self.clock = LoopClock()
        self.timing = timing or CoreTiming()
        self.limits = limits or AdminLimits()
        self.writes = 0
        self.crash_at: int | None = None
        self.crashed = asyncio.Event()
        self.ids = 0
        self.core: AdminCore
        self.journal: MemoryJournal

    def _new_id(self) -> OperationId:
        self.ids += 1
        return OperationId(f"op-{self.ids}")

    def _on_write(self, _point: str) -> None:
        self.writes += 1
        if self.crash_at is not None and self.writes >= self.crash_at:
            self.crashed.set()
            raise Crashed

    @contextlib.asynccontextmanager
    async def server(self) -> AsyncIterator[AdminCore]:
        """Run a server for the length of the block, or until it crashes.

        A crash cancels whatever the block waits for and ends the block silently; `crashed` tells.

        Raises:
            Crashed: while it took up what an earlier server had left; the block did not begin.
        """
        self.crashed.clear()
        has_begun = False
        self.journal = MemoryJournal(self.store, unix_nanos=self.clock.unix_nanos, on_write=self._on_write)
        self.core = AdminCore(
            journal=self.journal,
            driver=self.fleet,
            clock=self.clock,
            new_id=self._new_id,
            owner="test",
            timing=self.timing,
            limits=self.limits,
        )
        try:
            async with asyncio.timeout(None) as block, asyncio.TaskGroup() as tasks:
                runner = tasks.create_task(self._serve(block), name="server")
                await self.core.wait_ready()
                has_begun = True
                try:
                    yield self.core
                finally:
                    runner.cancel()
        except (TimeoutError, Crashed):
            if not self.crashed.is_set():
                raise
        except BaseExceptionGroup as group:
            if group.split((Crashed, TimeoutError))[1] is not None:
                raise
        if not has_begun:
            raise Crashed

    async def _serve(self, block: asyncio.Timeout) -> None:
        try:
            await self.core.run()
        except BaseExceptionGroup as group:
            if group.subgroup(Crashed) is None:
                raise
        except Crashed:
            pass
        if self.crashed.is_set():
            block.reschedule(asyncio.get_running_loop().time())

    async def run(
        self, request: MutationRequest, principal: Principal = ADMIN
    ) -> Sequence[AdminOperationEvent]:
        """Submit and collect all events."""
        call = MutationCall(principal=principal, request=request, request_sha256=digest_of(request))
        return [event async for event in self.core.submit(call)]

    async def submit(self, request: MutationRequest, principal: Principal = ADMIN) -> OperationId:
        """Submit, wait for acceptance and detach."""
        call = MutationCall(principal=principal, request=request, request_sha256=digest_of(request))
        events = self.core.submit(call)
        first = await anext(events)
        await events.aclose()  # type: ignore[attr-defined]  # an async generator underneath
        return OperationId(first.operation_id)

    async def finish(self, operation_id: OperationId) -> Sequence[AdminOperationEvent]:
        """All events of an operation, to its terminal one."""
        return [event async for event in self.core.watch(ADMIN, operation_id)]

    async def settle(self, seconds: float = 1.0) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)


def run_world(
    scenario: Callable[[AdminWorld], Awaitable[T]],
    *,
    shape: Mapping[str, int] | None = None,
    timing: CoreTiming | None = None,
    limits: AdminLimits | None = None,
) -> T:
    """Run a scenario in a fresh world on virtual time."""

    async def main() -> T:
        world = AdminWorld(shape or {"a": 2, "b": 2}, timing=timing, limits=limits)
        async with asyncio.timeout(VIRTUAL_S_MAX):
            return await scenario(world)

    return run_virtual(main())
