"""Real engines for tests: processes made once per session, with a model made on the spot."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from engines_models import ANSWER, OTHER_ANSWER, Engine
from vllm_server import DEVELOPMENT, LORA, profiling, serving_vllm

HERE = Path(__file__).parent


def load_tool(name: str) -> ModuleType:
    """A script of `tools/`, which is no package."""
    path = HERE.parents[2] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sea`, `hill` with another answer, and `endless` that never stops."""
    pytest.importorskip("gguf")
    directory = tmp_path_factory.mktemp("models")
    tool = load_tool("scripted_model")
    tool.make_model(directory, "sea", ANSWER)
    tool.make_model(directory, "hill", OTHER_ANSWER)
    tool.make_model(directory, "endless", ANSWER, loops=True, context=65_536)
    return directory


@contextlib.contextmanager
def serving_llamacpp(
    model_file: Path,
    name: str,
    slots: Path | None,
    *,
    ram_mib: int = 0,
    context: int = 131_072,
    takes_tools: bool = True,
) -> Iterator[Engine]:
    """llama.cpp's server from its Python package; ends with the block, or with us.

    The context is so large that long streams outlive what a test does meanwhile.
    """
    script = str(HERE / "llamacpp_server.py")
    options = [str(ram_mib), str(context), str(int(takes_tools))]
    command = [sys.executable, script, str(model_file), str(slots or ""), name, *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    try:
        yield Engine(endpoint=lines.get(timeout=60).strip(), model=name)
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=10)
        process.stdin.close()
        process.stdout.close()


@pytest.fixture(scope="session")
def llamacpp(models: Path) -> Iterator[Engine]:
    """With everything switched on that control needs."""
    pytest.importorskip("xllamacpp")
    slots = models / "slots"
    slots.mkdir()
    with serving_llamacpp(models / "endless.gguf", "endless", slots) as engine:
        yield engine


@pytest.fixture(scope="session")
def llamacpp_with_ram(models: Path) -> Iterator[Engine]:
    """As the server starts by default: prompts pushed out of their slots are kept in host RAM."""
    pytest.importorskip("xllamacpp")
    slots = models / "more_slots"
    slots.mkdir()
    with serving_llamacpp(models / "sea.gguf", "sea", slots, ram_mib=512) as engine:
        yield engine


@pytest.fixture(scope="session")
def llamacpp_sea(models: Path) -> Iterator[Engine]:
    """One that stops, and that was not told where to keep slots."""
    pytest.importorskip("xllamacpp")
    with serving_llamacpp(models / "sea.gguf", "sea", None) as engine:
        yield engine


@pytest.fixture(scope="session")
def llamacpp_without_tools(models: Path) -> Iterator[Engine]:
    """Started without `--jinja`: its template knows tools, and the server takes none."""
    pytest.importorskip("xllamacpp")
    with serving_llamacpp(models / "sea.gguf", "sea", None, context=1024, takes_tools=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A small real model, from the file that `make engines-test` puts together."""
    file = os.environ.get("ENGINES_GEMMA", "")
    if not file:
        pytest.skip("the real model runs with `make engines-test`")
    pytest.importorskip("xllamacpp")
    slots = tmp_path_factory.mktemp("gemma_slots")
    with serving_llamacpp(Path(file), "gemma", slots, context=8192) as engine:
        yield engine


@pytest.fixture(scope="session")
def vllm(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """vLLM on CPU in development mode, from the virtual environment that `make engines-test` makes."""
    running = os.environ.get("ENGINES_VLLM_ENDPOINT", "")
    if running:
        # An engine kept running beside a developer's runs: it serves `endless`.
        yield Engine(endpoint=running, model="endless")
        return
    directory = tmp_path_factory.mktemp("vllm")
    port = int(os.environ.get("ENGINES_VLLM_PORT", "0"))
    options = (*profiling(directory / "profiles"), *LORA)
    with serving_vllm(models / "endless", directory, *options, environment=DEVELOPMENT, port=port) as engine:
        yield engine
