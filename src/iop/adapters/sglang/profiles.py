"""Profiles of an SGLang server, in a directory that it is told (AD-46)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from iop.adapters.engine_http import EngineAnswer
from iop.adapters.engine_profiles import DirectedProfiles, prefix_of
from iop.admin.enums import ProfilerKind
from iop.admin.steps import StartProfileStep


class Profiles(DirectedProfiles):
    """Files begin with the profile's id, which is ours. Ranks may be merged after the answer."""

    SCHEME: ClassVar[str] = "sglang-profile:"
    IS_LATE: ClassVar[bool] = True
    ACTIVITIES: ClassVar[Mapping[ProfilerKind, str]] = {
        ProfilerKind.CPU: "CPU",
        ProfilerKind.GPU: "GPU",
        ProfilerKind.MEMORY: "MEM",
    }

    async def _begin(self, step: StartProfileStep) -> EngineAnswer:
        assert self._directory is not None, "nothing is recorded without one"
        return await self._record(step, self._directory, profile_id=prefix_of(step.profile_id))

    def _is_busy(self, answer: EngineAnswer) -> bool:
        """It has no status of its own for that."""
        return answer.status == 500 and "already" in answer.words.lower()

    def _files(self, profile_id: str) -> Sequence[Path]:
        if self._directory is None:
            return ()
        return sorted(path for path in self._directory.glob(f"{prefix_of(profile_id)}*") if path.is_file())
