"""Generated reference pages are fresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", ["gen_settings.py", "gen_cli.py", "gen_adapters.py", "gen_openapi.py", "gen_errors.py"]
)
def test_generated_pages_equal_their_sources(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
