"""What people are shown of the pools: figures for status, reasons for ``iop explain``."""

from __future__ import annotations

from collections.abc import Iterable

from iop.edge.calls import SIDE_OPERATIONS
from iop.edge.pools.gates import GateMode
from iop.edge.pools.leases import LeaseBook
from iop.edge.pools.model import CandidateView, ModelFigures, ProviderFigures
from iop.edge.pools.provider import Provider
from iop.edge.pools.queue import ClassKey, ModelQueue
from iop.edge.snapshot import ModelSpec


def provider_figures(provider: Provider, leases: LeaseBook, queues: Iterable[ModelQueue]) -> ProviderFigures:
    """One resource for status (EN-91, EN-92). Zero and offline while its Node is away."""
    status, health, reason = _health(provider)
    if not (provider.is_live or provider.is_leaving):
        return ProviderFigures(
            key=provider.key,
            name=provider.name,
            status=status,
            health=health,
            capacity=0,
            in_flight=0,
            queued=0,
            long_capacity=0,
            long_in_flight=0,
            long_queued=0,
            gates=provider.gate.held_by,
            reason=reason,
        )
    queued = long_queued = 0
    for queue in queues if provider.is_live else ():
        for class_key, lane in queue.classes.items():
            if provider.serves(class_key):
                queued += len(lane)
                long_queued += len(lane) if class_key.is_long else 0
    return ProviderFigures(
        key=provider.key,
        name=provider.name,
        status=status,
        health=health,
        capacity=provider.capacity,
        in_flight=leases.in_flight(provider.key),
        queued=queued,
        long_capacity=provider.long_capacity,
        long_in_flight=leases.long_in_flight(provider.key),
        long_queued=long_queued,
        gates=provider.gate.held_by,
        reason=reason,
    )


def model_figures(model: ModelSpec, providers: Iterable[Provider], queue: ModelQueue) -> ModelFigures:
    """One model for status."""
    live = [provider for provider in providers if provider.is_live]
    paused = [p for p in live if p.gate.mode in (GateMode.QUEUE, GateMode.REJECT)]
    return ModelFigures(
        model=model.id,
        providers=tuple(dict.fromkeys(member.key for member in model.members)),
        queue_depth=queue.depth,
        queue_max=model.queue.max_waiters,
        paused=bool(live) and len(paused) == len(live),
        can_admit=any(p.gate.is_open for p in live),
    )


def candidate_view(provider: Provider, key: ClassKey, leases: LeaseBook, now: float) -> CandidateView:
    """Why this provider is eligible for a demand of this class, or not."""
    why = _obstacle(provider, key, leases, now)
    return CandidateView(key=provider.key, name=provider.name, eligible=not why, why=why or "has room")


def _obstacle(provider: Provider, key: ClassKey, leases: LeaseBook, now: float) -> str:
    if not provider.is_enabled:
        return "disabled"
    if provider.generation is None:
        return "its Node is not connected"
    if not provider.is_started:
        return "its adapter did not start"
    if provider.is_leaving:
        return "its Node is stopping"
    if key.operation not in provider.served:
        if key.operation in provider.served_as_configured:
            return "its engine was found to lack a route for this operation"
        return "does not offer this operation"
    if key.is_long and not provider.long_capacity:
        return "does not offer long context"
    if key.at is not None and key.at.rank not in provider.ranks_of(key.at.model):
        return "its engine does not have this data-parallel rank"
    if not provider.serves(key):
        return "cannot be told a field of this request"
    if not provider.gate.is_open:
        return "held by " + ", ".join(provider.gate.held_by or (provider.gate.mode.value,))
    if key.operation in SIDE_OPERATIONS:
        return "" if provider.has_room(key, leases, now) else "enough side work"
    if not provider.breaker.admits(now):
        return "failing; its breaker is open"
    if provider.busy_until > now:
        return "its Node reported a full local gate"
    if leases.in_flight(provider.key) >= provider.capacity:
        return "no free slot"
    if key.is_long and leases.long_in_flight(provider.key) >= provider.long_capacity:
        return "no free long-context slot"
    return ""


def _health(provider: Provider) -> tuple[str, str, str]:
    if provider.generation is None:
        return (
            "unavailable",
            "offline",
            "its Node is not connected" if provider.is_enabled else "disabled",
        )
    if not provider.is_started:
        return "unavailable", "offline", "its adapter did not start"
    health = "failing" if provider.breaker.is_tripped else "online"
    if provider.is_leaving:
        return "draining", health, "its Node is stopping"
    if not provider.is_enabled:
        return "disabled", health, "disabled"
    if not provider.gate.is_open:
        reason = "held by " + ", ".join(provider.gate.held_by or (provider.gate.mode.value,))
        is_pause = provider.gate.mode in (GateMode.QUEUE, GateMode.REJECT)
        return "paused" if is_pause else "unavailable", health, reason
    return "available", health, "its breaker is open" if health == "failing" else ""
