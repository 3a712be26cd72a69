"""The owner of tasks that callbacks start."""

from __future__ import annotations

import asyncio
import logging

from iop.edge.tasks import TaskOwner


async def test_a_failing_task_is_logged_and_disturbs_nobody(caplog):
    done = []

    async def fail() -> None:
        raise ValueError("a bug")

    async def work() -> None:
        await asyncio.sleep(0)
        done.append("work")

    with caplog.at_level(logging.ERROR):
        async with TaskOwner() as tasks:
            tasks.start(fail, "failing")
            tasks.start(work, "working")
            for _ in range(5):
                await asyncio.sleep(0)
            assert tasks.failed_total == 1
    assert done == ["work"]
    assert [record.message for record in caplog.records] == ["task.failed"]


async def test_leaving_cancels_what_runs_and_what_has_not_begun_and_waits_for_both():
    ends = []

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cleaned up")

    async with TaskOwner() as tasks:
        tasks.start(wait_for_ever, "running")
        await asyncio.sleep(0)
        tasks.start(wait_for_ever, "not begun")
    assert ends == ["cleaned up"]


async def test_after_the_end_nothing_is_started():
    started = []

    async def work() -> None:
        started.append(1)

    owner = TaskOwner()
    owner.start(work, "too early")
    async with owner:
        pass
    owner.start(work, "too late")
    await asyncio.sleep(0)
    assert started == []
