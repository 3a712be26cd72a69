"""Profiles of a TensorRT-LLM server, each in a fresh directory that it is told (AD-46)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from iop.adapters.engine_http import EngineAnswer
from iop.adapters.engine_profiles import DirectedProfiles, prefix_of
from iop.admin.enums import ProfilerKind
from iop.admin.steps import StartProfileStep


class Profiles(DirectedProfiles):
    """Names of its files cannot be chosen, so each profile has its own directory."""

    SCHEME: ClassVar[str] = "trtllm-profile:"
    ACTIVITIES: ClassVar[Mapping[ProfilerKind, str]] = {ProfilerKind.CPU: "CPU", ProfilerKind.GPU: "GPU"}

    async def _begin(self, step: StartProfileStep) -> EngineAnswer:
        assert self._directory is not None, "nothing is recorded without one"
        directory = self._directory / prefix_of(step.profile_id)
        await asyncio.to_thread(_make, directory)
        return await self._record(step, directory)

    def _is_busy(self, answer: EngineAnswer) -> bool:
        return answer.status == 409

    def _files(self, profile_id: str) -> Sequence[Path]:
        if self._directory is None:
            return ()
        directory = self._directory / prefix_of(profile_id)
        return sorted(path for path in directory.glob("*") if path.is_file())


def _make(directory: Path) -> None:
    """As accessible as what it is in: the engine may be another user."""
    directory.mkdir(exist_ok=True)
    directory.chmod(directory.parent.stat().st_mode & 0o7777)
