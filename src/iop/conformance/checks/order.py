"""Refusals: in which order, and what each carries (AD-17)."""

from __future__ import annotations

import re

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckSkipped, check, require
from iop.conformance.wire import Answer

Status = grpc.StatusCode
_REASON = re.compile(r"[A-Z][A-Z0-9_]{2,}")
FAR = 2**40


@check("AD-17-error-info")
async def refusals_carry_a_reason(bench: Bench) -> None:
    """Every refusal carries google.rpc.ErrorInfo with a domain and an UPPER_SNAKE reason, the same each time."""
    for round_ in range(2):
        for answer in await _refusals(bench):
            where = f"round {round_ + 1}"
            answer.refused(answer.code, where=where)
            require(
                _REASON.fullmatch(answer.reason) and answer.domain,
                saw=f"reason {answer.reason!r} in domain {answer.domain!r} of {answer.rpc}",
                wants="a stable UPPER_SNAKE reason within a domain",
            )
    first, second = await _refusals(bench), await _refusals(bench)
    require(
        [a.reason for a in first] == [a.reason for a in second],
        saw="other reasons for the same refusals",
        wants="stable reasons",
    )


async def _refusals(bench: Bench) -> list[Answer]:
    offer = await bench.offer()
    offer.need("FlushCaches")
    unknown = offer.flush(bench.key())
    unknown.target.models.models.append("no-such-model")
    empty = offer.flush(bench.key())
    empty.target.Clear()
    answers = [
        await bench.call("GetOperation", pb.GetAdminOperationRequest(operation_id="no-such-operation")),
        await bench.call("WatchOperation", pb.WatchAdminOperationRequest(operation_id="no-such-operation")),
        await bench.call("FlushCaches", unknown),
        await bench.call("FlushCaches", empty),
        await bench.call("FlushCaches", offer.flush(bench.key(), expected_revision=FAR)),
    ]
    if offer.has("Resume"):
        answers.append(await bench.call("Resume", offer.resume(bench.key(), FAR)))
    for answer in answers:
        require(not answer.is_ok, saw=f"{answer.rpc} accept nonsense", wants="a refusal")
    return answers


@check("AD-17-shape-before-rest")
async def shape_comes_before_the_fleet(bench: Bench) -> None:
    """A request wrong in shape and in names and in revision is refused for its shape."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    request = offer.flush(bench.key(), expected_revision=FAR)
    request.target.models.models.append("no-such-model")
    request.busy_policy = 0
    answer = await bench.call("FlushCaches", request)
    answer.refused(Status.INVALID_ARGUMENT, where="a bad enum, an unknown model and a wrong revision at once")


@check("AD-17-key-before-revision", clauses=["AD-12"])
async def keys_come_before_revisions(bench: Bench) -> None:
    """A used key with another payload and a wrong revision is ALREADY_EXISTS."""
    offer = await bench.offer()
    request, _ = await bench.flushed(offer)
    request.options.expected_revision = FAR
    answer = await bench.call("FlushCaches", request)
    answer.refused(Status.ALREADY_EXISTS, where="a used key, another payload and a wrong revision")


@check("AD-17-names-before-revision", clauses=["AD-15", "AD-13"])
async def names_come_before_revisions(bench: Bench) -> None:
    """An unknown model and a wrong revision at once are NOT_FOUND."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    request = offer.flush(bench.key(), expected_revision=FAR)
    request.target.models.models.append("no-such-model")
    answer = await bench.call("FlushCaches", request)
    answer.refused(Status.NOT_FOUND, where="an unknown model and a wrong revision")


@check("AD-17-revision-before-epoch", clauses=["AD-13", "AD-14"])
async def revisions_come_before_epochs(bench: Bench) -> None:
    """A stale epoch and a wrong revision at once are ABORTED."""
    offer = await bench.offer()
    offer.need("Resume")
    answer = await bench.call("Resume", offer.resume(bench.key(), FAR, expected_revision=FAR))
    answer.refused(Status.ABORTED, where="a stale epoch and a wrong revision")


@check("AD-17-capability-before-revision", clauses=["AD-15", "AD-13"])
async def capabilities_come_before_revisions(bench: Bench) -> None:
    """Something unsupported and a wrong revision at once are UNIMPLEMENTED."""
    offer = await bench.offer()
    offer.need("FlushCaches")
    absent = [k for k in pb.CacheKind.values() if k and k not in offer.common("FlushCaches", "cache_kinds")]
    if absent:
        request = offer.flush(bench.key(), kinds=[absent[0]], expected_revision=FAR)
        answer = await bench.call("FlushCaches", request)
    else:
        offer.need("StartProfile")
        kinds = offer.common("StartProfile", "profiler_kinds")
        lacking = [k for k in pb.ProfilerKind.values() if k and k not in kinds]
        if not lacking:
            raise CheckSkipped("everything is offered")
        profile = offer.start_profile(bench.key(), expected_revision=FAR)
        profile.kinds[:] = [lacking[0]]
        answer = await bench.call("StartProfile", profile)
    answer.refused(Status.UNIMPLEMENTED, where="something unsupported and a wrong revision")
