"""A scripted Inference and Control server, and a whole OpenEngineAdmin server over a fake fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from iop.adapters.base import Adapter
from iop.admin.participant import ProgressSink
from iop.admin.permissions import PRESETS
from iop.admin.steps import Step, StepCall, StepResult
from iop.api.grpc.auth import PrincipalDirectory, PrincipalGrant, secret_sha256
from iop.api.grpc.listeners import admin_listener
from iop.api.grpc.server import ListenerSettings
from iop.pb.openengine.v1 import (
    error_pb2,
    generation_pb2,
    lifecycle_pb2,
    model_pb2,
    openengine_pb2_grpc,
    server_pb2,
)
from iop.testing.admin_world import AdminWorld
from iop.testing.waiting import PATIENCE_S

ADMIN_TOKEN = "engine-admin"
OTHER_TOKEN = "somebody-else"


@dataclass
class ScriptedEngine(openengine_pb2_grpc.InferenceServicer, openengine_pb2_grpc.ControlServicer):
    """Streams one short word per token until the request's bound; the test can hold, break and refuse it."""

    requests: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    in_flight: int = 0
    held: bool = False
    refuse_with: tuple[grpc.StatusCode, str] | None = None
    fail_after: int | None = None
    break_after: int | None = None
    forget_finish: bool = False
    prompt_formats: list[str] = field(default_factory=list)
    health: int = lifecycle_pb2.HEALTH_STATE_READY
    instance: str = "engine-1"
    takes_priority: bool = False
    finish_message: str = ""

    async def Generate(  # noqa: N802 - the service's own name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.refuse_with is not None:
            await context.abort(*self.refuse_with)
        self.in_flight += 1
        try:
            await context.send_initial_metadata((("openengine-weight-version", "v7"),))
            async for response in self._answers(request, context):
                yield response
        finally:
            self.in_flight -= 1

    async def _answers(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        tokens = request.stopping.max_tokens or 4
        outputs = request.sampling.num_sequences or 1
        for count in range(tokens):
            if self.fail_after == count:
                error = error_pb2.EngineError(
                    code=error_pb2.ERROR_CODE_DRAINING, message="ended by an operator", retryable=True
                )
                yield generation_pb2.GenerateResponse(request_id=request.request_id, error=error)
                return
            if self.break_after == count:
                await context.abort(grpc.StatusCode.INTERNAL, "broke")
            for index in range(outputs):
                token = generation_pb2.TokenOutput(output_index=index, text=f"w{count} ")
                yield generation_pb2.GenerateResponse(request_id=request.request_id, token=token)
            if self.held:
                await asyncio.Event().wait()
        if self.forget_finish:
            return
        for index in range(outputs):
            finished = generation_pb2.GenerationFinished(
                output_index=index,
                reason=generation_pb2.FINISH_REASON_LENGTH,
                message=self.finish_message,
            )
            response = generation_pb2.GenerateResponse(request_id=request.request_id, finished=finished)
            if index == outputs - 1:
                response.usage.CopyFrom(
                    generation_pb2.Usage(prompt_tokens=3, completion_tokens=tokens * outputs, total_tokens=0)
                )
            yield response

    async def GetServerInfo(self, request: Any, context: Any) -> server_pb2.ServerInfo:  # noqa: N802
        return server_pb2.ServerInfo(
            engine_name="scripted", engine_version="9", instance_id=self.instance, supported_models=["m"]
        )

    async def GetModelInfo(self, request: Any, context: Any) -> model_pb2.ModelInfo:  # noqa: N802
        return model_pb2.ModelInfo(
            model_id="m",
            served_model_name="m",
            tokenizer_modes=self.prompt_formats,
            generation=model_pb2.GenerationCapabilities(supports_priority=self.takes_priority),
        )

    async def GetLoad(self, request: Any, context: Any) -> server_pb2.LoadInfo:  # noqa: N802
        return server_pb2.LoadInfo(running_requests=self.in_flight)

    async def Health(self, request: Any, context: Any) -> lifecycle_pb2.HealthResponse:  # noqa: N802
        return lifecycle_pb2.HealthResponse(state=self.health)  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen on a free port; gives the address."""
        server = grpc.aio.server()
        openengine_pb2_grpc.add_InferenceServicer_to_server(self, server)
        openengine_pb2_grpc.add_ControlServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0.1)


@dataclass
class AdminEngine:
    """An OpenEngineAdmin server with two fake ranks behind a real listener."""

    world: AdminWorld
    address: str


@contextlib.asynccontextmanager
async def admin_engine() -> AsyncIterator[AdminEngine]:
    """Serve one engine's admin listener."""
    grants = [
        PrincipalGrant(name=name, permissions=PRESETS["admin"], token_sha256=secret_sha256(token))
        for name, token in (("node", ADMIN_TOKEN), ("other", OTHER_TOKEN))
    ]
    world = AdminWorld({"g": 2})
    async with world.server() as core:
        settings = ListenerSettings(address="127.0.0.1:0", stop_grace_s=0.2)
        listener = admin_listener(core, PrincipalDirectory(grants), settings)
        async with listener.serving():
            yield AdminEngine(world=world, address=listener.address)


class Held:
    """Holds the engine's steps of one kind until it is let go.

    Attributes:
        reached: the engine is at one.
        gate: lets it go.
    """

    def __init__(self, engine: AdminEngine, kind: type[Step]) -> None:
        self.reached = asyncio.Event()
        self.gate = asyncio.Event()
        fleet, execute = engine.world.fleet, engine.world.fleet.execute

        async def held(call: StepCall, report: ProgressSink) -> StepResult:
            if isinstance(call.body, kind):
                self.reached.set()
                await self.gate.wait()
            return await execute(call, report)

        fleet.execute = held  # type: ignore[method-assign]

    async def give_up(self, adapter: Adapter, call: StepCall) -> None:
        """Begin a step and leave it once the engine is at it."""
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            given_up = tasks.create_task(adapter.execute_step(call, lambda _: None))
            await self.reached.wait()
            given_up.cancel()


def chat_input(max_tokens: int = 4, **fields: Any) -> bytes:
    """A normalised chat body."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, **fields}
    return json.dumps(body).encode()
