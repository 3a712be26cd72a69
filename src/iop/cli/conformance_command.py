"""``iop conformance``: judge any OpenEngineAdmin server by the contract, as a black box (AD-102)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from iop.cli.admin_options import read_pem
from iop.cli.output import data, exit_with, print_rows
from iop.cli.targets import find_endpoint
from iop.core.errors import InvalidRequest

if TYPE_CHECKING:
    from iop.conformance.hooks import CommandHooks
    from iop.conformance.model import Check, Report

__all__ = ["register"]

_ROLES: Final = ("admin", "operator", "viewer")
_SERVER: Final = "Server"
_LENT: Final = "What the wire cannot provoke (without it, rows read NOT RUN)"
_OUTPUT: Final = "Output"


def register(app: typer.Typer) -> None:
    """Add the command to the tree."""
    app.command("conformance")(conformance)


def _token(role: str, flag: str) -> Any:
    return typer.Option(
        flag,
        metavar="REF",
        help=f"Credential of {'an' if role[0] in 'ao' else 'a'} {role}: file:PATH, env:NAME, or a development role.",
        rich_help_panel=_SERVER,
    )


def _lent(flag: str, help_text: str, metavar: str | None = None) -> Any:
    return typer.Option(flag, metavar=metavar, help=help_text, rich_help_panel=_LENT)


def conformance(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="HOST:PORT",
            help="OpenEngineAdmin; else what runs here.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    token: Annotated[str | None, _token("admin", "--token")] = None,
    operator_token: Annotated[str | None, _token("operator", "--operator-token")] = None,
    viewer_token: Annotated[str | None, _token("viewer", "--viewer-token")] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca", help="Authorities of the server, PEM; turns TLS on.", rich_help_panel=_SERVER
        ),
    ] = None,
    inference: Annotated[
        str | None, _lent("--inference", "openengine.v1.Inference of the same server.", "HOST:PORT")
    ] = None,
    http: Annotated[
        str | None, _lent("--http", "Its OpenAI HTTP; requests go there rather than to --inference.", "URL")
    ] = None,
    inference_token: Annotated[
        str | None, _lent("--inference-token", "API key for them: file:PATH or env:NAME.", "REF")
    ] = None,
    checkpoint_a: Annotated[
        Path | None, _lent("--checkpoint-a", "Weights that the model serves now, as the server sees them.")
    ] = None,
    checkpoint_b: Annotated[Path | None, _lent("--checkpoint-b", "Other weights of the same model.")] = None,
    capacity: Annotated[
        int | None, _lent("--capacity", "What the capacity of the participants is now.")
    ] = None,
    hook: Annotated[
        list[str] | None,
        _lent("--hook", "restart, fail-rank, cut or hold, and the shell command that does it.", "NAME=CMD"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="ID", help="Only this check, or all of this clause.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write JUnit XML.", rich_help_panel=_OUTPUT)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON.", rich_help_panel=_OUTPUT)
    ] = None,
    list_checks: Annotated[
        bool,
        typer.Option(
            "--list", help="Print the checks and what each means; call nobody.", rich_help_panel=_OUTPUT
        ),
    ] = False,
) -> None:
    """Judge a server by the OpenEngineAdmin contract, over the wire alone.

    It pauses, resumes, flushes and updates for real, and leaves the server as it found it: use one without traffic.
    Exit codes: 0 full pass, 1 a check failed or the server is not reachable, 6 nothing failed but some were not run.

    Example: iop conformance --target 127.0.0.1:9091 --token admin --viewer-token viewer
    """
    from rich.console import Console

    from iop.conformance.checks import all_checks
    from iop.conformance.report import COLUMNS, as_json, as_junit, cells, print_table, row_of, summary

    checks = _chosen(all_checks(), only or ())
    if list_checks:
        for one in checks:
            data.print(f"{one.check_id:<36} {one.meaning}")
        return
    progress = Console(stderr=True, soft_wrap=True, highlight=False)
    tokens = _tokens(target, {"admin": token, "operator": operator_token, "viewer": viewer_token})
    report = asyncio.run(
        _run(
            checks,
            target=find_endpoint("admin", target=target, token=token, role="admin").address,
            tokens=tokens,
            inference=inference,
            http=http,
            inference_token=_secret(inference_token),
            checkpoints=_checkpoints(checkpoint_a, checkpoint_b),
            capacity=capacity,
            authorities=read_pem(tls_ca, "--tls-ca"),
            hooks=_hooks(hook or ()),
            on_result=lambda result: progress.print(row_of(result)),
        )
    )
    if sys.stdout.isatty():
        print_table(report, Console(highlight=False))
    else:
        print_rows(COLUMNS, cells(report), empty="no checks")
        data.print(summary(report))
    if junit is not None:
        _write(junit, as_junit(report))
    if json_file is not None:
        _write(json_file, json.dumps(as_json(report), indent=2).encode() + b"\n")
    exit_with(report.exit_code)


async def _run(
    checks: Sequence[Check],
    *,
    target: str,
    authorities: bytes | None,
    hooks: CommandHooks,
    on_result: Any,
    **lent: Any,
) -> Report:
    import grpc

    from iop.conformance.bench import Bench, Target
    from iop.conformance.runner import run_suite

    credentials = grpc.ssl_channel_credentials(root_certificates=authorities) if authorities else None
    bench = Bench(Target(address=target, credentials=credentials, **lent), hooks)
    return await run_suite(bench, checks, on_result=on_result)


def _chosen(checks: Sequence[Check], only: Sequence[str]) -> list[Check]:
    """The checks that are asked for.

    Raises:
        InvalidRequest: an id that nothing has.
    """
    unknown = [name for name in only if not any(_is(one, name) for one in checks)]
    if unknown:
        raise InvalidRequest(
            f"There is no check and no clause {', '.join(unknown)}: iop conformance --list shows them.",
            reason="UNKNOWN_CHECK",
        )
    return [one for one in checks if not only or any(_is(one, name) for name in only)]


def _is(one: Check, name: str) -> bool:
    return name in {one.check_id, *one.clauses}


def _tokens(target: str | None, references: Mapping[str, str | None]) -> dict[str, str]:
    """Secrets by role; a role without reference uses the development token where the target is what runs here."""
    found = {}
    for role in _ROLES:
        secret = find_endpoint("admin", target=target, token=references[role], role=role).token
        if secret is not None:
            found[role] = secret
    return found


def _secret(reference: str | None) -> str | None:
    if reference is None:
        return None
    return find_endpoint("admin", target=None, token=reference, role="admin").token


def _checkpoints(first: Path | None, second: Path | None) -> tuple[str, str] | None:
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise InvalidRequest("--checkpoint-a and --checkpoint-b go together.", reason="CHECKPOINTS")
    return str(first.absolute()), str(second.absolute())


def _hooks(given: Sequence[str]) -> CommandHooks:
    """Commands by name.

    Raises:
        InvalidRequest: not NAME=CMD, or no such hook.
    """
    from iop.conformance.hooks import CommandHooks, HookName

    commands = {}
    for text in given:
        name, separator, command = text.partition("=")
        if not separator or not command or name not in set(HookName):
            raise InvalidRequest(
                f"--hook is NAME=CMD, with one of the names {', '.join(HookName)}.", reason="UNKNOWN_HOOK"
            )
        commands[HookName(name)] = command
    return CommandHooks(commands)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}.", reason="NO_FILE") from None
