"""Ollama's models unloaded and loaded again, against a stand-in that keeps its documented habits."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from iop.adapters import ollama_control
from iop.adapters.base import Adapter
from iop.adapters.registry import create_adapter
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    CacheOutcome,
    PauseMode,
    ResourceKind,
    WeightRetention,
)
from iop.admin.requests import DiskSource, PauseSpec
from iop.admin.steps import FlushStep, PauseStep, ReleaseStep, RestoreStep, ResumeStep, Step, StepResult
from iop.core.errors import PreconditionFailed, Unsupported
from iop.core.ids import RunId
from iop.testing import adapter_suite
from iop.testing.adapter_suite import (
    CHUNKED_HEAD,
    RunRecorder,
    ScriptedUpstream,
    UpstreamRequest,
    adapter_services,
    assert_all_ok,
    chunk,
    plain_answer,
    step_call,
)
from iop.testing.waiting import eventually, free_ports
from iop.wire.messages import AdapterConfig, OllamaSettings, RunRequest

PAUSE = PauseStep(pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE))
RELEASE = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.DISCARD)
RESTORE = RestoreStep(kinds=(ResourceKind.WEIGHTS,))
FLUSH = FlushStep(kinds=tuple(CacheKind), busy_policy=BusyPolicy.FAIL)


@dataclass
class Ollama:
    """Unloads some questions after it said so; what `m` names can be changed under it."""

    digest: str = "sha256:1"
    loaded: dict[str, str] = field(default_factory=lambda: {"m:latest": "sha256:1"})
    linger: int = 2
    never_leaves: bool = False
    never_loads: bool = False
    remote_host: str = ""
    vram: int = 0
    has_ps: bool = True
    leaving: dict[str, int] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    chats: int = 0

    async def __call__(self, request: UpstreamRequest) -> None:
        if request.path == "/api/chat":
            self.chats += 1
            await request.connection.write(CHUNKED_HEAD + chunk(b'{"message":{"content":"a"}}\n'))
            await request.connection.wait_closed_by_peer()
            return
        status, answer = self._answer(request)
        await request.connection.write(plain_answer(json.dumps(answer).encode(), status=status))

    def _answer(self, request: UpstreamRequest) -> tuple[str, object]:
        match request.path:
            case "/api/version":
                return "200 OK", {"version": "0.33"}
            case "/api/tags":
                tag = {"name": "m:latest", "digest": self.digest, "remote_host": self.remote_host}
                return "200 OK", {"models": [tag, {"name": "other:7b", "digest": "x"}]}
            case "/api/ps" if self.has_ps:
                return "200 OK", {"models": self._ps()}
            case "/api/generate":
                body = json.loads(request.body)
                self.told.append(body)
                return "200 OK", {"done": True, "done_reason": self._generate(body)}
        return "404 Not Found", {"error": "404 page not found"}

    def _ps(self) -> list[dict[str, object]]:
        for name in tuple(self.leaving):
            self.leaving[name] -= 1
            if self.leaving[name] < 0 and not self.never_leaves:
                del self.leaving[name], self.loaded[name]
        running = [{"name": "other:7b", "digest": "x", "size_vram": 5}]
        return running + [{"name": n, "digest": d, "size_vram": self.vram} for n, d in self.loaded.items()]

    def _generate(self, body: dict[str, Any]) -> str:
        name = body["model"]
        if body.get("keep_alive") == 0:
            self.leaving[name] = self.linger
            return "unload"
        self.leaving.pop(name, None)
        if not self.never_loads:
            self.loaded[name] = self.digest
        return "load"


@contextlib.asynccontextmanager
async def running(endpoint: str, *targets: str, keep_alive: str = "") -> AsyncIterator[Adapter]:
    settings = OllamaSettings(endpoint=endpoint, keep_alive=keep_alive)
    config = AdapterConfig(name="main", type="ollama", targets=targets, settings=settings)
    adapter = create_adapter(config, adapter_services())
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            await adapter.probe()
            yield adapter
        finally:
            await adapter.aclose()


@contextlib.asynccontextmanager
async def in_front_of(engine: Ollama, *, keep_alive: str = "") -> AsyncIterator[Adapter]:
    async with (
        ScriptedUpstream(engine).serving() as upstream,
        running(upstream.endpoint, "m", keep_alive=keep_alive) as adapter,
    ):
        yield adapter


@dataclass
class Harness:
    adapter: Adapter

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        async with running(f"http://127.0.0.1:{free_ports(1)[0]}", "m") as adapter:
            yield adapter


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with in_front_of(Ollama()) as adapter:
        yield Harness(adapter)


@pytest.mark.clause("AD-37", "AD-40", "AD-41")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    pass


async def do(adapter: Adapter, body: Step) -> StepResult:
    return await adapter.execute_step(step_call(adapter, body), lambda _: None)


async def released(adapter: Adapter) -> frozenset[ResourceKind] | None:
    (back,) = await adapter.read_back([adapter.participants()[0].participant_id])
    return back.released


def begin(adapter: Adapter, tasks: asyncio.TaskGroup) -> RunRecorder:
    request = RunRequest(run_id=RunId("run-1"), adapter="main", target="m", input=b"Hello", workspace="")
    run = RunRecorder(request)
    tasks.create_task(adapter.run(run))
    return run


@pytest.mark.clause("AD-37", "AD-43", "AD-44")
async def test_a_model_is_out_when_the_server_no_longer_lists_it_and_back_when_it_does() -> None:
    engine = Ollama()
    async with in_front_of(engine, keep_alive="10m") as adapter:
        assert_all_ok(await do(adapter, PAUSE))
        assert_all_ok(await do(adapter, RELEASE))
        assert engine.loaded == {}
        assert engine.told == [{"model": "m:latest", "keep_alive": 0, "stream": False}]
        assert await released(adapter) == {ResourceKind.WEIGHTS}
        again = await do(adapter, RELEASE)
        assert not again.participants[0].changed
        assert_all_ok(await do(adapter, RESTORE))
        assert engine.told[1:] == [{"model": "m:latest", "stream": False, "keep_alive": "10m"}]
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-33", "AD-43")
async def test_the_digest_is_the_version_and_where_it_can_be_loaded_from_again() -> None:
    engine = Ollama()
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        (back,) = await adapter.read_back([info.participant_id])
        assert back.weight_version == "m:latest@1"
        assert isinstance(info.startup_source, DiskSource)
        assert info.startup_source.path == "m:latest@1"
        engine.digest = "sha256:2"
        await adapter.probe()
        (back,) = await adapter.read_back([info.participant_id])
        assert back.weight_version == "m:latest@2"


@pytest.mark.clause("AD-43")
async def test_a_model_that_any_request_would_keep_is_unloaded_only_behind_the_gate() -> None:
    engine = Ollama()
    async with in_front_of(engine) as adapter:
        with pytest.raises(PreconditionFailed):
            await do(adapter, RELEASE)
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        async with asyncio.TaskGroup() as tasks:
            run = begin(adapter, tasks)
        assert run.terminal is not None
        assert run.terminal.error is not None
        assert run.terminal.error.before_start
        assert engine.chats == 0


@pytest.mark.clause("AD-37", "AD-43")
async def test_an_unload_answered_by_a_server_that_keeps_the_model_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ollama_control, "UNLOAD_TIMEOUT_S", 0.3)
    async with in_front_of(Ollama(never_leaves=True)) as adapter:
        await do(adapter, PAUSE)
        (outcome,) = (await do(adapter, RELEASE)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-37", "AD-43")
@pytest.mark.parametrize(("after", "is_freed"), [(300, True), (1000, False)])
async def test_freed_bytes_are_measured_at_the_device_and_none_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, after: int, is_freed: bool
) -> None:
    monkeypatch.setattr("iop.adapters.device_memory.FREED_TIMEOUT_S", 0.2)
    figures = [1000, 1000, after]

    async def used() -> int:
        return figures.pop(0) if len(figures) > 1 else figures[0]

    async with in_front_of(Ollama(vram=999)) as adapter:
        adapter._control._device_memory = used  # type: ignore[attr-defined]
        await do(adapter, PAUSE)
        (outcome,) = (await do(adapter, RELEASE)).participants
        if is_freed:
            assert [amount.bytes for amount in outcome.amounts] == [700]
        else:
            assert outcome.error is not None
            assert outcome.error.code is AdminErrorCode.VERIFICATION_FAILED


@pytest.mark.clause("AD-44")
@pytest.mark.parametrize(("change", "words"), [("digest", "other weights"), ("never", "does not list")])
async def test_what_was_loaded_again_must_be_there_and_be_the_same(change: str, words: str) -> None:
    engine = Ollama()
    async with in_front_of(engine) as adapter:
        await do(adapter, PAUSE)
        await do(adapter, RELEASE)
        engine.never_loads = change == "never"
        engine.digest = "sha256:2"
        (outcome,) = (await do(adapter, RESTORE)).participants
        assert outcome.error is not None
        assert words in outcome.error.message


@pytest.mark.clause("AD-35")
async def test_a_model_that_its_own_timer_unloaded_is_not_called_released() -> None:
    engine = Ollama()
    async with in_front_of(engine) as adapter:
        await do(adapter, PAUSE)
        engine.loaded.clear()
        assert await released(adapter) == frozenset()


@pytest.mark.clause("AD-40")
async def test_a_flush_is_an_unload_and_a_load_and_refused_while_requests_run() -> None:
    engine = Ollama()
    async with in_front_of(engine) as adapter:
        async with asyncio.TaskGroup() as tasks:
            run = begin(adapter, tasks)
            await eventually(lambda: engine.chats == 1)
            (outcome,) = (await do(adapter, FLUSH)).participants
            assert outcome.error is not None
            assert outcome.error.code is AdminErrorCode.REFUSED_BUSY
            assert {cache.outcome for cache in outcome.caches} == {CacheOutcome.REFUSED}
            assert engine.told == []
            run.cancel()
        result = await do(adapter, FLUSH)
        assert_all_ok(result)
        assert [cache.kind for cache in result.participants[0].caches] == list(CacheKind)
        assert [body.get("keep_alive") for body in engine.told] == [0, None]
        assert engine.loaded == {"m:latest": "sha256:1"}
        async with asyncio.TaskGroup() as tasks:
            run = begin(adapter, tasks)
            await eventually(lambda: engine.chats == 2)
            run.cancel()


@pytest.mark.clause("AD-41", "EN-56")
async def test_an_aborting_pause_closes_the_connections_of_all_runs() -> None:
    engine = Ollama()
    async with in_front_of(engine) as adapter:
        async with asyncio.TaskGroup() as tasks:
            run = begin(adapter, tasks)
            await eventually(lambda: engine.chats == 1)
            pause = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT))
            result = await do(adapter, pause)
        assert_all_ok(result)
        assert result.work.aborted == 1
        assert run.terminal is not None
        assert_all_ok(await do(adapter, ResumeStep()))


@pytest.mark.clause("AD-15")
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Ollama(remote_host="https://elsewhere"), ":cloud"),
        (Ollama(has_ps=False), "/api/ps"),
    ],
)
async def test_what_cannot_be_unloaded_here_is_not_offered_and_the_refusal_says_why(
    engine: Ollama, words: str
) -> None:
    async with in_front_of(engine) as adapter:
        (info,) = adapter.participants()
        assert info.capabilities.operations == {AdminOperationKind.PAUSE, AdminOperationKind.RESUME}
        assert words in adapter.capabilities.admin_refusal
        await do(adapter, PAUSE)
        with pytest.raises(Unsupported, match=words):
            await do(adapter, RELEASE)
