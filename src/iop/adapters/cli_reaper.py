"""Runs one command so that nothing of it outlives the run. Started as a script of its own; standard library
only.

    python -I -S cli_reaper.py GRACE_S COMMAND [ARGUMENT ...]

It makes itself the reaper of all its descendants (Linux: a child subreaper), so that processes which fork
twice, start new sessions or lose their parent come back to it instead of to init. When the command has
ended, when it is told to end (SIGTERM), and when whoever started it dies, it ends every descendant: first
politely, then, after the grace, for good, over and over until there is none. Its exit code is the command's.

Why a process of its own: one Node runs many agents, and orphans of one could not be told from those of
another; and a Node that is killed cannot clean up after itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

POLL_S = 0.01
"""How often it looks whether anybody is left while it ends them."""

NOT_STARTED = 127
"""Exit code when the command cannot be started, as shells have it."""


def main(arguments: list[str]) -> int:
    """Run to the end of the last descendant."""
    grace_s = float(arguments[0])
    parent = os.getppid()
    _adopt_orphans()
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    if os.getppid() != parent:
        return NOT_STARTED
    _close_what_was_left_open()
    try:
        # The session of its own lets the polite signal reach the whole group.
        child = subprocess.Popen(arguments[1:], start_new_session=True)  # noqa: S603 - the config's own command
    except OSError as exc:
        sys.stderr.write(f"cannot start: {exc.strerror}\n")
        return NOT_STARTED
    # Ours must not hold the pipes open: the reader would wait for us instead of for the command.
    for descriptor in (0, 1):
        os.close(descriptor)
    code = _wait(child, asked)
    _end_all(child.pid, 0.0 if code is not None and not asked else grace_s)
    if code is None:
        code = child.poll()
    return 128 - code if code is not None and code < 0 else code or 0


def _adopt_orphans() -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _close_what_was_left_open() -> None:
    """Some event loops leave us a second handle on the command's output, which would hold its end back."""
    try:
        # One of these is the listing's own, and closed by now.
        left = [int(name) for name in os.listdir("/dev/fd") if name.isdigit()]  # noqa: PTH208 - as below
    except OSError:
        return
    for descriptor in left:
        if descriptor > 2:
            try:
                os.close(descriptor)
            except OSError:
                pass


def _wait(child: subprocess.Popen[bytes], asked: list[bool]) -> int | None:
    """The command's exit code, or None when we were asked to end it first."""
    delay_s = 0.001
    while not asked:
        code = child.poll()
        if code is not None:
            return code
        time.sleep(delay_s)
        delay_s = min(0.05, delay_s * 2)
    return None


def _end_all(group: int, grace_s: float) -> None:
    if grace_s > 0:
        try:
            os.killpg(group, signal.SIGTERM)
        except OSError:
            pass
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and _has_children():
            time.sleep(POLL_S)
    while True:
        victims = _descendants()
        # Stop all before killing any, so that none forks while the others die.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass
        if not _has_children():
            return
        time.sleep(POLL_S)


def _has_children() -> bool:
    """Collect the dead; whether a living child is left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _descendants() -> list[int]:
    """All processes below us, by their parents."""
    children: dict[int, list[int]] = {}
    try:
        entries = os.listdir("/proc")  # noqa: PTH208 - no imports that cost start-up time
    except OSError:
        return []
    for name in entries:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - no imports that cost start-up time
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[:1] != [b"Z"]:
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
