"""``iop up`` starts everything, and leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path

import openai
import psutil
import pytest
from e2e_fleet import STORY, UP_FLAGS, alive, eventually, iop, running_fleet

pytestmark = pytest.mark.slow


def test_up_says_what_to_try_writes_run_json_and_stops_cleanly(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running_fleet(home) as fleet:
        run_file = home / "run.json"
        assert stat.S_IMODE(run_file.stat().st_mode) == 0o600
        assert set(fleet.run) == {
            "version",
            "http",
            "openengine",
            "admin",
            "ops",
            "nodes",
            "engine",
            "pids",
            "tokens",
        }
        assert set(fleet.run["engine"]) == {"http", "openengine", "admin"}
        assert set(fleet.run["tokens"]) == {"viewer", "operator", "admin"}
        ready = json.loads((home / "ready.json").read_text())
        assert "tokens" not in ready
        assert not any(
            token in (home / "up" / "edge.yaml").read_text() for token in fleet.run["tokens"].values()
        )
        said = (home / "up.out").read_text()
        assert f"http://{fleet.run['http']}/v1/chat/completions" in said
        assert "from openai import OpenAI" in said
        assert "admin pause --all --mode drain" in said

        second = iop("up", *UP_FLAGS, home=home)
        assert second.returncode == 1
        assert "runs already" in second.stderr

        started = fleet.processes()
        assert len(started) >= 6, "the parent, three parts and two ranks"
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(timeout=60) == 0
        assert "stopping: running answers may finish" in (home / "up.out").read_text()
        assert alive(started) == []
        assert not run_file.exists()
        assert not (home / "ready.json").exists()


@pytest.mark.parametrize("part", ["edge", "node", "engine", "rank"])
def test_when_one_part_is_killed_all_end_with_a_message_and_exit_code_1(tmp_path: Path, part: str) -> None:
    with running_fleet(tmp_path / "home") as fleet:
        started = fleet.processes()
        if part == "rank":
            victim = psutil.Process(fleet.run["pids"]["engine"]).children()[0].pid
        else:
            victim = fleet.run["pids"][part]
        os.kill(victim, signal.SIGKILL)
        assert fleet.process.wait(timeout=60) == 1
        # Ranks whose engine was killed end by themselves, which nobody waits for.
        eventually(lambda: alive(started) == [], "every part is gone")
        said = (tmp_path / "home" / "up.out").read_text()
        assert f"{'engine' if part == 'rank' else part} ended by itself" in said
        assert "all other parts have been stopped" in said


def test_when_the_parent_is_killed_nothing_outlives_it(tmp_path: Path) -> None:
    with running_fleet(tmp_path / "home") as fleet:
        started = fleet.processes()
        fleet.process.kill()
        fleet.process.wait()
        eventually(lambda: alive(started) == [], "every part is gone")


@pytest.mark.case("P-25")
@pytest.mark.clause("AD-26", "AD-35")
def test_a_pause_outlives_a_restart_of_everything_and_its_epoch_still_ends_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with running_fleet(home) as fleet:
        epoch = fleet.admin("pause", "--all", "--mode", "drain")["result"]["pause"]["pause_epoch"]
    with running_fleet(home) as fleet:
        assert "Paused since an earlier run: iop-tiny" in (home / "up.out").read_text()
        profile = fleet.admin("profile")
        assert [pause["pause_epoch"] for pause in profile["pauses"]] == [epoch]
        assert {participant["state"] for participant in profile["participants"]} == {"PAUSED"}
        fleet.admin("resume", "--epoch", str(epoch))
        client = openai.OpenAI(base_url=fleet.base_url, api_key="none", max_retries=0, timeout=60)
        answer = client.chat.completions.create(model="iop-tiny", messages=STORY, max_tokens=3)  # type: ignore[arg-type]
        assert answer.choices[0].message.content
