"""``iop adapters``: which kinds of engines a Node of this build can serve, and what it can do with each."""

from __future__ import annotations

from typing import Annotated

import typer

from iop.cli.output import print_json, print_rows

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the tree."""
    app.command("adapters")(adapters)


def adapters(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """The adapter types that a Node of this build offers, for `type` in edge.yaml, and what each supports.

    Example: iop adapters
    """
    from iop.adapters.catalog import kinds, operation_name, rows
    from iop.app.edge_snapshot import describe_types

    if as_json:
        offered = {kind.type: kind for kind in kinds()}
        print_json(
            {
                "adapters": [
                    {
                        **entry,
                        "admin_note": offered[entry["type"]].note,
                        "admin": [
                            {
                                "operation": operation_name(offer.operation),
                                "detail": offer.detail,
                                "needs": offer.needs,
                            }
                            for offer in offered[entry["type"]].offers
                        ],
                    }
                    for entry in describe_types()
                ]
            }
        )
        return
    print_rows(("type", "work", "admin operation", "what", "needs"), rows(), empty="none")
