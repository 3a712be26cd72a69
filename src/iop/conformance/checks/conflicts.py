"""Operations that overlap (AD-18)."""

from __future__ import annotations

from typing import Any

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, CheckSkipped, check, require

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@check("AD-18-in-progress")
async def overlapping_operations_are_refused(bench: Bench) -> None:
    """An operation that overlaps a running one is FAILED_PRECONDITION (OPERATION_IN_PROGRESS) with its id."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    async with bench.running(offer) as running:
        key = bench.key()
        answer = await bench.call("FlushCaches", offer.flush(key))
        answer.refused(PRECONDITION, reason="OPERATION_IN_PROGRESS", where="an overlap with a running pause")
        require(answer.names(running.operation_id), saw=answer.told(), wants=f"the id {running.operation_id}")
        await running.finish()
        later = await bench.call("FlushCaches", offer.flush(key))
        require(
            later.is_ok, saw=f"refused afterwards: {later.told()}", wants="acceptance once nothing overlaps"
        )


@check("AD-18-takeover", clauses=["AD-41"])
async def a_harder_pause_takes_over(bench: Bench) -> None:
    """A harder pause over one's own running pause is accepted; the older one ends cancelled, naming it."""
    offer = await bench.offer()
    if pb.PAUSE_MODE_ABORT not in offer.common("Pause", "pause_modes"):
        raise CheckSkipped("ABORT is not offered")
    async with bench.running(offer) as running:
        harder = bench.open("Pause", offer.pause(bench.key(), mode=pb.PAUSE_MODE_ABORT))
        first = await harder.first()
        older = await running.stream.rest()
        end = older.terminal
        require(
            end.HasField("cancelled"),
            saw=f"the older pause end {end.WhichOneof('event')}",
            wants="cancelled by its successor",
        )
        require(
            end.cancelled.superseded_by == first.operation_id,
            saw=f"superseded_by {end.cancelled.superseded_by!r}",
            wants=f"{first.operation_id}",
        )
        await bench.let_go()
        done = await harder.rest()
        epoch = done.completed.result.pause.pause_epoch
    active = {p.pause_epoch: p.operation_id for p in (await bench.profile()).pauses}
    require(
        active.get(epoch) == first.operation_id and running.operation_id not in active.values(),
        saw=f"the pauses {active}",
        wants="the successor's alone",
    )
    await bench.resumed(offer, epoch)


@check("AD-18-limit", clauses=["AD-50"], timeout_s=60.0)
async def no_more_than_advertised_at_once(bench: Bench) -> None:
    """With as many operations running as limits.max_concurrent_operations says, one more is RESOURCE_EXHAUSTED."""
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    most = offer.profile.limits.max_concurrent_operations
    groups: dict[str, list[str]] = {}
    for participant in offer.who("Pause"):
        groups.setdefault(participant.group_id or participant.participant_id, []).append(
            participant.participant_id
        )
    if len(groups) <= most:
        raise CheckSkipped(f"{len(groups)} groups cannot have more than {most} operations at once")

    def pause_of(ids: list[str]) -> Any:
        request = offer.pause(bench.key())
        request.target.participants.CopyFrom(pb.ParticipantSelector(participant_ids=ids))
        return request

    *busy, last = list(groups.values())[: most + 1]
    async with bench.held():
        streams = [bench.open("Pause", pause_of(ids)) for ids in busy]
        started = [(await stream.first()).operation_id for stream in streams]
        states = [(await bench.get(operation)).state for operation in started]
        if any(state == pb.ADMIN_OPERATION_STATE_SUCCEEDED for state in states):
            raise CheckNotRun("the work to wait for does not hold up a pause of every group")
        request = pause_of(last)
        answer = await bench.call("Pause", request, timeout_s=bench.patience_s)
        answer.refused(grpc.StatusCode.RESOURCE_EXHAUSTED, where=f"one operation more than {most} at once")
        await bench.let_go()
        for stream in streams:
            require((await stream.rest()).completed, saw="nothing", wants="completion")
    later = await bench.call("Pause", request)
    require(later.is_ok, saw=f"refused afterwards: {later.told()}", wants="acceptance once others have ended")
