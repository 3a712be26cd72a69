"""`iop conformance` before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.cli.main import run


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IOP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.clause("AD-102")
def test_the_list_shows_each_check_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conformance", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 100
    assert any(line.startswith("AD-12-race ") and "64 callers" in line for line in lines)


def test_only_takes_checks_and_clauses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conformance", "--list", "--only", "AD-12-race", "--only", "AD-16"]) == 0
    assert {line.split()[0].rsplit("-", 1)[0][:5] for line in capsys.readouterr().out.splitlines()} == {
        "AD-12",
        "AD-16",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "AD-999"],
        ["--hook", "reboot=true"],
        ["--hook", "restart"],
        ["--checkpoint-a", "/a"],
        ["--token", "in-clear"],
    ],
)
def test_what_cannot_be_meant_is_exit_2(arguments: list[str]) -> None:
    assert run(["conformance", *arguments]) == 2


def test_a_server_that_is_not_there_is_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("iop.conformance.runner.REACHABLE_S", 0.2)
    assert run(["conformance", "--target", "127.0.0.1:1"]) == 1
    assert "NOT_REACHABLE" in capsys.readouterr().err
