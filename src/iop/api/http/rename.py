"""The opt-in rule ``response_model: alias``: callers read the name they used, in every body and every event
(SF-15).

Only the bytes of the name change, by the same walk that replaces it in requests; a body that cannot be read
so passes as it is.
"""

from __future__ import annotations

import re
from typing import Final

from iop.api.http.splice import decode_request, find_value
from iop.core.errors import InvalidRequest

__all__ = ["rename_event_models", "rename_model"]

_DATA_LINE: Final = re.compile(rb"^(?:\xef\xbb\xbf)?data: ?(\{.*\})[ \t]*\r?$", re.MULTILINE)
_DATA_LINES: Final = re.compile(rb"(?:^data:[^\n]*(?:\n|\Z)){2,}", re.MULTILINE)
_VALUE: Final = re.compile(rb"data: ?([^\r\n]*)")
_NESTED: Final = ("message", "response")
"""Members that hold an answer object of their own: the start event of Messages, all events of Responses."""


def rename_model(data: bytes, name: bytes) -> bytes:
    """``data`` with the JSON text ``name`` as its ``model``; the same bytes where there is none."""
    return _replaced(data, _spans(data, depth=0), name)


def rename_event_models(events: bytes, name: bytes) -> bytes:
    """Whole events with the JSON text ``name`` as the model of each; comments and other lines stay as they
    are.
    """
    if b'"model"' not in events:
        return events
    renamed = _DATA_LINE.sub(lambda line: line[0].replace(line[1], rename_model(line[1], name), 1), events)
    return _DATA_LINES.sub(lambda lines: _rename_lines(lines[0], name), renamed)


def _rename_lines(lines: bytes, name: bytes) -> bytes:
    """The same for an event whose object goes over several data lines; a name stands within one of them."""
    values = list(_VALUE.finditer(lines))
    spans = _spans(b"\n".join(value[1] for value in values), depth=0)
    edits = []
    offset = 0
    for value in values:
        size = len(value[1])
        at = value.start(1) - offset
        edits += [(at + start, at + end) for start, end in spans if offset <= start < offset + size]
        offset += size + 1
    return _replaced(lines, edits, name)


def _replaced(data: bytes, spans: list[tuple[int, int]], name: bytes) -> bytes:
    if not spans:
        return data
    parts = []
    position = 0
    for start, end in sorted(spans):
        parts += [data[position:start], name]
        position = end
    return b"".join([*parts, data[position:]])


def _spans(data: bytes, *, depth: int) -> list[tuple[int, int]]:
    try:
        data, raw = decode_request(data, 0)
        spans = []
        model = raw.get("model")
        if model is not None and bytes(model)[:1] == b'"':
            spans.append(find_value(data, raw, "model"))
        for key in _NESTED if depth == 0 else ():
            value = raw.get(key)
            if value is not None and bytes(value)[:1] == b"{":
                offset = find_value(data, raw, key)[0]
                spans += [(offset + start, offset + end) for start, end in _spans(bytes(value), depth=1)]
    except InvalidRequest:
        return []
    return spans
