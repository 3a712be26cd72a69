"""Reads a large request body in bounded steps, so that no other stream feels it (SF-03, SF-12, EN-101, EN-111).

Long strings are cut out as the body passes (``iop.api.http.long_strings``). What is left is read by the
decoders that read small bodies. Usually it is a few kilobytes and read at once. Where it is large itself, it
is read in slices: each ends at a comma and is made a JSON text of its own by the brackets that are open
before and after it, so that all slices are valid exactly where the whole is.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson

from iop.api.http.estimate import BINARY_KEYS, PROMPT_KEYS, text_bytes
from iop.api.http.long_strings import LongStrings, StringCutter
from iop.api.http.splice import (
    BRACKETS_MAX,
    RequestFields,
    brackets_of,
    decode_request,
    exceeds_depth,
    find_value,
    is_true,
    model_of,
    repeated,
    too_deep,
)
from iop.core.errors import InvalidRequest
from iop.core.limits import KIB, MIB

__all__ = ["BULK_BYTES", "STEP_BYTES", "BulkFields", "BulkReader"]

BULK_BYTES: Final = 256 * KIB
"""Bodies over this are read in steps. Below, one read costs less than the turns it would be spread over."""

STEP_BYTES: Final = 32 * KIB
"""Body bytes that one step looks at."""

SLICE_BYTES: Final = 16 * KIB
"""Shortened text that is worth a slice."""

GAP_BYTES_MAX: Final = 512 * KIB
"""Most of shortened text between two commas; it is read in one piece."""

CONVERTED_BYTES_MAX: Final = 4 * MIB
"""Most of shortened text that is kept for conversion to another dialect, which is one piece of work."""

SHALLOW_LEVELS: Final = 8
"""Levels that are taken out of a slice at once."""

KEPT_BYTES_MAX: Final = 64 * KIB
"""Longest top-level value, long strings aside, that is kept for whoever asks for it."""

NAMES_MAX: Final = 10_000
"""Most top-level members; each is remembered until the end, to find one that comes again."""

_CLOSERS: Final = bytes.maketrans(b"[{", b"]}")
_GONE: Final = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFields(RequestFields):
    """What routing reads of a large body.

    Attributes:
        body: the body with its long strings shortened; empty where even so it is too long to be converted.
        raw: the top-level values of that; ``null`` for a large one.
        strings: what was cut out, and the caller's bytes.
        body_bytes: of the caller's body.
        counted_text_bytes: UTF-8 bytes of the prompt's text.
        counted_prompts: how many prompts a list of them holds.
    """

    strings: LongStrings = field(repr=False)
    body_bytes: int
    counted_text_bytes: int
    counted_prompts: int

    @property
    def size(self) -> int:
        """Bytes of the caller's body."""
        return self.body_bytes

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the prompt's text (EN-111)."""
        return self.counted_text_bytes

    @property
    def prompts(self) -> int:
        """How many prompts a list of them holds; otherwise 1."""
        return self.counted_prompts

    def with_model(self, name: str) -> list[bytes]:
        """The caller's body in parts with ``name`` in place of the model; nothing large is copied."""
        start, end = self.model_span
        value = msgspec.json.encode(name)
        return [*self.strings.slice(0, start), value, *self.strings.slice(end, self.body_bytes)]


class BulkReader:
    """Reads one body. Call ``step`` until it returns True, then ``fields``.

    Args:
        parts: the body as it was received.
        depth_max: deepest nesting.

    Attributes:
        worked_bytes: most bytes that one step has looked at.
    """

    def __init__(self, parts: Sequence[bytes], *, depth_max: int) -> None:
        self._parts = parts
        self._depth_max = depth_max
        self._part = 0
        self._at = 0
        self._mark = secrets.token_hex(16)
        self._cutter = StringCutter(self._mark)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._done_bytes = 0  # shortened text in slices so far
        self._brackets = 0
        self._stack = b""  # brackets that are open where the next slice begins
        self._keys: list[bytes] = []  # under which key of each the next one lies
        self._names: set[str] = set()
        self._raw: dict[str, msgspec.Raw] = {}
        self._model_at: tuple[int, int] | None = None
        self._open: list[bytes] = []  # of a top-level value that began in an earlier slice
        self._open_bytes = 0
        self._text_bytes = 0
        self._prompts = 1
        self._is_counting = False
        self.worked_bytes = 0

    def step(self) -> bool:
        """Read on by at most ``STEP_BYTES``; True when all was read.

        Raises:
            InvalidRequest: as ``read_fields``.
        """
        block = self._next_block()
        if not block:
            self._add(self._cutter.finish())
            self._read_slice(self._take_pending(b""), is_last=True)
            return True
        self.worked_bytes = max(self.worked_bytes, len(block))
        text, comma = self._cutter.feed(block)
        if comma >= 0 and self._pending_bytes + comma >= SLICE_BYTES:
            self._add(text[:comma])
            self._read_slice(self._take_pending(text[comma + 1 :]), is_last=False)
        else:
            self._add(text)
            if self._pending_bytes > GAP_BYTES_MAX:
                raise InvalidRequest(
                    f"The body has over {GAP_BYTES_MAX} bytes between two commas.", reason="INVALID_JSON"
                )
        return False

    def fields(self) -> BulkFields:
        """What was read.

        Raises:
            InvalidRequest: the model is missing or no string.
        """
        model = model_of(self._raw)
        assert self._model_at is not None, "a model that is a short string lies in one slice"
        strings = LongStrings(self._parts, self._cutter.cuts, self._mark)
        start, end = self._model_at
        return BulkFields(
            body=b"".join(self._kept),
            model=model,
            model_span=(strings.place(start), strings.place(end)),
            is_stream=is_true(self._raw.get("stream")),
            raw=self._raw,
            strings=strings,
            body_bytes=sum(map(len, self._parts)),
            counted_text_bytes=self._text_bytes,
            counted_prompts=max(1, self._prompts),
        )

    # ---- text ----

    def _next_block(self) -> bytes:
        while self._part < len(self._parts):
            part = self._parts[self._part]
            block = part[self._at : self._at + STEP_BYTES]
            self._at += len(block)
            if block:
                return block
            self._part += 1
            self._at = 0
        return b""

    def _add(self, text: bytes) -> None:
        self._pending.append(text)
        self._pending_bytes += len(text)

    def _take_pending(self, rest: bytes) -> bytes:
        text = b"".join(self._pending)
        self._pending = [rest]
        self._pending_bytes = len(rest)
        return text

    # ---- slices ----

    def _read_slice(self, text: bytes, *, is_last: bool) -> None:
        is_first = not self._done_bytes
        if not is_first and text.lstrip(b" \t\r\n")[:1] in b",]}":
            raise _stray_comma()
        if not is_last and text.rstrip(b" \t\r\n")[-1:] in b",[{:":
            raise _stray_comma()
        before = self._stack
        after, is_doubtful = self._stack_after(text)
        if bool(after) is is_last:
            raise InvalidRequest(
                f"The body is not valid JSON: it {'has no' if is_last else 'goes on after its'} end.",
                reason="INVALID_JSON",
            )
        opener = self._opener()
        closer = after[::-1].translate(_CLOSERS)
        document = b"%b%b%b" % (opener, text, closer) if opener or closer else text
        self.worked_bytes = max(self.worked_bytes, len(document) + STEP_BYTES)
        document, raw = decode_request(document, self._depth_max)
        if is_doubtful and exceeds_depth(document, self._depth_max):
            raise too_deep(self._depth_max)
        self._merge(document, raw, opener=opener, closer=closer, depth=len(before), is_last=is_last)
        values = self._count(raw, depth=len(before))
        self._stack = after
        self._keys = self._keys_of(raw, values)
        if self._kept_bytes <= CONVERTED_BYTES_MAX:
            self._kept += [text] if is_first else [b",", text]
            self._kept_bytes += len(text) + 1
            if self._kept_bytes > CONVERTED_BYTES_MAX:
                self._kept = []
        self._done_bytes += len(text) + 1  # the comma after it

    def _stack_after(self, text: bytes) -> tuple[bytes, bool]:
        """The brackets that are open after ``text``, and whether it may nest too deeply.

        Nonsense where ``text`` is no valid JSON, which the decoder finds.
        """
        brackets = brackets_of(text)
        self._brackets += len(brackets)
        if self._brackets > 2 * BRACKETS_MAX:
            raise too_deep(self._depth_max)
        # Each pass takes a level away; what is deeper than usual is cheaper to go through one by one.
        for _ in range(SHALLOW_LEVELS):
            fewer = brackets.replace(b"{}", b"").replace(b"[]", b"")
            if len(fewer) == len(brackets):
                break
            brackets = fewer
        depth = len(self._stack)
        deepest = 0
        opened = bytearray()
        closed = 0
        for bracket in brackets:
            if bracket in b"[{":
                opened.append(bracket)
                deepest = max(deepest, len(opened))
            elif opened:
                opened.pop()
            else:
                closed += 1
        if closed > depth:
            raise InvalidRequest(
                "The body is not valid JSON: its brackets do not match.", reason="INVALID_JSON"
            )
        stack = self._stack[: depth - closed] + bytes(opened)
        if len(stack) > self._depth_max:
            raise too_deep(self._depth_max)
        return stack, depth + deepest + SHALLOW_LEVELS > self._depth_max

    def _opener(self) -> bytes:
        parts = []
        for number, bracket in enumerate(self._stack):
            parts.append(b"{" if bracket == 0x7B else b"[")
            if bracket == 0x7B and number < len(self._stack) - 1:
                parts.append(self._keys[number] + b":")
        return b"".join(parts)

    def _merge(
        self,
        document: bytes,
        raw: dict[str, msgspec.Raw],
        *,
        opener: bytes,
        closer: bytes,
        depth: int,
        is_last: bool,
    ) -> None:
        """Take the top-level values of one slice; the first may go on, the last may not be whole."""
        start, end = find_value(document, raw, "model")
        first = len(self._keys[0]) + 2 if depth > 1 else len(opener)  # where the open value's own text begins
        last_name = next(reversed(raw), None)
        for number, (name, value) in enumerate(raw.items()):
            goes_on = number == 0 and depth > 1
            if not goes_on:
                if name in self._names:
                    raise repeated()
                if len(self._names) >= NAMES_MAX:
                    raise InvalidRequest(f"The body has over {NAMES_MAX} members.")
                self._names.add(name)
            is_open = name == last_name and not is_last and len(closer) > 1
            if not goes_on and not is_open:
                self._raw[name] = value.copy() if len(value) <= KEPT_BYTES_MAX else _GONE
                if name == "model":
                    shift = self._done_bytes - len(opener)
                    self._model_at = (start + shift, end + shift)
                continue
            content = bytes(value)
            if is_open:
                content = content[: len(content) - len(closer) + 1]
            if goes_on:
                content = content[len(opener) - first :]
            self._keep_open(content, is_begun=goes_on)
            if not is_open:
                self._raw[name] = msgspec.Raw(b",".join(self._open)) if self._open else _GONE

    def _keep_open(self, content: bytes, *, is_begun: bool) -> None:
        if not is_begun:
            self._open, self._open_bytes = [], 0
        self._open_bytes += len(content)
        if self._open_bytes <= KEPT_BYTES_MAX:
            self._open.append(content)
        else:
            self._open = []

    def _count(self, raw: dict[str, msgspec.Raw], *, depth: int) -> dict[str, Any]:
        """Count the prompt's text in one slice; returns the prompt's values, decoded."""
        values: dict[str, Any] = {}
        strings = LongStrings((), self._cutter.cuts, self._mark)
        for name in PROMPT_KEYS:
            value = raw.get(name)
            if value is None:
                continue
            try:
                decoded = orjson.loads(memoryview(value))
            except orjson.JSONDecodeError:
                self._text_bytes += len(value)
                continue
            values[name] = decoded
            self._text_bytes += text_bytes(decoded, more=strings.more_text_bytes)
            if name == "prompt" and isinstance(decoded, list) and decoded:
                self._count_prompts(decoded, goes_on=depth > 1 and next(iter(raw)) == name, depth=depth)
        return values

    def _count_prompts(self, items: list[Any], *, goes_on: bool, depth: int) -> None:
        if not goes_on:
            self._is_counting = not isinstance(items[0], int)
            self._prompts = 0
        if self._is_counting:
            self._prompts += len(items) - (goes_on and depth > 2)

    def _keys_of(self, raw: dict[str, msgspec.Raw], values: dict[str, Any]) -> list[bytes]:
        """Under which keys the open brackets lie; what matters of those below the top is only their kind."""
        if len(self._stack) < 2:
            return []
        name = next(reversed(raw))
        keys = [msgspec.json.encode(name)]
        value = values.get(name)
        for bracket in self._stack[1:-1]:
            key = b""
            if bracket == 0x7B:
                last = next(reversed(value), "") if isinstance(value, dict) else ""
                # A member that follows must not come under the same key, or it would take the place of this one.
                key = b'"url"' if last in BINARY_KEYS else b'"%b"' % self._mark.encode("ascii")
                value = value.get(last) if isinstance(value, dict) else None
            else:
                value = value[-1] if isinstance(value, list) and value else None
            keys.append(key)
        return keys


def _stray_comma() -> InvalidRequest:
    return InvalidRequest("The body is not valid JSON: a comma stands alone.", reason="INVALID_JSON")
