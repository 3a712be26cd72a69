"""CancelOperation (AD-24)."""

from __future__ import annotations

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckSkipped, check, require
from iop.conformance.offer import KINDS

Status = grpc.StatusCode
CANCELLING = pb.CANCEL_DISPOSITION_CANCELLING
TOO_LATE = pb.CANCEL_DISPOSITION_TOO_LATE
ALREADY_TERMINAL = pb.CANCEL_DISPOSITION_ALREADY_TERMINAL


@check("AD-24-unknown-id")
async def unknown_operations_are_not_found(bench: Bench) -> None:
    """CancelOperation of an unknown id is NOT_FOUND for whoever may cancel something."""
    (await bench.cancel("no-such-operation")).refused(Status.NOT_FOUND)


@check("AD-24-pause-cancellable")
async def pauses_can_be_cancelled(bench: Bench) -> None:
    """Pause, where offered, is among the cancellable kinds."""
    offer = await bench.offer()
    offer.need("Pause")
    require(
        KINDS["Pause"] in offer.profile.cancellable,
        saw=f"cancellable {list(offer.profile.cancellable)}",
        wants="PAUSE: it always supports cancel",
    )


@check("AD-24-already-terminal")
async def finished_operations_are_told(bench: Bench) -> None:
    """Cancelling a finished operation of a cancellable kind answers ALREADY_TERMINAL and changes nothing."""
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    paused = await bench.call("Pause", offer.pause(bench.key()))
    epoch = paused.completed.result.pause.pause_epoch
    answer = (await bench.cancel(paused.operation_id)).message
    require(
        answer.disposition == ALREADY_TERMINAL,
        saw=f"disposition {pb.CancelDisposition.Name(answer.disposition)} of a finished pause",
        wants="ALREADY_TERMINAL",
    )
    require(
        answer.operation.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED,
        saw=f"state {answer.operation.state} in the answer",
        wants="SUCCEEDED",
    )
    active = [p.pause_epoch for p in (await bench.profile()).pauses]
    require(epoch in active, saw="the pause gone by a late cancel", wants="it in force")
    await bench.resumed(offer, epoch)


@check("AD-24-unsupported")
async def kinds_without_cancel_are_refused(bench: Bench) -> None:
    """Cancelling an operation of a kind that cannot be cancelled is UNIMPLEMENTED."""
    offer = await bench.offer()
    if not offer.has("FlushCaches") or KINDS["FlushCaches"] in offer.profile.cancellable:
        raise CheckSkipped("flushes can be cancelled, or are not offered")
    _, flushed = await bench.flushed(offer)
    answer = await bench.cancel(flushed.operation_id)
    answer.refused(Status.UNIMPLEMENTED, where="a kind that is not in cancellable")


@check("AD-24-cancelling", timeout_s=60.0)
async def a_cancelled_pause_leaves_nothing(bench: Bench) -> None:
    """A running pause that is cancelled ends CANCELLED with the state before it, or says what it left."""
    offer = await bench.offer()
    before = await bench.profile()
    async with bench.running(offer) as running:
        answer = (await bench.cancel(running.operation_id)).message
        require(
            answer.disposition == CANCELLING,
            saw=f"disposition {pb.CancelDisposition.Name(answer.disposition)} of a running pause",
            wants="CANCELLING",
        )
        require(answer.operation.cancel_requested, saw="cancel_requested not set", wants="it set")
        told = await running.stream.rest(timeout_s=bench.patience_s)
        end = told.terminal
    require(
        end.HasField("cancelled"), saw=f"it end {end.WhichOneof('event')} after CANCELLING", wants="cancelled"
    )
    operation = await bench.get(running.operation_id)
    require(
        operation.state == pb.ADMIN_OPERATION_STATE_CANCELLED,
        saw=f"state {pb.AdminOperationState.Name(operation.state)}",
        wants="CANCELLED",
    )
    after = await bench.profile()
    left = [p.pause_epoch for p in after.pauses if p.operation_id == running.operation_id]
    require(not left, saw=f"epoch {left} of a cancelled pause in force", wants="the state before it")
    if end.cancelled.rolled_back:
        require(
            after.revision == before.revision,
            saw="the revision risen by what was rolled back",
            wants="no change",
        )
        held = [p.participant_id for p in after.participants if p.paused]
        was = [p.participant_id for p in before.participants if p.paused]
        require(held == was, saw=f"{held} paused after the rollback", wants="the state before it")
    else:
        require(after.revision == before.revision + 1, saw="no revision for what was left", wants="one more")
    again = (await bench.cancel(running.operation_id)).message
    require(
        again.disposition == ALREADY_TERMINAL,
        saw=f"{again.disposition} the second time",
        wants="ALREADY_TERMINAL",
    )
