"""Both our servers under the conformance suite, as a user runs it: the command, real processes, real hooks (AD-102)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from e2e_parts import SLOTS, Parts, conformance, relayed, running_parts

from iop.engine import builtin_checkpoint

CHECKPOINTS = [
    f"--checkpoint-{letter}={builtin_checkpoint(name)}" for letter, name in (("a", "first"), ("b", "second"))
]
EVERY_HOOK = ("restart", "cut", "fail-rank")
ONLY_WITH_A_FAILING_RANK = {
    "AD-31-partial-pause",
    "AD-31-healed",
    "AD-40-partial-flush",
    "AD-32-partial-update",
}
NO_OCCASION = {"AD-15-kinds-refused", "AD-18-limit", "AD-43-irreversible"}
"""One group that offers everything and can put back whatever it serves."""

PROVED = (
    *(
        "AD-102",
        "AD-01",
        "AD-02",
        "AD-03",
        "AD-04",
        "AD-06",
        "AD-10",
        "AD-11",
        "AD-12",
        "AD-13",
        "AD-14",
        "AD-15",
    ),
    *("AD-16", "AD-17", "AD-18", "AD-19", "AD-20", "AD-21", "AD-22", "AD-23", "AD-24", "AD-25", "AD-26"),
    *(
        "AD-32",
        "AD-38",
        "AD-40",
        "AD-41",
        "AD-42",
        "AD-43",
        "AD-44",
        "AD-45",
        "AD-46",
        "AD-47",
        "AD-50",
        "AD-105",
    ),
)


def judge(parts: Parts, part: str, *hooks: str, timeout_s: float, rank: str = "STOP") -> dict[str, Any]:
    """Run the suite against a part through a relay; the report.

    Args:
        rank: the signal to a rank that is to fail.
    """
    addresses = parts.engine if part == "engine" else parts.edge
    report, junit = parts.home / "report.json", parts.home / "report.xml"
    with relayed(parts.home, addresses["admin"]) as target:
        done = conformance(
            parts.home,
            f"--target={target}",
            f"--inference={addresses['openengine']}",
            f"--http=http://{addresses['http']}",
            *CHECKPOINTS,
            f"--capacity={SLOTS}",
            *parts.hooks(*hooks, part=part, rank=rank),
            f"--json={report}",
            f"--junit={junit}",
            timeout_s=timeout_s,
        )
    assert report.exists(), f"no report, exit code {done.returncode}: {done.stderr[-4000:]}"
    shown: dict[str, Any] = json.loads(report.read_text())
    failed = {c["id"]: c["detail"] for c in shown["checks"] if c["outcome"] == "FAIL"}
    assert not failed
    assert int(ElementTree.parse(junit).getroot().get("failures", "-1")) == 0
    shown["exit"] = done.returncode
    return shown


def ids(report: dict[str, Any], outcome: str) -> set[str]:
    return {c["id"] for c in report["checks"] if c["outcome"] == outcome}


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.clause(*PROVED)
def test_the_engine_conforms(tmp_path: Path) -> None:
    with running_parts(tmp_path / "home", "engine") as parts:
        report = judge(parts, "engine", "restart", "cut", timeout_s=450)
    assert ids(report, "NOT RUN") == ONLY_WITH_A_FAILING_RANK
    assert ids(report, "SKIP") == NO_OCCASION
    assert report["exit"] == 6


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.clause(*PROVED, "AD-29", "AD-30", "AD-31")
def test_the_edge_passes_fully_with_every_hook(tmp_path: Path) -> None:
    """A rank that dies takes its engine with it, so no deadline of the engine runs out; the Edge waits two seconds."""
    with running_parts(tmp_path / "home", "engine", "edge", "node", lost_s=2.0) as parts:
        report = judge(parts, "edge", *EVERY_HOOK, timeout_s=450, rank="KILL")
    assert ids(report, "NOT RUN") == set()
    assert ids(report, "SKIP") == NO_OCCASION
    assert report["exit"] == 0


@pytest.mark.case("P-24")
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.clause(*PROVED, "AD-29", "AD-30", "AD-31")
def test_the_edge_passes_fully_over_a_rank_that_hangs(tmp_path: Path) -> None:
    """Minutes: whatever a hanging rank was asked holds up a rollback for its whole bound of 60 s."""
    with running_parts(tmp_path / "home", "engine", "edge", "node") as parts:
        report = judge(parts, "edge", *EVERY_HOOK, timeout_s=1100)
    assert ids(report, "NOT RUN") == set()
    assert ids(report, "SKIP") == NO_OCCASION
    assert report["exit"] == 0


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.clause(*PROVED, "AD-29", "AD-30", "AD-31")
def test_the_engine_passes_fully_over_a_rank_that_hangs(tmp_path: Path) -> None:
    """Minutes: a rank that hangs holds up each rollback for its whole bound."""
    with running_parts(tmp_path / "home", "engine") as parts:
        report = judge(parts, "engine", *EVERY_HOOK, timeout_s=1100)
    assert ids(report, "NOT RUN") == set()
    assert ids(report, "SKIP") == NO_OCCASION
    assert report["exit"] == 0
