"""The life of an accepted operation as its events tell it (AD-21, AD-23)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import check, require
from iop.conformance.wire import TERMINAL, Answer


async def _specimens(bench: Bench) -> AsyncIterator[Answer]:
    """One whole stream of each kind that costs little."""
    offer = await bench.offer()
    if offer.has("FlushCaches"):
        yield await bench.call("FlushCaches", offer.flush(bench.key()))
    if offer.has("Pause") and offer.has("Resume"):
        paused = await bench.call("Pause", offer.pause(bench.key()))
        yield paused
        epoch = paused.completed.result.pause.pause_epoch
        yield await bench.call("Resume", offer.resume(bench.key(), epoch))


@check("AD-21-first-event", clauses=["AD-20"])
async def first_event_is_acceptance(bench: Bench) -> None:
    """The first event says accepted, with sequence 1 and the operation as it was accepted."""
    async for answer in _specimens(bench):
        require(answer.is_ok and answer.messages, saw=f"{answer.rpc}: {answer.told()}", wants="events")
        first = answer.messages[0]
        require(
            first.WhichOneof("event") == "accepted",
            saw=f"{answer.rpc} begin with {first.WhichOneof('event')}",
            wants="accepted as the first event",
        )
        require(first.sequence == 1, saw=f"{answer.rpc} begin with sequence {first.sequence}", wants="1")
        operation = first.accepted.operation
        require(
            operation.operation_id == first.operation_id and first.operation_id,
            saw=f"{answer.rpc} accept operation {operation.operation_id!r} in an event of {first.operation_id!r}",
            wants="the same id",
        )
        require(
            operation.kind and operation.participants,
            saw=f"{answer.rpc} accept without kind or participants",
            wants="kind and participants fixed at acceptance",
        )


@check("AD-21-sequences")
async def sequences_have_no_gap(bench: Bench) -> None:
    """Sequences count from 1 without gap or repeat, and all events bear one operation id."""
    async for answer in _specimens(bench):
        numbers = [event.sequence for event in answer.messages]
        require(
            numbers == list(range(1, len(numbers) + 1)),
            saw=f"the sequences {numbers} of {answer.rpc}",
            wants=f"1..{len(numbers)}",
        )
        ids = {event.operation_id for event in answer.messages}
        require(len(ids) == 1, saw=f"{len(ids)} operation ids in one stream of {answer.rpc}", wants="one")


@check("AD-21-one-terminal")
async def one_terminal_event(bench: Bench) -> None:
    """Exactly one terminal event, and it is the last, in the stream and in WatchOperation."""
    async for answer in _specimens(bench):
        for told in (answer, await bench.watch(answer.operation_id)):
            kinds = [event.WhichOneof("event") for event in told.messages]
            ends = [kind for kind in kinds if kind in TERMINAL]
            require(
                len(ends) == 1, saw=f"{len(ends)} terminal events in {told.rpc}: {kinds}", wants="exactly one"
            )
            require(
                kinds[-1] in TERMINAL,
                saw=f"{told.rpc} go on after its terminal event: {kinds}",
                wants="it last",
            )


@check("AD-21-ends-ok")
async def streams_end_with_ok(bench: Bench) -> None:
    """After the terminal event the stream ends with the gRPC status OK."""
    async for answer in _specimens(bench):
        told = answer.told()
        require(
            answer.code is grpc.StatusCode.OK,
            saw=f"{answer.rpc} end with {told} after {len(answer.messages)} events",
            wants="OK after a terminal event",
        )


@check("AD-21-unary-events", clauses=["AD-46"])
async def unary_operations_have_events(bench: Bench) -> None:
    """Operations of the RPCs that answer once have the same events, by WatchOperation."""
    offer = await bench.offer()
    offer.need("StartProfile", "StopProfile")
    started = (await bench.call("StartProfile", offer.start_profile(bench.key()))).message
    answer = await bench.watch(started.operation_id)
    numbers = [event.sequence for event in answer.messages]
    require(numbers == list(range(1, len(numbers) + 1)), saw=f"sequences {numbers}", wants="1.. without gap")
    require(
        answer.completed.result.HasField("start_profile"),
        saw="no result",
        wants="start_profile in the result",
    )


@check("AD-23-whole-state")
async def get_tells_everything(bench: Bench) -> None:
    """GetOperation tells kind, digest, principal, times, revisions, participants and result."""
    offer = await bench.offer()
    request, answer = await bench.flushed(offer, reason="state")
    operation = await bench.get(answer.operation_id)
    last = answer.messages[-1]
    wants: list[tuple[object, str, str]] = [
        (operation.kind == pb.ADMIN_OPERATION_KIND_FLUSH_CACHES, f"kind {operation.kind}", "FLUSH_CACHES"),
        (operation.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED, f"state {operation.state}", "SUCCEEDED"),
        (
            len(operation.request_sha256) == 32,
            f"{len(operation.request_sha256)} bytes",
            "a SHA-256 of the request",
        ),
        (operation.principal, "no principal", "who asked"),
        (operation.idempotency_key == request.options.idempotency_key, "another key", "its key"),
        (operation.reason == "state", f"reason {operation.reason!r}", "the reason given"),
        (operation.HasField("revision_after"), "no revision_after", "the revision after it"),
        (
            operation.last_sequence == last.sequence,
            f"last_sequence {operation.last_sequence}",
            str(last.sequence),
        ),
        (operation.HasField("deadline_at_unix_nanos"), "no deadline", "its deadline"),
        (operation.HasField("result"), "no result", "the result"),
        (not operation.HasField("error"), "an error", "none"),
    ]
    for holds, saw, wish in wants:
        require(holds, saw=f"GetOperation with {saw}", wants=wish)
    require(
        operation.result == last.completed.result,
        saw="another result in GetOperation than in the completed event",
        wants="the same",
    )
    _times_are_in_order(operation)
    ids = {p.participant_id for p in operation.participants}
    require(
        ids == set(offer.ids("FlushCaches")), saw=f"participants {sorted(ids)}", wants="everybody selected"
    )
    late = [p.participant_id for p in operation.participants if p.phase != pb.PARTICIPANT_PHASE_COMMITTED]
    require(
        not late, saw=f"success while {late} have not committed", wants="every participant COMMITTED (AD-30)"
    )


def _times_are_in_order(operation: Any) -> None:
    times = (
        operation.accepted_at_unix_nanos,
        operation.started_at_unix_nanos,
        operation.ended_at_unix_nanos,
    )
    require(
        0 < times[0] <= times[1] <= times[2],
        saw=f"accepted, started, ended at {times}",
        wants="three times in this order",
    )


@check("AD-23-unknown-id")
async def unknown_ids_are_not_found(bench: Bench) -> None:
    """GetOperation and WatchOperation of an unknown id are NOT_FOUND."""
    offer = await bench.offer()
    _, known = await bench.flushed(offer)
    for unknown in ("no-such-operation", f"{known.operation_id}x", known.operation_id.upper() + "Y"):
        where = f"the operation {unknown!r}"
        get = await bench.call("GetOperation", pb.GetAdminOperationRequest(operation_id=unknown))
        get.refused(grpc.StatusCode.NOT_FOUND, where=where)
        watch = await bench.call("WatchOperation", pb.WatchAdminOperationRequest(operation_id=unknown))
        watch.refused(grpc.StatusCode.NOT_FOUND, where=where)
