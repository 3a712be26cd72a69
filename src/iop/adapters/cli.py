"""Command-line agents as providers (EN-42, EN-43).

Each run is one process tree under a reaper of its own (see :mod:`iop.adapters.cli_reaper`): whatever the
agent starts is gone when the run is. The prompt goes in by standard input, which is closed after it, or as
the last argument; the output comes back as text or lines of JSON. Reading stops while credit is used up, so
that the pipe holds the agent (EN-102).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from iop.adapters.base import (
    AdapterCapabilities,
    AdapterServices,
    AdapterSnapshot,
    Category,
    Health,
    RunStream,
    TunnelStream,
)
from iop.adapters.chat_input import read_body, read_messages, read_parts, read_text
from iop.adapters.cli_output import JsonLinesReader, OutputReader, TextReader
from iop.adapters.cli_workspace import Workspace, Workspaces
from iop.adapters.controlled import Controlled
from iop.adapters.gate_control import GateControl
from iop.adapters.http_tunnel import refuse_tunnel
from iop.core.errors import Conflict, InvalidRequest, IopError, Overloaded, Unavailable
from iop.core.ids import SessionId
from iop.wire.messages import (
    AdapterConfig,
    CancelReason,
    CliSettings,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    StreamErrorCode,
)

_log = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 30.0
IDLE_TIMEOUT_S: Final = 300.0
TOTAL_TIMEOUT_S: Final = 3600.0
"""Used where the config says zero: until the first output, between outputs, altogether."""

OUTPUT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Most output of one run where the config says zero."""

ARGUMENT_BYTES_MAX: Final = 100 * 1024
"""Longest prompt as an argument; the system takes no more than 128 KiB in one."""

KILL_GRACE_S: Final = 0.3
"""How long an agent may take to end politely; nothing of a run may be left a second after its caller
(SF-07)."""

END_TIMEOUT_S: Final = 10.0
"""How long we wait for a killed tree; only a process that the kernel cannot end takes longer."""

READ_BYTES: Final = 64 * 1024

NO_CONTROL: Final = "command-line agents have no control interface"
"""Why nothing but a pause is offered."""

REAPER: Final = Path(__file__).with_name("cli_reaper.py")

PATH_VARIABLE: Final = "PATH"


class _RunFailedError(Exception):
    """Ends a run with an error."""

    def __init__(self, code: StreamErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = StreamError(code=code, message=message)


class CliAdapter(Controlled):
    """One kind of agent.

    Args:
        config: its adapter config.
        services: the Node's environment and change signal.

    Raises:
        InvalidRequest: the config cannot work; names key and fix.
    """

    def __init__(self, config: AdapterConfig, services: AdapterServices) -> None:
        settings = config.settings
        if not isinstance(settings, CliSettings) or not settings.command or not settings.command[0]:
            raise InvalidRequest(f"adapter {config.name!r}: type cli needs a command", reason="NO_COMMAND")
        if settings.prompt not in {"stdin", "argument"} or settings.output not in {"text", "json_lines"}:
            raise InvalidRequest(
                f"adapter {config.name!r}: prompt is stdin or argument, output is text or json_lines",
                reason="BAD_CLI",
            )
        super().__init__(
            config, services, GateControl(services, name="a command-line agent", why_no_more=NO_CONTROL)
        )
        self._settings = settings
        wanted = {PATH_VARIABLE, *settings.environment}
        self._environment = {name: value for name, value in services.environment.items() if name in wanted}
        self._workspaces = Workspaces()
        self._runs: set[_AgentRun] = set()
        self._is_closed = False

    @property
    def in_flight(self) -> int:
        """Runs of which some process may be left."""
        return len(self._runs)

    def cancel_all(self) -> None:
        """End the process trees of all runs; each ends as cancelled."""
        for run in tuple(self._runs):
            run.cancel()

    @property
    def capabilities(self) -> AdapterCapabilities:
        """Runs, with sessions; paused at the gate."""
        return AdapterCapabilities(
            kind=self._config.type,
            category=Category.CLI,
            runs=True,
            sessions=True,
            admin=True,
            admin_refusal=self._refusal,
        )

    def snapshot(self) -> AdapterSnapshot:
        """Whether the program is there."""
        return AdapterSnapshot(health=self._health, reason=self._reason, models=self._config.targets)

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Nothing to open."""
        await self._control.start(tasks)

    async def aclose(self) -> None:
        """Take no more runs and remove the sessions' directories; the Node ends the runs."""
        self._is_closed = True
        await self._workspaces.aclose()

    async def probe(self) -> None:
        """Look for the program."""
        program = self._settings.command[0]
        found = await asyncio.to_thread(shutil.which, program, path=self._environment.get(PATH_VARIABLE))
        if found:
            self._observe(Health.READY, "")
        else:
            self._observe(Health.OFFLINE, "the program is not installed")

    def open_tunnel(self, stream: TunnelStream, on_done: Callable[[], None]) -> None:
        """Not offered: there is no HTTP."""
        refuse_tunnel(
            stream, StreamErrorCode.INVALID_REQUEST, "providers of type cli serve runs, not tunnels"
        )
        on_done()

    async def run(self, stream: RunStream) -> None:
        """One process tree, to the end of its last process."""
        run = _AgentRun(stream)
        if self._is_gated:
            stream.emit(
                _failed(StreamErrorCode.BUSY, "the provider is paused", retryable=True, before_start=True)
            )
            return
        self._runs.add(run)
        try:
            terminal = await self._serve(stream.request, run)
        finally:
            self._runs.discard(run)
        stream.emit(terminal)

    async def _serve(self, request: RunRequest, run: _AgentRun) -> RunEvent:
        """The run's terminal event, when nothing of it is left."""
        try:
            if self._is_closed:
                raise Unavailable("the adapter is closed")
            prompt_of = _prompt(request)
            await self.probe()
            if self._health is Health.OFFLINE:
                # Nothing ran, so another provider may have it (EN-112).
                return _failed(
                    StreamErrorCode.CONNECT_FAILED, self._reason, retryable=True, before_start=True
                )
            workspace = await self._workspaces.take(
                root=request.workspace, run_id=request.run_id, session_id=request.session_id
            )
        except (InvalidRequest, Conflict, Overloaded, Unavailable) as exc:
            return _refusal(exc)
        try:
            prompt = prompt_of(workspace.is_fresh)
            command = self._command(request, prompt, workspace)
            return await run.drive(command, prompt, self._settings, workspace, self._environment)
        except InvalidRequest as exc:
            return _refusal(exc)
        finally:
            await self._workspaces.give_back(workspace)

    async def terminate_session(self, session_id: SessionId) -> None:
        """Remove the session's directory (EN-70)."""
        await self._workspaces.end_session(session_id)

    def _command(self, request: RunRequest, prompt: str, workspace: Workspace) -> list[str]:
        """The command with its places filled. Raises InvalidRequest when the prompt cannot be an argument."""
        values = {
            "{target}": request.target,
            "{workspace}": str(workspace.path),
            "{session_id}": request.session_id,
        }
        is_argument = self._settings.prompt == "argument"
        if is_argument:
            if len(prompt.encode()) > ARGUMENT_BYTES_MAX:
                raise InvalidRequest(
                    f"input: longer than {ARGUMENT_BYTES_MAX} bytes; let the agent take it by stdin",
                    reason="INPUT_TOO_LARGE",
                )
            # A leading dash would be read as an option.
            values["{prompt}"] = f" {prompt}" if prompt.startswith("-") else prompt
        command = [values.get(part, part) for part in self._settings.command]
        if is_argument and "{prompt}" not in self._settings.command:
            command.append(values["{prompt}"])
        if any("\0" in part for part in command):
            raise InvalidRequest("input: must not hold NUL characters", reason="BAD_INPUT")
        return command


class _AgentRun:
    """One process tree and its stream."""

    def __init__(self, stream: RunStream) -> None:
        self._stream = stream
        self._cancelled = asyncio.Event()
        self._writable = asyncio.Event()
        stream.bind(on_cancel=self._on_cancel, on_writable=self._writable.set)

    async def drive(
        self,
        command: Sequence[str],
        prompt: str,
        settings: CliSettings,
        workspace: Workspace,
        environment: dict[str, str],
    ) -> RunEvent:
        """Start, read to the end, end everything. Gives the terminal event."""
        if self._cancelled.is_set():
            return RunEvent(type=RunEventType.CANCELLED)
        by_stdin = settings.prompt == "stdin"
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                str(REAPER),
                str(KILL_GRACE_S),
                *command,
                stdin=asyncio.subprocess.PIPE if by_stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                cwd=workspace.path,
                env=environment,
                start_new_session=True,
            )
        except OSError:
            return _failed(StreamErrorCode.CONNECT_FAILED, "the agent cannot be started", before_start=True)
        self._stream.emit(RunEvent(type=RunEventType.START))
        try:
            async with asyncio.timeout(settings.total_timeout_sec or TOTAL_TIMEOUT_S):
                result = await self._attend(process, prompt if by_stdin else None, settings)
        except TimeoutError:
            result = _failed(StreamErrorCode.TIMEOUT, "the agent's time is up")
        finally:
            await _end(process)
        return RunEvent(type=RunEventType.CANCELLED) if self._cancelled.is_set() else result

    async def _attend(
        self, process: asyncio.subprocess.Process, prompt: str | None, settings: CliSettings
    ) -> RunEvent:
        """Feed and read until the last process has ended."""
        reader: OutputReader = JsonLinesReader() if settings.output == "json_lines" else TextReader()
        failure: StreamError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                leaving = tasks.create_task(self._end_when_cancelled(process), name="agent.cancel")
                if prompt is not None:
                    tasks.create_task(_write_prompt(process, prompt.encode()), name="agent.prompt")
                await self._read(process, reader, settings)
                await _ended_by_itself(process, settings.idle_timeout_sec or IDLE_TIMEOUT_S)
                leaving.cancel()
        except* _RunFailedError as group:
            first = group.exceptions[0]
            assert isinstance(first, _RunFailedError)
            failure = first.error
        if failure is not None:
            return RunEvent(type=RunEventType.ERROR, error=failure)
        return self._ended(process.returncode or 0, reader)

    async def _read(
        self, process: asyncio.subprocess.Process, reader: OutputReader, settings: CliSettings
    ) -> None:
        output = process.stdout
        assert output is not None
        bytes_left = settings.output_bytes_max or OUTPUT_BYTES_MAX
        wait_s: float = settings.start_timeout_sec or START_TIMEOUT_S
        code, words = StreamErrorCode.NO_OUTPUT, "the agent produced no output"
        while True:
            while self._stream.credit_bytes <= 0 and not self._cancelled.is_set():
                self._writable.clear()
                await self._writable.wait()
            try:
                async with asyncio.timeout(wait_s):
                    data = await output.read(READ_BYTES)
            except TimeoutError:
                raise _RunFailedError(code, f"{words} within {wait_s:g} s") from None
            for event in reader.feed(data) if data else reader.finish():
                self._stream.emit(event)
            if not data:
                return
            bytes_left -= len(data)
            if bytes_left < 0:
                raise _RunFailedError(StreamErrorCode.UPSTREAM_ERROR, "the agent's output is too large")
            wait_s = settings.idle_timeout_sec or IDLE_TIMEOUT_S
            code, words = StreamErrorCode.TIMEOUT, "the agent produced no more output"

    async def _end_when_cancelled(self, process: asyncio.subprocess.Process) -> None:
        await self._cancelled.wait()
        _signal(process)

    def cancel(self) -> None:
        """End it; its terminal comes when its last process is gone."""
        self._cancelled.set()
        self._writable.set()

    def _on_cancel(self, reason: CancelReason) -> None:  # noqa: ARG002 - every reason ends it the same way
        self.cancel()

    @staticmethod
    def _ended(code: int, reader: OutputReader) -> RunEvent:
        if reader.error is not None:
            return RunEvent(type=RunEventType.ERROR, error=reader.error)
        if code != 0:
            return _failed(StreamErrorCode.UPSTREAM_ERROR, f"the agent ended with code {code}")
        return RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop",), usage=reader.usage)


async def _ended_by_itself(process: asyncio.subprocess.Process, idle_s: float) -> None:
    """One that closed its output and lives on is as idle as one that writes nothing."""
    try:
        async with asyncio.timeout(idle_s):
            await process.wait()
    except TimeoutError:
        raise _RunFailedError(
            StreamErrorCode.TIMEOUT, f"the agent closed its output and did not end within {idle_s:g} s"
        ) from None


async def _write_prompt(process: asyncio.subprocess.Process, data: bytes) -> None:
    """Give the prompt and close: an agent that asks back finds the end of its input."""
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        # An agent that does not read its input is no error of the run.
        return
    finally:
        process.stdin.close()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the tree and wait until the reaper, and with it every process, is gone."""
    _signal(process)
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            # The loop tells of an exit only after its pipes ended, and a full one is not read by itself.
            while process.stdout is not None and await process.stdout.read(READ_BYTES):
                pass
            await process.wait()
    except TimeoutError:
        _log.error("agent.not_ended pid=%s", process.pid)


def _signal(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.terminate()
        except ProcessLookupError:
            pass


def _prompt(request: RunRequest) -> Callable[[bool], str]:
    """The prompt, by whether the workspace is fresh: a session that goes on gets only what is new.

    Raises InvalidRequest.
    """
    body = read_body(request.input)
    if body is None:
        text = read_text(request.input)
        return lambda _: text
    if "messages" not in body:
        prompt = body["prompt"]
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt: must be text", reason="BAD_INPUT")
        return lambda _: prompt
    turns: list[tuple[str, str]] = []
    for index, message in enumerate(read_messages(body)):
        content, images = read_parts(message.get("content"), f"messages[{index}]")
        if images:
            raise InvalidRequest(
                f"messages[{index}].content: agents take text only", reason="UNSUPPORTED_FIELD"
            )
        turns.append((message["role"], content))
    newest = turns[-1][1]
    whole = newest if len(turns) == 1 else "\n\n".join(f"{role}: {text}" for role, text in turns)
    return lambda is_fresh: whole if is_fresh else newest


def _refusal(error: IopError) -> RunEvent:
    is_busy = isinstance(error, Conflict | Overloaded)
    is_wrong = isinstance(error, InvalidRequest)
    if is_wrong:
        code = StreamErrorCode.INVALID_REQUEST
    else:
        code = StreamErrorCode.BUSY if is_busy else StreamErrorCode.CONNECT_FAILED
    return _failed(code, error.message, retryable=error.retryable, before_start=True)


def _failed(
    code: StreamErrorCode, message: str, *, retryable: bool = False, before_start: bool = False
) -> RunEvent:
    return RunEvent(
        type=RunEventType.ERROR,
        error=StreamError(code=code, message=message, retryable=retryable, before_start=before_start),
    )
