"""The state directory and run.json."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from iop.app.home import RunFile, open_home, read_run_file, state_dir, write_private
from iop.core.errors import InvalidRequest

RUN = RunFile(
    addresses={"http": "127.0.0.1:8080", "admin": "127.0.0.1:9091"},
    engine={"http": "127.0.0.1:8000"},
    pids={"edge": 1},
    tokens={"viewer": "v-secret"},
)


@pytest.mark.parametrize(
    ("environment", "home"),
    [
        ({"IOP_HOME": "/a/b", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/iop"),
        ({"HOME": "/h"}, "/h/.local/state/iop"),
    ],
)
def test_the_state_directory_follows_the_documented_order(environment: dict[str, str], home: str) -> None:
    assert state_dir(environment) == Path(home)


def test_the_state_directory_is_for_this_user_only(tmp_path: Path) -> None:
    home = open_home({"IOP_HOME": str(tmp_path / "a" / "b")})
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


@pytest.mark.parametrize("tail", ["", "/below"])
def test_a_state_directory_that_cannot_be_used_is_named_with_the_fix(tmp_path: Path, tail: str) -> None:
    (tmp_path / "file").touch()
    home = f"{tmp_path}/file{tail}"
    with pytest.raises(InvalidRequest, match=f"{home} cannot be used .*Set IOP_HOME") as caught:
        open_home({"IOP_HOME": home})
    assert caught.value.status.exit_code == 2


def test_a_private_file_is_whole_and_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old, readable by all")
    path.chmod(0o644)
    write_private(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["run.json"]


def test_run_json_has_the_promised_shape(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_private(path, RUN.to_json(with_tokens=True))
    assert json.loads(path.read_text()) == {
        "version": 1,
        "http": "127.0.0.1:8080",
        "admin": "127.0.0.1:9091",
        "engine": {"http": "127.0.0.1:8000"},
        "pids": {"edge": 1},
        "tokens": {"viewer": "v-secret"},
    }
    assert read_run_file(path) == RUN


def test_tokens_stay_out_of_what_others_may_read() -> None:
    assert "v-secret" not in RUN.to_json(with_tokens=False)
    assert "v-secret" not in repr(RUN)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pids": 3}', '{"pids": {"edge": "x"}}'])
def test_an_unreadable_run_file_is_no_run_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    assert read_run_file(path) is None
    assert read_run_file(tmp_path / "gone.json") is None
