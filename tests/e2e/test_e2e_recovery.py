"""Edge and Node as separate processes with their own configs: start order, crash, recovery, reload."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_fleet import eventually, iop

from iop.testing.waiting import free_ports

pytestmark = pytest.mark.slow

ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "real",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    }
).encode()


class _Upstream(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(b'{"object": "list", "data": [{"id": "real", "object": "model"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(ANSWER)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


class Part:
    """One ``iop edge`` or ``iop node``."""

    def __init__(self, role: str, directory: Path) -> None:
        self._ready = directory / f"{role}.ready"
        self.log = directory / f"{role}.log"
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "iop.cli", role),
                    *("--config", str(directory / f"{role}.yaml"), "--ready-file", str(self._ready)),
                ],
                env={**os.environ, "IOP_HOME": str(directory)},
                stdout=output,
                stderr=output,
            )

    def facts(self) -> dict[str, Any]:
        """What it announced, once it is ready."""
        eventually(lambda: self._ready.exists() or self.process.poll() is not None, "the part is ready")
        assert self.process.poll() is None, self.log.read_text()
        facts: dict[str, Any] = json.loads(self._ready.read_text())
        return facts

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self.process.wait()
        self._ready.unlink(missing_ok=True)


def write_configs(directory: Path, upstream: str, models: str = "public") -> tuple[str, str]:
    """edge.yaml and node.yaml on fixed ports; returns the addresses of http and ops."""
    ports = directory / "ports"
    if not ports.exists():
        ports.write_text(json.dumps(free_ports(3)))
    http_port, ops_port, nodes_port = json.loads(ports.read_text())
    (directory / "node.token").write_text("node-secret")
    (directory / "viewer.token").write_text("viewer-secret")
    (directory / "admin.token").write_text("admin-secret")
    (directory / "edge.yaml").write_text(
        f"""
listen: {{http: "127.0.0.1:{http_port}", ops: "127.0.0.1:{ops_port}", nodes: "127.0.0.1:{nodes_port}",
  admin: null, openengine: null}}
admin: {{principals: [{{name: viewer, token: "file:viewer.token", role: viewer}},
  {{name: admin, token: "file:admin.token", role: admin}}]}}
nodes:
  - id: n
    token: file:node.token
    adapters: [{{name: a, type: openai_compat, endpoint: "{upstream}"}}]
models:
  - {{id: {models}, providers: [{{node: n, adapter: a, target: real}}]}}
"""
    )
    (directory / "node.yaml").write_text(
        f"edge: 127.0.0.1:{nodes_port}\nnode: n\ntoken: file:node.token\n"
        "reconnect: {interval_sec: 0.2, max_attempts: 0}\n"
    )
    return f"127.0.0.1:{http_port}", f"127.0.0.1:{ops_port}"


def chat(address: str, model: str = "public") -> tuple[int, bytes]:
    """One request; its status and body."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.clause("EN-20", "EN-21", "EN-25", "EN-12", "EN-32")
def test_a_node_outlives_its_edge_and_serves_again_without_a_restart(tmp_path: Path, upstream: str) -> None:
    address, _ = write_configs(tmp_path, upstream)
    node = Part("node", tmp_path)
    edge = None
    try:
        # The Node starts first, with nobody to dial.
        eventually(lambda: "link.waiting" in node.log.read_text(), "the Node waits for its Edge")
        edge = Part("edge", tmp_path)
        edge.facts()
        node.facts()
        assert chat(address) == (200, ANSWER)

        edge.kill()
        edge = Part("edge", tmp_path)
        edge.facts()
        # The first request after the Edge is back may wait for the Node's return; it is served, not refused.
        assert chat(address) == (200, ANSWER)
        assert node.process.poll() is None
    finally:
        for part in (node, edge):
            if part is not None:
                part.process.terminate()
                part.process.wait(timeout=30)
    assert node.process.returncode == 0


@pytest.mark.clause("EN-114")
def test_a_changed_config_is_taken_whole_on_sighup_and_a_wrong_one_refused_whole(
    tmp_path: Path, upstream: str
) -> None:
    address, _ = write_configs(tmp_path, upstream)
    with contextlib.ExitStack() as stack:
        edge, node = Part("edge", tmp_path), Part("node", tmp_path)
        for part in (edge, node):
            stack.callback(part.process.wait, 30)
            stack.callback(part.process.terminate)
        edge.facts()
        node.facts()
        write_configs(tmp_path, upstream, models="renamed")
        edge.process.send_signal(signal.SIGHUP)
        eventually(lambda: chat(address, "renamed")[0] == 200, "the new model is served")
        assert chat(address, "public")[0] == 404

        (tmp_path / "edge.yaml").write_text("models: [{id: broken}]\n")
        edge.process.send_signal(signal.SIGHUP)
        eventually(lambda: "config.refused" in edge.log.read_text(), "the refusal is logged")
        assert "models[0].providers: is required" in edge.log.read_text()
        assert chat(address, "renamed") == (200, ANSWER)


@pytest.mark.clause("EN-114", "EN-80")
def test_a_config_is_planned_applied_and_kept_by_command(tmp_path: Path, upstream: str) -> None:
    address, ops = write_configs(tmp_path, upstream)
    changed = tmp_path / "changed.yaml"

    def config(*arguments: str, token: str = "admin") -> subprocess.CompletedProcess[str]:
        where = ("--target", ops, "--token", f"file:{tmp_path / f'{token}.token'}", "--json")
        return iop("config", *arguments, *where, home=tmp_path)

    with contextlib.ExitStack() as stack:
        edge, node = Part("edge", tmp_path), Part("node", tmp_path)
        for part in (edge, node):
            stack.callback(part.process.wait, 30)
            stack.callback(part.process.terminate)
        edge.facts()
        node.facts()
        text = (tmp_path / "edge.yaml").read_text()
        changed.write_text(
            text.replace("id: public", "id: renamed").replace("name: a,", "name: a, capacity: 3,")
        )

        planned = json.loads(config("plan", str(changed)).stdout)
        keys = {change["key"] for change in planned["changes"]}
        assert "nodes[n].adapters[a].capacity" in keys
        assert planned["needs_restart"] == []
        assert chat(address)[0] == 200, "a plan changes nothing"

        assert config("apply", str(changed), token="viewer").returncode == 3
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text("models: [{id: broken}]\n")
        refused = config("apply", str(wrong))
        assert refused.returncode == 2
        assert json.loads(refused.stdout)["error"]["problems"][0]["key"] == "models[0].providers"
        assert chat(address)[0] == 200, "a wrong one is refused whole"

        applied = json.loads(config("apply", str(changed)).stdout)
        assert applied["revision"] == 2
        assert [(item["id"], item["config_revision"]) for item in applied["nodes"]] == [("n", 2)]
        assert applied["not_persisted"] == ""
        assert chat(address, "renamed") == (200, ANSWER)
        assert chat(address)[0] == 404
        assert (tmp_path / "edge.yaml").read_text() == changed.read_text()
