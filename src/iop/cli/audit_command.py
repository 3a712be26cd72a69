"""``iop admin audit``: check the audit chain of a store."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from iop.cli.output import data, exit_with, notes, print_json
from iop.core.errors import InvalidRequest

__all__ = ["audit_app"]

audit_app = typer.Typer(help="Check the audit chain of a store.", no_args_is_help=True)


@audit_app.callback()
def _root() -> None:
    pass


@audit_app.command("verify")
def verify(
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="HEX",
            help="A head that was logged (audit_head); finds a tail that was cut off.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="URL",
            help="sqlite:///PATH, or env:NAME of a URL; else the one that runs here.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Follow the chain of audit rows and find one that was removed or altered.

    Keep the heads that the server logs (audit_head) elsewhere: only with one can a cut tail be found.

    Example: iop admin audit verify --head 8574adaa...
    """
    from iop.app.audit import default_store, verify_audit
    from iop.app.home import state_dir
    from iop.config import StoreUrl

    if head is not None and (
        len(head) != 64 or not all(digit in "0123456789abcdef" for digit in head.lower())
    ):
        raise InvalidRequest("--head needs 64 hexadecimal digits, as the server logs them.", reason="HEAD")
    if store is not None and store.startswith("env:"):
        store = os.environ.get(store.removeprefix("env:"), "")
    url = StoreUrl(url=store) if store is not None else default_store(state_dir(os.environ))
    report = asyncio.run(verify_audit(url, head=bytes.fromhex(head) if head is not None else None))
    if as_json:
        print_json(
            {
                "valid": not report.problem,
                "rows": report.rows,
                "head": report.head.hex(),
                "problem": report.problem,
            }
        )
    else:
        data.print(f"{report.rows} rows follow each other unbroken; head {report.head.hex()}")
    if report.problem:
        notes.print(f"error: {report.problem}", style="red")
        exit_with(1)
