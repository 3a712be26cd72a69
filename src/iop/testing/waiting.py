"""How tests wait: for a condition, patiently, and by a clock that a busy machine cannot run down.

A test that asks once, right after what must lead to something, fails where the machine is slow. It waits instead. How
long it would wait costs nothing while the code is right, so it is long.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

__all__ = ["PATIENCE_S", "SOON_S", "eventually", "free_ports"]

PATIENCE_S: Final = 30.0
"""Longest wait of a test for something that must happen, and normally takes milliseconds."""

SOON_S: Final = 1.0
"""What the contract calls soon (SF-07)."""

PAUSE_S: Final = 0.002

FIRST_PORT: Final = 10_000
EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_FROM: Final = 32_768
PORTS_MIN: Final = 2_000
TRIES_MAX: Final = 1_000


async def eventually(is_so: Callable[[], object], *, within_s: float = PATIENCE_S, what: str = "it") -> None:
    """Wait until ``is_so`` holds, looking again every two milliseconds.

    What counts is the time that this loop slept, not what passed on the wall: where other processes hold the processor,
    each pause takes longer than asked, for the code under test on the same loop as well. So a promise such as
    "within a second" can be judged on a busy machine.

    Raises:
        AssertionError: it never was so.
    """
    for _ in range(max(1, round(within_s / PAUSE_S))):
        if is_so():
            return
        await asyncio.sleep(PAUSE_S)
    assert is_so(), f"{what} did not happen within {within_s:g} s"


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nobody has, for listeners that must come back to the same place.

    They lie below the range from which the system serves those who ask for any port and those who dial: a port from
    that range may be gone before the listener binds it, or while the listener is down. A Node that dials such a port
    can even meet itself there. None is given twice by one process, and each worker of a test run has its own share.
    """
    low, high = _share(FIRST_PORT, _ephemeral_from())
    found: list[int] = []
    with ExitStack() as stack:
        for _ in range(TRIES_MAX):
            if len(found) == count:
                return found
            # Not from `random`, which a plugin seeds alike in every worker.
            port = low + secrets.randbelow(high - low) if high > low else 0
            with suppress(OSError):
                listener = stack.enter_context(socket.create_server(("127.0.0.1", port)))
                port = int(listener.getsockname()[1])
                if port not in _given:
                    found.append(port)
                    _given.add(port)
    raise AssertionError(f"no {count} free ports between {low} and {high}")


_given: set[int] = set()


def _share(low: int, high: int) -> tuple[int, int]:
    """This worker's part of the range; an empty one when the range is too small to be shared."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    part = (high - low) // workers
    if part < PORTS_MIN or not worker.isdecimal():
        return low, low
    begin = low + part * (int(worker) % workers)
    return begin, begin + part


def _ephemeral_from() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return EPHEMERAL_FROM
