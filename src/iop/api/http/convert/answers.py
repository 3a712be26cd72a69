"""A provider's answer in the caller's dialect: stream to stream, whole to whole, error to error. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import orjson

from iop.api.http.convert.events import Event, Failure
from iop.api.http.convert.numbers import load_text
from iop.api.http.convert.readers import Reader, failure_of
from iop.api.http.convert.sse_parser import SseComment, SseEvent, SseParser
from iop.api.http.convert.writers import Writer, cut_failure
from iop.api.http.json_text import json_text

__all__ = ["AnswerConverter", "BrokenAnswerError", "failure_of_body"]

_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
"""From this many digits on an integer may not fit 64 bits."""


class BrokenAnswerError(Exception):
    """A whole answer that is none: not JSON, or an error told with a success status.

    Attributes:
        failure: what is told.
        is_told: whether the provider told it, or it was found out here.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.is_told = failure not in (_garbled(), cut_failure())


class AnswerConverter:
    """One answer. Any split of a stream gives the same result, and a streamed answer the same as a whole one.

    Attributes:
        is_over: the end or an error was written; nothing follows.
        has_failed: it was an error.
    """

    __slots__ = ("_parser", "_reader", "_writer", "has_failed", "is_over")

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = SseParser()
        self.is_over = False
        self.has_failed = False

    # ---- streams ----

    def feed(self, data: bytes) -> bytes:
        """Stream bytes in, stream bytes out. Comments pass, between events."""
        if self.is_over:
            return b""
        out: list[bytes] = []
        for item in self._parser.feed(data):
            if isinstance(item, SseComment):
                out.append(b":" + item.text + b"\n")
                continue
            out.append(self._event(item))
            if self._has_ended():
                break
        return b"".join(out)

    def finish(self) -> bytes:
        """The provider's stream is over: the dialect's end, or its error if there was no finish (SF-14)."""
        if self.is_over:
            return b""
        out = [self._event(item) for item in self._parser.finish() if isinstance(item, SseEvent)]
        if self._has_ended():
            return b"".join(out)
        if not self._reader.is_finished:
            return b"".join([*out, self.fail(cut_failure())])
        out.append(self._write(self._reader.end()))
        self.is_over = True
        return b"".join([*out, self._writer.end()])

    def fail(self, failure: Failure) -> bytes:
        """End the stream with an error."""
        if self.is_over:
            return b""
        self.is_over = self.has_failed = True
        return self._writer.fail(failure)

    # ---- whole answers ----

    def whole(self, body: bytes) -> bytes:
        """A whole answer in the caller's dialect.

        Raises:
            BrokenAnswerError: it is not an answer.
        """
        return self._written(self._read_whole(body))

    def streamed(self, body: bytes) -> bytes:
        """A whole answer as a stream, for a provider that ignores ``stream``.

        Raises:
            BrokenAnswerError: it is not an answer.
        """
        out = self._writer.feed(self._read_whole(body))
        self.is_over = True
        return out + self._writer.end()

    def gathered(self, stream: bytes) -> bytes:
        """A stream as a whole answer, for a provider that streams unasked.

        Raises:
            BrokenAnswerError: the stream was cut or told of an error.
        """
        events: list[Event] = []
        for item in [*self._parser.feed(stream), *self._parser.finish()]:
            if isinstance(item, SseEvent):
                events += self._read(item)
        events += self._reader.end()
        _check(events)
        if not self._reader.is_finished:
            raise BrokenAnswerError(cut_failure())
        return self._written(events)

    # ---- inside ----

    def _has_ended(self) -> bool:
        return self.is_over

    def _read_whole(self, body: bytes) -> list[Event]:
        value = _object(body)
        if value is None:
            raise BrokenAnswerError(_garbled())
        if _LONG_NUMBER.search(body):
            value = _exact(body) or value
        try:
            events = self._reader.whole(value)
        except RecursionError:
            raise BrokenAnswerError(_garbled()) from None
        _check(events)
        if not self._reader.is_finished:
            raise BrokenAnswerError(cut_failure())
        return events

    def _event(self, item: SseEvent) -> bytes:
        return self._write(self._read(item))

    def _read(self, item: SseEvent) -> list[Event]:
        if item.data.strip() == b"[DONE]":
            self._reader.terminate()
            return []
        value = _object(item.data)
        if value is None:
            return [_garbled()]
        try:
            return self._reader.feed(value)
        except RecursionError:  # arguments as an object that is nested deeper than they can be written
            return [_garbled()]

    def _written(self, events: Iterable[Event]) -> bytes:
        try:
            return json_text(self._writer.whole(events))
        except RecursionError:
            raise BrokenAnswerError(_garbled()) from None

    def _write(self, events: Iterable[Event]) -> bytes:
        out: list[bytes] = []
        for event in events:
            if isinstance(event, Failure):
                out.append(self.fail(event))
                break
            out.append(self._writer.feed([event]))
        return b"".join(out)


def failure_of_body(body: bytes, status: int) -> Failure:
    """What a provider's error answer says; bodies that are not its dialect's JSON say only their status."""
    value = _object(body)
    if value is None or not ({"error", "detail", "message"} & value.keys()):
        return Failure(message=f"The provider answered with status {status}.", code="upstream_error")
    return failure_of(value)


def _check(events: Iterable[Event]) -> None:
    for event in events:
        if isinstance(event, Failure):
            raise BrokenAnswerError(event)


def _garbled() -> Failure:
    return Failure(
        message="The provider's answer could not be read.", code="upstream_error", kind="server_error"
    )


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = _lenient(data)
    return value if isinstance(value, dict) else None


def _exact(data: bytes) -> dict[str, Any] | None:
    """With integers beyond 64 bits, as arguments of calls may hold them; the fast decoder rounds them."""
    try:
        value = load_text(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lenient(data: bytes) -> Any:
    """JSON with half a character escaped, as providers send that count text in UTF-16: the half is replaced."""
    try:
        value = json.loads(data)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
