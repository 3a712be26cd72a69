"""Profiles of the engine: what each rank records, and what the scheduler did step by step (AD-46)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from iop.admin.enums import ProfilerKind
from iop.core.errors import Conflict, InvalidRequest, IopError, NotFound, Unsupported
from iop.engine.ranks import RankGroup
from iop.engine.reports import ArtifactFile
from iop.engine.runner import Runner, StepRecord

__all__ = ["Profiler"]

_STEPS_MAX: Final = 100_000
"""Steps kept of one recording; older ones make room. More would only cost memory."""

_KEPT_MAX: Final = 64
"""Stopped profiles whose artifacts are still told."""

_RANK_KINDS: Final = frozenset({ProfilerKind.CPU, ProfilerKind.MEMORY})


@dataclass(slots=True, kw_only=True)
class _Recording:
    profile_id: str
    kinds: frozenset[ProfilerKind]
    folder: Path
    began: float
    max_steps: int | None
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=_STEPS_MAX))
    seen: int = 0
    timer: asyncio.TimerHandle | None = None
    answers: list[asyncio.Future[dict[str, Any]]] = field(default_factory=list)
    is_over: bool = False


class Profiler:
    """At most one recording at a time; its bounds end it without anybody calling."""

    def __init__(self, *, runner: Runner, ranks: RankGroup, artifacts: Path) -> None:
        self._runner = runner
        self._ranks = ranks
        self._artifacts = artifacts
        self._turn = asyncio.Lock()
        self._recording: _Recording | None = None
        self._finished: dict[str, tuple[ArtifactFile, ...]] = {}

    async def start(
        self,
        profile_id: str,
        *,
        kinds: Collection[ProfilerKind],
        max_steps: int | None,
        max_duration_s: float | None,
    ) -> None:
        """See ``Engine.start_profile``."""
        if not kinds:
            raise InvalidRequest("`kinds` must name at least one profiler.", details={"field": "kinds"})
        if ProfilerKind.GPU in kinds:
            raise Unsupported("This engine has no GPU to profile.", reason="PROFILER_UNSUPPORTED")
        async with self._turn:
            if profile_id in self._finished or (self._recording and self._recording.profile_id == profile_id):
                return
            if self._recording is not None and not self._recording.is_over:
                raise Conflict(
                    "Another profile is running; stop it first.",
                    reason="PROFILE_ACTIVE",
                    details={"profile_id": self._recording.profile_id},
                )
            if self._recording is not None:
                await self._collect(self._recording)
            name = hashlib.sha256(profile_id.encode()).hexdigest()[:24]
            folder = self._artifacts / f"profile-{name}"
            folder.mkdir(parents=True, exist_ok=True)
            recording = _Recording(
                profile_id=profile_id,
                kinds=frozenset(kinds),
                folder=folder,
                began=time.monotonic(),
                max_steps=max_steps,
            )
            if recording.kinds & _RANK_KINDS:
                chosen = [int(kind) for kind in recording.kinds & _RANK_KINDS]
                # Before the ranks are told: they begin also when whoever asked gives up, and it must be stopped then.
                self._recording = recording
                try:
                    await self._ranks.call("start_profile", {"kinds": chosen, "folder": str(folder)})
                except IopError:
                    self._recording = None
                    raise
            self._recording = recording
            self._runner.on_step = self._on_step
            if max_duration_s is not None:
                recording.timer = asyncio.get_running_loop().call_later(max_duration_s, self._end, recording)

    @property
    def running(self) -> str:
        """Id of the recording that goes on; "" when none does."""
        recording = self._recording
        return "" if recording is None or recording.is_over else recording.profile_id

    async def stop(self, profile_id: str) -> tuple[ArtifactFile, ...]:
        """See ``Engine.stop_profile``."""
        async with self._turn:
            if profile_id in self._finished:
                return self._finished[profile_id]
            if self._recording is None or self._recording.profile_id != profile_id:
                raise NotFound("No profile has this id.", reason="PROFILE_NOT_FOUND")
            return await self._collect(self._recording)

    def _on_step(self, record: StepRecord) -> None:
        recording = self._recording
        if recording is None or recording.is_over:
            return
        recording.steps.append(record)
        recording.seen += 1
        if recording.max_steps is not None and recording.seen >= recording.max_steps:
            self._end(recording)

    def _end(self, recording: _Recording) -> None:
        """Stop recording here and in the ranks; the ranks' answers are taken when somebody asks for the artifacts."""
        if recording.is_over:
            return
        recording.is_over = True
        self._runner.on_step = None
        if recording.timer is not None:
            recording.timer.cancel()
        if recording.kinds & _RANK_KINDS:
            recording.answers = self._ranks.order("stop_profile")

    async def _collect(self, recording: _Recording) -> tuple[ArtifactFile, ...]:
        self._end(recording)
        files: list[ArtifactFile] = []
        for rank, answer in enumerate(await self._ranks.answers(recording.answers)):
            files.extend(
                _artifact(rank, ProfilerKind(entry["kind"]), Path(entry["path"]), entry["media_type"])
                for entry in answer["files"]
            )
        if ProfilerKind.SCHEDULER in recording.kinds:
            path = recording.folder / "engine-scheduler.json"
            path.write_text(json.dumps(_trace(recording)))
            files.append(_artifact(-1, ProfilerKind.SCHEDULER, path, "application/json"))
        self._recording = None
        while len(self._finished) >= _KEPT_MAX:
            self._finished.pop(next(iter(self._finished)))
        self._finished[recording.profile_id] = tuple(files)
        return tuple(files)


def _trace(recording: _Recording) -> dict[str, Any]:
    """The steps in the trace-event format that browsers' tracing pages open; times in microseconds from the start."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {
                "name": "step",
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": round((step.began - recording.began) * 1e6),
                "dur": round((step.ended - step.began) * 1e6),
                "args": {
                    "running": step.running,
                    "waiting": step.waiting,
                    "works": [
                        {"sequence": name, "start": start, "end": end} for name, start, end in step.works
                    ],
                },
            }
            for step in recording.steps
        ],
    }


def _artifact(rank: int, kind: ProfilerKind, path: Path, media_type: str) -> ArtifactFile:
    content = path.read_bytes()
    return ArtifactFile(
        rank=rank,
        kind=kind,
        path=str(path),
        media_type=media_type,
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
