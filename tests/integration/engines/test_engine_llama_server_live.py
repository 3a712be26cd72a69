"""The real `llama-server` program: a router of models, signals, and what a stream's end looks like then."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines_fleet import EngineFleet
from engines_models import ANSWER, OTHER_ANSWER, Engine
from engines_rig import HELLO, EngineHarness, ask, begin, config_of, running, said
from engines_steps import PAUSE, do, released
from llama_server import LlamaServer, llama_server

from iop.adapters.base import Adapter, Health
from iop.admin.enums import (
    AdminErrorCode,
    AdminOperationKind,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    PauseMode,
    ResourceKind,
    WeightRetention,
)
from iop.admin.requests import PauseSpec
from iop.admin.steps import FlushStep, PauseStep, ReleaseStep, RestoreStep, ResumeStep
from iop.core.errors import PreconditionFailed
from iop.testing import adapter_suite
from iop.testing.adapter_suite import TunnelRecorder, assert_all_ok
from iop.testing.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.timeout(180)]

RELEASE = ReleaseStep(kinds=(ResourceKind.WEIGHTS,), weight_retention=WeightRetention.DISCARD)
RESTORE = RestoreStep(kinds=(ResourceKind.WEIGHTS,))
FLUSH = FlushStep(kinds=(CacheKind.PREFIX,), busy_policy=BusyPolicy.FAIL)


@pytest.fixture
def router(models: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    """Three models, of which it keeps one at a time."""
    directory = tmp_path / "models"
    directory.mkdir()
    for name in ("sea", "hill", "endless"):
        (directory / f"{name}.gguf").symlink_to(models / f"{name}.gguf")
    (tmp_path / "slots").mkdir()
    arguments = ("--models-dir", str(directory), "--models-max", "1", "-c", "32768")
    with llama_server(*arguments, "--slot-save-path", f"{tmp_path}/slots/", log=tmp_path / "log") as server:
        yield server


@pytest.fixture
def single(models: Path, tmp_path: Path) -> Iterator[LlamaServer]:
    """One model that never stops."""
    arguments = ("-m", str(models / "endless.gguf"), "--alias", "endless", "-c", "131072")
    with llama_server(*arguments, log=tmp_path / "log") as server:
        yield server


@dataclass
class RouterHarness(EngineHarness):
    server: LlamaServer


@pytest.fixture
async def harness(router: LlamaServer) -> AsyncIterator[RouterHarness]:
    async with running(config_of("llamacpp", router.endpoint, "sea", "hill")) as adapter:
        assert said(await chat(adapter, "sea")) == ANSWER
        await adapter.probe()
        yield RouterHarness(adapter, "llamacpp", router)


async def chat(adapter: Adapter, model: str, **more: object) -> TunnelRecorder:
    return await ask(adapter, {"model": model, "messages": HELLO, "temperature": 0, **more})


@pytest.mark.clause("AD-37", "AD-40", "AD-41")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    pass


@pytest.mark.clause("AD-15", "AD-37", "AD-43", "AD-44")
async def test_release_unloads_for_good_and_restore_loads_what_was_loaded(harness: RouterHarness) -> None:
    (info,) = harness.adapter.participants()
    assert {AdminOperationKind.RELEASE_RESOURCES, AdminOperationKind.RESTORE_RESOURCES} <= (
        info.capabilities.operations
    )
    with pytest.raises(PreconditionFailed):
        await do(harness.adapter, RELEASE)
    assert_all_ok(await do(harness.adapter, PAUSE))
    assert await released(harness.adapter) == frozenset()
    assert_all_ok(await do(harness.adapter, RELEASE))
    assert harness.server.statuses()["sea"] == "unloaded"
    assert await released(harness.adapter) == {ResourceKind.WEIGHTS}
    assert (await chat(harness.adapter, "sea")).error is not None, "the gate holds what would load it again"
    assert harness.server.statuses()["sea"] == "unloaded"
    again = await do(harness.adapter, RELEASE)
    assert not again.participants[0].changed
    assert_all_ok(await do(harness.adapter, RESTORE))
    assert harness.server.statuses() == {"sea": "loaded", "hill": "unloaded", "endless": "unloaded"}
    assert await released(harness.adapter) == frozenset()
    assert_all_ok(await do(harness.adapter, ResumeStep()))
    assert said(await chat(harness.adapter, "sea")) == ANSWER


@pytest.mark.clause("AD-35", "AD-43")
async def test_a_model_that_the_router_dropped_for_another_is_not_called_released(
    harness: RouterHarness,
) -> None:
    assert said(await chat(harness.adapter, "hill")) == OTHER_ANSWER
    assert harness.server.statuses()["sea"] == "unloaded"
    assert_all_ok(await do(harness.adapter, PAUSE))
    assert await released(harness.adapter) == frozenset()
    assert_all_ok(await do(harness.adapter, RELEASE))
    assert_all_ok(await do(harness.adapter, RESTORE))
    statuses = harness.server.statuses()
    assert (statuses["sea"], statuses["hill"]) == ("unloaded", "loaded")


@pytest.mark.clause("AD-40")
async def test_slots_and_their_erasing_are_asked_of_the_model_that_is_loaded(harness: RouterHarness) -> None:
    prompt = [{"role": "user", "content": "word " * 200}]

    async def cached() -> int:
        answer = await ask(harness.adapter, {"model": "sea", "messages": prompt, "max_tokens": 4})
        tokens: int = json.loads(answer.received)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    await cached()
    assert await cached() > 100
    assert_all_ok(await do(harness.adapter, FLUSH))
    assert await cached() == 0


@pytest.mark.clause("AD-40", "EN-56")
async def test_a_stream_through_the_router_counts_refuses_a_flush_and_frees_its_slot(
    router: LlamaServer,
) -> None:
    async with running(config_of("llamacpp", router.endpoint, "endless")) as adapter:
        body = {"model": "endless", "messages": HELLO, "stream": True}
        tunnel = begin(adapter, body)
        await eventually(lambda: bool(tunnel.pieces), within_s=30)
        await adapter.probe()
        assert adapter.snapshot().engine_in_flight == 1
        (outcome,) = (await do(adapter, FLUSH)).participants
        assert outcome.error is not None
        assert outcome.error.code is AdminErrorCode.REFUSED_BUSY
        tunnel.cancel()
        async with asyncio.timeout(1.0):
            while any(s["is_processing"] for s in await asyncio.to_thread(router.slots, "endless")):
                pass
        await tunnel.finished()


@pytest.fixture
async def fleet(router: LlamaServer, tmp_path: Path) -> AsyncIterator[EngineFleet]:
    engine = Engine(endpoint=router.endpoint, model="endless")
    async with EngineFleet(tmp_path / "fleet", "llamacpp", engine) as made:
        await made.open()
        yield made


@pytest.mark.clause("EN-112", "SF-06", "SF-14", "AD-43", "AD-44")
async def test_a_stream_whose_model_is_unloaded_ends_as_an_error_and_never_as_an_answer(
    fleet: EngineFleet, router: LlamaServer
) -> None:
    raw = await fleet.ask({"model": "fast", "messages": HELLO, "stream": True}, "x-request-id: cut")
    await raw.read_until(b'"content"')
    status, _, _ = await asyncio.to_thread(router.ask, "/models/unload", {"model": "endless"})
    assert status == 200
    # The server lets its child ten seconds to leave before it cuts what runs.
    async with asyncio.timeout(30):
        rest = await raw.reader.readuntil(b"upstream_truncated")
    assert b"[DONE]" not in rest
    assert b"proxy error" not in rest, "the engine's own words outside of any event"
    await fleet.settled()
    assert await fleet.outcome("cut") == "upstream_truncated"


@pytest.mark.clause("AD-43", "AD-44")
async def test_release_and_restore_by_the_command_line_reach_the_router(
    fleet: EngineFleet, router: LlamaServer
) -> None:
    code, done = await fleet.admin(
        "release", "--all", "--kind", "weights", "--retention", "discard", "--mode", "drain"
    )
    assert code == 0, done
    assert router.statuses()["endless"] == "unloaded"
    epoch = str(done["result"]["release_resources"]["resource_epoch"])
    code, restored = await fleet.admin("restore", "--epoch", epoch, "--kind", "weights")
    assert code == 0, restored
    assert router.statuses()["endless"] == "loaded"


@pytest.mark.clause("EN-34", "EN-112")
async def test_a_server_told_to_end_hangs_on_its_stream_and_a_second_signal_ends_it_at_once(
    single: LlamaServer,
) -> None:
    async with running(config_of("llamacpp", single.endpoint, "endless")) as adapter:
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": -1}).encode()
        # Its caller does not read on, so that it cannot end before the signals come.
        tunnel = TunnelRecorder(adapter_suite.tunnel_request(), (body,), window_bytes=16_384)
        adapter.open_tunnel(tunnel, tunnel.on_done)
        await eventually(lambda: tunnel.credit_bytes <= 0, within_s=30)
        single.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(single.process.wait, 1.0)
        assert not tunnel.is_terminal
        single.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(single.process.wait, 5.0)
        tunnel.grant(1 << 30)
        await tunnel.finished()
        assert tunnel.error is not None
        assert tunnel.error.code == "upstream_truncated"
        unsent = await ask(adapter, {"messages": HELLO})
        assert unsent.error is not None
        assert unsent.error.before_start
        assert adapter.snapshot().health is Health.OFFLINE


@pytest.mark.clause("EN-109")
async def test_a_server_drained_by_a_pause_ends_at_its_first_signal(single: LlamaServer) -> None:
    async with running(config_of("llamacpp", single.endpoint, "endless")) as adapter:
        tunnel = begin(adapter, {"messages": HELLO, "stream": True, "max_tokens": -1})
        await eventually(lambda: bool(tunnel.pieces), within_s=30)
        abort = PauseStep(pause=PauseSpec(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT))
        assert_all_ok(await do(adapter, abort))
        single.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(single.process.wait, 5.0) == 0
