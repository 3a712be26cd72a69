"""Provider pools: who may run where, and who waits (EN-60 to EN-62, EN-90 to EN-92, EN-110, EN-111, EN-116).

Pure: every method takes the time and returns what was decided. `core` ties the parts together: `leases` counts
occupied capacity, `queue` holds waiters, `gates` says what keeps a provider closed, `breaker` leaves failing ones
alone, `selection` picks among those with room.
"""

from iop.edge.pools.breaker import Breaker, Verdict
from iop.edge.pools.core import Pools
from iop.edge.pools.gates import OPEN_GATE, RECONCILE_GATE, GateMode, ProviderGate
from iop.edge.pools.leases import Lease, LeaseBook, LeaseKind
from iop.edge.pools.model import (
    Demand,
    Denied,
    Granted,
    ModelFigures,
    ProviderFigures,
    Refusal,
    RefusalReason,
    Settlement,
    WaiterId,
    Waiting,
)
from iop.edge.pools.provider import NO_OVERRIDES, Overrides

__all__ = [
    "NO_OVERRIDES",
    "OPEN_GATE",
    "RECONCILE_GATE",
    "Breaker",
    "Demand",
    "Denied",
    "GateMode",
    "Granted",
    "Lease",
    "LeaseBook",
    "LeaseKind",
    "ModelFigures",
    "Overrides",
    "Pools",
    "ProviderFigures",
    "ProviderGate",
    "Refusal",
    "RefusalReason",
    "Settlement",
    "Verdict",
    "WaiterId",
    "Waiting",
]
