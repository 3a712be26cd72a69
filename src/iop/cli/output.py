"""How commands print: data to standard output, the rest to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import typer

from iop.config import ConfigInvalid
from iop.core.errors import IopError

__all__ = ["data", "exit_with", "notes", "print_error", "print_json", "print_rows"]


class Printer:
    """Writes lines as they are, whatever the terminal's width; in colour only on a terminal.

    Not rich's console: roles print their few lines here and live for months, with no use for its eight megabytes.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._to_stderr = to_stderr

    def print(self, *words: str, style: Literal["red", "yellow"] | None = None) -> None:
        """One line of these words."""
        typer.secho(" ".join(words), fg=style, err=self._to_stderr)


data = Printer(to_stderr=False)
"""Standard output: what was asked for."""

notes = Printer(to_stderr=True)
"""Standard error: progress, hints, errors."""


_HINTS: Mapping[str, str] = {
    "NO_CREDENTIAL": "Name a token, as in --token file:PATH or --token env:NAME.",
    "UNKNOWN_CREDENTIAL": "Is --token one of that server's, and --target the server that you mean?",
    "NOT_PAUSED": "Pause first, or say --mode drain, abort or keep: it then pauses for this alone.",
    "PARTIAL_GROUP": "The ranks of one engine act only together: name each by --participant, or say --model or --all.",
    "STALE_EPOCH": "iop admin profile shows the epochs that are in force.",
    "REVISION_MISMATCH": "iop admin list shows what was done since; look, then give the current revision.",
    "IDEMPOTENCY_KEY_REUSED": "Repeat the very same request, or give another --key.",
    "weight_retention": "Say --retention offload or --retention discard.",
}
"""What to do about a refusal that a server words for every kind of client, by its reason or the field it names."""


def print_json(value: object) -> None:
    """One JSON object on one line, so that both a parser and ``tail -1`` can take it."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
    """A plain table, one line per row whatever the terminal's width, so that it can be piped; ``empty`` for no row."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    if len(lines) == 1:
        data.print(empty)
        return
    used = [index for index in range(len(columns)) if any(line[index] for line in lines[1:])]
    widths = {index: max(len(line[index]) for line in lines) for index in used}
    for line in lines:
        data.print("  ".join(line[index].ljust(widths[index]) for index in used).rstrip())


def error_object(error: IopError) -> Mapping[str, Any]:
    """An error as programs read it."""
    shape: dict[str, Any] = {
        "code": error.status.grpc,
        "reason": error.reason,
        "message": error.message,
        "details": dict(error.details),
        "retryable": error.retryable,
    }
    if isinstance(error, ConfigInvalid):
        shape["problems"] = [
            {"where": item.where, "key": item.key, "message": item.message, "fix": item.fix}
            for item in error.problems
        ]
    return {"error": shape}


def print_error(error: IopError, *, as_json: bool) -> None:
    """Say what went wrong to people, and as an object to programs that asked for one."""
    if as_json:
        print_json(error_object(error))
    codes = error.status.grpc if error.reason == error.code.value else f"{error.status.grpc}, {error.reason}"
    known = " ".join(f"{key}={value}" for key, value in error.details.items())
    notes.print(f"error: {error.message}", f"({codes}{'; ' if known else ''}{known})", style="red")
    hint = _HINTS.get(error.reason) or _HINTS.get(error.details.get("field", ""))
    if hint is not None:
        notes.print(hint)


def exit_with(code: int) -> NoReturn:
    """End the command with an exit code of the documented table."""
    raise SystemExit(code)
