"""The page about training loops: its program, as it stands there, against a fleet (AD-45, AD-12)."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from e2e_parts import MODEL, running_parts

from iop.engine import builtin_checkpoint

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "trainer-loop.md"


def answered_by(address: str) -> str:
    """The weight version that an answer names."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    answer = httpx2.post(f"http://{address}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-iop-weight-version"]


def operations(journal: Path) -> int:
    """How many operations the Edge has accepted."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as store:
        return int(store.execute("select count(*) from operations").fetchone()[0])


@pytest.mark.timeout(180)
@pytest.mark.clause("AD-12", "AD-33", "AD-43", "AD-44", "AD-45")
def test_the_program_of_the_page_gives_a_fleet_each_checkpoint(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "trainer_loop.py").write_text(program)
    checkpoints = [str(builtin_checkpoint(name)) for name in ("second", "first", "second")]
    with running_parts(tmp_path / "home", "engine", "edge", "node") as parts:

        def run(*paths: str) -> subprocess.CompletedProcess[str]:
            token = parts.home / "admin.token"
            return subprocess.run(
                [sys.executable, "trainer_loop.py", parts.edge["admin"], str(token), MODEL, "first", *paths],
                cwd=tmp_path,
                env={**os.environ, "IOP_HOME": str(parts.home)},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )

        first = run(*checkpoints[:2])
        assert first.returncode == 0, (first.stdout, first.stderr)
        rounds = [f"{MODEL} serves step-1, after first", f"{MODEL} serves step-2, after step-1"]
        assert first.stdout.splitlines() == rounds
        assert answered_by(parts.edge["http"]) == "step-2"

        # A trainer that comes back after a crash says all of it again: only what is new has an effect.
        again = run(*checkpoints)
        assert again.returncode == 0, (again.stdout, again.stderr)
        assert again.stdout.splitlines() == [*rounds, f"{MODEL} serves step-3, after step-2"]
        assert answered_by(parts.edge["http"]) == "step-3"
        assert operations(parts.home / "edge.db") == 3 * 5

        lost = run(str(tmp_path / "nowhere"))
        assert lost.returncode != 0, "another payload under the keys of step-1"
        assert answered_by(parts.edge["http"]) == "step-3"
