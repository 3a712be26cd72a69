"""Connections behind threads: cancellation leaves nothing open, waiting is bounded, schemas are told apart."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from iop.core.errors import Unavailable
from iop.store import schema
from iop.store.connections import Connection, Connections
from iop.store.database import Database, _patience, normalised_url
from iop.testing.cancel_sweep import SweepPoint, sweep

ITEM = {"kind": "k", "key": "1", "body": "{}"}


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database(f"sqlite:///{tmp_path}/edge.db")
    await opened.migrate()
    yield opened
    await opened.aclose()


async def count(database: Database) -> int:
    async with database.reader.connect() as connection:
        found: int = await connection.scalar(sa.select(sa.func.count()).select_from(schema.desired_items))
    return found


async def test_what_was_not_committed_is_taken_back(database: Database) -> None:
    async with database.writer.connect() as connection:
        assert await connection.execute(sa.insert(schema.desired_items), [ITEM]) == 1
    assert await count(database) == 0
    async with database.writer.connect() as connection:
        await connection.upsert(schema.desired_items, [ITEM])
        await connection.upsert(schema.desired_items, [{**ITEM, "body": "[]"}])
        await connection.commit()
    async with database.reader.connect() as connection:
        (row,) = await connection.all(sa.select(schema.desired_items))
    assert row.body == "[]"


async def test_a_transaction_cancelled_anywhere_leaves_the_next_one_a_clean_connection(
    database: Database,
) -> None:
    async def write() -> None:
        async with database.writer.connect() as connection:
            await connection.upsert(schema.desired_items, [ITEM])
            await connection.scalar(sa.select(schema.meta.c.token))
            await connection.commit()

    async def look(_point: SweepPoint) -> None:
        before = await count(database)
        assert before in {0, 1}
        async with database.writer.connect() as connection:
            await connection.execute(sa.delete(schema.desired_items))
            await connection.commit()
        assert await count(database) == 0

    assert await sweep(write, look) >= 5


async def test_a_statement_that_runs_on_after_its_caller_was_cancelled_is_rolled_back(
    database: Database,
) -> None:
    started, may_end = threading.Event(), threading.Event()

    def slow(connection: sa.Connection) -> None:
        connection.execute(sa.insert(schema.desired_items), [ITEM])
        started.set()
        assert may_end.wait(10)

    async def write() -> None:
        async with database.writer.connect() as connection:
            await connection.run(slow)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(write(), name="write")
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        may_end.set()
    assert task.cancelled()
    assert await count(database) == 0


async def test_a_transaction_waits_for_its_turn_only_so_long(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/edge.db")
    connections = Connections(engine, count=1, name="t", wait_s=0.01)
    async with connections.connect():
        with pytest.raises(sa.exc.TimeoutError, match="no connection was free"):
            async with connections.connect():
                pass
    async with connections.connect() as connection:
        assert await connection.scalar(sa.text("SELECT 1")) == 1
    await connections.aclose()
    await connections.aclose()


async def test_readers_work_side_by_side_and_use_no_more_threads_than_they_need(database: Database) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("store-reader") for thread in threading.enumerate())

    assert [await count(database) for _ in range(3)] == [0, 0, 0]
    assert threads() == 1
    together = asyncio.Barrier(4)

    async def read() -> None:
        async with database.reader.connect() as connection, asyncio.timeout(10):
            await together.wait()
            assert await connection.scalar(sa.text("SELECT 1")) == 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(read(), name="read")
    assert threads() == 4


@pytest.mark.clause("AD-100")
async def test_a_store_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "edge.db"
    database = Database(f"sqlite:///{file}")
    await database.migrate()
    await database.aclose()
    with sqlite3.connect(file) as raw:
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.close()
    database = Database(f"sqlite:///{file}")
    with pytest.raises(Unavailable, match="newer release") as refusal:
        await database.migrate()
    await database.aclose()
    assert refusal.value.reason == "STORE_VERSION"
    with sqlite3.connect(file) as raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]
    raw.close()


async def test_a_new_store_is_made_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(_connection: Connection) -> None:
        raise OSError("power is gone")

    url = f"sqlite:///{tmp_path}/edge.db"
    database = Database(url)
    with monkeypatch.context() as broken:
        broken.setattr(Connection, "commit", cut)
        with pytest.raises(OSError, match="power"):
            await database.migrate()
    await database.migrate()
    assert await count(database) == 0
    await database.aclose()


def test_a_server_that_falls_silent_is_waited_for_in_bounds_unless_the_url_says_otherwise() -> None:
    limits = _patience(normalised_url("postgresql://db/iop?connect_timeout=3"))
    assert "connect_timeout" not in limits
    assert limits["tcp_user_timeout"] == "20000"
