"""The declared schema. A new store is made from it, and migrations lead to exactly this; tests compare.

Documents (specs, moves, events, desired items) are JSON text; what is searched, ordered or constrained has a column.
Times are integer nanoseconds since 1970.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

__all__ = [
    "HEAD",
    "METADATA",
    "audit",
    "blobs",
    "create",
    "desired_items",
    "events",
    "meta",
    "operations",
    "statuses",
    "steps",
    "version_of",
]

HEAD: Final = "0001"
"""The version of this schema: that of the last migration."""

METADATA: Final = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

meta = sa.Table(
    "meta",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("last_epoch", sa.BigInteger, nullable=False),
    sa.Column("last_ordinal", sa.BigInteger, nullable=False),
    sa.CheckConstraint("id = 1", name="one_row"),
)
"""One row: the counters, and who may write. `version` rises with every write: a snapshot is good while it stands."""

desired_items = sa.Table(
    "desired_items",
    METADATA,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)
"""Pauses, releases, quarantines, weights, profiles and overrides that are in force."""

operations = sa.Table(
    "operations",
    METADATA,
    sa.Column("operation_id", sa.Text, primary_key=True),
    sa.Column("ordinal", sa.BigInteger, nullable=False, unique=True),
    sa.Column("kind", sa.Integer, nullable=False),
    sa.Column("state", sa.Integer, nullable=False),
    sa.Column("principal", sa.Text, nullable=False),
    sa.Column("idempotency_key", sa.Text, nullable=False),
    sa.Column("request_sha256", sa.LargeBinary, nullable=False),
    sa.Column("ended_at_unix_nanos", sa.BigInteger),
    sa.Column("spec", sa.Text, nullable=False),
    sa.Column("moves", sa.Text, nullable=False),
    sa.UniqueConstraint("principal", "idempotency_key"),
    sa.Index("ix_operations_ended_at_unix_nanos", "ended_at_unix_nanos"),
)
"""One row per operation; the unique key is AD-12's."""

statuses = sa.Table(
    "statuses",
    METADATA,
    sa.Column("operation_id", sa.Text, primary_key=True),
    sa.Column("participant_id", sa.Text, primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)

events = sa.Table(
    "events",
    METADATA,
    sa.Column("operation_id", sa.Text, primary_key=True),
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_unix_nanos", sa.BigInteger, nullable=False),
    sa.Column("is_terminal", sa.Boolean, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
)
_ONE_TERMINAL: Final = sa.Index(
    "uq_events_one_terminal",
    events.c.operation_id,
    unique=True,
    sqlite_where=events.c.is_terminal.is_(True),
)

steps = sa.Table(
    "steps",
    METADATA,
    sa.Column("operation_id", sa.Text, primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("group_id", sa.Text, primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)

blobs = sa.Table(
    "blobs",
    METADATA,
    sa.Column("digest", sa.LargeBinary, primary_key=True),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

audit = sa.Table(
    "audit",
    METADATA,
    sa.Column("index", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("previous", sa.LargeBinary, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
)

_VERSIONS: Final = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""The migration tool's own table, as it makes it: one row."""


def version_of(connection: sa.Connection) -> str | None:
    """The version of a store's schema; None: it is new."""
    if not sa.inspect(connection).has_table(_VERSIONS.name):
        return None
    version: str | None = connection.scalar(sa.select(_VERSIONS.c.version_num))
    return version


def create(connection: sa.Connection) -> None:
    """Make a new store's schema at its newest version, with the one row of counters; does not commit."""
    if connection.dialect.name == "postgresql":
        # Not where the index is declared: SQLAlchemy would load that dialect for every store.
        _ONE_TERMINAL.dialect_kwargs["postgresql_where"] = events.c.is_terminal.is_(True)
    METADATA.create_all(connection, checkfirst=False)
    counters = dict.fromkeys(("version", "token", "revision", "last_epoch", "last_ordinal"), 0)
    connection.execute(sa.insert(meta).values(id=1, owner="", **counters))
    _VERSIONS.create(connection, checkfirst=False)
    connection.execute(sa.insert(_VERSIONS).values(version_num=HEAD))
