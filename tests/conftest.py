"""Plugins and settings that every test run loads."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

pytest_plugins = ["clauses", "frozen", "leaks", "long_first", "trust"]

# How long an example or its making takes says something about the machine and its load, nothing about the code: the
# first test of a process that draws text makes Hypothesis's tables of Unicode, which may take longer than it allows.
settings.register_profile("iop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("iop")
