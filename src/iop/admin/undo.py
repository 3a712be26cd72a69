"""The step that takes a phase back on one group (AD-29, AD-32). Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from iop.admin.desired import Desired, covering_pauses, released_kinds
from iop.admin.profile import ParticipantInfo
from iop.admin.records import Phase, StepRecord
from iop.admin.requests import ServingChange
from iop.admin.steps import ReconfigureStep, RestoreStep, ResumeStep, Step

__all__ = ["undo_body"]


def undo_body(
    phase: Phase, sent: StepRecord, target: Desired, members: Sequence[ParticipantInfo]
) -> Step | None:
    """The undo of a phase for one group; None when there is nothing to take back.

    Args:
        sent: the step as it was sent, with what was read back before it.
        target: the desired state that the rollback goes back to.
        members: the group's participants.
    """
    match phase.undo:
        case ResumeStep():
            # Another pause, or frozen work that was there before, keeps it asleep.
            return None if any(covering_pauses(target, m) for m in members) else phase.undo
        case RestoreStep(kinds=kinds):
            still = {k for m in members for k in released_kinds(target, m.participant_id)}
            back = tuple(k for k in kinds if k not in still)
            return dataclasses.replace(phase.undo, kinds=back) if back else None
        case ReconfigureStep(changes=changes):
            before = {field: value for seen in sent.before for field, value in seen.serving}
            back_changes = tuple(
                ServingChange(field=c.field, value=before[c.field]) for c in changes if c.field in before
            )
            return ReconfigureStep(changes=back_changes) if back_changes else None
        case _:
            return phase.undo
