"""A listener on a free port for the tests of the HTTP surfaces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from iop.testing.http_site import Site


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(stack)
