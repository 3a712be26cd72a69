"""What a long-lived process carries."""

from __future__ import annotations

import subprocess
import sys


def test_a_role_loads_nothing_of_the_operators_commands():
    code = (
        "import sys; from iop.cli.main import run; run([sys.argv[1], '--help']); "
        "print(*sorted(m for m in sys.modules if m.startswith(('iop.client', 'iop.conformance', 'iop.pb'))))"
    )
    for role in ("up", "edge", "node", "engine"):
        done = subprocess.run(
            [sys.executable, "-c", code, role], capture_output=True, text=True, timeout=60, check=True
        )
        assert "iop." not in done.stdout.splitlines()[-1], role
