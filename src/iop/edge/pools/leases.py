"""Leases: occupied units of provider capacity, each returned exactly once.

A lease is the only proof of occupied capacity; the in-flight figures are counts of leases and nothing else (EN-91). The
book knows every lease that is out. Returning one that is not out any more (its generation was fenced, or its owner
ended twice) changes nothing and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, unique

from msgspec import Struct

from iop.core.ids import Generation, LeaseId, ModelId, NodeId, RequestId, RunId
from iop.edge.calls import ProviderKey


@unique
class LeaseKind(Enum):
    """Whether it occupies a long-context slot besides the normal one (EN-111), or none at all: side work (SF-14)."""

    NORMAL = "normal"
    LONG = "long"
    SIDE = "side"


class Lease(Struct, frozen=True, kw_only=True):
    """One occupied slot; ``since`` in monotonic seconds."""

    id: LeaseId
    key: ProviderKey
    generation: Generation
    kind: LeaseKind
    model: ModelId
    target: str
    request_id: RequestId
    run_id: RunId
    since: float
    is_trial: bool = False


class LeaseBook:
    """All leases that are out."""

    def __init__(self) -> None:
        self._out: dict[LeaseId, Lease] = {}
        self._by_key: dict[ProviderKey, dict[LeaseId, Lease]] = {}
        self._long: dict[ProviderKey, int] = {}
        self._side: dict[ProviderKey, int] = {}
        self._next_id = 0
        self.granted_total = 0
        self.returned_total = 0

    def __len__(self) -> int:
        return len(self._out)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._out.values())

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._out

    def grant(
        self,
        *,
        key: ProviderKey,
        generation: Generation,
        kind: LeaseKind,
        model: ModelId,
        target: str,
        request_id: RequestId,
        run_id: RunId,
        now: float,
        is_trial: bool = False,
    ) -> Lease:
        """Occupy one unit. The caller has checked that there is room."""
        self._next_id += 1
        lease = Lease(
            id=LeaseId(self._next_id),
            key=key,
            generation=generation,
            kind=kind,
            model=model,
            target=target,
            request_id=request_id,
            run_id=run_id,
            since=now,
            is_trial=is_trial,
        )
        self._out[lease.id] = lease
        self._by_key.setdefault(key, {})[lease.id] = lease
        if kind is LeaseKind.LONG:
            self._long[key] = self._long.get(key, 0) + 1
        elif kind is LeaseKind.SIDE:
            self._side[key] = self._side.get(key, 0) + 1
        self.granted_total += 1
        return lease

    def give_back(self, lease: Lease) -> bool:
        """Return one unit; False when it had been returned before, then nothing changes."""
        if self._out.pop(lease.id, None) is None:
            return False
        del self._by_key[lease.key][lease.id]
        if lease.kind is LeaseKind.LONG:
            self._long[lease.key] -= 1
        elif lease.kind is LeaseKind.SIDE:
            self._side[lease.key] -= 1
        self.returned_total += 1
        return True

    def give_back_all(self, node: NodeId, generation: Generation) -> list[Lease]:
        """Return every lease of one generation, in the order in which they were granted (EN-31)."""
        lost = [
            lease
            for key, leases in self._by_key.items()
            if key.node == node
            for lease in leases.values()
            if lease.generation == generation
        ]
        lost.sort(key=lambda lease: lease.id)
        for lease in lost:
            self.give_back(lease)
        return lost

    def in_flight(self, key: ProviderKey) -> int:
        """Leases out on this resource that occupy a slot, normal and long."""
        return len(self._by_key.get(key, ())) - self._side.get(key, 0)

    def side_in_flight(self, key: ProviderKey) -> int:
        """Leases out on this resource that occupy no slot."""
        return self._side.get(key, 0)

    def is_held(self, key: ProviderKey) -> bool:
        """Whether any lease is out on this resource."""
        return bool(self._by_key.get(key))

    def long_in_flight(self, key: ProviderKey) -> int:
        """Long leases out on this resource."""
        return self._long.get(key, 0)

    def of(self, key: ProviderKey) -> tuple[Lease, ...]:
        """The leases out on this resource."""
        return tuple(self._by_key.get(key, {}).values())
