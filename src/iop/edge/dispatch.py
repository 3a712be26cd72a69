"""Dispatch: from a caller's request to a leased, open stream on a Node, and to its one outcome.

A request waits (phase WAITING), has a stream open (RUNNING), or has its outcome (SETTLED). Leases move on their own:
a request that is settled early keeps its lease until the Node has confirmed the end, so that an engine is never
overbooked by work that it has not yet dropped. All moves happen in the loop turn of their cause; nothing here waits but
:meth:`Dispatcher.dispatch` for a lease and :meth:`Dispatcher.wait_idle`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from typing import Final, assert_never

from msgspec.structs import replace

from iop.core.errors import (
    Draining,
    IopError,
    LocalProtocolError,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from iop.core.ids import Generation, NodeId, ProviderId, RequestId, RunId
from iop.edge.attempt import Attempt
from iop.edge.calls import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    SIDE_OPERATIONS,
    Call,
    CannotBeSaidError,
    DispatchRequest,
    Outcome,
    PrepareCall,
    ProviderKey,
    TunnelCall,
)
from iop.edge.chain import has_looped, hop_headers, hop_metadata
from iop.edge.handle import ConnectionGoneError, DispatchHandle
from iop.edge.outcomes import UNKNOWN_VERSION, OutcomeBook, RequestRecord
from iop.edge.pools import (
    Demand,
    Granted,
    Lease,
    LeaseKind,
    Overrides,
    Pools,
    ProviderGate,
    Refusal,
    RefusalReason,
    Settlement,
    Verdict,
    WaiterId,
    Waiting,
)
from iop.edge.refusals import error_of_refusal
from iop.edge.snapshot import EdgeSnapshot
from iop.edge.traces import RequestTrace
from iop.net.ports import EdgeConnection, OutboundStream
from iop.obs.tracing import Tracer
from iop.wire import run_metadata
from iop.wire.messages import CancelReason, RunRequest, TunnelRequest

__all__ = ["DispatchHandle", "Dispatcher"]

EXPLAINED_CANDIDATES_MAX: Final = 16
"""Larger pools are not listed by member in ``iop explain``: it would cost each request more than its dispatch."""


SHUTDOWN_CONFIRM_S: Final = 2.0
"""After the drain deadline, how long Nodes have to confirm cancels before their connections close."""


class Dispatcher:
    """Waits for a lease, opens the stream under it, and settles the request once, however it ends.

    Args:
        snapshot: the first configuration.
        pools: the pools to lease from; nobody else settles their waiters.
        outcomes: where outcomes are recorded.
        find_connection: the connection of a generation while it is the ready owner, else ``None``.
        new_run_id: makes a fresh id for each attempt (EN-118).
        weight_version: what a provider is known to serve now.
        tracer: records spans of each request; None: none are (SF-13).
        instance: this Edge's name among chained ones; empty: it cannot be found in a loop (SF-24).
    """

    def __init__(
        self,
        snapshot: EdgeSnapshot,
        *,
        pools: Pools,
        outcomes: OutcomeBook,
        find_connection: Callable[[NodeId, Generation], EdgeConnection | None],
        new_run_id: Callable[[], RunId],
        weight_version: Callable[[ProviderKey], str] = lambda _key: UNKNOWN_VERSION,
        tracer: Tracer | None = None,
        instance: str = "",
    ) -> None:
        self.pools = pools
        self.outcomes = outcomes
        self.is_closing = False
        self.refusals: Counter[str] = Counter()
        """Requests refused without a provider's answer, by reason."""
        self.repeats_total = 0
        self.overdue_cancels_total = 0
        """Leases that came back although their Node never confirmed the cancel."""
        self._snapshot = snapshot
        self._find_connection = find_connection
        self._new_run_id = new_run_id
        self._weight_version = weight_version
        self._tracer = tracer
        self._instance = instance
        self._loop = asyncio.get_running_loop()
        self._live: dict[int, tuple[DispatchHandle, Attempt]] = {}
        self._confirms: dict[int, asyncio.TimerHandle | None] = {}
        self._waiting: dict[WaiterId, DispatchHandle] = {}
        self._granted: dict[int, DispatchHandle] = {}
        """Requests whose caller has a lease and has not run since."""
        self._settlements: deque[Settlement] = deque()
        self._is_settling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._frozen: set[ProviderKey] = set()
        self._idle: list[tuple[frozenset[ProviderKey] | None, asyncio.Future[None]]] = []

    # ---- for surfaces ----

    @property
    def is_tracing(self) -> bool:
        """Whether spans are recorded: then requests should say their caller's trace context."""
        return self._tracer is not None

    async def dispatch(
        self,
        request: DispatchRequest,
        prepare: PrepareCall,
        *,
        on_wait: Callable[[DispatchHandle], None] | None = None,
    ) -> DispatchHandle:
        """Dispatch a request.

        Returns when the stream was opened on a Node; the answer comes to the sink of the prepared call in later turns
        of the loop, never before this returned. With a free slot nothing is awaited. An attempt that provably never
        reached its Node is repeated behind the scenes (EN-112): ``prepare`` is then called again and
        ``handle.target`` changes; the sink of the failed attempt gets nothing.

        ``on_wait`` is called once when the request begins to wait, if it does; ``handle.waiting_behind`` then tells its
        place. It must not raise.

        Sink errors: ``StreamError.code`` is the stable reason (``node_lost``, ``timeout``, ``aborted_by_admin``,
        ``edge_shutdown``, a queue reason when a repeat found no provider, or the Node's own: ``connect_failed``,
        ``upstream_truncated``, ``busy``, ...).

        Raises:
            NotFound: ``model_not_found``.
            Unsupported: ``operation_not_supported`` or ``long_context_not_supported``: no provider of the pool offers
                it; ``details["offered"]`` names the operations that are.
            Overloaded: ``queue_full`` at once, ``queue_timeout`` at the deadline; with ``retry_after_s`` (EN-110).
            Unavailable: ``no_capacity``: nobody lives in the pool, after the grace; with ``retry_after_s``.
            Draining: ``paused`` (AD-41) or ``edge_shutdown``; with ``retry_after_s``.
        Cancellation: safe; the waiter is removed at once and the request is recorded as ``client_cancelled``.
        """
        now = self._loop.time()
        record = self.outcomes.begin(request.request_id, request.model, caller=request.caller, now=now)
        if self.is_closing:
            raise self._reject(
                record, Draining("the gateway is shutting down", reason="edge_shutdown", retry_after_s=5.0)
            )
        model = self._snapshot.find_model(request.model)
        if model is None:
            message = f"the model {request.model[:200]!r} is not served here"
            raise self._reject(record, NotFound(message, reason="model_not_found"))
        threshold = model.long_context_tokens
        demand = Demand(
            model=model.id,
            operation=request.operation,
            request_id=request.request_id,
            run_id=self._new_run_id(),
            is_long=threshold is not None
            and request.estimated_prompt_tokens > threshold
            and request.operation not in SIDE_OPERATIONS,
            priority=max(PRIORITY_MIN, min(PRIORITY_MAX, request.priority)),
            session=request.session,
            preferred_provider=request.preferred_provider,
            target_rank=request.target_rank,
            number=self.pools.new_number(),
        )
        if request.via and has_looped(request.via, self._instance):
            raise self._reject(
                record,
                PreconditionFailed(
                    "the request came back to a gateway that it had passed, or passed too many",
                    reason="loop_detected",
                ),
            )
        if len(model.members) <= EXPLAINED_CANDIDATES_MAX:
            record.candidates = tuple(self.pools.explain(demand, now=now))
        handle = DispatchHandle(self, request, prepare, record, demand, self._snapshot.limits, now)
        if self._tracer is not None:
            handle.trace = RequestTrace(self._tracer, request)
        self._catch_up(now)
        answer = self.pools.acquire(demand, now=now)
        while True:
            if isinstance(answer, Waiting):
                self._promise(handle, answer)
                if on_wait is not None:
                    on_wait(handle)
                    on_wait = None
                answer = await self._promised(handle)
            if isinstance(answer, Refusal):
                raise handle.rejected(self._reject(record, _why(handle, answer)))
            if isinstance(answer, Lease):
                try:
                    if self._open(handle, answer):
                        return handle
                except CannotBeSaidError as refusal:
                    answer = self._ask_otherwise(handle, answer, refusal.error)
                    continue
                # The connection had just begun to close.
                if not handle.may_try_again:
                    lost = Unavailable("the provider's Node was lost", reason="node_lost", retry_after_s=1.0)
                    raise handle.rejected(self._reject(record, lost))
                answer = self._acquire_again(handle)

    def record_rejection(self, request_id: RequestId, model: str, reason: str, *, caller: str = "") -> None:
        """Record a request that a surface refused before dispatch, for ``iop explain`` (EN-112)."""
        now = self._loop.time()
        record = self.outcomes.begin(request_id, model, caller=caller, now=now)
        self.refusals[reason] += 1
        self.outcomes.settle(record, Outcome.REJECTED, reason=reason, now=now)

    def record_departure(self, request_id: RequestId, model: str, *, caller: str = "") -> None:
        """Record a request whose caller left before dispatch, in the midst of its upload say (EN-112)."""
        now = self._loop.time()
        record = self.outcomes.begin(request_id, model, caller=caller, now=now)
        self.outcomes.settle(record, Outcome.CLIENT_CANCELLED, now=now)

    # ---- for the shell around registry and gates ----

    def apply(self, settlements: Iterable[Settlement]) -> None:
        """Carry out what the pools decided. Reentrant: nested decisions queue up behind."""
        self._settlements.extend(settlements)
        if self._is_settling:
            return
        self._is_settling = True
        try:
            while self._settlements:
                self._deliver(self._settlements.popleft())
        except BaseException:
            # One request's code raised: the others get theirs all the same.
            self._loop.call_soon(self.apply, ())
            raise
        finally:
            self._is_settling = False
        self.rearm()
        if self._idle:
            self._tell_idle()

    def lose(self, leases: Collection[Lease], settlements: Iterable[Settlement]) -> None:
        """A generation was fenced: each of its pending dispatches gets its outcome at once (EN-31, EN-112)."""
        self._recall()
        for lease in leases:
            entry = self._live.pop(lease.id, None)
            self._forget_confirm(lease.id)
            if entry is not None:
                handle, attempt = entry
                handle.lose(attempt)
                attempt.let_go()
        self.apply(settlements)
        self._tell_idle()

    def set_gates(self, gates: Iterable[tuple[ProviderKey, ProviderGate]]) -> None:
        """Close and open providers; when this returns, nothing new starts behind a closed gate (AD-39)."""
        given = list(gates)
        now = self._loop.time()
        closed = self.pools.set_gates([pair for pair in given if not pair[1].is_open], now=now)
        self._recall()
        self.apply(closed)
        self.apply(self.pools.set_gates([pair for pair in given if pair[1].is_open], now=now))

    def override(self, key: ProviderKey, overrides: Overrides) -> None:
        """Put reconfigured values over the file's, and let whoever fits now go (AD-47)."""
        self.apply(self.pools.override(key, overrides, now=self._loop.time()))

    def apply_snapshot(self, snapshot: EdgeSnapshot) -> None:
        """Take a new configuration; running requests keep the limits they were admitted under (EN-114)."""
        self._snapshot = snapshot
        settled = self.pools.apply_snapshot(snapshot, now=self._loop.time())
        self._recall()
        self.apply(settled)

    def set_absent(self, node: NodeId, generation: Generation, absent: Collection[ProviderId]) -> None:
        """After a refresh: which adapters of this generation do not run; nothing new starts there (EN-80)."""
        settled = self.pools.set_absent(node, generation, absent, now=self._loop.time())
        self._recall()
        self.apply(settled)

    def set_leaving(self, node: NodeId, generation: Generation) -> None:
        """A Node stops: nothing new starts there, and who waits for it alone has the grace left (EN-109, EN-110)."""
        settled = self.pools.set_leaving(node, generation, now=self._loop.time())
        self._recall()
        self.apply(settled)

    def abort(self, keys: Collection[ProviderKey]) -> int:
        """End all work on these providers with ``aborted_by_admin``; how many had no outcome yet (AD-41)."""
        ended = 0
        for handle, attempt in list(self._live.values()):
            if attempt.lease.key in keys and handle.runs(attempt):
                ended += handle.call_off(CancelReason.ABORTED_BY_ADMIN, tells_sink=True)
        return ended

    def freeze(self, keys: Collection[ProviderKey]) -> int:
        """KEEP: stop the clocks of all work on these providers; how many (AD-41, SF-12). Idempotent."""
        self._frozen |= set(keys)
        kept = 0
        for handle, attempt in list(self._live.values()):
            if attempt.lease.key in keys:
                kept += 1
                handle.freeze()
                self._stop_confirm(attempt)
        return kept

    def thaw(self, keys: Collection[ProviderKey]) -> int:
        """The clocks of all work on these providers run again; how many."""
        self._frozen -= set(keys)
        resumed = 0
        for handle, attempt in list(self._live.values()):
            if attempt.lease.key in keys:
                resumed += 1
                handle.thaw()
                if attempt.lease.id in self._confirms:
                    self._start_confirm(attempt)
        return resumed

    def running_on(self, keys: Collection[ProviderKey]) -> int:
        """Requests without an outcome that have a stream open on these providers."""
        return sum(
            handle.runs(attempt) for handle, attempt in self._live.values() if attempt.lease.key in keys
        )

    def requests_on(self, keys: Collection[ProviderKey]) -> list[RequestId]:
        """Which those are, the oldest first."""
        return [
            handle.record.request_id
            for handle, attempt in self._live.values()
            if attempt.lease.key in keys and handle.runs(attempt)
        ]

    async def wait_idle(self, keys: Collection[ProviderKey] | None = None) -> None:
        """Wait until no lease is out on these providers (all, for ``None``). The caller bounds the wait."""
        wanted = None if keys is None else frozenset(keys)
        while self._is_busy(wanted):
            future = self._loop.create_future()
            entry = (wanted, future)
            self._idle.append(entry)
            try:
                await future
            finally:
                if entry in self._idle:
                    self._idle.remove(entry)

    async def shut_down(self, *, deadline_s: float) -> None:
        """Stop admission, let runs finish, then cancel the rest and wait for them a little (EN-109)."""
        self.is_closing = True
        self.apply(self.pools.deny_all(RefusalReason.SHUTDOWN))
        try:
            async with asyncio.timeout(deadline_s):
                await self.wait_idle()
        except TimeoutError:
            for handle, attempt in list(self._live.values()):
                if handle.runs(attempt):
                    handle.call_off(CancelReason.EDGE_SHUTDOWN, tells_sink=True)
            try:
                async with asyncio.timeout(SHUTDOWN_CONFIRM_S):
                    await self.wait_idle()
            except TimeoutError:
                pass
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rearm(self) -> None:
        """Set the one timer to the pools' next deadline."""
        at = self.pools.next_deadline()
        if at is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if self._timer is not None:
            if at == self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._deadline_passed)

    # ---- for handles ----

    def now(self) -> float:
        """The loop's monotonic seconds."""
        return self._loop.time()

    def call_at(self, at: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Arm a timer of a request."""
        return self._loop.call_at(at, callback)

    def is_frozen(self, key: ProviderKey) -> bool:
        """Whether a KEEP pause freezes the work of a provider."""
        return key in self._frozen

    def weight_version(self, key: ProviderKey) -> str:
        """What a provider is known to serve now."""
        return self._weight_version(key)

    def send(self, handle: DispatchHandle, attempt: Attempt, call: Call) -> None:
        """Open the attempt's stream on its generation's connection. Raises ConnectionGoneError."""
        lease, target = attempt.lease, attempt.target
        connection = self._find_connection(lease.key.node, lease.generation)
        if connection is None:
            raise ConnectionGoneError
        timeout_sec = int(handle.limits.total_timeout_s)
        stream: OutboundStream
        self._live[lease.id] = (handle, attempt)
        try:
            if isinstance(call, TunnelCall):
                stream = connection.open_tunnel(
                    TunnelRequest(
                        run_id=lease.run_id,
                        adapter=lease.key.provider,
                        target=target.target,
                        operation=call.operation,
                        method=call.method,
                        path=call.path,
                        headers=hop_headers(call.headers, handle.request.via, self._instance),
                        stream=call.stream,
                        timeout_sec=timeout_sec,
                        metadata=call.metadata,
                        session_id=call.session_id,
                        long_context=lease.kind is LeaseKind.LONG,
                    ),
                    call.body,
                    attempt,
                )
            else:
                stream = connection.open_run(
                    RunRequest(
                        run_id=lease.run_id,
                        adapter=lease.key.provider,
                        target=target.target,
                        workspace=target.workspace,
                        input=call.input,
                        metadata=(
                            hop_metadata(call.metadata, handle.request, self._instance)
                            if target.adapter_type == "openengine"
                            else {run_metadata.REQUEST_ID: str(handle.request.request_id), **call.metadata}
                        ),
                        session_id=call.session_id,
                        timeout_sec=timeout_sec,
                        stream=call.stream,
                        long_context=lease.kind is LeaseKind.LONG,
                        traceparent=call.traceparent,
                        tracestate=call.tracestate,
                    ),
                    attempt,
                )
        except LocalProtocolError as error:
            self._live.pop(lease.id, None)
            raise ConnectionGoneError from error
        attempt.stream = stream

    def give_back(self, attempt: Attempt, verdict: Verdict) -> None:
        """The Node is done with an attempt: its lease returns, once."""
        self._live.pop(attempt.lease.id, None)
        self._forget_confirm(attempt.lease.id)
        attempt.let_go()
        settled = self.pools.release(attempt.lease, verdict, now=self._loop.time())
        if settled:
            self.apply(settled)
        elif self.pools.waiting and verdict is Verdict.FAILURE:
            self.rearm()  # the breaker may have opened
        if self._idle:
            self._tell_idle()

    def hold_back(self, key: ProviderKey) -> None:
        """The Node's own gate was full."""
        self.pools.hold_back(key, self._loop.time() + self._snapshot.limits.busy_backoff_s)
        self.rearm()

    def confirm_later(self, attempt: Attempt) -> None:
        """A cancel was sent: bound the wait for its confirmation, unless a KEEP pause makes it wait (SF-07)."""
        if attempt.lease.id not in self._live:
            return
        self._confirms[attempt.lease.id] = None
        if attempt.lease.key not in self._frozen:
            self._start_confirm(attempt)

    def stop_waiting(self, waiter: WaiterId) -> None:
        """A waiter's request ended."""
        self._waiting.pop(waiter, None)
        self.pools.cancel_wait(waiter)

    def seek_again(self, handle: DispatchHandle, tried: frozenset[ProviderKey]) -> None:
        """Find another lease for a repeated request, without its caller noticing; with a new run id (EN-118)."""
        self.repeats_total += 1
        self._continue(handle, self._acquire_again(handle, tried))

    def seek_otherwise(self, handle: DispatchHandle, attempt: Attempt, error: IopError) -> bool:
        """Bar the way of an attempt that could not be told the request; whether somebody else is there (SF-10)."""
        now = self._loop.time()
        return self._bar(
            handle,
            attempt.lease,
            error,
            lambda wanted: self.pools.may_be_told(wanted, attempt.lease, now=now),
            was_put=True,
        )

    # ---- inner ----

    def _catch_up(self, now: float) -> None:
        """Before a lease is asked for: let those go first who waited for nothing but a moment that is over.

        After a stall of the loop, what was read is handled before timers are. Without this a newcomer would take the
        slot of an older waiter, or be refused for a queue that only looks full (EN-110).
        """
        if self._timer is not None and self._timer_at <= now:
            self.apply(self.pools.catch_up(now))

    def _acquire_again(
        self, handle: DispatchHandle, tried: frozenset[ProviderKey] | None = None
    ) -> Lease | Waiting | Refusal:
        """Ask for another lease for a request, under a new run id (EN-118); nobody new waits once the Edge closes."""
        if self.is_closing:
            return Refusal(reason=RefusalReason.SHUTDOWN, retry_after_s=1.0)
        now = self._loop.time()
        self._catch_up(now)
        handle.demand = replace(
            handle.demand,
            run_id=self._new_run_id(),
            tried=handle.demand.tried if tried is None else tried,
        )
        return self.pools.acquire_again(handle.demand, now=now)

    def _ask_otherwise(
        self, handle: DispatchHandle, lease: Lease, error: IopError
    ) -> Lease | Waiting | Refusal:
        """Go on with those who are asked in another way, where the one that was chosen cannot be told (SF-10).

        Raises:
            IopError: ``error``, if none of them is there.
        """
        if not self._bar(handle, lease, error, self.pools.has_live, was_put=False):
            handle.settle_unserved(Outcome.REJECTED, error.reason)
            raise error
        return self.pools.acquire_again(handle.demand, now=self._loop.time())

    def _bar(
        self,
        handle: DispatchHandle,
        lease: Lease,
        error: IopError,
        is_there: Callable[[Demand], bool],
        *,
        was_put: bool,
    ) -> bool:
        """Leave out who is asked like the provider of this lease; False, and all as it was, if nobody else is there."""
        demand = handle.demand
        wanted = replace(
            demand,
            barred=demand.barred | {self.pools.way_of(lease, demand.operation, was_put=was_put)},
            run_id=self._new_run_id(),
        )
        if self.is_closing or not is_there(wanted):
            return False
        handle.demand = wanted
        # Not the error itself, whose traceback knows the frames of whoever raised it.
        handle.unsaid = type(error)(error.message, reason=error.reason, details=error.details)
        if handle.record.candidates:
            handle.record.candidates = tuple(self.pools.explain(wanted, now=self._loop.time()))
        return True

    def _promise(self, handle: DispatchHandle, answer: Lease | Waiting | Refusal) -> None:
        """Give the task that waits for a lease something to wait for; it may be there already."""
        handle.promise = promise = self._loop.create_future()
        if isinstance(answer, Waiting):
            self._waiting[answer.waiter] = handle
            handle.waits_as(answer)
            self.rearm()
        else:
            self._keep(handle, promise, answer)

    def _keep(
        self, handle: DispatchHandle, promise: asyncio.Future[Lease | Refusal], answer: Lease | Refusal
    ) -> None:
        promise.set_result(answer)
        if isinstance(answer, Lease):
            self._granted[answer.id] = handle

    async def _promised(self, handle: DispatchHandle) -> Lease | Refusal:
        """Wait for what was promised; bounded, since the pools settle every waiter at its deadline."""
        while True:
            promise = handle.promise
            assert promise is not None
            try:
                answer = await promise
            except asyncio.CancelledError:
                del promise  # which knows this error, and that this frame
                self._drop_promise(handle)
                handle.settle_unserved(Outcome.CLIENT_CANCELLED, CancelReason.CLIENT_GONE.value)
                raise
            if handle.promise is promise:
                break  # else its lease was recalled before this task ran
        handle.promise = None
        if isinstance(answer, Lease):
            self._granted.pop(answer.id, None)
        return answer

    def _drop_promise(self, handle: DispatchHandle) -> None:
        """The caller left: out of the queue at once, or the lease to the next (EN-110)."""
        promise, handle.promise = handle.promise, None
        if promise is None:
            return
        if not promise.done():
            handle.leave_queue()
        elif not promise.cancelled() and isinstance(lease := promise.result(), Lease):
            self._granted.pop(lease.id, None)
            self.apply(self.pools.release(lease, Verdict.NEUTRAL, now=self._loop.time()))
        else:
            handle.leave_queue()

    def _recall(self) -> None:
        """Put back into the queue whoever was granted a lease that is void before its task could use it.

        Between the grant and the turn of the task its generation was fenced, or a gate closed. Whoever did that relies
        on nothing new starting (AD-39), and the request keeps its place before those who came later (EN-110).
        """
        void = [
            (handle, handle.promise.result())
            for handle in self._granted.values()
            if handle.promise is not None and not self._may_start(handle.promise)
        ]
        void.sort(key=lambda pair: pair[0].demand.number)
        now = self._loop.time()
        for handle, lease in void:
            assert isinstance(lease, Lease)
            del self._granted[lease.id]
            self.apply(self.pools.release(lease, Verdict.NEUTRAL, now=now))
            self._promise(handle, self._acquire_again(handle))

    def _may_start(self, promise: asyncio.Future[Lease | Refusal]) -> bool:
        lease = promise.result()
        return isinstance(lease, Lease) and self.pools.may_start(lease)

    def _deliver(self, settlement: Settlement) -> None:
        handle = self._waiting.pop(settlement.waiter, None)
        if handle is not None:
            handle.waits_no_more()
        if handle is None or (handle.promise is not None and handle.promise.cancelled()):
            # Its request ended, or its caller's task was cancelled, in this very turn; the slot goes to the next.
            if isinstance(settlement, Granted):
                now = self._loop.time()
                self._settlements.extend(self.pools.release(settlement.lease, Verdict.NEUTRAL, now=now))
            return
        answer = settlement.lease if isinstance(settlement, Granted) else settlement.refusal
        if handle.promise is not None:
            self._keep(handle, handle.promise, answer)
        else:
            self._continue(handle, answer)

    def _continue(self, handle: DispatchHandle, answer: Lease | Waiting | Refusal) -> None:
        """Go on with a repeated request."""
        match answer:
            case Waiting():
                self._waiting[answer.waiter] = handle
                handle.waits_as(answer)
                self.rearm()
            case Refusal():
                handle.fail_waiting(_why(handle, answer))
            case Lease():
                try:
                    is_open = self._open(handle, answer)
                except CannotBeSaidError as refusal:
                    try:
                        self._continue(handle, self._ask_otherwise(handle, answer, refusal.error))
                    except IopError as error:
                        handle.fail_waiting(error)
                    return
                except IopError as error:
                    handle.fail_waiting(error)
                    return
                if is_open:
                    return
                if handle.may_try_again:
                    handle.try_again(answer.key)
                else:
                    handle.fail_waiting(Unavailable("the provider's Node was lost", reason="node_lost"))
            case _:
                assert_never(answer)

    def _open(self, handle: DispatchHandle, lease: Lease) -> bool:
        """Open under this lease; False when the connection is not there any more. Raises what ``prepare`` raises."""
        is_open = False
        try:
            handle.open(lease)
            is_open = True
        except ConnectionGoneError:
            self.hold_back(lease.key)
        finally:
            if not is_open:
                self.apply(self.pools.release(lease, Verdict.NEUTRAL, now=self._loop.time()))
        return is_open

    def _deadline_passed(self) -> None:
        self._timer = None
        # A loop may fire early by what its clock cannot tell; that is when the deadline is, not another turn later.
        self.apply(self.pools.handle_deadline(max(self._loop.time(), self._timer_at)))

    def _start_confirm(self, attempt: Attempt) -> None:
        at = self._loop.time() + self._snapshot.limits.cancel_confirm_s
        self._confirms[attempt.lease.id] = self._loop.call_at(at, self._cancel_overdue, attempt)

    def _stop_confirm(self, attempt: Attempt) -> None:
        timer = self._confirms.get(attempt.lease.id)
        if timer is not None:
            timer.cancel()
            self._confirms[attempt.lease.id] = None

    def _forget_confirm(self, lease_id: int) -> None:
        timer = self._confirms.pop(lease_id, None)
        if timer is not None:
            timer.cancel()

    def _cancel_overdue(self, attempt: Attempt) -> None:
        self.overdue_cancels_total += 1
        if attempt.stream is not None:
            attempt.stream.detach()
        self.give_back(attempt, Verdict.FAILURE)
        attempt.forget_sink()

    def _is_busy(self, keys: frozenset[ProviderKey] | None) -> bool:
        """By leases, not streams: a lease that was granted and not yet opened is work, too."""
        if keys is None:
            return len(self.pools.leases) > 0
        return any(self.pools.leases.is_held(key) for key in keys)

    def _tell_idle(self) -> None:
        for keys, future in self._idle:
            if not future.done() and not self._is_busy(keys):
                future.set_result(None)

    def _reject(self, record: RequestRecord, error: IopError) -> IopError:
        self.refusals[error.reason] += 1
        self.outcomes.settle(record, Outcome.REJECTED, reason=error.reason, now=self._loop.time())
        return error


def _why(handle: DispatchHandle, refusal: Refusal) -> IopError:
    """What the caller of a refused request is told.

    Who left the pool while a request waited for it may have been the last one that could be told it: what the others
    lack is a field then, not the operation (SF-10).
    """
    if refusal.reason is RefusalReason.OPERATION_NOT_SUPPORTED and handle.unsaid is not None:
        return handle.unsaid
    return error_of_refusal(refusal, handle.request.model)
