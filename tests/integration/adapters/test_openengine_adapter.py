"""The openengine adapter against a scripted engine and against a whole OpenEngineAdmin server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from openengine_rig import (
    ADMIN_TOKEN,
    OTHER_TOKEN,
    AdminEngine,
    Held,
    ScriptedEngine,
    admin_engine,
    chat_input,
)

from iop.adapters.base import Adapter, Health
from iop.adapters.openai_compat import OpenAICompatAdapter
from iop.adapters.registry import create_adapter
from iop.admin.enums import (
    AdminErrorCode,
    AdmissionPolicy,
    BusyPolicy,
    CacheKind,
    ChangeDisposition,
    PauseMode,
    ProfilerKind,
    ReconfigurableField,
    ResourceKind,
    VerificationMethod,
    WeightFormat,
    WeightRetention,
)
from iop.admin.requests import (
    AllTargets,
    DiskSource,
    MutationOptions,
    PauseRequest,
    PauseSpec,
    ServingChange,
)
from iop.admin.steps import (
    ApplyWeightsStep,
    CommitWeightsStep,
    FlushStep,
    JudgeReconfigureStep,
    PauseStep,
    PrepareWeightsStep,
    ReconfigureStep,
    ReleaseStep,
    RestoreStep,
    ResumeStep,
    StartProfileStep,
    Step,
    StepResult,
    StopProfileStep,
    UndoWeightsStep,
    VerifyWeightsStep,
)
from iop.client.admin import AdminClient, AdminTarget
from iop.core.errors import InvalidRequest, Unavailable, Unsupported
from iop.core.ids import ParticipantId, RunId
from iop.pb.openengine.v1 import generation_pb2, model_pb2
from iop.testing import adapter_suite
from iop.testing.adapter_suite import (
    RunRecorder,
    TunnelRecorder,
    adapter_services,
    assert_all_ok,
    step_call,
    tunnel_request,
)
from iop.testing.fake_participants import FaultKind
from iop.testing.tcp_relay import TcpRelay
from iop.testing.waiting import PATIENCE_S, SOON_S, eventually, free_ports
from iop.wire.messages import (
    AdapterConfig,
    OpenAICompatSettings,
    OpenEngineSettings,
    RunEventType,
    RunRequest,
)


def closed_port() -> int:
    return free_ports(1)[0]


@contextlib.asynccontextmanager
async def running(settings: OpenEngineSettings) -> AsyncIterator[Adapter]:
    config = AdapterConfig(
        name="main", type="openengine", capacity=4, settings=settings, engine_control=settings
    )
    async with started(config) as adapter:
        yield adapter


@contextlib.asynccontextmanager
async def started(config: AdapterConfig) -> AsyncIterator[Adapter]:
    adapter = create_adapter(config, adapter_services())
    async with asyncio.TaskGroup() as tasks:
        await adapter.start(tasks)
        try:
            yield adapter
        finally:
            await adapter.aclose()


# ---- runs ----


@dataclass
class RunRig:
    adapter: Adapter
    engine: ScriptedEngine

    def request(self, *, max_tokens: int = 8) -> RunRequest:
        return RunRequest(run_id=RunId("run-1"), adapter="main", target="m", input=chat_input(max_tokens))

    def hold(self) -> None:
        self.engine.held = True

    def engine_in_flight(self) -> int:
        return self.engine.in_flight

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        async with running(OpenEngineSettings(target=f"127.0.0.1:{closed_port()}")) as adapter:
            yield adapter


@pytest.fixture
async def rig() -> AsyncIterator[RunRig]:
    engine = ScriptedEngine()
    async with (
        engine.serving() as address,
        running(OpenEngineSettings(target=address, api_key="k1")) as adapter,
    ):
        yield RunRig(adapter, engine)


@pytest.mark.clause("EN-40", "EN-43", "EN-56", "EN-102", "EN-112", "EN-117", "SF-07")
class TestSharedRunSuite(adapter_suite.RunSuite):
    @pytest.fixture
    async def harness(self, rig: RunRig) -> RunRig:
        return rig


async def run_to_end(rig: RunRig, request: RunRequest) -> RunRecorder:
    run = RunRecorder(request)
    async with asyncio.timeout(PATIENCE_S):
        await rig.adapter.run(run)
    assert run.terminal is not None
    return run


def with_input(data: bytes, **values: Any) -> RunRequest:
    return RunRequest(run_id=RunId("run-1"), adapter="main", target="m", input=data, **values)


@pytest.mark.clause("EN-41", "EN-43", "EN-44", "SF-21")
async def test_the_engine_gets_target_prompt_and_routing_and_the_run_its_weight_version(rig: RunRig) -> None:
    request = with_input(chat_input(2), session_id="s-1", traceparent="00-1", metadata={"mine": "1"})
    run = await run_to_end(rig, request)
    seen = rig.engine.requests[0]
    assert (seen.request_id, seen.model, seen.prompt) == ("run-1", "m", "user: hi\nassistant:")
    assert rig.engine.metadata[0]["authorization"] == "Bearer k1"
    assert rig.engine.metadata[0]["openengine-routing-key"] == "s-1"
    assert rig.engine.metadata[0]["traceparent"] == "00-1"
    assert "mine" not in rig.engine.metadata[0]
    assert run.events[0].metadata == {"weight_version": "v7"}
    assert run.text == "w0 w1 "


async def test_an_engine_that_renders_chat_gets_the_messages(rig: RunRig) -> None:
    rig.engine.prompt_formats = ["chat_messages"]
    await rig.adapter.probe()
    await run_to_end(rig, with_input(chat_input(1)))
    seen = rig.engine.requests[0]
    assert json.loads(seen.prompt) == [{"role": "user", "content": "hi"}]
    assert seen.extra["prompt_format"] == "chat_messages"


async def test_plain_text_is_the_prompt_itself(rig: RunRig) -> None:
    await run_to_end(rig, with_input("über {nothing}".encode()))
    assert rig.engine.requests[0].prompt == "über {nothing}"


async def test_every_output_has_its_deltas_and_its_finish_reason(rig: RunRig) -> None:
    run = await run_to_end(rig, with_input(chat_input(2, n=3)))
    assert run.terminal is not None
    assert run.terminal.finish_reasons == ("length", "length", "length")
    for index in range(3):
        text = "".join(event.delta for event in run.events if event.output_index == index)
        assert text == "w0 w1 "


async def test_sampling_and_stopping_reach_the_engine(rig: RunRig) -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": 5,
        "stop": ["a", "b"],
        "presence_penalty": -1.5,
        "max_completion_tokens": 3,
        "response_format": {"type": "json_object"},
    }
    await run_to_end(rig, with_input(chat_input(9, **fields)))
    seen = rig.engine.requests[0]
    assert seen.sampling.HasField("temperature")
    assert (seen.sampling.temperature, seen.sampling.top_p, seen.sampling.top_k, seen.sampling.seed) == (
        0,
        0.5,
        7,
        5,
    )
    assert seen.sampling.presence_penalty == -1.5
    assert not seen.sampling.HasField("min_p")
    assert seen.stopping.max_tokens == 3
    assert [each.stop_text for each in seen.stopping.conditions] == ["a", "b"]
    assert seen.guided.WhichOneof("guide") == "json_object"


@pytest.mark.parametrize(
    "data",
    [
        chat_input(10**300),
        chat_input(-1),
        chat_input(1, temperature="hot"),
        chat_input(1, temperature=True),
        chat_input(1, n=10**6),
        chat_input(1, stop=[""]),
        chat_input(1, messages=[]),
        chat_input(1, messages=[{"role": "king", "content": ""}]),
        chat_input(1, messages=[{"role": "user", "content": [{"type": "video"}]}]),
        chat_input(1, messages=7),
        chat_input(1, response_format={"type": "x"}),
        chat_input(1, logprobs=True),
        chat_input(1, tools=[{"type": "function"}]),
        b'{"prompt": [1, -2]}',
        b'{"prompt": [[1]]}',
        b'{"messages": [',
        b'{"messages": ' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
async def test_what_cannot_be_said_to_the_engine_is_refused_before_it(rig: RunRig, data: bytes) -> None:
    run = await run_to_end(rig, with_input(data))
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.code == "invalid_request"
    assert run.terminal.error.before_start
    assert rig.engine.requests == []


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", False),
        (grpc.StatusCode.UNIMPLEMENTED, "invalid_request", False),
        (grpc.StatusCode.NOT_FOUND, "invalid_request", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", True),
        (grpc.StatusCode.UNAVAILABLE, "upstream_error", True),
        (grpc.StatusCode.UNAUTHENTICATED, "upstream_error", False),
        (grpc.StatusCode.INTERNAL, "upstream_error", False),
    ],
)
@pytest.mark.clause("EN-112")
async def test_a_refusal_by_status_is_an_error_and_never_unsent(
    rig: RunRig, status: grpc.StatusCode, code: str, retryable: bool
) -> None:
    rig.engine.refuse_with = (status, "because")
    run = await run_to_end(rig, rig.request())
    assert [event.type for event in run.events] == [RunEventType.ERROR]
    error = run.events[0].error
    assert error is not None
    assert (error.code, error.retryable, error.before_start) == (code, retryable, False)
    assert "because" in error.message


async def test_a_terminal_error_of_the_engine_ends_the_run(rig: RunRig) -> None:
    rig.engine.fail_after = 2
    run = await run_to_end(rig, rig.request())
    assert run.text == "w0 w1 "
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert (run.terminal.error.code, run.terminal.error.retryable) == ("upstream_error", True)


@pytest.mark.parametrize("how", ["break_after", "forget_finish"])
async def test_an_answer_without_its_end_is_told_as_truncated(rig: RunRig, how: str) -> None:
    setattr(rig.engine, how, 1)
    run = await run_to_end(rig, rig.request())
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.code == "upstream_truncated"


async def test_a_cancel_while_connecting_ends_at_once() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with running(OpenEngineSettings(target=address)) as adapter, asyncio.TaskGroup() as tasks:
            run = RunRecorder(with_input(b"x"))
            task = tasks.create_task(adapter.run(run))
            for _ in range(20):
                await asyncio.sleep(0.001)
            run.cancel()
            await eventually(task.done, within_s=SOON_S)
        assert run.terminal is not None
        assert run.terminal.type is RunEventType.CANCELLED


@pytest.mark.parametrize("state", [Health.READY, Health.DRAINING])
async def test_a_probe_tells_health_load_and_models(rig: RunRig, state: Health) -> None:
    from iop.pb.openengine.v1 import lifecycle_pb2

    if state is Health.DRAINING:
        rig.engine.health = lifecycle_pb2.HEALTH_STATE_DRAINING
    await rig.adapter.probe()
    snapshot = rig.adapter.snapshot()
    assert (snapshot.health, snapshot.models, snapshot.engine_in_flight) == (state, ("m",), 0)
    assert snapshot.engine_version == "scripted 9"
    assert snapshot.engine_queued is None


async def test_an_engine_that_is_away_shows_offline_without_its_address(rig: RunRig) -> None:
    async with rig.unreachable() as adapter:
        await adapter.probe()
        assert adapter.snapshot().health is Health.OFFLINE
        assert "127.0.0.1" not in adapter.snapshot().reason


async def test_tunnels_are_not_offered(rig: RunRig) -> None:
    tunnel = TunnelRecorder(tunnel_request())
    rig.adapter.open_tunnel(tunnel, tunnel.on_done)
    await tunnel.finished()
    assert tunnel.error is not None
    assert tunnel.error.before_start
    assert not rig.adapter.capabilities.tunnels


@pytest.mark.parametrize(
    "settings",
    [
        OpenEngineSettings(),
        OpenEngineSettings(target="h:1", tls_ca_pem=b"x"),
        OpenAICompatSettings(endpoint="http://h"),
    ],
)
async def test_a_config_that_cannot_work_is_refused(settings: Any) -> None:
    config = AdapterConfig(name="main", type="openengine", settings=settings)
    with pytest.raises(InvalidRequest):
        async with started(config):
            pass


# ---- admin ----


@dataclass
class AdminRig:
    adapter: Adapter
    engine: AdminEngine
    core: ScriptedEngine
    settings: OpenEngineSettings
    number: int = 0

    @contextlib.asynccontextmanager
    async def unreachable(self) -> AsyncIterator[Adapter]:
        settings = OpenEngineSettings(
            target=f"127.0.0.1:{closed_port()}", admin_target=f"127.0.0.1:{closed_port()}", admin_token="t"
        )
        async with running(settings) as adapter:
            yield adapter

    async def step(
        self, body: Step, *, step: int = 1, operation: str = "", adapter: Adapter | None = None
    ) -> StepResult:
        if not operation:
            self.number += 1
            operation = f"op-{self.number}"
        target = adapter or self.adapter
        if not target.participants():
            await target.probe()
        call = step_call(target, body, operation=operation, ordinal=self.number, step=step)
        async with asyncio.timeout(PATIENCE_S):
            return await target.execute_step(call, lambda _: None)

    def other(self) -> AdminClient:
        return AdminClient(AdminTarget(address=self.engine.address, token=OTHER_TOKEN, timeout_s=10))

    @property
    def ids(self) -> tuple[ParticipantId, ...]:
        return tuple(each.participant_id for each in self.adapter.participants())

    def steps_of(self, kind: type[Step]) -> int:
        return sum(isinstance(call.body, kind) for call in self.engine.world.fleet.calls)


@pytest.fixture
async def admin() -> AsyncIterator[AdminRig]:
    core = ScriptedEngine()
    async with core.serving() as target, admin_engine() as engine:
        settings = OpenEngineSettings(target=target, admin_target=engine.address, admin_token=ADMIN_TOKEN)
        async with running(settings) as adapter:
            await adapter.probe()
            yield AdminRig(adapter, engine, core, settings)


@pytest.mark.clause("AD-37", "AD-40", "AD-50")
class TestSharedAdminSuite(adapter_suite.AdminSuite):
    @pytest.fixture
    async def harness(self, admin: AdminRig) -> AdminRig:
        return admin


def pause(mode: PauseMode = PauseMode.DRAIN) -> PauseStep:
    return PauseStep(pause=PauseSpec(mode=mode, admission=AdmissionPolicy.QUEUE))


async def test_participants_are_the_engines_ranks_with_its_instance(admin: AdminRig) -> None:
    infos = admin.adapter.participants()
    assert [each.participant_id for each in infos] == ["g/0", "g/1"]
    assert {each.group_id for each in infos} == {"g"}
    assert {each.instance for each in infos} == {"engine-1"}


@pytest.mark.clause("AD-36")
@pytest.mark.parametrize("mode", PauseMode)
async def test_each_pause_mode_reaches_the_engine_and_is_read_back(admin: AdminRig, mode: PauseMode) -> None:
    admin.engine.world.fleet.work = dict.fromkeys(admin.engine.world.fleet.work, 3)
    result = await admin.step(pause(mode))
    assert_all_ok(result)
    work = result.work
    assert {PauseMode.DRAIN: work.drained, PauseMode.ABORT: work.aborted, PauseMode.KEEP: work.kept}[
        mode
    ] == 3
    assert all(rank.paused for rank in admin.engine.world.fleet.members("g"))
    assert_all_ok(await admin.step(ResumeStep()))
    assert not any(rank.paused for rank in admin.engine.world.fleet.members("g"))


@pytest.mark.clause("AD-36")
async def test_a_repeated_step_repeats_the_answer_and_not_the_effect(admin: AdminRig) -> None:
    first = await admin.step(pause(), operation="op-x")
    again = await admin.step(pause(), operation="op-x")
    assert first == again
    assert admin.steps_of(PauseStep) == 1


@pytest.mark.clause("AD-36")
async def test_after_a_restart_of_the_node_the_pause_is_found_again(admin: AdminRig) -> None:
    assert_all_ok(await admin.step(pause()))
    async with running(admin.settings) as fresh:
        assert_all_ok(await admin.step(ResumeStep(), adapter=fresh))
    assert not any(rank.paused for rank in admin.engine.world.fleet.members("g"))


@pytest.mark.clause("AD-37", "AD-42")
async def test_a_pause_of_somebody_else_is_never_ended_and_shows(admin: AdminRig) -> None:
    async with admin.other() as client:
        request = PauseRequest(
            options=MutationOptions(idempotency_key="by-hand"),
            target=AllTargets(),
            pause=PauseSpec(mode=PauseMode.DRAIN, admission=AdmissionPolicy.QUEUE),
        )
        async for _ in client.submit(request):
            pass
    result = await admin.step(ResumeStep())
    assert all(each.error is not None for each in result.participants)
    assert all(
        each.error.code is AdminErrorCode.VERIFICATION_FAILED for each in result.participants if each.error
    )
    assert all(rank.paused for rank in admin.engine.world.fleet.members("g"))
    assert [each.paused for each in await admin.adapter.read_back(admin.ids)] == [True, True]


@pytest.mark.clause("AD-37")
async def test_a_lie_of_the_engine_fails_the_step(admin: AdminRig) -> None:
    admin.engine.world.fleet.arm(FaultKind.LIE, "g/1", "PauseStep")
    result = await admin.step(pause())
    assert any(each.error is not None for each in result.participants)


@pytest.mark.clause("AD-31")
async def test_a_failed_mutation_names_the_rank_and_what_is_left(admin: AdminRig) -> None:
    admin.engine.world.fleet.arm(FaultKind.ERROR, "g/1", "PauseStep")
    result = await admin.step(pause())
    by_id = {each.participant_id: each for each in result.participants}
    assert by_id[ParticipantId("g/1")].error is not None


@pytest.mark.clause("AD-43", "AD-44")
async def test_resources_are_released_and_restored_under_the_engines_epoch(admin: AdminRig) -> None:
    assert_all_ok(await admin.step(pause()))
    kinds = (ResourceKind.WEIGHTS, ResourceKind.KV_CACHE)
    released = await admin.step(ReleaseStep(kinds=kinds, weight_retention=WeightRetention.OFFLOAD_TO_HOST))
    assert_all_ok(released)
    assert all({amount.kind for amount in each.amounts} == set(kinds) for each in released.participants)
    assert [each.released for each in await admin.adapter.read_back(admin.ids)] == [frozenset(kinds)] * 2
    assert_all_ok(await admin.step(RestoreStep(kinds=(ResourceKind.KV_CACHE,))))
    back = await admin.adapter.read_back(admin.ids)
    assert [each.released for each in back] == [frozenset({ResourceKind.WEIGHTS})] * 2
    assert_all_ok(await admin.step(RestoreStep(kinds=kinds)))
    assert [each.released for each in await admin.adapter.read_back(admin.ids)] == [frozenset()] * 2
    assert_all_ok(await admin.step(RestoreStep(kinds=kinds)))


async def test_a_release_of_a_running_engine_is_refused_untouched(admin: AdminRig) -> None:
    result = await admin.step(ReleaseStep(kinds=(ResourceKind.KV_CACHE,)))
    assert all(each.error is not None and not each.changed for each in result.participants)


DISK = DiskSource(path="/weights/second", format=WeightFormat.SAFETENSORS)


@pytest.mark.clause("AD-37", "AD-45")
async def test_weights_are_checked_applied_verified_and_undone(admin: AdminRig) -> None:
    fleet = admin.engine.world.fleet
    prepare = PrepareWeightsStep(model="public", source=DISK, weight_version="v1")
    assert_all_ok(await admin.step(prepare, operation="up", step=1))
    assert {rank.label for rank in fleet.members("g")} == {"v0"}
    assert_all_ok(await admin.step(pause(), operation="up", step=2))
    apply = ApplyWeightsStep(model="public", source=DISK, weight_version="v1")
    applied = await admin.step(apply, operation="up", step=3)
    assert_all_ok(applied)
    assert {(rank.label, rank.content) for rank in fleet.members("g")} == {("v1", DISK.path)}
    verified = await admin.step(
        VerifyWeightsStep(model="public", weight_version="v1"), operation="up", step=4
    )
    assert_all_ok(verified)
    assert all(each.verified_by is not None for each in verified.participants)
    assert_all_ok(
        await admin.step(CommitWeightsStep(model="public", weight_version="v1"), operation="up", step=5)
    )
    back_source = dataclasses.replace(DISK, path="/weights/first")
    undo = UndoWeightsStep(model="public", previous_source=back_source, previous_weight_version="v0b")
    assert_all_ok(await admin.step(undo, operation="up", step=6))
    assert {(rank.label, rank.content) for rank in fleet.members("g")} == {("v0b", back_source.path)}
    assert admin.adapter.snapshot().weight_version == "v0b"


@pytest.mark.clause("AD-37")
async def test_a_verification_of_another_version_fails(admin: AdminRig) -> None:
    result = await admin.step(VerifyWeightsStep(model="m", weight_version="v9"))
    assert all(each.error is not None for each in result.participants)


async def test_what_only_native_steps_could_do_is_refused_as_unsupported(admin: AdminRig) -> None:
    with pytest.raises(Unsupported):
        await admin.step(PrepareWeightsStep(model="m", source=DISK, weight_version="v1", hold_previous=True))
    assert admin.engine.world.fleet.effects == []


@pytest.mark.clause("AD-47")
@pytest.mark.parametrize(
    ("value", "disposition"), [(4, ChangeDisposition.APPLIED), (100_000, ChangeDisposition.REJECTED)]
)
async def test_a_change_is_judged_without_being_made(
    admin: AdminRig, value: int, disposition: ChangeDisposition
) -> None:
    change = (ServingChange(field=ReconfigurableField.CAPACITY, value=value),)
    result = await admin.step(JudgeReconfigureStep(changes=change))
    assert_all_ok(result)
    assert [each.changes[0].disposition for each in result.participants] == [disposition] * 2
    assert not any(each.changed for each in result.participants)
    assert all(
        rank.serving[ReconfigurableField.CAPACITY] == 8 for rank in admin.engine.world.fleet.members("g")
    )


@pytest.mark.clause("AD-47")
async def test_serving_is_reconfigured_with_its_effective_values(admin: AdminRig) -> None:
    change = (ServingChange(field=ReconfigurableField.CAPACITY, value=4),)
    result = await admin.step(ReconfigureStep(changes=change))
    assert_all_ok(result)
    assert [each.changes[0].effective_value for each in result.participants] == ["4", "4"]
    told = [dict(each.serving) for each in await admin.adapter.read_back(admin.ids)]
    assert told == [{ReconfigurableField.CAPACITY: 4}] * 2


@pytest.mark.clause("AD-46")
async def test_a_profile_runs_under_our_id_until_it_is_stopped(admin: AdminRig) -> None:
    start = StartProfileStep(profile_id="prof-1", kinds=(ProfilerKind.CPU,))
    assert_all_ok(await admin.step(start))
    assert [each.profiles for each in await admin.adapter.read_back(admin.ids)] == [frozenset({"prof-1"})] * 2
    stopped = await admin.step(StopProfileStep(profile_id="prof-1"))
    assert_all_ok(stopped)
    assert all(each.artifacts for each in stopped.participants)
    assert [each.profiles for each in await admin.adapter.read_back(admin.ids)] == [frozenset()] * 2
    unknown = await admin.step(StopProfileStep(profile_id="nobody"))
    assert all(each.error is not None for each in unknown.participants)


async def test_a_flush_of_a_kind_that_is_not_advertised_is_refused(admin: AdminRig) -> None:
    for rank in admin.engine.world.fleet.members("g"):
        rank.capabilities = dataclasses.replace(rank.capabilities, cache_kinds=frozenset({CacheKind.PREFIX}))
    flush = FlushStep(kinds=(CacheKind.ENCODER,), busy_policy=BusyPolicy.FAIL)
    with pytest.raises(Unsupported):
        await admin.step(flush)


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_refused_token_fails_the_step_and_never_shows(admin: AdminRig, token: str) -> None:
    settings = dataclasses.replace(admin.settings, admin_token=token)
    call = step_call(admin.adapter, pause())
    async with running(settings) as adapter:
        result = await adapter.execute_step(call, lambda _: None)
        assert all(each.error is not None and not each.changed for each in result.participants)
        assert ADMIN_TOKEN not in repr(settings)
        await adapter.probe()
        told = adapter.capabilities.admin_refusal
        assert "refuses the credential" in told
        assert "admin.token" in told, "which key mends it"
    assert admin.adapter.capabilities.admin_refusal == ""


@pytest.mark.clause("AD-22", "AD-36")
async def test_a_step_that_is_given_up_goes_on_and_its_repetition_attaches(admin: AdminRig) -> None:
    held = Held(admin.engine, PauseStep)
    call = step_call(admin.adapter, pause(), operation="op-h")
    await held.give_up(admin.adapter, call)
    held.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        assert_all_ok(await admin.adapter.execute_step(call, lambda _: None))
    assert admin.steps_of(PauseStep) == 1


@pytest.mark.clause("AD-25", "AD-36")
async def test_an_engine_that_goes_in_the_midst_of_a_step_is_away_and_a_repetition_attaches_when_it_is_back(
    admin: AdminRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iop.adapters.openengine.admin_rpc.REATTACH_MAX_S", 0.1)
    held = Held(admin.engine, PauseStep)
    async with contextlib.AsyncExitStack() as line:
        relay = await line.enter_async_context(TcpRelay(admin.engine.address).running())
        settings = dataclasses.replace(admin.settings, admin_target=relay.address)
        async with running(settings) as adapter, asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            await adapter.probe()
            call = step_call(adapter, pause(), operation="op-a")

            async def is_told_as_away() -> None:
                with pytest.raises(Unavailable):
                    await adapter.execute_step(call, lambda _: None)

            tasks.create_task(is_told_as_away())
            await held.reached.wait()
            await line.aclose()
    held.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        assert_all_ok(await admin.adapter.execute_step(call, lambda _: None))
    assert admin.steps_of(PauseStep) == 1


@pytest.mark.clause("AD-36", "AD-12")
@pytest.mark.parametrize(
    "body",
    [pause(), StartProfileStep(profile_id="p", kinds=(ProfilerKind.CPU,), label="")],
    ids=["pause", "profile"],
)
async def test_a_step_that_is_sent_again_with_less_time_left_attaches(admin: AdminRig, body: Step) -> None:
    call = step_call(admin.adapter, body, operation="op-t")
    first = await admin.adapter.execute_step(call, lambda _: None)
    again = await admin.adapter.execute_step(
        dataclasses.replace(call, timeout_s=call.timeout_s - 1.5), lambda _: None
    )
    assert_all_ok(first)
    assert again == first
    assert admin.steps_of(type(body)) == 1


@pytest.mark.clause("AD-36", "AD-39")
async def test_a_newer_step_ends_what_the_engine_still_does_for_one_that_was_given_up(
    admin: AdminRig,
) -> None:
    held = Held(admin.engine, PauseStep)  # by work in flight that does not end
    call = step_call(admin.adapter, pause(), operation="op-g")
    await held.give_up(admin.adapter, call)
    undo = step_call(admin.adapter, ResumeStep(), operation="op-g", step=2)
    async with asyncio.timeout(PATIENCE_S):
        assert_all_ok(await admin.adapter.execute_step(undo, lambda _: None))
    store = admin.engine.world.store
    assert [record.moves.state.name for record in store.records.values()] == ["CANCELLED"]
    assert store.desired.pauses == {}
    assert not any(rank.paused for rank in admin.engine.world.fleet.ranks.values())


@pytest.mark.clause("AD-32", "AD-36")
@pytest.mark.parametrize("undoes", ["weights", "pause"])
async def test_a_step_that_was_given_up_is_ended_before_it_is_taken_back(
    admin: AdminRig, undoes: str
) -> None:
    fleet = admin.engine.world.fleet
    held = Held(admin.engine, ApplyWeightsStep)
    assert_all_ok(await admin.step(pause(), operation="up", step=1))
    apply = ApplyWeightsStep(model="public", source=DISK, weight_version="v1")
    await held.give_up(admin.adapter, step_call(admin.adapter, apply, operation="up", step=2))
    undo: Step = ResumeStep()
    if undoes == "weights":
        undo = UndoWeightsStep(model="public", previous_source=None, previous_weight_version="v0")
    assert_all_ok(await admin.step(undo, operation="up", step=3))
    async with admin.other() as other:
        assert all(each.state.is_terminal for each in (await other.list_operations()).operations)
    held.gate.set()
    await asyncio.sleep(0.1)  # what was given up would have its effect now
    assert {(rank.label, rank.content) for rank in fleet.members("g")} == {("v0", "base")}
    assert {rank.paused for rank in fleet.members("g")} == {undoes == "weights"}


async def test_the_http_adapter_carries_the_same_control(admin: AdminRig) -> None:
    config = AdapterConfig(
        name="main",
        type="openai_compat",
        settings=OpenAICompatSettings(endpoint=f"http://127.0.0.1:{closed_port()}"),
        engine_control=admin.settings,
    )
    async with started(config) as adapter:
        assert isinstance(adapter, OpenAICompatAdapter)
        assert adapter.capabilities.admin
        await adapter.probe()
        assert_all_ok(await admin.step(pause(), adapter=adapter))
        assert adapter.snapshot().weight_version == "v0"
        back = await adapter.read_back(admin.ids)
        assert [each.paused for each in back] == [True, True]
        assert all(each.verified_by in {VerificationMethod.DIGEST, VerificationMethod.LABEL} for each in back)


async def test_a_restarted_engine_has_another_instance(admin: AdminRig) -> None:
    admin.core.instance = "engine-2"
    back = await admin.adapter.read_back(admin.ids)
    assert {each.instance for each in back} == {"engine-2"}


async def test_a_closed_adapter_refuses_runs_unsent(rig: RunRig) -> None:
    await rig.adapter.aclose()
    run = await run_to_end(rig, rig.request())
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.before_start


async def test_a_closed_control_says_unavailable(admin: AdminRig) -> None:
    call = step_call(admin.adapter, ResumeStep())
    await admin.adapter.aclose()
    with pytest.raises(Unavailable):
        await admin.adapter.execute_step(call, lambda _: None)


# ---- what Edges tell each other ----


def passed(request: generation_pb2.GenerateRequest, **metadata: str) -> RunRequest:
    told = {"iop-openengine-request": "1", **{f"iop-{name}": value for name, value in metadata.items()}}
    return with_input(request.SerializeToString(), metadata=told)


def read_lines(run: RunRecorder) -> list[generation_pb2.GenerateResponse]:
    return [
        generation_pb2.GenerateResponse.FromString(base64.b64decode(line)) for line in run.text.splitlines()
    ]


@pytest.mark.clause("SF-24", "EN-118")
async def test_an_openengine_run_passes_request_and_answer_as_they_are(rig: RunRig) -> None:
    request = generation_pb2.GenerateRequest(request_id="theirs", model="public", prompt="p", lora_name="l")
    request.stopping.max_tokens = 2
    request.sampling.num_sequences = 2
    run = await run_to_end(rig, passed(request))
    seen = rig.engine.requests[0]
    assert (seen.request_id, seen.model) == ("run-1", "m")
    assert (seen.prompt, seen.lora_name, seen.sampling.num_sequences) == ("p", "l", 2)
    kinds = [message.WhichOneof("event") for message in read_lines(run)]
    assert kinds == ["token"] * 4 + ["finished"] * 2
    assert not any(message.HasField("usage") for message in read_lines(run))
    assert run.terminal is not None
    assert run.terminal.type is RunEventType.COMPLETE
    assert run.terminal.usage is not None
    assert run.terminal.usage.completion_tokens == 4


@pytest.mark.clause("SF-20", "SF-24")
async def test_an_engines_error_is_passed_on_before_the_runs_own(rig: RunRig) -> None:
    rig.engine.fail_after = 1
    run = await run_to_end(rig, passed(generation_pb2.GenerateRequest(prompt="p")))
    last = read_lines(run)[-1]
    assert last.error.message == "ended by an operator"
    assert run.terminal is not None
    assert run.terminal.type is RunEventType.ERROR


async def test_a_passed_request_that_is_none_never_reaches_the_engine(rig: RunRig) -> None:
    run = await run_to_end(rig, with_input(b"\xff\xff\xff", metadata={"iop-openengine-request": "1"}))
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.code == "invalid_request"
    assert rig.engine.requests == []


@pytest.mark.clause("SF-13", "SF-21", "SF-24")
async def test_request_id_hops_and_priority_go_on_where_they_are_taken(rig: RunRig) -> None:
    hello = generation_pb2.GenerateRequest(prompt="p")
    told = {"request-id": "r-9", "via": "a, b", "priority": "-2"}
    await run_to_end(rig, passed(hello, **told))
    seen = rig.engine.metadata[0]
    assert (seen["x-request-id"], seen["iop-via"]) == ("r-9", "a, b")
    assert "openengine-priority" not in seen
    rig.engine.takes_priority = True
    await rig.adapter.probe()
    await run_to_end(rig, passed(hello, **told))
    assert rig.engine.metadata[1]["openengine-priority"] == "-2"


@pytest.mark.clause("SF-24", "EN-65")
async def test_a_server_of_whole_chats_gets_tools_and_whatever_else_the_chat_says(rig: RunRig) -> None:
    rig.engine.prompt_formats = ["chat_messages", "openai_chat"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rig.engine.finish_message = json.dumps({"finish_reason": "tool_calls", "tool_calls": [call]})
    await rig.adapter.probe()
    tools = [{"type": "function", "function": {"name": "f"}}]
    run = await run_to_end(
        rig, with_input(chat_input(2, tools=tools, logit_bias={"1": 2}, stop=["x"], stop_token_ids=[4]))
    )
    seen = rig.engine.requests[0]
    assert json.loads(seen.prompt) == {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": tools,
        "logit_bias": {"1": 2},
    }
    assert seen.stopping.max_tokens == 2
    assert [condition.stop_token_id for condition in seen.stopping.conditions][1] == 4
    assert run.terminal is not None
    assert run.terminal.finish_reasons == ("tool_calls",)
    assert json.loads(run.terminal.metadata["openai_tool_calls"]) == [call]


@pytest.mark.clause("SF-10")
@pytest.mark.parametrize("name", ["logit_bias", "echo", "suffix", "functions"])
async def test_a_field_that_a_prompt_cannot_say_is_refused_by_name(rig: RunRig, name: str) -> None:
    run = await run_to_end(rig, with_input(chat_input(2, **{name: {"1": 2}})))
    assert run.terminal is not None
    assert run.terminal.error is not None
    assert run.terminal.error.message.startswith(name)
    assert rig.engine.requests == []


@pytest.mark.clause("SF-22")
async def test_the_snapshot_tells_what_the_engine_says_of_each_target(rig: RunRig) -> None:
    rig.engine.prompt_formats = ["chat_messages"]
    await rig.adapter.probe()
    (told,) = rig.adapter.snapshot().model_infos.values()
    assert list(model_pb2.ModelInfo.FromString(told).tokenizer_modes) == ["chat_messages"]


@pytest.mark.clause("AD-33")
async def test_the_weights_that_a_run_was_told_of_are_the_engines(rig: RunRig) -> None:
    assert rig.adapter.snapshot().weight_version == ""
    await run_to_end(rig, with_input(chat_input(1)))
    assert rig.adapter.snapshot().weight_version == "v7"
