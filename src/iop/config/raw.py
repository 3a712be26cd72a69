"""Config sources as trees of raw text, each value with its place, before any meaning is read into them.

YAML is composed and never constructed: scalars stay text until the reader knows the type wanted, so ``on`` is no
boolean, ``1:30`` no number of base sixty, and a node named ``007`` keeps its zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import yaml

from iop.config.problems import Origin, OriginKind, Problem

__all__ = ["RawList", "RawMap", "RawScalar", "RawValue", "from_overrides", "merge", "parse_yaml"]

FILE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest config file; a thousand nodes need a tenth of it."""

VALUES_MAX: Final = 200_000
"""Most values after aliases are followed; more is a file that expands without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawScalar:
    """Text as written. ``is_null`` tells an absent or ``null`` value, ``is_quoted`` one that can only be a string."""

    text: str
    origin: Origin
    is_null: bool = False
    is_quoted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RawList:
    """A sequence."""

    items: tuple[RawValue, ...]
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMap:
    """A mapping; keys are text."""

    entries: Mapping[str, RawValue]
    origin: Origin


RawValue: TypeAlias = RawScalar | RawList | RawMap


_FAST_LOADER: Final[type | None] = getattr(yaml, "CSafeLoader", None)
"""libyaml's, where PyYAML was built with it: a file of a thousand Nodes takes a tenth of the time."""

_READ_APART: Final = ("\t", "?", "\ufeff", "\u2028", "%", "|", ">", "!")
"""What the two loaders read differently in some places. All of it is rare, or a mistake that wants the better words."""


def _compose(text: str) -> yaml.Node | None:
    """The nodes of a text; what is wrong with one is always worded by the loader that is always there.

    Raises:
        yaml.YAMLError: with its place.
        RecursionError: nested too deeply.
    """
    if _FAST_LOADER is not None and not any(mark in text for mark in _READ_APART):
        try:
            return yaml.compose(text, Loader=_FAST_LOADER)
        except (yaml.YAMLError, UnicodeError):
            pass
    return yaml.compose(text, Loader=yaml.SafeLoader)


class _Converter:
    def __init__(self, *, where: str, kind: OriginKind, lines: bool) -> None:
        self._where, self._kind, self._lines = where, kind, lines
        self._left = VALUES_MAX
        self.problems: list[Problem] = []

    def origin(self, node: yaml.Node) -> Origin:
        line = f":{node.start_mark.line + 1}" if self._lines else ""
        return Origin(kind=self._kind, where=f"{self._where}{line}")

    def convert(self, node: yaml.Node) -> RawValue:
        self._left -= 1
        origin = self.origin(node)
        if self._left < 0:
            if self._left == -1:
                self._problem(origin, "", "has too many values", "Write fewer, and use fewer aliases")
            return RawScalar(text="", origin=origin, is_null=True)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, origin)
        if isinstance(node, yaml.SequenceNode):
            return RawList(items=tuple(self.convert(item) for item in node.value), origin=origin)
        assert isinstance(node, yaml.ScalarNode)
        return RawScalar(
            text=node.value,
            origin=origin,
            is_null=node.tag == "tag:yaml.org,2002:null",
            is_quoted=node.style in {"'", '"'},
        )

    def _mapping(self, node: yaml.MappingNode, origin: Origin) -> RawMap:
        entries: dict[str, RawValue] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(self.origin(key_node), "", "a key must be text", "Write KEY: VALUE")
                continue
            key = key_node.value
            if key in entries:
                self._problem(self.origin(key_node), key, "the key appears twice", "Keep one of them")
            entries[key] = self.convert(value_node)
        return RawMap(entries=entries, origin=origin)

    def _problem(self, origin: Origin, key: str, message: str, fix: str) -> None:
        self.problems.append(Problem(where=origin.where, key=key, message=message, fix=fix))


def parse_yaml(text: str, *, where: str) -> tuple[RawMap, list[Problem]]:
    """Read a config file's text. An empty file is an empty mapping; what cannot be read is a problem, not an error."""
    empty = RawMap(entries={}, origin=Origin(kind=OriginKind.FILE, where=where))
    if len(text) > FILE_BYTES_MAX:
        size = FILE_BYTES_MAX // (1024 * 1024)
        return empty, [
            Problem(where=where, key="", message="the file is too large", fix=f"Keep it under {size} MiB")
        ]
    try:
        node = _compose(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}" if mark is not None else where
        message = f"this is not YAML: {getattr(error, 'problem', None) or 'it cannot be parsed'}"
        return empty, [Problem(where=place, key="", message=message, fix="Mend the syntax at that line")]
    if node is None:
        return empty, []
    if not isinstance(node, yaml.MappingNode):
        message = "the file must be a mapping of keys to values"
        return empty, [Problem(where=f"{where}:1", key="", message=message, fix="Start it with KEY: VALUE")]
    converter = _Converter(where=where, kind=OriginKind.FILE, lines=True)
    try:
        value = converter.convert(node)
    except RecursionError:
        return empty, [Problem(where=where, key="", message="it is nested too deeply", fix="Flatten it")]
    assert isinstance(value, RawMap)
    return value, converter.problems


def _override_value(text: str, *, where: str, kind: OriginKind) -> RawValue:
    """A value from the environment or a flag: YAML in flow style where it begins like that, else plain text."""
    origin = Origin(kind=kind, where=where)
    if text[:1] in {"[", "{"}:
        try:
            node = _compose(text)
        except (yaml.YAMLError, RecursionError):
            node = None
        if node is not None:
            return _Converter(where=where, kind=kind, lines=False).convert(node)
    return RawScalar(text=text, origin=origin, is_null=text in {"null", "~"})


def from_overrides(values: Mapping[str, tuple[str, str]], *, kind: OriginKind) -> RawMap:
    """Make a tree of ``{dotted key: (text, where)}``."""
    origin = Origin(kind=kind, where="")
    root: dict[str, RawValue] = {}
    for key, (text, where) in sorted(values.items()):
        *parents, last = key.split(".")
        level = root
        for parent in parents:
            below = level.get(parent)
            if not isinstance(below, RawMap):
                below = RawMap(entries={}, origin=origin)
                level[parent] = below
            assert isinstance(below.entries, dict)
            level = below.entries
        level[last] = _override_value(text, where=where, kind=kind)
    return RawMap(entries=root, origin=origin)


def merge(lower: RawMap, upper: RawMap) -> RawMap:
    """``upper`` wins key by key; lists and scalars are replaced whole."""
    entries = dict(lower.entries)
    for key, value in upper.entries.items():
        below = entries.get(key)
        entries[key] = (
            merge(below, value) if isinstance(below, RawMap) and isinstance(value, RawMap) else value
        )
    return RawMap(entries=entries, origin=lower.origin)
