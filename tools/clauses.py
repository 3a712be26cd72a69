"""Print one line per clause of the contract: ``EN-31 tested PATH::TEST`` or ``EN-31 missing``.

Tested means: a test that names the clause ran and passed in its last run. ``--strict EN`` makes a missing clause of
that family an error; ``--strict all`` of any family.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "plugins"))

from clauses import RECORD, read_clause_ids  # noqa: E402  (the path comes first)


def main() -> int:
    """Print the list; the exit code is 1 if a family asked for has gaps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", default="", help="families that must have no gap: EN,AD,SF or all")
    strict = {family for family in parser.parse_args().strict.split(",") if family}

    try:
        record = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    ids = read_clause_ids(ROOT)
    gaps: dict[str, list[str]] = {}
    for clause in ids:
        proofs = [test for test, row in record.items() if row["passed"] and clause in row["clauses"]]
        if proofs:
            print(f"{clause} tested {proofs[0]}")
        else:
            print(f"{clause} missing")
            gaps.setdefault(clause.partition("-")[0], []).append(clause)
    for family in sorted({clause.partition("-")[0] for clause in ids}):
        total = sum(clause.startswith(family) for clause in ids)
        print(f"{family}: {total - len(gaps.get(family, []))} of {total} tested", file=sys.stderr)
    failed = sorted(family for family in gaps if family in strict or "all" in strict)
    for family in failed:
        print(f"{family} has clauses without a passing test: {', '.join(gaps[family])}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
