"""Live requests and the loop that steps them: plan, let the ranks compute, choose tokens, send events.

All state changes happen on the event loop with no wait in between. ``idle`` is held during a step; whoever else holds
it knows that the ranks compute nothing and that blocks may change hands.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np

from iop.admin.enums import AdmissionPolicy
from iop.core.errors import AlreadyExists, Draining, InvalidRequest, IopError, Overloaded
from iop.engine.chat import BOS, END
from iop.engine.checkpoint import ModelConfig
from iop.engine.exact import F32
from iop.engine.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    PromptScored,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from iop.engine.output import Ending, OutputText
from iop.engine.ranks import RankGroup
from iop.engine.sampler import TokenHistory, choose, random_stream, score
from iop.engine.scheduler import Hold, Scheduler, Sequence, StepPlan, Work
from iop.engine.settings import EngineSettings
from iop.engine.tokenizer import Tokenizer

__all__ = ["GenerationStream", "Live", "Runner", "StepRecord", "Totals"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class _Output:
    """One of a request's ``n`` alternatives."""

    index: int
    sequence: Sequence
    text: OutputText
    history: TokenHistory
    random: np.random.Generator
    versions: list[str] = field(default_factory=list)
    is_done: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """One accepted request until its last event was taken or its caller left."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    outputs: list[_Output]
    # Bounded by the request itself: at most one event per token and one per end, and tokens end with the context.
    events: deque[GenerationEvent] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    prompt_scores: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    is_prompt_scored: bool = False
    error: IopError | None = None
    is_over: bool = False

    @property
    def has_started(self) -> bool:
        """Whether any of it has held a slot."""
        return any(output.sequence.cached_tokens is not None for output in self.outputs)

    def send(self, event: GenerationEvent) -> None:
        """Hand an event to the caller."""
        self.events.append(event)
        self.wake.set()


class GenerationStream:
    """Events of one accepted request: an async iterator that is also an async context manager.

    Ends after the ``Finished`` that carries ``usage``. Raises ``Unavailable`` when the engine fails under it. Closing
    it, leaving its ``async with`` or cancelling the task that waits in it takes the request out of the scheduler at
    once; that is idempotent and does nothing after the end. One reader at a time.

    Attributes:
        request_id: the request's.
        prompt_tokens: length of the prompt as tokenised.
        weight_version: the weights at acceptance.
    """

    def __init__(self, live: Live, *, cancel: Callable[[Live], None], weight_version: str) -> None:
        self._live = live
        self._cancel = cancel
        self.request_id = live.request.request_id
        self.prompt_tokens = len(live.prompt)
        self.weight_version = weight_version

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        live = self._live
        while not live.events:
            if live.error is not None:
                raise live.error
            if live.is_over:
                raise StopAsyncIteration
            live.wake.clear()
            try:
                await live.wake.wait()
            except asyncio.CancelledError:
                self._cancel(live)
                raise
        return live.events.popleft()

    async def aclose(self) -> None:
        """Cancel what has not finished. Idempotent."""
        self._cancel(self._live)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@dataclass(slots=True, kw_only=True)
class Totals:
    """Counts since the start."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    aborted: int = 0
    overloaded: int = 0
    tokens: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step for a scheduler profile. Times are monotonic seconds."""

    began: float
    ended: float
    works: tuple[tuple[str, int, int], ...]
    running: int
    waiting: int


class Runner:
    """Owns the live requests. ``rejects`` turns new ones away while not empty; the scheduler's holds let them wait."""

    def __init__(
        self,
        *,
        settings: EngineSettings,
        config: ModelConfig,
        tokenizer: Tokenizer,
        scheduler: Scheduler,
        ranks: RankGroup,
        weight_version: str,
    ) -> None:
        self._settings = settings
        self._config = config
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._eos = tokenizer.specials[END]
        self._bos = tokenizer.specials[BOS]
        self._arrivals = 0
        self._wake = asyncio.Event()
        self.scheduler = scheduler
        self.weight_version = weight_version
        self.live: dict[str, Live] = {}
        self.totals = Totals()
        self.idle = asyncio.Lock()
        self.changed = asyncio.Event()
        self.rejects: set[Hold] = set()
        self.failure: IopError | None = None
        self.on_step: Callable[[StepRecord], None] | None = None
        self._owner: dict[Sequence, tuple[Live, _Output]] = {}

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Accept a request or say why not; see ``Engine.generate``."""
        if self.failure is not None:
            raise self.failure
        if self.rejects:
            raise Draining("The engine is paused; try again later or elsewhere.", reason="PAUSED")
        request.validate(vocabulary_size=self._config.vocabulary, context_tokens=self._config.context_tokens)
        if request.request_id in self.live:
            raise AlreadyExists("A live request has this `request_id`.", details={"field": "request_id"})
        self._check_room(request.n)
        prompt = self._prompt_of(request)
        tokens_max = self._tokens_max(request, len(prompt))
        live = self._enqueue(request, prompt, tokens_max)
        self.totals.accepted += 1
        self.wake()
        return GenerationStream(live, cancel=self.cancel, weight_version=self.weight_version)

    def hold(self, hold: Hold, *, admission: AdmissionPolicy | None) -> None:
        """Close admission for one cause, with what happens to new requests; None lifts that cause's hold."""
        for holds, wanted in (
            (self.scheduler.holds, admission is not None),
            (self.rejects, admission is AdmissionPolicy.REJECT),
        ):
            if wanted:
                holds.add(hold)
            else:
                holds.discard(hold)
        self.wake()

    def _check_room(self, count: int) -> None:
        scheduler = self.scheduler
        can_start = scheduler.can_run and scheduler.can_admit
        room = self._settings.waiting_max + (
            max(0, scheduler.slots - len(scheduler.running)) if can_start else 0
        )
        if len(scheduler.waiting) + count > room:
            self.totals.overloaded += 1
            raise Overloaded(
                "The engine's waiting queue is full; try again later.",
                reason="WAITING_FULL",
                details={"waiting_max": str(self._settings.waiting_max)},
            )

    def _prompt_of(self, request: GenerationRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, tuple):
            if not request.prompt:
                raise InvalidRequest("`prompt` must hold at least one token.", details={"field": "prompt"})
            return request.prompt
        # No token stands for more than 64 bytes, so text beyond that many times the context cannot fit.
        if len(request.prompt) > 64 * self._config.context_tokens:
            raise self._too_long()
        return (self._bos, *self._tokenizer.encode(request.prompt))

    def _tokens_max(self, request: GenerationRequest, prompt_tokens: int) -> int:
        room = self._config.context_tokens - prompt_tokens
        if room < 1:
            raise self._too_long()
        wanted = request.stopping.max_tokens
        if wanted is not None and wanted > room:
            raise InvalidRequest(
                f"`max_tokens` must not exceed {room}: the prompt has {prompt_tokens} tokens and the context"
                f" {self._config.context_tokens}.",
                reason="CONTEXT_EXCEEDED",
                details={"field": "max_tokens", "limit": str(room)},
            )
        return room if wanted is None else wanted

    def _too_long(self) -> InvalidRequest:
        return InvalidRequest(
            f"`prompt` must be shorter than the context of {self._config.context_tokens} tokens.",
            reason="CONTEXT_EXCEEDED",
            details={"field": "prompt", "limit": str(self._config.context_tokens)},
        )

    def _enqueue(self, request: GenerationRequest, prompt: tuple[int, ...], tokens_max: int) -> Live:
        seed = request.sampling.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        live = Live(request=request, prompt=prompt, outputs=[])
        leader: Sequence | None = None
        for index in range(request.n):
            self._arrivals += 1
            sequence = Sequence(
                order=(request.priority, self._arrivals),
                tokens=list(prompt),
                prompt_tokens=len(prompt),
                score_prompt=request.prompt_logprobs is not None and index == 0,
                leader=leader,
            )
            leader = leader or sequence
            output = _Output(
                index=index,
                sequence=sequence,
                text=OutputText(
                    self._tokenizer, request.stopping, eos_token_id=self._eos, tokens_max=tokens_max
                ),
                history=TokenHistory(prompt),
                random=random_stream(seed, index),
            )
            live.outputs.append(output)
            self._owner[sequence] = (live, output)
            self.scheduler.add(sequence)
        self.live[request.request_id] = live
        return live

    def cancel(self, live: Live) -> None:
        """Its caller left: take it out at once, without events. Idempotent."""
        if live.is_over:
            return
        self._drop(live)
        self.totals.cancelled += 1

    def end(self, live: Live, *, reason: FinishReason, message: str) -> None:
        """End it from outside, with a terminal event for each sequence that still ran."""
        if live.is_over:
            return
        for output in live.outputs:
            if not output.is_done:
                text = output.text.rest()
                if text:
                    live.send(self._chunk(output, text, (), ()))
                self._finish(live, output, Ending(reason=reason), message)
        self.totals.aborted += 1

    def fail(self, error: IopError) -> None:
        """Everything ends with ``error``, now and for every later request."""
        if self.failure is None:
            self.failure = error
            for live in tuple(self.live.values()):
                live.error = error
                self._drop(live)
                live.wake.set()
            self.wake()

    def _drop(self, live: Live) -> None:
        for output in live.outputs:
            self._owner.pop(output.sequence, None)
            self.scheduler.remove(output.sequence)
            output.is_done = True
        self._forget(live)

    def _forget(self, live: Live) -> None:
        live.is_over = True
        del self.live[live.request.request_id]
        self.changed.set()
        self.wake()

    def wake(self) -> None:
        """Look again whether there is work."""
        self._wake.set()

    async def run(self) -> None:
        """Step while there is work; ends when the engine has failed or its task is cancelled."""
        while self.failure is None:
            if not self.scheduler.has_work():
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self.idle:
                plan = self.scheduler.plan()
                if plan.works:
                    await self._step(plan)
            if not plan.works:
                # Only a drain or a leader in front can leave work that may not start; its end wakes us.
                self._wake.clear()
                await self._wake.wait()

    async def _step(self, plan: StepPlan) -> None:
        began = time.monotonic()
        names = (
            tuple((self._name(work.sequence), work.start, work.end) for work in plan.works)
            if self.on_step
            else ()
        )
        await self._ranks.call(
            "step",
            {"items": [self._item(work) for work in plan.works]},
            timeout_s=self._settings.step_timeout_s,
        )
        last = [work.is_last for work in plan.works]
        self.scheduler.complete(plan)
        self.totals.steps += 1
        row = 0
        for work, is_last in zip(plan.works, last, strict=True):
            rows = self._ranks.logits[row : row + work.end - work.logits_from]
            row += len(rows)
            if work.sequence.is_live and len(rows):
                self._take(work, rows, is_last=is_last)
        if self.on_step is not None:
            self.on_step(
                StepRecord(
                    began=began,
                    ended=time.monotonic(),
                    works=names,
                    running=len(self.scheduler.running),
                    waiting=len(self.scheduler.waiting),
                )
            )

    def _item(self, work: Work) -> tuple[list[int], int, int, list[int], int]:
        size = self.scheduler.pool.block_tokens
        first = max(0, work.start - self._config.window_tokens + 1) // size
        blocks = work.sequence.blocks[first : (work.end - 1) // size + 1]
        return (
            work.sequence.tokens[work.start : work.end],
            work.start,
            first,
            blocks,
            work.logits_from - work.start,
        )

    def _name(self, sequence: Sequence) -> str:
        live, output = self._owner[sequence]
        return f"{live.request.request_id}/{output.index}"

    def _take(self, work: Work, rows: F32, *, is_last: bool) -> None:
        """Use the logits of one sequence: score its prompt, choose its next token."""
        live, output = self._owner[work.sequence]
        if work.sequence.score_prompt:
            self._score_prompt(live, work, rows)
        if not is_last:
            return
        request, logits = live.request, rows[-1]
        banned = output.text.banned()
        token = choose(logits, request.sampling, output.history, output.random, banned=banned)
        output.history.add(token)
        work.sequence.tokens.append(token)
        self.totals.tokens += 1
        if not output.versions or output.versions[-1] != self.weight_version:
            output.versions.append(self.weight_version)
        scores = (
            () if request.logprobs is None else (score(logits, token, request.logprobs, self._tokenizer),)
        )
        text, ending = output.text.push(token)
        live.send(self._chunk(output, text, (token,), scores))
        if ending is not None:
            self._finish(live, output, ending, "")

    def _score_prompt(self, live: Live, work: Work, rows: F32) -> None:
        wanted = live.request.prompt_logprobs or 0
        for position in range(work.logits_from, min(work.end, len(live.prompt) - 1)):
            # A preempted prompt is computed again; what was scored before stays.
            if position + 1 == len(live.prompt_scores):
                logits = rows[position - work.logits_from]
                live.prompt_scores.append(score(logits, live.prompt[position + 1], wanted, self._tokenizer))
        if work.end >= len(live.prompt) and not live.is_prompt_scored:
            live.is_prompt_scored = True
            live.send(PromptScored(token_ids=live.prompt, logprobs=tuple(live.prompt_scores)))

    def _chunk(
        self, output: _Output, text: str, tokens: tuple[int, ...], scores: tuple[TokenLogprob, ...]
    ) -> TokenChunk:
        return TokenChunk(
            index=output.index,
            text=text,
            token_ids=tokens,
            logprobs=scores,
            weight_version=self.weight_version,
        )

    def _finish(self, live: Live, output: _Output, ending: Ending, message: str) -> None:
        output.is_done = True
        self._owner.pop(output.sequence, None)
        self.scheduler.remove(output.sequence)
        is_last = all(one.is_done for one in live.outputs)
        usage = None
        if is_last:
            usage = Usage(
                prompt_tokens=len(live.prompt),
                completion_tokens=sum(one.text.count for one in live.outputs),
                cached_prompt_tokens=live.outputs[0].sequence.cached_tokens or 0,
            )
        live.send(
            Finished(
                index=output.index,
                reason=ending.reason,
                stop=ending.stop,
                message=message,
                weight_versions=tuple(output.versions),
                usage=usage,
            )
        )
        if is_last:
            if ending.reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.totals.finished += 1
            self._forget(live)
