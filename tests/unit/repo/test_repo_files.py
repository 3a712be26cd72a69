"""The repository's own promises: locks, docs, examples."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from iop.app.sources import OsSecrets
from iop.config import Sources, load_edge, load_node

ROOT = Path(__file__).resolve().parents[3]
MARKDOWN = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_a_lock_pins_versions_and_hashes_and_names_no_index(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--extra-index" not in text
    pins = re.findall(r"^([a-z0-9][^\s=]*)==\S+.*\\$", text, re.MULTILINE)
    assert len(pins) > 20
    assert text.count("--hash=sha256:") >= len(pins)


def test_the_runtime_lock_is_part_of_the_development_lock() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^(\S+==\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))

    assert pins("runtime.txt") <= pins("dev.txt") <= pins("docs.txt")


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = [
        link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()
    ]
    assert broken == []


def test_helper_modules_of_tests_have_names_of_their_own() -> None:
    """Each folder of tests is on the path: a second module of the same name would stand in the way of the first."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    ignored = {"conftest.py", "__init__.py"}
    assert [name for name, count in names.items() if count > 1 and name not in ignored] == []


def test_every_make_target_of_the_house_exists() -> None:
    text = (ROOT / "Makefile").read_text()
    wanted = ("setup", "run", "test", "test-slow", "lint", "types", "fmt", "clauses")
    wanted += ("check", "bench", "proto", "docs", "sim")
    assert [target for target in wanted if not re.search(rf"^{target}:", text, re.MULTILINE)] == []
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def blocks(page: str) -> list[str]:
    """The YAML blocks of a page."""
    return re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


class _AnySecret(OsSecrets):
    """Every reference leads to a secret of its own."""

    def read_file(self, path: Path) -> str:
        return f"secret of {path.name}"

    def read_variable(self, name: str) -> str | None:
        return f"secret of {name}"


def load(text: str) -> None:
    """Load a documented config as the process would."""
    is_node = "edge" in yaml.safe_load(text)
    sources = Sources(text=text, file="example.yaml", secrets=_AnySecret({}))
    if is_node:
        load_node(sources)
    else:
        load_edge(sources)


def test_the_readme_config_is_ten_lines_and_valid() -> None:
    (example,) = blocks("README.md")
    assert len(example.splitlines()) <= 10
    load(example)


@pytest.mark.parametrize("number", [0, 1])
def test_the_how_to_configs_are_valid(number: int) -> None:
    load(blocks("docs/howto/own-engine.md")[number])


def test_the_contract_configs_are_valid() -> None:
    edge, node = blocks("docs/reference/contract/configuration.md")[:2]
    load(node)
    hashes = iter(range(1, 100))
    load(re.sub(r"sha256:<64 hex digits>", lambda _: f"sha256:{next(hashes):064x}", edge))


def test_no_tracked_file_names_a_machine_path() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-lIE", r"/(work|root|home/[a-z]+)/(main|shared)\b"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert listed.stdout.splitlines() in ([], ["tests/unit/repo/test_repo_files.py"])


SURFACES = ("iop.api", "iop.console", "starlette", "uvicorn", "httptools", "aiohttp", "a2a")


@pytest.mark.clause("EN-05")
@pytest.mark.parametrize("package", ["net", "wire"])
def test_transport_knows_no_surface_and_so_makes_no_answer_of_one(package: str) -> None:
    for file in sorted((ROOT / "src" / "iop" / package).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [
            name
            for node in ast.walk(tree)
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        ]
        assert [name for name in names if name.startswith(SURFACES)] == [], file
