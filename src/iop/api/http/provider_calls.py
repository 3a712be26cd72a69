"""A provider's request made of the caller's own, where it speaks the caller's dialect or takes runs (EN-50, EN-54)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from iop.api.http.errors import Dialect
from iop.api.http.exchange import Exchange
from iop.api.http.headers import request_headers, trace_of
from iop.api.http.operations import Operation
from iop.api.http.rewrite import rewritten_parts
from iop.api.http.splice import RequestFields
from iop.api.http.visit import Visit
from iop.edge.calls import RunCall, ServedTarget, TunnelCall
from iop.wire import run_metadata

__all__ = ["SCORED_METADATA", "choices_of", "run_call", "tunnel_call", "wants_usage"]

SCORED_METADATA: Final = {run_metadata.SCORED_DELTAS: "1"}
"""Of a run whose caller may want scores: we read them."""


def tunnel_call(exchange: Exchange, operation: Operation, visit: Visit, target: ServedTarget) -> TunnelCall:
    """The caller's request with the provider's name for the model, by a named operation where the profile has it."""
    head = exchange.head
    fields = visit.fields
    path = operation.path
    is_named = operation.name in target.operations
    if head.query:
        # A profile's operation has a path of its own; only a plain path can carry the caller's query.
        path = f"{path}?{head.query.decode('ascii')}"
        is_named = False
    return TunnelCall(
        operation=operation.name if is_named else "",
        method="POST",
        path=path,
        headers=request_headers(head, request_id=visit.request_id, is_stream=fields.is_stream),
        body=_body_parts(operation, fields, target),
        stream=fields.is_stream,
        sink=visit.relay,
        session_id=visit.session,
    )


def _body_parts(operation: Operation, fields: RequestFields, target: ServedTarget) -> Sequence[bytes]:
    if not target.rewrites or operation.dialect not in (Dialect.CHAT, Dialect.COMPLETIONS):
        return fields.with_model(target.target)
    is_chat = operation.dialect is Dialect.CHAT
    return rewritten_parts(fields, target.target, target.rewrites, is_chat=is_chat)


def run_call(exchange: Exchange, operation: Operation, visit: Visit, target: ServedTarget) -> RunCall:
    """The same body as a normalised run (EN-40)."""
    fields = visit.fields
    trace = trace_of(exchange.head)
    return RunCall(
        input=b"".join(_body_parts(operation, fields, target)),
        sink=visit.relay,
        stream=fields.is_stream,
        metadata=SCORED_METADATA if "logprobs" in fields.raw else {},
        session_id=visit.session,
        traceparent="" if trace is None else trace.traceparent,
        tracestate="" if trace is None else trace.state,
    )


def wants_usage(options: msgspec.Raw) -> bool:
    """Whether ``stream_options`` ask for a usage event."""
    try:
        return msgspec.json.decode(options, type=_StreamOptions).include_usage
    except msgspec.MsgspecError:
        return False


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


def choices_of(operation: Operation, fields: RequestFields) -> int:
    """How many alternatives a stream of this request must finish (SF-14)."""
    if operation.dialect not in (Dialect.CHAT, Dialect.COMPLETIONS):
        return 1
    alternatives = max(1, fields.integer("n", 1))
    return alternatives * fields.prompts if operation.dialect is Dialect.COMPLETIONS else alternatives
