"""A dispatched request as its surface holds it, and its moves from waiting over running to settled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, unique
from typing import Final, Protocol

from iop.core.errors import InvalidRequest, IopError, LocalProtocolError
from iop.core.ids import RunId
from iop.edge.attempt import Attempt
from iop.edge.calls import (
    Call,
    CannotBeSaidError,
    DispatchRequest,
    Outcome,
    PrepareCall,
    ProviderKey,
    ServedTarget,
)
from iop.edge.outcomes import (
    UNKNOWN_VERSION,
    AttemptRecord,
    OutcomeBook,
    RequestRecord,
    is_unsaid,
    may_repeat,
    outcome_of_cancel,
    outcome_of_error,
    outcome_of_status,
    verdict_of_error,
    verdict_of_status,
)
from iop.edge.pools import Demand, Lease, Pools, Refusal, Verdict, WaiterId, Waiting
from iop.edge.snapshot import DispatchLimits
from iop.edge.traces import RequestTrace
from iop.wire.messages import CancelReason, StreamError, StreamErrorCode, Usage


@unique
class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    SETTLED = "settled"


log = logging.getLogger(__name__)

VERSION_CHARS_MAX: Final = 128
"""Longest weight version that a provider may say; it goes into headers and records."""

_ORDINARY: Final = frozenset({Outcome.COMPLETE, Outcome.CLIENT_CANCELLED, Outcome.REJECTED})

_WORDS: Final = {
    CancelReason.TIMEOUT: "the provider did not answer within the time limit",
    CancelReason.ABORTED_BY_ADMIN: "the request was ended by an administrative pause",
    CancelReason.EDGE_SHUTDOWN: "the gateway is shutting down",
}


def _unprepared(_target: ServedTarget) -> Call:
    raise LocalProtocolError("a settled request makes no attempt")


class Shell(Protocol):
    """What a request asks of the dispatcher that carries it."""

    @property
    def pools(self) -> Pools:
        """Who may run where."""
        ...

    @property
    def outcomes(self) -> OutcomeBook:
        """Where outcomes are recorded."""
        ...

    @property
    def is_closing(self) -> bool:
        """No more repeats."""
        ...

    def now(self) -> float:
        """The loop's monotonic seconds."""
        ...

    def call_at(self, at: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Arm a timer."""
        ...

    def weight_version(self, key: ProviderKey) -> str:
        """What a provider is known to serve now."""
        ...

    def is_frozen(self, key: ProviderKey) -> bool:
        """Whether a KEEP pause freezes the work of a provider."""
        ...

    def send(self, handle: DispatchHandle, attempt: Attempt, call: Call) -> None:
        """Open the attempt's stream. Raises ConnectionGoneError."""
        ...

    def give_back(self, attempt: Attempt, verdict: Verdict) -> None:
        """The Node is done with an attempt."""
        ...

    def hold_back(self, key: ProviderKey) -> None:
        """Send nothing new to a provider for a moment."""
        ...

    def confirm_later(self, attempt: Attempt) -> None:
        """A cancel was sent: bound the wait for its confirmation."""
        ...

    def stop_waiting(self, waiter: WaiterId) -> None:
        """A waiter's request ended."""
        ...

    def seek_again(self, handle: DispatchHandle, tried: frozenset[ProviderKey]) -> None:
        """Find another lease for a repeated request."""
        ...

    def seek_otherwise(self, handle: DispatchHandle, attempt: Attempt, error: IopError) -> bool:
        """Whether somebody is there who can be told what this attempt could not."""
        ...


class ConnectionGoneError(Exception):
    """The leased generation's connection cannot take a stream; nothing was sent."""


class DispatchHandle:
    """One dispatched request: what surfaces tell callers about it, and how they steer it.

    The sink given by ``prepare`` gets the answer. Everything here is synchronous and safe after the end.
    """

    __slots__ = (
        "_armed_at",
        "_frozen_at",
        "_frozen_s",
        "_is_truncated",
        "_prepare",
        "_queued_at",
        "_shell",
        "_timer",
        "_tried",
        "_version_told",
        "_waiter",
        "attempt",
        "attempts",
        "demand",
        "limits",
        "phase",
        "promise",
        "queue_ms",
        "queue_position",
        "record",
        "request",
        "trace",
        "unsaid",
        "version_begun",
    )

    def __init__(
        self,
        shell: Shell,
        request: DispatchRequest,
        prepare: PrepareCall,
        record: RequestRecord,
        demand: Demand,
        limits: DispatchLimits,
        now: float,
    ) -> None:
        self._shell = shell
        self._prepare = prepare
        self._queued_at = now
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at = 0.0
        self._frozen_at: float | None = None
        self._frozen_s = 0.0
        self._is_truncated = False
        self._version_told = ""
        self.trace: RequestTrace | None = None
        """Its spans, where they are recorded."""
        self.unsaid: IopError | None = None
        """What was in the way of telling a provider the request, where another one is sought since (SF-10)."""
        self.attempts = 0
        self._tried: frozenset[ProviderKey] = frozenset()
        self._waiter: WaiterId | None = None
        self.request = request
        self.record = record
        self.demand = demand
        self.limits = limits
        self.phase = Phase.WAITING
        self.promise: asyncio.Future[Lease | Refusal] | None = None
        """What the task of ``dispatch`` waits for, until its first attempt is open."""
        self.attempt: Attempt | None = None
        self.queue_ms = 0
        """Milliseconds between admission and the lease of the current attempt."""
        self.queue_position = 0
        """Waiters that stood ahead when the request was queued; 0 when it never waited."""
        self.version_begun = ""
        """Weights that the provider served when the current attempt was sent to it: none older produced its answer."""

    # ---- for surfaces ----

    @property
    def target(self) -> ServedTarget:
        """Who serves the current attempt."""
        return self._current().target

    @property
    def run_id(self) -> RunId:
        """Of the current attempt (EN-118)."""
        return self._current().lease.run_id

    @property
    def provider_name(self) -> str:
        """Opaque, stable name for ``x-iop-provider`` (SF-13); tells nothing about the Node."""
        return self._shell.pools.roster.name_of(self._current().lease.key)

    @property
    def weight_version(self) -> str:
        """Of the provider as known now; ``unknown`` where it is. At the end it tells whether the answer went on under
        other weights than :attr:`version_begun` (AD-33).
        """
        known = self._shell.weight_version(self._current().lease.key)
        return self._version_told if known == UNKNOWN_VERSION and self._version_told else known

    @property
    def waiting_behind(self) -> int | None:
        """How many will go before it, while it waits for a lease; ``None`` when it does not (EN-110)."""
        return None if self._waiter is None else self._shell.pools.ahead_of(self._waiter)

    @property
    def outcome(self) -> Outcome | None:
        """The recorded outcome, once there is one (EN-112)."""
        return self.record.outcome

    def consumed(self, size_bytes: int) -> None:
        """Body or delta bytes have been written to the caller: return their credit (EN-102)."""
        if self.attempt is not None:
            self.attempt.consumed(size_bytes)

    @property
    def is_frozen(self) -> bool:
        """Whether a KEEP pause holds the answer still (AD-41)."""
        return self._frozen_at is not None

    def cancel(self, reason: CancelReason = CancelReason.CLIENT_GONE) -> None:
        """The caller left, or waited too long: end it (EN-56, SF-07).

        The first of terminal and cancel wins; a late or second cancel is a no-op (EN-112). After a winning cancel the
        sink is not called any more. The lease returns when the Node confirms, within a bound.
        """
        self.call_off(reason, tells_sink=False)

    def note_truncated(self) -> None:
        """The surface saw that the answer is not whole (SF-14); call from ``on_end`` or ``on_error`` or before."""
        self._is_truncated = True

    def note_usage(self, usage: Usage) -> None:
        """The surface observed usage in the body (EN-53); shown by ``iop explain``."""
        self.record.usage = usage

    # ---- from the attempt ----

    def attempt_started(self, attempt: Attempt) -> None:
        """The first part of an answer is here: the first-byte limit is met, the total one goes on."""
        self.record.version_first = self.weight_version
        if self.trace is not None:
            self.trace.answers(attempt.status)
        if self._frozen_at is None and self._limit_at(attempt) < self._armed_at:
            self._arm(attempt)  # else the timer finds out when it fires: most answers end before it does

    def version_told(self, version: str) -> None:
        """The provider's own word, for where nothing better is known: it may be another Edge (SF-24, AD-33)."""
        self._version_told = "".join(filter(str.isprintable, version[:VERSION_CHARS_MAX]))
        if self.version_begun == UNKNOWN_VERSION:
            self.version_begun = self._version_told

    def attempt_observed(self, usage: Usage) -> None:
        """The Node reported usage."""
        self.record.usage = usage

    def attempt_ended(self, attempt: Attempt, error: StreamError | None, tell: Callable[[], None]) -> None:
        """The Node's terminal: return the lease, then try again or settle."""
        if attempt.is_lost:
            return  # fenced and settled already (EN-33)
        if error is not None and error.code == StreamErrorCode.NODE_LOST:
            # The connection goes. Returning the lease here would pump its slot to a Node that is not fenced yet; the
            # fence, in the same turn, returns all of them after taking the resources offline (EN-31).
            return
        shell = self._shell
        if self.phase is not Phase.RUNNING or self.attempt is not attempt:
            shell.give_back(attempt, attempt.early_verdict)
            attempt.forget_sink()
            return
        verdict = verdict_of_status(attempt.status) if error is None else verdict_of_error(error)
        if error is not None:
            self.record.attempts[-1].error = error.code
            if error.code == StreamErrorCode.BUSY:
                shell.hold_back(attempt.lease.key)
            if self.may_try_again and (
                may_repeat(error, has_started=attempt.is_started, is_handed_over=True)
                or (
                    is_unsaid(error, has_started=attempt.is_started)
                    and shell.seek_otherwise(self, attempt, InvalidRequest(error.message, reason=error.code))
                )
            ):
                shell.give_back(attempt, verdict)
                self.try_again(attempt.lease.key)
                return
        is_broken = False
        try:
            tell()
        except Exception:
            # A bug of the surface's: no other word will come, so its caller would wait for ever.
            is_broken = True
            attempt.tell_error(StreamError(code=StreamErrorCode.INTERNAL.value))
            raise
        finally:
            outcome = outcome_of_status(attempt.status) if error is None else outcome_of_error(error)
            reason = "" if error is None else error.code
            if self._is_truncated:
                outcome, verdict = Outcome.UPSTREAM_TRUNCATED, Verdict.FAILURE
                reason = reason or StreamErrorCode.UPSTREAM_TRUNCATED.value
            if is_broken:
                outcome, verdict, reason = (
                    Outcome.UPSTREAM_ERROR,
                    Verdict.NEUTRAL,
                    StreamErrorCode.INTERNAL.value,
                )
            self._settle(outcome, reason)
            shell.give_back(attempt, verdict)
            attempt.forget_sink()

    # ---- from the dispatcher ----

    def open(self, lease: Lease) -> None:
        """Open the stream under a lease: build the call, then send it (EN-54).

        Raises:
            ConnectionGoneError: nothing was sent; another lease may be tried.
            CannotBeSaidError: as well, of a provider that offers the operation itself.
            BaseException: whatever ``prepare`` raised; the request is then settled as rejected.
        """
        shell = self._shell
        now = shell.now()
        self._note_wait(now)
        self.attempts += 1
        target = shell.pools.served_target(lease)
        try:
            call = self._prepare(target)
        except CannotBeSaidError:
            raise
        except BaseException as error:
            reason = error.reason if isinstance(error, IopError) else "internal"
            self.settle_unserved(Outcome.REJECTED, reason)
            raise
        if self.trace is not None:
            call = self.trace.opens(call, target, lease.run_id)
        attempt = Attempt(self, lease, target, call)
        self.attempt = attempt
        self.phase = Phase.RUNNING
        self._frozen_at, self._frozen_s = None, 0.0
        self.record.attempts.append(AttemptRecord(run_id=lease.run_id, provider=lease.key, started_at=now))
        self._version_told = ""
        self.version_begun = shell.weight_version(lease.key)
        if self.attempts == 1:
            self.record.version_admission = self.version_begun
        try:
            shell.send(self, attempt, call)
        except ConnectionGoneError:
            self.record.attempts[-1].error = StreamErrorCode.NODE_LOST.value
            self.phase = Phase.WAITING
            if self.trace is not None:
                self.trace.repeats(StreamErrorCode.NODE_LOST.value)
            raise
        if self.phase is Phase.RUNNING:
            self._arm(attempt)
            if shell.is_frozen(lease.key):
                self.freeze()

    def call_off(self, reason: CancelReason, *, tells_sink: bool) -> bool:
        """End the request for a reason of the Edge's or the caller's; False when it had its outcome."""
        if self.phase is Phase.SETTLED:
            self._shell.outcomes.late_settlements += 1
            return False
        was_running = self.phase is Phase.RUNNING
        self.leave_queue()
        outcome, why = outcome_of_cancel(reason), reason.value
        is_given_up = self._is_truncated and outcome is Outcome.CLIENT_CANCELLED
        if is_given_up:  # the surface gave up on the answer, not the caller
            outcome, why = Outcome.UPSTREAM_TRUNCATED, StreamErrorCode.UPSTREAM_TRUNCATED.value
        self._settle(outcome, why)
        attempt = self.attempt
        if attempt is None:
            return True
        try:
            if tells_sink:
                attempt.tell_error(StreamError(code=reason.value, message=_WORDS.get(reason, reason.value)))
        finally:
            if was_running:
                if is_given_up or reason is CancelReason.TIMEOUT:
                    attempt.early_verdict = Verdict.FAILURE
                self._shell.confirm_later(attempt)
                attempt.call_off(reason, at_safe_point=self._shell.is_frozen(attempt.lease.key))
        return True

    def lose(self, attempt: Attempt) -> None:
        """The attempt's generation was fenced, its lease is back: repeat it if that is surely safe, else settle."""
        error = StreamError(
            code=StreamErrorCode.NODE_LOST.value, message="the provider's Node was lost", retryable=True
        )
        may = may_repeat(error, has_started=attempt.is_started, is_handed_over=attempt.is_handed_over)
        attempt.mark_lost()
        if self.phase is not Phase.RUNNING or self.attempt is not attempt:
            attempt.forget_sink()
            return
        self.record.attempts[-1].error = error.code
        if may and self.may_try_again:
            self.try_again(attempt.lease.key)
            return
        self._settle(Outcome.NODE_LOST, error.code)
        attempt.tell_error(error)
        attempt.forget_sink()

    def try_again(self, tried: ProviderKey) -> None:
        """Seek another lease for a request whose attempt provably had no effect (EN-112)."""
        self._disarm()
        self.phase = Phase.WAITING
        self._queued_at = self._shell.now()
        self._tried |= {tried}
        if self.trace is not None:
            self.trace.repeats(self.record.attempts[-1].error)
        self._shell.seek_again(self, self._tried)

    @property
    def may_try_again(self) -> bool:
        """Whether the number of attempts, and the Edge, allow another one."""
        return self.attempts < self.limits.attempts_max and not self._shell.is_closing

    def waits_as(self, waiting: Waiting) -> None:
        """It stands in the queue."""
        self._waiter = waiting.waiter
        self.queue_position = waiting.position

    def leave_queue(self) -> None:
        """It does not want a lease any more."""
        if self._waiter is not None:
            self._shell.stop_waiting(self._waiter)
            self._waiter = None

    def waits_no_more(self) -> None:
        """It left the queue."""
        self._waiter = None

    def fail_waiting(self, error: IopError) -> None:
        """No other attempt came about: end with what stood in the way."""
        self._waiter = None
        if self.phase is not Phase.SETTLED:
            self._settle(Outcome.REJECTED, error.reason)
        if self.attempt is not None:
            self.attempt.tell_error(
                StreamError(code=error.reason, message=error.message, retryable=error.retryable)
            )

    def settle_unserved(self, outcome: Outcome, reason: str) -> None:
        """It never ran."""
        self._settle(outcome, reason)

    def rejected(self, error: IopError) -> IopError:
        """The dispatcher refused it; ``error`` is given back."""
        self._note_wait(self._shell.now())
        if self.trace is not None:
            self.trace.ends(self.record, Outcome.REJECTED, error.reason)
        return error

    def runs(self, attempt: Attempt) -> bool:
        """Whether this attempt is the one that its caller listens to."""
        return self.phase is Phase.RUNNING and self.attempt is attempt

    def freeze(self) -> None:
        """KEEP: time stands still for its limits (SF-12, AD-41)."""
        if self.phase is Phase.RUNNING and self._frozen_at is None:
            self._frozen_at = self._shell.now()
            self._disarm()

    def thaw(self) -> None:
        """Its time goes on."""
        frozen_at, self._frozen_at = self._frozen_at, None
        if frozen_at is not None and self.phase is Phase.RUNNING and self.attempt is not None:
            self._frozen_s += self._shell.now() - frozen_at
            self._arm(self.attempt)

    # ---- inner ----

    def _current(self) -> Attempt:
        if self.attempt is None:
            raise LocalProtocolError("the request was not dispatched yet")
        return self.attempt

    def _settle(self, outcome: Outcome, reason: str) -> None:
        now = self._shell.now()
        if self.phase is Phase.WAITING:  # it waited in vain
            self._note_wait(now)
        self.phase = Phase.SETTLED
        self._prepare = _unprepared  # what it holds of its caller may hold this handle
        self._disarm()
        self._frozen_at = None
        if self.attempt is not None:
            self.record.version_last = self.weight_version
        if self._shell.outcomes.settle(self.record, outcome, reason=reason, now=now):
            self._log(outcome, reason)
            if self.trace is not None:
                self.trace.ends(self.record, outcome, reason)

    def _note_wait(self, now: float) -> None:
        self.queue_ms = self.record.queue_ms = int((now - self._queued_at) * 1000)

    def _log(self, outcome: Outcome, reason: str) -> None:
        """Tell of the end: of an ordinary one only to who asks for details."""
        level = logging.DEBUG if outcome in _ORDINARY else logging.INFO
        if not log.isEnabledFor(level):
            return
        lease = None if self.attempt is None else self.attempt.lease
        log.log(
            level,
            "request.ended",
            extra={
                "request_id": self.request.request_id,
                "run_id": None if lease is None else lease.run_id,
                "model": self.demand.model,
                "provider": None if lease is None else str(lease.key),
                "outcome": outcome.value,
                "reason": reason,
                "attempts": self.attempts,
                "queue_ms": self.queue_ms,
                "trace_id": None if self.trace is None else self.trace.trace_id,
            },
        )

    def _limit_at(self, attempt: Attempt) -> float:
        """When the limit that comes next is reached: counted from the lease, frozen time aside."""
        limits = self.limits
        limit_s = limits.total_timeout_s
        if not attempt.is_started:
            limit_s = min(limits.first_byte_timeout_s, limit_s)
        return attempt.lease.since + limit_s + self._frozen_s

    def _arm(self, attempt: Attempt) -> None:
        self._disarm()
        self._armed_at = self._limit_at(attempt)
        self._timer = self._shell.call_at(self._armed_at, self._time_may_be_over)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_may_be_over(self) -> None:
        self._timer = None
        attempt = self._current()
        if self._shell.now() < self._limit_at(attempt):
            self._arm(attempt)
        else:
            self.call_off(CancelReason.TIMEOUT, tells_sink=True)
