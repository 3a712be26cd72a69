"""Plugins that every test run loads."""

from __future__ import annotations

pytest_plugins = ["clauses", "leaks"]
