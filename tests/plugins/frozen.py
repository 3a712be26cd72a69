"""What the collection of tests made is not looked at again whenever the garbage collector runs.

It is most of the heap of a worker, some million objects that live to its end. Tests that collect by themselves look at
what came since, which is all that they could have left.
"""

from __future__ import annotations

import gc

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Set all that is there aside."""
    gc.collect()
    gc.freeze()
