"""Print the tests of each case of ``tests/cases.md``: ``P-07 PATH::TEST``; fail for a case that no test plays.

Tests name their cases with ``@pytest.mark.case("P-07")``, or all of a module with ``pytestmark``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CASE = re.compile(r"^- \*\*(P-\d{2})\*\* ", re.MULTILINE)


def cases_of(root: Path) -> list[str]:
    """The cases that the page tells, in its order."""
    return _CASE.findall((root / "tests" / "cases.md").read_text(encoding="utf-8"))


def marked(root: Path) -> dict[str, list[str]]:
    """Tests by the case that they name."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / "tests").rglob("test_*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        of_all = [
            case
            for node in module.body
            if isinstance(node, ast.Assign)
            and any(getattr(t, "id", "") == "pytestmark" for t in node.targets)
            for case in _cases(node.value)
        ]
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = [case for decorator in node.decorator_list for case in _cases(decorator)]
                for case in dict.fromkeys([*of_all, *own]):
                    found.setdefault(case, []).append(f"{file.relative_to(root)}::{node.name}")
    return found


def _cases(node: ast.expr) -> Iterator[str]:
    """The arguments of every ``pytest.mark.case(...)`` in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "case":
            yield from (arg.value for arg in each.args if isinstance(arg, ast.Constant))


def main() -> int:
    """Print the list; the exit code is 1 for a case without a test, or a test with a case that nobody tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="of the repository")
    root = parser.parse_args().root
    cases, tests = cases_of(root), marked(root)
    for case in cases:
        for test in tests.get(case, []):
            print(case, test)
    missing = [case for case in cases if case not in tests]
    unknown = sorted(set(tests) - set(cases))
    if missing:
        print(f"without a test: {', '.join(missing)}", file=sys.stderr)
    if unknown:
        print(f"marked, but told by no page: {', '.join(unknown)}", file=sys.stderr)
    return 1 if missing or unknown or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
