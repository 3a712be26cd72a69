"""The commands that start something: ``up``, ``edge``, ``node``, ``engine``."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeAlias

import typer

from iop.cli.node_command import node_command
from iop.cli.output import data, exit_with, notes
from iop.obs import LogFormat, configure_logging

__all__ = ["ROLES", "register"]

_log = logging.getLogger(__name__)


class _Format(StrEnum):
    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class _Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ReadyFile: TypeAlias = Annotated[
    Path | None, typer.Option("--ready-file", help="Written, as JSON, when all is ready; removed at the end.")
]
Format: TypeAlias = Annotated[
    _Format,
    typer.Option(
        "--log-format", envvar="IOP_LOG_FORMAT", help="How logs look on standard error; auto: by terminal."
    ),
]
Level: TypeAlias = Annotated[
    _Level, typer.Option("--log-level", envvar="IOP_LOG_LEVEL", help="Lowest level that is logged.")
]
Address: TypeAlias = str | None


def _address(flag: str, what: str, variable: str | None = None) -> Any:
    return typer.Option(flag, metavar="HOST:PORT", envvar=variable, help=f"{what}; port 0: any free one.")


def register(app: typer.Typer) -> None:
    """Add the commands to the tree."""
    app.command("up")(up)
    app.command("edge")(edge)
    node_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    node_app.callback()(node)
    node_app.command("command")(node_command)
    app.add_typer(node_app, name="node")
    app.command("engine")(engine)


def up(
    http: Annotated[Address, _address("--http", "OpenAI HTTP of the Edge")] = None,
    openengine: Annotated[Address, _address("--openengine", "OpenEngine of the Edge")] = None,
    admin: Annotated[Address, _address("--admin", "OpenEngineAdmin of the Edge")] = None,
    ops: Annotated[Address, _address("--ops", "metrics, health and status")] = None,
    nodes: Annotated[Address, _address("--nodes", "where Nodes dial in")] = None,
    engine_http: Annotated[
        Address, _address("--engine-http", "OpenAI HTTP of the engine", "IOP_ENGINE_HTTP")
    ] = None,
    engine_openengine: Annotated[
        Address, _address("--engine-openengine", "OpenEngine of the engine", "IOP_ENGINE_OPENENGINE")
    ] = None,
    engine_admin: Annotated[
        Address, _address("--engine-admin", "OpenEngineAdmin of the engine", "IOP_ENGINE_ADMIN")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Rank processes of the engine.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Weights of the engine; else the built-in ones.")
    ] = None,
    ready_file: ReadyFile = None,
) -> None:
    """Start Edge, one Node and the reference engine, and say what to try. Ctrl-C stops everything.

    Nothing needs to be configured. State lives in $IOP_HOME (else ~/.local/state/iop): journals, logs, and run.json
    with addresses, process ids and development tokens, which iop admin and iop status read by themselves.

    Example: iop up --http 127.0.0.1:8081
    """
    from iop.app.part import exit_code_of
    from iop.app.process import run_role
    from iop.app.up import Started, Up, UpOptions
    from iop.core.errors import IopError

    configure_logging(fmt=LogFormat.CONSOLE, level="ERROR", process="up")
    options = UpOptions(
        edge=_given(http=http, openengine=openengine, admin=admin, ops=ops, nodes=nodes),
        engine=_given(http=engine_http, openengine=engine_openengine, admin=engine_admin),
        engine_settings={
            "ranks": ranks,
            "checkpoint": str(checkpoint.absolute()) if checkpoint is not None else None,
        },
    )

    def on_ready(started: Started) -> None:
        for line in _what_to_try(started):
            data.print(line)
        sys.stdout.flush()

    role = Up(
        options,
        environment=os.environ,
        on_step=lambda name: notes.print(f"starting {name} ..."),
        on_stop=lambda: notes.print(
            "stopping: running answers may finish; Ctrl-C again ends them at once ..."
        ),
        on_ready=on_ready,
        on_lost=lambda message: notes.print(
            f"error: {message}\nall other parts have been stopped", style="red"
        ),
    )
    try:
        exit_with(run_role(lambda: role, ready_file=ready_file))
    except IopError as error:
        notes.print(f"error: {error.message}", style="red")
        exit_with(exit_code_of(error))


def edge(
    config: Annotated[Path, typer.Option("--config", help="edge.yaml.")],
    http: Annotated[Address, _address("--http", "OpenAI and Anthropic HTTP")] = None,
    openengine: Annotated[Address, _address("--openengine", "gRPC Inference and Control")] = None,
    admin: Annotated[Address, _address("--admin", "gRPC OpenEngineAdmin")] = None,
    ops: Annotated[Address, _address("--ops", "metrics, health and status")] = None,
    nodes: Annotated[Address, _address("--nodes", "where Nodes dial in")] = None,
    ready_file: ReadyFile = None,
    log_format: Format = _Format.AUTO,
    log_level: Level = _Level.INFO,
) -> None:
    """Run the gateway.

    Example: iop edge --config edge.yaml
    """
    from iop.app.edge import edge_role
    from iop.app.process import run_role

    warn = _logs("edge", log_format, log_level)
    flags = _flags("listen", http=http, openengine=openengine, admin=admin, ops=ops, nodes=nodes)
    exit_with(run_role(lambda: edge_role(config, flags=flags, warn=warn), ready_file=ready_file))


def node(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option("--config", help="node.yaml; the daemon needs it.")] = None,
    ready_file: ReadyFile = None,
    log_format: Format = _Format.AUTO,
    log_level: Level = _Level.INFO,
) -> None:
    """Run the daemon beside engines; it dials its Edge, and dials again whenever the link is lost.

    It ends with 1 when its reconnect budget is used up, and with 0 when it was stopped.

    Example: iop node --config node.yaml
    """
    if context.invoked_subcommand is not None:
        return
    if config is None:
        message = "the daemon needs one, as in: iop node --config node.yaml"
        raise typer.BadParameter(message, ctx=context, param_hint="--config")
    node_daemon(config, ready_file, log_format, log_level)


def node_daemon(
    config: Annotated[Path, typer.Option("--config")],
    ready_file: ReadyFile = None,
    log_format: Format = _Format.AUTO,
    log_level: Level = _Level.INFO,
) -> None:
    """``iop node`` without a command of its own."""
    from iop.app.node import node_role
    from iop.app.process import run_role

    warn = _logs("node", log_format, log_level)
    exit_with(run_role(lambda: node_role(config, warn=warn), ready_file=ready_file))


def engine(
    config: Annotated[
        Path | None, typer.Option("--config", help="engine.yaml; else development tokens are made.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="Rank processes.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Directory of the weights; else the built-in ones.")
    ] = None,
    http: Annotated[Address, _address("--http", "OpenAI HTTP")] = None,
    openengine: Annotated[Address, _address("--openengine", "gRPC Inference and Control")] = None,
    admin: Annotated[Address, _address("--admin", "gRPC OpenEngineAdmin")] = None,
    run_file: Annotated[
        bool, typer.Option("--run-file/--no-run-file", help="Write engine.json into the state directory.")
    ] = True,
    ready_file: ReadyFile = None,
    log_format: Format = _Format.AUTO,
    log_level: Level = _Level.INFO,
) -> None:
    """Run the reference engine: a small real transformer in rank processes.

    Example: iop engine --ranks 2
    """
    from iop.app.engine import engine_role
    from iop.app.process import run_role

    warn = _logs("engine", log_format, log_level)
    flags = _flags("listen", http=http, openengine=openengine, admin=admin)
    if ranks is not None:
        flags["ranks"] = (str(ranks), "--ranks")
    if checkpoint is not None:
        flags["checkpoint"] = (str(checkpoint), "--checkpoint")
    exit_with(
        run_role(
            lambda: engine_role(config, flags=flags, warn=warn, has_run_file=run_file), ready_file=ready_file
        )
    )


ROLES: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {"up": up, "edge": edge, "node": node_daemon, "engine": engine}
)
"""Commands whose process lives for months: it must not carry what reading a command line or an operator needs."""


# --- parts ------------------------------------------------------------------------------------------------------------


def _given(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


def _flags(section: str, **values: str | None) -> dict[str, tuple[str, str]]:
    return {f"{section}.{name}": (value, f"--{name}") for name, value in _given(**values).items()}


def _logs(process: str, fmt: _Format, level: _Level) -> Callable[[str], None]:
    """Set logging up; returns how to warn: in a line that whoever reads the log can read, too."""
    is_json = fmt is _Format.JSON or (fmt is _Format.AUTO and not sys.stderr.isatty())
    configure_logging(
        fmt=LogFormat.JSON if is_json else LogFormat.CONSOLE, level=level.value.upper(), process=process
    )

    def warn(message: str) -> None:
        if is_json:
            _log.warning("config.warned", extra={"reason": message})
        else:
            notes.print(f"warning: {message}", style="yellow")

    return warn


def _what_to_try(started: Any) -> list[str]:
    """What a newcomer sees when everything serves."""
    run, model = started.run, started.model
    url = f"http://{run.addresses['http']}/v1"
    iop = _command()
    prompt = "Tell me a story."
    messages = f'[{{"role": "user", "content": "{prompt}"}}]'
    body = f'{{"model": "{model}", "stream": true, "temperature": 0, "messages": {messages}}}'
    return [
        "",
        f"IOP is ready, {started.elapsed_s:.1f} s after the start. Ctrl-C stops everything.",
        "",
        "Chat, with curl:",
        f"  curl -N {url}/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{body}'",
        "",
        "Chat, with the openai client for Python:",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{url}", api_key="none")',
        f"  messages = {messages}",
        f'  answer = client.chat.completions.create(model="{model}", messages=messages, temperature=0, stream=True)',
        "  for part in answer:",
        '      print(part.choices[0].delta.content or "", end="", flush=True)',
        "",
        "Operate:",
        f"  {iop} status",
        f"  {iop} admin pause --all --mode drain --admission queue",
        f"  {iop} admin resume --epoch EPOCH",
        f"  {iop} admin flush --all --kind prefix",
        f"  {iop} admin profile",
        "",
        *(
            f"Paused since an earlier run: {name}. Requests wait; iop admin profile tells the epoch to resume."
            for name in started.paused
        ),
        f"State, logs and tokens: {started.home}",
    ]


def _command() -> str:
    """How to call this command from anywhere, say another terminal."""
    script = Path(sys.argv[0])
    is_found = script.name != "iop" or shutil.which("iop") == str(script.absolute())
    shown = "iop" if is_found else shlex.quote(str(script.absolute()))
    home = os.environ.get("IOP_HOME")
    return f"IOP_HOME={shlex.quote(home)} {shown}" if home else shown
