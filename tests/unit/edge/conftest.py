"""An Edge on the running loop, with scripted connections."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from iop.core.ids import RunId
from iop.edge.edge import Edge
from iop.edge.snapshot import EdgeSnapshot
from iop.net.admin_steps import AdminStepCodec


class FixedClock:
    """Wall time that stands still."""

    def monotonic(self) -> float:
        return 0.0

    def unix_nanos(self) -> int:
        return 1_800_000_000_000_000_000


@pytest.fixture
async def make_edge() -> AsyncIterator[Callable[[EdgeSnapshot], Edge]]:
    """Makes entered Edges; they are left at the end of the test."""
    numbers = itertools.count(1)
    async with AsyncExitStack() as stack:
        pending: list[Edge] = []

        async def make(snapshot: EdgeSnapshot) -> Edge:
            edge = Edge(
                snapshot,
                clock=FixedClock(),
                codec=AdminStepCodec(),
                new_run_id=lambda: RunId(f"run-{next(numbers)}"),
            )
            pending.append(edge)
            return await stack.enter_async_context(edge)

        yield make
