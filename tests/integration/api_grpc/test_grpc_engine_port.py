"""The reference engine behind a real OpenEngine listener."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_admin_rig import refused

from iop.admin.enums import AdmissionPolicy, PauseMode
from iop.api.grpc.auth import ApiKeyDirectory, ApiKeyGrant, secret_sha256
from iop.api.grpc.engine_port import EnginePort
from iop.api.grpc.listeners import inference_listener
from iop.api.grpc.server import ListenerSettings
from iop.engine import Engine, EngineState
from iop.engine.generation import GenerationRequest
from iop.pb.openengine.v1 import (
    error_pb2,
    generation_pb2,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

KEY_A = (("authorization", "Bearer key-a"),)
KEY_B = (("authorization", "Bearer key-b"),)


class SystemClock:
    def monotonic(self) -> Any:
        return time.monotonic()

    def unix_nanos(self) -> int:
        return time.time_ns()


@dataclass
class Served:
    engine: Engine
    inference: Any
    control: Any


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Served]:
    keys = ApiKeyDirectory(
        [
            ApiKeyGrant(name="team-a", key_sha256=secret_sha256("key-a"), may=frozenset({"priority"})),
            ApiKeyGrant(name="team-b", key_sha256=secret_sha256("key-b")),
        ]
    )
    async with Engine() as engine:
        port = EnginePort(engine, clock=SystemClock())
        settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
        listener = inference_listener(port, port, keys, settings)
        async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
            yield Served(
                engine=engine,
                inference=openengine_pb2_grpc.InferenceStub(channel),
                control=openengine_pb2_grpc.ControlStub(channel),
            )


def request(**changes: Any) -> generation_pb2.GenerateRequest:
    values: dict[str, Any] = {
        "prompt": "The harbour",
        "sampling": generation_pb2.SamplingParams(temperature=0.0),
        "stopping": generation_pb2.StoppingOptions(max_tokens=8, ignore_eos=True),
    }
    return generation_pb2.GenerateRequest(**{**values, **changes})


async def generate(served: Served, message: Any, metadata: Any = KEY_A) -> list[Any]:
    return [part async for part in served.inference.Generate(message, metadata=metadata, timeout=30)]


async def rest_of(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def text_of(messages: list[Any], index: int = 0) -> str:
    return "".join(m.token.text for m in messages if m.HasField("token") and m.token.output_index == index)


@pytest.mark.clause("SF-20")
async def test_text_and_token_ids_of_the_same_prompt_give_the_same_greedy_answer(served: Served) -> None:
    by_text = await generate(served, request(request_id="t-1"))
    ids = generation_pb2.TokenIds(
        ids=[served.engine.info.bos_token_id, *served.engine.tokenize("The harbour")]
    )
    by_ids = await generate(served, request(prompt=None, token_ids=ids))
    assert text_of(by_text)
    assert text_of(by_text) == text_of(by_ids)
    last = by_text[-1]
    assert last.finished.reason == generation_pb2.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens == 8
    assert last.usage.total_tokens == last.usage.prompt_tokens + 8
    assert {message.request_id for message in by_text} == {"t-1"}


@pytest.mark.clause("SF-20", "SF-22")
async def test_every_advertised_option_is_accepted_and_shows(served: Served) -> None:
    info = await served.control.GetModelInfo(model_pb2.GetModelInfoRequest(), metadata=KEY_A)
    top_n = info.generation.output_logprobs.max_top_n
    messages = await generate(
        served,
        request(
            sampling=generation_pb2.SamplingParams(
                temperature=0.0, num_sequences=info.generation.max_num_sequences
            ),
            stopping=generation_pb2.StoppingOptions(
                max_tokens=2, ignore_eos=True, include_stop_in_output=True
            ),
            response=generation_pb2.ResponseOptions(
                return_prompt_logprobs=True,
                prompt_logprob_start=1,
                prompt_candidates=generation_pb2.CandidateTokenSelection(top_n=1),
                return_output_logprobs=True,
                output_candidates=generation_pb2.CandidateTokenSelection(top_n=top_n),
            ),
        ),
        metadata=(*KEY_A, ("openengine-priority", "1")),
    )
    assert messages[0].WhichOneof("event") == "prompt"
    assert all(token.HasField("logprob") for token in messages[0].prompt.tokens)
    tokens = [token for message in messages for token in message.token.tokens]
    assert all(token.HasField("logprob") and len(token.candidates) == top_n for token in tokens)
    finished = [m.finished.output_index for m in messages if m.HasField("finished")]
    assert sorted(finished) == list(range(info.generation.max_num_sequences))
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]


@pytest.mark.clause("SF-21")
async def test_a_higher_priority_number_is_the_engines_lower_one(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    generate_as_usual = served.engine.generate

    def spy(request: GenerationRequest) -> Any:
        asked.append(request.priority)
        return generate_as_usual(request)

    monkeypatch.setattr(served.engine, "generate", spy)
    for priority in ("5", "-5"):
        await generate(served, request(), metadata=(*KEY_A, ("openengine-priority", priority)))
    assert asked == [-5, 5], "its scheduler starts low numbers first, the protocol high ones"


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize(
    "changes",
    [
        {"lora_name": "a"},
        {"media": [generation_pb2.MediaItem(modality=generation_pb2.MODALITY_IMAGE, url="http://x/")]},
        {"guided": generation_pb2.GuidedDecoding(regex="a")},
        {"kv": generation_pb2.KvOptions(cache_salt="s")},
        {"kv": generation_pb2.KvOptions(bypass_prefix_cache=True)},
        {
            "response": generation_pb2.ResponseOptions(
                return_output_logprobs=True,
                output_candidates=generation_pb2.CandidateTokenSelection(all=generation_pb2.AllCandidates()),
            )
        },
    ],
)
async def test_what_is_not_advertised_is_refused_before_acceptance(
    served: Served, changes: dict[str, Any]
) -> None:
    before = served.engine.counters().requests_accepted
    async with refused(grpc.StatusCode.UNIMPLEMENTED):
        await generate(served, request(**changes))
    assert served.engine.counters().requests_accepted == before


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": generation_pb2.SamplingParams(temperature=-1.0)},
        {"sampling": generation_pb2.SamplingParams(top_p=float("nan"))},
        {"stopping": generation_pb2.StoppingOptions(max_tokens=0)},
        {"prompt": "word " * 5000},
    ],
)
async def test_values_out_of_range_are_refused_before_acceptance(
    served: Served, changes: dict[str, Any]
) -> None:
    async with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await generate(served, request(**changes))


@pytest.mark.clause("SF-20")
async def test_a_stop_text_is_matched_and_told(served: Served) -> None:
    free = text_of(await generate(served, request()))
    stop = free.split()[1]
    stopping = generation_pb2.StoppingOptions(
        max_tokens=8, conditions=[generation_pb2.StopCondition(stop_text=stop)]
    )
    messages = await generate(served, request(stopping=stopping))
    assert messages[-1].finished.reason == generation_pb2.FINISH_REASON_STOP
    assert messages[-1].finished.stop_match.stop_text == stop
    assert stop not in text_of(messages)


LONG = generation_pb2.StoppingOptions(max_tokens=1500, ignore_eos=True)


@pytest.mark.clause("SF-23")
async def test_only_its_own_key_can_abort_a_request_and_it_ends_with_one_cancelled_error(
    served: Served,
) -> None:
    call = served.inference.Generate(request(request_id="own", stopping=LONG), metadata=KEY_A, timeout=30)
    await call.read()
    abort = lifecycle_pb2.AbortRequest(request_id="own")
    async with refused(grpc.StatusCode.NOT_FOUND):
        await served.control.Abort(abort, metadata=KEY_B)
    answer = await served.control.Abort(abort, metadata=KEY_A)
    assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
    messages = await rest_of(call)
    assert await call.code() is grpc.StatusCode.OK
    assert [m.error.code for m in messages if m.HasField("error")] == [error_pb2.ERROR_CODE_CANCELLED]
    assert messages[-1].HasField("error")
    assert messages[-1].usage.completion_tokens > 0
    answer = await served.control.Abort(abort, metadata=KEY_A)
    assert answer.status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED
    async with refused(grpc.StatusCode.NOT_FOUND):
        await served.control.Abort(lifecycle_pb2.AbortRequest(request_id="never"), metadata=KEY_A)


@pytest.mark.clause("SF-20")
async def test_a_live_request_id_cannot_be_used_twice(served: Served) -> None:
    message = request(request_id="twice", stopping=LONG)
    call = served.inference.Generate(message, metadata=KEY_A, timeout=30)
    await call.read()
    async with refused(grpc.StatusCode.ALREADY_EXISTS):
        await generate(served, message)
    call.cancel()


@pytest.mark.clause("SF-20", "AD-41")
async def test_an_operators_abort_ends_the_stream_with_a_retryable_draining_error(served: Served) -> None:
    call = served.inference.Generate(request(stopping=LONG), metadata=KEY_A, timeout=30)
    await call.read()
    try:
        await served.engine.pause(mode=PauseMode.ABORT, admission=AdmissionPolicy.REJECT)
        messages = await rest_of(call)
        assert messages[-1].error.code == error_pb2.ERROR_CODE_DRAINING
        assert messages[-1].error.retryable
        async with refused(grpc.StatusCode.UNAVAILABLE):
            await generate(served, request())
    finally:
        await served.engine.resume()


@pytest.mark.clause("AD-103")
@pytest.mark.parametrize(
    ("mode", "state"),
    [
        (PauseMode.DRAIN, lifecycle_pb2.HEALTH_STATE_DRAINING),
        (PauseMode.KEEP, lifecycle_pb2.HEALTH_STATE_NOT_READY),
    ],
)
async def test_health_shows_a_drain_as_draining(served: Served, mode: PauseMode, state: int) -> None:
    probe = lifecycle_pb2.HealthRequest(include_inference_probe=True)
    assert (await served.control.Health(probe, metadata=KEY_A)).state == lifecycle_pb2.HEALTH_STATE_READY
    await served.engine.pause(mode=mode, admission=AdmissionPolicy.QUEUE)
    try:
        report = await served.control.Health(probe, metadata=KEY_A)
        assert report.state == state
        assert [check.name for check in report.checks] == ["scheduler", "inference"]
    finally:
        await served.engine.resume()
    assert served.engine.state is EngineState.SERVING


@pytest.mark.clause("SF-22")
async def test_load_counts_what_runs(served: Served) -> None:
    call = served.inference.Generate(request(stopping=LONG), metadata=KEY_A, timeout=30)
    await call.read()
    load = await served.control.GetLoad(server_pb2.GetLoadRequest(include_per_rank=True), metadata=KEY_A)
    assert load.running_requests == 1
    assert load.used_kv_blocks > 0
    assert load.ranks[0].running_requests == 1
    call.cancel()
