"""The audit chain: each row's digest covers the row before, so a removed or altered row shows (AD-106). Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from iop.admin.journal import AuditEntry, AuditRow

__all__ = ["GENESIS", "chain", "digest_of", "find_break"]

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


def find_break(rows: Iterable[AuditRow], *, head: bytes | None = None) -> str:
    """What is wrong with a chain given in order; empty when nothing is.

    Args:
        head: the digest that the last row must have, as logged elsewhere; finds a tail that was cut off.
    """
    last: AuditRow | None = None
    for row in rows:
        expected = chain(last, row.entry)
        if row.index != expected.index:
            return f"row {expected.index} is missing"
        if row.previous != expected.previous or row.digest != expected.digest:
            return f"row {row.index} was altered"
        last = row
    actual = GENESIS if last is None else last.digest
    if head is not None and head != actual:
        return f"the chain ends at row {0 if last is None else last.index}, which is not the given head"
    return ""
