"""Where a command sends its call, and which credential goes along."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.app.home import RunFile, write_private
from iop.cli.targets import find_endpoint
from iop.core.errors import InvalidRequest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("IOP_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run_file(home: Path) -> None:
    run = RunFile(
        addresses={"admin": "127.0.0.1:1", "ops": "127.0.0.1:2"},
        engine={"admin": "127.0.0.1:3"},
        pids={"edge": 1},
        tokens={"viewer": "v", "operator": "o", "admin": "a"},
    )
    write_private(home / "run.json", run.to_json(with_tokens=True))


@pytest.mark.usefixtures("run_file")
def test_what_runs_here_is_found_with_the_token_of_the_role() -> None:
    endpoint = find_endpoint("admin", target=None, token=None, role="operator")
    assert (endpoint.address, endpoint.token) == ("127.0.0.1:1", "o")
    engine = find_endpoint("admin", target="127.0.0.1:3", token=None, role="admin")
    assert (engine.address, engine.token) == ("127.0.0.1:3", "a")


@pytest.mark.usefixtures("run_file")
def test_a_development_token_never_goes_to_another_server() -> None:
    endpoint = find_endpoint("admin", target="elsewhere.example:9091", token=None, role="operator")
    assert endpoint.token is None


@pytest.mark.usefixtures("home")
def test_without_a_run_file_the_default_address_is_asked_without_token() -> None:
    assert find_endpoint("admin", target=None, token=None, role="admin").address == "127.0.0.1:9091"
    assert find_endpoint("ops", target=None, token=None, role="viewer").address == "127.0.0.1:9092"


def test_an_engine_by_itself_is_found_too(home: Path) -> None:
    run = RunFile(addresses={"admin": "127.0.0.1:8"}, pids={"engine": 1}, tokens={"operator": "eo"})
    write_private(home / "engine.json", run.to_json(with_tokens=True))
    endpoint = find_endpoint("admin", target=None, token=None, role="operator")
    assert (endpoint.address, endpoint.token) == ("127.0.0.1:8", "eo")


@pytest.mark.usefixtures("run_file")
def test_token_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "from-env")
    (tmp_path / "t").write_text("from-file\n")

    def token(reference: str) -> str | None:
        return find_endpoint("admin", target=None, token=reference, role="operator").token

    assert token("none") is None
    assert token("viewer") == "v"
    assert token("env:MY_TOKEN") == "from-env"
    assert token(f"file:{tmp_path / 't'}") == "from-file"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"a\x00b")
    monkeypatch.setenv("MY_EMPTY", " ")
    for reference in (
        "env:NOT_SET_ANYWHERE",
        "env:MY_EMPTY",
        f"file:{tmp_path / 'gone'}",
        f"file:{tmp_path / 'empty'}",
        f"file:{tmp_path / 'binary'}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            token(reference)
        assert caught.value.status.exit_code == 2, "a wrong command line, not a refusal of the server's"


@pytest.mark.usefixtures("run_file")
def test_a_token_in_clear_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidRequest, match="by reference") as caught:
        find_endpoint("admin", target=None, token="hunter2-in-clear", role="operator")
    assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("run_file")
def test_endpoints_hide_their_token() -> None:
    assert "o'" not in repr(find_endpoint("admin", target=None, token=None, role="operator"))
