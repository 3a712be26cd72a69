"""Who keeps which participant from taking inference. Pure.

A gate belongs to a pause epoch, to a running operation, to a quarantine or to a reconciliation. A participant takes
inference only when none holds it; so no gate can stay closed without something that says so (AD-39).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from iop.admin.desired import Desired, covering_pauses
from iop.admin.enums import AdmissionPolicy, PauseMode
from iop.admin.participant import RECONCILIATION, AdmissionGate
from iop.admin.profile import ParticipantInfo
from iop.admin.records import OperationRecord
from iop.admin.requests import PauseSpec, UpdateWeightsRequest
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = ["gates_of"]

_OPEN: Final = AdmissionGate(is_open=True, admission=AdmissionPolicy.QUEUE)
_RECONCILING: Final = AdmissionGate(is_open=False, admission=AdmissionPolicy.QUEUE, held_by=(RECONCILIATION,))
"""Nearly all of a fleet nearly always: at its start each group that becomes known asks for the gates of everybody."""


def gates_of(
    desired: Desired,
    running: Mapping[OperationId, OperationRecord],
    participants: Iterable[ParticipantInfo],
    *,
    unreconciled: frozenset[GroupId],
) -> Mapping[ParticipantId, AdmissionGate]:
    """The gate of every participant.

    Args:
        unreconciled: groups whose state was not yet found, or brought, equal to the desired one (AD-35).
    """
    holders = _operation_holders(running)
    return {
        p.participant_id: _gate(desired, p, holders.get(p.participant_id, ()), p.group_id in unreconciled)
        for p in participants
    }


def _operation_holders(
    running: Mapping[OperationId, OperationRecord],
) -> Mapping[ParticipantId, tuple[tuple[str, PauseSpec], ...]]:
    """Operations that hold a gate of their own (UpdateWeights with a quiesce)."""
    holders: dict[ParticipantId, tuple[tuple[str, PauseSpec], ...]] = {}
    for record in running.values():
        request = record.spec.request
        if not record.spec.gates_operation or not isinstance(request, UpdateWeightsRequest):
            continue
        if request.quiesce is None:
            continue
        for participant_id in record.spec.participant_ids:
            held = (f"operation {record.operation_id}", request.quiesce)
            holders[participant_id] = (*holders.get(participant_id, ()), held)
    return holders


def _gate(
    desired: Desired,
    participant: ParticipantInfo,
    operations: tuple[tuple[str, PauseSpec], ...],
    is_unreconciled: bool,
) -> AdmissionGate:
    if not (desired.pauses or operations or participant.group_id in desired.quarantines):
        return _RECONCILING if is_unreconciled else _OPEN
    pauses = covering_pauses(desired, participant)
    specs = [p.spec for p in pauses] + [spec for _, spec in operations]
    held_by = [f"epoch {p.epoch}" for p in pauses] + [name for name, _ in operations]
    is_rejecting = any(s.admission is AdmissionPolicy.REJECT for s in specs)
    if participant.group_id in desired.quarantines:
        held_by.append("quarantine")
        # Nobody knows when a quarantine ends, so waiting for it would hang callers.
        is_rejecting = True
    if is_unreconciled:
        held_by.append(RECONCILIATION)
    return AdmissionGate(
        is_open=not held_by,
        admission=AdmissionPolicy.REJECT if is_rejecting else AdmissionPolicy.QUEUE,
        mode=_hardest(specs),
        held_by=tuple(held_by),
    )


def _hardest(specs: list[PauseSpec]) -> PauseMode | None:
    modes = {s.mode for s in specs}
    for mode in (PauseMode.ABORT, PauseMode.DRAIN, PauseMode.KEEP):
        if mode in modes:
            return mode
    return None
