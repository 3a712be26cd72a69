"""Every effective value of a config and where it came from; secrets hidden."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iop.config.loader import Loaded
from iop.config.problems import DEFAULT_ORIGIN, Origin
from iop.config.tree import ModelProvider
from iop.config.values import HIDDEN, Address, Secret, SecretHash, StoreUrl

__all__ = ["ConfigChange", "EffectiveValue", "changes_between", "effective_values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One row: the dotted key, the value as text, and its origin as text."""

    key: str
    value: str
    origin: str


def effective_values(loaded: Loaded[Any]) -> list[EffectiveValue]:
    """One row per leaf of the tree, in the tree's order."""
    return [
        EffectiveValue(key=key, value=value, origin=str(_origin(key, loaded.origins)))
        for key, _, value in _leaves(loaded.config, "")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """One value that differs; None: absent on that side. A changed secret shows as hidden on both sides."""

    key: str
    before: str | None
    after: str | None


def changes_between(old: object, new: object) -> list[ConfigChange]:
    """How two trees differ, leaf by leaf; items of lists are known by their id or name where they have one."""
    before = {key: (leaf, shown) for key, leaf, shown in _leaves(old, "", by_name=True)}
    after = {key: (leaf, shown) for key, leaf, shown in _leaves(new, "", by_name=True)}
    return [
        ConfigChange(
            key=key,
            before=before[key][1] if key in before else None,
            after=after[key][1] if key in after else None,
        )
        for key in dict.fromkeys((*before, *after))
        if key not in before or key not in after or before[key][0] != after[key][0]
    ]


def _origin(key: str, origins: Mapping[str, Origin]) -> Origin:
    return origins.get(key, DEFAULT_ORIGIN)


def _leaves(value: object, key: str, *, by_name: bool = False) -> Iterator[tuple[str, object, str]]:
    """Key, leaf and its text of everything below ``value``."""
    if isinstance(value, Secret):
        yield key, value, f"{HIDDEN} ({value.reference})"
    elif isinstance(value, SecretHash):
        yield key, value, HIDDEN
    elif value is None or isinstance(value, Address | StoreUrl | Path | str | int | float):
        yield key, value, _shown(value)
    elif isinstance(value, tuple):
        if not value or not dataclasses.is_dataclass(value[0]):
            yield key, value, f"[{', '.join(_shown(item) for item in value)}]"
        else:
            for index, item in enumerate(value):
                label = _label(item) if by_name else ""
                yield from _leaves(item, f"{key}[{label or index}]", by_name=by_name)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}", by_name=by_name)
    else:
        assert dataclasses.is_dataclass(value)
        for item in dataclasses.fields(value):
            below = f"{key}.{item.name}" if key else item.name
            yield from _leaves(getattr(value, item.name), below, by_name=by_name)


def _label(item: object) -> str:
    """What an item of a list is known by; empty when by its place only."""
    if isinstance(item, ModelProvider):
        return f"{item.node}/{item.adapter}"
    return str(
        getattr(item, "id", None) or getattr(item, "provider_id", None) or getattr(item, "name", None) or ""
    )


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
