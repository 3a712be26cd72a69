"""Profiles of a vLLM engine: one at a time, its files found by a prefix of our own (AD-46)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from iop.adapters.base import TunnelStream
from iop.adapters.engine_http import EngineHttp
from iop.adapters.file_stream import FileStream
from iop.adapters.gate_control import ENGINE, StepFailed, unknown_profile
from iop.adapters.http_tunnel import refuse_tunnel
from iop.adapters.vllm.answers import Launch
from iop.admin.enums import AdminErrorCode, ProfilerKind
from iop.admin.results import ProfileArtifact
from iop.admin.steps import StartProfileStep
from iop.core.errors import IopError, Unsupported
from iop.wire.messages import StreamErrorCode

_log = logging.getLogger(__name__)

SCHEME: Final = "vllm-profile:"

STOP_TIMEOUT_S: Final = 600.0
"""The engine writes its traces before it answers."""

PROFILES_KEPT_MAX: Final = 256

ARTIFACTS_MAX: Final = 1024


class Profiles:
    """The profiles that we started."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._launch = Launch()
        self._kinds: dict[str, tuple[ProfilerKind, ...]] = {}
        self._running = ""

    def begin(self, launch: Launch) -> None:
        """Another process of the engine."""
        self._launch = launch
        self._running = ""

    @property
    def running(self) -> frozenset[str]:
        """Ids of what runs."""
        return frozenset({self._running}) if self._running else frozenset()

    def kinds(self) -> frozenset[ProfilerKind]:
        """What the profiler that it was started with records; nothing where its files cannot be fetched."""
        launch = self._launch
        if launch.profiler != "torch" or not _here(launch.profile_dir):
            return frozenset()
        kinds = {ProfilerKind.CPU} if launch.device == "cpu" else {ProfilerKind.CPU, ProfilerKind.GPU}
        return frozenset(kinds | ({ProfilerKind.MEMORY} if launch.profiles_memory else set()))

    async def start(self, step: StartProfileStep, tasks: asyncio.TaskGroup) -> None:
        """Begin; a step bound is the engine's own, a time bound is kept here."""
        if not set(step.kinds) <= self.kinds():
            raise Unsupported("the engine's profiler does not record that", reason="PROFILER_KIND")
        if self._running == step.profile_id:
            return
        body: dict[str, object] = {"profile_prefix": prefix_of(step.profile_id)}
        if step.max_steps:
            body["max_iterations"] = step.max_steps
        answer = await self._http.post("/start_profile", body, timeout_s=60.0)
        if answer.status == 409:
            raise StepFailed(
                "another profile runs at the engine", code=AdminErrorCode.REFUSED_BUSY, changed=False
            )
        if not answer.is_ok:
            raise StepFailed(f"the engine refused to profile: {answer.words}", changed=False)
        while len(self._kinds) >= PROFILES_KEPT_MAX:
            self._kinds.pop(next(iter(self._kinds)))
        self._kinds[step.profile_id] = step.kinds
        self._running = step.profile_id
        if step.max_duration_ms:
            tasks.create_task(
                self._stop_later(step.profile_id, step.max_duration_ms / 1000),
                name=f"vllm.profile {step.profile_id}",
            )

    async def _stop_later(self, profile_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if self._running != profile_id:
            return
        try:
            await self._end()
        except (IopError, StepFailed) as exc:
            _log.warning("profile.stop_failed profile=%s reason=%s", profile_id, exc)

    async def stop(self, profile_id: str, *, timeout_s: float) -> tuple[ProfileArtifact, ...]:
        """End it if it runs, and name its files; again for one that ended."""
        if profile_id not in self._kinds:
            raise unknown_profile()
        if self._running == profile_id:
            await self._end(timeout_s=min(timeout_s, STOP_TIMEOUT_S))
        return await asyncio.to_thread(self._artifacts, profile_id)

    async def _end(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        answer = await self._http.post("/stop_profile", timeout_s=timeout_s)
        if not answer.is_ok:
            raise StepFailed(f"the engine could not stop its profile: {answer.words}")
        self._running = ""

    def _artifacts(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        directory = Path(self._launch.profile_dir)
        found = sorted(directory.glob(f"{prefix_of(profile_id)}*"))[:ARTIFACTS_MAX]
        if not found:
            raise StepFailed(
                "the engine stopped and left no file of this profile", code=AdminErrorCode.VERIFICATION_FAILED
            )
        return tuple(self._artifact(path, self._kinds[profile_id]) for path in found if path.is_file())

    @staticmethod
    def _artifact(path: Path, kinds: tuple[ProfilerKind, ...]) -> ProfileArtifact:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        is_packed = path.suffix == ".gz"
        return ProfileArtifact(
            participant_id=ENGINE,
            kind=kinds[0],
            uri=SCHEME + path.name,
            media_type="application/gzip" if is_packed else "application/octet-stream",
            size_bytes=path.stat().st_size,
            sha256=digest,
        )

    def open(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Send one file; only of profiles that we started."""
        name = uri.removeprefix(SCHEME)
        is_ours = any(name.startswith(prefix_of(each)) for each in self._kinds)
        path = Path(self._launch.profile_dir) / name
        if not uri.startswith(SCHEME) or Path(name).name != name or not is_ours or not path.is_file():
            refuse_tunnel(stream, StreamErrorCode.INVALID_REQUEST, "the engine has no such artifact")
            on_done()
            return
        FileStream(path, stream, on_done).open()


def prefix_of(profile_id: str) -> str:
    """A file name prefix that vLLM accepts and that no other profile has."""
    return f"iop-{hashlib.sha256(profile_id.encode()).hexdigest()[:24]}"


def _here(directory: str) -> bool:
    return directory.startswith("/") and Path(directory).is_dir()
