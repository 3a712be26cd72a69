"""Profiles of an engine that writes files where this machine can read them (AD-46).

One runs at a time. What was started here is known by its id and found by names that no other profile has; files of
others are never told nor sent.
"""

from __future__ import annotations

import abc
import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from iop.adapters.base import TunnelStream
from iop.adapters.engine_http import EngineAnswer, EngineHttp
from iop.adapters.file_stream import FileStream
from iop.adapters.gate_control import ENGINE, StepFailed, unknown_profile
from iop.adapters.http_tunnel import refuse_tunnel
from iop.admin.enums import AdminErrorCode, ProfilerKind
from iop.admin.results import ProfileArtifact
from iop.admin.steps import StartProfileStep
from iop.core.errors import IopError, Unsupported
from iop.wire.messages import StreamErrorCode

_log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 90.0
"""Some engines wait for their workers."""

STOP_TIMEOUT_S: Final = 600.0
"""Engines write their traces before they answer."""

SETTLED_AFTER_S: Final = 0.3
SETTLE_TIMEOUT_S: Final = 30.0
"""Files whose sizes do not change any more are whole."""

PROFILES_KEPT_MAX: Final = 256
ARTIFACTS_MAX: Final = 1024

DIRECTORY_VARIABLE: Final = "IOP_PROFILE_DIR"
"""In the Node's environment: where engines that are told a directory for each profile write theirs."""

NEEDS_DIRECTORY: Final = (
    f"set {DIRECTORY_VARIABLE} in the Node's environment to a directory that the engine can write"
)


def here(directory: str) -> Path | None:
    """The directory, if this machine has it."""
    path = Path(directory)
    return path if directory.startswith("/") and path.is_dir() else None


def prefix_of(profile_id: str) -> str:
    """A beginning of file names that engines accept and that no other profile has."""
    return f"iop-{hashlib.sha256(profile_id.encode()).hexdigest()[:24]}"


class EngineProfiles(abc.ABC):
    """The profiles that were started here.

    Args:
        http: the engine's control side.
    """

    SCHEME: ClassVar[str]
    """Of artifact addresses."""

    IS_LATE: ClassVar[bool] = False
    """Files may still grow when the engine has answered."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._kinds: dict[str, tuple[ProfilerKind, ...]] = {}
        self._running = ""

    # ---- for the kinds ----

    @abc.abstractmethod
    def kinds(self) -> frozenset[ProfilerKind]:
        """What can be recorded; nothing where its files could not be fetched."""

    @abc.abstractmethod
    async def _begin(self, step: StartProfileStep) -> EngineAnswer:
        """Tell the engine to record."""

    @abc.abstractmethod
    def _is_busy(self, answer: EngineAnswer) -> bool:
        """Whether it refused because it records already."""

    def _is_over(self, answer: EngineAnswer) -> bool:
        """Whether it could not stop because it had stopped."""
        return answer.is_ok

    @abc.abstractmethod
    def _files(self, profile_id: str) -> Sequence[Path]:
        """What it left of one profile, in order. Blocking."""

    # ---- for the control ----

    @property
    def running(self) -> frozenset[str]:
        """Ids of what runs."""
        return frozenset({self._running}) if self._running else frozenset()

    def restart(self) -> None:
        """Another process of the engine: nothing runs there."""
        self._running = ""

    async def start(self, step: StartProfileStep, tasks: asyncio.TaskGroup) -> None:
        """Begin; a step bound is the engine's own, a time bound is kept here."""
        if not set(step.kinds) <= self.kinds():
            raise Unsupported("the engine's profiler does not record that", reason="PROFILER_KIND")
        if self._running == step.profile_id:
            return
        try:
            answer = await self._begin(step)
        except OSError as exc:
            raise StepFailed(f"no place can be made for the profile: {exc.strerror}", changed=False) from exc
        if self._is_busy(answer):
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
                name=f"engine.profile {step.profile_id}",
            )

    async def stop(self, profile_id: str, *, timeout_s: float) -> tuple[ProfileArtifact, ...]:
        """End it if it runs, and name its files; again for one that ended."""
        if profile_id not in self._kinds:
            raise unknown_profile()
        if self._running == profile_id:
            await self._end(timeout_s=min(timeout_s, STOP_TIMEOUT_S))
        try:
            if self.IS_LATE:
                await self._settle(profile_id)
            return await asyncio.to_thread(self._artifacts, profile_id)
        except OSError as exc:
            raise StepFailed(f"the profile's files cannot be read: {exc.strerror}") from exc

    def open(self, uri: str, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Send one file; only of profiles that were started here."""
        for profile_id in self._kinds:
            if not uri.startswith(f"{self.SCHEME}{prefix_of(profile_id)}"):
                continue
            for path in self._files(profile_id):
                if self._uri(profile_id, path) == uri:
                    FileStream(path, stream, on_done).open()
                    return
        refuse_tunnel(stream, StreamErrorCode.INVALID_REQUEST, "the engine has no such artifact")
        on_done()

    # ---- inside ----

    async def _stop_later(self, profile_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if self._running != profile_id:
            return
        try:
            await self._end()
        except (IopError, StepFailed) as exc:
            _log.warning("profile.stop_failed profile=%s reason=%s", profile_id, exc)

    async def _end(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        answer = await self._http.post("/stop_profile", timeout_s=timeout_s)
        if not self._is_over(answer):
            raise StepFailed(f"the engine could not stop its profile: {answer.words}")
        self._running = ""

    async def _settle(self, profile_id: str) -> None:
        """Wait until its files do not change any more."""
        seen: list[tuple[str, int]] | None = None
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                while (sizes := await asyncio.to_thread(self._sizes, profile_id)) != seen or not sizes:
                    seen = sizes
                    await asyncio.sleep(SETTLED_AFTER_S)
        except TimeoutError:
            pass  # what is there is told as it is; nothing at all is no success

    def _sizes(self, profile_id: str) -> list[tuple[str, int]]:
        return [(path.name, path.stat().st_size) for path in self._files(profile_id)]

    def _artifacts(self, profile_id: str) -> tuple[ProfileArtifact, ...]:
        found = self._files(profile_id)[:ARTIFACTS_MAX]
        if not found:
            raise StepFailed(
                "the engine stopped and left no file of this profile", code=AdminErrorCode.VERIFICATION_FAILED
            )
        return tuple(self._artifact(profile_id, path) for path in found)

    def _artifact(self, profile_id: str, path: Path) -> ProfileArtifact:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        return ProfileArtifact(
            participant_id=ENGINE,
            kind=self._kinds[profile_id][0],
            uri=self._uri(profile_id, path),
            media_type="application/gzip" if path.suffix == ".gz" else "application/octet-stream",
            size_bytes=path.stat().st_size,
            sha256=digest,
        )

    def _uri(self, profile_id: str, path: Path) -> str:
        name = path.name
        prefix = prefix_of(profile_id)
        return self.SCHEME + (name if name.startswith(prefix) else f"{prefix}/{name}")


class DirectedProfiles(EngineProfiles):
    """Profiles of an engine that is told with each where to write and what to record.

    Args:
        http: the engine's control side.
        environment: the Node's.
    """

    ACTIVITIES: ClassVar[Mapping[ProfilerKind, str]]
    """What it can record, by the engine's names."""

    def __init__(self, http: EngineHttp, environment: Mapping[str, str]) -> None:
        super().__init__(http)
        self._directory = here(environment.get(DIRECTORY_VARIABLE, ""))

    def kinds(self) -> frozenset[ProfilerKind]:
        """All that it has activities for."""
        return frozenset(self.ACTIVITIES) if self._directory is not None else frozenset()

    async def _record(self, step: StartProfileStep, directory: Path, **more: object) -> EngineAnswer:
        """Tell the engine to write there; `more` is what else its route takes."""
        body: dict[str, object] = {
            "output_dir": str(directory),
            "activities": [self.ACTIVITIES[kind] for kind in step.kinds],
            **more,
        }
        if step.max_steps:
            body["num_steps"] = step.max_steps
        return await self._http.post("/start_profile", body, timeout_s=START_TIMEOUT_S)

    def _is_over(self, answer: EngineAnswer) -> bool:
        """500 when nothing runs, as after a step bound: whether it is a success is told by its files."""
        return answer.is_ok or answer.status == 500
