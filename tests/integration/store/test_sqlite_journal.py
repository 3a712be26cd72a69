"""The journal on SQLite: the shared suite, and what only a file can show."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from iop.admin.journal import Journal
from iop.core.errors import InvalidRequest, Unavailable
from iop.store import schema
from iop.store.database import Database
from iop.store.journal import SqlJournal
from iop.store.schema import METADATA
from iop.store.upgrading import upgrade
from iop.testing.journal_suite import NOW, JournalSuite, OpenJournal, accepted, pause_request


class TestSqliteJournal(JournalSuite):
    @pytest.fixture
    async def open_journal(self, tmp_path: Path) -> AsyncIterator[OpenJournal]:
        opened: list[SqlJournal] = []

        async def open_one() -> Journal:
            journal = SqlJournal(f"sqlite:///{tmp_path}/edge.db", unix_nanos=lambda: NOW)
            opened.append(journal)
            return journal

        yield open_one
        for journal in opened:
            await journal.aclose()

    @pytest.mark.clause("AD-21")
    async def test_the_database_itself_refuses_a_second_terminal_event(
        self, journal: Journal, tmp_path: Path
    ) -> None:
        await accepted(journal, pause_request(), "op-1")
        insert = "INSERT INTO events VALUES ('op-1', ?, 0, 1, '{}')"
        with sqlite3.connect(tmp_path / "edge.db") as connection:
            connection.execute(insert, (90,))
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(insert, (91,))
        connection.close()

    @pytest.mark.clause("AD-100")
    async def test_writes_are_synced_in_full(self, journal: Journal) -> None:
        assert isinstance(journal, SqlJournal)
        async with journal._database.writer.connect() as connection:
            mode = await connection.scalar(sa.text("PRAGMA journal_mode"))
            sync = await connection.scalar(sa.text("PRAGMA synchronous"))
        assert (mode, sync) == ("wal", 2)

    @pytest.mark.clause("AD-100")
    async def test_a_store_taken_over_behind_the_lock_fences_the_old_owner(
        self, journal: Journal, tmp_path: Path
    ) -> None:
        with sqlite3.connect(tmp_path / "edge.db") as connection:
            connection.execute("UPDATE meta SET token = token + 1")
        connection.close()
        with pytest.raises(Unavailable) as lost:
            await accepted(journal, pause_request(), "op-1")
        assert lost.value.reason == "LEASE_LOST"

    @pytest.mark.clause("AD-100")
    async def test_a_store_in_use_is_named_with_what_to_do(
        self, journal: Journal, open_journal: OpenJournal
    ) -> None:
        with pytest.raises(Unavailable, match=r"uses the store edge\.db\. Stop it, or give this one"):
            await (await open_journal()).acquire("two")

    @pytest.mark.clause("AD-100")
    async def test_a_store_that_breaks_refuses_and_recovers(self, journal: Journal, tmp_path: Path) -> None:
        with sqlite3.connect(tmp_path / "edge.db") as connection:
            connection.execute("ALTER TABLE operations RENAME TO operations_gone")
        with pytest.raises(Unavailable) as refusal:
            await accepted(journal, pause_request(), "op-1")
        assert refusal.value.reason == "STORE_UNAVAILABLE"
        with sqlite3.connect(tmp_path / "edge.db") as connection:
            connection.execute("ALTER TABLE operations_gone RENAME TO operations")
        connection.close()
        await accepted(journal, pause_request(), "op-1")


async def test_the_migrated_schema_is_the_declared_one(tmp_path: Path) -> None:
    def compare(connection: sa.Connection) -> list[object]:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        upgrade(connection)
        assert schema.version_of(connection) == schema.HEAD, "HEAD names the last migration"
        assert connection.execute(sa.select(schema.meta)).all() == [(1, 0, 0, "", 0, 0, 0)]
        return list(compare_metadata(MigrationContext.configure(connection), METADATA))

    database = Database(f"sqlite:///{tmp_path}/edge.db")
    async with database.writer.connect() as connection:
        assert await connection.run(compare) == []
    await database.aclose()


async def test_a_new_store_is_made_as_migrations_would_make_it(tmp_path: Path) -> None:
    def look(connection: sa.Connection) -> None:
        assert schema.version_of(connection) == schema.HEAD
        assert connection.execute(sa.select(schema.meta)).all() == [(1, 0, 0, "", 0, 0, 0)]
        before = sorted(sa.inspect(connection).get_table_names())
        upgrade(connection)
        assert sorted(sa.inspect(connection).get_table_names()) == before, "nothing was left to migrate"

    database = Database(f"sqlite:///{tmp_path}/edge.db")
    await database.migrate()
    async with database.writer.connect() as connection:
        await connection.run(look)
    await database.aclose()


async def test_migrating_twice_changes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        database = Database(f"sqlite:///{tmp_path}/edge.db")
        await database.migrate()
        await database.aclose()


@pytest.mark.parametrize("url", ["mysql://x/y", "sqlite://", "not a url"])
def test_other_stores_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        Database(url)
