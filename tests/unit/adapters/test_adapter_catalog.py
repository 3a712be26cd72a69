"""What `iop adapters` and the reference say is what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from iop.adapters.catalog import kinds, markdown, operation_name, rows
from iop.adapters.registry import NATIVE_CONTROLS, adapter_types
from iop.app.edge_snapshot import CONTROLLED_TYPES
from iop.cli.main import build_app


@pytest.mark.clause("AD-15")
def test_every_kind_is_listed_with_what_it_offers() -> None:
    listed = {kind.type: kind for kind in kinds()}
    assert tuple(listed) == adapter_types()
    for name, load_control in NATIVE_CONTROLS.items():
        assert listed[name].offers == load_control().OFFERS
    for kind in listed.values():
        assert kind.offers or kind.note
        begun = f"| `{kind.type}` | {kind.work} |"
        assert all(f"{begun} {operation_name(offer.operation)} |" in markdown() for offer in kind.offers)


@pytest.mark.clause("EN-32", "AD-35")
def test_the_edge_holds_back_exactly_the_kinds_that_take_admin_steps() -> None:
    assert {kind.type for kind in kinds() if kind.offers} == CONTROLLED_TYPES


def test_the_page_of_the_reference_is_what_the_code_says_now() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "adapters.md"
    assert page.read_text(encoding="utf-8").endswith("\n\n" + markdown())
    tool = Path(__file__).parents[3] / "tools" / "gen_adapters.py"
    checked = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.clause("AD-15")
def test_the_command_line_shows_the_same_rows() -> None:
    shown = CliRunner().invoke(build_app(["adapters"]), ["adapters"]).output
    for row in rows():
        assert all(word in shown for word in row[0:3] if word)
