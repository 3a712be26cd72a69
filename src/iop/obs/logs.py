"""Structured logs on standard error: one JSON object or one readable line per event.

Code logs through ``logging.getLogger(__name__)`` with a constant event text ``noun.verb_past`` and its fields in
``extra``; identifiers in scope come from :func:`bound`. Rendering happens in one formatter, so libraries' records look
the same.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import Enum, unique
from types import MappingProxyType
from typing import Any, Final, TextIO

from iop.obs.redaction import clean_text, redact

__all__ = ["LogFormat", "bound", "configure_logging"]

NOISY_LIBRARIES: Final = ("alembic", "asyncio", "grpc", "sqlalchemy", "uvicorn.access")
"""Their informational lines tell nothing about the fleet."""

FRAMES_MAX: Final = 50
"""Frames of one traceback that are logged, the innermost: a recursion without end must not fill the disk."""

CAUSES_MAX: Final = 20
"""Errors of one chain or group that are logged; more say nothing new."""

_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "asctime",
    "message",
    "taskName",
    "color_message",
}
"""What every record has, and what uvicorn adds for its own terminal; all else came in ``extra``."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_ids: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("iop_log_ids", default=_NOTHING)


@unique
class LogFormat(Enum):
    """How events are written."""

    JSON = "json"
    CONSOLE = "console"


@contextlib.contextmanager
def bound(**ids: str | None) -> Iterator[None]:
    """Put identifiers (``node_id conn_id run_id request_id op_id trace_id``) on every event logged inside.

    Follows the task: what is bound in one task is not seen by its siblings.
    """
    token = _ids.set({**_ids.get(), **{key: value for key, value in ids.items() if value}})
    try:
        yield
    finally:
        _ids.reset(token)


def configure_logging(
    *, fmt: LogFormat, level: str = "INFO", stream: TextIO | None = None, process: str = ""
) -> None:
    """Send every record of this process to ``stream``. Called once, by a composition root.

    Args:
        fmt: JSON for machines, console for people.
        level: lowest level that is written.
        stream: standard error by default.
        process: ``edge``, ``node``, ``engine`` or empty; on every event, so that one terminal can hold several.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(process) if fmt is LogFormat.JSON else _ReadableLines(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class _Lines(logging.Formatter):
    """What both forms share: the fields of an event, clean of credentials and content."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Identifiers in scope, what came in ``extra``, and the process."""
        extra = {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
        return redact({**_ids.get(), **extra, **self._process})


class _JsonLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "event": clean_text(record.getMessage()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": _moment(record),
            **self.fields(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            event["exception"] = _chain(record.exc_info[1])
        if record.stack_info:
            event["stack"] = record.stack_info
        return json.dumps(event, default=str)


class _ReadableLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        words = [
            _moment(record),
            f"[{record.levelname.lower():<8}]",
            clean_text(record.getMessage()),
            f"[{record.name}]",
        ]
        words += [f"{key}={_word(value)}" for key, value in sorted(self.fields(record).items())]
        lines = [" ".join(words)]
        if record.exc_info:
            lines.append(clean_text(self.formatException(record.exc_info)))
        if record.stack_info:
            lines.append(record.stack_info)
        return "\n".join(lines)


def _moment(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    )


def _word(value: object) -> str:
    """A value in one line: as it is if it is one word, else quoted."""
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(" \"'="):
        return value
    return repr(value)


def _chain(error: BaseException) -> list[dict[str, Any]]:
    """An error, then what caused it, and so on. Without local variables: they hold prompts and credentials."""
    chain: list[dict[str, Any]] = []
    seen: set[int] = set()
    current: BaseException | None = error
    is_cause = False
    while current is not None and id(current) not in seen and len(chain) < CAUSES_MAX:
        seen.add(id(current))
        chain.append(_one(current, is_cause=is_cause))
        is_cause = current.__cause__ is not None
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return chain


def _one(error: BaseException, *, is_cause: bool) -> dict[str, Any]:
    # Lines of source are not looked up: they are on the disk of whoever reads the log.
    frames = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__), lookup_lines=False, limit=-FRAMES_MAX
    )
    said: dict[str, Any] = {
        "exc_type": type(error).__name__,
        "exc_value": clean_text(_text(error)),
        "is_cause": is_cause,
        "frames": [{"filename": f.filename, "lineno": f.lineno, "name": f.name} for f in frames],
    }
    if notes := getattr(error, "__notes__", None):
        said["exc_notes"] = [clean_text(str(note)) for note in notes]
    if isinstance(error, BaseExceptionGroup):
        said["exceptions"] = [_chain(inner) for inner in error.exceptions[:CAUSES_MAX]]
    return said


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (whatever a foreign class does, the event must be written)
        return "(its text cannot be read)"
