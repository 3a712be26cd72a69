"""What the wire cannot provoke: a restart, a failing rank, a cut connection, work that does not end.

A hook is a command of the caller's. It is run by the shell with two variables: `CONFORMANCE_HOOK`, its name, and
`CONFORMANCE_PHASE`. `restart` and `cut` are run once per use with the phase `once` and have done their work when they
return. `fail-rank` and `hold` are run with `begin` and later with `end`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from enum import StrEnum, unique
from types import MappingProxyType
from typing import Final, Protocol

from iop.conformance.model import CheckNotRun

__all__ = ["CommandHooks", "HookName", "HookPhase", "Hooks", "NoHooks"]

HOOK_TIMEOUT_S: Final = 120.0
"""A restarted engine may have to load its weights."""

WORDS_MAX: Final = 400
"""Longest piece of a hook's output that is shown."""


@unique
class HookName(StrEnum):
    """Every hook that there is."""

    RESTART = "restart"
    """Kill the server hard and start it again on the same store and addresses."""
    FAIL_RANK = "fail-rank"
    """Between begin and end some participants, but not all, fail what they are asked to do."""
    CUT = "cut"
    """Break every connection between this suite and the server; new ones work."""
    HOLD = "hold"
    """Between begin and end the server has inference work that does not end, so that a drain waits."""


@unique
class HookPhase(StrEnum):
    """Which part of a hook is wanted."""

    ONCE = "once"
    BEGIN = "begin"
    END = "end"


class Hooks(Protocol):
    """What the caller lent to the suite."""

    def has(self, name: HookName) -> bool:
        """Whether this hook was given."""
        ...

    async def run(self, name: HookName, phase: HookPhase = HookPhase.ONCE) -> None:
        """Run it to its end.

        Raises:
            CheckNotRun: there is none, or it failed.
        """
        ...


class NoHooks:
    """Nothing was lent."""

    def has(self, name: HookName) -> bool:  # noqa: ARG002 - the port's form
        """Never."""
        return False

    async def run(self, name: HookName, phase: HookPhase = HookPhase.ONCE) -> None:  # noqa: ARG002
        """There is none."""
        raise CheckNotRun(f"needs --hook {name.value}=CMD")


class CommandHooks:
    """Hooks as shell commands.

    Args:
        commands: by name.
    """

    def __init__(self, commands: Mapping[HookName, str]) -> None:
        self._commands: Mapping[HookName, str] = MappingProxyType(dict(commands))

    def has(self, name: HookName) -> bool:
        """Whether a command was given."""
        return name in self._commands

    async def run(self, name: HookName, phase: HookPhase = HookPhase.ONCE) -> None:
        """Run the command and wait for it, at most two minutes."""
        command = self._commands.get(name)
        if command is None:
            raise CheckNotRun(f"needs --hook {name.value}=CMD")
        process = await asyncio.create_subprocess_shell(
            command,
            env={**os.environ, "CONFORMANCE_HOOK": name.value, "CONFORMANCE_PHASE": phase.value},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(HOOK_TIMEOUT_S):
                _, errors = await process.communicate()
        except TimeoutError:
            raise CheckNotRun(
                f"the hook {name.value} ({phase.value}) took longer than {HOOK_TIMEOUT_S:g} s"
            ) from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode != 0:
            words = errors.decode(errors="replace").strip()[-WORDS_MAX:]
            raise CheckNotRun(
                f"the hook {name.value} ({phase.value}) ended with {process.returncode}: {words}"
            )
