"""How much accelerator memory is in use on this machine, by its driver's own tool."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from iop.adapters.gate_control import ENGINE, not_verified
from iop.admin.enums import ResourceKind
from iop.admin.results import ResourceAmount

TOOL: Final = "nvidia-smi"
TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.1

FREED_TIMEOUT_S: Final = 5.0
"""How long freed memory may take to show at the device."""

DeviceMemory: TypeAlias = Callable[[], Awaitable[int | None]]
"""Bytes in use on this machine's accelerators, `None` where nobody can tell."""


async def device_bytes_used() -> int | None:
    """In use over all devices; `None` where nobody can tell. Frees show late: ask until it is steady."""
    program = shutil.which(TOOL)
    if program is None:
        return None
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(TIMEOUT_S):
            told, _ = await process.communicate()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = [line.strip() for line in told.decode("ascii", "replace").splitlines() if line.strip()]
    if process.returncode or not lines or not all(line.isdigit() for line in lines):
        return None
    return sum(map(int, lines)) * 1024 * 1024


async def freed_since(before: int, used: DeviceMemory, *, within_s: float) -> int:
    """How many bytes fewer are in use than ``before``, as soon as it is any; else, at the end, none or less."""
    freed = 0
    try:
        async with asyncio.timeout(within_s):
            while freed <= 0:
                after = await used()
                freed = before - (after if after is not None else before)
                if freed <= 0:
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        pass
    return freed


async def freed_amounts(
    before: int | None, used: DeviceMemory, kind: ResourceKind, *, claim: str
) -> tuple[ResourceAmount, ...]:
    """What a release freed, measured at the device, since engines only estimate it (AD-43).

    Args:
        before: in use then; `None` where nobody could tell, and so nothing is said.
        kind: under which it is told; a device does not tell kinds apart.
        claim: what the engine says.

    Raises:
        StepFailed: nothing was freed.
    """
    if before is None:
        return ()
    freed = await freed_since(before, used, within_s=FREED_TIMEOUT_S)
    if freed <= 0:
        raise not_verified(f"{claim}, but no device memory was freed")
    return (ResourceAmount(participant_id=ENGINE, kind=kind, bytes=freed),)
