"""The bounded queue of one model: FIFO within a priority, deadlines that stand still when they should.

Waiters that the same slot would fit form a *class*: same model, same length class, same operation, same ways barred and
same rank asked for. Within a class the head can run exactly when any of them can, so a pump looks at heads only and its
cost does not grow with those that cannot run (EN-110).

What a class waits for is its *condition*: contention, a pause, a provider that is being reconciled, or nobody at all.
Each has its own limit. Time is accounted per class, not per waiter: a waiter remembers the class clocks at its arrival,
so a change of condition costs the same however many wait. Since clocks only rise, the earliest deadline of a class is
that of its earliest arrival.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, unique
from typing import NamedTuple

from iop.core.ids import ModelId
from iop.edge.pools.model import Demand, RefusalReason, WaiterId
from iop.edge.snapshot import QueueSpec


@unique
class Condition(Enum):
    """What a class is waiting for."""

    CONTENDED = "contended"
    PAUSED = "paused"
    REJECTING = "rejecting"
    RECONCILING = "reconciling"
    EMPTY = "empty"


class ModelRank(NamedTuple):
    """A data-parallel rank of whoever serves this model."""

    model: ModelId
    rank: int


class ClassKey(NamedTuple):
    """Waiters with equal keys fit the same slots."""

    is_long: bool
    operation: str
    barred: frozenset[str] = frozenset()
    at: ModelRank | None = None


def class_of(demand: Demand) -> ClassKey:
    """The class that a demand would wait in."""
    rank = demand.target_rank
    at = None if rank is None else ModelRank(demand.model, rank)
    return ClassKey(demand.is_long, demand.operation, demand.barred, at)


@dataclass(slots=True, kw_only=True)
class Waiter:
    """One waiting demand.

    Attributes:
        entered_at: when it began to wait, this time.
        contended_s, paused_s: the class clocks at that time.
    """

    id: WaiterId
    demand: Demand
    entered_at: float
    contended_s: float = 0.0
    paused_s: float = 0.0


class _Lane:
    """The waiters of one class and priority: those that return from a failed attempt first, then first come.

    The returning ones keep their order of arrival among themselves; they are few, as many as attempts fail at once.
    """

    __slots__ = ("_fresh", "_returning")

    def __init__(self) -> None:
        self._returning: list[Waiter] = []
        self._fresh: OrderedDict[WaiterId, Waiter] = OrderedDict()

    def __len__(self) -> int:
        return len(self._returning) + len(self._fresh)

    def add(self, waiter: Waiter, *, is_returning: bool) -> None:
        if is_returning:
            insort(self._returning, waiter, key=lambda other: other.demand.number)
        else:
            self._fresh[waiter.id] = waiter

    def ahead_of(self, waiter_id: WaiterId) -> int:
        for ahead, waiter in enumerate(self._returning):
            if waiter.id == waiter_id:
                return ahead
        return len(self._returning) + next(
            (ahead for ahead, other in enumerate(self._fresh) if other == waiter_id), len(self._fresh)
        )

    def head(self) -> Waiter:
        return self._returning[0] if self._returning else next(iter(self._fresh.values()))

    def remove(self, waiter_id: WaiterId) -> None:
        if self._fresh.pop(waiter_id, None) is None:
            self._returning = [waiter for waiter in self._returning if waiter.id != waiter_id]


class WaitClass:
    """The waiters of one class."""

    __slots__ = (
        "_arrivals",
        "_by_priority",
        "_contended_s",
        "_paused_s",
        "_priorities",
        "_since",
        "condition",
        "key",
    )

    def __init__(self, key: ClassKey, now: float) -> None:
        self.key = key
        self.condition = Condition.CONTENDED
        self._since = now
        self._contended_s = 0.0
        self._paused_s = 0.0
        self._arrivals: OrderedDict[WaiterId, Waiter] = OrderedDict()
        self._by_priority: dict[int, _Lane] = {}
        self._priorities: list[int] = []

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._arrivals.values())

    def set_condition(self, condition: Condition, now: float) -> None:
        """Account the time since the last change to what was waited for then."""
        if condition is self.condition:
            return
        self._account(now)
        self._since = now
        self.condition = condition

    def add(self, waiter: Waiter, now: float, *, is_returning: bool = False) -> int:
        """Append a waiter and say how many of its priority or above stand ahead.

        A returning one, whose attempt never reached a Node, goes before all of its priority: it had left from there.
        """
        self._account(now)
        waiter.contended_s = self._contended_s
        waiter.paused_s = self._paused_s
        priority = waiter.demand.priority
        lane = self._by_priority.get(priority)
        if lane is None:
            lane = self._by_priority[priority] = _Lane()
            insort(self._priorities, priority)
        ahead = sum(len(self._by_priority[p]) for p in self._priorities if p >= priority)
        lane.add(waiter, is_returning=is_returning)
        self._arrivals[waiter.id] = waiter
        return 0 if is_returning else ahead

    def ahead_of(self, waiter_id: WaiterId) -> int:
        """How many will go before this waiter, as things stand. Steps grow with those of its own priority."""
        priority = self._arrivals[waiter_id].demand.priority
        above = sum(len(self._by_priority[p]) for p in self._priorities if p > priority)
        return above + self._by_priority[priority].ahead_of(waiter_id)

    def head(self) -> Waiter | None:
        """Who is next: highest priority, then first come."""
        if not self._priorities:
            return None
        return self._by_priority[self._priorities[-1]].head()

    def remove(self, waiter_id: WaiterId) -> Waiter | None:
        """Take one waiter out, wherever it stands."""
        waiter = self._arrivals.pop(waiter_id, None)
        if waiter is None:
            return None
        priority = waiter.demand.priority
        lane = self._by_priority[priority]
        lane.remove(waiter_id)
        if not len(lane):
            del self._by_priority[priority]
            self._priorities.remove(priority)
        return waiter

    def next_deadline(self, spec: QueueSpec) -> float | None:
        """When the earliest arrival runs out of time, if the condition stays as it is."""
        for waiter in self._arrivals.values():
            return self._deadline(waiter, spec)
        return None

    def expire(self, spec: QueueSpec, now: float) -> list[tuple[Waiter, RefusalReason]]:
        """Take out everybody whose time is over, earliest first."""
        expired: list[tuple[Waiter, RefusalReason]] = []
        while self._arrivals:
            waiter = next(iter(self._arrivals.values()))
            if now < self._deadline(waiter, spec):
                break
            self.remove(waiter.id)
            expired.append((waiter, self._answer()))
        return expired

    def clear(self) -> list[Waiter]:
        """Take everybody out."""
        waiters = list(self._arrivals.values())
        self._arrivals.clear()
        self._by_priority.clear()
        self._priorities.clear()
        return waiters

    def _answer(self) -> RefusalReason:
        match self.condition:
            case Condition.CONTENDED:
                return RefusalReason.QUEUE_TIMEOUT
            case Condition.PAUSED | Condition.REJECTING:
                return RefusalReason.PAUSED
            case Condition.RECONCILING | Condition.EMPTY:
                return RefusalReason.NO_CAPACITY

    def _account(self, now: float) -> None:
        elapsed = now - self._since
        if self.condition is Condition.CONTENDED:
            self._contended_s += elapsed
        elif self.condition is Condition.PAUSED:
            self._paused_s += elapsed
        else:
            return  # a grace runs from the change of condition, so that stays the reference
        self._since = now

    def _deadline(self, waiter: Waiter, spec: QueueSpec) -> float:
        match self.condition:
            case Condition.CONTENDED:
                return self._since + spec.timeout_s - (self._contended_s - waiter.contended_s)
            case Condition.PAUSED:
                return self._since + spec.paused_timeout_s - (self._paused_s - waiter.paused_s)
            case Condition.REJECTING:
                return self._since
            case Condition.RECONCILING | Condition.EMPTY:
                return max(self._since, waiter.entered_at) + spec.no_capacity_grace_s


class ModelQueue:
    """All classes of one model."""

    __slots__ = ("classes", "depth")

    def __init__(self) -> None:
        self.classes: dict[ClassKey, WaitClass] = {}
        self.depth = 0

    def condition_of(self, key: ClassKey) -> Condition | None:
        """What the waiters of a class wait for; ``None`` when nobody does."""
        lane = self.classes.get(key)
        return None if lane is None else lane.condition

    def add(
        self, waiter: Waiter, key: ClassKey, now: float, *, is_returning: bool = False
    ) -> tuple[WaitClass, int]:
        """Put a waiter into its class and say how many stand ahead of it there."""
        lane = self.classes.get(key)
        if lane is None:
            lane = self.classes[key] = WaitClass(key, now)
        self.depth += 1
        return lane, lane.add(waiter, now, is_returning=is_returning)

    def remove(self, key: ClassKey, waiter_id: WaiterId) -> Waiter | None:
        """Take one waiter out."""
        lane = self.classes.get(key)
        waiter = None if lane is None else lane.remove(waiter_id)
        if waiter is not None:
            self.depth -= 1
            if lane is not None and not len(lane):
                del self.classes[key]
        return waiter

    def expire(self, spec: QueueSpec, now: float) -> list[tuple[Waiter, RefusalReason]]:
        """Take out everybody whose time is over."""
        expired: list[tuple[Waiter, RefusalReason]] = []
        for key, lane in list(self.classes.items()):
            gone = lane.expire(spec, now)
            expired += gone
            self.depth -= len(gone)
            if not len(lane):
                del self.classes[key]
        return expired

    def clear(self) -> list[Waiter]:
        """Take everybody out."""
        waiters = [waiter for lane in self.classes.values() for waiter in lane.clear()]
        self.classes.clear()
        self.depth = 0
        return waiters
