"""What pauses do to requests (AD-41, AD-42)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from iop.conformance.bench import Bench
from iop.conformance.inference import Generation, Inference, Traffic
from iop.conformance.messages import pb
from iop.conformance.model import CheckFailed, CheckNotRun, CheckSkipped, check, require
from iop.conformance.offer import Offer
from iop.conformance.wire import Answer

FEW_TOKENS = 4
DONE_S = 30.0

ATTEMPTS = 5
"""How often a pause is tried until it meets a request: on a fast engine all may have ended just before."""

SEEN_S = 0.2
"""Requests that still run so long after the acceptance of a pause were running when it looked."""

SETTLED_S = 0.3
"""After this, what was on its way when a pause ended has arrived."""

FROZEN_S = 0.5
"""How long frozen requests are listened to."""


async def _with_inference(bench: Bench, *modes: int) -> tuple[Offer, Inference, str]:
    if bench.inference is None:
        raise CheckNotRun("needs --inference HOST:PORT or --http URL")
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    for mode in modes:
        if mode not in offer.common("Pause", "pause_modes"):
            raise CheckSkipped(f"{pb.PauseMode.Name(mode)} is not offered")
    return offer, bench.inference, offer.participants[0].models[0]


async def _until(holds: object, *, saw: str, wants: str) -> None:
    assert callable(holds)
    try:
        async with asyncio.timeout(DONE_S):
            while not holds():  # noqa: ASYNC110 - what is waited for are another task's figures, not an event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise CheckFailed(saw=saw, wants=wants) from None


@check("AD-41-queue", clauses=["AD-42"], timeout_s=60.0)
async def queued_requests_wait(bench: Bench) -> None:
    """A request that comes during a pause with QUEUE waits, and is answered after Resume."""
    offer, inference, model = await _with_inference(bench)
    epoch = await bench.paused(offer, admission=pb.ADMISSION_POLICY_QUEUE)
    async with inference.generating(model, tokens=FEW_TOKENS, must_begin=False) as waiting:
        await asyncio.sleep(0.5)
        require(
            not waiting.tokens and not waiting.outcome,
            saw=f"a request during a pause get {waiting.tokens} tokens and {waiting.outcome or 'no end'}",
            wants="it to wait",
        )
        await bench.resumed(offer, epoch)
        await _until(
            lambda: waiting.outcome, saw="no answer after Resume", wants="the waiting request answered"
        )
        require(waiting.outcome == "finished", saw=f"it end with {waiting.outcome}", wants="an answer")


@check("AD-41-reject", timeout_s=60.0)
async def rejected_requests_are_told(bench: Bench) -> None:
    """A request that comes during a pause with REJECT is refused, and none is after Resume."""
    offer, inference, model = await _with_inference(bench)
    epoch = await bench.paused(offer, admission=pb.ADMISSION_POLICY_REJECT)
    async with inference.generating(model, tokens=FEW_TOKENS, must_begin=False) as refused:
        await _until(lambda: refused.outcome, saw="no answer during a pause with REJECT", wants="a refusal")
        require(
            refused.outcome != "finished" and not refused.tokens,
            saw=f"a request during the pause end with {refused.outcome}",
            wants="a refusal",
        )
    await bench.resumed(offer, epoch)
    async with inference.generating(model, tokens=FEW_TOKENS, must_begin=False) as served:
        await _until(lambda: served.outcome, saw="no answer after Resume", wants="an answer")
        require(
            served.outcome == "finished", saw=f"it end with {served.outcome} after Resume", wants="an answer"
        )


@check("AD-41-drain", timeout_s=90.0)
async def a_drain_lets_requests_finish(bench: Bench) -> None:
    """DRAIN lets running requests finish and counts them."""
    async with _met(bench, pb.PAUSE_MODE_DRAIN, must_finish=True) as met:
        ended = {g.outcome for g in met.traffic.generations if g.tokens and g.has_ended} - {"finished"}
        require(
            not ended, saw=f"drained requests end with {', '.join(sorted(ended))}", wants="them to finish"
        )
        running = len(met.traffic.running())
        require(not running, saw=f"a drain complete over {running} running", wants="it to wait for them")
        require(met.result.aborted == 0, saw=f"{met.result.aborted} aborted by a drain", wants="none")
        require(met.result.drained or not met.seen, saw="none drained", wants="running requests counted")


@check("AD-41-abort", timeout_s=90.0)
async def an_abort_ends_requests(bench: Bench) -> None:
    """ABORT ends running requests with an error that their callers are told, and counts them."""
    async with _met(bench, pb.PAUSE_MODE_ABORT, must_finish=False) as met:
        await _until(
            lambda: not met.traffic.running(), saw="an aborted request without end", wants="a terminal error"
        )
        told = [g for g in met.traffic.generations if g.outcome not in {"", "finished"}]
        require(told, saw="an aborted request finish", wants="a terminal error")
        require(met.result.aborted >= 1, saw=f"{met.result.aborted} aborted", wants="the request counted")


@check("AD-41-keep", clauses=["AD-42"], timeout_s=90.0)
async def a_keep_freezes_requests(bench: Bench) -> None:
    """KEEP freezes running requests; after Resume they go on where they stood."""
    async with _met(bench, pb.PAUSE_MODE_KEEP, must_finish=True) as met:
        frozen = [g for g in met.traffic.generations if not g.has_ended]
        require(frozen, saw=f"{met.result.kept} kept, and all requests end", wants="silence until Resume")
        require(met.result.kept, saw=f"none kept of {len(frozen)} running", wants="kept work counted")
        before = met.traffic.tokens
        await asyncio.sleep(FROZEN_S)
        ended = [g.outcome for g in frozen if g.has_ended]
        require(
            met.traffic.tokens == before and not ended,
            saw=f"{met.traffic.tokens - before} tokens of frozen requests, {', '.join(ended) or 'no end'}",
            wants="silence until Resume",
        )
        resumed = await met.resume()
        await _until(
            lambda: all(g.has_ended for g in frozen),
            saw="no end after Resume",
            wants="frozen requests to go on and finish",
        )
        ends = {g.outcome for g in frozen} - {"finished"}
        require(not ends, saw=f"them end with {', '.join(sorted(ends))}", wants="them to go on and finish")
        require(resumed.completed.result.resume.resumed >= 1, saw="none resumed", wants="kept work counted")


@dataclass(slots=True, kw_only=True)
class _Met:
    """A pause that met requests.

    Attributes:
        seen: requests that ran on for a while after the pause was accepted.
        result: what it says of them.
    """

    bench: Bench
    offer: Offer
    traffic: Traffic
    seen: Sequence[Generation]
    result: Any
    is_over: bool = False

    @property
    def has_met(self) -> bool:
        """Whether it found any request, by what it says or by what became of them."""
        counted = self.result.drained or self.result.aborted or self.result.kept
        ended = any(g.outcome not in {"", "finished"} for g in self.traffic.generations)
        # What a drain was to wait for has ended by now; to any other pause that means that it came too late for it.
        drained = self.seen and self.result.mode == pb.PAUSE_MODE_DRAIN
        return bool(counted or drained or ended or self.traffic.running())

    async def resume(self) -> Answer:
        """End the pause."""
        self.is_over = True
        return await self.bench.resumed(self.offer, self.result.pause_epoch)


@contextlib.asynccontextmanager
async def _met(bench: Bench, mode: int, *, must_finish: bool) -> AsyncIterator[_Met]:
    """A pause that met requests on the way to their end; it is over after the block.

    Args:
        must_finish: the requests are to end by themselves soon after.

    Raises:
        CheckNotRun: it never met any.
    """
    offer, inference, model = await _with_inference(bench, mode)
    for _ in range(ATTEMPTS):
        async with inference.traffic(model, must_finish=must_finish) as traffic:
            met = await _pause(bench, offer, traffic, mode)
            if met.has_met:
                yield met
            if not met.is_over:
                await met.resume()
            if met.has_met:
                return
    raise CheckNotRun("requests end too soon for a pause to meet one")


async def _pause(bench: Bench, offer: Offer, traffic: Traffic, mode: int) -> _Met:
    stream = await bench.begin("Pause", offer.pause(bench.key(), mode=mode))
    traffic.end()
    await asyncio.sleep(SEEN_S)
    seen = traffic.running()
    result = (await stream.rest(timeout_s=DONE_S)).completed.result.pause
    await asyncio.sleep(SETTLED_S)
    return _Met(bench=bench, offer=offer, traffic=traffic, seen=seen, result=result)
