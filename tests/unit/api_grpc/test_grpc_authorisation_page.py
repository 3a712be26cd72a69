"""The reference page of authorisation says what the code does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from iop.admin.permissions import PRESETS, Permission
from iop.api.grpc.admin_service import ADMIN_METHODS
from iop.api.grpc.control_service import CONTROL_METHODS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "contract" / "authorisation.md"
ROLES = ("viewer", "operator", "admin")


def documented(heading: str) -> dict[str, tuple[str, ...]]:
    """Rows of the table under a heading: permission and the three roles, by RPC."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[A-Z]\w+", cells[0]) and cells[0] != "RPC":
            rows[cells[0]] = tuple(cells[1:])
    return rows


def actual(methods: Mapping[str, Permission | None]) -> dict[str, tuple[str, ...]]:
    """The same from the code."""
    return {
        method.rpartition("/")[2]: (
            ("core",) * 4
            if permission is None
            else (permission.value, *("yes" if permission in PRESETS[role] else "" for role in ROLES))
        )
        for method, permission in methods.items()
    }


@pytest.mark.clause("AD-04", "AD-103")
@pytest.mark.parametrize(
    ("heading", "methods"),
    [
        ("Permissions of OpenEngineAdmin", ADMIN_METHODS),
        ("Permissions of Control on the admin listener", CONTROL_METHODS),
    ],
)
def test_the_permission_tables_are_those_of_the_code(
    heading: str, methods: Mapping[str, Permission | None]
) -> None:
    assert documented(heading) == actual(methods)


@pytest.mark.clause("AD-103")
def test_every_privileged_mutation_has_its_migration_row() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Where privileged calls went\n")[2]
    for call in ("Drain", "Abort", "LoadLora", "UnloadLora"):
        assert f"`{call}`" in section.partition("\n## ")[0]
