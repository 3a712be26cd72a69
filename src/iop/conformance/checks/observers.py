"""Observers come and go; the mutation goes on (AD-22, AD-25, AD-26)."""

from __future__ import annotations

import asyncio

import grpc

from iop.conformance.bench import Bench
from iop.conformance.checks.idempotency import same_events
from iop.conformance.hooks import HookName
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, check, require

RUNNING_STATES = frozenset(
    {
        pb.ADMIN_OPERATION_STATE_PENDING,
        pb.ADMIN_OPERATION_STATE_RUNNING,
    }
)
LEFT_S = 0.3
"""How long a server gets to do the wrong thing after an observer left."""

SEQUENCE_MAX = 2**64 - 1
"""Largest that the field holds: nothing comes after it."""


@check("AD-22-cancelled-stream")
async def leaving_only_detaches(bench: Bench) -> None:
    """A cancelled stream detaches its observer; the operation goes on and completes."""
    offer = await bench.offer()
    async with bench.running(offer) as running:
        running.stream.leave()
        await asyncio.sleep(LEFT_S)
        state = (await bench.get(running.operation_id)).state
        require(
            state in RUNNING_STATES,
            saw=f"state {pb.AdminOperationState.Name(state)} after the observer left",
            wants="the mutation to go on",
        )
        await bench.let_go()
        operation = await bench.until_done(running.operation_id)
        require(
            operation.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED,
            saw=f"it end {pb.AdminOperationState.Name(operation.state)} after the observer left",
            wants="the mutation to go on and complete",
        )


@check("AD-22-rpc-deadline")
async def an_expired_rpc_only_detaches(bench: Bench) -> None:
    """An expired RPC deadline detaches its observer; the operation goes on and completes."""
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    async with bench.held():
        request = offer.pause(bench.key())
        answer = await bench.call("Pause", request, timeout_s=0.4)
        if answer.is_ok:
            raise CheckNotRun("the work to wait for ended before the RPC's deadline")
        require(
            answer.code is grpc.StatusCode.DEADLINE_EXCEEDED and answer.operation_id,
            saw=answer.told(),
            wants="acceptance, then the RPC's deadline",
        )
        await asyncio.sleep(LEFT_S)
        state = (await bench.get(answer.operation_id)).state
        require(
            state in RUNNING_STATES,
            saw=f"state {pb.AdminOperationState.Name(state)} after the RPC's deadline",
            wants="the mutation to go on",
        )
        await bench.let_go()
        operation = await bench.until_done(answer.operation_id)
    require(
        operation.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED,
        saw=f"it end {pb.AdminOperationState.Name(operation.state)} after the RPC's deadline",
        wants="the mutation to go on and complete",
    )


@check("AD-25-operation-deadline")
async def an_expired_operation_fails(bench: Bench) -> None:
    """An expired operation deadline fails the operation, and the state is as before it."""
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    before = (await bench.profile()).revision
    async with bench.held():
        answer = await bench.call(
            "Pause", offer.pause(bench.key(), deadline_ms=500), timeout_s=bench.patience_s
        )
        end = answer.terminal
        require(
            end.HasField("failed"),
            saw=f"it end {end.WhichOneof('event')} with a deadline that passed",
            wants="failed (DEADLINE_EXCEEDED)",
        )
        error = end.failed.error
        require(
            error.code == pb.ADMIN_ERROR_CODE_DEADLINE_EXCEEDED,
            saw=f"error code {pb.AdminErrorCode.Name(error.code)}",
            wants="DEADLINE_EXCEEDED",
        )
        after = await bench.profile()
        left = [p for p in after.pauses if p.operation_id == answer.operation_id]
        require(not left, saw="the pause of a failed operation in force", wants="the state before it")
        if error.rolled_back:
            require(
                after.revision == before, saw="a revision risen by what was rolled back", wants="no change"
            )


@check("AD-23-while-running")
async def a_running_operation_is_told(bench: Bench) -> None:
    """GetOperation of a running operation tells its state and participants, and no end."""
    offer = await bench.offer()
    async with bench.running(offer) as running:
        operation = await bench.get(running.operation_id)
        require(operation.state in RUNNING_STATES, saw=f"state {operation.state}", wants="PENDING or RUNNING")
        require(
            not operation.HasField("result")
            and not operation.HasField("error")
            and not operation.HasField("revision_after")
            and not operation.HasField("ended_at_unix_nanos"),
            saw="result, error, revision_after or an end while it runs",
            wants="none of them yet",
        )
        require(operation.participants, saw="no participants", wants="each one's phase")
        listed = await bench.operations(states=list(RUNNING_STATES))
        require(
            running.operation_id in {o.operation_id for o in listed},
            saw="a running operation not listed",
            wants="it in ListOperations",
        )
        await running.finish()


@check("AD-26-watch-after")
async def watch_goes_on_after_a_sequence(bench: Bench) -> None:
    """WatchOperation after a sequence gives every later event once, for each sequence."""
    offer = await bench.offer()
    _, whole = await bench.flushed(offer)
    for after in (*range(len(whole.messages) + 1), SEQUENCE_MAX):
        told = await bench.watch(whole.operation_id, after=after)
        require(
            told.is_ok, saw=f"WatchOperation after {after}: {told.told()}", wants="the later events, then OK"
        )
        numbers = [event.sequence for event in told.messages]
        wanted = [event.sequence for event in whole.messages[after:]]
        require(numbers == wanted, saw=f"{numbers} after {after}", wants=f"{wanted}: no gap, no repeat")
    same_events(whole, await bench.watch(whole.operation_id), when="by WatchOperation")


@check("AD-26-watch-live")
async def watch_goes_live(bench: Bench) -> None:
    """WatchOperation of a running operation replays and then goes on to the terminal event."""
    offer = await bench.offer()
    async with bench.running(offer) as running:
        last = (await bench.get(running.operation_id)).last_sequence
        everything = pb.WatchAdminOperationRequest(operation_id=running.operation_id)
        whole = bench.open("WatchOperation", everything)
        the_rest = pb.WatchAdminOperationRequest(operation_id=running.operation_id, after_sequence=last)
        later = bench.open("WatchOperation", the_rest)
        await whole.first()  # it is attached while the operation runs
        told = await running.finish()
        require(told.completed, saw="nothing", wants="completion")
        same_events(told, await whole.rest(), when="by a watcher from the start")
        numbers = [event.sequence for event in (await later.rest()).messages]
        wanted = [event.sequence for event in told.messages if event.sequence > last]
        require(numbers == wanted, saw=f"{numbers} after {last}", wants=f"{wanted}")


@check("AD-26-cut-connection", clauses=["AD-22"], timeout_s=120.0)
async def a_cut_connection_only_detaches(bench: Bench) -> None:
    """Observers whose connection breaks come back without gap or repeat; the operation goes on."""
    if not bench.hooks.has(HookName.CUT):
        raise CheckNotRun("needs --hook cut=CMD")
    offer = await bench.offer()
    async with bench.running(offer) as running:
        await bench.hooks.run(HookName.CUT)
        broken = await running.stream.rest(timeout_s=20.0)
        require(not broken.is_ok, saw="a stream end OK without a terminal event", wants="a broken stream")
        await bench.until_back(len(offer.participants))
        state = (await bench.get(running.operation_id)).state
        require(
            state in RUNNING_STATES,
            saw=f"state {pb.AdminOperationState.Name(state)} after the connection broke",
            wants="the mutation to go on",
        )
        last = broken.messages[-1].sequence
        again = bench.open("Pause", running.request)
        request = pb.WatchAdminOperationRequest(operation_id=running.operation_id, after_sequence=last)
        watching = bench.open("WatchOperation", request)
        await bench.let_go()
        whole = await again.rest(timeout_s=90.0)
        require(whole.completed, saw="nothing", wants="completion")
        rest = await watching.rest()
    numbers = [event.sequence for event in (*broken.messages, *rest.messages)]
    wanted = [event.sequence for event in whole.messages]
    require(numbers == wanted, saw=f"sequences {numbers} over the cut", wants=f"{wanted}")
