"""The durable journal: SQLite by default, PostgreSQL by URL, one code path, migrations by Alembic."""
