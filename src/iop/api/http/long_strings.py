"""Takes the long strings out of a large JSON text, a bounded step at a time (SF-03, EN-101).

Large bodies are large by a few strings: pictures, files, documents. What is left without them is small, and
the decoders that read ordinary bodies read it in no time. A long string keeps its first bytes and ends in a
mark; what was cut out stays where it lies in the caller's bytes and goes to the provider from there. It is
checked by the same decoder as all else, in pieces cut between characters.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson

from iop.api.http.estimate import MORE_BYTES_MIN
from iop.api.http.json_text import read_text, without_halves
from iop.core.errors import InvalidRequest
from iop.core.limits import KIB, MIB

__all__ = ["Cut", "LongStrings", "StringCutter"]

LONG_STRING_BYTES: Final = 2 * KIB
"""Strings over this are shortened. Above any model name that is taken, so that those are never touched."""

HEAD_BYTES: Final = KIB
"""What a shortened string keeps: more than a model name may have, and more than the start of a data URL."""

RESTORED_BYTES_MAX: Final = MIB
"""Most of long strings that one conversion may have to look into; each such byte is work in one piece."""

_SKIP: Final = msgspec.json.Decoder(msgspec.Raw)
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)', re.DOTALL)
_CONTENT: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_HIGH_HALF: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_ESCAPE_BYTES: Final = 6
_QUOTE: Final = ord('"')
_U: Final = ord("u")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was taken out of one string.

    Attributes:
        start: where it begins in the body.
        end: where it ends in the body: at the closing quote.
        text_end: where the closing quote stands in the shortened text.
        text_bytes: UTF-8 bytes of the characters that were taken out.
        is_text: whether it is valid UTF-8; what is passed on need not be.
    """

    start: int
    end: int
    text_end: int
    text_bytes: int
    is_text: bool


class StringCutter:
    """Shortens long strings; any split of the same bytes gives the same text and cuts.

    Args:
        mark: what no caller can guess; tells our shortened strings from theirs.

    Attributes:
        cuts: what was taken out so far, in order.
    """

    __slots__ = (
        "_count",
        "_is_inside",
        "_is_text",
        "_mark",
        "_offset",
        "_start",
        "_tail",
        "_text_end",
        "cuts",
    )

    def __init__(self, mark: str) -> None:
        self.cuts: list[Cut] = []
        self._mark = mark
        self._tail = b""
        self._offset = 0  # of the tail's first byte in the body
        self._text_end = 0  # what was given out
        self._is_inside = False
        self._start = 0
        self._count = 0
        self._is_text = True

    def feed(self, block: bytes) -> tuple[bytes, int]:
        """Shorten more of the body; the work grows with the block alone.

        Returns:
            The next part of the shortened text, and the place of the last comma in it that is in no string,
            or -1.

        Raises:
            InvalidRequest: a long string is not valid JSON.
        """
        data = self._tail + block if self._tail else block
        out: list[bytes] = []
        size = position = 0
        comma = -1
        while position < len(data):
            if self._is_inside:
                end, is_closed = _content_end(data, position)
                stop = end if is_closed else _between_characters(data, position, end)
                self._take(data[position:stop])
                position = stop
                if not is_closed:
                    break
                part = self._close(position, size)
                position += 1
            else:
                stop, long_at, found = _short_strings(data, position)
                if found >= 0:
                    comma = size + found - position
                part = data[position:stop]
                position = stop
                if long_at >= 0:
                    # It is known to be long, so all of its head is here.
                    position = _between_characters(data, long_at + 1, long_at + 1 + HEAD_BYTES)
                    part += data[long_at:position]
                    self._open(position)
            out.append(part)
            size += len(part)
            if position == stop and not self._is_inside:
                break  # a string that is not whole yet, or nothing
        self._tail = data[position:]
        self._offset += position
        self._text_end += size
        return b"".join(out), comma

    def finish(self) -> bytes:
        """The rest of the text; no valid JSON where a string was left open."""
        return b'"' if self._is_inside else self._tail

    def _open(self, position: int) -> None:
        self._is_inside = True
        self._start = self._offset + position
        self._count = 0
        self._is_text = True

    def _close(self, position: int, size: int) -> bytes:
        """The end of a shortened string, its quote included."""
        part = b'~\\u0001%b:%d~"' % (self._mark.encode("ascii"), len(self.cuts))
        self._is_inside = False
        self.cuts.append(
            Cut(
                start=self._start,
                end=self._offset + position,
                text_end=self._text_end + size + len(part) - 1,
                text_bytes=self._count,
                is_text=self._is_text,
            )
        )
        return part

    def _take(self, piece: bytes) -> None:
        try:
            _SKIP.decode(b'"%b"' % piece)
        except msgspec.DecodeError as error:
            if (legible := without_halves(piece)) is not piece:
                self._take(legible)
                return
            raise InvalidRequest(
                f"The body is not valid JSON: {error}, in the string at byte {self._start}.",
                reason="INVALID_JSON",
            ) from None
        if piece.isascii() and b"\\" not in piece:
            self._count += len(piece)
            return
        try:
            text = orjson.loads(b'"%b"' % piece)
        except orjson.JSONDecodeError:
            self._is_text = False
            self._count += len(piece)
        else:
            self._count += len(text) if text.isascii() else len(text.encode())


class LongStrings:
    """What was cut out of one body, where it lies, and how it comes back into what was made of the rest.

    Args:
        parts: the body, as it was received.
        cuts: of a whole body.
        mark: theirs.
    """

    __slots__ = ("_cuts", "_mark", "_offsets", "_parts", "_shown", "_stored")

    def __init__(self, parts: Sequence[bytes], cuts: Sequence[Cut], mark: str) -> None:
        self._parts = parts
        self._cuts = cuts
        self._mark = mark
        self._offsets = [0]
        for part in parts:
            self._offsets.append(self._offsets[-1] + len(part))
        # Our marks in decoded text, and in what a JSON encoder made of it, once or more often.
        self._shown = re.compile(f"~\x01{mark}:(\\d+)~")
        self._stored = re.compile(rb"~(\\+)u0001%b:(\d+)~" % mark.encode("ascii"))

    def slice(self, start: int, end: int) -> list[bytes]:
        """Bytes of the body, in parts as they were received."""
        first = bisect_right(self._offsets, start) - 1
        parts = []
        for number in range(first, len(self._parts)):
            offset = self._offsets[number]
            if offset >= end:
                break
            part = self._parts[number]
            if offset < start or offset + len(part) > end:
                part = part[max(0, start - offset) : end - offset]
            if part:
                parts.append(part)
        return parts

    def place(self, text_at: int) -> int:
        """Where in the body a place of the shortened text stands that is in no cut."""
        before = bisect_right(self._cuts, text_at, key=lambda cut: cut.text_end)
        if before == 0:
            return text_at
        cut = self._cuts[before - 1]
        return cut.end + text_at - cut.text_end

    def more_text_bytes(self, text: str) -> int:
        """By how much a decoded, shortened string is longer than it seems, in UTF-8."""
        if self._mark not in text:
            return 0
        return sum(
            self._cuts[int(found[1])].text_bytes - len(found[0]) for found in self._shown.finditer(text)
        )

    def expand(self, encoded: bytes) -> list[bytes]:
        """JSON that was made of the shortened text, with all strings in full; long ones are not copied.

        Raises:
            InvalidRequest: a string is not UTF-8, or too long where it stands in JSON within JSON.
        """
        parts: list[bytes] = []
        position = 0
        budget = RESTORED_BYTES_MAX
        for found in self._stored.finditer(encoded):
            parts.append(encoded[position : found.start()])
            position = found.end()
            cut = self._cut(int(found[2]))
            content = self.slice(cut.start, cut.end)
            # One backslash: encoded once, as it was. Two: text of JSON in JSON, and so on.
            slashes = len(found[1])
            if slashes > 1:
                budget -= (cut.end - cut.start) * slashes
                if budget < 0:
                    raise _too_long()
            while slashes > 1:
                content = [piece.replace(b"\\", rb"\\").replace(b'"', rb"\"") for piece in content]
                slashes //= 2
            parts += content
        parts.append(encoded[position:])
        return [part for part in parts if part]

    def restore(self, value: Any, name: str | None = None) -> Any:
        """A decoded value with its strings in full; with ``name``, only those members that are called so.

        Raises:
            InvalidRequest: they are too long to be looked into, or not UTF-8.
        """
        return _Restoring(self).walk(value, name)

    def restore_text(self, text: str, budget: int) -> tuple[str, int]:
        """A decoded string in full, and what is left of ``budget`` bytes."""
        parts: list[str] = []
        position = 0
        for found in self._shown.finditer(text):
            parts.append(text[position : found.start()])
            position = found.end()
            cut = self._cut(int(found[1]))
            budget -= cut.end - cut.start
            if budget < 0:
                raise _too_long()
            parts.append(read_text(b'"%b"' % b"".join(self.slice(cut.start, cut.end))))
        return "".join([*parts, text[position:]]), budget

    def is_shortened(self, text: str) -> bool:
        """Whether a decoded string holds a mark."""
        return len(text) >= MORE_BYTES_MIN and self._mark in text

    def _cut(self, number: int) -> Cut:
        cut = self._cuts[number]
        if not cut.is_text:
            raise InvalidRequest("The body is not valid UTF-8.", reason="INVALID_JSON")
        return cut


class _Restoring:
    """One walk over a decoded value."""

    def __init__(self, strings: LongStrings) -> None:
        self._strings = strings
        self._budget = RESTORED_BYTES_MAX

    def walk(self, value: Any, name: str | None) -> Any:
        if isinstance(value, str):
            if name is not None or not self._strings.is_shortened(value):
                return value
            value, self._budget = self._strings.restore_text(value, self._budget)
            return value
        if isinstance(value, list):
            return [self.walk(item, name) for item in value]
        if isinstance(value, dict):
            return {key: self.walk(item, None if key == name else name) for key, item in value.items()}
        return value


def _short_strings(data: bytes, position: int) -> tuple[int, int, int]:
    """Read over strings that stay as they are.

    Returns:
        Where to go on, which is the end of ``data``, a long string, or a string that is not whole yet; the
        long one's place or -1; the place of the last comma in no string, or -1.
    """
    stop, long_at = len(data), -1
    ends = [position]
    starts = []
    for found in _STRING.finditer(data, position):
        start, end = found.span()
        is_whole = end > found.start(1)
        if end - start > LONG_STRING_BYTES:
            stop = long_at = start
            break
        if not is_whole:
            stop = start
            break
        starts.append(start)
        ends.append(end)
    starts.append(stop)
    while starts:
        comma = data.rfind(b",", ends.pop(), starts.pop())
        if comma >= 0:
            return stop, long_at, comma
    return stop, long_at, -1


def _content_end(data: bytes, position: int) -> tuple[int, bool]:
    """Where the content of an open string ends, and whether its closing quote stands there."""
    quote = data.find(b'"', position)
    if data.find(b"\\", position, len(data) if quote < 0 else quote) < 0:
        return (len(data), False) if quote < 0 else (quote, True)
    found = _CONTENT.match(data, position)
    assert found is not None, "the pattern matches nothing at least"
    end = found.end()
    return end, end < len(data) and data[end] == _QUOTE


def _between_characters(data: bytes, start: int, end: int) -> int:
    """The last place at or before ``end`` that cuts no escape, no pair of escapes and no UTF-8 sequence."""
    escape = _last_escape(data, start, end)
    if escape >= 0 and (escape + 1 == end or (data[escape + 1] == _U and escape + _ESCAPE_BYTES > end)):
        end = escape
    half = end - _ESCAPE_BYTES
    if half >= start and _last_escape(data, start, end) == half and _HIGH_HALF.match(data, half) is not None:
        return half
    for back in range(1, min(4, end - start) + 1):
        byte = data[end - back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return end - back if needed > back else end
    return end


def _last_escape(data: bytes, start: int, end: int) -> int:
    """Where an escape begins within the last six bytes, or -1. ``start`` must be no place inside one."""
    slash = data.rfind(b"\\", max(start, end - _ESCAPE_BYTES), end)
    if slash < 0:
        return -1
    before = data[start:slash]
    run = len(before) - len(before.rstrip(b"\\"))
    return slash if run % 2 == 0 else -1


def _too_long() -> InvalidRequest:
    return InvalidRequest(
        f"Tool arguments and what the answer repeats may hold {RESTORED_BYTES_MAX} bytes in long strings.",
        reason="BODY_TOO_LARGE",
        details={"limit_bytes": str(RESTORED_BYTES_MAX)},
    )
