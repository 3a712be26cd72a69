"""Fails a test that leaves a task or a thread behind. Sockets and files show as ResourceWarnings, which are errors.

The check runs when every other fixture of the test is gone and its loop is still open, and gives what is ending anyway
a moment to end.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

GRACE_S = 10.0
EXECUTOR_THREADS = ("asyncio_", "uvloop_", "uvloop_", "ThreadPoolExecutor", "pytest_timeout")


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    # Asked for here so that the loop outlives this check.
    is_async = inspect.iscoroutinefunction(getattr(request.node, "obj", None))
    runner: Any = request.getfixturevalue("_function_scoped_runner") if is_async else None
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + GRACE_S
    while True:
        tasks = _tasks(runner) if runner is not None else []
        threads = [
            thread.name
            for thread in set(threading.enumerate()) - before
            if not thread.daemon and not thread.name.startswith(EXECUTOR_THREADS)
        ]
        if not tasks and not threads:
            return
        if time.monotonic() > deadline:
            break
        if runner is None:
            time.sleep(0.01)
        else:
            runner.run(asyncio.sleep(0.01))
    pytest.fail(f"left behind: tasks {tasks}, threads {threads}")


def _tasks(runner: Any) -> list[str]:
    return [
        f"{task.get_name()}: {task.get_coro()}"
        for task in asyncio.all_tasks(runner.get_loop())
        if not task.done()
    ]
