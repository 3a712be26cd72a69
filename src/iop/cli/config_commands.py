"""``iop config``: validate a config and explain it, without starting anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from iop.app.sources import gather
from iop.cli.output import data, notes, print_json, print_rows
from iop.config import Loaded, Sources, effective_values, load_edge, load_engine, load_node

__all__ = ["config_app"]

config_app = typer.Typer(
    help="Validate a config and explain it, without starting anything.", no_args_is_help=True
)


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


def _guess(file: Path, text: str) -> ConfigKind:
    """By the keys that only one kind has, then by name; an Edge's is the fallback."""
    top = {line.partition(":")[0] for line in text.splitlines() if line and line[0].isalpha()}
    if top & {"edge", "node", "reconnect", "token"}:
        return ConfigKind.NODE
    if top & {"ranks", "checkpoint", "slots", "model_id"} or file.stem.startswith("engine"):
        return ConfigKind.ENGINE
    return ConfigKind.NODE if file.stem.startswith("node") else ConfigKind.EDGE
