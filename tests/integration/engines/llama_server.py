"""The real `llama-server` program, started by a test and ended with it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines_start import free_port, wait_for_http


@dataclass
class LlamaServer:
    """One process of it."""

    process: subprocess.Popen[bytes]
    endpoint: str

    def ask(self, path: str, body: object | None = None, *, method: str = "") -> tuple[int, str, bytes]:
        """Past everything of ours: status, type and body."""
        request = urllib.request.Request(
            f"{self.endpoint}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"} if body is not None else {},
            method=method or None,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers.get("Content-Type", ""), answer.read()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.headers.get("Content-Type", ""), refused.read()

    def statuses(self) -> dict[str, str]:
        """Of a router's models."""
        _, _, body = self.ask("/v1/models")
        return {each["id"]: each["status"]["value"] for each in json.loads(body)["data"]}

    def slots(self, model: str = "") -> list[dict[str, Any]]:
        """As it tells them."""
        _, _, body = self.ask(f"/slots?model={model}" if model else "/slots")
        slots: list[dict[str, Any]] = json.loads(body)
        return slots


def program() -> str:
    """Where `make engines-test` put it."""
    found = os.environ.get("ENGINES_LLAMA_SERVER", "")
    if not found:
        pytest.skip("the llama-server program runs with `make engines-test`")
    return found


@contextlib.contextmanager
def llama_server(
    *arguments: str, log: Path, switches: tuple[str, ...] = ("--metrics", "--slots")
) -> Iterator[LlamaServer]:
    """Serving; ends with the block, and every child that a router started with it."""
    port = free_port()
    command = [program(), *arguments, "--host", "127.0.0.1", "--port", str(port), "--offline"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "-t", "1", "-np", "2", "--cache-ram", "0", *switches],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_for_http(f"http://127.0.0.1:{port}/health", process, within_s=60)
        yield LlamaServer(process, f"http://127.0.0.1:{port}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
