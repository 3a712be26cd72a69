"""Opening a store: URL, connections with explicit isolation, the lock that tells whether its owner lives, schema."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.pool import QueuePool

from iop.core.errors import InvalidRequest, Unavailable
from iop.store import schema
from iop.store.connections import Connection, Connections

__all__ = ["Database", "normalised_url"]

BUSY_TIMEOUT_S: Final = 10.0
"""How long SQLite waits for another process's write before the store counts as unavailable."""

READERS: Final = 4
"""Connections for reading side by side, each with a thread; made when they are needed."""

LOCK_ATTEMPTS: Final = 20
LOCK_PAUSE_S: Final = 0.1
"""A PostgreSQL server notices only a moment later that the process before has closed or died; a store that is still
held after two seconds has an owner that lives.
"""

SERVER_LOST_S: Final = 10
"""How long a PostgreSQL server that has fallen silent is waited for; a thread can be called off in no other way."""

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
            return parsed.set(drivername="sqlite+pysqlite")
        case "postgresql":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise InvalidRequest(f"store: {other} is not supported; use sqlite or postgresql")


class Database:
    """The connections to one store. One writes; several read."""

    def __init__(self, url: str) -> None:
        self.url = normalised_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite and self.url.database in {None, "", ":memory:"}:
            raise InvalidRequest("store: SQLite needs a file, such as sqlite:///edge.db")
        self.writer = self._connections(count=1, begin="BEGIN IMMEDIATE", name="store-writer")
        self.reader = self._connections(count=READERS, begin="BEGIN", name="store-reader")
        self._lock_file: int | None = None
        self._lock_connection = contextlib.AsyncExitStack()

    def _connections(self, *, count: int, begin: str, name: str) -> Connections:
        options: dict[str, Any] = {"poolclass": QueuePool, "pool_size": count, "max_overflow": 0}
        if self.is_sqlite:
            options["connect_args"] = {"timeout": BUSY_TIMEOUT_S, "check_same_thread": False}
        else:
            options["isolation_level"] = "READ COMMITTED"
            options["pool_pre_ping"] = True
            options["connect_args"] = _patience(self.url)
        engine = sa.create_engine(self.url, **options)
        if self.is_sqlite:
            _prepare_sqlite(engine, begin)
        return Connections(engine, count=count, name=name, wait_s=BUSY_TIMEOUT_S)

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
        connection = await self._lock_connection.enter_async_context(self.reader.connect(is_autocommit=True))
        for _ in range(LOCK_ATTEMPTS):
            if await connection.scalar(sa.select(sa.func.pg_try_advisory_lock(ADVISORY_LOCK))):
                return
            await asyncio.sleep(LOCK_PAUSE_S)
        await self._lock_connection.aclose()
        raise _leased("this store")

    async def migrate(self) -> None:
        """Bring the schema to the newest version; a new store is made that way too.

        Raises:
            Unavailable: STORE_VERSION, a newer release has written it.
        """
        async with self.writer.connect() as connection:
            await _bring_to_head(connection)

    async def aclose(self) -> None:
        """Close connections and let go of the lock. Idempotent."""
        await self._lock_connection.aclose()
        await self.writer.aclose()
        await self.reader.aclose()
        if self._lock_file is not None:
            handle, self._lock_file = self._lock_file, None
            os.close(handle)


async def _bring_to_head(connection: Connection) -> None:
    version = await connection.run(schema.version_of)
    if version == schema.HEAD:
        return
    if version is None:
        await connection.run(schema.create)
    else:
        # Only here: few starts find an older store, and the migration tool weighs more than the store itself.
        from iop.store.upgrading import upgrade

        await connection.run(upgrade)
    await connection.commit()


def _patience(url: URL) -> dict[str, str]:
    """Time limits of a connection, but for those that the URL sets itself."""
    limits = {
        "connect_timeout": SERVER_LOST_S,
        "keepalives_idle": SERVER_LOST_S,
        "keepalives_interval": SERVER_LOST_S // 5,
        "keepalives_count": 5,
        "tcp_user_timeout": 2 * SERVER_LOST_S * 1000,
    }
    return {key: str(value) for key, value in limits.items() if key not in url.query}


def _leased(store: str) -> Unavailable:
    return Unavailable(
        f"another live process uses {store}. Stop it, or give this one a `store` or an IOP_HOME of its own.",
        reason="STORE_LEASED",
    )


def _prepare_sqlite(engine: sa.Engine, begin: str) -> None:
    """Durability and transactions said explicitly: the driver's defaults begin too late and sync too little."""

    @sa.event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)
