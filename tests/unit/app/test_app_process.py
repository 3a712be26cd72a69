"""One process around one role: signals, ready file, reports, orphans. Real processes, scripted roles."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, sys
from pathlib import Path
from iop.app.process import run_role
from iop.core.errors import IopError, Unavailable

kind, ready = sys.argv[1], Path(sys.argv[2])

async def role(process):
    if kind == "fail":
        raise Unavailable("the port is taken")
    if kind == "no-file":
        open(str(ready) + ".gone/x")
    if kind == "bug":
        raise OSError("no file is to blame")
    if kind == "slow-start":
        Path(str(ready) + ".begun").touch()
        await asyncio.sleep(600)
    process.announce({"http": "127.0.0.1:1"})
    await process.stopping.wait()
    if kind == "stuck":
        Path(str(ready) + ".stopping").touch()
        await asyncio.sleep(600)
    return 7

try:
    sys.exit(run_role(lambda: role, ready_file=ready))
except IopError as error:
    print(error.message, file=sys.stderr)
    sys.exit(error.status.exit_code)
"""


def eventually(check: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[bytes]] = []

    def begin(kind: str, ready: Path, **more: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, str(ready)],
            stderr=subprocess.PIPE,
            **more,  # type: ignore[call-overload]
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_gracefully_and_the_ready_file_goes(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    ready = tmp_path / "ready"
    process = start("serve", ready)
    eventually(ready.exists, "never ready")
    assert json.loads(ready.read_text()) == {"http": "127.0.0.1:1"}
    process.send_signal(number)
    assert process.wait(timeout=60) == 7
    assert not ready.exists()


@pytest.mark.slow
def test_the_second_signal_ends_a_stuck_role_at_once(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start("stuck", ready)
    eventually(ready.exists, "never ready")
    process.send_signal(signal.SIGTERM)
    eventually(Path(f"{ready}.stopping").exists, "the first signal did not arrive")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert not ready.exists(), "nobody may take a dead process for a ready one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ready", "code", "words"),
    [
        ("serve", "gone/ready", 2, "The ready file"),
        ("serve", ".", 2, "The ready file"),
        ("no-file", "ready", 1, "cannot be used: No such file or directory"),
    ],
)
def test_a_file_that_the_system_refuses_is_one_line_and_no_traceback(
    start: Start, tmp_path: Path, kind: str, ready: str, code: int, words: str
) -> None:
    process = start(kind, tmp_path / ready)
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == code
    assert words in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_bug_keeps_its_traceback(start: Start, tmp_path: Path) -> None:
    process = start("bug", tmp_path / "ready")
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert "Traceback" in said


@pytest.mark.slow
def test_a_signal_during_the_start_cancels_it(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = start("slow-start", ready)
    eventually(Path(f"{ready}.begun").exists, "never began")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0


@pytest.mark.slow
def test_a_failure_reaches_the_caller_and_the_parent(start: Start, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    process = start(
        "fail",
        tmp_path / "ready",
        pass_fds=(write_end,),
        env={**os.environ, "IOP_PARENT_REPORT_FD": str(write_end)},
    )
    os.close(write_end)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.decode().strip() == "the port is taken"
    with os.fdopen(read_end) as report:
        assert json.loads(report.read()) == {"error": "the port is taken", "exit_code": 1}


@pytest.mark.slow
def test_a_role_whose_parent_is_gone_stops(start: Start, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    ready = tmp_path / "ready"
    process = start(
        "serve", ready, pass_fds=(read_end,), env={**os.environ, "IOP_PARENT_LIFE_FD": str(read_end)}
    )
    os.close(read_end)
    eventually(ready.exists, "never ready")
    os.close(write_end)
    assert process.wait(timeout=60) == 7


@pytest.mark.slow
async def test_a_part_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    from iop.app.part import Part, PartFailed

    part = Part("edge", ["edge", "--config", str(tmp_path / "gone.yaml")], log=tmp_path / "edge.log")
    await part.start(os.environ)
    with pytest.raises(PartFailed, match=r"gone\.yaml: cannot be read") as caught:
        await part.ready(20)
    assert caught.value.exit_code == 2
    async with asyncio.timeout(60):
        assert await part.wait() == 2
    await part.stop(1)
