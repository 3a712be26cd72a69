"""Every effective value of a config and where it came from; secrets hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from iop.config.loader import Loaded
from iop.config.problems import DEFAULT_ORIGIN, Origin
from iop.config.values import HIDDEN, Address, Secret, SecretHash, StoreUrl

__all__ = ["EffectiveValue", "effective_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One row: the dotted key, the value as text, and its origin as text."""

    key: str
    value: str
    origin: str


def effective_values(loaded: Loaded[object]) -> list[EffectiveValue]:
    """One row per leaf of the tree, in the tree's order."""
    return [
        EffectiveValue(key=key, value=value, origin=str(_origin(key, loaded.origins)))
        for key, value in _leaves(loaded.config, "")
    ]


def _origin(key: str, origins: Mapping[str, Origin]) -> Origin:
    return origins.get(key, DEFAULT_ORIGIN)


def _leaves(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Secret):
        yield key, f"{HIDDEN} ({value.reference})"
    elif isinstance(value, SecretHash):
        yield key, HIDDEN
    elif value is None or isinstance(value, Address | StoreUrl | Path | str | int | float):
        yield key, _shown(value)
    elif isinstance(value, tuple):
        if not value or not dataclasses.is_dataclass(value[0]):
            yield key, f"[{', '.join(_shown(item) for item in value)}]"
        else:
            for index, item in enumerate(value):
                yield from _leaves(item, f"{key}[{index}]")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}")
    else:
        assert dataclasses.is_dataclass(value)
        for item in dataclasses.fields(value):
            yield from _leaves(getattr(value, item.name), f"{key}.{item.name}" if key else item.name)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
