"""The page of what engines do names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "engine-surprises.md"


def test_every_surprise_names_a_test_and_every_test_is_there() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| engine |", "| ---"))]
    named = [set(re.findall(r"`(test_\w+)`", row)) for row in rows]
    assert [row for row, names in zip(rows, named, strict=True) if not names] == []
    # Where adapters and what relays their streams are tested.
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("engines", "api_http", "adapters", "admin", "node")
        for path in (ROOT / "tests").glob(f"*/{folder}/test_*.py")
    )
    defined = set(re.findall(r"def (test_\w+)", text))
    assert sorted(set().union(*named) - defined) == []
