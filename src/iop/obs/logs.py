"""Structured logs on standard error: one JSON object or one readable line per event.

Code logs through ``logging.getLogger(__name__)`` with a constant event text ``noun.verb_past`` and its fields in
``extra``; identifiers in scope come from :func:`bound`. structlog only renders, so libraries' records look the same.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from enum import Enum, unique
from typing import Final, TextIO

import structlog
import structlog.tracebacks

from iop.obs.redaction import redact

__all__ = ["LogFormat", "bound", "configure_logging"]

NOISY_LIBRARIES: Final = ("aiosqlite", "alembic", "asyncio", "grpc", "sqlalchemy", "uvicorn.access")
"""Their informational lines tell nothing about the fleet."""


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
    with structlog.contextvars.bound_contextvars(**{key: value for key, value in ids.items() if value}):
        yield


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
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor
    if fmt is LogFormat.JSON:
        # Without locals: they hold prompts and credentials.
        tail: list[structlog.typing.Processor] = [
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            )
        ]
        renderer = structlog.processors.JSONRenderer(sort_keys=False, default=str)
    else:
        tail = []
        renderer = structlog.dev.ConsoleRenderer(
            colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )

    def add_process(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if process:
            event["process"] = process
        return event

    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            add_process,
            *tail,
            redact,
            renderer,
        ],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in NOISY_LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
