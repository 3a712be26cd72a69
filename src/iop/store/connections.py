"""Connections that asyncio code may wait for: each is used from one thread at a time, and that thread does the waiting.

SQLAlchemy's own asyncio layer would do the same through greenlets, for 8 MiB more; a store that is used some times a
second does not need it (docs/decisions/0401-process-memory.md).

A *lane* is one thread and at most one open connection. What is asked of a lane runs in order, so a caller that is
cancelled while its statement runs leaves nothing half done: its rollback is queued behind the statement, and the next
transaction behind the rollback.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

import sqlalchemy as sa

__all__ = ["Connection", "Connections"]

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 5.0
"""How long closing waits for a thread; a statement that takes longer is left to the interpreter's end."""


class _Lane:
    """One thread, and the connection that it has open."""

    def __init__(self, engine: sa.Engine, name: str) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._open: sa.Connection | None = None
        self.is_used = False

    async def open(self, *, is_autocommit: bool) -> None:
        """Have a connection, and begin."""
        self.is_used = True

        def connect() -> None:
            self._open = self._engine.connect()
            if is_autocommit:
                self._open = self._open.execution_options(isolation_level="AUTOCOMMIT")

        await asyncio.get_running_loop().run_in_executor(self._thread, connect)

    async def call(self, work: Callable[[sa.Connection], T]) -> T:
        """Do some work in the thread."""

        def run() -> T:
            assert self._open is not None, "the transaction has ended"
            return work(self._open)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def close(self) -> None:
        """Take back what was not committed, and hand the connection back. Happens even if the wait is cancelled."""

        def close() -> None:
            connection, self._open = self._open, None
            if connection is not None:
                connection.close()

        # Shielded: to cancel the wait would otherwise take the work out of the thread's queue again.
        await asyncio.shield(asyncio.wrap_future(self._thread.submit(close)))

    def end_thread(self) -> None:
        """Let the thread end after what it has been asked."""
        self._thread.shutdown(wait=False)


class Connection:
    """One transaction's connection. Every method waits for the database; errors are SQLAlchemy's."""

    def __init__(self, lane: _Lane) -> None:
        self._lane = lane

    async def execute(self, statement: sa.Executable, rows: Sequence[Mapping[str, Any]] | None = None) -> int:
        """Run a statement that returns no rows, once per row given; returns how many rows it changed."""

        def work(connection: sa.Connection) -> int:
            return int(connection.execute(statement, rows).rowcount)

        return await self._lane.call(work)

    async def upsert(self, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, each in place of one that has the same primary key."""
        if rows:
            await self._lane.call(lambda connection: connection.execute(_upsert(connection, table), rows))

    async def all(self, query: sa.Executable) -> Sequence[sa.Row[Any]]:
        """Every row of a query."""
        return await self._lane.call(lambda connection: connection.execute(query).all())

    async def first(self, query: sa.Executable) -> sa.Row[Any] | None:
        """The first row, if there is one."""
        return await self._lane.call(lambda connection: connection.execute(query).first())

    async def one(self, query: sa.Executable) -> sa.Row[Any]:
        """The only row; SQLAlchemy's error when there is another number of them."""
        return await self._lane.call(lambda connection: connection.execute(query).one())

    async def scalar(self, query: sa.Executable) -> Any:
        """The first column of the first row; None when there is no row."""
        return await self._lane.call(lambda connection: connection.scalar(query))

    async def run(self, work: Callable[[sa.Connection], T]) -> T:
        """Call ``work`` in the connection's thread."""
        return await self._lane.call(work)

    async def commit(self) -> None:
        """Make what was written last. If the wait is cancelled, it may or may not have been."""
        await self._lane.call(lambda connection: connection.commit())


class Connections:
    """Some connections of one engine; a transaction takes one, or waits until one is free.

    Args:
        engine: its pool has ``count`` connections.
        count: transactions side by side.
        name: of the threads, for people.
        wait_s: how long a transaction waits for its turn.
    """

    def __init__(self, engine: sa.Engine, *, count: int, name: str, wait_s: float) -> None:
        self._engine = engine
        self._wait_s = wait_s
        self._is_closed = False
        self._lanes = [_Lane(engine, f"{name}-{index}") for index in range(count)]
        # Last in, first out: threads and connections that nobody needs at once are never made.
        self._idle: asyncio.LifoQueue[_Lane] = asyncio.LifoQueue(maxsize=count)
        for lane in reversed(self._lanes):
            self._idle.put_nowait(lane)

    @contextlib.asynccontextmanager
    async def connect(self, *, is_autocommit: bool = False) -> AsyncIterator[Connection]:
        """A connection in a transaction, which is taken back at the end unless it was committed.

        Raises:
            sqlalchemy.exc.TimeoutError: none became free in time.
            sqlalchemy.exc.SQLAlchemyError: the database cannot be reached.
        """
        try:
            async with asyncio.timeout(self._wait_s):
                lane = await self._idle.get()
        except TimeoutError:
            raise sa.exc.TimeoutError(f"no connection was free within {self._wait_s:g} s") from None
        try:
            await lane.open(is_autocommit=is_autocommit)
            yield Connection(lane)
        finally:
            try:
                await lane.close()
            finally:
                self._idle.put_nowait(lane)

    async def aclose(self) -> None:
        """Close all connections and end the threads, after what they are doing. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for lane in self._lanes:
                    if lane.is_used:
                        await lane.close()
        self._engine.dispose()
        for lane in self._lanes:
            lane.end_thread()


def _upsert(connection: sa.Connection, table: sa.Table) -> sa.Executable:
    statement = _insert_of(connection.dialect.name)(table)
    keys = [column.name for column in table.primary_key]
    values = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    return cast("sa.Executable", statement.on_conflict_do_update(index_elements=keys, set_=values))


def _insert_of(dialect: str) -> Callable[[sa.Table], Any]:
    """The dialect's own INSERT, loaded for the dialect in use only."""
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert
