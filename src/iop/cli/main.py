"""The ``iop`` command: its tree, and how errors become exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from iop import __version__
from iop.cli import conformance_command, process_commands, status_command
from iop.cli.admin_commands import admin_app
from iop.cli.audit_command import audit_app
from iop.cli.config_commands import config_app
from iop.cli.output import notes, print_error
from iop.core.errors import IopError

__all__ = ["app", "main"]

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

app = typer.Typer(
    name="iop",
    help="Run inference fleets: one gateway (the Edge) before many Nodes with engines, operated one way.\n\n"
    "Start with: iop up",
    epilog="Exit codes: 0 done, 1 failed or not reachable, 2 usage or config, 3 refused, 4 operation failed, "
    "5 operation cancelled.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
process_commands.register(app)
status_command.register(app)
conformance_command.register(app)
app.add_typer(config_app, name="config")
admin_app.add_typer(audit_app, name="audit")
app.add_typer(admin_app, name="admin")


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"iop {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and leave with one of the documented exit codes."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; returns its exit code."""
    try:
        app(arguments, prog_name="iop")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        notes.print("interrupted")
        return EXIT_INTERRUPTED
    except IopError as error:
        print_error(error, as_json="--json" in arguments)
        return error.status.exit_code
    return 0
