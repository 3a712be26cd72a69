"""Pickles of numbers, strings, bytes and named things, read and written without being executed. Pure.

Reading knows the instructions that plain data consists of. A name stays a name, and a call stays a call that nobody
makes. Every other instruction is refused, so nothing that comes in here is ever imported, built or run.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a name that stands where its result would."""

    function: Global
    arguments: tuple[object, ...]


_MARK: Final = object()
_VALUES: Final = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES"}
)
_CONSTANTS: Final[Mapping[str, object]] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
    "MARK": _MARK,
}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_KNOWN: Final = {
    each.code.encode("latin-1"): each
    for each in pickletools.opcodes
    if each.name
    in {
        *_VALUES,
        *_CONSTANTS,
        *_TUPLES,
        "PROTO",
        "FRAME",
        "TUPLE",
        "EMPTY_DICT",
        "SETITEM",
        "SETITEMS",
        "MEMOIZE",
        "BINGET",
        "LONG_BINGET",
        "STACK_GLOBAL",
        "REDUCE",
        "STOP",
    }
}


def read(pickle: bytes) -> object:
    """The value, with :class:`Global` for names and :class:`Call` for calls.

    Raises:
        ValueError: an instruction that data of this sort does not need, or no pickle.
    """
    stack: list[object] = []
    memo: list[object] = []
    try:
        for code, argument in _instructions(pickle):
            if code == "STOP":
                (value,) = stack
                return value
            _step(code, argument, stack, memo)
    except (IndexError, TypeError, OverflowError) as exc:
        raise ValueError("a broken pickle") from exc
    raise ValueError("a pickle without an end")


def _instructions(pickle: bytes) -> Iterator[tuple[str, Any]]:
    """Names and arguments. Of an instruction that is not known even the argument is not looked at."""
    source = io.BytesIO(pickle)
    while byte := source.read(1):
        found = _KNOWN.get(byte)
        if found is None:
            raise ValueError("an instruction that data does not need")
        yield found.name, found.arg.reader(source) if found.arg is not None else None


def _step(code: str, argument: Any, stack: list[object], memo: list[object]) -> None:
    if code in {"PROTO", "FRAME"}:
        return
    if code in _VALUES:
        stack.append(argument)
    elif code in _CONSTANTS:
        stack.append(_CONSTANTS[code])
    elif code in _TUPLES:
        parts = [stack.pop() for _ in range(_TUPLES[code])]
        stack.append(tuple(reversed(parts)))
    elif code == "TUPLE":
        stack.append(tuple(_above_mark(stack)))
    elif code == "EMPTY_DICT":
        stack.append({})
    elif code == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _put(stack[-1], key, value)
    elif code == "SETITEMS":
        items = _above_mark(stack)
        for key, value in zip(items[::2], items[1::2], strict=True):
            _put(stack[-1], key, value)
    elif code == "MEMOIZE":
        memo.append(stack[-1])
    elif code in {"BINGET", "LONG_BINGET"}:
        stack.append(memo[argument])
    elif code == "STACK_GLOBAL":
        name, module = stack.pop(), stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise ValueError("a name that is none")
        stack.append(Global(module, name))
    else:  # REDUCE
        arguments, function = stack.pop(), stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise ValueError("a call of nothing")
        stack.append(Call(function, arguments))


def _above_mark(stack: list[object]) -> list[object]:
    parts: list[object] = []
    while (top := stack.pop()) is not _MARK:
        parts.append(top)
    return parts[::-1]


def _put(mapping: object, key: object, value: object) -> None:
    if not isinstance(mapping, dict) or not isinstance(key, str):
        raise ValueError("an entry of no mapping by name")
    mapping[key] = value


def written(value: object) -> bytes:
    """A pickle (protocol 4) of what :func:`read` gives, and of lists.

    Raises:
        TypeError: anything else.
    """
    parts = [b"\x80\x04"]
    _write(value, parts.append)
    parts.append(b".")
    return b"".join(parts)


def _write(value: object, put: Callable[[bytes], object]) -> None:
    match value:
        case None:
            put(b"N")
        case bool():
            put(b"\x88" if value else b"\x89")
        case int():
            digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            put(b"\x8a" + bytes([len(digits)]) + digits)
        case str():
            text = value.encode()
            put(b"X" + len(text).to_bytes(4, "little") + text)
        case bytes():
            put(b"B" + len(value).to_bytes(4, "little") + value)
        case Global(module=module, name=name):
            _write(module, put)
            _write(name, put)
            put(b"\x93")
        case Call(function=function, arguments=arguments):
            _write(function, put)
            _write(arguments, put)
            put(b"R")
        case tuple():
            _write_all(b"(", value, b"t", put)
        case list():
            _write_all(b"](", value, b"e", put)
        case dict():
            _write_all(b"}(", [part for item in value.items() for part in item], b"u", put)
        case _:
            raise TypeError(f"{type(value).__name__} is no data of a handle")


def _write_all(before: bytes, values: Any, after: bytes, put: Callable[[bytes], object]) -> None:
    put(before)
    for each in values:
        _write(each, put)
    put(after)
