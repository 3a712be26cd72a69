"""The providers of one Edge: what the config says of each, and what its Node has told of it since. Pure.

Methods that change something return the providers that it touched; who waits for them is for the pools to settle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from iop.core.ids import Generation, ModelId, NodeId, ProviderId
from iop.edge.calls import GENERATIONS, ProviderKey
from iop.edge.pools.breaker import Breaker
from iop.edge.pools.gates import OPEN_GATE, RECONCILE_GATE, ProviderGate
from iop.edge.pools.provider import Overrides, Provider, opaque_name
from iop.edge.snapshot import AdapterSpec, EdgeSnapshot, PoolMember

__all__ = ["Roster"]


class Roster:
    """Who is configured, in which generation it is online, and who serves which model.

    Attributes:
        providers: by key, in the config's order; one that was removed stays until its last run has ended (EN-114).
        members: by model, who serves it.
    """

    def __init__(self) -> None:
        self.providers: dict[ProviderKey, Provider] = {}
        self.members: dict[ModelId, tuple[tuple[PoolMember, Provider], ...]] = {}
        self._generations: dict[NodeId, Generation] = {}
        """Of all Nodes that are activated, also while the config names no provider on them."""
        self._leaving: dict[NodeId, Generation] = {}
        """Of Nodes that said that they stop, also before they were activated (EN-109)."""

    # ---- what Nodes tell ----

    def activate(
        self, node: NodeId, generation: Generation, absent: Collection[ProviderId]
    ) -> list[Provider]:
        """A Node's resources come online in this generation, gates permitting (EN-32)."""
        self._generations[node] = generation
        mine = [p for p in self._of(node) if p.is_configured]
        for provider in mine:
            provider.generation = generation
            provider.is_started = provider.key.provider not in absent
            provider.is_leaving = self._leaving.get(node) == generation
            provider.breaker.reset()
            provider.busy_until = 0.0
            provider.learn(frozenset())
            _await_reconciliation(provider)
        return mine

    def set_absent(
        self, node: NodeId, generation: Generation, absent: Collection[ProviderId]
    ) -> list[Provider]:
        """Which adapters of this generation run now, and which do not (EN-80)."""
        touched = [
            p
            for p in self._of(node)
            if p.generation == generation and p.is_started != (p.key.provider not in absent)
        ]
        for provider in touched:
            provider.is_started = not provider.is_started
            _await_reconciliation(provider)
        return touched

    def set_leaving(self, node: NodeId, generation: Generation) -> list[Provider]:
        """A Node said that it stops, perhaps before its generation is activated (EN-17, EN-109)."""
        self._leaving[node] = generation
        touched = [p for p in self._of(node) if p.generation == generation and not p.is_leaving]
        for provider in touched:
            provider.is_leaving = True
        return touched

    def set_missing(
        self, node: NodeId, generation: Generation, missing: Mapping[ProviderId, frozenset[str]]
    ) -> list[Provider]:
        """Which routes the engines of a Node lack, by adapter (EN-51)."""
        touched = [p for p in self._told(node, generation, missing) if p.missing != missing[p.key.provider]]
        for provider in touched:
            provider.learn(missing[provider.key.provider])
        return touched

    def set_ranks(
        self,
        node: NodeId,
        generation: Generation,
        told: Mapping[ProviderId, Mapping[str, frozenset[int]]],
    ) -> list[Provider]:
        """Which data-parallel ranks the engines of a Node have, by adapter and target (SF-21)."""
        touched = [p for p in self._told(node, generation, told) if p.told_ranks != told[p.key.provider]]
        for provider in touched:
            provider.told_ranks = told[provider.key.provider]
        return touched

    def end(self, node: NodeId, generation: Generation) -> list[Provider]:
        """A generation ended; all providers of the Node (EN-31)."""
        if self._generations.get(node) == generation:
            del self._generations[node]
        if self._leaving.get(node) == generation:
            del self._leaving[node]
        mine = list(self._of(node))
        for provider in mine:
            if provider.generation == generation:
                provider.generation = None
                provider.is_leaving = False
                provider.breaker.reset()
                provider.learn(frozenset())
        return mine

    # ---- what operators and the config say ----

    def set_gates(self, gates: Iterable[tuple[ProviderKey, ProviderGate]]) -> list[Provider]:
        """Close or open providers (AD-39)."""
        touched: list[Provider] = []
        for key, gate in gates:
            provider = self.providers.get(key)
            if provider is not None and provider.gate != gate:
                provider.gate = gate
                touched.append(provider)
        return touched

    def adopt(self, snapshot: EdgeSnapshot) -> list[Provider]:
        """Take another config; those that it does not name any more, which may go when they are idle (EN-114)."""
        before = {key for key, provider in self.providers.items() if provider.is_configured}
        for provider in self.providers.values():
            provider.is_configured = False
            provider.models = ()
        for node in snapshot.nodes.values():
            for spec in node.adapters.values():
                self._adopt(snapshot, node.id, spec, before)
        self.members.clear()
        self.members.update(
            (model.id, tuple((member, self.providers[member.key]) for member in model.members))
            for model in snapshot.models.values()
        )
        return [provider for provider in self.providers.values() if not provider.is_configured]

    def _adopt(
        self, snapshot: EdgeSnapshot, node: NodeId, spec: AdapterSpec, before: Collection[ProviderKey]
    ) -> None:
        key = ProviderKey(node=node, provider=spec.provider)
        targets = {
            model.id: next(member.target for member in model.members if member.key == key)
            for model in snapshot.models_of(key)
        }
        models = tuple(targets)
        known = self.providers.get(key)
        if known is None:
            generation = self._generations.get(node)
            self.providers[key] = Provider(
                key=key,
                name=opaque_name(key),
                spec=spec,
                breaker=Breaker(snapshot.breaker),
                generation=generation,
                is_leaving=generation is not None and self._leaving.get(node) == generation,
                gate=RECONCILE_GATE if spec.is_administered else OPEN_GATE,
                models=models,
                targets=targets,
            )
            return
        if key not in before or spec.is_administered != known.spec.is_administered:
            # Whoever held its gate holds it no more; a gate without a holder would never open (AD-39).
            known.gate = RECONCILE_GATE if spec.is_administered else OPEN_GATE
        # AD-47: an override holds until the file changes that key.
        held = known.overrides
        known.overrides = Overrides(
            capacity=held.capacity if spec.capacity == known.spec.capacity else None,
            long_capacity=held.long_capacity if spec.long_capacity == known.spec.long_capacity else None,
            enabled=held.enabled if spec.enabled == known.spec.enabled else None,
        )
        if spec.type != known.spec.type:
            known.told_ranks = {}
        known.spec, known.models, known.targets, known.is_configured = spec, models, targets, True
        known.learn(known.missing)
        known.breaker.configure(snapshot.breaker)

    # ---- views ----

    def gate_of(self, key: ProviderKey) -> ProviderGate | None:
        """The gate of one resource."""
        provider = self.providers.get(key)
        return None if provider is None else provider.gate

    def generation_of(self, key: ProviderKey) -> Generation | None:
        """The generation in which a resource is online."""
        provider = self.providers.get(key)
        return None if provider is None else provider.generation

    def name_of(self, key: ProviderKey) -> str:
        """The opaque name of a resource."""
        provider = self.providers.get(key)
        return opaque_name(key) if provider is None else provider.name

    def serves(self, key: ProviderKey, operation: str) -> bool:
        """Whether a resource can serve an operation, by one of its dialects; also while it is away."""
        provider = self.providers.get(key)
        return provider is not None and operation in provider.served

    def ranks_of(self, model_id: ModelId) -> frozenset[int]:
        """The data-parallel ranks that a generation can ask for, also of enabled providers that are away."""
        members = self.members.get(model_id, ())
        able = (p for _, p in members if p.is_enabled and not p.served.isdisjoint(GENERATIONS))
        return frozenset().union(*(p.ranks_of(model_id) for p in able))

    # ---- inner ----

    def _of(self, node: NodeId) -> Iterable[Provider]:
        return (p for p in self.providers.values() if p.key.node == node)

    def _told(self, node: NodeId, generation: Generation, names: Iterable[ProviderId]) -> Iterable[Provider]:
        """Those of these names that are online in this generation; who is not hears nothing of it."""
        for name in names:
            provider = self.providers.get(ProviderKey(node=node, provider=name))
            if provider is not None and provider.generation == generation:
                yield provider


def _await_reconciliation(provider: Provider) -> None:
    """Close an administered provider: its state is not confirmed, and it opens by ``set_gates`` alone (AD-35)."""
    if provider.spec.is_administered and provider.gate.is_open:
        provider.gate = RECONCILE_GATE
