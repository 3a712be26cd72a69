"""Every case from the field has a test that plays it, and the tool that says so can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "cases.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_every_case_has_a_test() -> None:
    done = run(ROOT)
    assert done.returncode == 0, done.stderr
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    assert listed == {f"P-{number:02d}" for number in range(1, 26)}


def test_a_case_without_a_test_and_a_test_without_a_case_are_told(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "cases.md").write_text("- **P-01** One.\n- **P-02** Two.\n- **P-03** Three.\n")
    (tmp_path / "tests" / "test_some.py").write_text(
        'import pytest\npytestmark = pytest.mark.case("P-01")\n'
        '@pytest.mark.case("P-09", "P-03")\nasync def test_it(): pass\n'
    )
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "P-01 tests/test_some.py::test_it",
        "P-03 tests/test_some.py::test_it",
    ]
    assert "without a test: P-02" in done.stderr
    assert "told by no page: P-09" in done.stderr
