"""What single operations do: flush, pause, profile, reconfigure (AD-40, AD-41, AD-46, AD-47)."""

from __future__ import annotations

from typing import Any

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, CheckSkipped, check, require

Status = grpc.StatusCode
CLEARED = pb.CACHE_OUTCOME_CLEARED


@check("AD-40-flush-result")
async def a_flush_tells_each_cache(bench: Bench) -> None:
    """A completed flush says CLEARED for every participant and kind that was asked."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    kinds = offer.common("FlushCaches", "cache_kinds")
    if not kinds:
        raise CheckSkipped("no cache kind that all participants offer")
    _, answer = await bench.flushed(offer, kinds=kinds)
    caches = answer.completed.result.flush_caches.caches
    told = sorted((c.participant_id, c.kind) for c in caches)
    wanted = sorted((p, kind) for p in offer.ids("FlushCaches") for kind in kinds)
    require(told == wanted, saw=f"results for {told}", wants=f"one for each of {wanted}")
    bad = [c.participant_id for c in caches if c.outcome != CLEARED]
    require(not bad, saw=f"success though {bad} did not clear", wants="anything but cleared is no success")


@check("AD-40-refused-flush")
async def a_refused_flush_is_no_success(bench: Bench) -> None:
    """A flush that busy engines refuse (policy FAIL) fails, says who refused, and quarantines nobody."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    if pb.BUSY_POLICY_FAIL not in offer.common("FlushCaches", "busy_policies"):
        raise CheckSkipped("the busy policy FAIL is not offered")
    async with bench.held():
        answer = await bench.call("FlushCaches", offer.flush(bench.key(), busy=pb.BUSY_POLICY_FAIL))
        end = answer.terminal
        require(
            end.HasField("failed"),
            saw=f"a flush of busy engines end {end.WhichOneof('event')}",
            wants="failed: a refused flush is not success",
        )
        require(end.failed.error.participants, saw="nobody named", wants="the participants that refused")
        ill = [p.participant_id for p in (await bench.profile()).participants if p.quarantined]
        require(not ill, saw=f"{ill} quarantined", wants="a refused flush to quarantine nobody (AD-29)")


@check("AD-41-modes", clauses=["AD-42", "AD-15"])
async def each_mode_works(bench: Bench) -> None:
    """Every advertised pause mode completes, tells its mode and epoch, and is ended by Resume."""
    offer = await bench.offer()
    offer.need("Pause", "Resume")
    for mode in offer.common("Pause", "pause_modes"):
        name = pb.PauseMode.Name(mode)
        answer = await bench.call("Pause", offer.pause(bench.key(), mode=mode))
        result = answer.completed.result.pause
        require(result.mode == mode, saw=f"{name} answered with mode {result.mode}", wants=name)
        active = {p.pause_epoch: p for p in (await bench.profile()).pauses}
        shown = active.get(result.pause_epoch)
        require(shown is not None, saw=f"{name} not in the profile", wants="each active pause")
        assert shown is not None
        require(
            shown.mode == mode and shown.admission == pb.ADMISSION_POLICY_QUEUE and shown.principal,
            saw=f"the profile tell mode {shown.mode}, admission {shown.admission} of {name}",
            wants="what was asked, and by whom",
        )
        await bench.resumed(offer, result.pause_epoch)


@check("AD-46-start-stop")
async def profiles_start_and_stop(bench: Bench) -> None:
    """StartProfile names participants; StopProfile names artifacts with digest, and names them again."""
    offer = await bench.offer()
    offer.need("StartProfile", "StopProfile")
    started = (await bench.call("StartProfile", offer.start_profile(bench.key()))).message
    require(started.profile_id and started.operation_id, saw="no profile_id or operation_id", wants="both")
    require(
        set(started.participant_ids) == set(offer.ids("StartProfile")),
        saw=f"participants {list(started.participant_ids)}",
        wants="everybody selected",
    )
    operation = await bench.get(started.operation_id)
    require(
        operation.state == pb.ADMIN_OPERATION_STATE_SUCCEEDED,
        saw=f"state {operation.state} after the answer",
        wants="the operation to end at the start of the profile",
    )
    stopped = (await bench.call("StopProfile", offer.stop_profile(bench.key(), started.profile_id))).message
    require(stopped.artifacts, saw="no artifact", wants="artifacts per participant")
    for artifact in stopped.artifacts:
        require(
            artifact.uri and artifact.media_type and len(artifact.sha256) == 32 and artifact.participant_id,
            saw=f"the artifact {artifact.uri!r} of {artifact.participant_id!r}",
            wants="uri, media type, SHA-256 and participant",
        )
    again = (await bench.call("StopProfile", offer.stop_profile(bench.key(), started.profile_id))).message
    require(
        sorted(a.uri for a in again.artifacts) == sorted(a.uri for a in stopped.artifacts),
        saw="other artifacts of a stopped profile",
        wants="the same again",
    )


@check("AD-46-unknown-profile")
async def unknown_profiles_are_not_found(bench: Bench) -> None:
    """StopProfile of an unknown id is NOT_FOUND."""
    offer = await bench.offer()
    offer.need("StopProfile")
    answer = await bench.call("StopProfile", offer.stop_profile(bench.key(), "no-such-profile"))
    answer.refused(Status.NOT_FOUND)


@check("AD-18-profile-active", clauses=["AD-46"])
async def one_profile_at_a_time(bench: Bench) -> None:
    """A running profile blocks another one on the same participants (PROFILE_ACTIVE), and nothing else."""
    offer = await bench.offer()
    offer.need("StartProfile", "StopProfile")
    started = (await bench.call("StartProfile", offer.start_profile(bench.key()))).message
    answer = await bench.call("StartProfile", offer.start_profile(bench.key()))
    answer.refused(Status.FAILED_PRECONDITION, reason="PROFILE_ACTIVE", where="a second profile")
    require(answer.names(started.profile_id), saw=f"{answer.told()}", wants=f"the id {started.profile_id}")
    if offer.has("FlushCaches"):
        await bench.flushed(offer)


@check("AD-47-over-limit")
async def changes_beyond_the_limit_are_refused(bench: Bench) -> None:
    """A capacity beyond what a participant advertises is FAILED_PRECONDITION and changes nothing."""
    offer = await bench.offer()
    offer.need("ReconfigureServing")
    if pb.RECONFIGURABLE_FIELD_CAPACITY not in offer.common("ReconfigureServing", "reconfigurable_fields"):
        raise CheckSkipped("capacity cannot be changed")
    limits = [p.capacity_max for p in offer.who("ReconfigureServing") if p.HasField("capacity_max")]
    if not limits:
        raise CheckSkipped("no participant advertises capacity_max")
    before = (await bench.profile()).revision
    request = offer.reconfigure(bench.key(), pb.ServingChange(capacity=max(limits) + 1))
    answer = await bench.call("ReconfigureServing", request)
    answer.refused(Status.FAILED_PRECONDITION, where=f"a capacity of {max(limits) + 1}")
    after = (await bench.profile()).revision
    require(before == after, saw="the revision risen by a refusal", wants="nothing changed")


@check("AD-47-applied")
async def changes_are_reported(bench: Bench) -> None:
    """An accepted change tells for each participant what became of it and the effective value."""
    offer = await bench.offer()
    offer.need("ReconfigureServing")
    fields = offer.common("ReconfigureServing", "reconfigurable_fields")
    if pb.RECONFIGURABLE_FIELD_ENABLED in fields:
        await _changes(bench, pb.ServingChange(enabled=True), "")
        return
    if pb.RECONFIGURABLE_FIELD_CAPACITY not in fields:
        raise CheckSkipped("neither enabled nor capacity can be changed")
    now = bench.target.capacity
    if now is None or now < 2:
        raise CheckNotRun("needs --capacity N, what it is now, so that it can be put back")
    try:
        await _changes(bench, pb.ServingChange(capacity=now - 1), str(now - 1))
    finally:
        await _changes(bench, pb.ServingChange(capacity=now), str(now))


async def _changes(bench: Bench, change: Any, value: str) -> None:
    offer = await bench.offer()
    answer = await bench.call("ReconfigureServing", offer.reconfigure(bench.key(), change))
    told = answer.completed.result.reconfigure_serving.changes
    ids = {c.participant_id for c in told}
    require(
        ids == set(offer.ids("ReconfigureServing")),
        saw=f"results for {sorted(ids)}",
        wants="everybody selected",
    )
    for one in told:
        require(
            one.disposition
            in {
                pb.CHANGE_DISPOSITION_APPLIED,
                pb.CHANGE_DISPOSITION_UNCHANGED,
                pb.CHANGE_DISPOSITION_NEEDS_RESTART,
            },
            saw=f"disposition {one.disposition} in a completed change",
            wants="applied, unchanged or needs a restart",
        )
        if value and one.disposition == pb.CHANGE_DISPOSITION_APPLIED:
            require(one.effective_value == value, saw=f"effective value {one.effective_value!r}", wants=value)
