"""Reads raw values into a settings tree, guided by the tree's own types, and collects every problem on the way."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from iop.config.problems import DEFAULT_ORIGIN, Origin, OriginKind, Problem
from iop.config.raw import RawList, RawMap, RawScalar, RawValue
from iop.config.values import Address, Secret, SecretHash, StoreUrl, parse_address
from iop.core.ids import is_name

__all__ = ["Reader", "SecretSource"]

T = TypeVar("T")

_DIGITS_MAX: Final = 20
"""Longest integer worth converting; a longer one is out of every bound, and its conversion would cost time."""


class SecretSource(Protocol):
    """Where references of secrets are looked up."""

    def read_file(self, path: Path) -> str:
        """The file's text. Raises OSError."""
        ...

    def read_variable(self, name: str) -> str | None:
        """The variable's value, None when it is not set."""
        ...


class _Bad(Exception):
    """A value that cannot be read: what is wrong, and the fix."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message, self.fix = message, fix


class _Failed:
    """Stands for a value that could not be read; the problem is noted already."""


FAILED: Final = _Failed()


class Reader:
    """Reads one tree. Afterwards ``problems`` and ``origins`` (by dotted key, for leaves that were given) are filled.

    A value that cannot be read does not end the reading: its default or a stand-in takes its place and its key goes
    into ``unread``, so that the rules between keys can still judge the rest.

    Args:
        secrets: where ``file:`` and ``env:`` lead.
        base_dir: what relative paths count from.
    """

    def __init__(self, *, secrets: SecretSource, base_dir: Path) -> None:
        self._secrets = secrets
        self._base_dir = base_dir
        self.problems: list[Problem] = []
        self.origins: dict[str, Origin] = {}
        self.unread: set[str] = set()

    def read(self, tree: type[T], raw: RawMap) -> T | None:
        """The tree, with stand-ins where ``unread`` says so; None when something has neither default nor stand-in."""
        value = self._section(tree, raw, "")
        return value if isinstance(value, tree) else None

    # --- structure ----------------------------------------------------------------------------------------------------

    def _section(self, tree: type[Any], raw: RawMap, key: str) -> Any:
        hints = typing.get_type_hints(tree)
        fields = {item.name: item for item in dataclasses.fields(tree)}
        for name, value in raw.entries.items():
            if name not in fields:
                self._note(value.origin, _join(key, name), "unknown key", _did_you_mean(name, fields))
        values: dict[str, Any] = {}
        for name, item in fields.items():
            path = _join(key, name)
            given = raw.entries.get(name)
            if given is None:
                if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                    doc = item.metadata.get("doc", "its value")
                    self._note(raw.origin, path, "is required", f"Add {name}: {doc}")
                    values[name] = self._stand_in(hints[name], item, path)
                continue
            value = self._value(hints[name], given, path, item.metadata)
            if value is FAILED:
                value = self._stand_in(hints[name], item, path)
            # A key written without a value means its default, where it has one and may not be null.
            if value is not None or _allows_none(hints[name]):
                values[name] = value
        if any(value is FAILED for value in values.values()):
            return FAILED
        return tree(**values)

    def _value(self, wanted: Any, raw: RawValue, key: str, metadata: Mapping[str, Any]) -> Any:
        origin_type = typing.get_origin(wanted)
        if isinstance(raw, RawScalar) and raw.is_null and not raw.is_quoted:
            return self._null(wanted, raw, key, metadata)
        if origin_type in {typing.Union, types.UnionType}:
            return self._union(wanted, raw, key, metadata)
        if origin_type is tuple:
            return self._list(typing.get_args(wanted)[0], raw, key, metadata)
        if origin_type is not None and isinstance(origin_type, type) and issubclass(origin_type, Mapping):
            return self._mapping(typing.get_args(wanted)[1], raw, key, metadata)
        if dataclasses.is_dataclass(wanted) and wanted not in _LEAVES:
            if not isinstance(raw, RawMap):
                return self._wrong(raw, key, "must be a mapping", "Write it as KEY: VALUE lines")
            return self._section(typing.cast("type[Any]", wanted), raw, key)
        return self._leaf(wanted, raw, key, metadata)

    def _null(self, wanted: Any, raw: RawScalar, key: str, metadata: Mapping[str, Any]) -> Any:
        if _allows_none(wanted):
            self.origins[key] = raw.origin
            return None
        if typing.get_origin(wanted) is tuple:
            return ()
        if dataclasses.is_dataclass(wanted) and wanted not in _LEAVES:
            return self._section(typing.cast("type[Any]", wanted), RawMap(entries={}, origin=raw.origin), key)
        return self._wrong(
            raw, key, "has no value", f"Write {metadata.get('doc', 'a value')}, or remove the key"
        )

    def _union(self, wanted: Any, raw: RawValue, key: str, metadata: Mapping[str, Any]) -> Any:
        members = [member for member in typing.get_args(wanted) if member is not type(None)]
        if len(members) == 1:
            return self._value(members[0], raw, key, metadata)
        # The only choice in the trees is between a name and something written out.
        sections = [
            member for member in members if dataclasses.is_dataclass(member) and member not in _LEAVES
        ]
        rest = [member for member in members if member not in sections]
        return self._value(sections[0] if isinstance(raw, RawMap) else rest[0], raw, key, metadata)

    def _list(self, wanted: Any, raw: RawValue, key: str, metadata: Mapping[str, Any]) -> Any:
        if not isinstance(raw, RawList):
            return self._wrong(raw, key, "must be a list", "Write [A, B], or a line with - for each")
        items = [
            self._value(wanted, item, f"{key}[{index}]", metadata) for index, item in enumerate(raw.items)
        ]
        return FAILED if any(item is FAILED for item in items) else tuple(items)

    def _mapping(self, wanted: Any, raw: RawValue, key: str, metadata: Mapping[str, Any]) -> Any:
        if not isinstance(raw, RawMap):
            return self._wrong(raw, key, "must be a mapping", "Write it as KEY: VALUE lines")
        items = {
            name: self._value(wanted, item, _join(key, name), metadata) for name, item in raw.entries.items()
        }
        return FAILED if any(item is FAILED for item in items.values()) else items

    # --- leaves -------------------------------------------------------------------------------------------------------

    def _leaf(self, wanted: Any, raw: RawValue, key: str, metadata: Mapping[str, Any]) -> Any:
        if not isinstance(raw, RawScalar):
            return self._wrong(
                raw, key, "must be a single value", f"Write {metadata.get('doc', 'one value')}"
            )
        try:
            value = self._scalar(wanted, raw, metadata)
        except _Bad as bad:
            return self._wrong(raw, key, bad.message, bad.fix)
        self.origins[key] = raw.origin
        return value

    def _scalar(self, wanted: Any, raw: RawScalar, metadata: Mapping[str, Any]) -> Any:
        text = raw.text
        if typing.get_origin(wanted) is Literal:
            choices = typing.get_args(wanted)
            if text not in choices:
                raise _Bad(f"{_shown(text)} is not one of its values", f"Write one of: {', '.join(choices)}")
            return text
        if wanted is bool:
            if text.lower() not in {"true", "false"} or raw.is_quoted:
                raise _Bad(f"{_shown(text)} is neither true nor false", "Write true or false")
            return text.lower() == "true"
        if wanted is int or wanted is float:
            return _number(text, metadata, whole=wanted is int)
        if wanted is str:
            return _text(text, metadata)
        if wanted is Path:
            if not text:
                raise _Bad("is empty", "Write a path")
            return self._base(raw.origin) / text
        if wanted is Address:
            try:
                return parse_address(text)
            except ValueError as error:
                raise _Bad(f"{_shown(text)} is no address", str(error)) from None
        if wanted is StoreUrl:
            return self._store(text, raw.origin)
        if wanted is Secret:
            return Secret(
                reference=text, _value=self._secret(text, raw.origin, "Write file:PATH or env:NAME")
            )
        if wanted is SecretHash:
            return self._secret_hash(text, raw.origin)
        raise AssertionError(wanted)

    def _base(self, origin: Origin) -> Path:
        """Relative paths count from the file that holds them; those of flags and variables from where we are."""
        return self._base_dir if origin.kind is OriginKind.FILE else Path()

    def _secret(self, text: str, origin: Origin, advice: str) -> str:
        """Look a reference up. The text itself is never quoted: it may be a secret written by mistake."""
        kind, _, name = text.partition(":")
        if kind not in {"file", "env"} or not name:
            raise _Bad("a secret must be a reference, not the secret itself", advice)
        if kind == "env":
            value = self._secrets.read_variable(name)
            if value is None:
                raise _Bad(f"the environment variable {name} is not set", f"Set {name}, or name another one")
        else:
            try:
                value = self._secrets.read_file(self._base(origin) / name)
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not text"
                raise _Bad(
                    f"the file {name} cannot be read ({reason})", "Create it, or mend its path or mode"
                ) from None
        value = value.strip()
        if not value or not value.isprintable():
            raise _Bad(f"{text} leads to an empty or unprintable value", "Put one line of text there")
        return value

    def _secret_hash(self, text: str, origin: Origin) -> SecretHash:
        advice = "Write sha256:HEX, file:PATH or env:NAME"
        if text.startswith("sha256:"):
            digits = text.removeprefix("sha256:")
            if len(digits) != 64 or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise _Bad(
                    "a sha256: reference needs 64 hexadecimal digits", "Hash the secret with sha256sum"
                )
            return SecretHash(digest=bytes.fromhex(digits))
        return SecretHash.of(self._secret(text, origin, advice))

    def _store(self, text: str, origin: Origin) -> StoreUrl:
        advice = (
            "Write sqlite:///PATH or postgresql://USER@HOST/DATABASE, or a reference file: or env: to one"
        )
        if text.startswith(("file:", "env:")):
            text = self._secret(text, origin, advice)
        if text.startswith("sqlite:///") and len(text) > len("sqlite:///"):
            return StoreUrl(url=text).under(self._base(origin))
        if text.startswith(("postgresql://", "postgres://")):
            return StoreUrl(url=text)
        raise _Bad("is no store that is known here", advice)

    def _stand_in(self, wanted: Any, item: dataclasses.Field[Any], key: str) -> Any:
        """What takes the place of an unreadable value. Names and digests are unique, so that they repeat nobody's."""
        self.unread.add(key)
        if _allows_none(wanted):
            return None
        if item.default is not dataclasses.MISSING:
            return item.default
        if item.default_factory is not dataclasses.MISSING:
            return item.default_factory()
        if typing.get_origin(wanted) is Literal:
            return typing.get_args(wanted)[0]
        if wanted is str:
            return f"unread-{key}"
        if wanted is SecretHash:
            return SecretHash.of(f"unread-{key}")
        if wanted is Secret:
            return Secret(reference="", _value="")
        if wanted is Path:
            return Path()
        if wanted is Address:
            return parse_address("127.0.0.1:1")
        return FAILED

    # --- problems -----------------------------------------------------------------------------------------------------

    def _wrong(self, raw: RawValue, key: str, message: str, fix: str) -> _Failed:
        self._note(raw.origin, key, message, fix)
        return FAILED

    def _note(self, origin: Origin, key: str, message: str, fix: str) -> None:
        where = origin.where or str(DEFAULT_ORIGIN)
        self.problems.append(Problem(where=where, key=key, message=message, fix=fix))


_LEAVES: Final = frozenset({Address, Secret, SecretHash, StoreUrl})


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _allows_none(wanted: Any) -> bool:
    return type(None) in typing.get_args(wanted)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _did_you_mean(name: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, fields, n=1)
    if close:
        return f"Write {close[0]}, if that is what you mean"
    return f"Known here: {', '.join(fields)}"


def _number(text: str, metadata: Mapping[str, Any], *, whole: bool) -> int | float:
    low, high = metadata.get("min", 0), metadata.get("max", 2**53)
    bounds = (
        f"Write a whole number from {low} to {high}" if whole else f"Write a number from {low:g} to {high:g}"
    )
    digits = text.removeprefix("-").removeprefix("+")
    if not digits.isascii() or len(digits) > _DIGITS_MAX or "_" in digits:
        raise _Bad(f"{_shown(text)} is not such a number", bounds)
    try:
        value: int | float = int(text) if whole else float(text)
    except ValueError:
        raise _Bad(f"{_shown(text)} is not such a number", bounds) from None
    if not (math.isfinite(value) and low <= value <= high):
        raise _Bad(f"{text} is out of range", bounds)
    return value


def _text(text: str, metadata: Mapping[str, Any]) -> str:
    if not text.isprintable():
        raise _Bad("has unprintable characters", "Remove them")
    rule = metadata.get("name")
    if rule and not is_name(text) and not (rule == "or empty" and not text):
        raise _Bad(f"{_shown(text)} is no name", "Use letters, digits, '.', '_' and '-', at most 128 of them")
    if not text and not rule:
        raise _Bad("is empty", f"Write {metadata.get('doc', 'some text')}")
    schemes = metadata.get("scheme")
    if schemes:
        _check_url(text, schemes)
    return text


def _check_url(text: str, schemes: tuple[str, ...]) -> None:
    advice = f"Write {' or '.join(schemes)}://HOST:PORT"
    try:
        parts = urlsplit(text)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        raise _Bad(f"{_shown(text)} is no URL", advice) from None
    if parts.scheme not in schemes or not parts.hostname or not port_is_fine:
        raise _Bad(f"{_shown(text)} is no such URL", advice)
    if parts.username or parts.password:
        raise _Bad("a URL must not hold credentials", "Put them under api_key as file: or env:")
    if parts.query or parts.fragment:
        raise _Bad("a base URL has no query and no fragment", advice)
