"""The command line as a whole: exit codes, help, config check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from iop import __version__
from iop.cli import process_commands
from iop.cli.main import run
from iop.cli.output import print_error
from iop.core.errors import InvalidRequest, Unauthenticated


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IOP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["nonsense"], 2),
        (["admin", "pause", "--mode", "drain"], 2),
        (["admin", "pause", "--all", "--mode", "sideways"], 2),
        (["admin", "pause", "--all", "--model", "m", "--mode", "drain"], 2),
        (["admin", "resume"], 2),
        (["admin", "resume", "--epoch", "0"], 2),
        (["admin", "reconfigure", "--all"], 2),
        (["admin", "profile", "--token", "in-clear"], 2),
        (["admin", "profile", "--token", "env:NOT_SET_ANYWHERE"], 2),
        (["admin", "profile", "--token", "file:gone"], 2),
        (["admin", "profile", "--token", "viewer"], 2),
        (["admin", "profile", "--tls-ca", "gone.pem"], 2),
        (["admin", "profile", "--target", ""], 2),
        (["admin", "profile", "--target", "127.0.0.1"], 2),
        (["admin", "profile", "--target", "127.0.0.1:99999"], 2),
        (["status", "--target", "http://127.0.0.1:9092"], 2),
        (["admin", "flush", "--all", "--key", ""], 2),
        (["admin", "flush", "--all", "--expected-revision", "-1"], 2),
        (["admin", "flush", "--all", "--deadline-ms", "0"], 2),
        (["admin", "flush", "--all", "--kind", "everything"], 2),
        (["config", "check", "gone.yaml"], 2),
    ],
)
def test_exit_codes_before_anything_is_sent(arguments: list[str], code: int) -> None:
    assert run(arguments) == code


def test_a_server_that_is_not_there_is_exit_1_and_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["admin", "profile", "--target", "127.0.0.1:1", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["reason"]) == ("UNAVAILABLE", "UNREACHABLE")
    assert error["message"].startswith("Nobody answers at 127.0.0.1:1 ")
    assert error["message"].endswith("Start one with: iop up")


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("NO_CREDENTIAL", "--token file:PATH"),
        ("UNKNOWN_CREDENTIAL", "--target"),
        ("NOT_PAUSED", "--mode drain"),
        ("PARTIAL_GROUP", "--participant"),
        ("STALE_EPOCH", "iop admin profile"),
        ("REVISION_MISMATCH", "iop admin list"),
        ("IDEMPOTENCY_KEY_REUSED", "another --key"),
        ("MISSING_PERMISSION", None),
    ],
)
def test_a_refusal_over_a_credential_says_which_option_to_use(
    reason: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(Unauthenticated("Refused.", reason=reason), as_json=False)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"error: Refused. (UNAUTHENTICATED, {reason})"
    assert [hint in line for line in rest if hint] == [True] * (hint is not None)
    assert len(rest) == (hint is not None)


def test_a_refusal_that_names_a_field_comes_with_the_option_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    field = {"field": "weight_retention"}
    print_error(InvalidRequest("required", reason="INVALID_FIELD", details=field), as_json=False)
    assert "--retention offload" in capsys.readouterr().err


def test_version_and_help_teach(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--version"])
    assert capsys.readouterr().out == f"iop {__version__}\n"
    run(["admin", "pause", "--help"])
    shown = capsys.readouterr().out
    assert "Example: iop admin pause --all --mode drain --admission queue" in shown
    run(["--help"])
    assert "Exit codes: 0 done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("edge.yaml", "", "edge"),
        ("a.yaml", "listen: {http: null}", "edge"),
        ("b.yaml", "edge: 127.0.0.1:7070\nnode: a\ntoken: env:PATH\n", "node"),
        ("engine.yaml", "", "engine"),
        ("c.yaml", "ranks: 4", "engine"),
    ],
)
def test_config_check_tells_the_kind_and_every_value_with_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, kind: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert run(["config", "check", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["valid"], shown["kind"]) == (True, kind)
    assert all(row["key"] and row["origin"] for row in shown["values"])


def test_config_check_lists_all_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "edge.yaml"
    file.write_text("listen: {htttp: 1}\nheartbeat: {interval_sec: x}\n")
    assert run(["config", "check", str(file), "--json"]) == 2
    written = capsys.readouterr()
    problems = json.loads(written.out)["error"]["problems"]
    assert [problem["key"] for problem in problems] == ["listen.htttp", "heartbeat.interval_sec"]
    assert all(problem["fix"] for problem in problems)
    assert "edge.yaml:1: listen.htttp" in written.err


def test_tables_keep_one_line_per_row_however_narrow_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    file = tmp_path / "edge.yaml"
    file.write_text("")
    assert run(["config", "check", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["limits.total_timeout_sec", "3600", "default"] for line in lines)


@pytest.mark.parametrize("is_json", [True, False])
def test_a_warning_of_a_role_stands_in_its_log_as_a_line_like_all_others(
    is_json: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Bare text among JSON objects breaks whoever parses the log."""
    monkeypatch.setattr(process_commands, "configure_logging", lambda **_options: None)
    fmt = process_commands._Format.JSON if is_json else process_commands._Format.CONSOLE
    warn = process_commands._logs("edge", fmt, process_commands._Level.INFO)
    warn("the admin listener refuses everybody")
    logged = [vars(record)["reason"] for record in caplog.records if record.message == "config.warned"]
    told = capsys.readouterr().err
    if is_json:
        assert (logged, told) == (["the admin listener refuses everybody"], "")
    else:
        assert (logged, told) == ([], "warning: the admin listener refuses everybody\n")
