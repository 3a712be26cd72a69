"""Watches a provider's event stream without altering it: where events end, whether it finished (SF-03,
SF-05, SF-14).

Bytes that complete events pass as they came; only an incomplete event waits for its end, so that a cut
never shows half of one. Nothing is parsed per chunk: signs of an ending are searched for as bytes, and only
the few events that hold one are decoded. Lines end in LF or CRLF. Comment lines pass without waiting for a
blank line (P-04). What the watcher gives out does not depend on how the stream was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import Enum, unique
from typing import Any, Final

import orjson

from iop.api.http.errors import Dialect

__all__ = ["ABORTED", "SseEnding", "SseWatcher", "event_data"]

_BLANK_LINE: Final = re.compile(rb"\n\r?\n")
_LINE_END: Final = re.compile(rb"\r?\n")

# Each pattern begins with a literal, which is what makes the search fast; text inside JSON strings cannot
# match those that begin with a quote, since its quotes are escaped.
_DONE: Final = re.compile(rb"\[DONE\]")
_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
_ERROR: Final = re.compile(rb'"error"')
_STOP_REASON: Final = re.compile(rb'"stop_reason"\s*:\s*["n]')
_STOP: Final = re.compile(rb'"message_stop"')
_TERMINAL: Final = re.compile(rb'"response\.(?:completed|incomplete|failed)"')

_PATTERNS: Final[Mapping[Dialect, tuple[re.Pattern[bytes], ...]]] = {
    Dialect.CHAT: (_DONE, _FINISH, _ERROR, _USAGE),
    Dialect.COMPLETIONS: (_DONE, _FINISH, _ERROR, _USAGE),
    Dialect.MESSAGES: (_STOP, _STOP_REASON, _ERROR, _USAGE),
    Dialect.RESPONSES: (_DONE, _TERMINAL, _ERROR),
    Dialect.PLAIN: (),
}
ABORTED: Final = "abort"
"""Finish reason of a request that its engine gave up: outside every dialect's set, and no success (SF-14)."""

_TERMINAL_RESPONSES: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


@unique
class SseEnding(Enum):
    """How a stream stands when its provider sends no more.

    TERMINATED: the terminator was there. FINISHED: every choice gave its finish reason and the terminator
    is missing.
    FAILED: the provider told of an error itself. CUT: none of these, or the provider says that it gave a choice up.
    """

    TERMINATED = "terminated"
    FINISHED = "finished"
    FAILED = "failed"
    CUT = "cut"


class SseWatcher:
    """One stream's watch.

    Args:
        dialect: whose terminators and finish reasons to look for; PLAIN streams are whole when their
            provider says so.
        choices: how many alternatives must give a finish reason.
        event_bytes_max: most bytes that one event may hold back.

    Attributes:
        has_failed: the provider told of an error; its terminator behind that passes and makes no success of it.
        usage: the last usage object seen, as the provider wrote it; never summed.
        is_too_large: an event exceeded its limit; nothing is given out any more.
        is_terminated: the terminator has been given out; whatever follows is dropped.
        is_aborted: the terminator came behind an answer that its engine gave up; it and what follows is dropped.
        newline: how this stream ends its lines.
    """

    __slots__ = (
        "_choices",
        "_dialect",
        "_event_bytes_max",
        "_finished",
        "_has_given_up",
        "_held",
        "_held_bytes",
        "_is_begun",
        "_may_hold_sign",
        "_overlap",
        "_patterns",
        "has_failed",
        "is_aborted",
        "is_terminated",
        "is_too_large",
        "newline",
        "usage",
    )

    def __init__(self, dialect: Dialect, *, choices: int, event_bytes_max: int) -> None:
        self._dialect = dialect
        self._patterns = _PATTERNS[dialect]
        self._may_hold_sign = _QUICK_LOOKS[dialect]
        self._choices = choices
        self._event_bytes_max = event_bytes_max
        self._finished: set[int] = set()
        self.has_failed = False
        self._has_given_up = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._overlap = b""
        self._is_begun = False
        self.usage: dict[str, Any] | None = None
        self.is_terminated = False
        self.is_aborted = False
        self.is_too_large = False
        self.newline = b"\n"

    def feed(self, data: bytes) -> bytes:
        """Take provider bytes; returns those that may go to the caller now."""
        if self.is_terminated or self.is_too_large or self.is_aborted:
            return b""
        if self._held:
            # The blank line may straddle the border; what was held is joined only once an end has come.
            # What is held begins with a colon only while a comment line lacks its end, with a CR only while
            # its LF is missing.
            is_line = self._held[0][:1] in (b":", b"\r")
            if _BLANK_LINE.search(self._overlap + data) is None and not (is_line and b"\n" in data):
                self._hold(data)
                return b""
            self._held.append(data)
            data = b"".join(self._held)
            self._held = []
            self._held_bytes = 0
        if data.endswith(b"\n\n"):
            ready = data
        else:
            end = _whole_end(data)
            ready = data[:end]
            if end < len(data):
                self._hold(data[end:])
        if not ready:
            return b""
        if not self._is_begun:
            self._is_begun = True
            if b"\r\n" in ready:
                self.newline = b"\r\n"
        return self._look(ready)

    def finish(self) -> tuple[SseEnding, bytes]:
        """The provider sends no more. Returns how the stream stands, and bytes that complete it, if it is a
        success.
        """
        held = b"".join(self._held)
        self._held = []
        self._held_bytes = 0
        if held and not self.is_terminated and not self.is_too_large:
            # A terminator whose blank line is missing still is one; any other incomplete event is dropped,
            # and what it says does not count.
            before = (self._finished.copy(), self.has_failed, self.usage)
            if self._judge(held):
                return SseEnding.TERMINATED, held.rstrip(b"\r\n") + self.newline * 2
            self._finished, self.has_failed, self.usage = before
        if self.is_terminated or self._dialect is Dialect.PLAIN:
            return SseEnding.TERMINATED, b""
        if self.has_failed:
            return SseEnding.FAILED, b""
        if not self.is_too_large and not self._has_given_up and len(self._finished) >= self._choices:
            return SseEnding.FINISHED, self._terminator()
        return SseEnding.CUT, b""

    # ---- inside ----

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        self._overlap = (self._overlap + data)[-2:] if len(self._held) > 1 else data[-2:]
        if self._held_bytes > self._event_bytes_max:
            self.is_too_large = True
            self._held = []

    def _look(self, ready: bytes) -> bytes:
        """Judge the events among ``ready`` that hold a sign; returns all, up to and with the terminator."""
        if not self._may_hold_sign(ready):
            return ready
        signs = [match.start() for pattern in self._patterns for match in pattern.finditer(ready)]
        signs.sort()
        end = 0
        for sign in signs:
            if sign < end:
                continue  # in the event just judged
            start = end
            for blank in (b"\n\n", b"\n\r\n"):
                if (found := ready.rfind(blank, end, sign)) >= 0:
                    start = max(start, found + len(blank))
            after = _BLANK_LINE.search(ready, sign)
            end = len(ready) if after is None else after.end()
            if self._judge(ready[start:end]):
                return ready[:end]
            if self.is_aborted:
                return ready[:start]
        return ready

    def _judge(self, event: bytes) -> bool:
        """Note what one event says about the stream's end; True when it is the terminator."""
        data = event_data(event)
        if data is None:
            return False
        if data.strip() == b"[DONE]":
            if self._dialect is not Dialect.MESSAGES:
                self._terminate()
            return self.is_terminated
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        if isinstance(value, dict):
            if self._dialect is Dialect.MESSAGES:
                self._judge_message(value)
            elif self._dialect is Dialect.RESPONSES:
                self._judge_response(value)
            else:
                self._judge_chat(value)
        return self.is_terminated

    def _terminate(self) -> None:
        """The provider's terminator: a success marker, and so not for an answer that was given up."""
        self.is_terminated = not self._has_given_up
        self.is_aborted = self._has_given_up

    def _judge_chat(self, value: dict[str, Any]) -> None:
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        if value.get("error"):
            self.has_failed = True
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and isinstance(reason := choice.get("finish_reason"), str):
                self._has_given_up = self._has_given_up or reason == ABORTED
                index = choice.get("index")
                self._finished.add(index if isinstance(index, int) else 0)

    def _judge_message(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind == "message_stop":
            self._terminate()
        elif kind == "error":
            self.has_failed = True
        elif kind == "message_start":
            message = value.get("message")
            self._note_usage(message.get("usage") if isinstance(message, dict) else None)
        elif kind == "message_delta":
            delta = value.get("delta")
            if isinstance(delta, dict) and "stop_reason" in delta:
                # An engine that gave up has no word for it here and says null.
                self._has_given_up = delta["stop_reason"] is None
                if not self._has_given_up:
                    self._finished.add(0)
            self._note_usage(value.get("usage"))

    def _judge_response(self, value: dict[str, Any]) -> None:
        kind = value.get("type")
        if kind in _TERMINAL_RESPONSES:
            self.is_terminated = True
            self.has_failed = self.has_failed or kind == "response.failed"
            response = value.get("response")
            self._note_usage(response.get("usage") if isinstance(response, dict) else None)
        elif kind == "error" or value.get("error"):
            self.has_failed = True

    def _note_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            # Messages split it: the prompt's part comes first, the answer's last.
            self.usage = {**(self.usage or {}), **usage}

    def _terminator(self) -> bytes:
        line = self.newline
        if self._dialect is Dialect.MESSAGES:
            return b"event: message_stop" + line + b'data: {"type":"message_stop"}' + line * 2
        return b"data: [DONE]" + line * 2


def event_data(event: bytes) -> bytes | None:
    """The data of one event, its lines joined; None when it has none."""
    lines = [
        line[6:] if line[5:6] == b" " else line[5:]
        for line in _LINE_END.split(event)
        if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None


def _is_null_everywhere(data: bytes, key: bytes) -> bool:
    return data.count(key) == data.count(key + b":null") + data.count(key + b": null")


def _chat_sign(data: bytes) -> bool:
    """Whether the patterns are worth a try: four plain searches cost a fifth of one pattern's."""
    return (
        b"[DONE]" in data
        or b'"error"' in data
        or not _is_null_everywhere(data, b'finish_reason"')
        or (b'"usage"' in data and not _is_null_everywhere(data, b'"usage"'))
    )


def _message_sign(data: bytes) -> bool:
    return b'"message_stop"' in data or b'"stop_reason"' in data or b'"error"' in data or b'"usage"' in data


def _response_sign(data: bytes) -> bool:
    return (
        b'"response.completed"' in data
        or b'"response.incomplete"' in data
        or b'"response.failed"' in data
        or b'"error"' in data
        or b"[DONE]" in data
    )


_QUICK_LOOKS: Final[Mapping[Dialect, Callable[[bytes], bool]]] = {
    Dialect.CHAT: _chat_sign,
    Dialect.COMPLETIONS: _chat_sign,
    Dialect.MESSAGES: _message_sign,
    Dialect.RESPONSES: _response_sign,
    Dialect.PLAIN: lambda _data: False,
}


def _whole_end(data: bytes) -> int:
    """Where the last whole event ends, with the blank lines and comment lines that follow it."""
    end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
    if end < 3 and not data.startswith(b"\n\n"):
        end = 0
    while True:
        if data.startswith(b"\n", end):
            end += 1
        elif data.startswith(b"\r\n", end):
            end += 2
        elif data.startswith(b":", end) and (line := data.find(b"\n", end)) >= 0:
            end = line + 1
        else:
            return end
