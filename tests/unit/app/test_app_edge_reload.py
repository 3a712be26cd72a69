"""Planning and taking a changed config: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from iop.app.edge_reload import ConfigKeeper
from iop.config import ConfigInvalid, EdgeConfig
from iop.core.errors import InvalidRequest

OLD = "heartbeat: {interval_sec: 1, timeout_sec: 3}\n"
NEW = "heartbeat: {interval_sec: 2, timeout_sec: 5}\n"


class Taken:
    """Remembers what was taken; refuses when told to."""

    def __init__(self) -> None:
        self.revisions: list[int] = []
        self.refuses = False

    def __call__(self, config: EdgeConfig, revision: int) -> None:
        if self.refuses:
            raise InvalidRequest("no")
        assert config.heartbeat.timeout_sec > config.heartbeat.interval_sec
        self.revisions.append(revision)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "edge.yaml"
    path.write_text(OLD)
    return path


@pytest.fixture
def taken() -> Taken:
    return Taken()


@pytest.fixture
def keeper(file: Path, taken: Taken) -> ConfigKeeper:
    keeper = ConfigKeeper(file, flags={"listen.http": ("127.0.0.1:0", "--http")})
    keeper.attach(taken)
    return keeper


def test_problems_of_a_proposed_config_are_told_at_its_own_name(keeper: ConfigKeeper, file: Path) -> None:
    """The line is one of the proposal's: under the name of the Edge's own file it would lead astray."""
    with pytest.raises(ConfigInvalid) as found:
        keeper.plan("heartbeat: {intervall: 2}\n", name="next/edge.yaml")
    assert {problem.where for problem in found.value.problems} == {"next/edge.yaml:1"}
    with pytest.raises(ConfigInvalid) as found:
        keeper.plan("heartbeat: {intervall: 2}\n")
    assert {problem.where for problem in found.value.problems} == {f"{file}:1"}


@pytest.mark.clause("EN-114")
def test_a_plan_changes_nothing_and_names_what_would(keeper: ConfigKeeper, taken: Taken) -> None:
    plan = keeper.plan(NEW)
    assert [change.key for change in plan.changes] == ["heartbeat.interval_sec", "heartbeat.timeout_sec"]
    assert plan.needs_restart == ()
    assert keeper.plan(NEW + "listen: {ops: null}\nlimits: {total_timeout_sec: 5}\n").needs_restart == (
        "listen.ops",
    )
    assert (keeper.revision, taken.revisions) == (1, [])
    assert str(keeper.loaded.config.listen.http) == "127.0.0.1:0", "flags stay above the file"


@pytest.mark.clause("EN-114")
def test_what_is_taken_gets_the_next_number_and_the_same_again_does_not(
    keeper: ConfigKeeper, taken: Taken
) -> None:
    assert keeper.take(keeper.plan(NEW)) == 2
    assert keeper.take(keeper.plan(NEW)) == 2
    assert keeper.take(keeper.plan(OLD)) == 3
    assert taken.revisions == [2, 3]


@pytest.mark.clause("EN-114")
def test_what_is_wrong_or_refused_leaves_the_running_one_whole(
    keeper: ConfigKeeper, taken: Taken, file: Path
) -> None:
    running = keeper.loaded
    with pytest.raises(ConfigInvalid):
        keeper.plan("heartbeat: {interval_sec: soon}")
    taken.refuses = True
    with pytest.raises(InvalidRequest):
        keeper.take(keeper.plan(NEW))
    file.write_text("nonsense: 1\n")
    keeper.reload()
    assert (keeper.loaded, keeper.revision) == (running, 1)


def test_an_applied_config_is_kept_in_the_file(keeper: ConfigKeeper, file: Path, taken: Taken) -> None:
    assert keeper.persist(NEW) == ""
    assert file.read_text() == NEW
    keeper.reload()
    assert taken.revisions == [2]
