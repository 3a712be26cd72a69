"""One child process under supervision: started, heard, stopped, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from iop.app.process import LIFE_VARIABLE, REPORT_VARIABLE
from iop.core.errors import IopError, Unavailable

__all__ = ["Part", "PartFailed"]

REPORT_BYTES_MAX: Final = 64 * 1024
"""Longest report line; addresses and an error message need a hundredth of it."""

LOG_TAIL_LINES: Final = 8


class PartFailed(Unavailable):
    """A part could not start, or ended by itself. ``exit_code`` is what the whole should leave with."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message, reason="PART_FAILED")
        self.exit_code = exit_code


class Part:
    """A child that runs ``iop COMMAND ...`` in a process group of its own.

    The group keeps a terminal's Ctrl-C from it, so that the parent decides the order of stopping; and it lets the
    parent end whatever the child itself had started.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, log: Path) -> None:
        self.name = name
        self.log = log
        self._arguments = tuple(arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._life: int | None = None
        self._report: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int:
        """The child's process id; valid after ``start``."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start the child. Its output goes to ``log``, which is begun anew."""
        life_read, self._life = os.pipe()
        report_read, report_write = os.pipe()
        loop = asyncio.get_running_loop()
        self._report = asyncio.StreamReader(limit=REPORT_BYTES_MAX)
        try:
            with self.log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "iop.cli",
                    *self._arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(life_read, report_write),
                    start_new_session=True,
                    env={**environment, LIFE_VARIABLE: str(life_read), REPORT_VARIABLE: str(report_write)},
                )
        finally:
            os.close(life_read)
            os.close(report_write)
        report = self._report
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(report), os.fdopen(report_read, "rb", 0)
        )

    async def ready(self, timeout_s: float) -> Mapping[str, Any]:
        """Wait until the child serves; returns what it announced.

        Raises:
            PartFailed: it ended, failed or said nothing in time; the message has its own words.
        """
        assert self._report is not None
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._report.readline()
        except TimeoutError:
            raise PartFailed(f"{self.name} was not ready within {timeout_s:g} s.{self._tail()}") from None
        except ValueError:
            raise PartFailed(f"{self.name} said something unreadable.{self._tail()}") from None
        if not line:
            code = await self._process.wait()
            raise PartFailed(f"{self.name} ended before it was ready ({how_it_ended(code)}).{self._tail()}")
        message = json.loads(line)
        if "error" in message:
            raise PartFailed(f"{self.name}: {message['error']}", exit_code=int(message["exit_code"]))
        ready: Mapping[str, Any] = message["ready"]
        return ready

    async def wait(self) -> int:
        """Wait until the child has ended; returns its exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    def ask_to_stop(self) -> None:
        """Ask for a graceful end. No-op when it has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill_nowait(self) -> None:
        """End the child and all that it started, at once. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """Ask, wait, then end whatever is left of the group. When it returns nothing of it runs."""
        if self._process is None:
            return
        self.ask_to_stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        # Also after an exit of its own: a child of the child may have outlived it.
        self.kill_nowait()
        await self._process.wait()
        if self._transport is not None:
            self._transport.close()
        if self._life is not None:
            os.close(self._life)
            self._life = None

    def _tail(self) -> str:
        """The last lines of its log, for a person."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return ""
        return "".join(f"\n  {line}" for line in lines)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def exit_code_of(error: IopError) -> int:
    """The code that the command leaves with."""
    return error.exit_code if isinstance(error, PartFailed) else error.status.exit_code
