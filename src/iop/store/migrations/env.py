"""Runs migrations on the connection that the store hands over; never by itself."""

from __future__ import annotations

from alembic import context

from iop.store.schema import METADATA

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=METADATA, render_as_batch=False)
with context.begin_transaction():
    context.run_migrations()
