"""One converted request at a surface: the call to the provider, and the relay that brings its answer back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from iop.api.http.convert.plan import Plan
from iop.api.http.convert.shell import ConvertingExchange, provider_head
from iop.api.http.convert.writers import AnswerTerms
from iop.api.http.errors import Dialect
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList
from iop.api.http.headers import request_headers, trace_of
from iop.api.http.operations import PATHS
from iop.api.http.provider_calls import SCORED_METADATA
from iop.api.http.relay import Relay
from iop.api.http.runs import RunRelay
from iop.core.errors import InvalidRequest, IopError
from iop.edge.calls import RunCall, TunnelCall
from iop.edge.dispatch import DispatchHandle
from iop.wire.messages import CancelReason

__all__ = ["Conversion"]


class Conversion:
    """Everything of one attempt. Each attempt has its own; the caller's exchange is the same.

    Args:
        exchange: the caller's.
        plan: the request in the provider's dialect.
        terms: frame of the answer.
        caller_dialect: in whose words the answer is told.
        bytes_max: most of an answer, or of one of its events, that is held.
        begin: called at the first byte with the status; returns headers of ours.
        fail: answers an error before the first byte.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: Plan,
        *,
        terms: AnswerTerms,
        caller_dialect: Dialect,
        bytes_max: int,
        begin: Callable[[Exchange, DispatchHandle, int], HeaderList],
        fail: Callable[[Exchange, IopError], None],
    ) -> None:
        self._exchange = exchange
        self._plan = plan
        self._terms = replace(terms, echo=plan.echo, has_usage=plan.has_usage)
        self._begin = begin
        self._fail = fail
        self._bytes_max = bytes_max
        self._caller_dialect = caller_dialect
        self._handle: DispatchHandle | None = None

    def tunnel_relay(self) -> Relay:
        """The sink of a tunnel in the provider's dialect."""
        return Relay(
            self._shell(),
            dialect=self._plan.dialect,
            choices=1,
            event_bytes_max=self._bytes_max,
            begin=self._begin_answer,
            fail=self._fail_answer,
        )

    def tunnel_call(self, sink: Relay, *, session_id: str, request_id: str) -> TunnelCall:
        """The provider's request, whose answer goes to ``sink``."""
        plan = self._plan
        head = provider_head(self._exchange.head, plan.dialect)
        headers = request_headers(head, request_id=request_id, is_stream=plan.is_stream)
        return TunnelCall(
            operation=plan.operation,
            method="POST",
            path=PATHS[plan.operation],
            headers=headers,
            body=plan.parts,
            stream=plan.is_stream,
            sink=sink,
            session_id=session_id,
        )

    def run_relay(self) -> RunRelay:
        """The sink of a normalised run, which is asked as a chat."""
        plan, terms = self._plan, self._terms
        return RunRelay(
            self._shell(),
            dialect=Dialect.CHAT,
            request_id=terms.request_id,
            model=terms.shown_model or terms.fallback_model,
            created=terms.created,
            is_stream=plan.is_stream,
            has_usage=plan.is_stream,
            has_tools=plan.has_tools,
            has_both_names=False,  # what is converted is read by one
            has_one_call=plan.has_one_call,
            bytes_max=self._bytes_max,
            begin=self._begin_answer,
            fail=self._fail_answer,
        )

    def run_call(self, sink: RunRelay, *, session_id: str) -> RunCall:
        """The run, whose events go to ``sink``."""
        trace = trace_of(self._exchange.head)
        return RunCall(
            input=self._plan.body,
            sink=sink,
            stream=self._plan.is_stream,
            metadata=SCORED_METADATA if self._plan.has_scores else {},
            session_id=session_id,
            traceparent="" if trace is None else trace.traceparent,
            tracestate="" if trace is None else trace.state,
        )

    # ---- callbacks ----

    def _shell(self) -> Exchange:
        """What the sink takes for its exchange. It knows this, so it is not kept."""
        plan = self._plan
        shell = ConvertingExchange(
            self._exchange,
            converter=plan.converter(self._terms),
            source=self._caller_dialect,
            target=plan.dialect,
            is_stream=plan.is_stream,
            request_id=self._terms.request_id,
            bytes_max=self._bytes_max,
            fail=self._fail,
            give_up=self._give_up,
        )
        return cast(Exchange, shell)

    def _begin_answer(self, _shell: Any, handle: DispatchHandle, status: int) -> HeaderList:
        self._handle = handle
        headers = self._begin(self._exchange, handle, status)
        headers.append((b"x-iop-converted", self._plan.operation.encode("ascii")))
        if self._plan.dropped:
            headers.append((b"x-iop-dropped", ", ".join(self._plan.dropped).encode("ascii", "replace")))
        return headers

    def _fail_answer(self, _shell: Any, error: IopError) -> None:
        field = error.details.get("field", "")
        if isinstance(error, InvalidRequest) and (name := self._plan.names.get(field)) is not None:
            # The caller knows a field of the request that was made of its own by another name.
            message = error.message.replace(field, name, 1)
            error = InvalidRequest(message, reason=error.reason, details={"field": name})
        self._fail(self._exchange, error)

    def _give_up(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.note_truncated()
            handle.cancel(CancelReason.CLIENT_GONE)
