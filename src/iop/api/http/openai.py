"""The Edge's public HTTP surface: OpenAI and Anthropic routes over the pools (SF-01 to SF-16).

A request is admitted by its head (path, key, limits), read whole, and described once for dispatch. The
concrete call is built when a provider was chosen: its target's name goes where the caller's model name
stood, nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

import orjson
from msgspec.structs import replace

from iop import __version__
from iop.api.http.bulk import BULK_BYTES
from iop.api.http.bulk_lane import BulkLane
from iop.api.http.caller_hints import priority_of, session_of
from iop.api.http.convert.counting import TokenizeRelay, tokenize_call, tokenize_request
from iop.api.http.convert.hook import Conversion
from iop.api.http.convert.plan import conversion_for, plan_request
from iop.api.http.convert.writers import AnswerTerms
from iop.api.http.errors import Dialect, error_body, error_code, error_headers, error_status
from iop.api.http.estimate import estimate_tokens, prompt_bytes
from iop.api.http.exchange import Exchange
from iop.api.http.head import HeaderList, RequestHead, check_body_coding
from iop.api.http.headers import request_id_of, trace_of
from iop.api.http.keys import ApiKeys, Caller
from iop.api.http.limits import ByteBudget, HttpLimits
from iop.api.http.matrix import FindReport, SurfaceMatrix, nobody_told
from iop.api.http.metrics import SurfaceFigures
from iop.api.http.models import list_models, model_entry
from iop.api.http.openapi import DESCRIPTION_PATH, describe
from iop.api.http.operations import GENERATING, Operation
from iop.api.http.provider_calls import choices_of, run_call, tunnel_call, wants_usage
from iop.api.http.pulse import comment_while_waiting
from iop.api.http.relay import NOT_COUNTABLE, CountRelay, Relay
from iop.api.http.rewrite import REASONING_NAMES, answer_rewrite
from iop.api.http.routing import Routes
from iop.api.http.runs import RunRelay
from iop.api.http.splice import RequestFields, is_false, read_fields
from iop.api.http.visit import Visit
from iop.api.strangers import Strangers
from iop.core.clock import Clock
from iop.core.errors import InvalidRequest, IopError, NotFound, Unauthenticated, Unsupported
from iop.core.ids import RequestId
from iop.edge.calls import (
    OPERATIONS,
    RUN_OPERATIONS,
    TOKENIZE,
    CannotBeSaidError,
    DispatchRequest,
    PrepareCall,
    Route,
    RunCall,
    ServedTarget,
    TunnelCall,
    ways_to,
)
from iop.edge.chain import VIA_FIELD, read_via
from iop.edge.dispatch import DispatchHandle
from iop.edge.snapshot import EdgeSnapshot
from iop.wire.messages import CancelReason

__all__ = ["DispatchPort", "EdgeHttp"]

_VIA_FIELD: Final = VIA_FIELD.encode("ascii")

_TOLD_LATE: Final = frozenset({b"x-iop-provider", b"x-iop-converted", b"x-iop-dropped"})
"""What a stream that was begun while it waited tells in its trailers."""


class DispatchPort(Protocol):
    """What this surface asks of dispatch; ``iop.edge.dispatch.Dispatcher`` implements it."""

    @property
    def is_tracing(self) -> bool:
        """Whether spans are recorded: then requests say their caller's trace context."""
        ...

    async def dispatch(
        self,
        request: DispatchRequest,
        prepare: PrepareCall,
        *,
        on_wait: Callable[[DispatchHandle], None] | None = None,
    ) -> DispatchHandle:
        """Wait for a lease and open the stream under it; ``on_wait`` is called when it begins to wait."""
        ...

    def record_rejection(self, request_id: RequestId, model: str, reason: str, *, caller: str = "") -> None:
        """Record a request that never came to dispatch."""
        ...

    def record_departure(self, request_id: RequestId, model: str, *, caller: str = "") -> None:
        """Record a request whose caller left before it came to dispatch."""
        ...


class EdgeHttp:
    """Handler of the public listener.

    Args:
        dispatch: who finds providers and opens streams.
        find_snapshot: the running configuration.
        find_keys: the running configuration's API keys.
        limits: what callers may cost.
        clock: for times that are shown.
        make_id: makes request ids.
        find_report: what a Node last told of one of its engines.
        strangers: how often an address may come without a key; None: as often as it likes.

    Attributes:
        figures: what it counts.
    """

    def __init__(
        self,
        dispatch: DispatchPort,
        *,
        find_snapshot: Callable[[], EdgeSnapshot],
        find_keys: Callable[[], ApiKeys],
        limits: HttpLimits,
        clock: Clock,
        make_id: Callable[[], str],
        find_report: FindReport = nobody_told,
        strangers: Strangers | None = None,
    ) -> None:
        self._dispatch = dispatch
        self._find_snapshot = find_snapshot
        self._find_keys = find_keys
        self._limits = limits
        self._clock = clock
        self._make_id = make_id
        self._strangers = strangers
        self._matrix = SurfaceMatrix(find_report, limits=limits)
        self._budget = ByteBudget(limits.buffered_bytes)
        self._lane = BulkLane()
        self.figures = SurfaceFigures()
        self._routes: Routes[Operation | Callable[[Exchange, Visit], None]] = Routes(
            {
                (b"GET", b"/v1/models"): self._list_models,
                (b"GET", DESCRIPTION_PATH.encode()): self._describe,
                **{(b"POST", operation.path.encode("ascii")): operation for operation in GENERATING},
            },
            prefix=(b"/v1/models/", self._one_model),
        )

    @property
    def buffered_bytes(self) -> int:
        """Request bytes held now (SF-12)."""
        return self._budget.held_bytes

    # ---- HttpHandler ----

    def on_head(self, exchange: Exchange) -> None:
        """Admit or refuse by the head alone, before any body is read."""
        head = exchange.head
        visit = Visit(request_id_of(head) or self._make_id())
        exchange.data = (None, visit)
        try:
            route, visit.rest = self._routes.find(head.method, head.path)
            if isinstance(route, Operation):
                visit.operation = route
            exchange.data = (route, visit)
            keys = self._find_keys()
            caller = self._identify(exchange, keys)
            check_body_coding(head)
            caller.enter(keys.now())
        except IopError as error:
            self.on_error(exchange, error)
            return
        visit.caller = caller
        exchange.when_done(caller.leave)
        exchange.accept_body(limit_bytes=self._limits.body_bytes, budgets=(self._budget, caller.budget))

    def _identify(self, exchange: Exchange, keys: ApiKeys) -> Caller:
        """Who asks. Attempts that fail are counted by their address; those beyond its rate cost the connection, too."""
        try:
            return keys.identify(exchange.head)
        except Unauthenticated as error:
            if self._strangers is None:
                raise
            answer = self._strangers.judge(exchange.peer_address, error)
            if answer is error:
                raise
            exchange.close_after()
            raise answer from None

    def on_request(self, exchange: Exchange, body: Sequence[bytes]) -> None:
        """Describe the request and dispatch it."""
        route, visit = exchange.data
        if not isinstance(route, Operation):
            route(exchange, visit)
            return
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        if size > BULK_BYTES:
            exchange.run(self._serve_bulk(exchange, visit, route, body), name="http-bulk", is_eager=True)
            return
        fields = read_fields(body[0] if len(body) == 1 else b"".join(body), depth_max=self._limits.json_depth)
        request = self._request_of(exchange, visit, route, fields)
        exchange.run(
            self._serve(exchange, visit, route, fields, request), name="http-dispatch", is_eager=True
        )

    def _request_of(
        self, exchange: Exchange, visit: Visit, operation: Operation, fields: RequestFields
    ) -> DispatchRequest:
        """What dispatch is asked, and whether the caller may."""
        caller = visit.caller
        assert caller is not None, "a request is admitted before it is read"
        visit.model = fields.model
        snapshot = self._find_snapshot()
        model = snapshot.find_model(fields.model)
        if model is None:
            raise NotFound(
                f"The model `{fields.model[:200]}` is not served here; `GET /v1/models` lists what is.",
                reason="model_not_found",
                details={"field": "model"},
            )
        caller.check_model(fields.model, model.id, *model.aliases)
        visit.session = session_of(exchange, caller)
        request = DispatchRequest(
            request_id=RequestId(visit.request_id),
            model=fields.model,
            operation=operation.name,
            estimated_prompt_tokens=estimate_tokens(
                fields, threshold=model.long_context_tokens, bytes_per_token=snapshot.chars_per_token
            ),
            priority=priority_of(exchange, caller),
            session=visit.session,
            caller=caller.name,
        )
        if via := exchange.head.get_all(_VIA_FIELD):
            request = replace(request, via=read_via(via))
        if self._dispatch.is_tracing and (trace := trace_of(exchange.head)) is not None:
            request = replace(request, traceparent=trace.traceparent, tracestate=trace.state)
        return request

    def on_error(self, exchange: Exchange, error: IopError) -> None:
        """Answer in the caller's dialect, and say that it was us (SF-06, SF-09)."""
        data = exchange.data
        visit = data[1] if data is not None else Visit(self._make_id())
        reason = error_code(error)
        self.figures.refusals[reason] += 1
        if visit.operation is not None and visit.caller is not None and not visit.is_dispatched:
            self._dispatch.record_rejection(
                RequestId(visit.request_id), visit.model, reason, caller=visit.caller.name
            )
        visit.forget()
        status = error_status(error)
        self._count(exchange, visit, status)
        headers = [*error_headers(error), *self._origin(visit.request_id, reason)]
        dialect = visit.dialect if visit.operation is not None else _dialect_of(exchange.head)
        exchange.respond(status, headers, error_body(error, dialect, visit.request_id))

    def on_left(self, exchange: Exchange) -> None:
        """One who leaves before dispatch, in the midst of an upload say, has an outcome too (EN-112)."""
        if exchange.data is None:
            return
        visit = exchange.data[1]
        if visit.operation is not None and visit.caller is not None and not visit.is_dispatched:
            self._dispatch.record_departure(
                RequestId(visit.request_id), visit.model, caller=visit.caller.name
            )

    # ---- generating routes ----

    async def _serve_bulk(
        self, exchange: Exchange, visit: Visit, operation: Operation, body: Sequence[bytes]
    ) -> None:
        """Read a large body beside everything else, then go on as with any."""
        fields = await self._lane.read(body, depth_max=self._limits.json_depth)
        exchange.hold_made(len(fields.body))
        await self._serve(
            exchange, visit, operation, fields, self._request_of(exchange, visit, operation, fields)
        )

    async def _serve(
        self,
        exchange: Exchange,
        visit: Visit,
        operation: Operation,
        fields: RequestFields,
        request: DispatchRequest,
    ) -> None:
        visit.fields = fields
        visit.is_dispatched = True  # from here on, dispatch records how it ends
        try:
            handle = await self._dispatch.dispatch(
                request, partial(self._prepare, exchange), on_wait=partial(self._tell_place, exchange)
            )
        except Unsupported as error:
            is_countable = error.reason == NOT_COUNTABLE or _offers_messages(error)
            if operation.name != "count_tokens" or not is_countable:
                raise
            self._answer_estimate(exchange, visit, fields)
            return
        if exchange.is_gone:
            handle.cancel(CancelReason.CLIENT_GONE)
            return
        visit.handle = handle
        visit.relay.bind(handle)

    def _tell_place(self, exchange: Exchange, handle: DispatchHandle) -> None:
        """A stream begins to wait: tell its caller its place from time to time, where the model's queue is set so."""
        operation, visit = exchange.data
        if operation.dialect is Dialect.PLAIN or not visit.fields.is_stream:
            return
        model = self._find_snapshot().find_model(visit.model)
        if model is not None and model.queue.comment_s:
            headers = [(b"x-request-id", visit.request_id.encode("ascii"))]
            comment_while_waiting(
                exchange, handle, every_s=model.queue.comment_s, headers=headers, dialect=operation.dialect
            )

    def _prepare(self, exchange: Exchange, target: ServedTarget) -> TunnelCall | RunCall:
        """Build the provider's request once it is known who serves it (EN-54), and the sink of its answer."""
        operation, visit = exchange.data
        call: TunnelCall | RunCall
        if target.route is Route.TUNNEL:
            # What the engine was found not to have is asked for in another dialect rather than in vain.
            offered = (target.operations or OPERATIONS) - self._matrix.absent(target.key)
        else:
            offered = RUN_OPERATIONS
        if (other := conversion_for(operation.name, offered)) == TOKENIZE:
            call = self._tokenize(exchange, visit, target)
        elif other is not None:
            call = self._convert(exchange, operation, visit, target, other)
        elif target.route is Route.TUNNEL:
            visit.relay = self._tunnel_relay(exchange, operation, visit, target)
            call = tunnel_call(exchange, operation, visit, target)
        elif operation.dialect in (Dialect.CHAT, Dialect.COMPLETIONS):
            visit.relay = self._run_relay(exchange, operation, visit, target)
            call = run_call(exchange, operation, visit, target)
        else:
            raise Unsupported(
                "The providers of this model serve chats and completions only.",
                reason="operation_not_supported",
            )
        if visit.handle is not None:  # repeated behind the scenes (EN-112)
            visit.relay.bind(visit.handle)
        return call

    def _convert(
        self,
        exchange: Exchange,
        operation: Operation,
        visit: Visit,
        target: ServedTarget,
        other: str,
    ) -> TunnelCall | RunCall:
        """Build the request in another dialect, and the sink that brings the answer back into the caller's."""
        fields: RequestFields = visit.fields
        model = self._find_snapshot().find_model(fields.model)
        shown = visit.model if target.response_model == "alias" else None
        try:
            plan = plan_request(
                operation.name,
                other,
                fields,
                model=target.target,
                allowed=frozenset() if model is None else model.conversion_drops,
                rewrites=target.rewrites,
            )
        except InvalidRequest as error:
            raise CannotBeSaidError(error) from None
        exchange.hold_made(plan.made_bytes)
        conversion = Conversion(
            exchange,
            plan,
            terms=AnswerTerms(
                request_id=visit.request_id,
                created=self._clock.unix_nanos() // 1_000_000_000,
                shown_model=shown,
                fallback_model=target.target,
                has_both_names=REASONING_NAMES in target.rewrites,
            ),
            caller_dialect=operation.dialect,
            bytes_max=self._limits.sse_event_bytes,
            begin=self._begin_answer,
            fail=self.on_error,
        )
        if target.route is Route.TUNNEL:
            visit.relay = tunnel = conversion.tunnel_relay()
            return conversion.tunnel_call(tunnel, session_id=visit.session, request_id=visit.request_id)
        visit.relay = run = conversion.run_relay()
        return conversion.run_call(run, session_id=visit.session)

    def _tokenize(self, exchange: Exchange, visit: Visit, target: ServedTarget) -> TunnelCall:
        """Ask the provider's tokenizer for a count that it has no route for (SF-14)."""
        fields: RequestFields = visit.fields
        try:
            parts, made_bytes = tokenize_request(fields, model=target.target)
        except InvalidRequest:
            message = "The provider's tokenizer cannot count this request."
            raise CannotBeSaidError(Unsupported(message, reason=NOT_COUNTABLE)) from None
        exchange.hold_made(made_bytes)
        visit.relay = relay = TokenizeRelay(
            exchange,
            estimate=lambda: self._answer_estimate(exchange, visit, fields),
            bytes_max=self._limits.sse_event_bytes,
            begin=self._begin_answer,
            fail=self.on_error,
        )
        return tokenize_call(exchange, relay, parts, session_id=visit.session, request_id=visit.request_id)

    def _tunnel_relay(
        self, exchange: Exchange, operation: Operation, visit: Visit, target: ServedTarget
    ) -> Relay:
        fields = visit.fields
        make: Callable[..., Relay] = Relay
        if operation.name == "count_tokens":
            make = partial(CountRelay, estimate=lambda: self._answer_estimate(exchange, visit, fields))
        return make(
            exchange,
            dialect=operation.dialect,
            choices=choices_of(operation, fields),
            event_bytes_max=self._limits.sse_event_bytes,
            rewrite=None
            if target.response_model == "provider" and not target.rewrites
            else answer_rewrite(
                visit.model if target.response_model == "alias" else None,
                target.rewrites,
                is_chat=operation.dialect is Dialect.CHAT,
            ),
            begin=self._begin_answer,
            fail=self.on_error,
        )

    def _run_relay(
        self, exchange: Exchange, operation: Operation, visit: Visit, target: ServedTarget
    ) -> RunRelay:
        fields = visit.fields
        options = fields.raw.get("stream_options")
        return RunRelay(
            exchange,
            dialect=operation.dialect,
            request_id=visit.request_id,
            model=visit.model if target.response_model == "alias" else target.target,
            created=self._clock.unix_nanos() // 1_000_000_000,
            is_stream=fields.is_stream,
            has_usage=fields.is_stream and options is not None and wants_usage(options),
            has_tools="tools" in fields.raw,
            has_both_names=REASONING_NAMES in target.rewrites,
            has_one_call=is_false(fields.raw.get("parallel_tool_calls")),
            bytes_max=self._limits.sse_event_bytes,
            begin=self._begin_answer,
            fail=self.on_error,
        )

    def _begin_answer(self, exchange: Exchange, handle: DispatchHandle, status: int) -> HeaderList:
        """At the provider's first byte: no other attempt can follow, so the body is let go; tell what we
        know.
        """
        visit: Visit = exchange.data[1]
        visit.forget()
        exchange.release_body()
        self._count(exchange, visit, status)
        # A KEEP pause may have held the whole answer while the weights changed: name those that it began under.
        version = handle.version_begun

        headers: HeaderList = [
            (b"x-request-id", visit.request_id.encode("ascii")),
            (b"x-iop-queue-ms", b"%d" % handle.queue_ms),
            (b"x-iop-weight-version", version.encode("utf-8", "replace")),
        ]
        if handle.queue_position:
            headers.append((b"x-iop-queue-position", b"%d" % handle.queue_position))
        if self._find_snapshot().shows_provider:
            headers.append((b"x-iop-provider", handle.provider_name.encode("ascii", "replace")))

        def trailers() -> HeaderList:
            last = handle.weight_version
            if (
                exchange.is_early
            ):  # no header told whose answer it is, nor what was converted or let go for it
                told = [field for field in headers if field[0] in _TOLD_LATE]
            elif last == version:
                return []
            else:
                told = []
            return [*told, (b"x-iop-weight-version-last", last.encode("utf-8", "replace"))]

        exchange.trailers = trailers
        return headers

    def _answer_estimate(self, exchange: Exchange, visit: Visit, fields: RequestFields) -> None:
        """Count tokens ourselves where no provider does, and say so (SF-14)."""
        visit.forget()
        count = int(prompt_bytes(fields) / self._find_snapshot().chars_per_token)
        self._answer(exchange, visit, {"input_tokens": max(1, count)}, (b"x-iop-estimate", b"1"))

    # ---- models ----

    def _list_models(self, exchange: Exchange, visit: Visit) -> None:
        entries = list_models(self._find_snapshot(), matrix=self._matrix, may_use=_may_use(visit))
        self._answer(exchange, visit, entries)

    def _one_model(self, exchange: Exchange, visit: Visit) -> None:
        entry = model_entry(self._find_snapshot(), visit.rest, matrix=self._matrix, may_use=_may_use(visit))
        self._answer(exchange, visit, entry)

    def _describe(self, exchange: Exchange, visit: Visit) -> None:
        assert visit.caller is not None, "a request is admitted before it is answered"
        self._answer(exchange, visit, describe(__version__, needs_key=visit.caller.spec is not None))

    def _answer(self, exchange: Exchange, visit: Visit, value: object, *more: tuple[bytes, bytes]) -> None:
        self._count(exchange, visit, 200)
        headers: HeaderList = [
            (b"content-type", b"application/json"),
            (b"x-request-id", visit.request_id.encode("ascii")),
            (b"x-iop-origin", b"edge"),
            *more,
        ]
        exchange.respond(200, headers, orjson.dumps(value))

    # ---- small things ----

    def _origin(self, request_id: str, reason: str) -> HeaderList:
        return [
            (b"x-request-id", request_id.encode("ascii")),
            (b"x-iop-origin", b"edge"),
            (b"x-iop-reason", reason.encode("ascii", "replace")),
        ]

    def _count(self, exchange: Exchange, visit: Visit, status: int) -> None:
        name = "other" if visit.operation is None else visit.operation.name
        self.figures.answered(name, status, after_s=self._clock.monotonic() - exchange.started_at)


def _dialect_of(head: RequestHead) -> Dialect:
    """In whose words an error is told where no generating route was asked for: a wrong path or method, the models."""
    is_anthropic = head.get(b"anthropic-version") is not None or head.path.startswith(b"/v1/messages")
    return Dialect.MESSAGES if is_anthropic else Dialect.CHAT


def _may_use(visit: Visit) -> Callable[..., bool]:
    assert visit.caller is not None, "a request is admitted before it is answered"
    return visit.caller.may_use


def _offers_messages(refusal: Unsupported) -> bool:
    """Whether a pool that counts no tokens takes messages, so that their tokens are worth an estimate (SF-14)."""
    offered = refusal.details.get("offered", "").split(", ")
    return refusal.reason == "operation_not_supported" and any(way in offered for way in ways_to("messages"))
