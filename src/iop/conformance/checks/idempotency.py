"""The same key is the same operation (AD-12)."""

from __future__ import annotations

import asyncio

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import check, require
from iop.conformance.wire import Answer

Status = grpc.StatusCode
RACERS = 64
FAR = 2**40


def same_events(first: Answer, second: Answer, *, when: str) -> None:
    """Two tellings of one operation must be identical, to the byte.

    Raises:
        CheckFailed: they differ.
    """
    require(
        second.is_ok,
        saw=f"the repeated request refused {when}: {second.told()}",
        wants="a replay of the operation",
    )
    require(
        first.operation_id == second.operation_id,
        saw=f"another operation id {when}: {second.operation_id} for {first.operation_id}",
        wants="the same operation",
    )
    ours, theirs = ([m.SerializeToString(deterministic=True) for m in a.messages] for a in (first, second))
    require(
        ours == theirs,
        saw=f"another telling {when}: sequences {[getattr(m, 'sequence', 0) for m in second.messages]} after "
        f"{[getattr(m, 'sequence', 0) for m in first.messages]}",
        wants="its events from sequence 1, identical",
    )


@check("AD-12-replay")
async def replay_is_identical(bench: Bench) -> None:
    """The same key and payload after the end: the same operation, its events identical from sequence 1."""
    offer = await bench.offer()
    request, first = await bench.flushed(offer)
    for _ in range(2):
        same_events(first, await bench.call("FlushCaches", request), when="after the end")


@check("AD-12-replay-unary", clauses=["AD-46"])
async def unary_replay_is_identical(bench: Bench) -> None:
    """The same key of StartProfile and StopProfile gives the same answer."""
    offer = await bench.offer()
    offer.need("StartProfile", "StopProfile")
    request = offer.start_profile(bench.key())
    first = await bench.call("StartProfile", request)
    same_events(first, await bench.call("StartProfile", request), when="while it profiles")
    stop = offer.stop_profile(bench.key(), first.message.profile_id)
    stopped = await bench.call("StopProfile", stop)
    same_events(stopped, await bench.call("StopProfile", stop), when="after the stop")
    same_events(first, await bench.call("StartProfile", request), when="after the stop")


@check("AD-12-one-effect")
async def replay_has_no_effect(bench: Bench) -> None:
    """A replay begins nothing: no further operation, no risen revision."""
    offer = await bench.offer()
    request, first = await bench.flushed(offer)
    before = (await bench.profile()).revision
    await bench.call("FlushCaches", request)
    after = (await bench.profile()).revision
    require(before == after, saw=f"the revision go from {before} to {after} by a replay", wants="no effect")
    key = request.options.idempotency_key
    ids = [o.operation_id for o in await bench.operations() if o.idempotency_key == key]
    require(ids == [first.operation_id], saw=f"{len(ids)} operations of one key", wants="one")


@check("AD-12-other-payload")
async def other_payload_is_refused(bench: Bench) -> None:
    """The same key with another payload, or for another RPC, is ALREADY_EXISTS."""
    offer = await bench.offer()
    request, first = await bench.flushed(offer)
    other = pb.FlushCachesRequest()
    other.CopyFrom(request)
    other.options.reason = "another"
    (await bench.call("FlushCaches", other)).refused(
        Status.ALREADY_EXISTS, where="a key used with another payload"
    )
    key = request.options.idempotency_key
    if offer.has("Pause"):
        (await bench.call("Pause", offer.pause(key))).refused(
            Status.ALREADY_EXISTS, where="a key of another RPC"
        )
    same_events(first, await bench.call("FlushCaches", request), when="after refused repeats")


@check("AD-12-refusal-keeps-key")
async def refusals_burn_no_key(bench: Bench) -> None:
    """A refused request leaves its key free for another one."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    key = bench.key()
    unknown = offer.flush(key)
    unknown.target.models.models.append("no-such-model")
    bad = offer.flush(key)
    bad.busy_policy = 0
    for request, code in (
        (unknown, Status.NOT_FOUND),
        (offer.flush(key, expected_revision=FAR), Status.ABORTED),
        (bad, Status.INVALID_ARGUMENT),
    ):
        (await bench.call("FlushCaches", request)).refused(code)
    if offer.has("Resume"):
        stale = await bench.call("Resume", offer.resume(key, FAR))
        stale.refused(Status.FAILED_PRECONDITION, where="a stale epoch with a key that was only ever refused")
    answer = await bench.call("FlushCaches", offer.flush(key))
    require(
        answer.is_ok,
        saw=f"the key burnt by refusals: {answer.told()}",
        wants="a refusal to leave the key free",
    )


@check("AD-12-retry-of-success")
async def retries_of_a_success_are_replays(bench: Bench) -> None:
    """A retry is not refused by what its first try did: not for the revision, not for the epoch."""
    offer = await bench.offer()
    revision = (await bench.profile()).revision
    request, first = await bench.flushed(offer, expected_revision=revision)
    same_events(
        first,
        await bench.call("FlushCaches", request),
        when="with an expected_revision that it raised itself",
    )
    if not (offer.has("Pause") and offer.has("Resume")):
        return
    epoch = await bench.paused(offer)
    resume = offer.resume(bench.key(), epoch)
    ended = await bench.call("Resume", resume)
    require(ended.completed, saw="nothing", wants="completion")
    same_events(ended, await bench.call("Resume", resume), when="with an epoch that it ended itself")


@check("AD-12-race", timeout_s=60.0)
async def racing_callers_get_one_operation(bench: Bench) -> None:
    """64 callers racing with one key: one operation, one effect, identical events."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    request = offer.flush(bench.key())
    before = (await bench.profile()).revision
    async with asyncio.TaskGroup() as tasks:
        racers = [
            tasks.create_task(bench.call("FlushCaches", request, timeout_s=40.0), name=f"racer {n}")
            for n in range(RACERS)
        ]
    answers = [racer.result() for racer in racers]
    refused = [a.told() for a in answers if not a.is_ok]
    require(
        not refused, saw=f"{len(refused)} of {RACERS} refused: {refused[:1]}", wants="one operation for all"
    )
    for answer in answers[1:]:
        same_events(answers[0], answer, when="in a race")
    after = (await bench.profile()).revision
    require(after == before + 1, saw=f"the revision go from {before} to {after}", wants="one effect")


@check("AD-12-scope")
async def keys_belong_to_their_principal(bench: Bench) -> None:
    """The same key of another principal is another operation."""
    bench.metadata("operator")
    offer = await bench.offer()
    request, first = await bench.flushed(offer)
    other = await bench.call("FlushCaches", request, role="operator")
    require(
        other.is_ok,
        saw=f"another principal's key refused: {other.told()}",
        wants="keys scoped to the principal",
    )
    require(
        other.operation_id != first.operation_id,
        saw="another principal given this operation by its key",
        wants="keys scoped to the principal",
    )


@check("AD-12-running", clauses=["AD-22"])
async def replay_while_running(bench: Bench) -> None:
    """While it runs, the same key replays and then goes on live, and another payload is ALREADY_EXISTS."""
    offer = await bench.offer()
    async with bench.running(offer) as running:
        again = bench.open("Pause", running.request)
        first = await again.first()
        require(
            first.operation_id == running.operation_id and first.sequence == 1,
            saw=f"operation {first.operation_id} from sequence {first.sequence}",
            wants="the same operation from sequence 1",
        )
        other = pb.PauseRequest()
        other.CopyFrom(running.request)
        other.options.reason = "another"
        answer = await bench.call("Pause", other, timeout_s=bench.patience_s)
        answer.refused(Status.ALREADY_EXISTS, where="another payload while the operation runs")
        told = await running.finish()
        require(told.completed, saw="nothing", wants="completion")
        same_events(told, await again.rest(), when="while it ran")
    same_events(told, await bench.call("Pause", running.request), when="after the end")
