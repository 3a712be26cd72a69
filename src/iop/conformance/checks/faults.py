"""One rank fails (AD-29 to AD-32)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from iop.conformance.bench import SETTLE_TIMEOUT_S, Bench
from iop.conformance.hooks import HookName
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, check, require
from iop.conformance.offer import Offer
from iop.conformance.wire import Answer

DEADLINE_MS = 4_000
"""Of operations that a rank may hang."""


def _need_hook(bench: Bench) -> None:
    if not bench.hooks.has(HookName.FAIL_RANK):
        raise CheckNotRun("needs --hook fail-rank=CMD")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Aftermath:
    """What a partial failure left.

    Attributes:
        error: of the terminal event; it names who failed.
        operation: the whole state of the operation.
        profile: read while the rank still failed; if the server died with its rank, after it came back.
        is_restarted: the latter, so that its participants may have been reconciled meanwhile.
    """

    error: Any
    operation: Any
    profile: Any
    is_restarted: bool


async def _fail(bench: Bench, rpc: str, request: Any, asked: Sequence[str]) -> _Aftermath:
    """Make a request while a rank fails, which must fail and name it.

    Raises:
        CheckFailed: it succeeds, or says less than it must.
        CheckNotRun: the server died before it could say anything.
    """
    seen: Any = None
    async with bench.failing_rank():
        answer = await bench.call(rpc, request, timeout_s=SETTLE_TIMEOUT_S)
        operation_id = answer.operation_id
        if answer.is_ok or not operation_id or answer.code is not grpc.StatusCode.UNAVAILABLE:
            error = _error_of(answer, asked)
            seen = await _seen(bench, operation_id)
    # A server may go down with its rank; what it said, it must still say when it is back.
    is_restarted = seen is None
    if is_restarted:
        told = await bench.watch(operation_id)
        if told.terminal.HasField("completed"):
            raise CheckNotRun("the server died with its rank, and completed the operation when it was back")
        error = _error_of(told, asked)
        seen = (await bench.get(operation_id), await bench.profile())
    operation, profile = seen
    with_error = {p.participant_id for p in operation.participants if p.HasField("error")}
    silent = set(error.participants) - with_error
    require(
        not silent, saw=f"{sorted(silent)} failed without an error of their own", wants="each one's error"
    )
    return _Aftermath(error=error, operation=operation, profile=profile, is_restarted=is_restarted)


async def _seen(bench: Bench, operation_id: str) -> tuple[Any, Any] | None:
    """Operation and profile, or None where nobody answers any more."""
    operation = await bench.call("GetOperation", pb.GetAdminOperationRequest(operation_id=operation_id))
    profile = await bench.call("GetAdminProfile", pb.GetAdminProfileRequest())
    if grpc.StatusCode.UNAVAILABLE in {operation.code, profile.code}:
        return None
    return operation.message, profile.message


def _error_of(answer: Answer, asked: Sequence[str]) -> Any:
    """The error of a partial failure, which must name who failed."""
    end = answer.terminal
    require(
        end.HasField("failed"),
        saw=f"{answer.rpc} end {end.WhichOneof('event')} while a rank failed",
        wants="failed: complete only when all ranks commit (AD-30)",
    )
    error = end.failed.error
    require(error.participants, saw="an error that names nobody", wants="the ranks that failed")
    require(
        set(error.participants) <= set(asked),
        saw=f"{list(error.participants)} named",
        wants="ranks of the operation",
    )
    return error


def _is_as_told(left: _Aftermath, revision: int) -> None:
    """The error says what was left, and that is what is there."""
    error, profile = left.error, left.profile
    ill = {p.participant_id for p in profile.participants if p.quarantined}
    require(
        left.is_restarted or set(error.quarantined) <= ill,
        saw=f"{list(error.quarantined)} said to be quarantined, {sorted(ill)} shown",
        wants="what the error says",
    )
    pauses = [p.pause_epoch for p in profile.pauses if p.operation_id == left.operation.operation_id]
    require(not pauses, saw=f"the pause {pauses} of a failed operation in force", wants="it undone (AD-29)")
    require(
        error.rolled_back != bool(error.quarantined),
        saw=f"rolled_back={error.rolled_back} with {list(error.quarantined)} quarantined",
        wants="rolled back and proven, or quarantined and named",
    )
    risen = profile.revision - revision
    require(
        risen == (0 if error.rolled_back else 1),
        saw=f"the revision risen by {risen} with rolled_back={error.rolled_back}",
        wants="one exactly if something was left changed (AD-13)",
    )
    if error.rolled_back:
        held = [p.participant_id for p in profile.participants if p.paused or p.quarantined]
        require(
            not held, saw=f"rolled back, and yet {held} paused or quarantined", wants="the state before it"
        )


@check("AD-31-partial-pause", clauses=["AD-29", "AD-30", "AD-13"], timeout_s=200.0)
async def a_partial_pause_fails_closed(bench: Bench) -> None:
    """A pause of which one rank fails: failed, the rank named, undone or quarantined as the error says."""
    _need_hook(bench)
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    request = offer.pause(bench.key(), deadline_ms=DEADLINE_MS)
    left = await _fail(bench, "Pause", request, offer.ids("Pause"))
    _is_as_told(left, offer.profile.revision)


@check("AD-31-healed", clauses=["AD-29"], timeout_s=200.0)
async def a_retry_heals(bench: Bench) -> None:
    """After the fault the same operation under a new key completes, and nobody stays quarantined."""
    _need_hook(bench)
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    request = offer.pause(bench.key(), deadline_ms=DEADLINE_MS)
    await _fail(bench, "Pause", request, offer.ids("Pause"))
    again = await _retried(bench, "Pause", lambda: offer.pause(bench.key()))
    epoch = again.completed.result.pause.pause_epoch
    ill = [p.participant_id for p in (await bench.profile()).participants if p.quarantined]
    require(
        not ill, saw=f"{ill} quarantined after an operation over them completed", wants="quarantine ended"
    )
    await bench.resumed(offer, epoch)


@check("AD-40-partial-flush", clauses=["AD-29", "AD-31"], timeout_s=200.0)
async def a_partial_flush_is_no_success(bench: Bench) -> None:
    """A flush of which one rank fails is not success, and the rank is named."""
    _need_hook(bench)
    offer = await bench.offer()
    offer.need("FlushCaches")
    request = offer.flush(bench.key(), deadline_ms=DEADLINE_MS)
    await _fail(bench, "FlushCaches", request, offer.ids("FlushCaches"))


@check("AD-32-partial-update", clauses=["AD-31", "AD-38"], timeout_s=240.0)
async def a_partial_update_is_undone(bench: Bench) -> None:
    """An update of which one rank fails: the old version stays, ranks old or quarantined, and the retry works."""
    _need_hook(bench)
    offer = await bench.offer()
    offer.need("UpdateWeights")
    if bench.target.checkpoints is None:
        raise CheckNotRun("needs --checkpoint-a PATH and --checkpoint-b PATH")
    first, second = bench.target.checkpoints
    before = _version(offer)
    request = offer.update(bench.key(), version=bench.key(), path=second, deadline_ms=DEADLINE_MS)
    left = await _fail(bench, "UpdateWeights", request, offer.ids("UpdateWeights"))
    now = Offer(left.profile)
    require(_version(now) == before, saw=f"version {_version(now)} published", wants=f"{before}, as before")
    mixed = [
        p.participant_id
        for p in now.participants
        if p.weight_version == request.weight_version and not p.quarantined
    ]
    require(
        not mixed, saw=f"{mixed} at the failed version and not quarantined", wants="all old, or quarantined"
    )
    for path in (second, first):
        await _retried(
            bench,
            "UpdateWeights",
            lambda path=path: offer.update(bench.key(), version=bench.key(), path=path),  # type: ignore[misc]
        )


async def _retried(bench: Bench, rpc: str, make: Callable[[], Any]) -> Answer:
    """The first try that completes once the rank is whole: its engine may still be on its way back."""
    until = time.monotonic() + bench.patience_s
    while True:
        answer = await bench.call(rpc, make(), timeout_s=SETTLE_TIMEOUT_S)
        is_done = answer.is_ok and answer.messages[-1].HasField("completed")
        if is_done or time.monotonic() > until:
            require(answer.completed, saw="nothing", wants="the retry to complete")
            return answer
        await asyncio.sleep(1.0)


def _version(offer: Offer) -> str:
    model = offer.model
    return next((str(w.weight_version) for w in offer.profile.weights if w.model == model), "")
