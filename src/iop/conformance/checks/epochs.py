"""The number of one pause or release (AD-14, AD-41, AD-42)."""

from __future__ import annotations

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckSkipped, check, require

Status = grpc.StatusCode
FAR = 2**40


async def _active(bench: Bench) -> dict[int, object]:
    return {p.pause_epoch: p for p in (await bench.profile()).pauses}


@check("AD-14-epoch-in-profile", clauses=["AD-41", "AD-42"])
async def epochs_are_shown(bench: Bench) -> None:
    """A pause has a non-zero epoch, shown in the profile with its operation until it is resumed."""
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    answer = await bench.call("Pause", offer.pause(bench.key()))
    epoch = answer.completed.result.pause.pause_epoch
    require(epoch, saw="pause_epoch 0", wants="a number")
    shown = (await _active(bench)).get(epoch)
    require(shown, saw="the profile without this pause", wants="each active pause in the profile")
    require(
        getattr(shown, "operation_id", "") == answer.operation_id,
        saw="another operation named for the pause",
        wants=answer.operation_id,
    )
    ended = await bench.resumed(offer, epoch)
    require(
        ended.completed.result.resume.pause_epoch == epoch,
        saw=f"Resume tell epoch {ended.completed.result.resume.pause_epoch}",
        wants=f"{epoch}",
    )
    require(epoch not in await _active(bench), saw="the pause still active after Resume", wants="it gone")


@check("AD-14-unknown-epoch")
async def unknown_epochs_are_refused(bench: Bench) -> None:
    """Resume of an unknown epoch is FAILED_PRECONDITION (STALE_EPOCH) and lists the active ones."""
    offer = await bench.offer()
    epoch = await bench.paused(offer)
    answer = await bench.call("Resume", offer.resume(bench.key(), FAR))
    answer.refused(Status.FAILED_PRECONDITION, reason="STALE_EPOCH", where="an unknown epoch")
    require(
        answer.names(str(epoch)), saw=f"active epoch {epoch} not listed: {answer.told()}", wants="it listed"
    )
    require(epoch in await _active(bench), saw="the pause gone by a refused Resume", wants="it in force")
    await bench.resumed(offer, epoch)


@check("AD-14-second-resume")
async def a_second_resume_is_stale(bench: Bench) -> None:
    """A second Resume of an ended epoch under another key is FAILED_PRECONDITION (STALE_EPOCH)."""
    offer = await bench.offer()
    epoch = await bench.paused(offer)
    await bench.resumed(offer, epoch)
    answer = await bench.call("Resume", offer.resume(bench.key(), epoch))
    answer.refused(Status.FAILED_PRECONDITION, reason="STALE_EPOCH", where="an epoch that has ended")


@check("AD-14-old-epoch-spares-new-pause")
async def an_old_epoch_spares_a_new_pause(bench: Bench) -> None:
    """A late Resume of an old pause does not end a newer one."""
    offer = await bench.offer()
    old = await bench.paused(offer)
    await bench.resumed(offer, old)
    new = await bench.paused(offer)
    require(new != old, saw=f"epoch {new} twice", wants="a new epoch for a new pause")
    answer = await bench.call("Resume", offer.resume(bench.key(), old))
    answer.refused(Status.FAILED_PRECONDITION, reason="STALE_EPOCH", where="the epoch of an earlier pause")
    require(new in await _active(bench), saw="the newer pause ended by the old epoch", wants="it in force")
    await bench.resumed(offer, new)


@check("AD-14-restore-epoch", clauses=["AD-44"])
async def unknown_resource_epochs_are_refused(bench: Bench) -> None:
    """RestoreResources of an unknown epoch is FAILED_PRECONDITION (STALE_EPOCH)."""
    offer = await bench.offer()
    offer.need("RestoreResources", "ReleaseResources")
    answer = await bench.call("RestoreResources", offer.restore(bench.key(), FAR))
    answer.refused(Status.FAILED_PRECONDITION, reason="STALE_EPOCH", where="an unknown resource epoch")


@check("AD-14-at-acceptance")
async def epochs_are_allotted_at_acceptance(bench: Bench) -> None:
    """The epoch of a pause is in the profile while the pause still runs."""
    offer = await bench.offer()
    async with bench.running(offer) as running:
        mine = [p for p in (await bench.profile()).pauses if p.operation_id == running.operation_id]
        require(mine, saw="a running pause without an epoch in the profile", wants="it visible at once")
        done = await running.finish()
        require(
            done.completed.result.pause.pause_epoch == mine[0].pause_epoch,
            saw=f"epoch {done.completed.result.pause.pause_epoch} in the result",
            wants=f"{mine[0].pause_epoch}, as the profile told",
        )


@check("AD-41-same-pause")
async def the_same_pause_keeps_its_epoch(bench: Bench) -> None:
    """The same principal pausing the same participants alike under another key gets the existing epoch."""
    offer = await bench.offer()
    first = await bench.paused(offer)
    second = await bench.paused(offer)
    require(first == second, saw=f"epoch {second} beside {first}", wants="the existing one")
    await bench.resumed(offer, first)
    require(not await _active(bench), saw="a pause left after one Resume", wants="none")


@check("AD-41-harder-mode")
async def a_harder_mode_replaces(bench: Bench) -> None:
    """ABORT over one's own pause gives a new epoch and makes the old one stale."""
    offer = await bench.offer()
    modes = offer.common("Pause", "pause_modes")
    softer = [m for m in (pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_KEEP) if m in modes]
    if pb.PAUSE_MODE_ABORT not in modes or not softer:
        raise CheckSkipped("ABORT and a softer mode are not both offered")
    old = await bench.paused(offer, mode=softer[0])
    new = await bench.paused(offer, mode=pb.PAUSE_MODE_ABORT)
    require(old != new, saw="the old epoch for a harder pause", wants="a new one")
    answer = await bench.call("Resume", offer.resume(bench.key(), old))
    answer.refused(
        Status.FAILED_PRECONDITION, reason="STALE_EPOCH", where="an epoch that a harder pause replaced"
    )
    await bench.resumed(offer, new)


@check("AD-41-softer-mode")
async def a_softer_mode_is_refused(bench: Bench) -> None:
    """A softer mode over one's own pause is FAILED_PRECONDITION (PAUSE_MODE)."""
    offer = await bench.offer()
    modes = offer.common("Pause", "pause_modes")
    softer = [m for m in (pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_KEEP) if m in modes]
    if pb.PAUSE_MODE_ABORT not in modes or not softer:
        raise CheckSkipped("ABORT and a softer mode are not both offered")
    epoch = await bench.paused(offer, mode=pb.PAUSE_MODE_ABORT)
    answer = await bench.call("Pause", offer.pause(bench.key(), mode=softer[0]))
    answer.refused(Status.FAILED_PRECONDITION, reason="PAUSE_MODE", where="a softer mode")
    await bench.resumed(offer, epoch)


@check("AD-42-resume-ends-one", clauses=["AD-41"])
async def resume_ends_that_pause_only(bench: Bench) -> None:
    """Another principal's pause gets an epoch of its own, and Resume ends that pause only."""
    bench.metadata("operator")
    offer = await bench.offer()
    ours = await bench.paused(offer)
    theirs = await bench.paused(offer, role="operator")
    require(ours != theirs, saw="one epoch for two principals", wants="one each")
    await bench.resumed(offer, ours)
    left = await bench.profile()
    require(
        theirs in {p.pause_epoch for p in left.pauses}, saw="the other pause ended too", wants="it in force"
    )
    free = [p.participant_id for p in left.participants if p.connected and not p.paused]
    require(
        not set(free) & set(offer.ids("Pause")),
        saw=f"{free} not paused any more",
        wants="them held by the other",
    )
    await bench.resumed(offer, theirs)
