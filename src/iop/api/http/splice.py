"""Reads the few fields of a request body that routing needs, and replaces the bytes of ``model`` alone
(SF-03).

The body is validated as JSON and cut into its top-level values by one pass of a C decoder; then the top
level is walked by those values' lengths, which gives the place of ``model`` without looking at anything
nested. Everything else stays the caller's bytes: unknown fields, order, spelling of numbers, escapes, white
space. A key that stands twice on the top level is refused: two readers could pick different ones (P-15).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
import orjson

from iop.api.http.json_text import without_halves
from iop.core.errors import InvalidRequest
from iop.core.limits import KIB

__all__ = [
    "BRACKETS_MAX",
    "JsonWatch",
    "RequestFields",
    "brackets_of",
    "decode_object",
    "decode_request",
    "exceeds_depth",
    "find_value",
    "is_false",
    "is_true",
    "model_of",
    "read_fields",
    "repeated",
    "too_deep",
]

BRACKETS_MAX: Final = 1_000_000
"""Objects and lists in one body. Checking the depth of more would hold up the loop for over a tenth of a
second.
"""

HALVES_BYTES_MAX: Final = 512 * KIB
"""Most bytes that are searched for halves of characters at once: more would hold up the loop. What is read in one piece
is smaller, but for answers.
"""

MODEL_NAME_BYTES_MAX: Final = 512
"""Longest model name; it is looked up, logged and shown."""

_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, the last one whole or not: one that lacks its end is gone over once, not again from each of its quotes."""

_WHOLE_OR_OPEN: Final = re.compile(
    rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(")[^"\\]*+(?:\\.[^"\\]*+)*+(\\?)\Z', re.DOTALL
)
"""The same; of an open one the quote, and the backslash that waits for what it escapes."""

_KEY: Final = re.compile(rb'[ \t\r\n]*[{,][ \t\r\n]*"[^"\\]*(?:\\.[^"\\]*)*"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
"""From the end of a value, or the start of the object, to the next value."""
_CLOSE: Final = re.compile(rb"[ \t\r\n]*\}")
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in b"[]{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFields:
    """What routing reads of a body.

    Attributes:
        body: the caller's bytes, whole.
        model: the model as the caller named it.
        model_span: where its value stands in ``body``, quotes included.
        is_stream: whether ``stream`` is literally true.
        raw: the top-level values, undecoded.
    """

    body: bytes = field(repr=False)
    model: str
    model_span: tuple[int, int]
    is_stream: bool
    raw: Mapping[str, msgspec.Raw] = field(repr=False)

    def with_model(self, name: str) -> list[bytes]:
        """The body in parts with ``name`` in place of the model; the same bytes when it is the same name."""
        start, end = self.model_span
        value = msgspec.json.encode(name)
        if self.body[start:end] == value:
            return [self.body]
        return [self.body[:start] + value, self.body[end:]]

    @property
    def size(self) -> int:
        """Bytes of the caller's body."""
        return len(self.body)

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the prompt's text, where they were counted as the body was read."""
        return None

    @property
    def prompts(self) -> int:
        """How many prompts ``prompt`` stands for: texts or lists of ids each are one, a list of ids is one."""
        raw = self.raw.get("prompt")
        if raw is None or bytes(raw)[:1] != b"[":
            return 1
        try:
            items = orjson.loads(memoryview(raw))
        except orjson.JSONDecodeError:
            return 1
        return 1 if not items or isinstance(items[0], int) else len(items)

    def integer(self, name: str, default: int) -> int:
        """A top-level integer that fits 64 bits, else ``default``; the provider judges what it makes of
        others.
        """
        raw = self.raw.get(name)
        if raw is None:
            return default
        try:
            value = msgspec.json.decode(raw, type=int)
        except (msgspec.MsgspecError, ValueError):
            return default
        return value if -(2**63) <= value < 2**63 else default


def read_fields(body: bytes, *, depth_max: int) -> RequestFields:
    """Read a request body.

    Raises:
        InvalidRequest: not a JSON object, nested too deeply, a repeated key, or no model; the field is named.
    """
    text, raw = decode_request(body, depth_max)
    if exceeds_depth(body, depth_max):
        raise too_deep(depth_max)
    return RequestFields(
        body=body,
        model=model_of(raw),
        model_span=find_value(text, raw, "model"),
        is_stream=is_true(raw.get("stream")),
        raw=raw,
    )


def decode_request(body: bytes, depth_max: int) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """Cut a caller's JSON object into its members: as it is, or as it can be read, and then by the same lengths.

    Half a surrogate pair, as callers send who cut a text in the midst of a character, is JSON that no decoder here
    takes. The provider is sent it as it came, and may judge.

    Raises:
        InvalidRequest: as :func:`read_fields`.
    """
    try:
        return body, decode_object(body, depth_max)
    except InvalidRequest:
        if len(body) > HALVES_BYTES_MAX or (text := without_halves(body)) is body:
            raise
        return text, decode_object(text, depth_max)


def decode_object(body: bytes, depth_max: int) -> dict[str, msgspec.Raw]:
    """Cut a JSON object into its members, all of which are checked. Raises as :func:`read_fields`."""
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest("The body must be a JSON object.", reason="INVALID_JSON") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", reason="INVALID_JSON") from None
    except RecursionError:
        raise too_deep(depth_max) from None


def model_of(raw: Mapping[str, msgspec.Raw]) -> str:
    """The model as the caller named it. Raises InvalidRequest for none, and for what cannot be one."""
    value = raw.get("model")
    if value is None:
        raise _bad_model("is missing; name one of those that `GET /v1/models` lists")
    try:
        model = msgspec.json.decode(value, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _bad_model("must be a string") from None
    if not model or len(value) > MODEL_NAME_BYTES_MAX:
        raise _bad_model(f"must be a string of 1 to {MODEL_NAME_BYTES_MAX} bytes")
    return model


def is_true(value: msgspec.Raw | None) -> bool:
    """Whether a member is literally true."""
    return value is not None and bytes(value) == b"true"


def is_false(value: msgspec.Raw | None) -> bool:
    """Whether a member is literally false."""
    return value is not None and bytes(value) == b"false"


def find_value(body: bytes, raw: Mapping[str, msgspec.Raw], wanted: str) -> tuple[int, int]:
    """Where the value of top-level key ``wanted`` stands in ``body``, which decoded to ``raw``.

    Raises:
        InvalidRequest: a top-level key is repeated (reason DUPLICATE_KEY).
    """
    position = 0
    span = (0, 0)
    # The decoder keeps the order of first appearance and the last value. As long as each value stands where
    # the walk arrives, no key was repeated; where one was, either the bytes differ or keys are left over.
    match_key = _KEY.match
    for name, value in raw.items():
        key = match_key(body, position)
        if key is None:
            raise repeated()
        start = key.end()
        position = start + len(value)
        if not body.startswith(memoryview(value), start):  # compared in place: a picture may be 32 MiB
            raise repeated()
        if name == wanted:
            span = (start, position)
    if _CLOSE.match(body, position) is None:
        raise repeated()
    return span


def exceeds_depth(body: bytes, depth_max: int) -> bool:
    """Whether valid JSON nests deeper than ``depth_max``, or has too many brackets to tell quickly.

    Without strings and other text only brackets are left; each pass that removes the empty pairs takes away
    one level.
    """
    if body.count(b"{") + body.count(b"[") <= depth_max:
        return False
    brackets = brackets_of(body)
    if len(brackets) > 2 * BRACKETS_MAX:
        return True
    brackets = brackets.replace(b"[", b"{").replace(b"]", b"}")
    for _ in range(depth_max):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"")
    return bool(brackets)


def brackets_of(text: bytes) -> bytes:
    """The brackets of JSON that stand in no string."""
    return _STRING.sub(b"", text).translate(None, _NO_BRACKETS)


class JsonWatch:
    """Tells whether a JSON body that only the connection's close delimits has come to its end (SF-03).

    Counts brackets outside strings; any split of the same bytes gives the same answer.
    """

    __slots__ = ("_depth", "_is_begun", "_is_escaped", "_is_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_begun = False

    @property
    def is_complete(self) -> bool:
        """Whether what was fed is a whole value, as far as brackets and quotes tell."""
        return self._is_begun and self._depth == 0 and not self._is_in_string

    def feed(self, data: bytes) -> None:
        """Look at more bytes."""
        if self._is_in_string:
            data = (b'"\\' if self._is_escaped else b'"') + data
        head, quote, slash = _WHOLE_OR_OPEN.sub(rb"0\1\2", data).partition(b'"')
        self._is_in_string = bool(quote)
        self._is_escaped = bool(slash)
        self._depth += head.count(b"{") + head.count(b"[") - head.count(b"}") - head.count(b"]")
        if not self._is_begun and (head.strip() or quote):
            self._is_begun = True


def repeated() -> InvalidRequest:
    """A top-level key came again: two readers could pick different values (P-15)."""
    return InvalidRequest("The body repeats a key; send each key once.", reason="DUPLICATE_KEY")


def _bad_model(rule: str) -> InvalidRequest:
    return InvalidRequest(f"`model` {rule}.", details={"field": "model"})


def too_deep(depth_max: int) -> InvalidRequest:
    """It nests deeper than is allowed, or has too many brackets to tell quickly."""
    return InvalidRequest(f"The body nests deeper than {depth_max} levels.", reason="JSON_TOO_DEEP")
