"""``make crash``: kill -9 of the Edge, and of the engine, before and after every journal write of every operation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from crash_sweep import KINDS, Site, sweep

POINTS_MAX = 200


@pytest.mark.soak
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-26", "AD-35", "AD-39")
@pytest.mark.parametrize("part", ["edge", "engine"])
async def test_death_at_any_write_leaves_each_operation_one_end(part: str, tmp_path: Path) -> None:
    async with Site(tmp_path, part=part).running() as site:
        for kind in KINDS:
            had = await sweep(site, kind, points=range(1, POINTS_MAX))
            sys.stderr.write(f"\n{part}: {kind}: {had} points")
            assert 4 < had < POINTS_MAX - 1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-26", "AD-35")
async def test_an_engine_that_dies_within_an_update_comes_back_all_old_or_all_new(tmp_path: Path) -> None:
    async with Site(tmp_path, part="engine").running() as site:
        assert await sweep(site, "update", points=range(2, 17, 7)) == 3
