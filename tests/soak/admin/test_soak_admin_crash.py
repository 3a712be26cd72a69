"""``make crash``: kill -9 of the Edge, and of an engine, before and after every journal write of every operation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from crash_site import KINDS, Site
from crash_sweep import Death, sweep

POINTS_MAX = 400

DEATHS = {
    "edge": Death(writer="edge", victim="edge"),
    "engine alone": Death(writer="engine", victim="engine"),
    "engine under the Edge, at the Edge's writes": Death(writer="edge", victim="engine"),
    "engine under the Edge, at its own writes": Death(writer="engine", victim="engine"),
}


@pytest.mark.case("P-25")
@pytest.mark.soak
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-25", "AD-26", "AD-31", "AD-32", "AD-35", "AD-39")
@pytest.mark.parametrize("where", DEATHS)
async def test_death_at_any_write_leaves_each_operation_one_end(where: str, tmp_path: Path) -> None:
    async with Site(tmp_path, is_fleet=where != "engine alone").running() as site:
        for kind in KINDS:
            ends = await sweep(site, kind, DEATHS[where], points=range(1, POINTS_MAX))
            told = ", ".join(f"{count} {name}" for name, count in sorted(ends.items()))
            sys.stderr.write(f"\n{where}: {kind}: {ends.total()} points: {told}")
            assert 4 < ends.total() < POINTS_MAX - 1


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-26", "AD-35")
async def test_an_engine_that_dies_within_an_update_comes_back_all_old_or_all_new(tmp_path: Path) -> None:
    async with Site(tmp_path, is_fleet=False).running() as site:
        ends = await sweep(site, "update", DEATHS["engine alone"], points=range(2, 17, 7))
        assert ends.total() == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.clause("AD-12", "AD-20", "AD-21", "AD-25", "AD-26", "AD-31", "AD-35")
async def test_edge_and_engine_die_within_a_release_and_it_has_one_end(tmp_path: Path) -> None:
    async with Site(tmp_path, is_fleet=True).running() as site:
        for death in DEATHS.values():
            ends = await sweep(site, "release", death, points=(7, 12))
            assert ends.total() == 2
