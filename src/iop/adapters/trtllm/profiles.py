"""Profiles of a TensorRT-LLM server, each in a fresh directory that it is told (AD-46)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from iop.adapters.engine_http import EngineAnswer, EngineHttp
from iop.adapters.engine_profiles import (
    DIRECTORY_VARIABLE,
    START_TIMEOUT_S,
    EngineProfiles,
    here,
    prefix_of,
)
from iop.admin.enums import ProfilerKind
from iop.admin.steps import StartProfileStep

ACTIVITIES: Final = {ProfilerKind.CPU: "CPU", ProfilerKind.GPU: "GPU"}


class Profiles(EngineProfiles):
    """Names of its files cannot be chosen, so each profile has its own directory.

    Args:
        environment: the Node's.
    """

    SCHEME: ClassVar[str] = "trtllm-profile:"

    def __init__(self, http: EngineHttp, environment: Mapping[str, str]) -> None:
        super().__init__(http)
        self._directory = here(environment.get(DIRECTORY_VARIABLE, ""))

    def kinds(self) -> frozenset[ProfilerKind]:
        """All that it has activities for."""
        return frozenset(ACTIVITIES) if self._directory is not None else frozenset()

    async def _begin(self, step: StartProfileStep) -> EngineAnswer:
        assert self._directory is not None, "nothing is recorded without one"
        directory = self._directory / prefix_of(step.profile_id)
        await asyncio.to_thread(_make, directory)
        body: dict[str, object] = {
            "output_dir": str(directory),
            "activities": [ACTIVITIES[kind] for kind in step.kinds],
        }
        if step.max_steps:
            body["num_steps"] = step.max_steps
        return await self._http.post("/start_profile", body, timeout_s=START_TIMEOUT_S)

    def _is_busy(self, answer: EngineAnswer) -> bool:
        return answer.status == 409

    def _is_over(self, answer: EngineAnswer) -> bool:
        """500 when nothing runs, as after a step bound: whether it is a success is told by its files."""
        return answer.is_ok or answer.status == 500

    def _files(self, profile_id: str) -> Sequence[Path]:
        if self._directory is None:
            return ()
        directory = self._directory / prefix_of(profile_id)
        return sorted(path for path in directory.glob("*") if path.is_file())


def _make(directory: Path) -> None:
    """As accessible as what it is in: the engine may be another user."""
    directory.mkdir(exist_ok=True)
    directory.chmod(directory.parent.stat().st_mode & 0o7777)
