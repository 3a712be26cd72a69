"""The suite passes the right server and finds what is wrong with each wrong one (AD-102)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence

import pytest

from iop.conformance.bench import Bench
from iop.conformance.checks import all_checks
from iop.conformance.model import Check, CheckResult, Outcome
from iop.conformance.runner import run_suite
from iop.testing.conformance_site import ConformanceSite, Recipe
from iop.testing.site_inference import SiteInference
from iop.testing.wrong_servers import DEFECTS, Defect
from iop.testing.wrong_servers.serving import ONE_AT_ONCE, CannotPutBack, WithoutKinds

CHECKS = {one.check_id: one for one in all_checks()}
ONLY_OF_OTHER_SERVERS = {
    "AD-15-kinds-refused": Recipe(fleet=WithoutKinds),
    "AD-18-limit": Recipe(limits=ONE_AT_ONCE),
    "AD-43-irreversible": Recipe(fleet=CannotPutBack),
}
"""Checks of what the right server offers no occasion for, and one that does."""
CHEAP = sorted(
    i for i in CHECKS if i.split("-")[1] in {"03", "04", "10", "11", "13", "14", "16", "17", "21", "23"}
)
OTHERS = 2
BOUND_S = 60
PATIENCE_S = 4.0
LITTLE_PATIENCE_S = 1.5
"""With servers that use it up."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Wrong servers crash a lot, and say so."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def judged(
    recipe: Recipe, checks: Sequence[Check], *, patience_s: float = PATIENCE_S
) -> dict[str, CheckResult]:
    async with asyncio.timeout(BOUND_S), ConformanceSite(recipe).running() as site:
        report = await run_suite(Bench(site.target(), site.hooks, patience_s=patience_s), checks)
    return {result.check_id: result for result in report.results}


@pytest.mark.slow
@pytest.mark.clause("AD-102")
async def test_the_right_server_passes_everything() -> None:
    results = await judged(Recipe(), all_checks())
    failed = {i: r.detail for i, r in results.items() if r.outcome is Outcome.FAIL}
    assert not failed
    assert {i for i, r in results.items() if r.outcome is Outcome.NOT_RUN} == set()
    assert {i for i, r in results.items() if r.outcome is Outcome.SKIP} == set(ONLY_OF_OTHER_SERVERS)


@pytest.mark.slow
@pytest.mark.clause("AD-102")
@pytest.mark.parametrize(
    ("check_id", "recipe"),
    [*ONLY_OF_OTHER_SERVERS.items(), ("AD-32-irreversible", Recipe(fleet=CannotPutBack))],
)
async def test_a_right_server_that_gives_occasion_passes(check_id: str, recipe: Recipe) -> None:
    results = await judged(recipe, [CHECKS[check_id]])
    assert results[check_id].outcome is Outcome.PASS, results[check_id].detail


class _InAFlash(SiteInference):
    """Each request is over in less time than a pause takes to arrive."""

    pace_s = 0.0
    longest = 220


@pytest.mark.slow
@pytest.mark.clause("AD-102", "AD-41")
async def test_pauses_meet_requests_on_an_engine_that_is_fast_and_lets_nothing_be_long() -> None:
    wanted = [CHECKS[f"AD-41-{mode}"] for mode in ("keep", "drain", "abort")]
    results = await judged(Recipe(inference=_InAFlash), wanted)
    assert {r.outcome for r in results.values()} == {Outcome.PASS}, [r.detail for r in results.values()]


@pytest.mark.clause("AD-102")
def test_every_check_has_a_server_that_fails_it() -> None:
    assert {i for defect in DEFECTS for i in defect.caught_by} == set(CHECKS)


@pytest.mark.slow
@pytest.mark.clause("AD-102")
@pytest.mark.parametrize("defect", DEFECTS, ids=str)
async def test_the_suite_names_the_defect_of(defect: Defect) -> None:
    others = random.Random(defect.name).sample([i for i in CHEAP if i not in defect.caught_by], OTHERS)
    with defect.patch():
        checks = [CHECKS[i] for i in (*defect.caught_by, *others)]
        results = await judged(defect.recipe, checks, patience_s=LITTLE_PATIENCE_S)
    missed = [i for i in defect.caught_by if results[i].outcome is not Outcome.FAIL]
    assert not missed, f"{defect.name!r} was not seen by {missed}"
    for check_id in defect.caught_by:
        detail = results[check_id].detail
        assert detail.startswith("saw "), detail
        assert "the contract wants" in detail


def test_there_are_at_least_thirty_wrong_servers_and_each_is_seen_by_name() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 30
    for defect in DEFECTS:
        assert defect.caught_by
        assert set(defect.caught_by) <= set(CHECKS)
