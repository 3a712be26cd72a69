"""An incremental parser of event streams: any split of the same bytes gives the same events (SF-05).

Lines end in LF or CRLF. The caller bounds how much is fed without an event ending; the relay's watcher does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = ["SseComment", "SseEvent", "SseParser"]

_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class SseEvent:
    """One dispatched event; several data lines are joined by line feeds."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SseComment:
    """One comment line without its colon; it may stand between the lines of an event."""

    text: bytes


SseItem: TypeAlias = SseEvent | SseComment


class SseParser:
    """One stream. What is incomplete at its end is dropped, as the format says, but see ``finish``."""

    __slots__ = ("_data", "_is_begun", "_name", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._data: list[bytes] = []
        self._name = ""
        self._is_begun = False

    def feed(self, data: bytes) -> list[SseItem]:
        """Take bytes; returns what they complete."""
        if b"\n" not in data:
            if data:
                self._pieces.append(data)
            return []
        self._pieces.append(data)
        *lines, rest = b"".join(self._pieces).split(b"\n")
        self._pieces = [rest] if rest else []
        items: list[SseItem] = []
        for line in lines:
            self._line(line, items)
        return items

    def finish(self) -> list[SseItem]:
        """The stream is over. A terminator that lacks its blank line still counts; nothing else does."""
        items: list[SseItem] = []
        rest, self._pieces = b"".join(self._pieces), []
        if rest:
            self._line(rest, items)
        self._line(b"", items)
        return [item for item in items if isinstance(item, SseEvent) and item.data.strip() == b"[DONE]"]

    def _line(self, line: bytes, items: list[SseItem]) -> None:
        if not self._is_begun:
            self._is_begun = True
            line = line.removeprefix(_BOM)
        line = line.removesuffix(b"\r")
        if not line:
            if self._data:
                items.append(SseEvent(name=self._name, data=b"\n".join(self._data)))
            self._data = []
            self._name = ""
            return
        if line[:1] == b":":
            items.append(SseComment(text=line[1:]))
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
