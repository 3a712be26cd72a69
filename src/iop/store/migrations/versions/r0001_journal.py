"""The journal's first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables and the one row of counters."""
    meta = op.create_table(
        "meta",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("last_epoch", sa.BigInteger, nullable=False),
        sa.Column("last_ordinal", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_meta"),
        sa.CheckConstraint("id = 1", name="one_row"),
    )
    op.bulk_insert(
        meta,
        [
            {
                "id": 1,
                "version": 0,
                "token": 0,
                "owner": "",
                "revision": 0,
                "last_epoch": 0,
                "last_ordinal": 0,
            }
        ],
    )
    op.create_table(
        "desired_items",
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("kind", "key", name="pk_desired_items"),
    )
    op.create_table(
        "operations",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Integer, nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("principal", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.Text, nullable=False),
        sa.Column("request_sha256", sa.LargeBinary, nullable=False),
        sa.Column("ended_at_unix_nanos", sa.BigInteger),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("moves", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", name="pk_operations"),
        sa.UniqueConstraint("ordinal", name="uq_operations_ordinal"),
        sa.UniqueConstraint("principal", "idempotency_key", name="uq_operations_principal_idempotency_key"),
    )
    op.create_index("ix_operations_ended_at_unix_nanos", "operations", ["ended_at_unix_nanos"])
    op.create_table(
        "statuses",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("participant_id", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", "participant_id", name="pk_statuses"),
    )
    op.create_table(
        "events",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("sequence", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("at_unix_nanos", sa.BigInteger, nullable=False),
        sa.Column("is_terminal", sa.Boolean, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", "sequence", name="pk_events"),
    )
    op.create_index(
        "uq_events_one_terminal",
        "events",
        ["operation_id"],
        unique=True,
        sqlite_where=sa.text("is_terminal IS 1"),
        postgresql_where=sa.text("is_terminal IS true"),
    )
    op.create_table(
        "steps",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", "step", "group_id", name="pk_steps"),
    )
    op.create_table(
        "blobs",
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_blobs"),
    )
    op.create_table(
        "audit",
        sa.Column("index", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("previous", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("index", name="pk_audit"),
    )
