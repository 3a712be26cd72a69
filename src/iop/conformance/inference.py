"""Work for the server to be busy with: over `openengine.v1.Inference`, or over its OpenAI HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import grpc

from iop.conformance.model import CheckNotRun
from iop.pb.openengine.v1 import generation_pb2, openengine_pb2_grpc

__all__ = ["Generation", "GrpcInference", "HttpInference", "Inference", "Traffic"]

LONG_TOKENS: Final = (60_000, 15_000, 3_800, 1_900, 900, 200)
"""Lengths to try, longest first: a context limit that is not known here refuses what is too long."""

TRIAL_S: Final = 0.2
"""How long a request that was begun is looked at, to learn how fast its text comes."""

FINISHES_S: Final = 1.5
"""How long a request should take that must be met by a pause and whose end is waited for after it."""

CALLERS: Final = 2
"""Who ask one after the other, so that a pause meets somebody's request on whatever engine."""

FEWEST_TOKENS: Final = 16

PROMPT: Final = "Tell me a story about the sea."
BEGINS_S: Final = 20.0
LONG_BEGINS_S: Final = 5.0
"""For lengths that need not be served: a server may hold back what it has no memory for."""

ENDS_S: Final = 120.0
AT_ONCE: Final = 4
"""Requests that keep a server busy: several, since each slows the others down."""

LINE_BYTES_MAX: Final = 1024 * 1024
UNWANTED: Final = frozenset({"UNIMPLEMENTED", "INVALID_ARGUMENT", "HTTP 400", "HTTP 422", "HTTP 501"})
"""How servers answer a request that asks for something they do not offer."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What came of one request.

    Attributes:
        tokens: how many pieces of text arrived.
        outcome: `finished`, `error`, or the status that ended it; empty while it runs.
    """

    tokens: int = 0
    outcome: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it is over, however."""
        return bool(self.outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What was learnt of a server.

    Attributes:
        longest: tokens of the longest request that it takes.
        per_s: pieces of text in a second, of one request alone.
    """

    longest: int
    per_s: float

    @property
    def finishing(self) -> int:
        """Tokens of a request that a pause can meet and whose end can be waited for."""
        return min(self.longest, max(FEWEST_TOKENS, int(self.per_s * FINISHES_S)))


class Traffic:
    """Requests of several callers, each making its next one when the last has ended.

    A single request may be over before a pause gets there, on an engine that is fast or lets nothing be long.

    Attributes:
        generations: all requests so far.
    """

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self._goes_on = True

    def end(self) -> None:
        """No further requests; those that run go on."""
        self._goes_on = False

    @property
    def goes_on(self) -> bool:
        """Whether callers make further requests."""
        return self._goes_on

    def running(self) -> list[Generation]:
        """Requests that have begun to be answered and have no end yet."""
        return [g for g in self.generations if g.tokens and not g.has_ended]

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(g.tokens for g in self.generations)


class Inference(Protocol):
    """A caller of the server's inference.

    Attributes:
        paces: by model, what was learnt once.
    """

    paces: dict[str, Pace]

    @abstractmethod
    async def take(
        self, model: str, *, tokens: int, goes_on: bool, generation: Generation, begun: asyncio.Event
    ) -> None:
        """Make one request and note what comes of it until it ends.

        Args:
            model: public id.
            tokens: most of them.
            goes_on: ask that it does not end before.
            generation: where it is noted.
            begun: set at its first token or its end.
        """
        ...

    @contextlib.asynccontextmanager
    async def generating(
        self, model: str, *, tokens: int, goes_on: bool = False, must_begin: bool = True
    ) -> AsyncIterator[Generation]:
        """One request that runs in the background of the block; it is called off when the block ends.

        Raises:
            CheckNotRun: it does not begin.
        """
        generation, begun = Generation(), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(
                self.take(model, tokens=tokens, goes_on=goes_on, generation=generation, begun=begun),
                name="generation",
            )
            try:
                if must_begin:
                    await _begins(begun, generation)
                yield generation
            finally:
                task.cancel()

    @contextlib.asynccontextmanager
    async def traffic(self, model: str, *, must_finish: bool) -> AsyncIterator[Traffic]:
        """Requests that follow one another for the whole block; all are called off when it ends.

        Args:
            must_finish: they are to end by themselves soon; else they are as long as can be.

        Raises:
            CheckNotRun: none begins.
        """
        pace = await self._pace(model)
        length = pace.finishing if must_finish else pace.longest
        # Of different lengths, or all would end in the same moment, which may be the one in which a pause arrives.
        lengths = [min(pace.longest, length + index * length // CALLERS) for index in range(CALLERS)]
        traffic, begun, first = Traffic(), asyncio.Event(), Generation()
        async with asyncio.TaskGroup() as tasks:
            callers = [
                tasks.create_task(
                    self._call_again(traffic, model, each, first=first, begun=begun), name="caller"
                )
                for each in lengths
            ]
            try:
                await _begins(begun, first)
                yield traffic
            finally:
                for caller in callers:
                    caller.cancel()

    async def _call_again(
        self, traffic: Traffic, model: str, length: int, *, first: Generation, begun: asyncio.Event
    ) -> None:
        generation = first if not traffic.generations else Generation()
        while traffic.goes_on:
            traffic.generations.append(generation)
            await self.take(model, tokens=length, goes_on=True, generation=generation, begun=begun)
            if generation.outcome != "finished":
                return  # refused or ended by a pause: whether it may come again is for the check to say
            generation, begun = Generation(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def busy(self, model: str) -> AsyncIterator[None]:
        """Several requests at once, as long as can be."""
        length = (await self._pace(model)).longest
        async with contextlib.AsyncExitStack() as stack:
            for index in range(AT_ONCE):
                await stack.enter_async_context(
                    self.generating(model, tokens=length, goes_on=True, must_begin=index == 0)
                )
            yield

    async def _pace(self, model: str) -> Pace:
        """The greatest length that is not refused, and how fast it comes."""
        if model not in self.paces:
            self.paces[model] = await self._learn_pace(model)
        return self.paces[model]

    async def _learn_pace(self, model: str) -> Pace:
        outcome = ""
        for length in LONG_TOKENS:
            generation, begun = Generation(), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                trial = tasks.create_task(
                    self.take(model, tokens=length, goes_on=True, generation=generation, begun=begun),
                    name="trial",
                )
                limit_s = BEGINS_S if length == LONG_TOKENS[-1] else LONG_BEGINS_S
                try:
                    async with asyncio.timeout(limit_s):
                        await begun.wait()
                    per_s = await _speed(trial, generation)
                except TimeoutError:
                    outcome = "no token"
                    continue
                finally:
                    trial.cancel()
            outcome = generation.outcome
            if outcome not in UNWANTED:
                return Pace(longest=length, per_s=per_s)
        if outcome == "no token":
            raise CheckNotRun("the inference address gives no token")
        raise CheckNotRun(
            f"the inference address refuses long requests that ignore the end of sequence: {outcome}"
        )


async def _speed(trial: asyncio.Task[None], generation: Generation) -> float:
    """Pieces of text in a second, from the first one on."""
    clock, before = asyncio.get_running_loop(), generation.tokens
    begun = clock.time()
    await asyncio.wait({trial}, timeout=TRIAL_S)
    return max(1, generation.tokens - before) / max(clock.time() - begun, 0.001)


async def _begins(begun: asyncio.Event, generation: Generation) -> None:
    try:
        async with asyncio.timeout(BEGINS_S):
            await begun.wait()
    except TimeoutError:
        raise CheckNotRun("the inference address gives no token") from None
    if generation.outcome not in {"", "finished"}:
        raise CheckNotRun(f"the inference address refuses requests: {generation.outcome}")


class GrpcInference(Inference):
    """By `openengine.v1.Inference`."""

    def __init__(self, channel: grpc.aio.Channel, *, token: str | None = None) -> None:
        self.channel = channel
        self._stub: Any = openengine_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.paces: dict[str, Pace] = {}

    async def take(
        self, model: str, *, tokens: int, goes_on: bool, generation: Generation, begun: asyncio.Event
    ) -> None:
        """As the port says."""
        stopping = generation_pb2.StoppingOptions(max_tokens=tokens)
        if goes_on:
            stopping.ignore_eos = True
        request = generation_pb2.GenerateRequest(model=model, prompt=PROMPT, stopping=stopping)
        stream = self._stub.Generate(request, metadata=self._metadata, timeout=ENDS_S)
        try:
            async for message in stream:
                match message.WhichOneof("event"):
                    case "token":
                        generation.tokens += 1
                        begun.set()
                    case "finished":
                        generation.outcome = generation.outcome or "finished"
                    case "error":
                        generation.outcome = "error"
                    case _:
                        pass
            generation.outcome = generation.outcome or "ended without a word"
        except grpc.aio.AioRpcError as error:
            generation.outcome = error.code().name
        finally:
            stream.cancel()
            begun.set()


class HttpInference(Inference):
    """By `POST /v1/chat/completions`, streamed.

    Args:
        url: `http://HOST:PORT`; the path is added.
        token: API key, where it wants one.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._token = token
        self.paces: dict[str, Pace] = {}

    async def take(
        self, model: str, *, tokens: int, goes_on: bool, generation: Generation, begun: asyncio.Event
    ) -> None:
        """As the port says."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(ENDS_S):
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=LINE_BYTES_MAX)
                writer.write(self._request(model, tokens=tokens, goes_on=goes_on))
                await writer.drain()
                await self._read(reader, generation, begun)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            generation.outcome = generation.outcome or f"broken: {type(error).__name__}"
        finally:
            begun.set()
            if writer is not None:
                writer.close()

    def _request(self, model: str, *, tokens: int, goes_on: bool) -> bytes:
        body: dict[str, Any] = {
            "model": model,
            "stream": True,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": PROMPT}],
        }
        if goes_on:
            body["ignore_eos"] = True
        payload = json.dumps(body).encode()
        head = [
            "POST /v1/chat/completions HTTP/1.1",
            f"host: {self._host}:{self._port}",
            "content-type: application/json",
            f"content-length: {len(payload)}",
            "connection: close",
        ]
        if self._token:
            head.append(f"authorization: Bearer {self._token}")
        return "\r\n".join([*head, "", ""]).encode() + payload

    async def _read(self, reader: asyncio.StreamReader, generation: Generation, begun: asyncio.Event) -> None:
        words = (await reader.readline()).split()
        if len(words) < 2:
            raise EOFError  # whoever was killed before it answered says nothing
        status = int(words[1])
        is_chunked = False
        while (line := await reader.readline()).strip():
            is_chunked = is_chunked or line.lower().replace(b" ", b"") == b"transfer-encoding:chunked\r\n"
        if status != 200:
            generation.outcome = f"HTTP {status}"
            return
        left = b""
        async for piece in _pieces(reader, is_chunked=is_chunked):
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    _note(line[5:].strip(), generation)
                    begun.set()
        generation.outcome = generation.outcome or "ended without a word"


async def _pieces(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    while True:
        if not is_chunked:
            piece = await reader.read(65_536)
        else:
            size = int((await reader.readline()).split(b";")[0], 16)
            piece = await reader.readexactly(size)
            await reader.readline()
        if not piece:
            return
        yield piece


def _note(data: bytes, generation: Generation) -> None:
    """What one event of the stream says."""
    if data == b"[DONE]":
        return
    shape = json.loads(data)
    if "error" in shape:
        generation.outcome = "error"
        return
    for choice in shape.get("choices", ()):
        generation.tokens += 1
        reason = choice.get("finish_reason")
        if reason:
            generation.outcome = generation.outcome or (
                "finished" if reason in {"stop", "length", "tool_calls"} else str(reason)
            )
