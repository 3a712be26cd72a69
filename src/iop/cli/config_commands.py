"""``iop config``: validate and explain a config file; show, plan and apply the one of a running Edge."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from iop.app.sources import gather
from iop.cli.ops_options import OpsCall, asks_ops
from iop.cli.output import data, notes, print_json, print_rows
from iop.config import (
    EffectiveValue,
    Loaded,
    Sources,
    effective_values,
    load_edge,
    load_engine,
    load_node,
)
from iop.core.errors import Unavailable

__all__ = ["config_app"]

config_app = typer.Typer(
    help="Validate and explain a config; show, plan and apply it at a running Edge.", no_args_is_help=True
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
    Environment variables such as IOP_LISTEN__HTTP count as they would for the process. A value that somebody
    reconfigured stands over the file's until the file changes that key; it is looked up in the store that FILE names.

    Example: iop config check edge.yaml
    """
    sources = gather(file)
    chosen = kind or _guess(file, sources.text)
    loaded = _LOADERS[chosen](sources)
    rows = effective_values(loaded)
    overrides: list[dict[str, Any]] = []
    if chosen is not ConfigKind.NODE:
        rows, overrides = _with_stored_overrides(loaded, rows)
    if as_json:
        print_json(
            {
                "valid": True,
                "kind": chosen.value,
                "warnings": list(loaded.warnings),
                "values": [{"key": row.key, "value": row.value, "origin": row.origin} for row in rows],
                "overrides": overrides,
            }
        )
        return
    print_rows(("key", "value", "from"), ((row.key, row.value, row.origin) for row in rows), empty="no keys")
    _print_overrides(overrides)
    for warning in loaded.warnings:
        notes.print(f"warning: {warning}", style="yellow")
    data.print(f"\n{file}: valid {chosen.value} config")


def _with_stored_overrides(
    loaded: Loaded[Any], rows: list[EffectiveValue]
) -> tuple[list[EffectiveValue], list[dict[str, Any]]]:
    """The rows and what was reconfigured over them, by the store that the config names."""
    from iop.app.home import state_dir
    from iop.app.overrides import shown_overrides, stored_overrides, with_overrides

    try:
        records = asyncio.run(
            stored_overrides(
                loaded.config.store, is_given="store" in loaded.origins, home=state_dir(os.environ)
            )
        )
    except Unavailable as error:
        notes.print(
            f"warning: whether values were reconfigured over the file's is not known: {error.message}",
            style="yellow",
        )
        return rows, []
    shown = shown_overrides(records, loaded.config)
    return with_overrides(rows, shown), [one.to_json() for one in shown]


@config_app.command("show")
@asks_ops(role="admin")
def show(call: OpsCall) -> None:
    """Show the config that the Edge runs: each value and where it came from, a reconfiguration included.

    Example: iop config show
    """
    shown = call.client.show_config()
    if call.as_json:
        print_json(shown)
        return
    rows = ((row["key"], row["value"], row["origin"]) for row in shown["values"])
    print_rows(("key", "value", "from"), rows, empty="no keys")
    _print_overrides(shown["overrides"])
    data.print(f"\nrunning as revision {shown['revision']}")


@config_app.command("plan")
@asks_ops(role="admin")
def plan(
    call: OpsCall,
    file: Annotated[Path, typer.Argument(help="The edge.yaml that would be applied.")],
) -> None:
    """Show what FILE would change at the running Edge, and change nothing.

    References and relative paths in FILE are the Edge's own, as in its own file.

    Example: iop config plan edge.yaml
    """
    shown = call.client.plan_config(gather(file).text, name=str(file))
    if call.as_json:
        print_json(shown)
    else:
        _print_changes(shown)


@config_app.command("apply")
@asks_ops(role="admin")
def apply(
    call: OpsCall,
    file: Annotated[Path, typer.Argument(help="The edge.yaml to apply.")],
) -> None:
    """Make FILE the running Edge's config, whole; a wrong one is refused whole and the running one stays.

    The Edge keeps it in its own file too, and sends each connected Node what concerns it.

    Example: iop config apply edge.yaml
    """
    shown = call.client.apply_config(gather(file).text, name=str(file))
    shown["nodes"] = _refreshed(call.client, shown["revision"])
    if call.as_json:
        print_json(shown)
        return
    _print_changes(shown)
    data.print(f"running as revision {shown['revision']}")
    for node in shown["nodes"]:
        why = f": {node['reason']}" if node["reason"] else ""
        data.print(f"  node {node['id']}: {node['step']}, config revision {node['config_revision']}{why}")
    if shown["not_persisted"]:
        notes.print(f"warning: the Edge's own file was not changed: {shown['not_persisted']}", style="yellow")


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
    _print_overrides(shown["overrides"])
    for key in shown["needs_restart"]:
        notes.print(f"needs a restart: {key}", style="yellow")
    for warning in shown["warnings"]:
        notes.print(f"warning: {warning}", style="yellow")


def _print_overrides(overrides: list[dict[str, Any]]) -> None:
    """What was reconfigured over the config, and whether it holds over this one."""
    if not overrides:
        return
    data.print("\nreconfigured over the file:")
    for one in overrides:
        over = f" over {one['file_value']}" if one["file_value"] else ""
        holds = f"{one['value']} holds{over}" if one["holds"] else f"{one['value']} ends"
        note = f" ({one['note']})" if one["note"] else ""
        data.print(f"  {one['key']}: {holds}{note}, set by {one['operation_id']}")


def _guess(file: Path, text: str) -> ConfigKind:
    """By the keys that only one kind has, then by name; an Edge's is the fallback."""
    top = {line.partition(":")[0] for line in text.splitlines() if line and line[0].isalpha()}
    if top & {"edge", "node", "reconnect", "token"}:
        return ConfigKind.NODE
    if top & {"ranks", "checkpoint", "slots", "model_id"} or file.stem.startswith("engine"):
        return ConfigKind.ENGINE
    return ConfigKind.NODE if file.stem.startswith("node") else ConfigKind.EDGE
