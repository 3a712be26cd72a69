"""Where a server's weights can be read again, as it tells whoever operates it (AD-32). Pure.

OpenEngineAdmin's profile names versions and digests, not where they came from. A server that is operated by another
one (an engine by an Edge) says that beside it: in `GetServerInfo.extra` under `EXTRA_KEY`, on its admin listener only,
since it names files. What is told is for the version that is told with it, and for no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from iop.admin.enums import WeightFormat
from iop.admin.requests import DiskSource

__all__ = ["EXTRA_KEY", "read_sources", "source_words"]

EXTRA_KEY: Final = "iop.weight_sources"

MODELS_MAX: Final = 1024
PATH_CHARS_MAX: Final = 4096
"""What a peer may make us keep."""


def source_words(sources: Mapping[str, tuple[str, DiskSource]]) -> dict[str, Any]:
    """By model, as a JSON-like object: weight_version, path and format."""
    return {
        model: {"weight_version": version, "path": source.path, "format": source.format.name.lower()}
        for model, (version, source) in sources.items()
    }


def read_sources(told: object) -> dict[str, tuple[str, DiskSource]]:
    """What a server told, as far as it can be read; a peer's odd words are no source."""
    if not isinstance(told, Mapping) or len(told) > MODELS_MAX:
        return {}
    found: dict[str, tuple[str, DiskSource]] = {}
    for model, words in told.items():
        if not isinstance(words, Mapping):
            continue
        version, path, name = words.get("weight_version"), words.get("path"), words.get("format")
        if not isinstance(version, str) or not isinstance(path, str) or not isinstance(name, str):
            continue
        kind = {each.name.lower(): each for each in WeightFormat}.get(name)
        if kind is not None and version and path.startswith("/") and len(path) <= PATH_CHARS_MAX:
            found[str(model)] = (version, DiskSource(path=path, format=kind))
    return found
