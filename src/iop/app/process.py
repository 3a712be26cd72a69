"""One process around one role: loop, signals, parent, ready file, exit code.

A role is an async function that gets a :class:`Process`: it calls ``announce`` once it serves, waits for
``stopping``, and returns when nothing of it runs. The first SIGINT or SIGTERM sets ``stopping``, or cancels
a role that does not yet serve; the second ends the process at once.

A parent that supervises several roles passes two descriptors. Its end of the *life line* closes when it
dies, whatever way, and the role then stops in a hurry. On the *report line* the role tells as JSON that it
is ready, or why it failed, so that the parent need not parse logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from iop.app.home import write_private
from iop.core.errors import InvalidRequest, IopError, Unavailable

__all__ = ["LIFE_VARIABLE", "REPORT_VARIABLE", "Process", "ProcessClock", "run_role"]

LIFE_VARIABLE: Final = "IOP_PARENT_LIFE_FD"
REPORT_VARIABLE: Final = "IOP_PARENT_REPORT_FD"

ORPHAN_GRACE_S: Final = 5.0
"""How long a role whose parent died may take to stop. Longer leaves strays; shorter cuts the store's last
write.
"""

GC_THRESHOLDS: Final = (20_000, 5, 5)
"""A request leaves some fifty objects in cycles, so the young are searched every 400 requests, the old every 10,000.
Larger holds more garbage: what outlived two searches, as a long stream does, waits for the third kind at 8 KiB each.
Smaller searches more.
"""

EXIT_AT_ONCE: Final = 130
"""Exit code after a second signal, as shells have it for SIGINT."""

_PR_SET_PDEATHSIG: Final = 1

_log = logging.getLogger(__name__)


class ProcessClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()

    def unix_nanos(self) -> int:
        """Wall time in nanoseconds since 1970."""
        return time.time_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What a role sees of the process around it.

    Attributes:
        stopping: set when the role must stop gracefully.
        announce: tells that the role serves, with what programs may know about it (addresses and the like).
        before_kill: takes what to do, without waiting, before a second signal ends the process.
    """

    stopping: asyncio.Event
    announce: Callable[[Mapping[str, Any]], None]
    before_kill: Callable[[Callable[[], None]], None]


Role = Callable[[Process], Awaitable[int]]


def run_role(prepare: Callable[[], Role], *, ready_file: Path | None = None) -> int:
    """Make a role, run it until it ends, and return the exit code.

    Args:
        prepare: makes the role: reads its config and the like; may raise IopError.
        ready_file: written when the role announces itself, removed when it ends.

    Raises:
        IopError: what went wrong, for the caller to print. A supervising parent has been told already.
    """
    report_fd = _descriptor(REPORT_VARIABLE)
    life_fd = _descriptor(LIFE_VARIABLE)
    if life_fd is not None:
        _die_with_parent()

    def remove_ready_file() -> None:
        if ready_file is not None:
            with contextlib.suppress(OSError):
                ready_file.unlink(missing_ok=True)

    def announce(facts: Mapping[str, Any]) -> None:
        if ready_file is not None:
            write_private(ready_file, json.dumps(facts) + "\n")
        _report(report_fd, {"ready": facts})

    is_announced = False

    def announce_once(facts: Mapping[str, Any]) -> None:
        nonlocal is_announced
        is_announced = True
        _calm_collector()
        announce(facts)

    async def main(role: Role) -> int:
        stopping = asyncio.Event()
        hooks: list[Callable[[], None]] = [remove_ready_file]
        process = Process(stopping=stopping, announce=announce_once, before_kill=hooks.append)
        with _signals(stopping, hooks), _life_line(life_fd, stopping):
            try:
                async with asyncio.TaskGroup() as tasks:
                    work = tasks.create_task(_as_coroutine(role, process), name="role")

                    async def cancel_unready() -> None:
                        await stopping.wait()
                        if not is_announced:
                            work.cancel()

                    watcher = tasks.create_task(cancel_unready(), name="process-start-watch")
                    work.add_done_callback(lambda _: watcher.cancel())
            except BaseExceptionGroup as group:
                alone = _only_iop_error(group) or _unusable_file(group)
                if alone is None:
                    raise
                raise alone from group
            return 0 if work.cancelled() else work.result()

    try:
        if ready_file is not None:
            _check_ready_file(ready_file)
        role = prepare()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main(role))
    except IopError as error:
        _report(report_fd, {"error": error.message, "exit_code": error.status.exit_code})
        raise
    finally:
        remove_ready_file()


def _check_ready_file(path: Path) -> None:
    """Find out before the start, not after it, and take a stale one away.

    Raises:
        InvalidRequest: it could not be written.
    """
    try:
        path.unlink(missing_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise FileNotFoundError(errno.ENOENT, "its directory does not exist, or cannot be written")
    except OSError as error:
        raise InvalidRequest(
            f"The ready file {path} cannot be written ({error.strerror}). Give another path.",
            reason="READY_FILE",
        ) from None


def _calm_collector() -> None:
    """Spare what lives as long as the process from every collection, and collect less often.

    The relay path makes some two hundred objects per request and nearly all die by their reference count.
    With the interpreter's default thresholds the search for cycles takes a fifth of the Edge's CPU time and
    causes its longest pauses (docs/explanation/performance.md).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _as_coroutine(role: Role, process: Process) -> int:
    return await role(process)


def _only_iop_error(group: BaseExceptionGroup[BaseException]) -> IopError | None:
    """The first error of ours in a group, however deep. A bug beside it wins: then the whole group is
    shown.
    """
    ours, others = group.split(IopError)
    if ours is None or others is not None:
        return None
    first: BaseException = ours
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, IopError) else None


def _unusable_file(group: BaseExceptionGroup[BaseException]) -> IopError | None:
    """An error of ours for a file that the system refuses, if nothing else went wrong: no bug, so no traceback."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup) and len(first.exceptions) == 1:
        first = first.exceptions[0]
    if not isinstance(first, OSError) or first.filename is None:
        return None
    return Unavailable(f"{first.filename} cannot be used: {first.strerror}.", reason="FILE_UNUSABLE")


@contextlib.contextmanager
def _signals(stopping: asyncio.Event, before_kill: Sequence[Callable[[], None]]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stopping.is_set():
            _log.warning("process.killed", extra={"signal": signal.Signals(number).name})
            for hook in before_kill:
                hook()
            sys.stderr.flush()
            os._exit(EXIT_AT_ONCE)
        _log.info("process.stopping", extra={"signal": signal.Signals(number).name})
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _life_line(descriptor: int | None, stopping: asyncio.Event) -> Iterator[None]:
    """Stop, and within a bound, when the parent's end closes."""
    if descriptor is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def on_readable() -> None:
        with contextlib.suppress(BlockingIOError):
            if os.read(descriptor, 64):
                return
            loop.remove_reader(descriptor)
            _log.warning("process.orphaned")
            stopping.set()
            watchdog = threading.Timer(ORPHAN_GRACE_S, os._exit, (EXIT_AT_ONCE,))
            watchdog.daemon = True
            watchdog.start()

    os.set_blocking(descriptor, False)
    loop.add_reader(descriptor, on_readable)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _descriptor(variable: str) -> int | None:
    """Take a descriptor from the environment, so that no child of ours inherits the name."""
    text = os.environ.pop(variable, "")
    if not text.isdigit():
        return None
    descriptor = int(text)
    try:
        os.set_inheritable(descriptor, False)
    except OSError:
        return None
    return descriptor


def _die_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent ends: the life line's backstop while the loop is busy."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EXIT_AT_ONCE)


def _report(descriptor: int | None, message: Mapping[str, Any]) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.write(descriptor, (json.dumps(message) + "\n").encode())
