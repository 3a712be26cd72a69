"""Opening a store: URL, engines with explicit isolation, the lock that tells whether its owner lives, migrations."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from iop.core.errors import InvalidRequest, Unavailable

__all__ = ["Database", "normalised_url"]

BUSY_TIMEOUT_S: Final = 10.0
"""How long SQLite waits for another process's write before the store counts as unavailable."""

READERS: Final = 4
"""Connections for reading side by side; each is a thread on SQLite."""

LOCK_ATTEMPTS: Final = 20
LOCK_PAUSE_S: Final = 0.1
"""A PostgreSQL server notices only a moment later that the process before has closed or died; a store that is still
held after two seconds has an owner that lives.
"""

ADVISORY_LOCK: Final = 0x10B0_AD10
"""The PostgreSQL advisory lock that stands for one journal's owner; any fixed number of ours."""


def normalised_url(url: str) -> URL:
    """The URL of the config with the driver that we use.

    Raises:
        InvalidRequest: neither SQLite nor PostgreSQL.
    """
    try:
        parsed = make_url(url)
    except sa.exc.ArgumentError as exc:
        raise InvalidRequest("store: not a URL; try sqlite:///edge.db") from exc
    match parsed.get_backend_name():
        case "sqlite":
            return parsed.set(drivername="sqlite+aiosqlite")
        case "postgresql":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise InvalidRequest(f"store: {other} is not supported; use sqlite or postgresql")


class Database:
    """The engines of one store. One connection writes; several read."""

    def __init__(self, url: str) -> None:
        self.url = normalised_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite and self.url.database in {None, "", ":memory:"}:
            raise InvalidRequest("store: SQLite needs a file, such as sqlite:///edge.db")
        self.writer = self._engine(size=1, begin="BEGIN IMMEDIATE")
        self.reader = self._engine(size=READERS, begin="BEGIN")
        self._lock_file: int | None = None
        self._lock_connection: AsyncConnection | None = None

    def _engine(self, *, size: int, begin: str) -> AsyncEngine:
        options: dict[str, Any] = {
            "poolclass": AsyncAdaptedQueuePool,
            "pool_size": size,
            "max_overflow": 0,
            "pool_timeout": BUSY_TIMEOUT_S,
        }
        if self.is_sqlite:
            options["connect_args"] = {"timeout": BUSY_TIMEOUT_S}
        else:
            options["isolation_level"] = "READ COMMITTED"
            options["pool_pre_ping"] = True
        engine = create_async_engine(self.url, **options)
        if self.is_sqlite:
            _prepare_sqlite(engine, begin)
        return engine

    async def take_lock(self) -> None:
        """Hold the store for as long as this process lives; the kernel or the server lets go when it dies.

        Raises:
            Unavailable: STORE_LEASED, another live process holds it; STORE_UNAVAILABLE, it cannot be locked.
        """
        if self.is_sqlite:
            await asyncio.to_thread(self._take_file_lock)
        else:
            await self._take_advisory_lock()

    def _take_file_lock(self) -> None:
        path = Path(str(self.url.database) + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise Unavailable("the store's directory cannot be written", reason="STORE_UNAVAILABLE") from exc
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise _leased(f"the store {path.with_suffix('').name}") from None
        self._lock_file = handle

    async def _take_advisory_lock(self) -> None:
        connection = await self.reader.connect()
        connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        for _ in range(LOCK_ATTEMPTS):
            if await connection.scalar(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK))):
                self._lock_connection = connection
                return
            await asyncio.sleep(LOCK_PAUSE_S)
        await connection.close()
        raise _leased("this store")

    async def warm_up(self) -> None:
        """Open the reading connections now: an opening that a caller's cancellation cuts off would leak one."""
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(READERS - (self._lock_connection is not None)):
                _ = await stack.enter_async_context(self.reader.connect())

    async def migrate(self) -> None:
        """Bring the schema to the newest version; a new store is made that way too."""
        async with self.writer.connect() as connection:
            await connection.run_sync(_upgrade)
            await connection.commit()

    async def aclose(self) -> None:
        """Close connections and let go of the lock. Idempotent."""
        if self._lock_connection is not None:
            connection, self._lock_connection = self._lock_connection, None
            await connection.close()
        await self.writer.dispose()
        await self.reader.dispose()
        if self._lock_file is not None:
            handle, self._lock_file = self._lock_file, None
            os.close(handle)


def _leased(store: str) -> Unavailable:
    return Unavailable(
        f"another live process uses {store}. Stop it, or give this one a `store` or an IOP_HOME of its own.",
        reason="STORE_LEASED",
    )


def _prepare_sqlite(engine: AsyncEngine, begin: str) -> None:
    """Durability and transactions said explicitly: the driver's defaults begin too late and sync too little."""

    @sa.event.listens_for(engine.sync_engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @sa.event.listens_for(engine.sync_engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)


def _upgrade(connection: sa.Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "iop.store:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
