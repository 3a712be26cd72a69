"""Every reason that a gRPC or admin caller can be given is published, with what to do about it (AD-17, SF-06)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from iop.core.errors import STATUS_BY_CODE

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "docs" / "reference"
GRPC = re.compile(r"^\| \[`([A-Z_]+)`\]\(errors/[a-z_]+\.md\) \|((?: [^|]+\|)+)$", re.MULTILINE)
HTTP = re.compile(r"^\| \[`([a-z_]+)`\]\(errors/\1\.md\) \|", re.MULTILINE)

pytestmark = pytest.mark.clause("AD-17")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("error_reasons", ROOT / "tools" / "error_reasons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grpc_rows() -> dict[str, list[str]]:
    text = (REFERENCE / "grpc-errors.md").read_text(encoding="utf-8")
    return {reason: [cell.strip() for cell in rest.split("|")[:-1]] for reason, rest in GRPC.findall(text)}


@pytest.fixture(scope="module")
def http_rows() -> set[str]:
    text = (REFERENCE / "http-errors.md").read_text(encoding="utf-8")
    return {code.upper() for code in HTTP.findall(text)}


def test_every_reason_that_can_be_raised_is_published(
    tool: ModuleType, grpc_rows: dict[str, list[str]], http_rows: set[str]
) -> None:
    raised = tool.reasons()
    assert {"QUEUE_FULL", "REVISION_MISMATCH", "EMPTY_SELECTOR", "NO_CREDENTIAL", "KEY_RATE"} <= raised.keys()
    assert raised.keys() - grpc_rows.keys() - http_rows == set()
    assert tool.admin_codes() - grpc_rows.keys() - http_rows == set()


def test_nothing_is_published_that_cannot_be_raised(
    tool: ModuleType, grpc_rows: dict[str, list[str]]
) -> None:
    assert grpc_rows.keys() - tool.reasons().keys() - tool.admin_codes() == set()


def test_the_list_tells_the_status_and_what_to_do(tool: ModuleType, grpc_rows: dict[str, list[str]]) -> None:
    raised = tool.reasons()
    statuses = {status.grpc for status in STATUS_BY_CODE.values()}
    for reason, cells in grpc_rows.items():
        assert all(cells), reason
        if len(cells) == 3:
            assert cells[0] == tool.statuses(raised[reason]), reason
            assert set(cells[0].split(" or ")) <= statuses, reason


def test_every_reason_has_a_page_that_says_what_to_do(tool: ModuleType) -> None:
    for reason in tool.reasons().keys() | tool.admin_codes():
        page = (REFERENCE / "errors" / f"{reason.lower()}.md").read_text(encoding="utf-8")
        assert f"`{reason}`" in page or f"# {reason}\n" in page, reason
        assert "## What the caller does\n\n" in page, reason
        assert "## What the operator looks at\n\n" in page, reason


def test_every_page_belongs_to_a_list(grpc_rows: dict[str, list[str]], http_rows: set[str]) -> None:
    pages = {page.stem.upper() for page in (REFERENCE / "errors").glob("*.md")}
    assert pages == grpc_rows.keys() | http_rows


def test_a_reason_that_cannot_be_followed_is_an_error_of_the_tool(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir()
    file = tmp_path / "store" / "journal.py"
    monkeypatch.setattr(tool, "SOURCE", tmp_path)
    file.write_text(
        "REASON = 'CONSTANT'\n"
        "def fail(words, reason='DEFAULT'):\n    raise Conflict(words, reason=reason)\n"
        "fail('a', 'PASSED')\nfail('b', reason='NAMED')\nraise NotFound('c', reason=REASON)\n"
        "raise Internal('d', reason='LITERAL')\nraise LocalProtocolError('e', reason='DEFECT')\n"
    )
    found = tool.reasons()
    assert {"CONSTANT", "DEFAULT", "PASSED", "NAMED", "LITERAL"} <= found.keys()
    assert "DEFECT" not in found
    file.write_text("raise NotFound('c', reason=made_up())\n")
    with pytest.raises(SystemExit, match="made_up"):
        tool.reasons()
