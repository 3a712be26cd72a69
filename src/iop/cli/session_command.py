"""``iop session end``: end what a command-line agent keeps for one session (EN-70)."""

from __future__ import annotations

from typing import Annotated

import typer

from iop.cli.output import data, print_json
from iop.cli.targets import find_endpoint

__all__ = ["session_app"]

session_app = typer.Typer(help="Sessions of command-line agents.", no_args_is_help=True)


@session_app.callback()
def sessions() -> None:
    """Sessions of command-line agents."""


@session_app.command("end")
def end(
    session: Annotated[str, typer.Argument(help="Its id, as iop node command NODE sessions shows it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="HOST:PORT", help="The Edge's ops listener; else the one that runs here."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option("--token", metavar="REF", help="file:PATH, env:NAME, none, or viewer|operator|admin."),
    ] = None,
) -> None:
    """End a session: its runs are cancelled, its state is removed. Needs the permission abort.

    Example: iop session end build-bot:ticket-7
    """
    from iop.client.ops import OpsClient, OpsTarget

    endpoint = find_endpoint("ops", target=target, token=token, role="admin")
    told = OpsClient(OpsTarget(address=endpoint.address, token=endpoint.token)).terminate_session(session)
    if as_json:
        print_json(told)
        return
    nodes = ", ".join(told["nodes"]) or "no Node: none is ready"
    data.print(f"told {nodes}")
