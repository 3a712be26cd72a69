"""Every check, one module per family."""

from __future__ import annotations

from types import ModuleType

from iop.conformance.checks import (
    auth,
    cancelling,
    conflicts,
    discovery,
    epochs,
    events,
    faults,
    idempotency,
    observers,
    operations,
    order,
    plans,
    resources,
    restarts,
    revisions,
    service,
    shape,
    tensors,
    traffic,
    unknown,
    weights,
)
from iop.conformance.model import Check

__all__ = ["all_checks"]

_FAMILIES: tuple[ModuleType, ...] = (
    service,
    auth,
    discovery,
    shape,
    unknown,
    order,
    events,
    idempotency,
    revisions,
    epochs,
    plans,
    operations,
    resources,
    observers,
    conflicts,
    cancelling,
    traffic,
    weights,
    tensors,
    faults,
    restarts,
)


def all_checks() -> tuple[Check, ...]:
    """All checks, in the order in which they run: cheap and harmless ones first, restarts last."""
    found = [item for family in _FAMILIES for item in vars(family).values() if isinstance(item, Check)]
    return tuple({one.check_id: one for one in found}.values())
