"""The core over a real file: what one process journals, the next one settles."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from iop.admin.core import AdminCore, MutationCall
from iop.admin.enums import AdminOperationState, AdmissionPolicy, PauseMode
from iop.admin.requests import (
    AllTargets,
    MutationOptions,
    MutationRequest,
    PauseRequest,
    PauseSpec,
    ResumeRequest,
)
from iop.admin.results import AdminOperationEvent, OperationCompleted, PauseResult
from iop.core.ids import OperationId
from iop.store.journal import SqlJournal
from iop.testing.admin_world import ADMIN, digest_of
from iop.testing.fake_participants import FakeFleet, FaultKind


class WallClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix_nanos(self) -> int:
        return time.time_ns()


class Site:
    """A fleet and a file that outlive servers."""

    def __init__(self, directory: Path) -> None:
        self.fleet = FakeFleet({"a": 2, "b": 2})
        self.url = f"sqlite:///{directory}/edge.db"
        self.ids = 0

    def _new_id(self) -> OperationId:
        self.ids += 1
        return OperationId(f"op-{self.ids}")

    @contextlib.asynccontextmanager
    async def server(self) -> AsyncIterator[AdminCore]:
        core = AdminCore(
            journal=SqlJournal(self.url, unix_nanos=time.time_ns),
            driver=self.fleet,
            clock=WallClock(),
            new_id=self._new_id,
            owner="test",
        )
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            runner = tasks.create_task(core.run())
            await core.wait_ready()
            yield core
            runner.cancel()


async def run(core: AdminCore, request: MutationRequest) -> list[AdminOperationEvent]:
    call = MutationCall(principal=ADMIN, request=request, request_sha256=digest_of(request))
    return [event async for event in core.submit(call)]


def pause(key: str) -> PauseRequest:
    return PauseRequest(
        options=MutationOptions(idempotency_key=key),
        target=AllTargets(),
        pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE),
    )


@pytest.mark.clause("AD-12", "AD-20", "AD-26", "AD-100")
async def test_a_pause_outlives_its_server_and_its_key_replays(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with site.server() as core:
        events = await run(core, pause("p"))
        ended = events[-1].event
        assert isinstance(ended, OperationCompleted)
        assert isinstance(ended.result, PauseResult)
    async with site.server() as core:
        assert not any(site.fleet.is_open(p) for p in site.fleet.ranks)
        assert await run(core, pause("p")) == events
        resume = ResumeRequest(
            options=MutationOptions(idempotency_key="r"), pause_epoch=ended.result.pause_epoch
        )
        assert isinstance((await run(core, resume))[-1].event, OperationCompleted)
        assert not any(r.paused for r in site.fleet.ranks.values())


@pytest.mark.clause("AD-22", "AD-26")
async def test_an_operation_cut_off_in_the_middle_is_settled_by_the_next_server(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.fleet.arm(FaultKind.HANG, "b/0", "PauseStep")
    async with site.server() as core:
        request = pause("p")
        call = MutationCall(principal=ADMIN, request=request, request_sha256=digest_of(request))
        stream = core.submit(call)
        first = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator underneath
        while not any(r.paused for r in site.fleet.members("a")):  # noqa: ASYNC110 - level-triggered, bounded
            await asyncio.sleep(0.01)
        assert (await core.get(ADMIN, first.operation_id)).state is AdminOperationState.RUNNING
    async with site.server() as core:
        events = [e async for e in core.watch(ADMIN, first.operation_id)]
        assert [e.sequence for e in events] == list(range(1, len(events) + 1))
        assert isinstance(events[-1].event, OperationCompleted)
        assert all(r.paused for r in site.fleet.ranks.values())


@pytest.mark.slow
@pytest.mark.clause("AD-104")
async def test_1000_participants_journal_in_proportion(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.fleet = FakeFleet({f"g{n}": 1 for n in range(1000)})
    async with site.server() as core:
        events = await run(core, pause("p"))
        assert isinstance(events[-1].event, OperationCompleted)
    size = (tmp_path / "edge.db").stat().st_size
    # About 3 events, a status and a step per participant: see docs/explanation/operations.md.
    assert size < 1000 * 4096
