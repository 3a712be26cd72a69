"""Frozen dataclasses to and from JSON, driven by their type hints.

Only what the journal stores passes through here: scalars, enums, bytes, tuples, frozensets, mappings, optionals, unions
and dataclasses of those. Fields that a row lacks take their default, so a newer version reads older rows; fields that
it does not know are an error, since an older version must not drop what a newer one wrote.
"""

from __future__ import annotations

import base64
import collections.abc
import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

__all__ = ["dumps", "loads"]

T = TypeVar("T")
_Encode = Callable[[Any], Any]
_Decode = Callable[[Any], Any]


def dumps(value: object, hint: Any) -> str:
    """Text of a value of the hinted type."""
    return json.dumps(_codec(hint)[0](value), separators=(",", ":"), ensure_ascii=False)


def loads(text: str, hint: type[T]) -> T:
    """The value of a text that `dumps` made.

    Raises:
        ValueError: the text does not fit the type.
    """
    try:
        value: T = _codec(cast("Hashable", hint))[1](json.loads(text))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"a stored {getattr(hint, '__name__', hint)} cannot be read") from exc
    return value


def _same(value: Any) -> Any:
    return value


@functools.cache
def _codec(hint: Any) -> tuple[_Encode, _Decode]:
    """Encoder and decoder of one type; cached, since building them is the slow part."""
    if isinstance(hint, typing.NewType):
        return _codec(hint.__supertype__)
    if hint in {str, int, float, bool} or hint is types.NoneType:
        return _same, _same
    if hint is bytes:
        return (lambda v: base64.b64encode(v).decode()), base64.b64decode
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return _union_codec(args)
    if origin is tuple:
        return _tuple_codec(args)
    if origin is frozenset:
        encode, decode = _codec(args[0])
        return (lambda v: sorted(encode(i) for i in v)), (lambda v: frozenset(decode(i) for i in v))
    if origin in {collections.abc.Mapping, dict}:
        return _mapping_codec(args)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return (lambda v: v.value), hint
    if dataclasses.is_dataclass(hint):
        return _dataclass_codec(typing.cast("type", hint))
    raise TypeError(f"no stored form for {hint!r}")


def _tuple_codec(args: tuple[Any, ...]) -> tuple[_Encode, _Decode]:
    if len(args) == 2 and args[1] is Ellipsis:
        encode, decode = _codec(args[0])
        return (lambda v: [encode(i) for i in v]), (lambda v: tuple(decode(i) for i in v))
    codecs = [_codec(a) for a in args]
    return (
        lambda v: [c[0](i) for c, i in zip(codecs, v, strict=True)],
        lambda v: tuple(c[1](i) for c, i in zip(codecs, v, strict=True)),
    )


def _mapping_codec(args: tuple[Any, ...]) -> tuple[_Encode, _Decode]:
    (encode_key, decode_key), (encode, decode) = _codec(args[0]), _codec(args[1])
    return (
        lambda v: [[encode_key(k), encode(i)] for k, i in v.items()],
        lambda v: {decode_key(k): decode(i) for k, i in v},
    )


def _name_of(arm: Any) -> str:
    return getattr(arm, "__name__", None) or str(arm)


def _union_codec(args: tuple[Any, ...]) -> tuple[_Encode, _Decode]:
    """None as null; one other arm as itself; several as [name of the arm, value]."""
    arms = [a for a in args if a is not types.NoneType]
    if len(arms) == 1:
        encode_one, decode_one = _codec(arms[0])
        return (
            lambda v: None if v is None else encode_one(v),
            lambda v: None if v is None else decode_one(v),
        )
    by_name = {_name_of(a): a for a in arms}

    def encode(value: Any) -> Any:
        if value is None:
            return None
        name = type(value).__name__
        return [name, _codec(by_name[name])[0](value)]

    def decode(stored: Any) -> Any:
        if stored is None:
            return None
        name, value = stored
        return _codec(by_name[name])[1](value)

    return encode, decode


def _dataclass_codec(hint: type) -> tuple[_Encode, _Decode]:
    # Built on first use: types may refer to themselves.
    fields: dict[str, tuple[_Encode, _Decode]] = {}

    def known() -> dict[str, tuple[_Encode, _Decode]]:
        if not fields:
            hints = typing.get_type_hints(hint)
            fields.update({f.name: _codec(hints[f.name]) for f in dataclasses.fields(hint)})
        return fields

    def encode(value: Any) -> Any:
        return {name: codec[0](getattr(value, name)) for name, codec in known().items()}

    def decode(stored: Any) -> Any:
        codecs = known()
        return hint(**{name: codecs[name][1](value) for name, value in stored.items()})

    return encode, decode
