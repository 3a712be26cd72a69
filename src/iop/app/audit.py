"""Verify the audit chain of a store, without the server that writes it (AD-106)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from iop.admin.audit import GENESIS, chain
from iop.admin.journal import AuditRow
from iop.app.process import ProcessClock
from iop.config.values import StoreUrl
from iop.core.errors import NotFound
from iop.store.journal import SqlJournal

__all__ = ["AuditReport", "default_store", "verify_audit"]

PAGE_ROWS: Final = 1000
"""Rows read at once; a chain of years must not be held whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What a verification found.

    Attributes:
        rows: how many rows follow each other unbroken from the first on.
        head: digest of the last of them; zeros when there is none.
        problem: what is wrong; empty when nothing is.
    """

    rows: int
    head: bytes
    problem: str


def default_store(home: Path) -> StoreUrl:
    """The store in a state directory: the Edge's, else the engine's. Raises NotFound when there is neither."""
    for name in ("edge.db", "engine.db"):
        if (home / name).exists():
            return StoreUrl(url=f"sqlite:///{home / name}")
    raise NotFound(f"There is no store in {home}. Name one with --store.", reason="NO_STORE")


async def verify_audit(store: StoreUrl, *, head: bytes | None) -> AuditReport:
    """Follow the chain from its first row to its last.

    Args:
        store: where the rows are; may be in use by its server.
        head: a digest that was logged at some time; it must be in the chain, or a tail was cut off.

    Raises:
        NotFound: there is no such store.
        Unavailable: it cannot be read.
    """
    path = store.sqlite_path
    if path is not None and not path.exists():
        raise NotFound(f"There is no store at {path}.", reason="NO_STORE")
    journal = SqlJournal(store.url, unix_nanos=ProcessClock().unix_nanos)
    try:
        return await _follow(_rows(journal), head)
    finally:
        await journal.aclose()


async def _rows(journal: SqlJournal) -> AsyncIterator[AuditRow]:
    after = 0
    while page := await journal.audit_rows(after_index=after, limit=PAGE_ROWS):
        for row in page:
            yield row
        after = page[-1].index


async def _follow(rows: AsyncIterator[AuditRow], head: bytes | None) -> AuditReport:
    last: AuditRow | None = None
    count, has_head = 0, head is None or head == GENESIS
    async for row in rows:
        expected = chain(last, row.entry)
        if row.index != expected.index:
            return _report(count, last, f"row {expected.index} is missing")
        if (row.previous, row.digest) != (expected.previous, expected.digest):
            return _report(count, last, f"row {row.index} was altered")
        last, count = row, count + 1
        has_head = has_head or row.digest == head
    problem = "" if has_head else f"the given head is not among its {count} rows: the tail was cut off"
    return _report(count, last, problem)


def _report(count: int, last: AuditRow | None, problem: str) -> AuditReport:
    return AuditReport(rows=count, head=GENESIS if last is None else last.digest, problem=problem)
