"""Write docs/reference/openapi.json from the code; ``--check`` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from iop import __version__
from iop.api.http.openapi import describe

FILE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "openapi.json"


def main() -> int:
    """Write the file, or compare it."""
    text = json.dumps(describe(__version__, needs_key=True), indent=1, ensure_ascii=False) + "\n"
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text, encoding="utf-8")
    elif not FILE.exists() or FILE.read_text(encoding="utf-8") != text:
        print("docs/reference/openapi.json is stale: run tools/gen_openapi.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
