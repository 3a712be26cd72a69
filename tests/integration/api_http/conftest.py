"""A listener on a free port for the tests of the HTTP surfaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop

from iop.testing.http_site import Site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(stack)


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that real processes run on: its transports differ from asyncio's own in closing and pausing."""
    return uvloop.EventLoopPolicy()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The newer way to choose a loop is one hook for the whole run; only these tests need the other loop."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")
            )
