"""``iop config``: validate and explain a config file; plan and apply it at a running Edge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from iop.app.sources import gather
from iop.cli.output import data, notes, print_json, print_rows
from iop.cli.targets import find_endpoint
from iop.config import Loaded, Sources, effective_values, load_edge, load_engine, load_node

__all__ = ["config_app"]

config_app = typer.Typer(
    help="Validate and explain a config; plan and apply it at a running Edge.", no_args_is_help=True
)

REFRESH_LOOKS: Final = 20
REFRESH_LOOK_S: Final = 0.1
"""Nodes answer a refresh in milliseconds; one that takes two seconds is shown as it stands."""


class ConfigKind(StrEnum):
    """Which process a file is for."""

    EDGE = "edge"
    NODE = "node"
    ENGINE = "engine"


_LOADERS: Final[Mapping[ConfigKind, Callable[[Sources], Loaded[Any]]]] = {
    ConfigKind.EDGE: load_edge,
    ConfigKind.NODE: load_node,
    ConfigKind.ENGINE: load_engine,
}


@config_app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="edge.yaml, node.yaml or engine.yaml.")],
    kind: Annotated[
        ConfigKind | None, typer.Option(help="Which config it is; without this its content and name tell.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether FILE is valid, and for each value what it is and where it came from.

    All problems are listed at once, each with its line, key and fix. Secrets print as ***.
    Environment variables such as IOP_LISTEN__HTTP count as they would for the process.

    Example: iop config check edge.yaml
    """
    sources = gather(file)
    chosen = kind or _guess(file, sources.text)
    loaded = _LOADERS[chosen](sources)
    rows = effective_values(loaded)
    if as_json:
        print_json(
            {
                "valid": True,
                "kind": chosen.value,
                "warnings": list(loaded.warnings),
                "values": [{"key": row.key, "value": row.value, "origin": row.origin} for row in rows],
            }
        )
        return
    print_rows(("key", "value", "from"), ((row.key, row.value, row.origin) for row in rows), empty="no keys")
    for warning in loaded.warnings:
        notes.print(f"warning: {warning}", style="yellow")
    data.print(f"\n{file}: valid {chosen.value} config")


Target = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="HOST:PORT", help="The Edge's ops listener; else the one that runs here."
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token", metavar="REF", help="file:PATH, env:NAME, none, or admin for the development token."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@config_app.command("plan")
def plan(
    file: Annotated[Path, typer.Argument(help="The edge.yaml that would be applied.")],
    as_json: Json = False,
    target: Target = None,
    token: Token = None,
) -> None:
    """Show what FILE would change at the running Edge, and change nothing.

    References and relative paths in FILE are the Edge's own, as in its own file.

    Example: iop config plan edge.yaml
    """
    shown = _ops(target, token).plan_config(gather(file).text)
    if as_json:
        print_json(shown)
    else:
        _print_changes(shown)


@config_app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(help="The edge.yaml to apply.")],
    as_json: Json = False,
    target: Target = None,
    token: Token = None,
) -> None:
    """Make FILE the running Edge's config, whole; a wrong one is refused whole and the running one stays.

    The Edge keeps it in its own file too, and sends each connected Node what concerns it.

    Example: iop config apply edge.yaml
    """
    client = _ops(target, token)
    shown = client.apply_config(gather(file).text)
    shown["nodes"] = _refreshed(client, shown["revision"])
    if as_json:
        print_json(shown)
        return
    _print_changes(shown)
    data.print(f"running as revision {shown['revision']}")
    for node in shown["nodes"]:
        why = f": {node['reason']}" if node["reason"] else ""
        data.print(f"  node {node['id']}: {node['step']}, config revision {node['config_revision']}{why}")
    if shown["not_persisted"]:
        notes.print(f"warning: the Edge's own file was not changed: {shown['not_persisted']}", style="yellow")


def _ops(target: str | None, token: str | None) -> Any:
    from iop.client.ops import OpsClient, OpsTarget

    endpoint = find_endpoint("ops", target=target, token=token, role="admin")
    return OpsClient(OpsTarget(address=endpoint.address, token=endpoint.token))


def _refreshed(client: Any, revision: int) -> list[dict[str, Any]]:
    """How each Node stands, after it had a moment to take what concerns it."""
    for _ in range(REFRESH_LOOKS):
        nodes = client.status()["nodes"]
        if all(not node["connected"] or node["config_revision"] == revision for node in nodes):
            break
        time.sleep(REFRESH_LOOK_S)
    return [
        {key: node.get(key) for key in ("id", "connected", "step", "config_revision", "reason")}
        for node in nodes
    ]


def _print_changes(shown: dict[str, Any]) -> None:
    if not shown["changes"]:
        data.print("nothing would change" if "nodes" not in shown else "nothing has changed")
    for change in shown["changes"]:
        before, after = change["before"], change["after"]
        if before is None:
            data.print(f"+ {change['key']}: {after}")
        elif after is None:
            data.print(f"- {change['key']}: {before}")
        else:
            data.print(f"~ {change['key']}: {before} -> {after}")
    for key in shown["needs_restart"]:
        notes.print(f"needs a restart: {key}", style="yellow")
    for warning in shown["warnings"]:
        notes.print(f"warning: {warning}", style="yellow")


def _guess(file: Path, text: str) -> ConfigKind:
    """By the keys that only one kind has, then by name; an Edge's is the fallback."""
    top = {line.partition(":")[0] for line in text.splitlines() if line and line[0].isalpha()}
    if top & {"edge", "node", "reconnect", "token"}:
        return ConfigKind.NODE
    if top & {"ranks", "checkpoint", "slots", "model_id"} or file.stem.startswith("engine"):
        return ConfigKind.ENGINE
    return ConfigKind.NODE if file.stem.startswith("node") else ConfigKind.EDGE
