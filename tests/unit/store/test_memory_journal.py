"""The journal in memory passes the suite that the durable ones pass."""

from __future__ import annotations

import pytest

from iop.admin.journal import Journal
from iop.testing.journal_suite import NOW, JournalSuite, OpenJournal
from iop.testing.memory_journal import MemoryJournal, MemoryStore


class TestMemoryJournal(JournalSuite):
    has_live_lock = False

    @pytest.fixture
    def open_journal(self) -> OpenJournal:
        store = MemoryStore()

        async def open_one() -> Journal:
            return MemoryJournal(store, unix_nanos=lambda: NOW)

        return open_one
