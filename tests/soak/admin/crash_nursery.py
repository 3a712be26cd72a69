"""Processes made by forking one that has everything imported, ranks of engines too.

A process that is killed some hundred times over spends most of its life importing. One that is forked from a nursery
which did that once starts in a twentieth of the time, and dies of SIGKILL like any other: nothing of its state is
shared.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")

PR_SET_PDEATHSIG = 1


class Forked:
    """What tests use of a ``subprocess.Popen``, of a process that its nursery reaps."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it lives."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -signal.SIGKILL
        return None

    def send_signal(self, number: int) -> None:
        """To it, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Until it is gone; it was killed, so that is at once."""
        while (code := self.poll()) is None:
            os.sched_yield()
        return code


class Nursery:
    """Use as ``with``; whoever asked for processes ends them."""

    def __enter__(self) -> Nursery:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(THREADS, "1")},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def spawn(
        self, arguments: Sequence[str], *, variables: Mapping[str, str], directory: Path, log: Path
    ) -> Forked:
        """A process that runs ``iop`` with these arguments."""
        order = {
            "arguments": list(arguments),
            "variables": dict(variables),
            "directory": str(directory),
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()))


class ForkedRank:
    """What an engine uses of the ``subprocess.Popen`` of a rank."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _become_rank(command[-1], pass_fds)

    def poll(self) -> int | None:
        """None while it lives."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Until it ended."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _become_rank(setup: str, kept: Sequence[int]) -> None:
    """Leave the engine's process behind: its loop, its signals, its open files."""
    import iop.engine.rank

    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        asyncio.events._set_running_loop(None)
        first = 3
        for fd in sorted(kept):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, 1 << 16)
        sys.argv = ["rank", setup]
        iop.engine.rank.main()
    finally:
        os._exit(0)


def _become_part(order: Mapping[str, Any]) -> None:
    """Run ``iop`` in this process, which was just forked."""
    from iop.cli.main import main

    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        # Whoever ends the tests, however, ends the nursery; nothing of it outlives that.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd in (1, 2):
            os.dup2(output, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["directory"])
        os.environ.update(order["variables"])
        random.seed()
        sys.argv = ["iop", *order["arguments"]]
        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def _serve(orders: IO[bytes]) -> None:
    import crash_journal

    import iop.adapters.openai_compat
    import iop.adapters.openengine.control
    import iop.app.edge
    import iop.app.engine
    import iop.app.node
    import iop.engine.rank
    import iop.engine.ranks

    iop.app.edge.SqlJournal = crash_journal.DeadlyJournal  # type: ignore[attr-defined,misc]
    iop.app.engine.SqlJournal = crash_journal.DeadlyJournal  # type: ignore[attr-defined,misc]

    class Processes:
        Popen = ForkedRank
        DEVNULL = subprocess.DEVNULL

    iop.engine.ranks.subprocess = Processes  # type: ignore[attr-defined,assignment]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who ends is gone at once, and nobody's to wait for
    for line in iter(orders.readline, b""):
        pid = os.fork()
        if not pid:
            _become_part(json.loads(line))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer)
