"""Real vLLM on CPU, from the virtual environment that `make engines-test` makes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines_models import Engine
from engines_start import free_port, wait_for_http

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@contextlib.contextmanager
def serving_vllm(
    model: Path,
    directory: Path,
    *options: str,
    context: int = 32_768,
    environment: dict[str, str] | None = None,
    port: int = 0,
    has_tools: bool = True,
) -> Iterator[Engine]:
    """Serving; ends with the block.

    Args:
        model: its directory; its last part is the served name.
        directory: for the log and what the engine writes.
        environment: more of it.
        has_tools: with a parser of tool calls.
    """
    python = os.environ.get("ENGINES_VLLM_PYTHON", "")
    if not python:
        pytest.skip("real vLLM runs with `make engines-test`")
    port = port or free_port()
    command = [
        python,
        *("-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", model.name),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(context), "--max-num-seqs", "8", "--enforce-eager"),
        "--enable-prefix-caching",
        *(("--enable-auto-tool-choice", "--tool-call-parser", "hermes") if has_tools else ()),
        *options,
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdout=log,
            stderr=log,
            cwd=directory,
            start_new_session=True,
        )
    try:
        try:
            wait_for_http(f"http://127.0.0.1:{port}/health", process, within_s=300)
        except AssertionError:
            sys.stderr.write((directory / "log").read_text(errors="replace")[-8000:])
            raise
        yield Engine(endpoint=f"http://127.0.0.1:{port}", model=model.name)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def profiling(directory: Path) -> tuple[str, ...]:
    """The options for a profiler that writes there."""
    directory.mkdir()
    return ("--profiler-config", f'{{"profiler":"torch","torch_profiler_dir":"{directory}"}}')


LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
HANDLES = ("--weight-transfer-config", '{"backend":"ipc"}')
UNPICKLING = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
TRANSFER = ("--weight-transfer-config", '{"backend":"nccl"}')
