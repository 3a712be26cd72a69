"""Generated reference pages are fresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_settings_page_equals_the_settings_trees() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gen_settings.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
