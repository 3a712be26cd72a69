"""Forward-only schema migrations, run by Alembic when a store is opened."""
