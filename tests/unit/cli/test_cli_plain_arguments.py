"""Role arguments read without Typer mean what they mean to Typer; all else is left to it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from iop.cli.plain_arguments import plain_arguments
from iop.cli.process_commands import ROLES


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("IOP_")]:
        monkeypatch.delenv(name)


def as_typer_reads(role: str, arguments: list[str]) -> dict[str, Any]:
    """What Typer calls the command with."""
    calls: list[dict[str, Any]] = []

    @functools.wraps(ROLES[role])
    def record(**options: Any) -> None:
        calls.append(options)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(record)
    app(arguments, standalone_mode=False)
    (call,) = calls
    return call


PLAIN = [
    ("up", []),
    ("up", ["--http", "127.0.0.1:0", "--ranks", "2", "--checkpoint", "a/b"]),
    ("up", ["--http=127.0.0.1:0", "--http", "[::1]:1", "--ready-file=x=y"]),
    ("edge", ["--config", "edge.yaml"]),
    ("edge", ["--log-level", "debug", "--config=./e.yaml", "--log-format=json", "--ready-file", "/r"]),
    ("node", ["--config", "node.yaml", "--log-level=warning"]),
    ("engine", []),
    ("engine", ["--no-run-file", "--ranks=4"]),
    ("engine", ["--no-run-file", "--run-file", "--config", "c"]),
]


@pytest.mark.parametrize(("role", "arguments"), PLAIN, ids=str)
def test_plain_arguments_mean_what_they_mean_to_typer(role: str, arguments: list[str]) -> None:
    read = plain_arguments(ROLES[role], arguments, os.environ)
    assert read is not None
    assert read == as_typer_reads(role, arguments)


@pytest.mark.parametrize("level", ["error", ""])
def test_variables_count_where_the_option_is_not_given(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("IOP_LOG_LEVEL", level)
    monkeypatch.setenv("IOP_LOG_FORMAT", "console")
    arguments = ["--config", "edge.yaml", "--log-format", "json"]
    read = plain_arguments(ROLES["edge"], arguments, os.environ)
    assert read == as_typer_reads("edge", arguments)
    assert read is not None
    assert (read["config"], read["log_level"].value) == (Path("edge.yaml"), level or "info")


@pytest.mark.parametrize(
    ("role", "arguments"),
    [
        ("edge", []),
        ("edge", ["--help"]),
        ("edge", ["--config"]),
        ("edge", ["--config", "--http"]),
        ("edge", ["--config", "e", "extra"]),
        ("edge", ["--config", "e", "--"]),
        ("edge", ["--config", "e", "--conf", "f"]),
        ("edge", ["--config", "e", "--log-level", "loud"]),
        ("edge", ["--config", "e", "--log-level", "INFO"]),
        ("node", []),
        ("node", ["command", "n1", "usage"]),
        ("engine", ["--ranks", "0"]),
        ("engine", ["--ranks", "two"]),
        ("engine", ["--run-file=yes"]),
    ],
    ids=str,
)
def test_anything_else_is_left_to_typer(role: str, arguments: list[str]) -> None:
    assert plain_arguments(ROLES[role], arguments, os.environ) is None
