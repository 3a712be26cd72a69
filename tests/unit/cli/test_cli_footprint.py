"""What a long-lived process carries: only what its config asks for, or memory is spent on nothing.

The sums behind this are in docs/explanation/performance.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPERATORS = {"iop.client", "iop.conformance", "iop.cli.operator_commands"}
READING_ARGUMENTS = {"pydantic", "rich", "pygments", "structlog"}
STORE = {"sqlalchemy", "alembic", "mako", "sqlalchemy.ext.asyncio", "greenlet", "aiosqlite"}

RUN_UNTIL_READY = """
import os, signal, sys, threading
from iop.cli.main import run
ready = sys.argv[sys.argv.index("--ready-file") + 1]

def stop_when_ready():
    done = threading.Event()
    while not os.path.exists(ready):
        done.wait(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=stop_when_ready, daemon=True).start()
code = run(sys.argv[1:])
print("modules", *sorted(sys.modules))
sys.exit(code)
"""
"""Runs a role until it serves, stops it, and tells what it had loaded by then."""

EDGE = """
listen: {{http: "127.0.0.1:0", nodes: "127.0.0.1:0", ops: "127.0.0.1:0", openengine: {grpc}, admin: {grpc}}}
store: sqlite:///{directory}/edge.db
nodes:
  - id: n1
    token: file:{directory}/token
    adapters:
      - {{name: main, type: openai_compat, endpoint: "http://127.0.0.1:1", capacity: 4}}
models:
  - {{id: m, providers: [{{node: n1, adapter: main, target: m}}]}}
"""
NODE = """
edge: {edge}
node: n1
token: file:{directory}/token
"""


def loaded_by(role: str, config: str, directory: Path) -> set[str]:
    file = directory / f"{role}.yaml"
    file.write_text(config)
    done = subprocess.run(
        [sys.executable, "-c", RUN_UNTIL_READY, role, "--config", str(file), *ready_file(directory, role)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(directory),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def environment(directory: Path) -> dict[str, str]:
    return {**os.environ, "IOP_HOME": str(directory / "home")}


def ready_file(directory: Path, name: str) -> list[str]:
    return ["--ready-file", str(directory / f"{name}.ready")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret-of-n1-0123456789")
    return tmp_path


@pytest.fixture
def edge(directory: Path) -> Iterator[str]:
    """Where a running Edge takes Nodes."""
    file = directory / "running.yaml"
    file.write_text(EDGE.format(directory=directory, grpc="null"))
    command = [sys.executable, "-m", "iop.cli", "edge", "--config", str(file)]
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        command,
        env={**environment(directory), "IOP_PARENT_REPORT_FD": str(write_end)},
        pass_fds=(write_end,),
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(write_end)
        try:
            with os.fdopen(read_end) as reports:
                message: dict[str, Any] = json.loads(reports.readline())
            yield str(message["ready"]["nodes"])
        finally:
            process.kill()


@pytest.mark.slow
def test_an_edge_without_grpc_listeners_at_the_newest_schema_carries_none_of_it(directory: Path) -> None:
    config = EDGE.format(directory=directory, grpc="null")
    for _store in ("new", "at the newest schema"):
        loaded = loaded_by("edge", config, directory)
        assert "sqlalchemy" in loaded
        unwanted = OPERATORS | READING_ARGUMENTS | (STORE - {"sqlalchemy"}) | {"grpc", "numpy", "iop.engine"}
        assert set() == loaded & {*unwanted, "sqlalchemy.dialects.postgresql", "iop.adapters.openai_compat"}


@pytest.mark.slow
def test_an_edge_with_grpc_listeners_loads_grpc(directory: Path) -> None:
    loaded = loaded_by("edge", EDGE.format(directory=directory, grpc='"127.0.0.1:0"'), directory)
    assert "grpc" in loaded
    assert set() == loaded & (OPERATORS | READING_ARGUMENTS)


@pytest.mark.slow
def test_a_node_carries_the_adapters_that_it_was_given_and_nothing_of_the_store(
    edge: str, directory: Path
) -> None:
    loaded = loaded_by("node", NODE.format(edge=edge, directory=directory), directory)
    assert "iop.adapters.openai_compat" in loaded
    unwanted = OPERATORS | READING_ARGUMENTS | STORE | {"grpc", "numpy", "prometheus_client", "iop.edge"}
    assert set() == loaded & {*unwanted, "iop.adapters.vllm", "iop.adapters.ollama", "iop.adapters.cli"}


def test_a_role_loads_nothing_of_the_operators_commands_even_to_explain_itself() -> None:
    code = (
        "import sys; from iop.cli.main import run; run([sys.argv[1], '--help']); "
        "print(*sorted(m for m in sys.modules if m.startswith(('iop.client', 'iop.conformance', 'iop.pb'))))"
    )
    for role in ("up", "edge", "node", "engine"):
        done = subprocess.run(
            [sys.executable, "-c", code, role], capture_output=True, text=True, timeout=60, check=True
        )
        assert "iop." not in done.stdout.splitlines()[-1], role
