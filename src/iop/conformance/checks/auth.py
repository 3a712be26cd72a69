"""Who may do what (AD-03, AD-04)."""

from __future__ import annotations

from typing import Any

import grpc

from iop.conformance.bench import Bench
from iop.conformance.messages import pb
from iop.conformance.model import CheckNotRun, check, require
from iop.conformance.offer import Offer
from iop.conformance.wire import METHODS, MUTATIONS

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


def _any_request(offer: Offer, rpc: str, key: str, operation_id: str = "no-such-operation") -> Any:
    if rpc in offer.samples:
        return offer.sample(rpc, key)
    made = {
        "GetOperation": pb.GetAdminOperationRequest(operation_id=operation_id),
        "CancelOperation": pb.CancelAdminOperationRequest(operation_id=operation_id),
        "GetAdminProfile": pb.GetAdminProfileRequest(),
        "ListOperations": pb.ListAdminOperationsRequest(),
        "WatchOperation": pb.WatchAdminOperationRequest(operation_id=operation_id),
    }
    return made.get(rpc, b"")


def _need_tokens(bench: Bench) -> None:
    if not bench.target.tokens:
        raise CheckNotRun("needs --token REF: without one nobody is told apart")


@check("AD-03-no-credential", clauses=["AD-17"])
async def nobody_is_refused(bench: Bench) -> None:
    """Every RPC without a credential is UNAUTHENTICATED."""
    _need_tokens(bench)
    offer = await bench.offer()
    for rpc in METHODS:
        answer = await bench.call(rpc, _any_request(offer, rpc, bench.key()), role="nobody")
        answer.refused(UNAUTHENTICATED, where="a caller without a credential")


@check("AD-03-unknown-credential", clauses=["AD-17"])
async def strangers_are_refused(bench: Bench) -> None:
    """Every RPC with a credential that nobody knows is UNAUTHENTICATED."""
    _need_tokens(bench)
    offer = await bench.offer()
    wrong = (("authorization", "Bearer no-such-token-as-this-one"),)
    for rpc in METHODS:
        answer = await bench.call_as(wrong, rpc, _any_request(offer, rpc, bench.key()))
        answer.refused(UNAUTHENTICATED, where="an unknown credential")


@check("AD-04-viewer-reads")
async def viewer_reads(bench: Bench) -> None:
    """A viewer may read the profile, operations and their events."""
    bench.metadata("viewer")
    offer = await bench.offer()
    _, flushed = await bench.flushed(offer)
    for rpc in ("GetAdminProfile", "ListOperations", "GetOperation", "WatchOperation"):
        request = _any_request(offer, rpc, "", flushed.operation_id)
        answer = await bench.call(rpc, request, role="viewer")
        require(answer.is_ok, saw=f"{rpc} refuse a viewer: {answer.told()}", wants="what a viewer may see")


@check("AD-04-viewer-changes-nothing", clauses=["AD-03"])
async def viewer_changes_nothing(bench: Bench) -> None:
    """A viewer may begin nothing and cancel nothing: PERMISSION_DENIED."""
    bench.metadata("viewer")
    offer = await bench.offer()
    for rpc in MUTATIONS:
        if rpc in offer.samples:
            answer = await bench.call(rpc, offer.sample(rpc, bench.key()), role="viewer")
            answer.refused(DENIED, where="a viewer")
    answer = await bench.cancel("no-such-operation", role="viewer")
    answer.refused(DENIED, where="a viewer who may cancel nothing")


@check("AD-04-redaction")
async def viewer_sees_no_keys(bench: Bench) -> None:
    """Key and reason of an operation are shown to its principal and to admins only."""
    bench.metadata("viewer")
    offer = await bench.offer()
    request, flushed = await bench.flushed(offer, reason="because of conformance")
    key = request.options.idempotency_key
    own = await bench.get(flushed.operation_id)
    require(
        own.idempotency_key == key and own.reason == "because of conformance",
        saw="key or reason hidden from their own principal",
        wants="both",
    )
    get = pb.GetAdminOperationRequest(operation_id=flushed.operation_id)
    seen = [(await bench.call("GetOperation", get, role="viewer")).message]
    listed = (await bench.call("ListOperations", pb.ListAdminOperationsRequest(), role="viewer")).message
    seen += [op for op in listed.operations if op.operation_id == flushed.operation_id]
    watch = pb.WatchAdminOperationRequest(operation_id=flushed.operation_id)
    events = (await bench.call("WatchOperation", watch, role="viewer")).messages
    seen += [event.accepted.operation for event in events if event.HasField("accepted")]
    for operation in seen:
        require(
            not operation.idempotency_key and not operation.reason,
            saw="a viewer shown the key or the reason of another's operation",
            wants="both hidden",
        )


@check("AD-17-authentication-first", clauses=["AD-03"])
async def authentication_comes_first(bench: Bench) -> None:
    """A malformed request of somebody unknown is UNAUTHENTICATED, not judged by its shape."""
    _need_tokens(bench)
    for rpc in MUTATIONS:
        answer = await bench.call(rpc, b"", role="nobody")
        answer.refused(UNAUTHENTICATED, where="an empty request without a credential")


@check("AD-17-permission-before-shape", clauses=["AD-04"])
async def permission_comes_second(bench: Bench) -> None:
    """A malformed request of a viewer is PERMISSION_DENIED, not judged by its shape."""
    bench.metadata("viewer")
    offer = await bench.offer()
    for rpc in offer.mutations:
        answer = await bench.call(rpc, b"", role="viewer")
        answer.refused(DENIED, where="an empty request of a viewer")
