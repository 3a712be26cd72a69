"""What the profile tells, and whether it is true (AD-15, AD-50)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckSkipped, check, require
from iop.conformance.offer import KINDS, Offer

UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
FOREIGN: Final = "!foreign!"

_SUMS: Final = (
    "operations",
    "cache_kinds",
    "resource_kinds",
    "pause_modes",
    "weight_sources",
    "profiler_kinds",
    "reconfigurable_fields",
    "distributed_backends",
    "roles",
    "busy_policies",
    "weight_retentions",
    "cache_policies",
    "quiesce_modes",
    "tensor_dtypes",
)


@check("AD-50-profile")
async def profile_is_whole(bench: Bench) -> None:
    """The profile has its revision, limits and participants, and its lists are the sums of theirs."""
    profile = await bench.profile()
    require(profile.profile_revision == 1, saw=f"profile_revision {profile.profile_revision}", wants="1")
    limits = profile.limits
    for name in (
        "max_concurrent_operations",
        "max_deadline_ms",
        "default_deadline_ms",
        "idempotency_retention_ms",
    ):
        require(getattr(limits, name), saw=f"limits.{name} absent", wants="every limit that is enforced")
    require(
        1 <= limits.max_idempotency_key_bytes <= 128,
        saw=f"limits.max_idempotency_key_bytes {limits.max_idempotency_key_bytes}",
        wants="at most 128",
    )
    require(profile.participants, saw="no participant", wants="each participant's capabilities and state")
    for name in _SUMS:
        told = set(getattr(profile, name))
        summed = {number for p in profile.participants for number in getattr(p, name)}
        require(
            told == summed,
            saw=f"{name} {sorted(told)} while participants offer {sorted(summed)}",
            wants="their sum",
        )
    ids = [p.participant_id for p in profile.participants]
    require(
        all(ids) and len(set(ids)) == len(ids),
        saw="participants without an id of their own",
        wants="unique ids",
    )
    require(
        set(profile.cancellable) <= set(profile.operations),
        saw="cancellable kinds that are not offered",
        wants="a subset of operations",
    )


@check("AD-50-states")
async def states_agree_with_epochs(bench: Bench) -> None:
    """Each participant's state is the most restrictive of its flags, and PAUSED while a pause covers it."""
    offer = await bench.offer()
    _flags_agree(offer)
    epoch = await bench.paused(offer)
    paused = await bench.offer()
    _flags_agree(paused)
    covered = {i for p in paused.profile.pauses if p.pause_epoch == epoch for i in p.participant_ids}
    require(
        covered == set(offer.ids("Pause")), saw=f"a pause over {sorted(covered)}", wants="everybody selected"
    )
    for participant in paused.participants:
        if participant.participant_id in covered:
            require(
                participant.paused and participant.state != pb.PARTICIPANT_STATE_ACTIVE,
                saw=f"{participant.participant_id} not shown as paused",
                wants="PAUSED",
            )
    await bench.resumed(offer, epoch)
    for participant in (await bench.offer()).participants:
        if participant.participant_id in covered:
            require(
                not participant.paused,
                saw=f"{participant.participant_id} paused after Resume",
                wants="ACTIVE",
            )


def _flags_agree(offer: Offer) -> None:
    for p in offer.profile.participants:
        expected = (
            pb.PARTICIPANT_STATE_OFFLINE
            if not p.connected
            else pb.PARTICIPANT_STATE_QUARANTINED
            if p.quarantined
            else pb.PARTICIPANT_STATE_RELEASED
            if p.released
            else pb.PARTICIPANT_STATE_PAUSED
            if p.paused
            else pb.PARTICIPANT_STATE_ACTIVE
        )
        require(
            p.state == expected,
            saw=f"{p.participant_id} in state {p.state} with connected={p.connected}, quarantined={p.quarantined}, "
            f"released={p.released}, paused={p.paused}",
            wants=f"state {expected}",
        )


# --------------------------------------------------------------------------------------------------- truth


def _wishes(offer: Offer, key: str) -> Iterator[tuple[str, str, str, int, Any]]:
    """RPC, capability list, its name, the number wished for, and the request that wishes it."""

    def every(enum: Any, given: int = 0) -> list[int]:
        return [number for number in enum.values() if number != given]

    if "FlushCaches" in offer.samples:
        for kind in every(pb.CacheKind):
            yield "FlushCaches", "cache_kinds", pb.CacheKind.Name(kind), kind, offer.flush(key, kinds=[kind])
        for policy in every(pb.BusyPolicy):
            yield (
                "FlushCaches",
                "busy_policies",
                pb.BusyPolicy.Name(policy),
                policy,
                offer.flush(key, busy=policy),
            )
    if "Pause" in offer.samples:
        for mode in every(pb.PauseMode):
            yield "Pause", "pause_modes", pb.PauseMode.Name(mode), mode, offer.pause(key, mode=mode)
    if "ReleaseResources" in offer.samples:
        for kind in every(pb.ResourceKind):
            request = offer.release(key, with_pause=True)
            request.kinds[:] = [kind]
            request.ClearField("weight_retention")
            if kind == pb.RESOURCE_KIND_WEIGHTS:
                if not offer.common("ReleaseResources", "weight_retentions"):
                    continue
                request.weight_retention = offer.one("ReleaseResources", "weight_retentions")
            yield "ReleaseResources", "resource_kinds", pb.ResourceKind.Name(kind), kind, request
    if "StartProfile" in offer.samples:
        for kind in every(pb.ProfilerKind):
            request = offer.start_profile(key)
            request.kinds[:] = [kind]
            yield "StartProfile", "profiler_kinds", pb.ProfilerKind.Name(kind), kind, request
    yield from _update_wishes(offer, key)


def _update_wishes(offer: Offer, key: str) -> Iterator[tuple[str, str, str, int, Any]]:
    if "UpdateWeights" not in offer.samples:
        return

    def update(**source: Any) -> Any:
        request = offer.update(key, version="conformance-never")
        for name, value in source.items():
            getattr(request, name).CopyFrom(value)
        return request

    spec = pb.TensorSpec(name="w", dtype=pb.TENSOR_DTYPE_FLOAT32, shape=[1])
    sources = {
        pb.WEIGHT_SOURCE_KIND_DISTRIBUTED: update(
            distributed=pb.DistributedSource(
                backend=pb.DISTRIBUTED_BACKEND_NCCL,
                master_host="localhost",
                master_port=29500,
                world_size=2,
                group_name="g",
                tensors=[spec],
            )
        ),
        pb.WEIGHT_SOURCE_KIND_IPC: update(ipc=pb.IpcSource(tensors=[pb.IpcTensor(spec=spec, handle=b"h")])),
    }
    for kind, request in sources.items():
        yield "UpdateWeights", "weight_sources", pb.WeightSourceKind.Name(kind), kind, request
    for form in pb.WeightFormat.values():
        request = update()
        request.disk.format = form
        yield "UpdateWeights", "weight_formats", pb.WeightFormat.Name(form), form, request
    for policy in pb.CachePolicy.values():
        request = update()
        request.cache_policy = policy
        yield "UpdateWeights", "cache_policies", pb.CachePolicy.Name(policy), policy, request


@check("AD-15-unsupported")
async def what_is_not_offered_is_refused(bench: Bench) -> None:
    """What some selected participant does not advertise is UNIMPLEMENTED, naming who."""
    offer = await bench.offer()
    tried = 0
    for rpc, field, name, number, request in _wishes(offer, "unused"):
        if number == 0 or number in offer.common(rpc, field):
            continue
        lacking = [p.participant_id for p in offer.who(rpc) if number not in getattr(p, field)]
        request.options.idempotency_key = bench.key()
        answer = await bench.call(rpc, request)
        tried += 1
        answer.refused(UNIMPLEMENTED, where=f"{name}, which is not advertised")
        require(
            answer.names(lacking[0]),
            saw=f"the refusal of {name} not name {lacking[0]}: {answer.told()}",
            wants="the participants that do not support it named",
        )
    if not tried:
        raise CheckSkipped("everything is offered")


@check("AD-15-kinds-refused")
async def kinds_that_are_not_offered_are_refused(bench: Bench) -> None:
    """A kind of operation that is not in the profile is UNIMPLEMENTED."""
    offer = await bench.offer()
    absent = [rpc for rpc, kind in KINDS.items() if kind not in offer.profile.operations]
    if not absent:
        raise CheckSkipped("every kind is offered")
    everybody = pb.TargetSelector(all=pb.AllTargets())
    for rpc in absent:
        options = pb.MutationOptions(idempotency_key=bench.key())
        made = {
            "FlushCaches": pb.FlushCachesRequest(
                options=options,
                target=everybody,
                kinds=[pb.CACHE_KIND_PREFIX],
                busy_policy=pb.BUSY_POLICY_WAIT,
            ),
            "StartProfile": pb.StartProfileRequest(
                options=options, target=everybody, kinds=[pb.PROFILER_KIND_CPU]
            ),
            "ReconfigureServing": pb.ReconfigureServingRequest(
                options=options, target=everybody, changes=[pb.ServingChange(capacity=1)]
            ),
            "ReleaseResources": pb.ReleaseResourcesRequest(
                options=options, target=everybody, kinds=[pb.RESOURCE_KIND_KV_CACHE]
            ),
        }
        if rpc in made:
            (await bench.call(rpc, made[rpc])).refused(UNIMPLEMENTED, where="a kind that is not advertised")


_UNBLOCKED: Final = frozenset({"Pause", "FlushCaches", "StartProfile"})
"""Kinds of which nothing speaks against any on a server that is idle and active."""


@check("AD-15-advertised")
async def what_is_offered_is_accepted(bench: Bench) -> None:
    """What every selected participant advertises is not refused as unsupported."""
    offer = await bench.offer()
    refused = []
    for rpc, field, name, number, request in _wishes(offer, "unused"):
        if number == 0 or number not in offer.common(rpc, field):
            continue
        request.options.validate_only = True
        answer = await bench.call(rpc, request)
        if answer.code is UNIMPLEMENTED:
            refused.append(f"{name} of {rpc} ({answer.told()})")
        elif answer.is_ok:
            told = list(answer.messages[0].plan.blockers)
            blockers = told if rpc in _UNBLOCKED else [b for b in told if "UNSUPPORTED" in b]
            if blockers:
                refused.append(f"{name} of {rpc} (blocked: {blockers[0]})")
    require(
        not refused, saw=f"advertised and yet refused: {', '.join(refused)}", wants="a profile that is true"
    )


@check("AD-15-unknown-names", clauses=["AD-17"])
async def unknown_names_are_not_found(bench: Bench) -> None:
    """An unknown model or participant is NOT_FOUND, and is named."""
    offer = await bench.offer()
    name = "no-such-name-as-this"
    for rpc in ("FlushCaches", "Pause", "StartProfile"):
        if rpc not in offer.samples:
            continue
        for scope in (
            pb.TargetSelector(models=pb.ModelSelector(models=[name])),
            pb.TargetSelector(participants=pb.ParticipantSelector(participant_ids=[name])),
        ):
            request = offer.sample(rpc, bench.key())
            request.target.CopyFrom(scope)
            answer = (await bench.call(rpc, request)).refused(
                grpc.StatusCode.NOT_FOUND, where="an unknown name"
            )
            require(answer.names(name), saw=f"{answer.told()}", wants="the unknown name in the refusal")


@check("AD-19-partial-group")
async def groups_are_whole(bench: Bench) -> None:
    """A group that is named in part is FAILED_PRECONDITION (PARTIAL_GROUP)."""
    offer = await bench.offer()
    rpc = "FlushCaches" if offer.has("FlushCaches") else "Pause"
    groups: dict[str, list[str]] = {}
    for participant in offer.who(rpc):
        groups.setdefault(participant.group_id, []).append(participant.participant_id)
    big = next((ids for group, ids in sorted(groups.items()) if group and len(ids) > 1), None)
    if big is None:
        raise CheckSkipped("no group has more than one participant")
    request = offer.sample(rpc, bench.key())
    request.target.participants.participant_ids.append(big[0])
    answer = await bench.call(rpc, request)
    answer.refused(grpc.StatusCode.FAILED_PRECONDITION, reason="PARTIAL_GROUP", where=f"{big[0]} alone")


@check("AD-01-list")
async def operations_are_listed(bench: Bench) -> None:
    """ListOperations pages newest first without gap or repeat, filters by kind and state, refuses foreign tokens."""
    offer = await bench.offer()
    made = [(await bench.flushed(offer))[1].operation_id for _ in range(3)]
    seen: list[str] = []
    token = ""
    for _ in range(3):
        page = (
            await bench.call("ListOperations", pb.ListAdminOperationsRequest(page_size=1, page_token=token))
        ).message
        require(len(page.operations) == 1, saw=f"{len(page.operations)} operations", wants="page_size heeded")
        seen.append(page.operations[0].operation_id)
        token = page.next_page_token
        require(token or len(seen) == 3, saw="no next_page_token though there is more", wants="one")
    require(seen == made[::-1], saw=f"{seen}", wants=f"newest first, each once: {made[::-1]}")
    kind = pb.ADMIN_OPERATION_KIND_FLUSH_CACHES
    for operation in await bench.operations(kinds=[kind]):
        require(operation.kind == kind, saw=f"kind {operation.kind}", wants=f"only kind {kind}")
    done = pb.ADMIN_OPERATION_STATE_SUCCEEDED
    listed = await bench.operations(states=[done])
    require(
        {o.state for o in listed} == {done}, saw="other states in a filtered list", wants="only SUCCEEDED"
    )
    require(
        not await bench.operations(states=[pb.ADMIN_OPERATION_STATE_PENDING]),
        saw="pending operations while nothing runs",
        wants="none",
    )
    answer = await bench.call("ListOperations", pb.ListAdminOperationsRequest(page_token=FOREIGN))
    answer.refused(grpc.StatusCode.INVALID_ARGUMENT, where="a foreign page token")
