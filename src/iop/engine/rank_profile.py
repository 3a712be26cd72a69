"""What one rank records while a profile runs: where its CPU time goes, and what its memory holds."""

from __future__ import annotations

import cProfile
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from iop.admin.enums import ProfilerKind

__all__ = ["RankProfile"]

_LINES_MAX: Final = 100
"""Allocation sites listed in a memory profile."""


class RankProfile:
    """One recording. Files are written by ``stop`` into a directory that the engine owns."""

    def __init__(self, kinds: Sequence[ProfilerKind], folder: Path, rank: int) -> None:
        self._kinds = frozenset(kinds)
        self._folder, self._rank = folder, rank
        self._cpu = cProfile.Profile()

    def start(self) -> None:
        """Begin to record."""
        if ProfilerKind.MEMORY in self._kinds:
            tracemalloc.start()
        if ProfilerKind.CPU in self._kinds:
            self._cpu.enable()

    def stop(self) -> list[dict[str, Any]]:
        """End the recording and write the files: kind, path and media type of each."""
        files: list[dict[str, Any]] = []
        if ProfilerKind.CPU in self._kinds:
            self._cpu.disable()
            path = self._folder / f"rank{self._rank}-cpu.pstats"
            self._cpu.dump_stats(path)
            files.append(_entry(ProfilerKind.CPU, path, "application/vnd.python.pstats"))
        if ProfilerKind.MEMORY in self._kinds:
            snapshot = tracemalloc.take_snapshot()
            tracemalloc.stop()
            path = self._folder / f"rank{self._rank}-memory.json"
            sites = [
                {
                    "site": f"{Path(stat.traceback[0].filename).name}:{stat.traceback[0].lineno}",
                    "bytes": stat.size,
                    "count": stat.count,
                }
                for stat in snapshot.statistics("lineno")[:_LINES_MAX]
            ]
            path.write_text(json.dumps({"mappings": _mappings(), "allocations": sites}, indent=1))
            files.append(_entry(ProfilerKind.MEMORY, path, "application/json"))
        return files


def _mappings() -> dict[str, int]:
    """Resident bytes by the name of the mapping; unnamed memory is `[anonymous]`."""
    totals: dict[str, int] = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        head = line.split(None, 5)
        if "-" in head[0] and not head[0].endswith(":"):
            name = Path(head[5]).name if len(head) > 5 else "[anonymous]"
        elif head[0] == "Rss:":
            totals[name] = totals.get(name, 0) + int(head[1]) * 1024
    return {key: size for key, size in sorted(totals.items(), key=lambda one: -one[1]) if size}


def _entry(kind: ProfilerKind, path: Path, media_type: str) -> dict[str, Any]:
    return {"kind": int(kind), "path": str(path), "media_type": media_type}
