"""OpenEngine at an Edge whose provider is a real llama.cpp server: what is advertised is what it does (SF-22)."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from chain_site import Place, edge_yaml, place

from iop.pb.openengine.v1 import generation_pb2, model_pb2

HERE = Path(__file__).resolve().parents[3]
ANSWER = "The sea is wide and the sky is blue today."


def scripted_model(directory: Path) -> Path:
    """A model that says one sentence, made by the script that the engines' tests use."""
    spec = importlib.util.spec_from_file_location("scripted_model", HERE / "tools" / "scripted_model.py")
    assert spec is not None
    assert spec.loader is not None
    tool = sys.modules["scripted_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.make_model(directory, "sea", ANSWER)
    return directory / "sea.gguf"


@asynccontextmanager
async def site(directory: Path) -> AsyncIterator[Place]:
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package)
    script = HERE / "tests" / "integration" / "engines" / "llamacpp_server.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(scripted_model(directory)),
        "",
        "sea",
        "0",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            endpoint = (await process.stdout.readline()).decode().strip()
            assert endpoint, "llama.cpp's server did not start"
            config = edge_yaml({"type": "llamacpp", "endpoint": endpoint}, target="sea")
            async with place(directory / "edge", config) as made:
                yield made
    finally:
        process.kill()
        await process.wait()


async def answer(
    made: Place, request: generation_pb2.GenerateRequest
) -> list[generation_pb2.GenerateResponse]:
    call = made.inference.Generate(request, timeout=60)
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@pytest.mark.clause("SF-20", "SF-22")
async def test_what_is_advertised_for_llamacpp_is_what_it_does(tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        told = await made.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast"))
        assert told.supports_token_ids_input
        wish = generation_pb2.ResponseOptions(
            return_output_logprobs=True,
            output_candidates=generation_pb2.CandidateTokenSelection(top_n=2),
        )
        sampling = generation_pb2.SamplingParams(
            temperature=0.0, top_k=5, min_p=0.1, repetition_penalty=1.0, seed=3
        )
        messages = await answer(
            made,
            generation_pb2.GenerateRequest(model="fast", prompt="Tell me.", sampling=sampling, response=wish),
        )
        assert "".join(message.token.text for message in messages).strip() == ANSWER
        tokens = [token for message in messages for token in message.token.tokens]
        assert "".join(token.token for token in tokens).strip() == ANSWER
        assert all(token.HasField("logprob") and len(token.candidates) == 2 for token in tokens)
        assert messages[-1].finished.reason == generation_pb2.FINISH_REASON_STOP
        assert messages[-1].usage.completion_tokens > 0
        # The ids that it told are ids that it takes.
        short = generation_pb2.StoppingOptions(max_tokens=3)
        ids = generation_pb2.TokenIds(ids=[token.token_id for token in tokens[:2]])
        again = await answer(
            made, generation_pb2.GenerateRequest(model="fast", token_ids=ids, stopping=short)
        )
        assert again[-1].finished.reason == generation_pb2.FINISH_REASON_LENGTH
        assert again[-1].usage.prompt_tokens in {2, 3}  # with a first token of its own, or without
