"""Profiles of an SGLang server, in a directory that it is told (AD-46)."""

from __future__ import annotations

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

ACTIVITIES: Final = {ProfilerKind.CPU: "CPU", ProfilerKind.GPU: "GPU", ProfilerKind.MEMORY: "MEM"}


class Profiles(EngineProfiles):
    """Files begin with the profile's id, which is ours. Ranks may be merged after the answer.

    Args:
        environment: the Node's.
    """

    SCHEME: ClassVar[str] = "sglang-profile:"
    IS_LATE: ClassVar[bool] = True

    def __init__(self, http: EngineHttp, environment: Mapping[str, str]) -> None:
        super().__init__(http)
        self._directory = here(environment.get(DIRECTORY_VARIABLE, ""))

    def kinds(self) -> frozenset[ProfilerKind]:
        """All that it has activities for."""
        return frozenset(ACTIVITIES) if self._directory is not None else frozenset()

    async def _begin(self, step: StartProfileStep) -> EngineAnswer:
        body: dict[str, object] = {
            "output_dir": str(self._directory),
            "profile_id": prefix_of(step.profile_id),
            "activities": [ACTIVITIES[kind] for kind in step.kinds],
        }
        if step.max_steps:
            body["num_steps"] = step.max_steps
        return await self._http.post("/start_profile", body, timeout_s=START_TIMEOUT_S)

    def _is_busy(self, answer: EngineAnswer) -> bool:
        """It has no status of its own for that."""
        return answer.status == 500 and "already" in answer.words.lower()

    def _is_over(self, answer: EngineAnswer) -> bool:
        """500 when nothing runs, as after a step bound: whether it is a success is told by its files."""
        return answer.is_ok or answer.status == 500

    def _files(self, profile_id: str) -> Sequence[Path]:
        if self._directory is None:
            return ()
        return sorted(path for path in self._directory.glob(f"{prefix_of(profile_id)}*") if path.is_file())
