"""Profiles of a vLLM engine, in the directory that it was started with (AD-46)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from iop.adapters.engine_http import EngineAnswer, EngineHttp
from iop.adapters.engine_profiles import START_TIMEOUT_S, EngineProfiles, here, prefix_of
from iop.adapters.vllm.answers import Launch
from iop.admin.enums import ProfilerKind
from iop.admin.steps import StartProfileStep


class Profiles(EngineProfiles):
    """Found by a prefix of our own."""

    SCHEME: ClassVar[str] = "vllm-profile:"

    def __init__(self, http: EngineHttp) -> None:
        super().__init__(http)
        self._launch = Launch()

    def begin(self, launch: Launch) -> None:
        """Another process of the engine."""
        self._launch = launch
        self.restart()

    def kinds(self) -> frozenset[ProfilerKind]:
        """What the profiler that it was started with records."""
        launch = self._launch
        if launch.profiler != "torch" or here(launch.profile_dir) is None:
            return frozenset()
        kinds = {ProfilerKind.CPU} if launch.device == "cpu" else {ProfilerKind.CPU, ProfilerKind.GPU}
        return frozenset(kinds | ({ProfilerKind.MEMORY} if launch.profiles_memory else set()))

    async def _begin(self, step: StartProfileStep) -> EngineAnswer:
        body: dict[str, object] = {"profile_prefix": prefix_of(step.profile_id)}
        if step.max_steps:
            body["max_iterations"] = step.max_steps
        return await self._http.post("/start_profile", body, timeout_s=START_TIMEOUT_S)

    def _is_busy(self, answer: EngineAnswer) -> bool:
        return answer.status == 409

    def _files(self, profile_id: str) -> Sequence[Path]:
        directory = Path(self._launch.profile_dir)
        return sorted(path for path in directory.glob(f"{prefix_of(profile_id)}*") if path.is_file())
