"""Write docs/reference/settings.md from the settings trees; ``--check`` only compares.

Run it by ``make docs`` or by hand after a change of ``iop.config.tree``; a test holds the page equal to the trees.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from iop.config.tree import EdgeConfig, EngineConfig, NodeConfig
from iop.config.values import Address, Secret, SecretHash, StoreUrl

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "settings.md"

INTRO = """# Settings

Made from the settings trees in `iop.config.tree` by `tools/gen_settings.py`; do not edit. How files, environment and
flags are layered stands in [configuration](contract/configuration.md). `[]` in a key stands for each item of a list;
"required" means: once its section is written.
"""

LEAVES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    Address: "address",
    Secret: "secret reference",
    SecretHash: "secret reference or hash",
    StoreUrl: "store URL",
}


def members(wanted: Any) -> list[Any]:
    """The alternatives of a type, None left out."""
    if typing.get_origin(wanted) in {typing.Union, types.UnionType}:
        return [member for member in typing.get_args(wanted) if member is not type(None)]
    return [wanted]


def rows(tree: type[Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Key, kind, default and meaning of every leaf."""
    hints = typing.get_type_hints(tree)
    for item in dataclasses.fields(tree):
        for member in members(hints[item.name]):
            key = f"{prefix}{item.name}"
            origin, arguments = typing.get_origin(member), typing.get_args(member)
            if origin is tuple:
                key, member = f"{key}[]", arguments[0]  # noqa: PLW2901
            elif origin is not None and origin is not Literal:
                key, member = f"{key}.NAME", arguments[1]  # noqa: PLW2901
            if member in LEAVES or typing.get_origin(member) is Literal:
                yield key, kind(member, item), default(item), str(item.metadata["doc"])
            else:
                yield from rows(member, f"{key}.")


def kind(member: Any, item: dataclasses.Field[Any]) -> str:
    """What may be written, bounds included."""
    if typing.get_origin(member) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(member))
    if member in {int, float}:
        low, high = item.metadata.get("min", 0), item.metadata.get("max", 2**53)
        return (
            f"{LEAVES[member]}, {low:g} to {high:g}"
            if member is float
            else f"{LEAVES[member]}, {low} to {high}"
        )
    return LEAVES[member]


def default(item: dataclasses.Field[Any]) -> str:
    """The default as a file would have it."""
    value = item.default
    if value is dataclasses.MISSING:
        return "" if item.default_factory is not dataclasses.MISSING else "**required**"
    if value is None or value == () or (dataclasses.is_dataclass(value) and type(value) not in LEAVES):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, StoreUrl):
        return f"`{value}`, in the state directory"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, tree in (("edge.yaml", EdgeConfig), ("node.yaml", NodeConfig), ("engine.yaml", EngineConfig)):
        parts.append(f"\n## {title}\n\n| key | value | default | meaning |\n| --- | --- | --- | --- |\n")
        parts += [f"| `{key}` | {what} | {value} | {doc} |\n" for key, what, value, doc in rows(tree, "")]
    return "".join(parts)


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print("docs/reference/settings.md is stale: run tools/gen_settings.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
