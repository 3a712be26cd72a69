"""What GetModelInfo advertises, Generate accepts; what it does not, Generate refuses before acceptance (SF-22)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from test_grpc_edge_port import Site, read_all, site_of
from test_grpc_edge_providers import pool, report

from iop.pb.openengine.v1 import generation_pb2 as pb
from iop.pb.openengine.v1 import model_pb2

KINDS = ("openai_compat", "vllm", "sglang", "trtllm", "llamacpp", "ollama", "cli", "openengine")

Made = Callable[[], pb.GenerateRequest]
Told = Callable[[model_pb2.ModelInfo], object]


def asks(**fields: Any) -> Made:
    return lambda: pb.GenerateRequest(model="fast", **({"prompt": "p"} | fields))


def scores(**fields: Any) -> Made:
    return asks(response=pb.ResponseOptions(**fields))


def formatted(mode: str, prompt: object) -> Made:
    def make() -> pb.GenerateRequest:
        request = pb.GenerateRequest(model="fast", prompt=json.dumps(prompt))
        request.extra.update({"prompt_format": mode})
        return request

    return make


def mode_of(number: int, where: str) -> Told:
    return lambda told: number in getattr(told.generation, where).candidate_selection_modes


HI = [{"role": "user", "content": "hi"}]
TOP, IDS, ALL = 1, 2, 3

FEATURES: dict[str, tuple[Made, Told]] = {
    "text": (asks(), lambda told: told.supports_text_input),
    "token ids": (
        lambda: pb.GenerateRequest(model="fast", token_ids=pb.TokenIds(ids=[1, 2])),
        lambda told: told.supports_token_ids_input,
    ),
    "two outputs": (
        asks(sampling=pb.SamplingParams(num_sequences=2)),
        lambda told: told.generation.max_num_sequences >= 2,
    ),
    "output scores": (
        scores(return_output_logprobs=True),
        lambda told: told.generation.output_logprobs.supported,
    ),
    "top candidates": (
        scores(return_output_logprobs=True, output_candidates=pb.CandidateTokenSelection(top_n=2)),
        mode_of(TOP, "output_logprobs"),
    ),
    "these candidates": (
        scores(
            return_output_logprobs=True,
            output_candidates=pb.CandidateTokenSelection(token_ids=pb.TokenIds(ids=[1])),
        ),
        mode_of(IDS, "output_logprobs"),
    ),
    "every candidate": (
        scores(
            return_output_logprobs=True,
            output_candidates=pb.CandidateTokenSelection(all=pb.AllCandidates()),
        ),
        mode_of(ALL, "output_logprobs"),
    ),
    "prompt scores": (
        scores(return_prompt_logprobs=True, prompt_logprob_start=1),
        lambda told: told.generation.prompt_logprobs.supported,
    ),
    "stop in output": (
        asks(stopping=pb.StoppingOptions(include_stop_in_output=True)),
        lambda told: told.generation.supports_stop_in_output,
    ),
    "cache salt": (
        asks(kv=pb.KvOptions(cache_salt="s")),
        lambda told: told.generation.supports_cache_salt,
    ),
    "cache bypass": (
        asks(kv=pb.KvOptions(bypass_prefix_cache=True)),
        lambda told: told.generation.supports_prefix_cache_bypass,
    ),
    "lora": (asks(lora_name="poet"), lambda told: told.supports_lora),
    "media": (
        asks(media=[pb.MediaItem(modality=pb.MODALITY_IMAGE, url="http://x/y.png")]),
        lambda told: told.supports_multimodal,
    ),
    **{
        f"guide {kind}": (
            asks(guided=pb.GuidedDecoding(**guide)),
            lambda told, mode=mode: mode in told.generation.guided_decoding.modes,
        )
        for kind, mode, guide in (
            ("json_schema", 1, {"json_schema": "{}"}),
            ("regex", 2, {"regex": "a"}),
            ("ebnf_grammar", 3, {"ebnf_grammar": "g"}),
            ("structural_tag", 4, {"structural_tag": "t"}),
            ("choice", 5, {"choice": pb.ChoiceConstraint(choices=["a"])}),
            ("json_object", 6, {"json_object": pb.JsonObjectConstraint()}),
        )
    },
    "messages": (formatted("chat_messages", HI), lambda told: "chat_messages" in told.tokenizer_modes),
    "a whole chat": (
        formatted("openai_chat", {"messages": HI}),
        lambda told: "openai_chat" in told.tokenizer_modes,
    ),
    "an unknown format": (formatted("runes", HI), lambda _told: False),
    "a hand-over": (
        asks(kv=pb.KvOptions(session={"session_id": "s"})),
        lambda _told: False,
    ),
    "a guide's backend": (
        asks(guided=pb.GuidedDecoding(regex="a", backend="b")),
        lambda _told: False,
    ),
}

EVERYTHING = model_pb2.GenerationCapabilities(
    prompt_logprobs=model_pb2.LogprobCapabilities(supported=True, candidate_selection_modes=[TOP, IDS, ALL]),  # type: ignore[list-item]
    output_logprobs=model_pb2.LogprobCapabilities(supported=True, candidate_selection_modes=[TOP, IDS, ALL]),  # type: ignore[list-item]
    guided_decoding=model_pb2.GuidedDecodingCapabilities(supported=True, modes=[1, 2, 3, 4, 5, 6]),  # type: ignore[list-item]
    max_num_sequences=4,
    supports_stop_in_output=True,
    supports_cache_salt=True,
    supports_prefix_cache_bypass=True,
)


async def is_accepted(site: Site, request: pb.GenerateRequest) -> bool:
    """Whether a request reaches the provider; otherwise it must be refused as a feature, with nothing sent."""
    before = len(site.node.streams)
    call = site.inference.Generate(request, timeout=60)
    read = asyncio.ensure_future(read_all(call))  # noqa: TID251 - a test's own wait
    try:
        async with asyncio.timeout(30):
            while len(site.node.streams) == before and not read.done():  # noqa: ASYNC110 - level-triggered
                await asyncio.sleep(0.001)
        if len(site.node.streams) > before:
            return True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED or (
            caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            and "num_sequences" in (caught.value.details() or "")
        )
        return False
    finally:
        call.cancel()
        await asyncio.wait([read])
        for stream in list(site.node.open_streams):
            stream.fail("cancelled")


@pytest.mark.clause("SF-22")
@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] + [("vllm", "ollama"), ("llamacpp", "cli")])
async def test_what_is_advertised_is_accepted_and_nothing_else(kinds: tuple[str, ...]) -> None:
    async with site_of(pool(*kinds)) as site:
        if kinds == ("openengine",):
            report(
                site,
                generation=EVERYTHING,
                supports_token_ids_input=True,
                supports_lora=True,
                supports_multimodal=True,
                tokenizer_modes=["text", "chat_messages", "openai_chat"],
            )
        told = await site.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast"))
        found = {name: await is_accepted(site, make()) for name, (make, _) in FEATURES.items()}
        assert found == {name: bool(advertises(told)) for name, (_, advertises) in FEATURES.items()}
        if kinds == ("openengine",):
            refused = {name for name, is_there in found.items() if not is_there}
            assert refused == {"an unknown format", "a hand-over", "a guide's backend"}


@pytest.mark.clause("SF-20")
async def test_a_start_without_prompt_scores_is_refused_and_not_ignored() -> None:
    async with site_of(pool("openengine")) as site:
        request = scores(prompt_logprob_start=3)()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(site.inference.Generate(request, timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
