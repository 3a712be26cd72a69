"""The order of test files over the workers."""

from __future__ import annotations

from types import SimpleNamespace

import long_first


def test_files_that_start_fleets_begin_first_and_the_rest_keeps_its_order() -> None:
    drawn = [
        "tests/unit/wire/test_a.py::one",
        "tests/integration/fleet/test_b.py::one",
        "tests/e2e/test_c.py::one",
        "tests/property/test_d.py::one",
        "tests/e2e/test_e2e_conformance.py::one",
        "tests/e2e/test_c.py::two",
    ]
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in drawn]
    long_first.pytest_collection_modifyitems(items)  # type: ignore[arg-type]  # all of an item that is used
    assert [item.nodeid for item in items] == [drawn[n] for n in (4, 2, 5, 1, 0, 3)]
