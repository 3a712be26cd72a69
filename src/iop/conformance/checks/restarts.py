"""The server is killed and comes back (AD-20, AD-26)."""

from __future__ import annotations

from typing import Any

import grpc

from iop.conformance.bench import Bench
from iop.conformance.checks.idempotency import same_events
from iop.conformance.hooks import HookName
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, check, require
from iop.conformance.wire import TERMINAL

RESTART_S = 300.0


def _need_hook(bench: Bench) -> None:
    if not bench.hooks.has(HookName.RESTART):
        raise CheckNotRun("needs --hook restart=CMD")


@check("AD-26-restart-finished", clauses=["AD-12", "AD-13", "AD-20"], timeout_s=RESTART_S)
async def finished_operations_outlive_it(bench: Bench) -> None:
    """After a hard restart finished operations, their events, their keys and the revision are as before."""
    _need_hook(bench)
    offer = await bench.offer()
    request, first = await bench.flushed(offer)
    before = await bench.get(first.operation_id)
    revision = (await bench.profile()).revision
    await bench.restart()
    get = pb.GetAdminOperationRequest(operation_id=first.operation_id)
    found = await bench.call("GetOperation", get)
    require(
        found.is_ok,
        saw=f"a finished operation lost by a restart: {found.told()}",
        wants="every accepted operation",
    )
    require(found.message == before, saw="another state of a finished operation", wants="the same")
    now = (await bench.profile()).revision
    require(now == revision, saw=f"revision {now} after the restart", wants=f"{revision}")
    same_events(first, await bench.call("FlushCaches", request), when="after a restart")
    other = pb.FlushCachesRequest()
    other.CopyFrom(request)
    other.options.reason = "another"
    answer = await bench.call("FlushCaches", other)
    answer.refused(grpc.StatusCode.ALREADY_EXISTS, where="another payload after a restart")


@check("AD-26-restart-pause", clauses=["AD-14", "AD-35"], timeout_s=RESTART_S)
async def pauses_outlive_it(bench: Bench) -> None:
    """After a hard restart a pause is in force under its epoch, and Resume ends it."""
    _need_hook(bench)
    offer = await bench.offer()
    epoch = await bench.paused(offer)
    await bench.restart()
    profile = await bench.profile()
    require(
        epoch in {p.pause_epoch for p in profile.pauses},
        saw=f"the pauses {[p.pause_epoch for p in profile.pauses]} after the restart",
        wants=f"{epoch} in force",
    )
    awake = [p.participant_id for p in profile.participants if p.connected and not p.paused]
    require(not set(awake) & set(offer.ids("Pause")), saw=f"{awake} not paused", wants="them paused")
    await bench.resumed(await bench.offer(), epoch)


@check("AD-26-restart-running", clauses=["AD-20", "AD-21"], timeout_s=RESTART_S)
async def running_operations_are_settled(bench: Bench) -> None:
    """An operation that runs while the server is killed gets exactly one terminal event, and its key still finds it."""
    _need_hook(bench)
    offer = await bench.offer()
    async with bench.running(offer) as running:
        seen = (await bench.get(running.operation_id)).last_sequence
        await bench.restart()
        await bench.let_go()
        get = pb.GetAdminOperationRequest(operation_id=running.operation_id)
        found = await bench.call("GetOperation", get)
        require(
            found.is_ok, saw=f"an accepted operation lost by a restart: {found.told()}", wants="it settled"
        )
        operation: Any = await bench.until_done(running.operation_id)
        broken = [event.sequence for event in running.stream.seen]
    told = await bench.watch(running.operation_id)
    kinds = [event.WhichOneof("event") for event in told.messages]
    require(
        sum(kind in TERMINAL for kind in kinds) == 1 and kinds[-1] in TERMINAL,
        saw=f"the events {kinds} after the restart",
        wants="exactly one terminal event, the last",
    )
    numbers = [event.sequence for event in told.messages]
    require(
        numbers == list(range(1, len(numbers) + 1)),
        saw=f"sequences {numbers}",
        wants="no gap over the restart",
    )
    require(
        numbers[-1] == operation.last_sequence and operation.last_sequence >= max([seen, *broken]),
        saw=f"{operation.last_sequence} after {seen} before the restart",
        wants="nothing that was told forgotten",
    )
    same_events(told, await bench.call("Pause", running.request), when="after the restart")
    left = [p for p in (await bench.profile()).pauses if p.operation_id == running.operation_id]
    is_done = operation.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED
    require(
        bool(left) == is_done,
        saw=f"the pause {'in force' if left else 'gone'} with state {operation.state}",
        wants="a pause in force exactly if its operation succeeded",
    )
