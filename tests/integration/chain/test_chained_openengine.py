"""OpenEngine from a client through two Edges to the reference engine, and back, with nothing lost (SF-20 to SF-24)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from chain_site import KINDS, Place, edge_yaml, inner_adapter, place
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from iop.api.grpc.auth import ApiKeyDirectory
from iop.api.grpc.engine_port import EnginePort
from iop.api.grpc.listeners import inference_listener
from iop.api.grpc.server import ListenerSettings
from iop.engine import Engine, EngineSettings
from iop.pb.openengine.v1 import (
    error_pb2,
    generation_pb2,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from iop.testing.http_site import SystemClock
from iop.testing.waiting import PATIENCE_S, SOON_S, eventually

pytestmark = pytest.mark.clause("SF-24")


@dataclass
class Line:
    """A client's Edge, the Edge behind it, and the engine behind that."""

    outer: Place
    inner: Place
    engine: Engine
    direct: Any

    async def settled(self) -> None:
        await self.outer.settled()
        await self.inner.settled()
        await eventually(lambda: self.engine.counters().running == 0)


@contextlib.asynccontextmanager
async def line_of(directory: Path, kind: str = "openengine", **inner: Any) -> AsyncIterator[Line]:
    async with asyncio.timeout(60), Engine(EngineSettings()) as engine:
        port = EnginePort(engine, clock=SystemClock())
        listener = inference_listener(
            port, port, ApiKeyDirectory(), ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.1)
        )
        async with listener.serving(), grpc.aio.insecure_channel(listener.address) as channel:
            config = edge_yaml(
                {"type": "openengine", "openengine": listener.address},
                target=engine.info.model_id,
                **inner,
            )
            async with place(directory / "inner", config) as second:
                outside = edge_yaml(inner_adapter(kind, second), target="fast")
                async with place(directory / "outer", outside) as first:
                    line = Line(
                        outer=first,
                        inner=second,
                        engine=engine,
                        direct=openengine_pb2_grpc.InferenceStub(channel),
                    )
                    yield line
                    await line.settled()


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[Line]:
    async with line_of(tmp_path) as made:
        yield made


async def read_all(call: Any) -> list[Any]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@contextlib.asynccontextmanager
async def refused(code: grpc.StatusCode, reason: str) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    error = caught.value
    assert error.code() is code, error
    details = next(v for k, v in error.trailing_metadata() if k == "grpc-status-details-bin")
    info = error_details_pb2.ErrorInfo()
    rich = status_pb2.Status.FromString(details)
    assert rich.details[0].Unpack(info)
    assert info.reason == reason


def request_of(**fields: Any) -> generation_pb2.GenerateRequest:
    fields.setdefault("model", "fast")
    if "token_ids" not in fields:
        fields.setdefault("prompt", "once upon a time")
    return generation_pb2.GenerateRequest(**fields)


def endless() -> generation_pb2.GenerateRequest:
    return request_of(stopping=generation_pb2.StoppingOptions(max_tokens=2000, ignore_eos=True))


def by_output(messages: list[Any]) -> dict[int, Any]:
    """What each output said, however it was cut into messages."""
    told: dict[int, Any] = {}
    for message in messages:
        match message.WhichOneof("event"):
            case "token":
                assert message.token.HasField("output_index")
                text, tokens = told.get(message.token.output_index, ("", []))
                told[message.token.output_index] = (
                    text + message.token.text,
                    tokens + [token.SerializeToString(deterministic=True) for token in message.token.tokens],
                )
            case "finished":
                finished = message.finished
                told[finished.output_index] = (
                    *told[finished.output_index],
                    finished.SerializeToString(deterministic=True),
                )
            case "prompt":
                assert -1 not in told
                told[-1] = [token.SerializeToString(deterministic=True) for token in message.prompt.tokens]
    return told


RICH = {
    "sampling": generation_pb2.SamplingParams(temperature=1.0, seed=7, num_sequences=2, top_k=40, min_p=0.01),
    "stopping": generation_pb2.StoppingOptions(max_tokens=12, min_tokens=3, ignore_eos=True),
    "response": generation_pb2.ResponseOptions(
        return_output_logprobs=True,
        output_candidates=generation_pb2.CandidateTokenSelection(top_n=2),
        return_prompt_logprobs=True,
    ),
}


@pytest.mark.clause("SF-20", "SF-22")
@pytest.mark.parametrize("form", ["text", "token ids"])
async def test_scores_outputs_and_usage_are_the_engines_own(line: Line, form: str) -> None:
    prompt: dict[str, Any] = (
        {"prompt": "once upon"}
        if form == "text"
        else {"token_ids": generation_pb2.TokenIds(ids=[5, 6, 7, 8])}
    )
    own = await read_all(line.direct.Generate(request_of(model=line.engine.info.model_id, **prompt, **RICH)))
    call = line.outer.inference.Generate(request_of(request_id="mine", **prompt, **RICH), timeout=60)
    messages = await read_all(call)
    assert await call.code() is grpc.StatusCode.OK
    assert {message.request_id for message in messages} == {"mine"}
    assert by_output(messages) == by_output(own)
    assert set(by_output(messages)) == {-1, 0, 1}
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert messages[-1].usage == own[-1].usage
    assert messages[-1].WhichOneof("event") == "finished"
    versions = dict(await call.initial_metadata())
    assert versions["openengine-weight-version"] == line.engine.weight_version


@pytest.mark.clause("SF-20")
async def test_a_stop_text_is_told_as_the_engine_told_it(line: Line) -> None:
    free = request_of(stopping=generation_pb2.StoppingOptions(max_tokens=24, ignore_eos=True))
    free.sampling.temperature = 0.0
    text = "".join(m.token.text for m in await read_all(line.outer.inference.Generate(free, timeout=60)))
    free.stopping.conditions.add(stop_text=text[6:9])
    messages = await read_all(line.outer.inference.Generate(free, timeout=60))
    finished = messages[-1].finished
    assert finished.reason == generation_pb2.FINISH_REASON_STOP
    assert finished.stop_match.stop_text == text[6:9]


@pytest.mark.clause("SF-22")
async def test_the_outer_edge_advertises_what_the_engine_can_and_no_more(line: Line) -> None:
    mine = await line.outer.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast"))
    assert mine.supports_token_ids_input
    assert mine.generation.output_logprobs.supported
    assert mine.generation.prompt_logprobs.supported
    assert mine.generation.max_num_sequences > 1
    assert mine.generation.supports_stop_in_output
    assert mine.max_context_length == line.engine.info.context_tokens
    assert "chat_messages" in mine.tokenizer_modes
    assert not mine.generation.guided_decoding.supported
    guided = generation_pb2.GuidedDecoding(regex="a+")
    async with refused(grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE"):
        await read_all(line.outer.inference.Generate(request_of(guided=guided), timeout=60))
    async with refused(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        rank = (("openengine-target-dp-rank", "1"),)  # the engine has one
        await read_all(line.outer.inference.Generate(request_of(), metadata=rank, timeout=60))
    assert line.inner.edge.outcomes.begun_total == 0
    rank = (("openengine-target-dp-rank", "0"),)
    few = request_of(stopping=generation_pb2.StoppingOptions(max_tokens=2))
    assert (await read_all(line.outer.inference.Generate(few, metadata=rank, timeout=60)))[-1].HasField(
        "usage"
    )


@pytest.mark.clause("SF-06", "SF-20")
async def test_a_refusal_of_the_engine_keeps_its_reason_through_both(line: Line) -> None:
    much = request_of(stopping=generation_pb2.StoppingOptions(max_tokens=10_000_000))
    for inference in (line.direct, line.inner.inference, line.outer.inference):
        if inference is line.direct:
            much.model = line.engine.info.model_id
        else:
            much.model = "fast"
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED"):
            await read_all(inference.Generate(much, timeout=60))


@pytest.mark.clause("SF-10", "SF-24", "EN-43")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_http_callers_get_the_engines_own_scores(line: Line, is_stream: bool) -> None:
    """Through both Edges and Nodes: greedy, so that the engine asked directly says the same."""
    wish = generation_pb2.ResponseOptions(
        return_output_logprobs=True, output_candidates=generation_pb2.CandidateTokenSelection(top_n=2)
    )
    own = request_of(
        model=line.engine.info.model_id,
        sampling=generation_pb2.SamplingParams(temperature=0.0),
        stopping=generation_pb2.StoppingOptions(max_tokens=6, ignore_eos=True),
        response=wish,
    )
    tokens = [
        token for message in await read_all(line.direct.Generate(own)) for token in message.token.tokens
    ]
    body = {
        "model": "fast",
        "prompt": "once upon a time",
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"logprobs": 2, "stream": is_stream}
    told: list[Any] = []
    if is_stream:
        _, _, data = await (await line.outer.ask(body, path="/v1/completions")).read_answer()
        assert data.endswith(b"data: [DONE]\n\n")
        events = [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n")[:-2]]
        told = [event["choices"][0]["logprobs"] for event in events if event["choices"]]
    else:
        status, _, answer = await line.outer.answer(body, path="/v1/completions")
        assert status == 200, answer
        told = [answer["choices"][0]["logprobs"]]
    told = [each for each in told if each is not None]
    assert [token for each in told for token in each["tokens"]] == [token.token for token in tokens]
    scores = [score for each in told for score in each["token_logprobs"]]
    assert scores == pytest.approx([token.logprob for token in tokens])
    assert [set(one) for each in told for one in each["top_logprobs"]] == [
        {other.token for other in token.candidates} for token in tokens
    ]
    chat = {"model": "fast", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    status, _, answer = await line.outer.answer(chat | {"logprobs": True, "top_logprobs": 1})
    assert status == 200, answer
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(each["top_logprobs"]) == 1 and each["logprob"] <= 0 for each in content)
    status, _, answer = await line.outer.answer(chat | {"logprobs": True, "top_logprobs": 99})
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")
    response = {
        "model": "fast",
        "input": "hello",
        "max_output_tokens": 4,
        "top_logprobs": 1,
        "stream": is_stream,
    }
    response["include"] = ["message.output_text.logprobs"]
    if is_stream:
        _, _, data = await (await line.outer.ask(response, path="/v1/responses")).read_answer()
        answer = json.loads(data.split(b"\n\n")[-2].partition(b"data: ")[2])["response"]
    else:
        status, _, answer = await line.outer.answer(response, path="/v1/responses")
        assert status == 200, answer
    told = answer["output"][0]["content"][0]["logprobs"]
    assert len(told) == answer["usage"]["output_tokens"] and answer["top_logprobs"] == 1
    assert all(len(each["top_logprobs"]) == 1 and each["logprob"] <= 0 for each in told)


async def test_a_chat_reaches_the_models_own_template(line: Line) -> None:
    messages = [{"role": "user", "content": "hello"}]
    request = request_of(prompt=json.dumps(messages), stopping=generation_pb2.StoppingOptions(max_tokens=4))
    request.extra.update({"prompt_format": "chat_messages"})
    call = line.outer.inference.Generate(request, timeout=60)
    answered = await read_all(call)
    from_http = await line.outer.answer({"model": "fast", "messages": messages, "max_tokens": 4})
    assert from_http[0] == 200
    assert from_http[2]["usage"]["prompt_tokens"] == answered[-1].usage.prompt_tokens


@pytest.mark.clause("SF-07", "SF-20")
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_has_enough_frees_everything_within_a_second(line: Line, how: str) -> None:
    call = line.outer.inference.Generate(endless(), timeout=60 if how == "cancel" else 2.0)
    await call.read()
    assert line.outer.leases == line.inner.leases == line.engine.counters().running == 1
    if how == "cancel":
        call.cancel()
    assert await call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
    await eventually(
        lambda: line.engine.counters().running == line.outer.leases == line.inner.leases == 0, within_s=SOON_S
    )


@pytest.mark.clause("SF-23")
async def test_an_abort_at_the_outer_edge_reaches_the_engine(line: Line) -> None:
    request = endless()
    request.request_id = "long one"
    call = line.outer.inference.Generate(request, timeout=60)
    await call.read()
    abort = lifecycle_pb2.AbortRequest(request_id="long one")
    assert (await line.outer.control.Abort(abort)).status == lifecycle_pb2.ABORT_STATUS_ABORTED
    last = (await read_all(call))[-1]
    assert last.error.code == error_pb2.ERROR_CODE_CANCELLED
    await eventually(lambda: line.engine.counters().running == 0)
    assert (await line.outer.control.Abort(abort)).status == lifecycle_pb2.ABORT_STATUS_ALREADY_FINISHED


@pytest.mark.clause("SF-20", "AD-41")
async def test_an_operators_abort_at_the_inner_edge_is_told_in_its_words(line: Line) -> None:
    call = line.outer.inference.Generate(endless(), timeout=60)
    await call.read()
    line.inner.edge.dispatcher.abort(line.inner.edge.pools.roster.providers)
    last = (await read_all(call))[-1]
    assert last.error.code == error_pb2.ERROR_CODE_DRAINING
    assert last.error.retryable


@pytest.mark.clause("SF-22", "AD-06")
async def test_an_inner_edge_that_lost_its_engine_shows_at_the_outer(tmp_path: Path) -> None:
    async with line_of(tmp_path, model={"queue": {"no_capacity_grace_sec": 0.1}}) as line:
        health = health_pb2_grpc.HealthStub(grpc.aio.insecure_channel(line.outer.grpc_address))
        asked = health_pb2.HealthCheckRequest(service="openengine.v1.Inference")

        async def become(status: int, state: int) -> None:
            """Wait until both ways of asking tell it: an Edge hears of its engine a moment after it serves."""
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    told = await line.outer.control.Health(lifecycle_pb2.HealthRequest(model="fast"))
                    if ((await health.Check(asked)).status, told.state) == (status, state):
                        return
                    await asyncio.sleep(0.01)

        await become(health_pb2.HealthCheckResponse.SERVING, lifecycle_pb2.HEALTH_STATE_READY)
        line.inner.node.stop()
        await eventually(lambda: not line.inner.edge.status.status()["nodes"][0]["connected"])
        async with refused(grpc.StatusCode.UNAVAILABLE, "NO_CAPACITY"):
            await read_all(line.outer.inference.Generate(request_of(), timeout=60))
        await become(health_pb2.HealthCheckResponse.NOT_SERVING, lifecycle_pb2.HEALTH_STATE_NOT_READY)


@pytest.mark.clause("SF-20")
async def test_a_circle_is_a_failed_precondition_and_names_itself(tmp_path: Path) -> None:
    def circle(_http: int, own: int) -> dict[str, Any]:
        return edge_yaml({"type": "openengine", "openengine": f"127.0.0.1:{own}"}, target="fast")

    async with asyncio.timeout(30), place(tmp_path, circle) as own:
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "LOOP_DETECTED"):
            await read_all(own.inference.Generate(request_of(), timeout=60))
        await own.settled()


@pytest.mark.clause("SF-13", "AD-33")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_the_first_answer_already_names_the_weights_of_the_engine(
    tmp_path: Path, kind: str, is_stream: bool
) -> None:
    body = {"model": "fast", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    async with line_of(tmp_path, kind) as line:
        status, headers, _ = await line.outer.answer({**body, "stream": is_stream})
        assert status == 200
        assert headers[b"x-iop-weight-version"].decode() == line.engine.weight_version
        if not is_stream and kind == "openai_compat":
            assert b"content-length" in headers  # no trailer has to tell of a change


@pytest.mark.clause("SF-01")
@pytest.mark.parametrize("kind", KINDS)
async def test_the_outer_edge_shows_the_context_of_the_engine_that_serves(tmp_path: Path, kind: str) -> None:
    async with line_of(tmp_path, kind) as line:
        length = line.engine.info.context_tokens
        async with asyncio.timeout(PATIENCE_S):
            for edge in (line.inner, line.outer):  # the outer Node asks anew when the inner one has told
                while True:
                    caller = await edge.call()
                    await caller.send(b"GET /v1/models/fast HTTP/1.1\r\nHost: e\r\n\r\n")
                    shown = json.loads((await caller.read_answer())[2])["iop"]
                    if shown["context_window"] == {"min": length, "max": length}:
                        break
                    await asyncio.sleep(0.02)
        assert shown["tools"] is False
        assert shown["data_parallel_ranks"] == ("0" if kind == "openengine" else "")


@pytest.mark.clause("SF-22", "EN-04")
async def test_two_edges_are_two_servers(line: Line) -> None:
    first = await line.outer.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    second = await line.inner.control.GetServerInfo(server_pb2.GetServerInfoRequest())
    assert first.instance_id != second.instance_id
    assert list(first.supported_models) == list(second.supported_models) == ["fast"]
