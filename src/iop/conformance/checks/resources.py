"""Release and restore (AD-42 to AD-44)."""

from __future__ import annotations

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import check, require

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@check("AD-43-needs-pause")
async def a_release_needs_a_pause(bench: Bench) -> None:
    """ReleaseResources of active participants without a pause is FAILED_PRECONDITION."""
    offer = await bench.offer()
    offer.need("ReleaseResources", "RestoreResources")
    answer = await bench.call("ReleaseResources", offer.release(bench.key()))
    answer.refused(PRECONDITION, where="active participants and no pause in the request")


@check("AD-43-release-restore", clauses=["AD-42", "AD-44"], timeout_s=60.0)
async def release_and_restore(bench: Bench) -> None:
    """Release with a pause, refused Resume meanwhile, restore, resume: epochs, bytes and states throughout."""
    offer = await bench.offer()
    offer.need("ReleaseResources", "RestoreResources", "Resume")
    kind = offer.release_kind
    ids = set(offer.ids("ReleaseResources"))
    answer = await bench.call("ReleaseResources", offer.release(bench.key(), with_pause=True))
    result = answer.completed.result.release_resources
    require(result.resource_epoch, saw="resource_epoch 0", wants="a number")
    require(
        result.HasField("pause_epoch"), saw="no pause_epoch", wants="the epoch of the pause in the request"
    )
    amounts = {(a.participant_id, a.kind) for a in result.released}
    require(
        amounts == {(p, kind) for p in ids}, saw=f"amounts for {sorted(amounts)}", wants="each participant's"
    )
    profile = await bench.profile()
    epochs = [r.resource_epoch for r in profile.releases]
    require(
        result.resource_epoch in epochs, saw=f"releases {epochs} in the profile", wants="this one among them"
    )
    wrong = [p.participant_id for p in profile.participants if p.participant_id in ids and not p.released]
    require(not wrong, saw=f"{wrong} not shown as released", wants="RELEASED")

    early = await bench.call("Resume", offer.resume(bench.key(), result.pause_epoch))
    early.refused(PRECONDITION, reason="RESOURCES_RELEASED", where="Resume while something is released")

    restore = offer.restore(bench.key(), result.resource_epoch, kinds=[kind])
    restored = (await bench.call("RestoreResources", restore)).completed.result.restore_resources
    told = {(a.participant_id, a.kind) for a in restored.restored}
    require(told == {(p, kind) for p in ids}, saw=f"restored {sorted(told)}", wants="each participant's")
    require(not restored.remaining, saw=f"remaining {list(restored.remaining)}", wants="nothing")
    again = await bench.call(
        "RestoreResources", offer.restore(bench.key(), result.resource_epoch, kinds=[kind])
    )
    again.refused(PRECONDITION, reason="STALE_EPOCH", where="a second restore under another key")
    await bench.resumed(offer, result.pause_epoch)


@check("AD-44-subset")
async def only_what_was_released(bench: Bench) -> None:
    """Restoring a kind that was not released under the epoch is FAILED_PRECONDITION."""
    offer = await bench.offer()
    offer.need("ReleaseResources", "RestoreResources", "Resume")
    released = await bench.call("ReleaseResources", offer.release(bench.key(), with_pause=True))
    epoch = released.completed.result.release_resources.resource_epoch
    kinds = [k for k in offer.common("RestoreResources", "resource_kinds") if k != offer.release_kind]
    for kind in kinds[:1]:
        answer = await bench.call("RestoreResources", offer.restore(bench.key(), epoch, kinds=[kind]))
        answer.refused(PRECONDITION, where=f"{pb.ResourceKind.Name(kind)}, which was not released")
