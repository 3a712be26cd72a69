"""Short ways to talk to an engine in tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from iop.engine import (
    Engine,
    Finished,
    GenerationEvent,
    GenerationRequest,
    GenerationStream,
    Sampling,
    Stopping,
    TokenChunk,
)

GREEDY = Sampling(temperature=0.0)


@dataclass
class Answer:
    """A whole answer of one sequence."""

    text: str
    tokens: list[int]
    finished: Finished
    versions: list[str]


def request(
    request_id: str,
    prompt: str | tuple[int, ...] = "Once upon a time",
    *,
    max_tokens: int = 40,
    **more: object,
) -> GenerationRequest:
    fields = {"sampling": GREEDY, "stopping": Stopping(max_tokens=max_tokens, ignore_eos=True), **more}
    return GenerationRequest(request_id=request_id, prompt=prompt, **fields)  # type: ignore[arg-type]  # test shorthand


async def collect(stream: GenerationStream) -> list[GenerationEvent]:
    async with stream:
        return [event async for event in stream]


async def answer(engine: Engine, wanted: GenerationRequest) -> Answer:
    events = await collect(engine.generate(wanted))
    return as_answer(events)


def as_answer(events: list[GenerationEvent], index: int = 0) -> Answer:
    chunks = [event for event in events if isinstance(event, TokenChunk) and event.index == index]
    (end,) = [event for event in events if isinstance(event, Finished) and event.index == index]
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.token_ids],
        finished=end,
        versions=[chunk.weight_version for chunk in chunks],
    )


async def eventually(predicate: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Look again on every turn of the loop until it holds."""
    async with asyncio.timeout(within_s):
        while not predicate():  # noqa: ASYNC110  # the predicate is about processes and counters, which signal nobody
            await asyncio.sleep(0)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z" and os.getpid() != pid
