"""Fields that the server does not know (AD-16)."""

from __future__ import annotations

from typing import Final

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckSkipped, check, require
from iop.conformance.wire import with_unknown

INVALID = grpc.StatusCode.INVALID_ARGUMENT

_NESTED: Final = {
    "FlushCaches": (("options",), ("target",), ("target", "all")),
    "Pause": (("options",), ("target",), ("pause",)),
    "Resume": (("options",),),
    "ReleaseResources": (("options",), ("target",), ("pause",)),
    "RestoreResources": (("options",),),
    "UpdateWeights": (("options",), ("disk",), ("quiesce",)),
    "StartProfile": (("options",), ("target",)),
    "StopProfile": (("options",),),
    "ReconfigureServing": (("options",), ("target",)),
}


@check("AD-16-unknown-top-level")
async def unknown_fields_are_refused(bench: Bench) -> None:
    """A mutation with a field that the server does not know is INVALID_ARGUMENT."""
    offer = await bench.offer()
    ignored = []
    for rpc in offer.samples:
        answer = await bench.call(rpc, with_unknown(offer.sample(rpc, bench.key())))
        if answer.code is not INVALID:
            ignored.append(f"{rpc}: {answer.told()}")
        else:
            answer.refused(INVALID)
    require(
        not ignored,
        saw=f"an unknown field ignored by {'; '.join(ignored)}",
        wants="INVALID_ARGUMENT: half of a destructive request is never ignored",
    )


@check("AD-16-unknown-nested")
async def nested_unknown_fields_are_refused(bench: Bench) -> None:
    """The same for fields inside options, target, pause and sources."""
    offer = await bench.offer()
    ignored = []
    for rpc in offer.samples:
        for path in _NESTED[rpc]:
            if path == ("target", "all") and not offer.target(rpc).HasField("all"):
                continue
            answer = await bench.call(rpc, with_unknown(offer.sample(rpc, bench.key()), path))
            if answer.code is not INVALID:
                ignored.append(f"{rpc} in {'.'.join(path)}: {answer.told()}")
            else:
                answer.refused(INVALID)
    require(
        not ignored,
        saw=f"an unknown field ignored by {'; '.join(ignored)}",
        wants="INVALID_ARGUMENT, at any depth",
    )


@check("AD-16-unknown-in-list")
async def unknown_fields_in_lists_are_refused(bench: Bench) -> None:
    """The same inside an element of a list."""
    offer = await bench.offer()
    if "ReconfigureServing" not in offer.samples:
        raise CheckSkipped("no kind of operation with a list of messages is offered")
    request = offer.sample("ReconfigureServing", bench.key())
    odd = pb.ServingChange.FromString(with_unknown(request.changes[0]))
    request.changes[0].CopyFrom(odd)
    answer = await bench.call("ReconfigureServing", request)
    answer.refused(INVALID, where="an unknown field in changes[0]")
