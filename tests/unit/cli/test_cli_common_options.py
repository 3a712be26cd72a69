"""Options that several commands share: where they stand, and who is given what they said."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
import typer.main

from iop.cli import ops_options
from iop.cli.common_options import with_options
from iop.cli.main import build_app, run
from iop.cli.ops_options import OpsCall, asks_ops

COMMON = {
    "loud": (Annotated[bool, typer.Option("--loud")], False),
    "where": (Annotated[str | None, typer.Option("--where")], None),
}
OPS_OPTIONS = ["--json", "--target", "--token", "--tls-ca", "--tls-cert", "--tls-key"]


def invoke(command: Any, *arguments: str) -> None:
    app = typer.Typer()
    app.command()(command)
    app(arguments, standalone_mode=False)


def verb(
    _call: object, name: Annotated[str, typer.Argument()], times: Annotated[int, typer.Option("--times")] = 1
) -> None:
    """Do it."""


def test_a_command_has_its_own_options_first_and_is_documented_as_its_verb() -> None:
    app = typer.Typer()
    app.command()(with_options(COMMON, verb, lambda _own, _common: None))
    command = typer.main.get_command(app)
    assert [each.name for each in command.params[:4]] == ["name", "times", "loud", "where"]
    assert command.help == "Do it."


def test_own_and_common_values_come_apart() -> None:
    seen: list[dict[str, Any]] = []
    command = with_options(COMMON, verb, lambda *values: seen.extend(values))
    invoke(command, "it", "--where", "here", "--times", "3")
    assert seen == [{"name": "it", "times": 3}, {"loud": False, "where": "here"}]


def test_a_command_that_asks_ops_is_given_the_client_that_its_options_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []
    client = object()
    calls: list[tuple[OpsCall, str]] = []

    def ops_client(**options: Any) -> object:
        asked.append(options)
        return client

    monkeypatch.setattr(ops_options, "ops_client", ops_client)

    @asks_ops(role="operator")
    def command(call: OpsCall, what: Annotated[str, typer.Argument()]) -> None:
        calls.append((call, what))

    where = ("--target", "127.0.0.1:1", "--token", "none")
    invoke(command, "it", "--json", *where, "--tls-ca", "ca", "--tls-cert", "cert", "--tls-key", "key")
    assert asked == [
        {
            "target": "127.0.0.1:1",
            "token": "none",
            "role": "operator",
            "ca": Path("ca"),
            "certificate": Path("cert"),
            "key": Path("key"),
        }
    ]
    assert [(call.client, call.as_json, what) for call, what in calls] == [(client, True, "it")]


@pytest.mark.parametrize(
    "path",
    [
        ("status",),
        ("explain",),
        ("models",),
        ("config", "show"),
        ("config", "plan"),
        ("config", "apply"),
        ("node", "command"),
        ("session", "end"),
    ],
)
def test_every_command_that_asks_ops_ends_with_the_same_options(path: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(build_app(()))
    for name in path:
        command = command.commands[name]
    assert [each.opts[0] for each in command.params][-len(OPS_OPTIONS) :] == OPS_OPTIONS


def test_a_certificate_without_authorities_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IOP_HOME", str(tmp_path))
    assert run(["models", "--target", "127.0.0.1:1", "--tls-cert", "cert.pem"]) == 2
