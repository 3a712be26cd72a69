"""Write docs/reference/adapters.md from the code; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from iop.adapters.catalog import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "adapters.md"

INTRO = """# Adapters

Made from the adapters themselves by `tools/gen_adapters.py`; do not edit. `iop adapters` shows the same. What a kind
can do is offered only where it is found at the engine: an engine started without what the last column names is served,
but that operation is refused, and the refusal says how to enable it. Start lines: [engines](../howto/engines.md).

"""


def main() -> int:
    """Write the page, or compare it."""
    text = INTRO + markdown()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/reference/adapters.md is stale: run tools/gen_adapters.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
