"""Load a config: defaults, then file, then environment, then flags; all problems at once, or the whole tree.

Nothing here reads a file or a variable by itself: :class:`Sources` brings text and environment, and a
:class:`~iop.config.reader.SecretSource` looks secrets up. The process's own sources are gathered in ``iop.cli`` and
``iop.app``.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from iop.config.problems import ConfigInvalid, Origin, OriginKind, Problem
from iop.config.raw import RawMap, from_overrides, merge, parse_yaml
from iop.config.reader import Reader, SecretSource
from iop.config.rules import Note, check_edge, check_engine, check_node, warn_edge, warn_node
from iop.config.tree import EdgeConfig, EngineConfig, NodeConfig

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Loaded",
    "Sources",
    "load_edge",
    "load_engine",
    "load_node",
    "variable_names",
]

ENVIRONMENT_PREFIX: Final = "IOP_"

_OTHER_VARIABLES: Final = (
    "IOP_ENGINE_",
    "IOP_HOME",
    "IOP_LOG",
    "IOP_PARENT",
    "IOP_SIM",
    "IOP_BENCH",
    "IOP_TEST",
)
"""Prefixes of variables of ours that are no config keys."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a config is made of.

    Attributes:
        text: the file's content; empty when there is no file.
        file: how to call the file in messages; None when there is none.
        base_dir: what relative paths count from: the file's directory.
        environment: the process's variables.
        flags: by dotted key: text and flag, as in ``{"listen.http": ("127.0.0.1:0", "--http")}``.
        secrets: where ``file:`` and ``env:`` lead.
    """

    secrets: SecretSource
    text: str = ""
    file: str | None = None
    base_dir: Path = Path()
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[T]):
    """A valid config, where each given value came from (by dotted key), and what is worth a warning."""

    config: T
    origins: Mapping[str, Origin]
    warnings: tuple[str, ...]


def load_edge(sources: Sources) -> Loaded[EdgeConfig]:
    """Load edge.yaml. Raises ConfigInvalid with every problem found."""
    return _load(EdgeConfig, sources, check=check_edge, warn=warn_edge)


def load_node(sources: Sources) -> Loaded[NodeConfig]:
    """Load node.yaml. Raises ConfigInvalid with every problem found."""
    return _load(NodeConfig, sources, check=check_node, warn=warn_node)


def load_engine(sources: Sources) -> Loaded[EngineConfig]:
    """Load engine.yaml. Raises ConfigInvalid with every problem found."""
    return _load(EngineConfig, sources, check=check_engine, warn=lambda _: ())


def _load(
    tree: type[T],
    sources: Sources,
    *,
    check: Callable[[T, Note], None],
    warn: Callable[[T], tuple[str, ...]],
) -> Loaded[T]:
    place = sources.file or "config"
    raw, problems = parse_yaml(sources.text, where=place)
    variables, unknown = _variables(tree, sources.environment)
    problems += unknown
    raw = merge(raw, from_overrides(variables, kind=OriginKind.ENVIRONMENT))
    raw = merge(raw, from_overrides(dict(sources.flags), kind=OriginKind.FLAG))
    reader = Reader(secrets=sources.secrets, base_dir=sources.base_dir)
    config = reader.read(tree, raw)
    problems += reader.problems

    def note(key: str, message: str, fix: str, reads: tuple[str, ...] = ()) -> None:
        if any(_touches(unread, other) for unread in reader.unread for other in (key, *reads)):
            return
        problems.append(
            Problem(where=_where(key, reader.origins, raw, place), key=key, message=message, fix=fix)
        )

    if config is not None:
        check(config, note)
    if problems or config is None:
        raise ConfigInvalid(problems)
    return Loaded(config=config, origins=reader.origins, warnings=warn(config))


def _touches(unread: str, key: str) -> bool:
    """Whether the value at ``key`` is, or lies in, one that could not be read."""
    return key == unread or key.startswith((f"{unread}.", f"{unread}["))


def _where(key: str, origins: Mapping[str, Origin], raw: RawMap, place: str) -> str:
    """The place of a key: its own, or that of the nearest section around it that was written."""
    if key in origins:
        return origins[key].where
    around = key
    while around:
        for name, origin in origins.items():
            if name.startswith((f"{around}.", f"{around}[")):
                return origin.where
        around = around[: max(around.rfind("."), around.rfind("["), 0)]
    top = raw.entries.get(key.partition(".")[0].partition("[")[0])
    return top.origin.where if top is not None and top.origin.where else place


# --- environment ------------------------------------------------------------------------------------------------------


def _variables(
    tree: type[Any], environment: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], list[Problem]]:
    """Variables that name keys of ``tree``. One that names no key of any config is a problem, like an unknown key."""
    keys = {_variable_name(key): key for key in _keys(tree)}
    foreign = variable_names(EdgeConfig) | variable_names(NodeConfig) | variable_names(EngineConfig)
    found: dict[str, tuple[str, str]] = {}
    problems: list[Problem] = []
    for name, text in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX) or name.startswith(_OTHER_VARIABLES):
            continue
        if name in keys:
            found[keys[name]] = (text, name)
        elif name not in foreign:
            problems.append(
                Problem(
                    where=name, key="", message="names no key of a config", fix="Unset it, or mend its name"
                )
            )
    return found, problems


def variable_names(tree: type[Any]) -> frozenset[str]:
    """Every environment variable that sets a key of ``tree``."""
    return frozenset(_variable_name(key) for key in _keys(tree))


def _variable_name(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


def _keys(tree: type[Any], prefix: str = "") -> list[str]:
    """Dotted keys of the tree, down to lists, mappings and leaves."""
    from_types = typing.get_type_hints(tree)
    keys: list[str] = []
    for item in dataclasses.fields(tree):
        key = f"{prefix}{item.name}"
        sections = [
            member
            for member in (from_types[item.name], *typing.get_args(from_types[item.name]))
            if dataclasses.is_dataclass(member) and member.__module__ == tree.__module__
        ]
        is_list = typing.get_origin(from_types[item.name]) is tuple
        if sections and not is_list:
            keys += _keys(typing.cast("type[Any]", sections[0]), f"{key}.")
        else:
            keys.append(key)
    return keys
