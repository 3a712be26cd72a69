"""The driver port: what each level supplies so that the operation core can act on its participants.

The core knows neither ranks nor Nodes. A level implements `ParticipantDriver`; a third party can serve the whole
contract by writing only that.

Gates are levels, not edges: the core says for each participant whether inference may enter, as often as it likes, and
the driver makes it so. **A participant that `apply_gates` has never opened takes no inference**: that is the
reconcile gate of a newcomer (AD-35). Order when closing (AD-39): `apply_gates` shuts the outer admission; then
`execute(PauseStep)` ends or freezes the in-flight work that the driver itself holds for the group and after that stops
the engine. Opening is the reverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from iop.admin.enums import AdmissionPolicy, PauseMode
from iop.admin.overrides import FileValues
from iop.admin.profile import ParticipantInfo
from iop.admin.steps import ParticipantReadBack, StepCall, StepProgress, StepResult
from iop.core.ids import GroupId, ParticipantId

__all__ = ["RECONCILIATION", "AdmissionGate", "ParticipantDriver", "ProgressSink"]

RECONCILIATION: Final = "reconciliation"
"""Among what holds a gate: its state is not known to be the desired one yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionGate:
    """Whether one participant takes inference, and what happens to new requests if not.

    Attributes:
        is_open: no gate holds it.
        admission: for new requests while closed; over an overlap REJECT beats QUEUE (AD-41).
        mode: the hardest pause mode that holds, `None` when closed for another reason.
        held_by: what keeps it closed, for people: `epoch 7`, `operation op-...`, `quarantine`, `reconciliation`.
    """

    is_open: bool
    admission: AdmissionPolicy = AdmissionPolicy.QUEUE
    mode: PauseMode | None = None
    held_by: tuple[str, ...] = ()


ProgressSink: TypeAlias = Callable[[StepProgress], None]
"""Called from the event loop while a step runs; never blocks, never raises. May be ignored by the core."""


class ParticipantDriver(Protocol):
    """Carries steps to participants. Every method may be called concurrently for different groups."""

    def participants(self) -> Sequence[ParticipantInfo]:
        """All configured participants, connected or not, in a stable order. Cheap, no waiting."""
        ...

    def groups(self) -> frozenset[GroupId]:
        """All configured groups, also those whose participants are not known yet. Cheap, no waiting.

        A quarantined group that is not among them has left the configuration, and its quarantine ends (AD-31).
        """
        ...

    def file_values(self) -> FileValues:
        """What the config says now for reconfigurable fields, for every configured group. Cheap, no waiting.

        A group that has no such key maps to nothing; it must not be absent, or its overrides are dropped (AD-47).
        """
        ...

    def apply_overrides(self, overrides: FileValues) -> None:
        """Make what the driver itself enforces (admission slots, enabled or not) so, over the file's values (AD-47).

        The whole of them, each time: what is not named goes by the file again. Engines are told by steps instead.
        Never blocks. Idempotent.
        """
        ...

    async def execute(self, call: StepCall, report: ProgressSink) -> StepResult:
        """Execute one step on one group, or give the remembered answer of the same step (AD-36).

        Waits for a participant that is briefly unreachable, and repeats the step when it is back; the core stops the
        wait by cancelling. Failures of participants are outcomes, not exceptions.

        Raises:
            PreconditionFailed: `STALE_STEP`, an older step than the last one seen.
            Unavailable: nobody could be asked; treated as PARTICIPANT_LOST of the whole group.
        Cancellation: stops waiting; the step itself may still take effect, which read-back tells.
        """
        ...

    async def read_back(self, participant_ids: Sequence[ParticipantId]) -> Sequence[ParticipantReadBack]:
        """Ask the engines how they stand now; one answer per id. Who cannot be asked is `reachable=False`."""
        ...

    def silent(self, participant_ids: Sequence[ParticipantId]) -> Mapping[ParticipantId, str]:
        """Which of them owe an answer that has been long in coming, and what to say of each. Cheap, no waiting.

        Asked when a step's time is up, so that an error names who held it up (AD-31). Empty where that is not known.
        """
        ...

    async def apply_gates(self, gates: Mapping[ParticipantId, AdmissionGate]) -> None:
        """Make outer admission so. Returns when no new inference can enter what is closed.

        Ids not in the mapping keep their gate. Idempotent.
        """
        ...
