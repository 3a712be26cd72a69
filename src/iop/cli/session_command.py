"""``iop session end``: end what a command-line agent keeps for one session (EN-70)."""

from __future__ import annotations

from typing import Annotated

import typer

from iop.cli.ops_options import OpsCa, OpsCertificate, OpsKey, OpsTarget, OpsToken, ops_client
from iop.cli.output import data, print_json

__all__ = ["session_app"]

session_app = typer.Typer(help="Sessions of command-line agents.", no_args_is_help=True)


@session_app.callback()
def sessions() -> None:
    """Sessions of command-line agents."""


@session_app.command("end")
def end(
    session: Annotated[str, typer.Argument(help="Its id, as iop node command NODE sessions shows it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    target: OpsTarget = None,
    token: OpsToken = None,
    tls_ca: OpsCa = None,
    tls_cert: OpsCertificate = None,
    tls_key: OpsKey = None,
) -> None:
    """End a session: its runs are cancelled, its state is removed. Needs the permission abort.

    Example: iop session end build-bot:ticket-7
    """
    told = ops_client(
        target, token, role="admin", ca=tls_ca, certificate=tls_cert, key=tls_key
    ).terminate_session(session)
    if as_json:
        print_json(told)
        return
    nodes = ", ".join(told["nodes"]) or "no Node: none is ready"
    data.print(f"told {nodes}")
