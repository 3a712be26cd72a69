"""A breaker per provider: one that keeps failing is left alone for a while, then tried with one request (EN-116)."""

from __future__ import annotations

from collections import deque
from enum import Enum, unique

from iop.edge.snapshot import BreakerSpec


@unique
class Verdict(Enum):
    """What an ended attempt says of its provider. NEUTRAL: nothing (the caller left, the Node was lost)."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


class Breaker:
    """Closed, open until a time, or half open with at most one trial out."""

    __slots__ = ("_failures", "_is_half_open", "_open_until", "_spec", "_trial_out", "opened_total")

    def __init__(self, spec: BreakerSpec) -> None:
        self._spec = spec
        self._failures: deque[float] = deque(maxlen=max(spec.failures, 1))
        self._open_until: float | None = None
        self._is_half_open = False
        self._trial_out = False
        self.opened_total = 0

    def configure(self, spec: BreakerSpec) -> None:
        """Take new thresholds; the state stays."""
        if spec != self._spec:
            self._spec = spec
            self._failures = deque(self._failures, maxlen=max(spec.failures, 1))

    @property
    def is_tripped(self) -> bool:
        """Open or half open."""
        return self._open_until is not None

    def admits(self, now: float) -> bool:
        """Whether a request may be sent now; when half open, only one at a time."""
        if self._open_until is None:
            return True
        return now >= self._open_until and not self._trial_out

    def begin(self) -> bool:
        """A request was sent; whether it is the trial."""
        if self._open_until is None:
            return False
        self._trial_out = True
        return True

    def record(self, verdict: Verdict, *, was_trial: bool, now: float) -> None:
        """A request ended. Only the trial moves a tripped breaker: older requests tell of older times."""
        if self._open_until is not None:
            if not was_trial:
                return
            self._trial_out = False
            if verdict is Verdict.SUCCESS:
                self.reset()
            elif verdict is Verdict.FAILURE:
                self._open(now)
            return
        if verdict is not Verdict.FAILURE:
            return
        self._failures.append(now)
        if len(self._failures) == self._failures.maxlen and now - self._failures[0] <= self._spec.window_s:
            self._open(now)

    def reset(self) -> None:
        """Closed, with nothing held against it: a new generation, or a trial that succeeded."""
        self._failures.clear()
        self._open_until = None
        self._is_half_open = False
        self._trial_out = False

    def pressure(self, now: float) -> float:
        """0 to 1: how near to opening. Makes a fast failure look loaded, not idle (EN-116)."""
        if not self._failures:
            return 0.0
        recent = sum(1 for at in self._failures if now - at <= self._spec.window_s)
        return recent / max(self._spec.failures, 1)

    def is_open(self, now: float) -> bool:
        """Whether nobody may be sent for a while yet."""
        return self._open_until is not None and now < self._open_until

    def next_deadline(self) -> float | None:
        """When it becomes half open; ``None`` when closed, or when :meth:`poll` has told already."""
        return None if self._is_half_open else self._open_until

    def poll(self, now: float) -> bool:
        """Whether it became half open since the last call."""
        if self._open_until is None or self._is_half_open or now < self._open_until:
            return False
        self._is_half_open = True
        return True

    def _open(self, now: float) -> None:
        self._open_until = now + self._spec.open_s
        self._is_half_open = False
        self._trial_out = False
        self._failures.clear()
        self.opened_total += 1
