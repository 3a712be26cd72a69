"""The documentation shows the tables that the code runs on (AD-48)."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.admin.tables import legality_table, state_diagram

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "operations.md"


@pytest.mark.clause("AD-48", "AD-103")
def test_the_page_on_operations_holds_the_generated_tables() -> None:
    text = PAGE.read_text()
    assert state_diagram() in text, "run python -m iop.admin.tables and paste"
    assert legality_table() in text, "run python -m iop.admin.tables and paste"
