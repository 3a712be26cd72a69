"""What keeps a provider closed for new work: admin epochs, operations, quarantine, reconciliation (AD-39)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

from iop.admin.participant import RECONCILIATION


@unique
class GateMode(Enum):
    """What a gate means for those who want in.

    Attributes:
        OPEN: nothing holds the provider.
        QUEUE: wait; it will open (a pause, a running operation).
        REJECT: refuse at once (a pause that asked for it).
        RECONCILING: not yet known to be fit (EN-32, AD-35); waits like a pool without capacity.
        QUARANTINED: known not to be fit (AD-31); like a provider that is not there.
    """

    OPEN = "open"
    QUEUE = "queue"
    REJECT = "reject"
    RECONCILING = "reconciling"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderGate:
    """The one gate of a provider, combined from all that holds any of its ranks.

    Attributes:
        held_by: in words for status: ``epoch 7``, ``operation op-...``, ``quarantine``, ``reconciliation``. A closed
            gate always says who holds it (AD-39).
    """

    mode: GateMode
    held_by: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether new work may enter."""
        return self.mode is GateMode.OPEN


OPEN_GATE: Final = ProviderGate(mode=GateMode.OPEN)
RECONCILE_GATE: Final = ProviderGate(mode=GateMode.RECONCILING, held_by=(RECONCILIATION,))
