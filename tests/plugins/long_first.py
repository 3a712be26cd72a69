"""Long test files go first: a long one that begins last is waited for by one worker alone.

The files of the other directories are in the order that they were drawn in. With ``--dist loadfile`` this needs
``--no-loadscope-reorder``, since by itself xdist begins with the files of many tests, which are the quick ones.
"""

from __future__ import annotations

import pytest

LONG = (
    "tests/e2e/test_e2e_conformance.py",
    "tests/integration/conformance/",
    "tests/e2e/",
    "tests/integration/fleet/",
    "tests/integration/engine",
    "tests/integration/api_http/test_http_description.py",
)
"""Files of half a minute and more, and those whose single tests start fleets of processes, the longest first."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by how long a file takes; what is alike keeps its order."""
    items.sort(key=rank)


def rank(item: pytest.Item) -> int:
    """0 for the longest."""
    return next((n for n, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG))
