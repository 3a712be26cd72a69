"""Ties tests to the contract: which clause did which test prove, in the last run of that test.

``@pytest.mark.clause("EN-31", "EN-33")`` names the clauses that a test proves. After a run the outcome of each marked
test stands in ``.clauses.json`` at the root of the repository. A run replaces the rows of the tests that it ran and
the rows of test files that are gone, and leaves the others, so running one file does not make the rest look untested.

Under xdist only the controller writes; workers send their reports to it as usual, each with its clauses in
``user_properties``, so there is nothing to merge and nothing to lock.

A marker that names a clause which the contract does not have ends the run with an error: a typo must not look like
a proof.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

CONTRACT_DIR = Path("docs/reference/contract")
RECORD = Path(".clauses.json")
PROPERTY = "clause"

# A clause is defined where its bold id opens a list item: "- **EN-31** text". Other mentions only refer to it.
_DEFINITION = re.compile(r"^- \*\*((?:EN|AD|SF)-\d{2,3})\*\* ", re.MULTILINE)


def read_clause_ids(root: Path) -> list[str]:
    """Every clause id that the contract pages under ``root`` define, in page order within each family.

    Raises:
        ValueError: the same id is defined twice.
    """
    found: list[str] = []
    for page in sorted((root / CONTRACT_DIR).glob("*.md")):
        found += _DEFINITION.findall(page.read_text(encoding="utf-8"))
    twice = sorted({clause for clause in found if found.count(clause) > 1})
    if twice:
        raise ValueError(f"defined more than once in {CONTRACT_DIR}: {', '.join(twice)}")
    return found


def merge_record(old: dict[str, Any], new: dict[str, Any], *, root: Path) -> dict[str, Any]:
    """The record after a run: rows of this run win, rows of vanished test files go, other rows stay."""
    kept = {
        test: row
        for test, row in old.items()
        if test not in new and (root / test.partition("::")[0]).exists()
    }
    return dict(sorted({**kept, **new}.items()))


class ClauseRecorder:
    """Collects outcomes in the process that reports them, and writes the record when the session ends."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rows: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts as passed only if set-up, call and tear-down all passed, and the call happened."""
        clauses = sorted({value for name, value in report.user_properties if name == PROPERTY})
        if not clauses:
            return
        row = self._rows.setdefault(report.nodeid, {"clauses": clauses, "called": False, "failed": False})
        row["failed"] = row["failed"] or report.outcome == "failed"
        if report.when == "call" and report.outcome == "passed":
            row["called"] = True

    def pytest_sessionfinish(self) -> None:
        """Write the record beside what earlier runs left."""
        path = self._root / RECORD
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            old = {}
        new = {
            test: {"clauses": row["clauses"], "passed": row["called"] and not row["failed"]}
            for test, row in self._rows.items()
        }
        if new:
            scratch = path.with_suffix(".json.new")
            scratch.write_text(json.dumps(merge_record(old, new, root=self._root), indent=1) + "\n")
            scratch.replace(path)


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that prints the results records them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(ClauseRecorder(config.rootpath), "iop-clauses")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the markers against the contract and attach them to the reports."""
    known = set(read_clause_ids(config.rootpath))
    unknown: list[str] = []
    for item in items:
        named = [clause for mark in item.iter_markers("clause") for clause in mark.args]
        unknown += [f"{item.nodeid}: {clause}" for clause in named if clause not in known]
        item.user_properties += [(PROPERTY, clause) for clause in named]
    # Before the contract pages exist there is nothing to check against.
    if unknown and known:
        raise pytest.UsageError("clauses that the contract does not have:\n  " + "\n  ".join(unknown))
