"""One resource as the pools hold it: what it could do, and whether it may do more now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from iop.core.ids import Generation, ModelId
from iop.edge.calls import (
    GENERATIONS,
    OPERATIONS,
    RUN_OPERATIONS,
    SIDE_OPERATIONS,
    SIDE_WORK_MAX,
    TOKENIZE,
    ProviderKey,
    Route,
    ways_to,
)
from iop.edge.pools.breaker import Breaker
from iop.edge.pools.gates import OPEN_GATE, GateMode, ProviderGate
from iop.edge.pools.leases import LeaseBook
from iop.edge.pools.queue import ClassKey
from iop.edge.snapshot import AdapterSpec

_UNLIKE: Final = frozenset({"openengine"})
"""Types of adapters for runs whose servers differ in what they can be told; all of another type are alike."""


def opaque_name(key: ProviderKey) -> str:
    """A stable name that tells callers providers apart and nothing else (EN-04, SF-13)."""
    return "p-" + sha256(f"{key.node}\0{key.provider}".encode()).hexdigest()[:10]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Values that reconfiguration put over the file's; ``None`` goes by the file (AD-47)."""

    capacity: int | None = None
    long_capacity: int | None = None
    enabled: bool | None = None


NO_OVERRIDES: Final = Overrides()

_NO_RANKS: Final[frozenset[int]] = frozenset()


@dataclass(slots=True, kw_only=True)
class Provider:
    """One resource over all its generations (EN-92).

    Attributes:
        generation: of the Node that is activated now; ``None`` while it is away.
        is_started: its adapter came up on the Node; else the Node would refuse whatever it is sent.
        is_leaving: its Node stops: what runs may finish, and nothing new is taken (EN-109).
        overrides: values that reconfiguration put over the file's (AD-47).
        missing: routes that its engine was found not to have, as its Node told in this generation (EN-51).
        told_ranks: by target, the data-parallel ranks that its engine was last found to have. They are kept while its
            Node is away: whoever asks for one waits for it like for any other provider.
        targets: by model, what it serves it as.
        passed_over: picks that the long (True) or short (False) head lost to the other in a row (EN-111).
    """

    key: ProviderKey
    name: str
    spec: AdapterSpec
    breaker: Breaker
    generation: Generation | None = None
    gate: ProviderGate = OPEN_GATE
    busy_until: float = 0.0
    last_picked: int = 0
    is_configured: bool = True
    is_started: bool = True
    is_leaving: bool = False
    models: tuple[ModelId, ...] = ()
    overrides: Overrides = NO_OVERRIDES
    missing: frozenset[str] = frozenset()
    told_ranks: Mapping[str, frozenset[int]] = field(default_factory=dict)
    targets: Mapping[ModelId, str] = field(default_factory=dict)
    passed_over: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    offered: frozenset[str] = field(init=False)
    """Operations that it is asked: as configured, without what is missing."""
    served: frozenset[str] = field(init=False)
    """Those that it can serve by one of these, converted ones too."""

    def __post_init__(self) -> None:
        self.learn(self.missing)

    def learn(self, missing: frozenset[str]) -> None:
        """Work out what it serves; when the config or the Node says something new, not for each request."""
        self.missing = missing
        self.offered = _configured(self.spec) - missing
        self.served = _served_by(self.offered)

    @property
    def served_as_configured(self) -> frozenset[str]:
        """What it would serve, were nothing missing."""
        return _served_by(_configured(self.spec))

    @property
    def capacity(self) -> int:
        """Configured or reconfigured slots."""
        return self.spec.capacity if self.overrides.capacity is None else self.overrides.capacity

    @property
    def long_capacity(self) -> int:
        """How many of them may be long."""
        put = self.overrides.long_capacity
        own = self.spec.long_capacity if put is None else put
        return min(own, self.capacity)

    @property
    def is_enabled(self) -> bool:
        """Whether the config, or who reconfigured it, wants it used."""
        wanted = self.spec.enabled if self.overrides.enabled is None else self.overrides.enabled
        return self.is_configured and wanted

    @property
    def is_live(self) -> bool:
        """There, and wanted; gates and load aside."""
        return self.generation is not None and self.is_started and not self.is_leaving and self.is_enabled

    def serves(self, key: ClassKey) -> bool:
        """Whether it could ever take a demand of this class."""
        return (
            key.operation in self.served
            and (not key.is_long or self.long_capacity > 0)
            and (not key.barred or key.barred.isdisjoint(self.ways(key.operation)))
            and (key.at is None or key.at.rank in self.ranks_of(key.at.model))
        )

    def ranks_of(self, model: ModelId) -> frozenset[int]:
        """The data-parallel ranks of its engine that can be asked for when it serves this model."""
        return self.told_ranks.get(self.targets.get(model, ""), _NO_RANKS)

    def ways(self, operation: str) -> tuple[str, str]:
        """In which of the ways there are it is asked for an operation: how it is put, and who takes it so (SF-10).

        What cannot be put in a way cannot be told anybody who is asked in it. What one provider had no words for,
        nobody of the same second name has: of a tunnel those who offer the same operation, of a run those of its type.
        """
        if self.spec.route is Route.RUN:
            return "run", f"run {self.key if self.spec.type in _UNLIKE else self.spec.type}"
        way = next((name for name in ways_to(operation) if name in self.offered), "")
        return way, way

    def has_room(self, key: ClassKey, leases: LeaseBook, now: float) -> bool:
        """Whether a demand of this class may begin here now."""
        if key.operation in SIDE_OPERATIONS:
            # Neither a full engine nor one whose generations fail says anything of its tokenizer.
            return (
                self.is_live
                and self.gate.mode is GateMode.OPEN
                and self.serves(key)
                and leases.side_in_flight(self.key) < SIDE_WORK_MAX
            )
        return (
            self.generation is not None
            and self.is_started
            and not self.is_leaving
            and self.gate.mode is GateMode.OPEN
            and leases.in_flight(self.key) < self.capacity
            and self.is_enabled
            and self.busy_until <= now
            and self.serves(key)
            and (not key.is_long or leases.long_in_flight(self.key) < self.long_capacity)
            and self.breaker.admits(now)
        )


def _configured(spec: AdapterSpec) -> frozenset[str]:
    if spec.operations is not None:
        return spec.operations & (OPERATIONS | {TOKENIZE})
    return RUN_OPERATIONS if spec.route is Route.RUN else OPERATIONS | (spec.profile_operations & {TOKENIZE})


def _served_by(offered: frozenset[str]) -> frozenset[str]:
    asked = (*OPERATIONS, *GENERATIONS)
    return frozenset(name for name in asked if not offered.isdisjoint(ways_to(name)))
