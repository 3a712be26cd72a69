"""JSON with what the fast encoder and decoders refuse: integers beyond 64 bits, and half of a surrogate pair.

Callers and providers may send both, and some of it is written again: in what an answer repeats, in arguments of calls.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

__all__ = ["json_text", "read_text", "without_halves"]

_HALVES: Final = re.compile(
    rb"(?<!\\)((?:\\\\)*+)(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Behind backslashes that stand for themselves, a surrogate pair, or else half of one."""


def json_text(value: Any) -> bytes:
    """The JSON of a value made of plain objects, compact; in ASCII where it holds what the fast encoder refuses."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def read_text(literal: bytes) -> str:
    """A string that is known to be JSON, be there halves in it."""
    try:
        text: str = orjson.loads(literal)
    except orjson.JSONDecodeError:
        text = json.loads(literal)
    return text


def without_halves(data: bytes) -> bytes:
    """JSON of the same length with another escape in place of each that is half a pair; the same object without any."""
    text = _HALVES.sub(_whole, data)
    return data if text == data else text


def _whole(found: re.Match[bytes]) -> bytes:
    return found[0] if found[2] is not None else found[1] + b"\\ufffd"
