"""What pauses do to requests (AD-41, AD-42)."""

from __future__ import annotations

import asyncio

from iop.conformance.bench import Bench
from iop.conformance.inference import Inference
from iop.conformance.messages import pb
from iop.conformance.model import CheckFailed, CheckNotRun, CheckSkipped, check, require
from iop.conformance.offer import Offer

FEW_TOKENS = 4
FINISHED_TOKENS = 300
"""Of requests whose end is waited for: long enough to be met by a pause."""

DONE_S = 30.0


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


@check("AD-41-drain", timeout_s=60.0)
async def a_drain_lets_requests_finish(bench: Bench) -> None:
    """DRAIN lets running requests finish and counts them."""
    offer, inference, model = await _with_inference(bench, pb.PAUSE_MODE_DRAIN)
    async with inference.long(model, at_most=FINISHED_TOKENS) as running:
        if running.has_ended:
            raise CheckNotRun("the request ended before the pause")
        answer = await bench.call(
            "Pause", offer.pause(bench.key(), mode=pb.PAUSE_MODE_DRAIN), timeout_s=DONE_S
        )
        result = answer.completed.result.pause
        await _until(lambda: running.outcome, saw="a drained request without end", wants="it to finish")
        require(
            running.outcome == "finished",
            saw=f"it end with {running.outcome}",
            wants="it to finish by itself",
        )
        require(result.aborted == 0, saw=f"{result.aborted} aborted by a drain", wants="none")
    await bench.resumed(offer, result.pause_epoch)


@check("AD-41-abort", timeout_s=60.0)
async def an_abort_ends_requests(bench: Bench) -> None:
    """ABORT ends running requests with an error that their callers are told, and counts them."""
    offer, inference, model = await _with_inference(bench, pb.PAUSE_MODE_ABORT)
    async with inference.long(model) as running:
        if running.has_ended:
            raise CheckNotRun("the request ended before the pause")
        answer = await bench.call(
            "Pause", offer.pause(bench.key(), mode=pb.PAUSE_MODE_ABORT), timeout_s=DONE_S
        )
        result = answer.completed.result.pause
        await _until(lambda: running.outcome, saw="an aborted request without end", wants="a terminal error")
        require(running.outcome != "finished", saw="an aborted request finish", wants="a terminal error")
        require(result.aborted >= 1, saw=f"{result.aborted} aborted", wants="the request counted")
    await bench.resumed(offer, result.pause_epoch)


@check("AD-41-keep", clauses=["AD-42"], timeout_s=60.0)
async def a_keep_freezes_requests(bench: Bench) -> None:
    """KEEP freezes running requests; after Resume they go on where they stood."""
    offer, inference, model = await _with_inference(bench, pb.PAUSE_MODE_KEEP)
    async with inference.long(model, at_most=FINISHED_TOKENS) as running:
        if running.has_ended:
            raise CheckNotRun("the request ended before the pause")
        answer = await bench.call(
            "Pause", offer.pause(bench.key(), mode=pb.PAUSE_MODE_KEEP), timeout_s=DONE_S
        )
        result = answer.completed.result.pause
        if not result.kept:
            raise CheckNotRun("the request ended before it was frozen")
        await asyncio.sleep(0.3)
        frozen = running.tokens
        await asyncio.sleep(0.5)
        require(
            running.tokens == frozen and not running.has_ended,
            saw=f"{running.tokens - frozen} tokens of a frozen request, {running.outcome or 'no end'}",
            wants="silence until Resume",
        )
        ended = await bench.resumed(offer, result.pause_epoch)
        await _until(lambda: running.outcome, saw="no end after Resume", wants="it to go on and finish")
        require(
            running.outcome == "finished",
            saw=f"it end with {running.outcome}",
            wants="it to go on and finish",
        )
        require(ended.completed.result.resume.resumed >= 1, saw="none resumed", wants="kept work counted")
