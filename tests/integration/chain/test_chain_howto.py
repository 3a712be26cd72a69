"""The page about chained Edges: what it tells to write down is written down, started and asked (SF-24)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from iop.pb.openengine.v1 import generation_pb2, openengine_pb2_grpc
from iop.testing.http_site import RawCaller
from iop.testing.process_fleet import eventually, post
from iop.testing.stub_engine import StubCall, StubEngine, whole_answer
from iop.testing.waiting import free_ports

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "chain-edges.md"
FILE = re.compile(r"^`(\w+/\w+\.yaml)`[^\n]*\n\n```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
ENGINE = "127.0.0.1:8000"


def write_page(directory: Path, engine_port: int) -> dict[str, str]:
    """The files of the page, with free ports for the ones it names; returns new addresses by old ones."""
    files = dict(FILE.findall(PAGE.read_text()))
    assert set(files) == {"inner/edge.yaml", "inner/node.yaml", "outer/edge.yaml", "outer/node.yaml"}
    named = sorted(set(re.findall(r"127\.0\.0\.1:\d+", "".join(files.values()))) - {ENGINE})
    ports = dict(zip(named, (f"127.0.0.1:{port}" for port in free_ports(len(named))), strict=True))
    ports[ENGINE] = f"127.0.0.1:{engine_port}"
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(re.sub(r"127\.0\.0\.1:\d+", lambda found: ports[found[0]], text))
    key = secrets.token_hex(24)
    for name in ("inner/chain.key", "outer/chain.key"):
        (directory / name).write_text(key)
    for name in ("inner/gpu-1.token", "outer/site-1.token"):
        (directory / name).write_text(secrets.token_hex(24))
    return ports


@contextlib.contextmanager
def running(directory: Path) -> Iterator[None]:
    """The page's commands."""
    processes = []
    try:
        for place in ("inner", "outer"):
            for part in ("edge", "node"):
                with (directory / f"{place}-{part}.log").open("ab") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "iop.cli", part, "--config", f"{place}/{part}.yaml"],
                            env={**os.environ, "IOP_HOME": place},
                            cwd=directory,
                            stdout=log,
                            stderr=log,
                        )
                    )
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()


async def answer(call: StubCall) -> None:
    """Chats whole, completions as a stream, with what came in."""
    body = call.json
    assert body["model"] == "the-engines-own-name-for-it"
    if not body.get("stream"):
        message = {"role": "assistant", "content": "hello to you"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await call.write(whole_answer(json.dumps({"id": "c", "choices": [choice]}).encode()))
        return
    await call.start_events()
    for choice in ({"index": 0, "text": "hello "}, {"index": 0, "text": "you", "finish_reason": "stop"}):
        await call.chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
    await call.chunk(b"data: [DONE]\n\n")
    await call.end_chunks()


@pytest.mark.clause("SF-24")
async def test_the_page_on_chained_edges_works_as_it_is_written(tmp_path: Path) -> None:
    hello = {"model": "fast", "messages": [{"role": "user", "content": "hello"}]}
    async with asyncio.timeout(120), StubEngine(answer) as stub:
        ports = write_page(tmp_path, stub.port)
        host, _, port = ports["127.0.0.1:8080"].partition(":")

        async def ask() -> tuple[int, Any]:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return 0, None
            caller = RawCaller(reader, writer)
            await caller.send(post(hello))
            status, _, body = await caller.read_answer()
            await caller.close()
            return status, json.loads(body)

        async def is_answered() -> bool:
            return (await ask())[0] == 200

        with running(tmp_path):
            await eventually(is_answered, what="both Edges and both Nodes are up", within_s=90)
            _, body = await ask()
            assert body["choices"][0]["message"]["content"] == "hello to you"
            async with grpc.aio.insecure_channel(ports["127.0.0.1:9090"]) as channel:
                call = openengine_pb2_grpc.InferenceStub(channel).Generate(
                    generation_pb2.GenerateRequest(model="fast-tokens", prompt="hello"), timeout=30
                )
                messages = []
                while (message := await call.read()) is not grpc.aio.EOF:
                    messages.append(message)
            assert "".join(each.token.text for each in messages) == "hello you"
            assert messages[-1].finished.reason == generation_pb2.FINISH_REASON_STOP
