"""Command-line agents: prompts in, events out, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from iop.adapters.base import Adapter, AdapterServices, Health
from iop.adapters.cli_output import JsonLinesReader, TextReader
from iop.adapters.registry import create_adapter
from iop.core.errors import InvalidRequest
from iop.core.ids import RunId, SessionId
from iop.testing import adapter_suite
from iop.testing.adapter_suite import RunRecorder, SystemTestClock
from iop.testing.waiting import PATIENCE_S, SOON_S, eventually
from iop.wire.messages import AdapterConfig, CliSettings, RunEventType, RunRequest

LINUX = sys.platform == "linux"

AGENT = """
import json, os, signal, subprocess, sys, time
mode = sys.argv[1]
if mode == "echo":
    sys.stdout.write(sys.stdin.read())
elif mode == "args":
    mode = oct(os.stat(".").st_mode & 0o777)
    print(json.dumps({"args": sys.argv[2:], "cwd": os.getcwd(), "env": dict(os.environ), "mode": mode}))
elif mode == "silent":
    time.sleep(600)
elif mode == "asks":
    sys.stdin.read()
    sys.exit(0 if sys.stdin.read() == "" else 1)
elif mode == "fails":
    print("partial"); sys.exit(3)
elif mode == "pauses":
    print("one", flush=True); time.sleep(600)
elif mode == "hangs":
    print("all", flush=True); os.close(1); os.close(2); time.sleep(600)
elif mode == "floods":
    while True:
        sys.stdout.write("x" * 4096)
elif mode == "file":
    text = sys.stdin.read()
    old = open("notes").read() if os.path.exists("notes") else ""
    open("notes", "w").write(old + text)
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(open("notes").read(), end="")
elif mode == "lines":
    for line in sys.stdin.read().split("|"):
        print(line, flush=True)
elif mode == "counts":
    for number in range(int(sys.stdin.read())):
        print(json.dumps({"type": "text", "text": f"word {number} "}), flush=True)
        while os.path.exists(sys.argv[2]):
            time.sleep(0.01)
    print(json.dumps({"type": "result", "usage": {"input_tokens": 1, "output_tokens": number + 1}}))
elif mode == "hydra":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tag = sys.argv[2]
    command = [sys.executable, "-S", sys.argv[0].replace("agent", "child"), tag]
    for _ in range(2):
        subprocess.Popen(command, start_new_session=True)
    print(json.dumps({"type": "text", "text": "started"}), flush=True)
    while True:
        try:
            print(json.dumps({"type": "text", "text": "x"}), flush=True)
        except OSError:
            pass
"""


CHILD = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.environ.clear()
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    (tmp_path / "child.py").write_text(CHILD)
    return path


@dataclass
class Rig:
    adapter: Adapter
    root: Path

    async def run(self, request: RunRequest, *, window_bytes: int = 256 * 1024) -> RunRecorder:
        run = RunRecorder(request, window_bytes=window_bytes)
        async with asyncio.timeout(PATIENCE_S * 3):
            await self.adapter.run(run)
        assert run.terminal is not None
        return run

    def request(
        self, text: str = "", *, run_id: str = "run-1", session_id: str = "", workspace: bool = True
    ) -> RunRequest:
        return RunRequest(
            run_id=RunId(run_id),
            adapter="main",
            target="model-x",
            input=text.encode(),
            session_id=session_id,
            workspace=str(self.root) if workspace else "",
        )

    def left(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []


@contextlib.asynccontextmanager
async def rig_for(agent: Path, *arguments: str, **settings: Any) -> AsyncIterator[Rig]:
    command = (sys.executable, "-S", str(agent), *arguments)
    values: dict[str, Any] = {"start_timeout_sec": 60, "command": command, **settings}
    config = AdapterConfig(
        name="main",
        type="cli",
        targets=("model-x",),
        settings=CliSettings(**values),
    )
    services = AdapterServices(
        clock=SystemTestClock(),
        environment={"PATH": os.environ["PATH"], "KEPT": "1", "SECRET": "no", "HOME": "/nowhere"},
    )
    adapter = create_adapter(config, services)
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            yield Rig(adapter, agent.parent / "work")
        finally:
            await adapter.aclose()


def processes_with(tag: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0]
                if tag.encode() in command and state != b"Z":
                    found.append(entry.name)
    return found


@dataclass
class Harness(Rig):
    """An agent that gives as many words as it is asked for, and waits after the next while a file is there."""

    held: Path = Path()

    def request(self, text: str = "", *, max_tokens: int = 8, **more: Any) -> RunRequest:  # type: ignore[override]
        return super().request(text or str(max_tokens), **more)

    def hold(self) -> None:
        self.held.touch()

    def engine_in_flight(self) -> int:
        return min(1, len(processes_with(str(self.held))))

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        async with rig_for(self.held.with_name("agent.py"), command=("/no/such/agent",)) as rig:
            yield rig.adapter


@pytest.fixture
async def harness(agent: Path) -> AsyncIterator[Harness]:
    held = agent.with_name("held")
    async with rig_for(agent, "counts", str(held), output="json_lines") as rig:
        yield Harness(rig.adapter, rig.root, held)


@pytest.mark.clause("EN-40", "EN-43", "EN-56", "EN-70", "EN-102", "EN-112", "EN-117")
@pytest.mark.skipif(not LINUX, reason="sees processes in /proc")
class TestSharedRunSuite(adapter_suite.RunSuite):
    pass


@pytest.mark.clause("EN-43")
async def test_a_prompt_goes_in_by_stdin_and_text_comes_out(agent: Path) -> None:
    async with rig_for(agent, "echo") as rig:
        run = await rig.run(rig.request("grüße 🚀" * 1000))
        assert [run.events[0].type, run.events[-1].type] == [RunEventType.START, RunEventType.COMPLETE]
        assert run.text == "grüße 🚀" * 1000
        assert run.events[-1].finish_reasons == ("stop",)


@pytest.mark.clause("EN-42", "EN-43")
async def test_the_command_is_filled_in_and_sees_only_what_it_may(agent: Path) -> None:
    command = ("args", "{target}", "{workspace}", "{session_id}", "{prompt}", "--flag")
    async with rig_for(agent, *command, prompt="argument", environment=("KEPT", "ABSENT")) as rig:
        run = await rig.run(rig.request("-rm -rf $HOME; `x`", session_id="s/../1"))
        told = json.loads(run.text)
        assert told["args"] == ["model-x", told["cwd"], "s/../1", " -rm -rf $HOME; `x`", "--flag"]
        assert Path(told["cwd"]).parent == rig.root
        assert told["mode"] == "0o700"
        assert {"PATH", "KEPT"} == set(told["env"]) - {"LC_CTYPE"}


async def test_without_a_place_for_it_the_prompt_is_the_last_argument(agent: Path) -> None:
    async with rig_for(agent, "args", prompt="argument") as rig:
        assert json.loads((await rig.run(rig.request("hello"))).text)["args"] == ["hello"]
        for bad in ("a\0b", "x" * 200_000):
            run = await rig.run(rig.request(bad))
            assert run.terminal is not None
            assert run.terminal.error is not None
            assert run.terminal.error.code == "invalid_request"
            assert run.terminal.error.before_start


@pytest.mark.clause("EN-43")
async def test_a_chat_becomes_a_transcript_and_a_session_gets_what_is_new(agent: Path) -> None:
    def chat(*contents: str) -> str:
        roles = ["user", "assistant"] * 5
        return json.dumps(
            {
                "messages": [
                    {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
                ]
            }
        )

    async with rig_for(agent, "echo") as rig:
        assert (await rig.run(rig.request(chat("hi")))).text == "hi"
        three = chat("hi", "hello", "bye")
        assert (await rig.run(rig.request(three))).text == "user: hi\n\nassistant: hello\n\nuser: bye"
        assert (await rig.run(rig.request(three, session_id="s"))).text.startswith("user: hi")
        assert (await rig.run(rig.request(three, session_id="s"))).text == "bye"


@pytest.mark.clause("EN-42", "EN-70")
async def test_a_run_has_its_own_directory_and_a_session_keeps_its_one(agent: Path) -> None:
    async with rig_for(agent, "file") as rig:
        assert (await rig.run(rig.request("a"))).text == "a"
        assert rig.left() == []
        assert (await rig.run(rig.request("b"))).text == "b"
        assert (await rig.run(rig.request("c", session_id="s1"))).text == "c"
        assert (await rig.run(rig.request("d", session_id="s1"))).text == "cd"
        assert (await rig.run(rig.request("e", session_id="s2"))).text == "e"
        assert len(rig.left()) == 2
        await rig.adapter.terminate_session(SessionId("s1"))
        await rig.adapter.terminate_session(SessionId("unknown"))
        assert len(rig.left()) == 1
        assert (await rig.run(rig.request("f", session_id="s1"))).text == "f"
    assert rig.left() == []


async def test_two_runs_at_once_never_share_a_directory_and_a_session_runs_one_at_a_time(agent: Path) -> None:
    async with rig_for(agent, "file", "0.2") as rig, asyncio.TaskGroup() as tasks:
        runs = [
            tasks.create_task(rig.run(rig.request(f"text-{n}", run_id=f"run-{n}", session_id=session)))
            for n, session in enumerate(["", "", "s1", "s2"])
        ]
        await eventually(lambda: len(rig.left()) == 4)
        second = await rig.run(rig.request("x", session_id="s1"))
        assert second.terminal is not None
        assert second.terminal.error is not None
        assert (second.terminal.error.code, second.terminal.error.before_start) == ("busy", True)
    assert [run.result().text for run in runs] == [f"text-{n}" for n in range(4)]


async def test_without_a_workspace_it_works_in_a_temporary_directory(agent: Path) -> None:
    async with rig_for(agent, "args", prompt="argument") as rig:
        told = json.loads((await rig.run(rig.request("x", workspace=False))).text)
        assert not Path(told["cwd"]).exists()


@pytest.mark.parametrize(
    ("mode", "settings", "code", "words"),
    [
        ("silent", {"start_timeout_sec": 1}, "no_output", "no output"),
        ("pauses", {"idle_timeout_sec": 1}, "timeout", "no more output"),
        ("pauses", {"total_timeout_sec": 1}, "timeout", "time is up"),
        ("hangs", {"idle_timeout_sec": 1}, "timeout", "did not end"),
        ("fails", {}, "upstream_error", "code 3"),
        ("floods", {"output_bytes_max": 100_000}, "upstream_error", "too large"),
    ],
)
async def test_an_agent_that_does_not_behave_ends_as_an_error(
    agent: Path, mode: str, settings: dict[str, Any], code: str, words: str
) -> None:
    async with rig_for(agent, mode, **settings) as rig:
        run = await rig.run(rig.request("x"), window_bytes=1 << 30)
        assert run.terminal is not None
        assert run.terminal.error is not None
        assert run.terminal.error.code == code
        assert words in run.terminal.error.message
        assert processes_with(str(agent)) == []
        assert rig.left() == []


async def test_an_agent_that_asks_back_finds_its_input_closed(agent: Path) -> None:
    async with rig_for(agent, "asks") as rig:
        run = await rig.run(rig.request("x"))
        assert run.terminal is not None
        assert run.terminal.type is RunEventType.COMPLETE


async def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = AdapterConfig(name="main", type="cli", settings=CliSettings(command=("/no/such/agent",)))
    adapter = create_adapter(config, AdapterServices(clock=SystemTestClock()))
    await adapter.probe()
    assert adapter.snapshot().health is Health.OFFLINE
    rig = Rig(adapter, tmp_path / "work")
    run = await rig.run(rig.request("x"))
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert "not installed" in run.terminal.error.message
    assert not (tmp_path / "work").exists(), "it was not even begun"


@pytest.mark.clause("EN-102")
async def test_a_reader_that_stops_holds_the_agent(agent: Path) -> None:
    async with rig_for(agent, "floods") as rig, asyncio.TaskGroup() as tasks:
        run = RunRecorder(rig.request("x"), window_bytes=10_000)
        tasks.create_task(rig.adapter.run(run))
        await eventually(lambda: run.credit_bytes <= 0)
        seen = len(run.text)
        await asyncio.sleep(0.1)
        assert len(run.text) == seen <= 10_000 + 65_536
        run.grant(200_000)
        await eventually(lambda: len(run.text) > seen)
        run.cancel()


@pytest.mark.clause("EN-56", "EN-70", "SF-07")
@pytest.mark.skipif(not LINUX, reason="needs a child subreaper")
@pytest.mark.parametrize("how", ["cancel", "task"])
async def test_an_agent_that_will_not_die_leaves_nothing_behind(agent: Path, how: str) -> None:
    tag = f"hydra-{os.getpid()}-{how}"
    async with rig_for(agent, "hydra", tag, output="json_lines") as rig:
        async with asyncio.TaskGroup() as tasks:
            run = RunRecorder(rig.request("x"), window_bytes=1 << 30)
            task = tasks.create_task(rig.adapter.run(run))
            await eventually(lambda: "started" in run.text)
            assert len(processes_with(tag)) >= 2
            if how == "cancel":
                run.cancel()
            else:
                task.cancel()
            await eventually(lambda: processes_with(tag) == [], within_s=SOON_S)
        if how == "cancel":
            assert run.terminal is not None
            assert run.terminal.type is RunEventType.CANCELLED
        assert rig.left() == []


@pytest.mark.clause("EN-56", "EN-70")
@pytest.mark.timeout(600)
@pytest.mark.skipif(not LINUX, reason="needs a child subreaper")
@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.soak)])
async def test_one_after_the_other_of_many_that_will_not_die_leaves_nothing_behind(
    agent: Path, count: int
) -> None:
    async with rig_for(agent, "hydra", f"hundred-{os.getpid()}", output="json_lines") as rig:

        async def start_and_leave() -> None:
            async with asyncio.TaskGroup() as tasks:
                run = RunRecorder(rig.request("x"), window_bytes=1 << 30)
                tasks.create_task(rig.adapter.run(run))
                await eventually(lambda: "started" in run.text)
                run.cancel()

        for _ in range(count):
            await start_and_leave()
            assert processes_with(f"hundred-{os.getpid()}") == []


@pytest.mark.skipif(not LINUX, reason="needs a parent death signal")
async def test_nothing_is_left_when_the_starter_itself_is_killed(agent: Path, tmp_path: Path) -> None:
    from iop.adapters.cli import REAPER

    tag = f"widow-{os.getpid()}"
    starter = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', {str(REAPER)!r}, '0.1', sys.executable, '-S',"
        f" {str(agent)!r}, 'hydra', {tag!r}], stdout=subprocess.DEVNULL)\n"
        "time.sleep(600)\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", starter)
    await eventually(lambda: len(processes_with(tag)) >= 3)
    process.kill()
    await process.wait()
    await eventually(lambda: processes_with(tag) == [])


@pytest.mark.parametrize(
    "settings",
    [
        {"command": ()},
        {"command": ("",)},
        {"command": ("x",), "prompt": "telepathy"},
        {"command": ("x",), "output": "video"},
    ],
)
def test_a_config_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        create_adapter(
            AdapterConfig(name="main", type="cli", settings=CliSettings(**settings)),
            AdapterServices(clock=SystemTestClock()),
        )


# ---- output ----


def read_lines(*lines: object) -> JsonLinesReader:
    reader = JsonLinesReader()
    reader.feed(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return reader


def test_the_common_agents_lines_become_text_tool_events_and_usage() -> None:
    lines = [
        {"type": "system", "subtype": "init"},
        {
            "type": "assistant",
            "message": {"content": [{"type": "text", "text": "a"}, {"type": "tool_use", "name": "ls"}]},
        },
        {"type": "item.completed", "item": {"type": "agent_message", "text": "b"}},
        {"type": "item.completed", "item": {"type": "reasoning", "text": "hm"}},
        {"type": "text", "text": "c"},
        {"type": "result", "result": "abc", "usage": {"input_tokens": 5, "output_tokens": 7}},
    ]
    reader = JsonLinesReader()
    events = reader.feed(b"".join(json.dumps(line).encode() + b"\n" for line in lines)) + reader.finish()
    assert "".join(event.delta for event in events) == "abc"
    assert "".join(event.reasoning_delta for event in events) == "hm"
    assert [json.loads(event.metadata["cli_tool_event"])["name"] for event in events if event.metadata] == [
        "ls"
    ]
    assert reader.usage is not None
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (5, 7)


def test_a_result_alone_is_the_answer() -> None:
    reader = JsonLinesReader()
    assert [event.delta for event in reader.feed(b'{"type":"result","result":"all"}\n')] == ["all"]


@pytest.mark.parametrize(
    "line", [{"type": "result", "is_error": True, "result": "no"}, {"type": "error", "message": "no"}]
)
def test_an_agents_own_error_is_one(line: dict[str, Any]) -> None:
    error = read_lines(line).error
    assert error is not None
    assert "no" in error.message


def test_warnings_and_rubbish_between_lines_are_skipped() -> None:
    assert read_lines(b"npm warn old", b"[1]", b"[" * 100_000, {"type": 7}, {}).skipped == 5


def test_text_is_cut_at_no_character() -> None:
    data = "é東🚀".encode()
    for cut in range(len(data) + 1):
        reader = TextReader()
        events = reader.feed(data[:cut]) + reader.feed(data[cut:]) + reader.finish()
        assert "".join(event.delta for event in events) == "é東🚀"
