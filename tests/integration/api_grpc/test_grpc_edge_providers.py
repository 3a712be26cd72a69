"""What each kind of provider is sent for a generation, and what becomes of its answer (SF-20 to SF-24)."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import grpc
import pytest
from grpc_admin_rig import refused
from test_grpc_edge_port import EVENTS, HELLO, Site, event, read_all, site_of, text

from iop.adapters.base import MODEL_CAPABILITY
from iop.api.grpc.auth import ApiKeyDirectory, ApiKeyGrant, secret_sha256
from iop.api.http.keys import ApiKeys, ApiKeySpec
from iop.api.strangers import Strangers
from iop.edge.calls import Outcome, Route
from iop.edge.snapshot import EdgeSnapshot
from iop.pb.openengine.v1 import (
    error_pb2,
    generation_pb2,
    kv_pb2,
    lifecycle_pb2,
    lora_pb2,
    model_pb2,
    server_pb2,
)
from iop.testing.edge_fleet import adapter_spec, snapshot_of
from iop.testing.waiting import eventually
from iop.wire.messages import (
    CancelReason,
    ProviderReport,
    ProviderSnapshot,
    RunEvent,
    RunEventType,
    RunRequest,
    StreamError,
    Usage,
)

USAGE = Usage(prompt_tokens=3, completion_tokens=2, reasoning_tokens=1)


def pool(*kinds: str, models: dict[str, list[str]] | None = None, **more: Any) -> EdgeSnapshot:
    """One provider per kind on one Node, all in the pool of `fast`."""
    specs = {
        f"n1/{kind}": dataclasses.replace(
            adapter_spec(
                kind, route=Route.RUN if kind in {"ollama", "cli", "openengine"} else Route.TUNNEL, **more
            ),
            type=kind,
        )
        for kind in kinds
    }
    return snapshot_of(specs, models or {"fast": list(specs)}, aliases={"fast": ["fast-latest"]})


def request(**fields: Any) -> generation_pb2.GenerateRequest:
    if "token_ids" not in fields:
        fields.setdefault("prompt", "hello")
    return generation_pb2.GenerateRequest(model="fast", **fields)


def asked(**options: Any) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(**options)


def chat(value: object, mode: str, **fields: Any) -> generation_pb2.GenerateRequest:
    made = request(prompt=json.dumps(value), **fields)
    made.extra.update({"prompt_format": mode})
    return made


async def model_of(site: Site) -> model_pb2.ModelInfo:
    told: model_pb2.ModelInfo = await site.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast"))
    return told


def delta(said: str, *, index: int = 0, reasoning: str = "") -> RunEvent:
    return RunEvent(type=RunEventType.DELTA, delta=said, output_index=index, reasoning_delta=reasoning)


# ---- runs ----


@pytest.mark.clause("SF-20", "SF-24", "EN-60")
@pytest.mark.parametrize("kind", ["ollama", "cli"])
async def test_a_run_answers_a_generation(kind: str) -> None:
    async with site_of(pool(kind)) as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        sent = stream.request
        assert isinstance(sent, RunRequest)
        assert json.loads(sent.input)["prompt"] == "hello"
        assert sent.target == f"target-of-n1/{kind}"
        stream.emit(RunEvent(type=RunEventType.START))
        stream.emit(delta("", reasoning="hmm"))
        stream.emit(delta("Grü"))
        stream.emit(delta("ße"))
        messages = [await call.read(), await call.read()]
        # While it runs: what comes of a stream after its end is nobody's credit any more.
        await eventually(lambda: stream.credit_returned == len("Grüßehmm".encode()))
        stream.emit(RunEvent(type=RunEventType.COMPLETE, finish_reasons=("length",), usage=USAGE))
        messages += await read_all(call)
        assert [m.WhichOneof("event") for m in messages] == ["token", "token", "finished"]
        assert "".join(m.token.text for m in messages) == "Grüße"
        assert messages[-1].finished.reason == generation_pb2.FINISH_REASON_LENGTH
        assert messages[-1].usage.total_tokens == 5
        assert messages[-1].usage.reasoning_tokens == 1
        record = site.edge.outcomes.find("r-1")
        assert record is not None
        assert record.outcome is Outcome.COMPLETE


@pytest.mark.clause("EN-65", "EN-66", "SF-24")
@pytest.mark.parametrize("is_fallback", [True, False])
async def test_a_runs_tool_calls_are_told_with_its_finish(is_fallback: bool) -> None:
    call_told = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    marks = (
        {"openai_text_tool_fallback": "true"}
        if is_fallback
        else {"openai_tool_calls": json.dumps([call_told])}
    )
    async with site_of(pool("ollama")) as site:
        prompt = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
        call = site.inference.Generate(chat(prompt, "openai_chat"), timeout=60)
        stream = await site.stream()
        assert json.loads(stream.request.input)["tools"] == prompt["tools"]
        stream.emit(RunEvent(type=RunEventType.START))
        stream.emit(RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop",), metadata=marks))
        told = json.loads((await read_all(call))[-1].finished.message)
        if is_fallback:
            assert told == {"finish_reason": "stop", "text_tool_fallback": True}
        else:
            assert told == {"finish_reason": "tool_calls", "tool_calls": [call_told]}


@pytest.mark.clause("SF-22", "SF-10")
async def test_a_guide_is_a_response_format_to_ollama() -> None:
    async with site_of(pool("ollama")) as site:
        guided = generation_pb2.GuidedDecoding(json_schema='{"type": "object"}')
        call = site.inference.Generate(request(guided=guided), timeout=60)
        stream = await site.stream()
        wanted = json.loads(stream.request.input)["response_format"]
        assert wanted["json_schema"]["schema"] == {"type": "object"}
        call.cancel()
        bad = generation_pb2.GuidedDecoding(json_schema="{")
        async with refused(grpc.StatusCode.INVALID_ARGUMENT):
            await read_all(site.inference.Generate(request(guided=bad), timeout=60))


@pytest.mark.clause("SF-20")
async def test_a_run_that_fails_is_a_status_before_its_start_and_an_event_after() -> None:
    async with site_of(pool("ollama")) as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        error = StreamError(code="invalid_request", message="logit_bias: not offered by this backend")
        stream.emit(RunEvent(type=RunEventType.ERROR, error=error))
        async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
            await read_all(call)
        assert refusal.error is not None
        assert "logit_bias" in (refusal.error.details() or "")
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream(1)
        stream.emit(RunEvent(type=RunEventType.START))
        stream.emit(delta("a"))
        stream.fail("upstream_truncated")
        messages = await read_all(call)
        assert [m.WhichOneof("event") for m in messages] == ["token", "error"]


@pytest.mark.clause("SF-10", "SF-22")
@pytest.mark.parametrize(
    ("kind", "fields", "feature"),
    [
        ("cli", {"sampling": asked(temperature=0.5)}, "temperature"),
        ("cli", {"stopping": generation_pb2.StoppingOptions(max_tokens=3)}, "max_tokens"),
        ("ollama", {"stopping": generation_pb2.StoppingOptions(min_tokens=3)}, "min_tokens"),
        ("llamacpp", {"stopping": generation_pb2.StoppingOptions(min_tokens=3)}, "min_tokens"),
        ("openai_compat", {"sampling": asked(top_k=3)}, "top_k"),
    ],
)
async def test_an_option_that_a_provider_would_ignore_is_refused_by_name(
    kind: str, fields: dict[str, Any], feature: str
) -> None:
    async with site_of(pool(kind)) as site:
        async with refused(grpc.StatusCode.UNIMPLEMENTED) as refusal:
            await read_all(site.inference.Generate(request(**fields), timeout=60))
        assert refusal.info().metadata["feature"] == feature
        assert site.node.streams == []


@pytest.mark.clause("EN-112")
async def test_a_refused_generation_is_explained_and_a_live_one_keeps_its_record() -> None:
    async with site_of(pool("openai_compat")) as site:
        for name, made in (
            ("an option", request(request_id="an option", sampling=asked(top_k=3))),
            ("a feature", request(request_id="a feature", lora_name="x")),
        ):
            async with refused(grpc.StatusCode.UNIMPLEMENTED):
                await read_all(site.inference.Generate(made, timeout=60))
            record = site.edge.outcomes.find(name)
            assert record is not None
            assert (record.outcome, record.reason) == (Outcome.REJECTED, "unsupported_feature")
        call = site.inference.Generate(request(request_id="live"), timeout=60)
        await site.stream()
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await read_all(site.inference.Generate(request(request_id="live", lora_name="x"), timeout=60))
        record = site.edge.outcomes.find("live")
        assert record is not None
        assert record.outcome is None
        assert site.edge.dispatcher.refusals["unsupported_feature"] == 3
        call.cancel()


# ---- several outputs, tokens, scores ----


@pytest.mark.clause("SF-20", "SF-22")
async def test_several_outputs_keep_their_index_and_usage_comes_last() -> None:
    async with site_of(pool("vllm")) as site:
        assert (await model_of(site)).generation.max_num_sequences == 128
        call = site.inference.Generate(request(sampling=asked(num_sequences=2)), timeout=60)
        stream = await site.stream()
        assert json.loads(stream.sent_body)["n"] == 2
        stream.start(headers=EVENTS)
        for value in (
            {"choices": [{"index": 1, "text": "b"}]},
            {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]},
            {"choices": [{"index": 1, "text": "", "finish_reason": "length"}]},
            {"choices": [{"index": 2, "text": "nobody asked"}]},
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
        ):
            stream.send(event(value))
        stream.send(event("[DONE]"))
        stream.end()
        messages = await read_all(call)
        told = [(m.WhichOneof("event"), m.token.output_index, m.finished.output_index) for m in messages]
        assert told == [("token", 1, 0), ("token", 0, 0), ("finished", 0, 0), ("finished", 0, 1)]
        assert all(m.token.HasField("output_index") for m in messages[:2])
        assert messages[3].finished.HasField("output_index")
        assert [m.HasField("usage") for m in messages] == [False, False, False, True]


@pytest.mark.clause("SF-14", "SF-20")
async def test_an_answer_with_an_output_missing_is_cut() -> None:
    async with site_of(pool("vllm")) as site:
        call = site.inference.Generate(request(sampling=asked(num_sequences=2)), timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        stream.send(event(text("a", "stop")) + event("[DONE]"))
        stream.end()
        messages = await read_all(call)
        assert [m.WhichOneof("event") for m in messages] == ["token", "error"]


@pytest.mark.clause("SF-20", "SF-22")
async def test_token_ids_go_in_and_scores_come_out() -> None:
    async with site_of(pool("llamacpp")) as site:
        told = await model_of(site)
        assert told.supports_token_ids_input
        assert told.generation.output_logprobs.max_top_n == 20
        wanted = generation_pb2.ResponseOptions(
            return_output_logprobs=True,
            output_candidates=generation_pb2.CandidateTokenSelection(top_n=1),
        )
        call = site.inference.Generate(
            request(
                token_ids=generation_pb2.TokenIds(ids=[5, 6]),
                response=wanted,
                sampling=asked(repetition_penalty=1.5),
            ),
            timeout=60,
        )
        stream = await site.stream()
        body = json.loads(stream.sent_body)
        assert (body["prompt"], body["n_probs"], body["repeat_penalty"]) == ([5, 6], 1, 1.5)
        stream.start(headers=EVENTS)
        top = [{"id": 9, "token": " sea", "logprob": -0.5}, {"id": 4, "token": "x", "logprob": -9}]
        scored = {"content": [{"id": 9, "token": " sea", "logprob": -0.5, "top_logprobs": top}]}
        stream.send(event({"choices": [{"index": 0, "text": " sea", "logprobs": scored}]}))
        stream.send(event(text("", "stop")) + event("[DONE]"))
        stream.end()
        (token,) = (await read_all(call))[0].token.tokens
        assert (token.token_id, token.token, token.logprob) == (9, " sea", -0.5)
        assert [(c.token_id, c.logprob) for c in token.candidates] == [(9, -0.5)]


@pytest.mark.clause("SF-22")
async def test_a_pool_can_what_all_of_its_providers_can() -> None:
    async with site_of(pool("vllm", "ollama")) as site:
        told = await model_of(site)
        assert told.generation.max_num_sequences == 1
        assert not told.supports_token_ids_input
        assert not told.generation.guided_decoding.supported
        async with refused(grpc.StatusCode.UNIMPLEMENTED) as refusal:
            stopping = generation_pb2.StoppingOptions(max_tokens=3, ignore_eos=True)
            await read_all(site.inference.Generate(request(stopping=stopping), timeout=60))
        assert refusal.info().metadata["feature"] == "ignore_eos"
        assert site.node.streams == []


# ---- chats ----


@pytest.mark.clause("SF-22", "SF-24", "EN-65")
@pytest.mark.parametrize("mode", ["chat_messages", "openai_chat"])
async def test_a_chat_is_a_chat_at_the_provider(mode: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with site_of(pool("openai_compat")) as site:
        assert mode in (await model_of(site)).tokenizer_modes
        prompt = messages if mode == "chat_messages" else {"messages": messages, "tools": tools}
        call = site.inference.Generate(chat(prompt, mode, sampling=asked(temperature=0.5)), timeout=60)
        stream = await site.stream()
        assert stream.request.path == "/v1/chat/completions"
        body = json.loads(stream.sent_body)
        assert body["messages"] == messages
        assert body.get("tools") == (tools if mode == "openai_chat" else None)
        assert body["temperature"] == 0.5
        stream.start(headers=EVENTS)
        pieces = [
            {"id": "c", "function": {"name": "f", "arguments": '{"a"'}},
            {"function": {"arguments": ":1}"}},
        ]
        for piece in pieces:
            calls = {"tool_calls": [{"index": 0, **piece}]}
            stream.send(event({"choices": [{"index": 0, "delta": calls}]}))
        stream.send(
            event({"choices": [{"index": 0, "delta": {"content": "so"}, "finish_reason": "tool_calls"}]})
        )
        stream.send(event("[DONE]"))
        stream.end()
        *_, said, last = await read_all(call)
        assert said.token.text == "so"
        assert last.finished.reason == generation_pb2.FINISH_REASON_STOP
        told = json.loads(last.finished.message)
        assert told["finish_reason"] == "tool_calls"
        assert told["tool_calls"] == [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        ]


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize("prompt", ["no json", "{}", "[]", '{"messages": 3}'])
async def test_a_chat_that_is_none_is_refused_before_acceptance(prompt: str) -> None:
    async with site_of(pool("openai_compat")) as site:
        made = request(prompt=prompt)
        made.extra.update({"prompt_format": "openai_chat"})
        async with refused(grpc.StatusCode.INVALID_ARGUMENT):
            await read_all(site.inference.Generate(made, timeout=60))
        await eventually(lambda: len(site.edge.pools.leases) == 0)


@pytest.mark.clause("SF-22")
async def test_a_provider_without_chats_advertises_none_and_one_without_texts_none_of_those() -> None:
    async with site_of(pool("openai_compat", operations=frozenset({"completions"}))) as site:
        assert list((await model_of(site)).tokenizer_modes) == ["text"]
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await read_all(site.inference.Generate(chat([], "chat_messages"), timeout=60))
    async with site_of(pool("openai_compat", operations=frozenset({"chat_completions"}))) as site:
        told = await model_of(site)
        assert not told.supports_text_input
        assert set(told.tokenizer_modes) == {"chat_messages", "openai_chat"}
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await read_all(site.inference.Generate(request(), timeout=60))


@pytest.mark.clause("SF-22", "SF-01")
async def test_generations_go_only_to_who_takes_them_unconverted_and_has_the_route() -> None:
    """No messages or responses are written for OpenEngine's chats, and nobody is asked for a route that it lacks."""
    snapshot = pool("openai_compat", "vllm", "sglang", capacity=4)
    node = next(iter(snapshot.nodes.values()))
    offers = {
        "openai_compat": frozenset({"messages", "responses"}),
        "vllm": None,
        "sglang": None,
    }
    adapters = {
        name: dataclasses.replace(spec, operations=offers[name]) for name, spec in node.adapters.items()
    }
    node = dataclasses.replace(node, adapters=adapters)
    async with site_of(dataclasses.replace(snapshot, nodes={node.id: node})) as site:
        lacks = {
            "vllm": {"absent_operations": "completions,chat_completions"},
            "sglang": {"absent_operations": "chat_completions"},
        }
        site.edge.nodes.on_report(
            site.node,
            ProviderReport(
                providers=tuple(ProviderSnapshot(id=name, capabilities=told) for name, told in lacks.items())
            ),
        )
        told = await model_of(site)
        assert list(told.tokenizer_modes) == ["text"]
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await read_all(site.inference.Generate(chat([], "chat_messages"), timeout=60))
        for number in range(4):
            call = site.inference.Generate(request(request_id=f"t-{number}"), timeout=60)
            stream = await site.stream(number)
            assert stream.request.adapter == "sglang"
            call.cancel()


# ---- OpenEngine providers ----


def report(site: Site, **capabilities: Any) -> None:
    """The Node tells what its engine says of the model."""
    info = model_pb2.ModelInfo(model_id="m", supports_text_input=True, **capabilities)
    key = MODEL_CAPABILITY + "target-of-n1/openengine"
    told = {key: base64.b64encode(info.SerializeToString()).decode()}
    site.edge.nodes.on_report(
        site.node, ProviderReport(providers=(ProviderSnapshot(id="openengine", capabilities=told),))
    )


def line(**fields: Any) -> RunEvent:
    message = generation_pb2.GenerateResponse(**fields)
    return delta(base64.b64encode(message.SerializeToString()).decode() + "\n")


@pytest.mark.clause("SF-22")
async def test_an_engines_own_word_is_what_the_edge_advertises() -> None:
    async with site_of(pool("openengine")) as site:
        assert not (await model_of(site)).supports_multimodal
        guided = request(guided=generation_pb2.GuidedDecoding(regex="a"))
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await read_all(site.inference.Generate(guided, timeout=60))
        report(
            site,
            supports_multimodal=True,
            supports_lora=True,
            max_context_length=99,
            generation=model_pb2.GenerationCapabilities(
                max_num_sequences=3,
                supports_cache_salt=True,
                guided_decoding=model_pb2.GuidedDecodingCapabilities(
                    supported=True, modes=[model_pb2.GUIDED_DECODING_MODE_REGEX]
                ),
            ),
        )
        told = await model_of(site)
        assert told.supports_multimodal
        assert told.supports_lora
        assert told.max_context_length == 99
        assert told.generation.max_num_sequences == 3
        assert told.generation.supports_cache_salt
        full = request(
            guided=generation_pb2.GuidedDecoding(regex="a"),
            lora_name="poet",
            kv=generation_pb2.KvOptions(cache_salt="s"),
            media=[
                generation_pb2.MediaItem(modality=generation_pb2.MODALITY_IMAGE, url="http://x", uuid="u")
            ],
            sampling=asked(num_sequences=3, top_k=2),
        )
        call = site.inference.Generate(full, metadata=(("openengine-priority", "-3"),), timeout=60)
        stream = await site.stream()
        sent = generation_pb2.GenerateRequest.FromString(stream.sent_body)
        assert sent == full  # to the last field; the Node puts in the engine's names
        assert stream.request.metadata["iop-priority"] == "-3"
        call.cancel()


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize("cut", [1, 5, 10_000])
async def test_an_engines_messages_arrive_as_it_sent_them_however_they_are_cut(cut: int) -> None:
    token = generation_pb2.TokenInfo(token_id=7, token="a", logprob=-1.0, rank=1)
    token.candidates.add(token_id=8, logprob=-2.0, token="b", rank=2)
    said = "".join(
        event.delta
        for event in (
            line(prompt=generation_pb2.PromptOutput(tokens=[token])),
            line(token=generation_pb2.TokenOutput(output_index=0, text="a", tokens=[token])),
            line(
                finished=generation_pb2.GenerationFinished(
                    output_index=0,
                    reason=generation_pb2.FINISH_REASON_STOP,
                    stop_match=generation_pb2.StopMatch(stop_token_id=4),
                )
            ),
        )
    )
    async with site_of(pool("openengine")) as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.emit(RunEvent(type=RunEventType.START))
        for start in range(0, len(said), cut):
            stream.emit(delta(said[start : start + cut]))
        prompt, output = await call.read(), await call.read()
        await eventually(lambda: stream.credit_returned == len(said))
        stream.emit(RunEvent(type=RunEventType.COMPLETE, finish_reasons=("stop",), usage=USAGE))
        (last,) = await read_all(call)
        assert prompt.prompt.tokens[0] == token
        assert output.token.tokens[0] == token
        assert last.finished.stop_match.stop_token_id == 4
        assert last.usage.prompt_tokens == 3


@pytest.mark.clause("SF-20")
async def test_an_engines_error_keeps_its_code_and_words() -> None:
    async with site_of(pool("openengine")) as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.emit(RunEvent(type=RunEventType.START))
        error = error_pb2.EngineError(
            code=error_pb2.ERROR_CODE_KV_TRANSFER_FAILED, message="link down", retryable=True
        )
        stream.emit(line(error=error))
        stream.fail("upstream_error")
        (last,) = await read_all(call)
        assert last.error == error
        record = site.edge.outcomes.find("r-1")
        assert record is not None
        assert record.outcome is Outcome.UPSTREAM_ERROR


@pytest.mark.clause("SF-20")
@pytest.mark.parametrize(
    "said",
    [
        "!!!\n",
        "AAAA\n",
        "x" * 100 + "\n",
        line(token=generation_pb2.TokenOutput(output_index=7, text="x")).delta,
        line(finished=generation_pb2.GenerationFinished(output_index=7, reason=1)).delta,  # type: ignore[arg-type]
        line(finished=generation_pb2.GenerationFinished(output_index=0)).delta,
        line(prefill_ready=generation_pb2.PrefillReady()).delta,
    ],
)
async def test_what_is_no_message_of_an_engine_is_one_terminal_error(said: str) -> None:
    async with site_of(pool("openengine")) as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.emit(RunEvent(type=RunEventType.START))
        stream.emit(delta(said))
        (last,) = await read_all(call)
        assert last.error.code == error_pb2.ERROR_CODE_INTERNAL
        await eventually(lambda: stream.cancelled)


# ---- ends ----


@pytest.mark.clause("EN-112", "SF-14")
async def test_an_answer_that_said_all_is_complete_although_its_connection_ends_later() -> None:
    async with site_of() as site:
        call = site.inference.Generate(HELLO, timeout=60)
        stream = await site.stream()
        stream.start(headers=EVENTS)
        stream.send(event(text("a", "stop")) + event("[DONE]"))
        assert (await read_all(call))[-1].WhichOneof("event") == "finished"
        assert stream.cancelled == []
        late = b": good bye\n\n"
        before = stream.credit_returned
        stream.send(late)
        assert stream.credit_returned >= before + len(late)
        stream.end()
        record = site.edge.outcomes.find("r-1")
        assert record is not None
        assert record.outcome is Outcome.COMPLETE
        assert len(site.edge.pools.leases) == 0


@pytest.mark.clause("SF-23", "EN-110")
async def test_an_abort_takes_a_request_out_of_the_queue() -> None:
    async with site_of(pool("openai_compat", capacity=1)) as site:
        running = site.inference.Generate(request(request_id="a"), timeout=60)
        await site.stream()
        waiting = site.inference.Generate(request(request_id="b"), timeout=60)
        await eventually(lambda: site.edge.pools.waiting == 1)
        answer = await site.control.Abort(lifecycle_pb2.AbortRequest(request_id="b"))
        assert answer.status == lifecycle_pb2.ABORT_STATUS_ABORTED
        assert await waiting.code() is grpc.StatusCode.CANCELLED
        assert site.edge.pools.waiting == 0
        assert len(site.node.streams) == 1
        running.cancel()


# ---- keys and metadata ----


def two_keys(**limits: Any) -> tuple[ApiKeyDirectory, ApiKeys]:
    grants = [
        ApiKeyGrant(name="a", key_sha256=secret_sha256("key-a"), models=frozenset({"fast-latest"})),
        ApiKeyGrant(name="b", key_sha256=secret_sha256("key-b")),
    ]
    specs = [ApiKeySpec(name="a", sha256=secret_sha256("key-a"), **limits)]
    times = iter(float(n) / 1000 for n in range(10_000))
    return ApiKeyDirectory(grants), ApiKeys(specs, buffered_bytes=1, now=lambda: next(times))


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer key-{name}"),)


@pytest.mark.clause("SF-11", "SF-23")
async def test_a_key_has_so_many_streams_at_once_and_gets_them_back() -> None:
    directory, limits = two_keys(concurrent=1)
    async with site_of(pool("openai_compat"), keys=directory, admit=limits.admit) as site:
        first = site.inference.Generate(request(), metadata=bearer("a"), timeout=60)
        stream = await site.stream()
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
            await read_all(site.inference.Generate(request(), metadata=bearer("a"), timeout=60))
        assert refusal.info().reason == "KEY_CONCURRENCY"
        other = site.inference.Generate(request(), metadata=bearer("b"), timeout=60)
        await site.stream(1)
        other.cancel()
        stream.start(headers=EVENTS)
        stream.send(event(text("a", "stop")) + event("[DONE]"))
        stream.end()
        await read_all(first)
        again = site.inference.Generate(request(), metadata=bearer("a"), timeout=60)
        await site.stream(2)
        again.cancel()


@pytest.mark.clause("SF-11", "SF-23")
async def test_a_key_has_so_many_requests_a_minute_over_both_listeners() -> None:
    directory, limits = two_keys(requests_per_minute=2)
    async with site_of(pool("openai_compat"), keys=directory, admit=limits.admit) as site:
        limits.admit("a")()  # one came by HTTP
        site.inference.Generate(request(), metadata=bearer("a"), timeout=60)
        await site.stream()
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
            await read_all(site.inference.Generate(request(), metadata=bearer("a"), timeout=60))
        assert refusal.info().reason == "KEY_RATE"
        # What ends work, and what is answered from memory, is not counted.
        await site.control.GetServerInfo(server_pb2.GetServerInfoRequest(), metadata=bearer("a"))


@pytest.mark.clause("SF-11", "SF-12", "SF-23")
async def test_strangers_are_kept_off_at_a_rate_and_known_keys_are_not() -> None:
    directory, _ = two_keys()
    strangers = Strangers(2, now=lambda: 0.0)
    ask = server_pb2.GetServerInfoRequest()
    async with site_of(pool("openai_compat"), keys=directory, strangers=strangers) as site:
        for metadata in ((), bearer("nobody")):
            async with refused(grpc.StatusCode.UNAUTHENTICATED):
                await site.control.GetServerInfo(ask, metadata=metadata)
        for _ in range(2):
            async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as refusal:
                await site.control.GetServerInfo(ask, metadata=bearer("nobody"))
            assert refusal.info().reason == "TOO_MANY_ATTEMPTS"
            await site.control.GetServerInfo(ask, metadata=bearer("a"))


@pytest.mark.clause("SF-11", "SF-23")
async def test_a_key_is_told_of_its_own_models_only() -> None:
    directory, _ = two_keys()
    snapshot = pool("openai_compat", models={"fast": ["n1/openai_compat"], "secret": ["n1/openai_compat"]})
    async with site_of(snapshot, keys=directory) as site:
        key = bearer("a")
        info = await site.control.GetServerInfo(server_pb2.GetServerInfoRequest(), metadata=key)
        assert list(info.supported_models) == ["fast"]
        health = await site.control.Health(lifecycle_pb2.HealthRequest(), metadata=key)
        assert [check.name for check in health.checks] == ["model fast"]
        for call in (
            site.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="secret"), metadata=key),
            site.control.Health(lifecycle_pb2.HealthRequest(model="secret"), metadata=key),
        ):
            async with refused(grpc.StatusCode.PERMISSION_DENIED):
                await call
        all_of_them = await site.control.GetServerInfo(
            server_pb2.GetServerInfoRequest(), metadata=bearer("b")
        )
        assert list(all_of_them.supported_models) == ["fast", "secret"]


@pytest.mark.clause("SF-16", "SF-21")
async def test_hints_that_a_key_may_not_give_are_named_in_the_answer() -> None:
    directory, _ = two_keys()
    hints = (("openengine-priority", "-5"), ("openengine-routing-key", "s"))
    async with site_of(pool("openai_compat"), keys=directory) as site:
        call = site.inference.Generate(request(), metadata=(*bearer("a"), *hints), timeout=60)
        stream = await site.stream()
        assert stream.request.session_id == ""
        stream.start(headers=EVENTS)
        told = dict(await call.initial_metadata())
        assert told["iop-ignored"] == "openengine-priority, openengine-routing-key"
        call.cancel()
    async with site_of(pool("openai_compat")) as site:
        call = site.inference.Generate(request(), metadata=hints, timeout=60)
        stream = await site.stream()
        assert stream.request.session_id == ":s"
        stream.start(headers=EVENTS)
        told = dict(await call.initial_metadata())
        assert "iop-ignored" not in told
        assert told["x-iop-queue-ms"].isdigit()
        assert told["x-iop-provider"].startswith("p-")
        assert "n1" not in told["x-iop-provider"]
        call.cancel()


@pytest.mark.clause("SF-21")
async def test_equal_routing_keys_find_the_same_provider() -> None:
    async with site_of(pool("openai_compat", "vllm", "sglang")) as site:
        seen = set()
        for number in range(6):
            call = site.inference.Generate(
                request(), metadata=(("openengine-routing-key", "conversation 1"),), timeout=60
            )
            stream = await site.stream(number)
            seen.add(stream.request.adapter)
            call.cancel()
            await eventually(lambda stream=stream: stream.cancelled == [CancelReason.CLIENT_GONE])
            stream.fail("cancelled")
        assert len(seen) == 1


@pytest.mark.clause("SF-21", "SF-22")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_an_engine_that_speaks_http_gets_a_target_rank_in_its_own_header(kind: str) -> None:
    async with site_of(pool(kind, "openai_compat")) as site:
        told = {"data_parallel_ranks:target-of-n1/" + kind: "0-1"}
        probed = (ProviderSnapshot(id=kind, type=kind, capabilities=told),)
        site.edge.nodes.on_report(site.node, ProviderReport(providers=probed))
        assert (await model_of(site)).extra["iop.data_parallel_ranks"] == "0-1"
        for number in range(2):
            metadata = (("openengine-target-dp-rank", str(number)),)
            call = site.inference.Generate(request(), metadata=metadata, timeout=60)
            stream = await site.stream(number)
            assert stream.request.adapter == kind
            assert (b"x-data-parallel-rank", b"%d" % number) in stream.request.headers
            call.cancel()


@pytest.mark.clause("SF-21")
async def test_a_higher_priority_number_goes_first() -> None:
    async with site_of(pool("openai_compat", capacity=1)) as site:
        first = site.inference.Generate(request(request_id="first"), timeout=60)
        stream = await site.stream()
        calls = []
        for name, priority in (("late", "-5"), ("plain", "0"), ("urgent", "5")):
            metadata = (("openengine-priority", priority),)
            calls.append(
                site.inference.Generate(request(request_id=name, prompt=name), metadata=metadata, timeout=60)
            )
            await eventually(lambda: site.edge.pools.waiting == len(calls))
        order = []
        for number in range(1, 4):
            stream.fail("cancelled")
            stream = await site.stream(number)
            order.append(json.loads(stream.sent_body)["prompt"])
        assert order == ["urgent", "plain", "late"]
        for call in (first, *calls):
            call.cancel()


HOSTILE: list[tuple[tuple[tuple[str, str], ...], str]] = [
    ((("openengine-priority", "1"), ("openengine-priority", "1")), "REPEATED_METADATA"),
    ((("openengine-routing-key", "a"), ("openengine-routing-key", "b")), "REPEATED_METADATA"),
    ((("openengine-target-dp-rank", "0"), ("openengine-target-dp-rank", "0")), "REPEATED_METADATA"),
    ((("openengine-priority", "1_0"),), "MALFORMED_METADATA"),
    ((("openengine-priority", "+1"),), "MALFORMED_METADATA"),
    ((("openengine-priority", "99999999999"),), "MALFORMED_METADATA"),
    ((("openengine-priority", "-0x1"),), "MALFORMED_METADATA"),
    ((("openengine-target-dp-rank", "-1"),), "MALFORMED_METADATA"),
    ((("openengine-target-dp-rank", "01"),), "MALFORMED_METADATA"),
    ((("openengine-routing-key", "x" * 257),), "MALFORMED_METADATA"),
    ((("openengine-routing-key", ""),), "MALFORMED_METADATA"),
]


@pytest.mark.clause("SF-21")
@pytest.mark.parametrize(("metadata", "reason"), HOSTILE)
async def test_hostile_metadata_is_refused_before_anything_is_dispatched(
    metadata: tuple[tuple[str, str], ...], reason: str
) -> None:
    async with site_of() as site:
        async with refused(grpc.StatusCode.INVALID_ARGUMENT) as refusal:
            await read_all(site.inference.Generate(HELLO, metadata=metadata, timeout=60))
        assert refusal.info().reason == reason
        assert site.node.streams == []
        record = site.edge.outcomes.find("r-1")
        assert record is not None
        assert (record.outcome, record.candidates) == (Outcome.REJECTED, ())


@pytest.mark.clause("SF-13", "SF-21", "SF-24")
async def test_what_other_hops_say_badly_is_let_go_and_never_an_error() -> None:
    metadata = (
        ("traceparent", "nonsense"),
        ("tracestate", "x" * 2000),
        ("x-request-id", "two words"),
        ("iop-via", "a, b"),
        ("iop-via", "c" * 600),
    )
    async with site_of() as site:
        call = site.inference.Generate(HELLO, metadata=metadata, timeout=60)
        stream = await site.stream()
        names = dict(stream.request.headers)
        assert b"traceparent" not in names
        assert names[b"x-request-id"] == b"r-1"
        call.cancel()


@pytest.mark.clause("SF-23", "AD-103")
async def test_privileged_and_missing_calls_say_so() -> None:
    async with site_of() as site:
        for call in (
            site.control.LoadLora(lora_pb2.LoadLoraRequest()),
            site.control.UnloadLora(lora_pb2.UnloadLoraRequest(lora_name="x")),
            site.control.Abort(lifecycle_pb2.AbortRequest(all_requests=lifecycle_pb2.AllRequests())),
        ):
            async with refused(grpc.StatusCode.PERMISSION_DENIED):
                await call
        sources = await site.control.GetKvEventSources(kv_pb2.GetKvEventSourcesRequest())
        assert list(sources.sources) == []
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await read_all(site.control.SubscribeKvEvents(kv_pb2.SubscribeKvEventsRequest()))
        async with refused(grpc.StatusCode.UNIMPLEMENTED):
            await site.control.Health(lifecycle_pb2.HealthRequest(include_inference_probe=True))
        assert not (await site.control.ListLoras(lora_pb2.ListLorasRequest())).adapters


@pytest.mark.clause("SF-22", "AD-06")
async def test_health_tells_of_providers_that_would_fail() -> None:
    async with site_of(pool("openai_compat", "vllm")) as site:

        async def state() -> int:
            told = await site.control.Health(lifecycle_pb2.HealthRequest(model="fast"))
            return int(told.state)

        def probed(**health: str) -> None:
            shown = tuple(ProviderSnapshot(id=name, health=word) for name, word in health.items())
            site.edge.nodes.on_report(site.node, ProviderReport(providers=shown))

        assert await state() == lifecycle_pb2.HEALTH_STATE_READY
        probed(vllm="offline", openai_compat="ready")
        assert await state() == lifecycle_pb2.HEALTH_STATE_DEGRADED
        probed(vllm="offline", openai_compat="not_ready")
        assert await state() == lifecycle_pb2.HEALTH_STATE_NOT_READY
        probed(vllm="ready", openai_compat="ready")
        site.node.lose()
        assert await state() == lifecycle_pb2.HEALTH_STATE_NOT_READY
