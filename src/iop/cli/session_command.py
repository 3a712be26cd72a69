"""``iop session end``: end what a command-line agent keeps for one session (EN-70)."""

from __future__ import annotations

from typing import Annotated

import typer

from iop.cli.ops_options import OpsCall, asks_ops
from iop.cli.output import data, print_json

__all__ = ["session_app"]

session_app = typer.Typer(help="Sessions of command-line agents.", no_args_is_help=True)


@session_app.callback()
def sessions() -> None:
    """Sessions of command-line agents."""


@session_app.command("end")
@asks_ops(role="admin")
def end(
    call: OpsCall,
    session: Annotated[str, typer.Argument(help="Its id, as iop node command NODE sessions shows it.")],
) -> None:
    """End a session: its runs are cancelled, its state is removed. Needs the permission abort.

    Example: iop session end build-bot:ticket-7
    """
    told = call.client.terminate_session(session)
    if call.as_json:
        print_json(told)
        return
    nodes = ", ".join(told["nodes"]) or "no Node: none is ready"
    data.print(f"told {nodes}")
