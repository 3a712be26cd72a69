"""An agent's output as run events: plain text, or lines of JSON as the common agents write them. Pure."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from iop.wire.messages import RunEvent, RunEventType, StreamError, StreamErrorCode, Usage

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Longest line of JSON; agents put whole files into their tool events."""

TOOL_EVENT_BYTES_MAX: Final = 64 * 1024
"""How much of one tool event goes on; the rest is cut off."""

TOOL_EVENT_KEY: Final = "cli_tool_event"
"""Metadata of a delta without text: what the agent did with a tool, as JSON."""


class OutputReader(Protocol):
    """Turns bytes into events; the shell adds the start and the terminal one."""

    def feed(self, data: bytes) -> list[RunEvent]:
        """Take bytes as they come."""
        ...

    def finish(self) -> list[RunEvent]:
        """The output has ended: what was held back."""
        ...

    @property
    def usage(self) -> Usage | None:
        """Token counts, if the agent told them."""
        ...

    @property
    def error(self) -> StreamError | None:
        """The agent's own word that it failed."""
        ...


@dataclass(slots=True)
class TextReader:
    """Plain text, cut at no character."""

    usage: Usage | None = None
    error: StreamError | None = None
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def feed(self, data: bytes) -> list[RunEvent]:
        """Text as far as its characters are whole."""
        return _text(self._decoder.decode(data))

    def finish(self) -> list[RunEvent]:
        """A character that was never finished shows as one."""
        return _text(self._decoder.decode(b"", final=True))


@dataclass(slots=True)
class JsonLinesReader:
    """One JSON object per line.

    Understood are, by ``type``: ``text``, ``delta``, ``content`` and ``message`` with their text;
    ``assistant`` with a message of content blocks; ``item.completed`` with an agent message; ``reasoning``
    and ``thinking``; ``tool_use``, ``tool_result`` and the like; ``usage``; ``result`` with the final text,
    usage and an error flag; ``error``. Other objects, and lines that are no JSON, are skipped: agents print
    warnings between.
    """

    usage: Usage | None = None
    error: StreamError | None = None
    skipped: int = 0
    _rest: bytes = b""
    _has_text: bool = False

    def feed(self, data: bytes) -> list[RunEvent]:
        """Whole lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            self.skipped += 1
            self._rest = b""
        events: list[RunEvent] = []
        for line in lines:
            events += self._read(line)
        return events

    def finish(self) -> list[RunEvent]:
        """The last line may lack its end."""
        rest, self._rest = self._rest, b""
        return self._read(rest)

    def _read(self, line: bytes) -> list[RunEvent]:
        if not line.strip():
            return []
        try:
            told = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            told = None
        if not isinstance(told, dict):
            self.skipped += 1
            return []
        self._note_usage(told)
        return self._events_of(told)

    def _events_of(self, told: dict[str, Any]) -> list[RunEvent]:
        kind = told.get("type")
        match kind:
            case "text" | "delta" | "content" | "message":
                return self._said(_first_text(told, "text", "delta", "content", "message"))
            case "assistant":
                message = told.get("message")
                return self._blocks(message.get("content") if isinstance(message, dict) else None)
            case "item.completed":
                item = told.get("item")
                return self._item(item) if isinstance(item, dict) else []
            case "reasoning" | "thinking":
                return _reasoning(_first_text(told, "text", "delta", "content", "thinking"))
            case "tool_use" | "tool_result" | "tool_call" | "item.started" | "command_execution":
                return _tool_event(told)
            case "result":
                if told.get("is_error") is True:
                    self._fail(_first_text(told, "result", "error", "message"))
                    return []
                text = _first_text(told, "result", "text")
                return [] if self._has_text else self._said(text)
            case "error":
                self._fail(_first_text(told, "message", "error", "text"))
                return []
            case _:
                self.skipped += 1
                return []

    def _blocks(self, blocks: object) -> list[RunEvent]:
        if isinstance(blocks, str):
            return self._said(blocks)
        events: list[RunEvent] = []
        for block in blocks if isinstance(blocks, list) else []:
            if not isinstance(block, dict):
                continue
            if block.get("type") == "text":
                events += self._said(_first_text(block, "text"))
            elif block.get("type") == "thinking":
                events += _reasoning(_first_text(block, "thinking", "text"))
            else:
                events += _tool_event(block)
        return events

    def _item(self, item: dict[str, Any]) -> list[RunEvent]:
        if item.get("type") in {"agent_message", "assistant_message"}:
            return self._said(_first_text(item, "text", "content"))
        if item.get("type") == "reasoning":
            return _reasoning(_first_text(item, "text", "content"))
        return _tool_event(item)

    def _said(self, text: str) -> list[RunEvent]:
        self._has_text = self._has_text or bool(text)
        return _text(text)

    def _fail(self, message: str) -> None:
        self.error = StreamError(
            code=StreamErrorCode.UPSTREAM_ERROR, message=f"agent: {message or 'it failed'}"[:512]
        )

    def _note_usage(self, told: dict[str, Any]) -> None:
        usage = told.get("usage")
        if not isinstance(usage, dict):
            return
        self.usage = Usage(
            prompt_tokens=_count(usage, "input_tokens", "prompt_tokens"),
            completion_tokens=_count(usage, "output_tokens", "completion_tokens"),
            cached_prompt_tokens=_count(usage, "cached_input_tokens", "cache_read_input_tokens"),
        )


def _text(text: str) -> list[RunEvent]:
    return [RunEvent(type=RunEventType.DELTA, delta=text)] if text else []


def _reasoning(text: str) -> list[RunEvent]:
    return [RunEvent(type=RunEventType.DELTA, reasoning_delta=text)] if text else []


def _tool_event(told: dict[str, Any]) -> list[RunEvent]:
    text = msgspec.json.encode(told)[:TOOL_EVENT_BYTES_MAX].decode("utf-8", "ignore")
    return [RunEvent(type=RunEventType.DELTA, metadata={TOOL_EVENT_KEY: text})]


def _first_text(told: dict[str, Any], *names: str) -> str:
    return next((told[name] for name in names if isinstance(told.get(name), str)), "")


def _count(usage: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
            return value
    return None
