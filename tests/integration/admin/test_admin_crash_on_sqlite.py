"""A process that dies at every write of a real file; the next one settles what it left."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from iop.admin.core import AdminCore, MutationCall
from iop.admin.desired import covering_pauses
from iop.admin.enums import AdmissionPolicy, CachePolicy, PauseMode, WeightFormat
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    MutationOptions,
    MutationRequest,
    PauseRequest,
    PauseSpec,
    UpdateWeightsRequest,
)
from iop.core.ids import OperationId
from iop.store.journal import SqlJournal
from iop.testing.admin_world import ADMIN, Crashed, digest_of
from iop.testing.fake_participants import FakeFleet

DRAIN = PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE)


class WallClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix_nanos(self) -> int:
        return time.time_ns()


class DyingJournal:
    """Passes everything through, and dies before or after the n-th write that changes something."""

    def __init__(self, inner: SqlJournal, *, at_write: int) -> None:
        self._inner = inner
        self._left = at_write
        self.is_dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.is_dead = True
            raise Crashed

    async def accept(self, claim: Any, decide: Callable[[Any], Any]) -> Any:
        self._count()
        accepted = await self._inner.accept(claim, decide)
        self._count()
        return accepted

    async def advance(self, operation_id: OperationId, move: Callable[[Any, Any], Any]) -> Any:
        self._count()
        moved = await self._inner.advance(operation_id, move)
        self._count()
        return moved


def pause() -> PauseRequest:
    return PauseRequest(options=MutationOptions(idempotency_key="k"), target=AllTargets(), pause=DRAIN)


def update() -> UpdateWeightsRequest:
    return UpdateWeightsRequest(
        options=MutationOptions(idempotency_key="k"),
        model="m",
        source=DiskSource(path="/weights/v1", format=WeightFormat.SAFETENSORS),
        weight_version="v1",
        cache_policy=CachePolicy.FLUSH,
        quiesce=DRAIN,
    )


class Site:
    def __init__(self, directory: Path) -> None:
        self.fleet = FakeFleet({"a": 2, "b": 2})
        self.url = f"sqlite:///{directory}/edge.db"
        self.ids = 0

    def _new_id(self) -> OperationId:
        self.ids += 1
        return OperationId(f"op-{self.ids}")

    @contextlib.asynccontextmanager
    async def server(self, *, dies_at: int = 1_000_000) -> AsyncIterator[AdminCore]:
        journal = DyingJournal(SqlJournal(self.url, unix_nanos=time.time_ns), at_write=dies_at)
        core = AdminCore(
            journal=journal,
            driver=self.fleet,
            clock=WallClock(),
            new_id=self._new_id,
            owner="test",
        )
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                runner = tasks.create_task(core.run())
                await core.wait_ready()
                yield core
                runner.cancel()
        except BaseExceptionGroup as group:
            if not journal.is_dead or group.split(Crashed)[1] is not None:
                raise
        except Crashed:
            pass


async def run(core: AdminCore, request: MutationRequest) -> list[Any]:
    call = MutationCall(principal=ADMIN, request=request, request_sha256=digest_of(request))
    return [event async for event in core.submit(call)]


@pytest.mark.slow
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-26", "AD-100")
@pytest.mark.parametrize("make", [pause, update], ids=["pause", "update"])
async def test_death_at_any_write_of_a_file_is_recovered(
    make: Callable[[], MutationRequest], tmp_path: Path
) -> None:
    for dies_at in range(1, 60):
        directory = tmp_path / str(dies_at)
        directory.mkdir()
        site = Site(directory)
        is_through = False
        async with site.server(dies_at=dies_at) as core:
            await run(core, make())
            is_through = True
        async with site.server() as core:
            events = await run(core, make())
            assert [e.sequence for e in events] == list(range(1, len(events) + 1))
            assert [e.is_terminal for e in events] == [False] * (len(events) - 1) + [True]
            snapshot = await core._journal.snapshot()
            assert not snapshot.running
            assert not snapshot.desired.quarantines
            for info in site.fleet.participants():
                rank = site.fleet.ranks[info.participant_id]
                assert rank.paused is bool(covering_pauses(snapshot.desired, info))
                assert rank.label == snapshot.desired.weights["m"].version
        if is_through:
            assert dies_at > 5
            return
    pytest.fail("it writes without end")
