"""``iop node command``: ask a Node through its Edge (EN-75). It shares its first word with the daemon, ``iop node``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from iop.cli.ops_options import OpsCall, asks_ops
from iop.cli.output import data, exit_with, notes, print_json, print_rows

__all__ = ["NodeQuestion", "node_command"]


class NodeQuestion(StrEnum):
    """What a Node answers."""

    USAGE = "usage"
    CAPABILITIES = "capabilities"
    SESSIONS = "sessions"
    TRANSPORT = "transport"
    PROVIDERS = "providers"


@asks_ops(role="viewer")
def node_command(
    call: OpsCall,
    node: Annotated[str, typer.Argument(help="The Node's id, as iop status shows it.")],
    question: Annotated[NodeQuestion, typer.Argument(help="What to ask.")],
    adapter: Annotated[str, typer.Option("--adapter", help="Only about this adapter of the Node.")] = "",
) -> None:
    """Ask a Node, through its Edge, about its work, its adapters or its connection.

    Example: iop node command gpu-1 transport
    """
    shown = call.client.command(node, question.value, adapter=adapter)
    if call.as_json:
        print_json(shown)
        exit_with(0 if shown["ok"] else 1)
    if not shown["ok"]:
        notes.print(f"error: {node} could not say: {shown['reason']}", style="red")
        exit_with(1)
    if shown["figures"] or not shown["providers"]:
        print_rows(("figure", "value"), sorted(shown["figures"].items()), empty="no figures")
    if shown["figures"] and shown["providers"]:
        data.print("")
    if shown["providers"]:
        print_rows(("provider", "figure", "value"), _provider_rows(shown["providers"]), empty="")


def _provider_rows(providers: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for provider in providers:
        name = str(provider.get("provider_id") or provider.get("name") or provider.get("id") or "")
        figures = {key: value for key, value in provider.items() if key != "capabilities"}
        figures |= provider.get("capabilities") or {}
        rows += [(name, key, str(value)) for key, value in sorted(figures.items()) if value not in ("", None)]
    return rows
