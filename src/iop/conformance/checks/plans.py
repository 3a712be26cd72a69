"""validate_only: the plan, and nothing else (AD-105)."""

from __future__ import annotations

from typing import Any

import grpc

from iop.conformance.bench import Bench
from iop.conformance.model import CheckSkipped, check, require
from iop.conformance.offer import Offer
from iop.conformance.wire import Answer

FAR = 2**40


def _need_plans(offer: Offer) -> None:
    if not offer.profile.validate_only_supported:
        raise CheckSkipped("the profile does not offer validate_only")


def _plan(answer: Answer) -> Any:
    require(answer.is_ok, saw=f"a dry run of {answer.rpc} refused: {answer.told()}", wants="a plan")
    require(
        len(answer.messages) == 1, saw=f"{len(answer.messages)} events of a dry run", wants="exactly one plan"
    )
    message = answer.messages[0]
    require(message.HasField("plan"), saw=f"a dry run of {answer.rpc} answer {answer.told()}", wants="a plan")
    require(
        not message.operation_id, saw="a dry run with an operation id", wants="none: nothing was accepted"
    )
    return message.plan


@check("AD-105-plan")
async def every_mutation_has_a_plan(bench: Bench) -> None:
    """Every mutation with validate_only answers one plan with steps or blockers, without a key."""
    offer = await bench.offer()
    _need_plans(offer)
    revision = offer.profile.revision
    for rpc in offer.samples:
        plan = _plan(await bench.call(rpc, offer.sample(rpc, "", validate_only=True)))
        require(plan.steps or plan.blockers, saw=f"an empty plan of {rpc}", wants="steps or blockers")
        require(plan.revision == revision, saw=f"a plan at revision {plan.revision}", wants=f"{revision}")
    if "Pause" in offer.samples:
        plan = _plan(await bench.call("Pause", offer.pause("", validate_only=True)))
        require(plan.pauses_inference, saw="a pause that pauses no inference", wants="pauses_inference")
        require(not plan.blockers, saw=f"blockers of an idle server: {list(plan.blockers)}", wants="none")
        ids = set(offer.ids("Pause"))
        require(set(plan.participant_ids) == ids, saw=f"{list(plan.participant_ids)}", wants=f"{sorted(ids)}")


@check("AD-105-changes-nothing")
async def plans_change_nothing(bench: Bench) -> None:
    """validate_only changes and journals nothing, and leaves the key free."""
    offer = await bench.offer()
    _need_plans(offer)
    before = await bench.profile()
    newest = [o.operation_id for o in await bench.operations()]
    keys = {}
    for rpc in offer.samples:
        keys[rpc] = bench.key()
        _plan(await bench.call(rpc, offer.sample(rpc, keys[rpc], validate_only=True)))
    after = await bench.profile()
    require(after.revision == before.revision, saw="the revision risen by a plan", wants="nothing changed")
    require(
        list(after.pauses) == list(before.pauses) and list(after.releases) == list(before.releases),
        saw="a pause or release by a plan",
        wants="nothing changed",
    )
    listed = [o.operation_id for o in await bench.operations()]
    require(listed == newest, saw="an operation journalled by validate_only", wants="nothing journalled")
    if "FlushCaches" in keys:
        answer = await bench.call("FlushCaches", offer.flush(keys["FlushCaches"], reason="for real"))
        require(answer.is_ok, saw=f"a key burnt by a plan: {answer.told()}", wants="the key free")


@check("AD-105-ignores-keys")
async def plans_ignore_keys(bench: Bench) -> None:
    """validate_only under a used key gives a plan, not the operation and no refusal."""
    offer = await bench.offer()
    _need_plans(offer)
    request, _ = await bench.flushed(offer)
    key = request.options.idempotency_key
    _plan(await bench.call("FlushCaches", offer.flush(key, validate_only=True)))
    _plan(await bench.call("FlushCaches", offer.flush(key, validate_only=True, reason="another payload")))


@check("AD-105-blockers")
async def plans_tell_blockers(bench: Bench) -> None:
    """A wrong revision and a stale epoch are blockers of a plan, not statuses."""
    offer = await bench.offer()
    _need_plans(offer)
    offer.need("FlushCaches")
    plan = _plan(await bench.call("FlushCaches", offer.flush("", validate_only=True, expected_revision=FAR)))
    require(plan.blockers, saw="no blocker for a wrong revision", wants="why it would be refused")
    if offer.has("Resume"):
        plan = _plan(await bench.call("Resume", offer.resume("", FAR, validate_only=True)))
        require(
            any("STALE_EPOCH" in blocker for blocker in plan.blockers),
            saw=f"the blockers {list(plan.blockers)}",
            wants="STALE_EPOCH among them",
        )


@check("AD-105-shape", clauses=["AD-10"])
async def plans_refuse_shapes(bench: Bench) -> None:
    """A malformed request is refused by status with validate_only too."""
    offer = await bench.offer()
    _need_plans(offer)
    offer.need("FlushCaches")
    request = offer.flush("", validate_only=True)
    request.target.Clear()
    answer = await bench.call("FlushCaches", request)
    answer.refused(grpc.StatusCode.INVALID_ARGUMENT, where="an empty target in a dry run")
