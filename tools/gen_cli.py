"""Write docs/reference/cli.md and docs/reference/errors.md from the code; ``--check`` only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from iop.cli.main import build_app
from iop.core.errors import STATUS_BY_CODE, IopError

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"

CLI_INTRO = """# Command line

Made from the commands themselves by `tools/gen_cli.py`; do not edit. Data goes to standard output, all else to standard
error. Exit codes: 0 done, 1 failed or not reachable, 2 usage or config, 3 refused, 4 operation failed, 5 operation
cancelled.
"""
ERRORS_INTRO = """# Error families

Made from `iop.core.errors` by `tools/gen_cli.py`; do not edit. Each error has a family, a stable reason where one is
more precise than the family, a message for people, and details for programs. Surfaces show the family like this:

| family | gRPC | HTTP | OpenEngine | exit code | retry may help | meaning |
| --- | --- | --- | --- | --- | --- | --- |
"""


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command below ``command`` that does something itself."""
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
        return
    if command.invoke_without_command:
        yield path, command
    for name in children:
        yield from commands(children[name], f"{path} {name}")


def cell(text: object) -> str:
    """Text that keeps to its table cell."""
    return str(text or "").replace("|", "\\|").replace("\n", " ").strip()


def cli_page() -> str:
    """One section per command."""
    parts = [CLI_INTRO]
    for path, command in commands(typer.main.get_command(build_app(())), "iop"):
        parts.append(
            f"\n## {path}\n\n{(command.help or '').strip()}\n\n| option | meaning |\n| --- | --- |\n"
        )
        for parameter in command.params:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            shown = names if parameter.param_type_name == "option" else f"`{parameter.name.upper()}`"
            required = " Required." if parameter.required else ""
            parts.append(f"| {shown} | {cell(getattr(parameter, 'help', ''))}{required} |\n")
        parts.append("| `--help` | Show the help and exit. |\n")
    return "".join(parts)


def errors_page() -> str:
    """One row per error family."""
    rows = []
    for family in IopError.__subclasses__():
        status = STATUS_BY_CODE[family.code]
        meaning = (family.__doc__ or "").splitlines()[0]
        retry = "yes" if family.retryable_by_default else "no"
        rows.append(
            f"| {family.code.value} | {status.grpc} | {status.http} | {status.engine} | {status.exit_code} "
            f"| {retry} | {cell(meaning)} |\n"
        )
    return ERRORS_INTRO + "".join(dict.fromkeys(sorted(rows)))


def main() -> int:
    """Write the pages, or compare them."""
    stale = False
    for name, text in (("cli.md", cli_page()), ("errors.md", errors_page())):
        page = REFERENCE / name
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            print(f"docs/reference/{name} is stale: run tools/gen_cli.py", file=sys.stderr)
            stale = True
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
