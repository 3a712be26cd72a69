"""The words of the pools: what is asked of them and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import NewType, TypeAlias

from msgspec import Struct

from iop.core.ids import ModelId, RequestId, RunId
from iop.edge.calls import ProviderKey
from iop.edge.pools.leases import Lease

WaiterId = NewType("WaiterId", int)
"""One waiting request; never reused."""


class Demand(Struct, frozen=True, kw_only=True):
    """A wish for one lease.

    Attributes:
        run_id: of the attempt that will run under the lease (EN-118).
        is_long: needs a long slot as well (EN-111).
        number: order of arrival at the Edge, from ``Pools.new_number``; kept over all attempts of a request.
        tried: providers at which earlier attempts of the request failed; others go first.
        target_rank: the data-parallel rank that shall serve it; ``None``: any, as the engine likes (SF-21).
        barred: ways of asking a provider in which the request cannot be said (SF-10), as ``Provider.ways`` names them.
    """

    model: ModelId
    operation: str
    request_id: RequestId
    run_id: RunId
    is_long: bool = False
    priority: int = 0
    session: str = ""
    preferred_provider: str = ""
    number: int = 0
    tried: frozenset[ProviderKey] = frozenset()
    target_rank: int | None = None
    barred: frozenset[str] = frozenset()


@unique
class RefusalReason(Enum):
    """Why no lease is given; the values are the stable codes that callers see (EN-110)."""

    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_CAPACITY = "no_capacity"
    PAUSED = "paused"
    SHUTDOWN = "edge_shutdown"
    MODEL_NOT_FOUND = "model_not_found"
    OPERATION_NOT_SUPPORTED = "operation_not_supported"
    LONG_CONTEXT_NOT_SUPPORTED = "long_context_not_supported"
    TARGET_RANK_NOT_SERVED = "target_rank_not_served"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No lease, for good. ``retry_after_s`` is a whole number of seconds where a retry makes sense."""

    reason: RefusalReason
    retry_after_s: float | None = None
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The demand waits; a later settlement names its id. ``position``: how many of its queue stood ahead."""

    waiter: WaiterId
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A waiter got its lease."""

    waiter: WaiterId
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """A waiter will not get one."""

    waiter: WaiterId
    refusal: Refusal


Settlement: TypeAlias = Granted | Denied


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderFigures:
    """One resource for status (EN-91, EN-92).

    Attributes:
        status: ``available``, ``paused``, ``disabled``, ``draining`` or ``unavailable``.
        health: ``online``, ``failing`` (its breaker is tripped) or ``offline``.
    """

    key: ProviderKey
    name: str
    status: str
    health: str
    capacity: int
    in_flight: int
    queued: int
    long_capacity: int
    long_in_flight: int
    long_queued: int
    gates: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """One model for status; ``paused``: every live provider is held by a pause."""

    model: ModelId
    providers: tuple[ProviderKey, ...]
    queue_depth: int
    queue_max: int
    paused: bool
    can_admit: bool


class CandidateView(Struct, frozen=True, kw_only=True):
    """Why a pool member was or was not eligible, for ``iop explain``."""

    key: ProviderKey
    name: str
    eligible: bool
    why: str
