"""Work for the server to be busy with, over `openengine.v1.Inference`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from iop.conformance.model import CheckNotRun
from iop.pb.openengine.v1 import generation_pb2, openengine_pb2_grpc

__all__ = ["Generation", "Inference"]

LONG_TOKENS: Final = 4096
PROMPT: Final = "Once upon a time there was a lighthouse."
BEGINS_S: Final = 20.0
AT_ONCE: Final = 4
"""Requests that keep a server busy: several, since one may end early at its context limit."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What came of one request.

    Attributes:
        tokens: how many arrived.
        outcome: `finished`, `error`, or the name of the gRPC status that ended it; empty while it runs.
    """

    tokens: int = 0
    outcome: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it is over, however."""
        return bool(self.outcome)


class Inference:
    """A caller of the inference listener."""

    def __init__(self, channel: grpc.aio.Channel, *, token: str | None = None) -> None:
        self.channel = channel
        self._stub: Any = openengine_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    @contextlib.asynccontextmanager
    async def generating(
        self, model: str, *, tokens: int, must_begin: bool = True
    ) -> AsyncIterator[Generation]:
        """One request that runs in the background of the block; it is cancelled when the block ends.

        Raises:
            CheckNotRun: it does not begin.
        """
        request = generation_pb2.GenerateRequest(
            model=model,
            prompt=PROMPT,
            stopping=generation_pb2.StoppingOptions(max_tokens=tokens, ignore_eos=True),
        )
        generation = Generation()
        begun = asyncio.Event()
        stream = self._stub.Generate(request, metadata=self._metadata, timeout=120.0)

        async def take() -> None:
            try:
                async for message in stream:
                    match message.WhichOneof("event"):
                        case "token":
                            generation.tokens += 1
                        case "finished":
                            generation.outcome = "finished"
                        case "error":
                            generation.outcome = "error"
                        case _:
                            pass
                    begun.set()
                generation.outcome = generation.outcome or "finished"
            except grpc.aio.AioRpcError as error:
                generation.outcome = error.code().name
            finally:
                begun.set()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(take(), name="generation")
            try:
                if must_begin:
                    await self._begins(begun, generation)
                yield generation
            finally:
                stream.cancel()
                task.cancel()

    async def _begins(self, begun: asyncio.Event, generation: Generation) -> None:
        try:
            async with asyncio.timeout(BEGINS_S):
                await begun.wait()
        except TimeoutError:
            raise CheckNotRun("the inference address gives no token") from None
        if generation.outcome not in {"", "finished"}:
            raise CheckNotRun(f"the inference address refuses requests: {generation.outcome}")

    @contextlib.asynccontextmanager
    async def busy(self, model: str) -> AsyncIterator[Generation]:
        """Several long requests at once."""
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(self.generating(model, tokens=LONG_TOKENS))
            for _ in range(AT_ONCE - 1):
                await stack.enter_async_context(self.generating(model, tokens=LONG_TOKENS, must_begin=False))
            yield first
