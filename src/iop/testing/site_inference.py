"""Inference of the conformance suite's right server: words at a steady pace, which pauses queue, refuse, end or freeze.

It serves on a listener of its own beside the admin one, over the fleet's group ``a``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from iop.admin.enums import AdmissionPolicy
from iop.core.ids import GroupId, ParticipantId
from iop.pb.openengine.v1 import error_pb2, generation_pb2, openengine_pb2_grpc, server_pb2

if TYPE_CHECKING:
    from iop.testing.conformance_site import SiteFleet

__all__ = ["GROUP", "SiteInference"]

GROUP: Final = GroupId("a")
PACE_S: Final = 0.004
"""Between two words: a request of 300 is met by whatever comes within a second."""


class SiteInference(openengine_pb2_grpc.InferenceServicer, openengine_pb2_grpc.ControlServicer):
    """What callers of the site get; a wrong server overrides one of its steps."""

    def __init__(self, fleet: SiteFleet) -> None:
        self.fleet = fleet

    async def Generate(  # noqa: N802 - the service's own name
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """A word for each token that was asked for."""
        await self.admit(context)
        fleet, id_ = self.fleet, request.request_id
        aborts, is_over = fleet.aborts, False
        fleet.begin()
        try:
            for number in range(request.stopping.max_tokens or 4):
                await asyncio.sleep(PACE_S)
                await self.turn()
                if fleet.aborts != aborts:
                    is_over = True
                    yield self.ending(id_)
                    return
                token = generation_pb2.TokenOutput(output_index=0, text=f"w{number} ")
                yield generation_pb2.GenerateResponse(request_id=id_, token=token)
            finished = generation_pb2.GenerationFinished(
                output_index=0, reason=generation_pb2.FINISH_REASON_LENGTH
            )
            yield generation_pb2.GenerateResponse(request_id=id_, finished=finished)
        finally:
            fleet.end(was_counted=is_over)

    async def admit(self, context: Any) -> None:
        """Wait for the gate to open, or be refused."""
        while True:
            gate = self.fleet.gates.get(ParticipantId(f"{GROUP}/0"))
            if gate is not None and gate.is_open:
                return
            if gate is not None and gate.admission is AdmissionPolicy.REJECT:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "paused")
            await asyncio.sleep(PACE_S)

    async def turn(self) -> None:
        """Wait while frozen."""
        await self.fleet.thawed.wait()

    def ending(self, request_id: str) -> generation_pb2.GenerateResponse:
        """What a request is told that a pause ended."""
        error = error_pb2.EngineError(
            code=error_pb2.ERROR_CODE_DRAINING, message="ended by an operator", retryable=True
        )
        return generation_pb2.GenerateResponse(request_id=request_id, error=error)

    async def GetServerInfo(self, _request: Any, _context: Any) -> server_pb2.ServerInfo:  # noqa: N802
        """That there is an admin server too (AD-50)."""
        info = server_pb2.ServerInfo(engine_name="site", supported_models=["m"])
        info.extra.update({"openengine.admin": {"profile_revision": 1}})
        return info

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listen on a free port; gives the address."""
        server = grpc.aio.server()
        openengine_pb2_grpc.add_InferenceServicer_to_server(self, server)  # type: ignore[no-untyped-call,unused-ignore]
        openengine_pb2_grpc.add_ControlServicer_to_server(self, server)  # type: ignore[no-untyped-call,unused-ignore]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)
