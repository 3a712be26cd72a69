"""What an OpenEngine call wishes for at an Edge holds at the Edge behind it: rank, priority, routing key (SF-21)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from chain_site import TARGET, Place, edge_yaml, inner_adapter, place
from google.rpc import error_details_pb2, status_pb2

from iop.pb.openengine.v1 import generation_pb2, lifecycle_pb2, model_pb2, openengine_pb2_grpc, server_pb2
from iop.testing.waiting import eventually

pytestmark = pytest.mark.clause("SF-21", "SF-22", "SF-24", "EN-04")

RANK = "openengine-target-dp-rank"


@dataclass
class ReplicatedEngine(openengine_pb2_grpc.InferenceServicer, openengine_pb2_grpc.ControlServicer):
    """Two replicas behind one server; remembers which of them each call asked for."""

    first: int
    asked: list[str] = field(default_factory=list)

    async def Generate(  # noqa: N802 - the service's own name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.asked.append(dict(context.invocation_metadata()).get(RANK, "any"))
        finished = generation_pb2.GenerationFinished(output_index=0, reason=generation_pb2.FINISH_REASON_STOP)
        yield generation_pb2.GenerateResponse(
            request_id=request.request_id,
            token=generation_pb2.TokenOutput(output_index=0, text=f"from {self.first}"),
        )
        yield generation_pb2.GenerateResponse(
            request_id=request.request_id, finished=finished, usage=generation_pb2.Usage()
        )

    async def GetServerInfo(self, request: Any, context: Any) -> server_pb2.ServerInfo:  # noqa: N802
        shape = server_pb2.ParallelismInfo(data_parallel_size=2, data_parallel_start_rank=self.first)
        return server_pb2.ServerInfo(engine_name="replicated", parallelism=shape)

    async def GetModelInfo(self, request: Any, context: Any) -> model_pb2.ModelInfo:  # noqa: N802
        return model_pb2.ModelInfo(
            model_id=TARGET, served_model_name=TARGET, tokenizer_modes=["text"], supports_text_input=True
        )

    async def GetLoad(self, request: Any, context: Any) -> server_pb2.LoadInfo:  # noqa: N802
        return server_pb2.LoadInfo()

    async def Health(self, request: Any, context: Any) -> lifecycle_pb2.HealthResponse:  # noqa: N802
        return lifecycle_pb2.HealthResponse(state=lifecycle_pb2.HEALTH_STATE_READY)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        openengine_pb2_grpc.add_InferenceServicer_to_server(self, server)
        openengine_pb2_grpc.add_ControlServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0.1)


@contextlib.asynccontextmanager
async def two_edges(directory: Path, engines: list[ReplicatedEngine]) -> AsyncIterator[tuple[Place, Place]]:
    """An outer and an inner Edge; all engines are in one pool of the inner one."""
    async with asyncio.timeout(60), contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(engine.serving()) for engine in engines]
        names = [f"replicas-{engine.first}" for engine in engines]
        inside = edge_yaml({}, target=TARGET)
        inside["nodes"][0]["adapters"] = [
            {"name": name, "type": "openengine", "openengine": address, "capacity": 4}
            for name, address in zip(names, addresses, strict=True)
        ]
        inside["models"][0]["providers"] = [
            {"node": "n1", "adapter": name, "target": TARGET} for name in names
        ]
        inner = await stack.enter_async_context(place(directory / "inner", inside))
        await eventually(lambda: len(inner.edge.pools.roster.ranks_of("fast")) == 2 * len(engines))
        outside = edge_yaml(inner_adapter("openengine", inner), target="fast")
        outer = await stack.enter_async_context(place(directory / "outer", outside))
        await eventually(
            lambda: outer.edge.pools.roster.ranks_of("fast") == inner.edge.pools.roster.ranks_of("fast")
        )
        yield outer, inner


async def ask(at: Place, rank: str | None) -> str:
    """The text of one generation."""
    metadata = () if rank is None else ((RANK, rank),)
    request = generation_pb2.GenerateRequest(model="fast", prompt="p")
    text = ""
    call = at.inference.Generate(request, metadata=metadata, timeout=30)
    while (message := await call.read()) is not grpc.aio.EOF:
        text += message.token.text
    return text


def refusal_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, str]:
    rich = status_pb2.Status.FromString(
        next(value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin")
    )
    info = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(info)
    return error.code(), info.reason, error.details()


async def test_a_rank_is_served_by_the_engine_that_has_it_through_one_edge_and_two(tmp_path: Path) -> None:
    engines = [ReplicatedEngine(0), ReplicatedEngine(2)]
    async with two_edges(tmp_path, engines) as edges:
        for at in edges:
            for rank in range(4):
                engine = engines[rank // 2]
                assert await ask(at, str(rank)) == f"from {engine.first}"
                assert engine.asked.pop() == str(rank)
            assert all(not engine.asked for engine in engines)
            await ask(at, None)
            assert [name for engine in engines for name in engine.asked] == ["any"]
            engines[0].asked.clear()
            engines[1].asked.clear()

            told = await at.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast"))
            assert told.extra["iop.data_parallel_ranks"] == "0-3"
            shape = (await at.control.GetServerInfo(server_pb2.GetServerInfoRequest())).parallelism
            assert (shape.data_parallel_size, shape.data_parallel_start_rank) == (4, 0)

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(at, "4")
            code, reason, words = refusal_of(caught.value)
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
            assert RANK in words
            assert "0-3" in words
        for at in edges:
            await at.settled()


async def test_a_pool_that_told_of_no_ranks_refuses_one_by_name_and_says_what_to_do(tmp_path: Path) -> None:
    config = edge_yaml({"type": "openai_compat", "endpoint": "http://127.0.0.1:9"}, target=TARGET)
    async with asyncio.timeout(60), place(tmp_path, config) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(edge, "0")
        code, reason, words = refusal_of(caught.value)
        assert (code, reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED_FEATURE")
        assert RANK in words
        assert "GetModelInfo" in words
        told = await edge.control.GetModelInfo(model_pb2.GetModelInfoRequest(model="fast"))
        assert told.extra["iop.data_parallel_ranks"] == ""
        shape = (await edge.control.GetServerInfo(server_pb2.GetServerInfoRequest())).parallelism
        assert not shape.HasField("data_parallel_size")


async def test_a_wish_that_the_edge_behind_did_not_follow_is_told_at_the_first(tmp_path: Path) -> None:
    (tmp_path / "chain.key").write_text("chain-key-of-some-length")
    key = f"file:{tmp_path / 'chain.key'}"
    async with asyncio.timeout(60), ReplicatedEngine(0).serving() as address:
        keys = {"api_keys": [{"name": "outer", "key": key, "may": ["session"]}]}
        inside = edge_yaml({"type": "openengine", "openengine": address}, target=TARGET, edge=keys)
        async with place(tmp_path / "inner", inside) as inner:
            adapter = {**inner_adapter("openengine", inner), "api_key": key}
            async with place(tmp_path / "outer", edge_yaml(adapter, target="fast")) as outer:
                request = generation_pb2.GenerateRequest(model="fast", prompt="p")
                wishes = (("openengine-priority", "3"), ("openengine-routing-key", "k"))
                await eventually(lambda: outer.edge.pools.roster.ranks_of("fast"))
                call = outer.inference.Generate(request, metadata=wishes, timeout=30)
                assert dict(await call.initial_metadata())["iop-ignored"] == "openengine-priority"
                while await call.read() is not grpc.aio.EOF:
                    pass
