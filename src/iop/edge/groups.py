"""One provider's ranks as a group of admin participants, and the one gate that follows from theirs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from iop.admin.enums import AdmissionPolicy
from iop.admin.participant import RECONCILIATION, AdmissionGate
from iop.admin.profile import ParticipantInfo
from iop.core.ids import GroupId, ParticipantId
from iop.edge.calls import ProviderKey
from iop.edge.pools import OPEN_GATE, RECONCILE_GATE, GateMode, ProviderGate


def group_id(key: ProviderKey) -> GroupId:
    """The group of one provider."""
    return GroupId(f"{key.node}/{key.provider}")


@dataclass(slots=True, kw_only=True)
class Group:
    """What is known of one provider's ranks.

    Attributes:
        local_id: the Node's own name of the group.
        infos: by our id, in rank order.
        local_of: the Node's own participant ids by ours.
        is_current: told by the generation that is connected now.
        joined: how often a generation of its Node became ready.
        gates: as the core last said, since the last activation.
    """

    key: ProviderKey
    local_id: str = ""
    infos: dict[ParticipantId, ParticipantInfo] = field(default_factory=dict)
    local_of: dict[ParticipantId, str] = field(default_factory=dict)
    versions: dict[ParticipantId, str] = field(default_factory=dict)
    is_current: bool = False
    joined: int = 0
    trouble: str = ""
    gates: dict[ParticipantId, AdmissionGate] = field(default_factory=dict)

    def gate(self) -> ProviderGate:
        """The one gate that follows from those of the ranks; a rank that was never opened keeps it closed."""
        if not self.infos:
            return RECONCILE_GATE
        held: dict[str, None] = {}
        modes: set[GateMode] = set()
        for participant in self.infos:
            gate = self.gates.get(participant)
            if gate is None:
                held[RECONCILIATION] = None
                modes.add(GateMode.RECONCILING)
            elif not gate.is_open:
                held.update(dict.fromkeys(gate.held_by))
                modes.add(_mode_of(gate))
        if not modes:
            return OPEN_GATE
        strictest = next(mode for mode in _STRICTEST_FIRST if mode in modes)
        return ProviderGate(mode=strictest, held_by=tuple(held))


_STRICTEST_FIRST: Final = (GateMode.QUARANTINED, GateMode.REJECT, GateMode.QUEUE, GateMode.RECONCILING)


def _mode_of(gate: AdmissionGate) -> GateMode:
    if "quarantine" in gate.held_by:
        return GateMode.QUARANTINED
    if all(holder == RECONCILIATION for holder in gate.held_by):
        return GateMode.RECONCILING
    return GateMode.REJECT if gate.admission is AdmissionPolicy.REJECT else GateMode.QUEUE
