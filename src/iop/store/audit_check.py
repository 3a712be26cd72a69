"""Verifies the audit chain of a store from outside: no lease, no migration, no write (AD-106)."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Final

from iop.admin.audit import ChainCheck
from iop.core.errors import NotFound
from iop.store.journal import SqlJournal

__all__ = ["AuditReport", "verify_audit"]

BATCH: Final = 1000
"""Rows per read; bounds what a check holds of a long history."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What a check found.

    Attributes:
        rows: how many rows were read.
        head: digest of the last good row; keep it elsewhere to find a cut tail later.
        wrong: what is wrong; empty when nothing is.
    """

    rows: int
    head: bytes
    wrong: str


async def verify_audit(url: str, *, head: bytes | None = None) -> AuditReport:
    """Read the whole chain of a store and check it, also while its server runs.

    Args:
        url: of the store, as in the config.
        head: the digest that the chain must end with, as logged.

    Raises:
        NotFound: STORE_NOT_FOUND, there is no such file.
        Unavailable: the store cannot be read.
    """
    journal = SqlJournal(url, unix_nanos=lambda: 0)
    try:
        if journal.file is not None and not await asyncio.to_thread(Path(journal.file).exists):
            raise NotFound("there is no store there", reason="STORE_NOT_FOUND")
        check, count = ChainCheck(), 0
        while True:
            rows = await journal.audit_rows(after_index=count, limit=BATCH)
            for row in rows:
                wrong = check.feed(row)
                if wrong:
                    return AuditReport(rows=count, head=check.head, wrong=wrong)
                count += 1
            if len(rows) < BATCH:
                return AuditReport(rows=count, head=check.head, wrong=check.finish(head))
    finally:
        await journal.aclose()
