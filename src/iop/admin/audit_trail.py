"""The audit as it is written: every call of a known principal, to the log and to the chain of rows (AD-101, AD-106)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from iop.admin.journal import AuditEntry, Journal
from iop.admin.permissions import Permission, Principal, require
from iop.admin.read_tally import ReadTally
from iop.core.clock import Clock
from iop.core.errors import PermissionDenied, Unavailable

__all__ = ["AuditTrail"]

logger = logging.getLogger(__name__)


class AuditTrail:
    """Writes the calls of one server.

    Args:
        journal: has the chain.
    """

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._reads = ReadTally()

    async def note(
        self,
        principal: Principal,
        method: str,
        *,
        outcome: str,
        operation_id: str = "",
        digest: bytes = b"",
        reason: str = "",
    ) -> None:
        """Write one call to the log and, while the store can be written, to the chain.

        A store that cannot be written loses no refusal: the log has it.
        """
        entry = self._entry(
            principal, method, outcome=outcome, operation_id=operation_id, digest=digest, reason=reason
        )
        _log_call(entry, head=await self._append([entry]))

    async def authorize(
        self, principal: Principal, permission: Permission, method: str, operation_id: str = ""
    ) -> None:
        """Let a reading call in and note it, or note its refusal; reads that repeat are counted.

        Raises:
            PermissionDenied: the principal lacks the permission.
        """
        try:
            require(principal, permission)
        except PermissionDenied as refusal:
            await self.note(principal, method, outcome=refusal.reason, operation_id=operation_id)
            raise
        entry = self._entry(principal, method, outcome="ALLOWED", operation_id=operation_id)
        stored = self._reads.note(entry, now=self._clock.monotonic())
        _log_call(entry, head=await self._append(stored))

    async def count_reads(self) -> None:
        """Store the counts of repeated reads that are due."""
        await self._append(self._reads.due(self._clock.monotonic()))

    async def close(self) -> None:
        """Store all counts of repeated reads."""
        await self._append(self._reads.close())

    def _entry(
        self,
        principal: Principal,
        method: str,
        *,
        outcome: str,
        operation_id: str = "",
        digest: bytes = b"",
        reason: str = "",
    ) -> AuditEntry:
        return AuditEntry(
            at_unix_nanos=self._clock.unix_nanos(),
            principal=principal.name,
            peer=principal.peer,
            method=method,
            outcome=outcome,
            operation_id=operation_id,
            request_sha256=digest,
            reason=reason,
        )

    async def _append(self, entries: Sequence[AuditEntry]) -> str:
        """Store rows while the store can be written; returns the last one's digest, empty when there is none."""
        head = ""
        try:
            for entry in entries:
                head = (await self._journal.append_audit(entry)).digest.hex()
        except Unavailable as exc:
            logger.warning("audit.not_stored error=%s", exc)
        return head


def _log_call(entry: AuditEntry, *, head: str) -> None:
    logger.info(
        "admin.called principal=%s peer=%s method=%s outcome=%s op_id=%s digest=%s audit_head=%s",
        entry.principal,
        entry.peer,
        entry.method,
        entry.outcome,
        entry.operation_id,
        entry.request_sha256.hex(),
        head,
    )
