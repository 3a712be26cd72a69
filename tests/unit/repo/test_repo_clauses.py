"""The clause list: what counts as a proof, and what a typo does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from clauses import merge_record, read_clause_ids

ROOT = Path(__file__).resolve().parents[3]
PAGE = "- **EN-01** One socket.\n  EN-02 is mentioned.\n- **AD-10** Enums.\n- EN-03 is no definition\n"


def contract(root: Path, text: str = PAGE) -> None:
    directory = root / "docs" / "reference" / "contract"
    directory.mkdir(parents=True)
    (directory / "page.md").write_text(text)


def test_a_clause_is_defined_by_a_bold_id_that_opens_an_item(tmp_path: Path) -> None:
    contract(tmp_path)
    assert read_clause_ids(tmp_path) == ["EN-01", "AD-10"]


def test_a_clause_defined_twice_is_an_error(tmp_path: Path) -> None:
    contract(tmp_path, PAGE + "- **EN-01** Again.\n")
    with pytest.raises(ValueError, match="EN-01"):
        read_clause_ids(tmp_path)


def test_the_contract_is_complete() -> None:
    ids = read_clause_ids(ROOT)
    counts = {family: sum(clause.startswith(family) for clause in ids) for family in ("EN", "AD", "SF")}
    assert counts == {"EN": 72, "AD": 51, "SF": 24}


def test_a_run_replaces_its_own_rows_and_keeps_those_of_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    old = {"a.py::kept": {"passed": True}, "a.py::run": {"passed": True}, "gone.py::x": {"passed": True}}
    new = {"a.py::run": {"passed": False}}
    assert merge_record(old, new, root=tmp_path) == {
        "a.py::kept": {"passed": True},
        "a.py::run": {"passed": False},
    }


SUITE = """
import pytest

@pytest.mark.clause("EN-01")
def test_passes(): pass

@pytest.mark.clause("AD-10")
def test_fails(): assert False

@pytest.mark.clause("AD-10")
@pytest.mark.skip
def test_is_skipped(): pass
"""


def run_suite(root: Path, suite: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A small project with our plugin, in a process of its own."""
    if not (root / "docs").exists():
        contract(root)
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n  clause(*ids): x\n")
    (root / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests' / 'plugins')!r})\npytest_plugins = ['clauses']\n"
    )
    (root / "test_suite.py").write_text(suite)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_only_a_test_that_ran_and_passed_is_a_proof(tmp_path: Path, workers: list[str]) -> None:
    run_suite(tmp_path, SUITE, *workers)
    record = json.loads((tmp_path / ".clauses.json").read_text())
    assert {test.partition("::")[2]: row["passed"] for test, row in record.items()} == {
        "test_passes": True,
        "test_fails": False,
        "test_is_skipped": False,
    }


@pytest.mark.slow
def test_a_marker_with_an_unknown_clause_fails_the_run(tmp_path: Path) -> None:
    done = run_suite(tmp_path, SUITE.replace("EN-01", "EN-99"))
    assert done.returncode != 0
    assert "EN-99" in done.stdout + done.stderr
    assert not (tmp_path / ".clauses.json").exists()
