"""The commands of people who look after a fleet: short-lived, and free to import what they like."""

from __future__ import annotations

import typer

from iop.cli import adapters_command, conformance_command, fetch_command, status_command
from iop.cli.admin_commands import admin_app
from iop.cli.audit_command import audit_app
from iop.cli.config_commands import config_app
from iop.cli.session_command import session_app

__all__ = ["register"]

admin_app.add_typer(audit_app, name="audit")
fetch_command.register(admin_app)


def register(app: typer.Typer) -> None:
    """Add them to the command tree."""
    status_command.register(app)
    adapters_command.register(app)
    conformance_command.register(app)
    app.add_typer(config_app, name="config")
    app.add_typer(session_app, name="session")
    app.add_typer(admin_app, name="admin")
