"""Older schemas to the newest one, by Alembic. Imported when there is one to bring up, and by tests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util import CommandError

from iop.core.errors import Unavailable

__all__ = ["migrations", "upgrade"]


def migrations() -> Config:
    """Where the migrations are."""
    config = Config()
    config.set_main_option("script_location", "iop.store:migrations")
    return config


def upgrade(connection: sa.Connection) -> None:
    """Run what is missing, in the connection's transaction.

    Raises:
        Unavailable: the schema has a version that this release does not know.
    """
    config = migrations()
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as exc:
        raise Unavailable(
            "the store was written by a newer release. Run that one, or give this one a `store` of its own.",
            reason="STORE_VERSION",
        ) from exc
