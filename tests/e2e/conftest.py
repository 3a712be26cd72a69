"""One fleet per test file: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_fleet import Fleet, running_fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A running fleet, shared by the tests of one file; each leaves it active and idle."""
    with running_fleet(tmp_path_factory.mktemp("home")) as running:
        yield running
