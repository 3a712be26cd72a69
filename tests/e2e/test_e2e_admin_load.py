"""Weights change under load on real processes: the short form of ``make admin-load``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def admin_load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("admin_load", ROOT / "bench" / "admin_load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.clause("AD-32", "AD-33", "AD-34", "AD-38")
@pytest.mark.timeout(180)
async def test_every_answer_under_five_updates_is_wholly_of_the_version_that_it_names(tmp_path: Path) -> None:
    load = await admin_load().run(
        tmp_path, updates=5, callers=10, abort_every=4, keep_every=5, answers_between=10
    )
    assert load.found.faults == []
    assert len(load.updates_s) == 5
    assert len(load.found.checked) == 2, "both versions answered"
    assert sum(load.found.checked.values()) > 20
    assert load.found.streamed > 5
