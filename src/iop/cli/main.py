"""The ``iop`` command: its tree, and how errors become exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from iop import __version__
from iop.cli import process_commands
from iop.cli.output import notes, print_error
from iop.cli.plain_arguments import plain_arguments
from iop.core.errors import IopError

__all__ = ["build_app", "main"]

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command tree; for a role only the part that starts roles, which saves its process a third of its memory."""
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
    app.callback()(_root)
    process_commands.register(app)
    if not arguments or arguments[0] not in process_commands.ROLES:
        importlib.import_module("iop.cli.operator_commands").register(app)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"iop {__version__}\n")
        raise typer.Exit


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
        role = process_commands.ROLES.get(arguments[0]) if arguments else None
        options = plain_arguments(role, arguments[1:], os.environ) if role is not None else None
        if role is not None and options is not None:
            role(**options)
        else:
            build_app(arguments)(arguments, prog_name="iop")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        notes.print("interrupted")
        return EXIT_INTERRUPTED
    except IopError as error:
        print_error(error, as_json="--json" in arguments)
        return error.status.exit_code
    return 0
