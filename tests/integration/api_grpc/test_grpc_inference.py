"""Inference and Control over a real channel, with a scripted port: the acceptance boundary and discovery."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any, Self

import grpc
import pytest
from grpc_admin_rig import ScriptedOperations, bearer, refused
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from iop.admin.enums import EngineRole
from iop.api.grpc import ports
from iop.api.grpc.auth import ApiKeyDirectory, ApiKeyGrant, PrincipalDirectory, secret_sha256
from iop.api.grpc.control_service import CONTROL_METHODS
from iop.api.grpc.listeners import admin_listener, inference_listener
from iop.api.grpc.server import ListenerSettings
from iop.core.errors import Cancelled, Draining, NotFound, Overloaded, Unavailable
from iop.pb.openengine.v1 import (
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    openengine_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

MODEL = ports.ModelInfo(
    model_id="org/Real",
    served_model_name="fast",
    served_model_aliases=("fast-latest",),
    max_context_length=0,
    supports_text_input=True,
    supports_lora=False,
    generation=ports.GenerationCapabilities(max_num_sequences=2, supports_priority=True),
)
HELLO = generation_pb2.GenerateRequest(request_id="r-1", model="fast", prompt="hello")

Played = tuple[ports.GenerationEvent, ports.Usage | None]


def tokens(index: int, text: str) -> Played:
    scored = ports.ScoredToken(token_id=5, token=text)
    return ports.OutputTokens(output_index=index, tokens=(scored,), text=text), None


def finished(index: int, usage: ports.Usage | None = None) -> Played:
    stop = ports.StopMatch(eos_token_id=2)
    done = ports.OutputFinished(output_index=index, reason=ports.OutputFinish.STOP, stop_match=stop)
    return done, usage


USAGE = ports.Usage(prompt_tokens=3, completion_tokens=2, cached_prompt_tokens=0)


class ScriptedStream:
    def __init__(self, events: list[Played], error: BaseException | None, versions: list[str]) -> None:
        self._events = list(events)
        self._error = error
        self._versions = versions
        self.closed = asyncio.Event()
        self.hold: asyncio.Event | None = None

    @property
    def weight_version(self) -> str:
        return self._versions[0] if self._events else self._versions[-1]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-iop-queue-ms", "0"),)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Played:
        if self._events:
            return self._events.pop(0)
        if self.hold is not None:
            await self.hold.wait()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closed.set()


@dataclasses.dataclass
class ScriptedPort:
    events: list[Played] = dataclasses.field(default_factory=lambda: [tokens(0, "hi"), finished(0, USAGE)])
    refuses: BaseException | None = None
    error: BaseException | None = None
    versions: list[str] = dataclasses.field(default_factory=lambda: ["v1"])
    is_serving: bool = True
    calls: list[ports.GenerateCall] = dataclasses.field(default_factory=list)
    aborted: list[tuple[str, str | None]] = dataclasses.field(default_factory=list)
    stream: ScriptedStream | None = None
    hold: asyncio.Event | None = None

    def model_info(self, model: str) -> ports.ModelInfo:
        if model not in {"", "fast", "fast-latest"}:
            raise NotFound("no such model", reason="MODEL_NOT_FOUND")
        return MODEL

    async def generate(self, call: ports.GenerateCall) -> ScriptedStream:
        self.calls.append(call)
        if self.refuses is not None:
            raise self.refuses
        self.stream = ScriptedStream(self.events, self.error, self.versions)
        self.stream.hold = self.hold
        return self.stream

    def server_info(self) -> ports.ServerInfo:
        return ports.ServerInfo(
            engine_name="scripted",
            engine_version="1",
            instance_id="i",
            supported_models=("fast",),
            capacity=ports.Deployment(max_loras=0),
        )

    async def load(self, *, include_per_rank: bool) -> ports.LoadInfo:
        ranks = (ports.RankLoad(data_parallel_rank=0, running_requests=0),) if include_per_rank else ()
        return ports.LoadInfo(instance_id="i", running_requests=0, ranks=ranks)

    async def health(
        self,
        *,
        model: str,
        role: EngineRole | None,
        include_probe: bool,
        may_use: ports.MayUse = ports.any_model,
    ) -> ports.HealthReport:
        self.model_info(model)
        name = f"{role} {include_probe}"
        part = ports.HealthPart(name=name, state=ports.HealthState.DRAINING, message="m")
        return ports.HealthReport(state=ports.HealthState.DRAINING, checks=(part,))

    async def abort(self, request_id: str, *, caller: str | None) -> ports.AbortOutcome:
        self.aborted.append((request_id, caller))
        return ports.AbortOutcome.ALREADY_FINISHED

    async def abort_all(self) -> int:
        self.aborted.append(("*", ""))
        return 2


KEYS = ApiKeyDirectory(
    [
        ApiKeyGrant(name="team-a", key_sha256=secret_sha256("key-a"), models=frozenset({"fast"})),
        ApiKeyGrant(name="team-b", key_sha256=secret_sha256("key-b"), models=frozenset({"other"})),
    ]
)


@pytest.fixture
def port() -> ScriptedPort:
    return ScriptedPort()


@dataclasses.dataclass
class Opened:
    channel: grpc.aio.Channel
    inference: Any
    control: Any


async def open_listener(
    port: ScriptedPort, keys: ApiKeyDirectory | None = None, **options: Any
) -> AsyncIterator[Opened]:
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
    listener = inference_listener(port, port, keys or ApiKeyDirectory(), settings, **options)
    async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
        yield Opened(
            channel=channel,
            inference=openengine_pb2_grpc.InferenceStub(channel),
            control=openengine_pb2_grpc.ControlStub(channel),
        )


@pytest.fixture
async def server(port: ScriptedPort) -> AsyncIterator[Opened]:
    async for opened in open_listener(port):
        yield opened


@pytest.fixture
async def keyed(port: ScriptedPort) -> AsyncIterator[Opened]:
    async for opened in open_listener(port, KEYS):
        yield opened


async def generate(server: Opened, request: Any = HELLO, metadata: Any = ()) -> list[Any]:
    return [message async for message in server.inference.Generate(request, metadata=metadata, timeout=60)]


# ---------------------------------------------------------------------------------------------- Generate


@pytest.mark.clause("SF-20")
async def test_output_index_is_always_set_and_usage_only_on_the_last(
    server: Opened, port: ScriptedPort
) -> None:
    port.events = [tokens(0, "a"), tokens(1, "b"), finished(1), finished(0, USAGE)]
    messages = await generate(server)
    assert [message.WhichOneof("event") for message in messages] == ["token", "token", "finished", "finished"]
    for message, index in zip(messages, [0, 1, 1, 0], strict=True):
        event = getattr(message, message.WhichOneof("event"))
        assert event.HasField("output_index")
        assert event.output_index == index
        assert message.request_id == "r-1"
    assert [message.HasField("usage") for message in messages] == [False, False, False, True]
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.HasField("cached_prompt_tokens")
    assert not usage.HasField("reasoning_tokens")
    assert messages[-1].finished.stop_match.eos_token_id == 2


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", reason="QUEUE_FULL"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Draining("paused", reason="PAUSED"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_before_acceptance_a_refusal_is_a_status(
    server: Opened, port: ScriptedPort, error: Any, code: grpc.StatusCode
) -> None:
    port.refuses = error
    async with refused(code) as refusal:
        await generate(server)
    assert refusal.info().reason == error.reason


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (Unavailable("gone"), error_pb2.ERROR_CODE_INTERNAL, True),
        (Overloaded("slow"), error_pb2.ERROR_CODE_OVERLOADED, True),
        (Draining("ended"), error_pb2.ERROR_CODE_DRAINING, True),
        (Cancelled("stop"), error_pb2.ERROR_CODE_CANCELLED, False),
        (ZeroDivisionError("secret"), error_pb2.ERROR_CODE_INTERNAL, False),
    ],
)
async def test_after_acceptance_a_failure_is_one_terminal_event_and_the_call_ends_with_ok(
    server: Opened, port: ScriptedPort, error: Any, code: int, retryable: bool
) -> None:
    port.events = [tokens(0, "a")]
    port.error = error
    call = server.inference.Generate(HELLO, timeout=60)
    messages = [message async for message in call]
    assert await call.code() is grpc.StatusCode.OK
    assert [message.WhichOneof("event") for message in messages] == ["token", "error"]
    assert (messages[-1].error.code, messages[-1].error.retryable) == (code, retryable)
    assert "secret" not in messages[-1].error.message
    assert port.stream is not None
    assert port.stream.closed.is_set()


@pytest.mark.clause("SF-20")
async def test_a_failure_that_the_port_reports_as_an_event_keeps_its_code_and_usage(
    server: Opened, port: ScriptedPort
) -> None:
    failed = ports.RequestFailed(code="KV_TRANSFER_FAILED", message="m", retryable=True)
    port.events = [(failed, USAGE)]
    (message,) = await generate(server)
    assert message.error.code == error_pb2.ERROR_CODE_KV_TRANSFER_FAILED
    assert message.usage.total_tokens == 5


@pytest.mark.clause("AD-33")
async def test_weight_versions_stand_in_initial_and_trailing_metadata(
    server: Opened, port: ScriptedPort
) -> None:
    port.versions = ["v1", "v2"]
    call = server.inference.Generate(HELLO, timeout=60)
    assert ("openengine-weight-version", "v1") in tuple(await call.initial_metadata())
    async for _ in call:
        pass
    assert ("openengine-weight-version", "v2") in tuple(await call.trailing_metadata())


@pytest.mark.clause("AD-33")
async def test_an_unknown_weight_version_is_said_to_be_unknown(server: Opened, port: ScriptedPort) -> None:
    port.versions = [""]
    call = server.inference.Generate(HELLO, timeout=60)
    assert ("openengine-weight-version", "unknown") in tuple(await call.initial_metadata())
    call.cancel()


async def test_a_caller_that_leaves_closes_the_generation(server: Opened, port: ScriptedPort) -> None:
    port.events = [tokens(0, "a")]
    port.hold = asyncio.Event()
    call = server.inference.Generate(HELLO, timeout=60)
    await call.read()
    call.cancel()
    assert port.stream is not None
    async with asyncio.timeout(30):
        await port.stream.closed.wait()


@pytest.mark.clause("SF-21")
async def test_metadata_hints_reach_the_port(server: Opened, port: ScriptedPort) -> None:
    await generate(server, metadata=(("openengine-routing-key", "k"), ("openengine-priority", "-1")))
    assert port.calls[0].hints == ports.RoutingHints(routing_key="k", priority=-1)


@pytest.mark.clause("SF-21")
@pytest.mark.parametrize(
    "metadata",
    [
        (("openengine-priority", "soon"),),
        (("openengine-target-dp-rank", "1"), ("openengine-target-dp-rank", "1")),
        (("openengine-routing-key", "a"), ("openengine-routing-key", "b")),
    ],
)
async def test_malformed_or_repeated_metadata_is_refused_before_acceptance(
    server: Opened, port: ScriptedPort, metadata: Any
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await generate(server, metadata=metadata)
    assert port.calls == []


@pytest.mark.clause("SF-32", "SF-20")
async def test_a_refused_generation_stands_in_the_log_under_its_request_id(
    server: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "iop.api.grpc.interceptors")
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await generate(server, metadata=(("openengine-priority", "x"),))
    (told,) = [record for record in caplog.records if record.message == "rpc.refused"]
    assert (told.request_id, told.reason) == ("r-1", "MALFORMED_METADATA")  # type: ignore[attr-defined]
    async with refused(grpc.StatusCode.NOT_FOUND):
        await server.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="slow"))
    assert not hasattr(caplog.records[-1], "request_id"), "of another call"


@pytest.mark.clause("SF-20", "SF-22")
@pytest.mark.parametrize(
    ("request_message", "code"),
    [
        (generation_pb2.GenerateRequest(model="fast"), grpc.StatusCode.INVALID_ARGUMENT),
        (generation_pb2.GenerateRequest(model="slow", prompt="p"), grpc.StatusCode.NOT_FOUND),
        (
            generation_pb2.GenerateRequest(prompt="p", request_id="x" * 129),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1])),
            grpc.StatusCode.UNIMPLEMENTED,
        ),
        *(
            (
                generation_pb2.GenerateRequest(
                    prompt="p", sampling=generation_pb2.SamplingParams(**{name: value})
                ),
                grpc.StatusCode.INVALID_ARGUMENT,
            )
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
            for value in (math.nan, math.inf, -math.inf)
        ),
        (generation_pb2.GenerateRequest(prompt="p", lora_name="l"), grpc.StatusCode.UNIMPLEMENTED),
        (
            generation_pb2.GenerateRequest(
                prompt="p", sampling=generation_pb2.SamplingParams(num_sequences=3)
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            generation_pb2.GenerateRequest(
                prompt="p",
                stopping=generation_pb2.StoppingOptions(conditions=[generation_pb2.StopCondition()]),
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            generation_pb2.GenerateRequest(
                prompt="p",
                response=generation_pb2.ResponseOptions(
                    output_candidates=generation_pb2.CandidateTokenSelection(top_n=1)
                ),
            ),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            generation_pb2.GenerateRequest(prompt="p", guided=generation_pb2.GuidedDecoding()),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_bad_or_unadvertised_requests_are_refused_before_acceptance(
    server: Opened, port: ScriptedPort, request_message: Any, code: grpc.StatusCode
) -> None:
    async with refused(code):
        await generate(server, request_message)
    assert port.calls == []


async def test_absent_options_stay_absent_and_zeros_are_values(server: Opened, port: ScriptedPort) -> None:
    request = generation_pb2.GenerateRequest(
        prompt="p",
        sampling=generation_pb2.SamplingParams(temperature=0.0, num_sequences=2),
        stopping=generation_pb2.StoppingOptions(
            max_tokens=0,
            conditions=[
                generation_pb2.StopCondition(stop_text="."),
                generation_pb2.StopCondition(stop_token_id=0),
            ],
        ),
    )
    await generate(server, request)
    call = port.calls[0]
    assert call.sampling == ports.SamplingParams(temperature=0.0, num_sequences=2)
    assert call.stopping == ports.Stopping(max_tokens=0, stop=(".",), stop_token_ids=(0,))
    assert call.request_id


# ---------------------------------------------------------------------------------------------- Control


@pytest.mark.clause("AD-50")
@pytest.mark.parametrize("revision", [1, None])
async def test_server_info_reveals_an_admin_profile_where_there_is_one(
    port: ScriptedPort, revision: int | None
) -> None:
    async for opened in open_listener(port, admin_profile_revision=revision):
        info = await opened.control.GetServerInfo(server_pb2.GetServerInfoRequest())
        if revision is None:
            assert not info.HasField("extra")
        else:
            assert info.extra["openengine.admin"]["profile_revision"] == revision
        assert info.schema_revision == 1
        assert info.engine_role == server_pb2.ENGINE_ROLE_AGGREGATED


@pytest.mark.clause("SF-22")
async def test_unknown_is_absent_and_zero_is_a_value(server: Opened) -> None:
    info = await server.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert info.capacity.HasField("max_loras")
    assert not info.capacity.HasField("kv_block_size")
    model = await server.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast-latest"))
    assert model.HasField("max_context_length")
    assert model.max_context_length == 0
    assert not model.HasField("max_output_tokens")
    assert model.HasField("supports_lora")
    assert not model.supports_lora
    assert not model.HasField("supports_multimodal")
    load = await server.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True))
    assert load.HasField("running_requests")
    assert not load.HasField("queued_requests")
    assert load.ranks[0].HasField("data_parallel_rank")


async def test_health_passes_its_arguments_and_report(server: Opened) -> None:
    request = lifecycle_pb2.HealthRequest(
        model="fast", role=server_pb2.ENGINE_ROLE_DECODE, include_inference_probe=True
    )
    report = await server.control.Health(request)
    assert report.state == lifecycle_pb2.HEALTH_STATE_DRAINING
    assert report.checks[0].name == f"{EngineRole.DECODE} True"
    async with refused(grpc.StatusCode.NOT_FOUND):
        await server.control.Health(lifecycle_pb2.HealthRequest(model="nobody"))


@pytest.mark.clause("AD-103", "SF-23")
@pytest.mark.parametrize(
    ("rpc", "request_message"),
    [
        ("Abort", lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())),
        ("LoadLora", lora_pb2.LoadLoraRequest()),
        ("UnloadLora", lora_pb2.UnloadLoraRequest(lora_name="x")),
    ],
)
async def test_privileged_calls_are_off_and_name_their_replacement(
    server: Opened, port: ScriptedPort, rpc: str, request_message: Any
) -> None:
    async with refused(grpc.StatusCode.PERMISSION_DENIED) as refusal:
        await getattr(server.control, rpc)(request_message)
    assert refusal.info().reason == "PRIVILEGED_CALL"
    assert refusal.info().metadata["replacement"]
    assert port.aborted == []


@pytest.mark.clause("AD-103")
async def test_the_config_can_turn_privileged_calls_on(port: ScriptedPort) -> None:
    async for opened in open_listener(port, is_privileged_allowed=True):
        request = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
        answer = await opened.control.Abort(request)
        assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await opened.control.LoadLora(lora_pb2.LoadLoraRequest())
    assert port.aborted == [("*", "")]


@pytest.mark.clause("SF-23")
@pytest.mark.parametrize(
    ("request_message", "code"),
    [
        (lifecycle_pb2.AbortRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (lifecycle_pb2.AbortRequest(request_id=""), grpc.StatusCode.INVALID_ARGUMENT),
        (lifecycle_pb2.AbortRequest(kv_session=kv_pb2.KvSessionRef()), grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_an_abort_must_say_what(server: Opened, request_message: Any, code: grpc.StatusCode) -> None:
    async with refused(code):
        await server.control.Abort(request_message)


@pytest.mark.clause("SF-23")
async def test_event_sources_and_adapters_are_honest_empty_lists(server: Opened) -> None:
    assert not (await server.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest())).sources
    assert not (await server.control.ListLoras(lora_pb2.ListLorasRequest())).adapters
    async with refused(grpc.StatusCode.UNIMPLEMENTED) as refusal:
        async for _ in server.control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest()):
            pass
    assert refusal.info().metadata["feature"] == "kv_events"


# ---------------------------------------------------------------------------------------------- keys


@pytest.mark.clause("SF-23")
async def test_with_keys_every_rpc_of_the_listener_needs_one(keyed: Opened, port: ScriptedPort) -> None:
    methods = [
        (service.name, method)
        for service in openengine_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert len(methods) == 11
    for service, method in methods:
        stub = keyed.inference if service == "Inference" else keyed.control
        async with refused(grpc.StatusCode.UNAUTHENTICATED):
            # The generated pool's class of the request, empty: a stranger's message is never looked at.
            answer = getattr(stub, method.name)(_empty(method.input_type.name), timeout=60)
            if method.server_streaming:
                async for _ in answer:
                    pass
            else:
                await answer
    assert port.calls == []


def _empty(name: str) -> Any:
    for module in (generation_pb2, kv_pb2, lifecycle_pb2, lora_pb2, model_pb2, server_pb2):
        if hasattr(module, name):
            return getattr(module, name)()
    raise AssertionError(name)


@pytest.mark.clause("SF-23")
async def test_a_key_covers_its_models_only(keyed: Opened, port: ScriptedPort) -> None:
    await generate(keyed, metadata=(("authorization", "Bearer key-a"),))
    assert port.calls[0].caller == "team-a"
    async with refused(grpc.StatusCode.PERMISSION_DENIED) as refusal:
        await generate(keyed, metadata=(("x-api-key", "key-b"),))
    assert refusal.info().reason == "MODEL_NOT_ALLOWED"


@pytest.mark.clause("SF-16", "SF-21")
async def test_priority_and_affinity_are_taken_only_from_keys_that_are_allowed_them(
    server: Opened, keyed: Opened, port: ScriptedPort
) -> None:
    hints = (("openengine-routing-key", "k"), ("openengine-priority", "2"))
    await generate(server, metadata=hints)
    await generate(keyed, metadata=(*hints, ("authorization", "Bearer key-a")))
    assert [call.hints for call in port.calls] == [
        ports.RoutingHints(routing_key="k", priority=2),
        ports.RoutingHints(),
    ]


@pytest.mark.clause("SF-23")
async def test_an_abort_carries_the_name_of_its_key(keyed: Opened, port: ScriptedPort) -> None:
    request = lifecycle_pb2.AbortRequest(request_id="r-1")
    answer = await keyed.control.Abort(request, metadata=(("authorization", "bearer key-b"),))
    assert answer.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    assert port.aborted == [("r-1", "team-b")]


# ---------------------------------------------------------------------------------------------- health, reflection


@pytest.mark.clause("AD-06")
async def test_health_is_per_service_and_tells_whether_a_model_can_admit(
    keyed: Opened, port: ScriptedPort
) -> None:
    health: Any = health_pb2_grpc.HealthStub(keyed.channel)
    for is_serving in (True, False):
        port.is_serving = is_serving
        for service in ("openengine.v1.Inference", "openengine.v1.Control", ""):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is is_serving
    async with refused(grpc.StatusCode.NOT_FOUND):
        await health.Check(health_pb2.HealthCheckRequest(service="openengine.v1.OpenEngineAdmin"))


@pytest.mark.clause("AD-06")
async def test_reflection_shows_inference_and_control_and_no_admin(server: Opened) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="openengine.v1.OpenEngineAdmin"),
        reflection_pb2.ServerReflectionRequest(file_by_filename="openengine/v1/admin.proto"),
    ]
    answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=60)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"openengine.v1.Inference", "openengine.v1.Control"} <= names
    assert "openengine.v1.OpenEngineAdmin" not in names
    assert all(answer.HasField("error_response") for answer in answers[1:])


# ---------------------------------------------------------------------------------------------- on the admin listener


@pytest.mark.clause("AD-103", "AD-101")
async def test_privileged_control_calls_live_on_the_admin_listener_under_permissions_of_their_own(
    port: ScriptedPort, operations: ScriptedOperations, principals: PrincipalDirectory
) -> None:
    settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
    listener = admin_listener(operations, principals, settings, control=port)
    everything = lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())
    async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
        control: Any = openengine_pb2_grpc.ControlStub(channel)
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            (bearer("operator"), grpc.StatusCode.PERMISSION_DENIED),
        ):
            async with refused(code):
                await control.Abort(everything, metadata=metadata)
            async with refused(code):
                await control.LoadLora(lora_pb2.LoadLoraRequest(), metadata=metadata)
        assert port.aborted == []
        await control.Abort(everything, metadata=bearer("admin"))
        await control.Abort(lifecycle_pb2.AbortRequest(request_id="r-9"), metadata=bearer("admin"))
        assert port.aborted == [("*", ""), ("r-9", None)]
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await control.LoadLora(lora_pb2.LoadLoraRequest(), metadata=bearer("admin"))
        await control.GetLoad(server_pb2.GetLoadRequest(), metadata=bearer("viewer"))
        inference: Any = openengine_pb2_grpc.InferenceStub(channel)
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            async for _ in inference.Generate(HELLO, metadata=bearer("admin")):
                pass
    assert operations.audited == [
        ("operator", "ABORT", "PERMISSION_DENIED"),
        ("operator", "LOAD_LORA", "PERMISSION_DENIED"),
        ("admin", "ABORT", "ALLOWED"),
        ("admin", "ABORT", "ALLOWED"),
        ("admin", "LOAD_LORA", "ALLOWED"),
    ]


def test_every_control_rpc_has_a_permission_for_the_admin_listener() -> None:
    methods = openengine_pb2.DESCRIPTOR.services_by_name["Control"].methods
    assert set(CONTROL_METHODS) == {f"/openengine.v1.Control/{method.name}" for method in methods}
