"""The audit chain: each row's digest covers the row before, so a removed or altered row shows (AD-106). Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from iop.admin.journal import AuditEntry, AuditRow

__all__ = ["GENESIS", "ChainCheck", "chain", "digest_of", "find_break"]

GENESIS: Final = bytes(32)
"""What the first row chains to."""


def digest_of(index: int, entry: AuditEntry, previous: bytes) -> bytes:
    """SHA-256 over a row in a fixed text form, so that other tools can check it."""
    parts = [
        index,
        previous.hex(),
        entry.at_unix_nanos,
        entry.principal,
        entry.peer,
        entry.method,
        entry.outcome,
        entry.operation_id,
        entry.request_sha256.hex(),
        entry.reason,
    ]
    text = json.dumps(parts, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def chain(last: AuditRow | None, entry: AuditEntry) -> AuditRow:
    """The row that follows `last`."""
    index = 1 if last is None else last.index + 1
    previous = GENESIS if last is None else last.digest
    return AuditRow(index=index, entry=entry, previous=previous, digest=digest_of(index, entry, previous))


class ChainCheck:
    """Checks a chain row by row, in order; for chains that are read in pieces."""

    def __init__(self) -> None:
        self.last: AuditRow | None = None

    @property
    def head(self) -> bytes:
        """Digest of the last row seen."""
        return GENESIS if self.last is None else self.last.digest

    def feed(self, row: AuditRow) -> str:
        """What is wrong with the next row; empty when nothing is."""
        expected = chain(self.last, row.entry)
        if row.index != expected.index:
            return f"row {expected.index} is missing"
        if row.previous != expected.previous or row.digest != expected.digest:
            return f"row {row.index} was altered"
        self.last = row
        return ""

    def finish(self, head: bytes | None) -> str:
        """Whether the chain ends where it must; finds a tail that was cut off."""
        if head is None or head == self.head:
            return ""
        return f"the chain ends at row {0 if self.last is None else self.last.index}, which is not the given head"


def find_break(rows: Iterable[AuditRow], *, head: bytes | None = None) -> str:
    """What is wrong with a chain given in order; empty when nothing is.

    Args:
        rows: all of it, from the first row.
        head: the digest that the last row must have, as logged elsewhere.
    """
    check = ChainCheck()
    for row in rows:
        wrong = check.feed(row)
        if wrong:
            return wrong
    return check.finish(head)
