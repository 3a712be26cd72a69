"""How requests end: exactly one recorded outcome each, and a bounded memory of recent ones (EN-112).

Settling is one atomic transition: the first of terminal, cancel, timeout, loss and shutdown wins, and every later one
finds the record settled and changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from iop.core.ids import RequestId, RunId
from iop.edge.calls import Outcome, ProviderKey
from iop.edge.pools.breaker import Verdict
from iop.edge.pools.model import CandidateView
from iop.wire.messages import CancelReason, StreamError, StreamErrorCode, Usage

UNKNOWN_VERSION: Final = "unknown"


@dataclass(slots=True, kw_only=True)
class AttemptRecord:
    """One dispatch attempt; ``error`` is the code with which it failed, empty when it did not."""

    run_id: RunId
    provider: ProviderKey
    started_at: float
    error: str = ""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What ``iop explain`` tells of one request. Times in monotonic seconds.

    Attributes:
        candidates: of the pool, as they stood when the request came.
        reason: why it ended so: an error code, or empty.
        version_admission, version_first, version_last: weight versions (AD-33).
    """

    request_id: RequestId
    model: str
    caller: str
    began_at: float
    candidates: tuple[CandidateView, ...] = ()
    attempts: list[AttemptRecord] = field(default_factory=list)
    queue_ms: int = 0
    outcome: Outcome | None = None
    reason: str = ""
    ended_at: float | None = None
    usage: Usage | None = None
    version_admission: str = UNKNOWN_VERSION
    version_first: str = UNKNOWN_VERSION
    version_last: str = UNKNOWN_VERSION


class OutcomeBook:
    """All live requests by count, and the recent ones by id.

    Args:
        recent_max: how many requests are remembered; the oldest go first.
    """

    def __init__(self, recent_max: int) -> None:
        self._recent_max = recent_max
        self._recent: OrderedDict[RequestId, RequestRecord] = OrderedDict()
        self._counts: Counter[Outcome] = Counter()
        self.begun_total = 0
        self.late_settlements = 0
        """Attempts to settle what was settled: lost races, all without effect."""

    @property
    def live(self) -> int:
        """Requests without an outcome yet."""
        return self.begun_total - self._counts.total()

    def begin(self, request_id: RequestId, model: str, *, caller: str = "", now: float) -> RequestRecord:
        """Open a record. A reused id hides the older request of the same id, which still gets its outcome."""
        record = RequestRecord(request_id=request_id, model=model, caller=caller, began_at=now)
        self.begun_total += 1
        self._recent.pop(request_id, None)
        self._recent[request_id] = record
        if len(self._recent) > self._recent_max:
            self._recent.popitem(last=False)
        return record

    def settle(self, record: RequestRecord, outcome: Outcome, *, reason: str = "", now: float) -> bool:
        """Give a request its outcome; False when it has one, which then stays."""
        if record.outcome is not None:
            self.late_settlements += 1
            return False
        record.outcome = outcome
        record.reason = reason
        record.ended_at = now
        self._counts[outcome] += 1
        return True

    def find(self, request_id: str) -> RequestRecord | None:
        """A recent request."""
        return self._recent.get(RequestId(request_id))

    def totals(self) -> Mapping[Outcome, int]:
        """Requests that ended, by outcome; every outcome is there."""
        return {outcome: self._counts[outcome] for outcome in Outcome}


_ERROR_OUTCOMES: Final[Mapping[str, Outcome]] = {
    StreamErrorCode.UPSTREAM_TRUNCATED: Outcome.UPSTREAM_TRUNCATED,
    StreamErrorCode.TIMEOUT: Outcome.TIMEOUT,
    StreamErrorCode.NO_OUTPUT: Outcome.TIMEOUT,
    StreamErrorCode.NODE_SHUTDOWN: Outcome.NODE_LOST,
    StreamErrorCode.NODE_LOST: Outcome.NODE_LOST,
}

_CANCEL_OUTCOMES: Final[Mapping[CancelReason, Outcome]] = {
    CancelReason.CLIENT_GONE: Outcome.CLIENT_CANCELLED,
    CancelReason.TIMEOUT: Outcome.TIMEOUT,
    CancelReason.ABORTED_BY_ADMIN: Outcome.ABORTED_BY_ADMIN,
    CancelReason.EDGE_SHUTDOWN: Outcome.EDGE_SHUTDOWN,
}

_PROVIDER_FAULTS: Final = frozenset(
    {
        StreamErrorCode.CONNECT_FAILED.value,
        StreamErrorCode.UPSTREAM_ERROR.value,
        StreamErrorCode.UPSTREAM_TRUNCATED.value,
        StreamErrorCode.TIMEOUT.value,
        StreamErrorCode.NO_OUTPUT.value,
        StreamErrorCode.INTERNAL.value,
        # Another Edge with nobody behind it: fast to fail, and others may be better (EN-116, SF-24).
        "no_capacity",
    }
)


def outcome_of_error(error: StreamError) -> Outcome:
    """The outcome of a stream that its Node ended with this error."""
    return _ERROR_OUTCOMES.get(error.code, Outcome.UPSTREAM_ERROR)


def outcome_of_cancel(reason: CancelReason) -> Outcome:
    """The outcome of a request that the Edge called off."""
    return _CANCEL_OUTCOMES.get(reason, Outcome.CLIENT_CANCELLED)


def outcome_of_status(status: int) -> Outcome:
    """The outcome of a whole answer: a provider's own 4xx is complete (EN-112)."""
    return Outcome.UPSTREAM_ERROR if status >= 500 else Outcome.COMPLETE


def verdict_of_error(error: StreamError) -> Verdict:
    """What a stream error says of the provider (EN-116)."""
    return Verdict.FAILURE if error.code in _PROVIDER_FAULTS else Verdict.NEUTRAL


def verdict_of_status(status: int) -> Verdict:
    """What an answer says of the provider: 5xx is a failure."""
    return Verdict.FAILURE if status >= 500 else Verdict.SUCCESS


def may_repeat(error: StreamError, *, has_started: bool, is_handed_over: bool) -> bool:
    """Whether another attempt is allowed: nothing reached the caller, the Node provably did not pass it on (EN-112).

    Args:
        error: how the attempt ended.
        has_started: any part of an answer has reached the surface.
        is_handed_over: any part of the opening packet was given to the socket.
    """
    if has_started:
        return False
    if error.code == StreamErrorCode.NODE_LOST:
        return not is_handed_over
    return error.before_start and error.retryable


def is_unsaid(error: StreamError, *, has_started: bool) -> bool:
    """Whether a provider had no words for the request, and its engine no part in it: another one may have (SF-10)."""
    return error.before_start and not has_started and error.code == StreamErrorCode.INVALID_REQUEST
