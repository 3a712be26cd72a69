"""What goes wrong at the start: each a clear message and exit code, and nothing hangs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from e2e_fleet import ANY, UP_FLAGS, iop

from iop.testing.waiting import free_ports

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("command", [("config", "check"), ("edge", "--config")])
def test_a_wrong_config_key_is_named_with_its_line_and_fix(tmp_path: Path, command: tuple[str, str]) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text("listen:\n  htttp: 127.0.0.1:0\n")
    done = iop(*command, str(file), home=tmp_path)
    assert done.returncode == 2
    assert "edge.yaml:2: listen.htttp: unknown key. Write http" in done.stderr


@pytest.mark.parametrize(
    "flag", ["http", "openengine", "admin", "ops", "nodes", "engine-http", "engine-admin"]
)
def test_a_taken_port_is_named_by_address_and_listener(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = iop("up", *UP_FLAGS, f"--{flag}", address, home=tmp_path)
    assert done.returncode == 1
    assert f"Cannot listen on {address} ({flag})" in done.stderr
    assert not (tmp_path / "run.json").exists()


def test_a_part_names_its_taken_port_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = iop("engine", "--http", address, "--openengine", ANY, "--admin", ANY, home=tmp_path)
    assert done.returncode == 1
    assert f"Cannot listen on {address} (http): another process has that address" in done.stderr
    assert not (tmp_path / "engine.json").exists()


@pytest.mark.clause("EN-23", "EN-24")
def test_an_unreachable_edge_uses_up_the_budget_and_exits_with_1(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "node.token").write_text("secret")
    (tmp_path / "node.yaml").write_text(
        f"edge: 127.0.0.1:{port}\nnode: a\ntoken: file:node.token\nreconnect: {{interval_sec: 0, max_attempts: 2}}\n"
    )
    done = iop("node", "--config", str(tmp_path / "node.yaml"), home=tmp_path)
    assert done.returncode == 1
    assert "Edge" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    "command", [("engine", "--http", ANY, "--openengine", ANY, "--admin", ANY), ("up", *UP_FLAGS)]
)
def test_a_missing_checkpoint_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = iop(*command, "--checkpoint", str(tmp_path / "gone"), home=tmp_path)
    assert done.returncode == 2
    assert f"Cannot load the checkpoint {tmp_path / 'gone'}" in done.stderr


@pytest.mark.clause("AD-02")
def test_equal_addresses_for_admin_and_inference_are_refused(tmp_path: Path) -> None:
    done = iop("engine", "--openengine", "127.0.0.1:9999", "--admin", "127.0.0.1:9999", home=tmp_path)
    assert done.returncode == 2
    assert "listen.admin: 127.0.0.1:9999 is also the address of listen.openengine" in done.stderr


def test_status_of_nothing_says_how_to_start(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    done = iop("status", "--target", f"127.0.0.1:{port}", home=tmp_path)
    assert done.returncode == 1
    assert "iop up" in done.stderr
