"""What becomes of unfinished operations when a process starts again (AD-26). Pure.

Recovery is list -> plan -> execute, through the same path as the first execution: the plan only says in which
direction the executor goes on.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from iop.admin.enums import AdminErrorCode, AdminOperationKind, AdminOperationState
from iop.admin.records import OperationRecord, StepRecord
from iop.admin.results import AdminError

__all__ = ["Direction", "RecoveryPlan", "plan_recovery"]


@enum.unique
class Direction(enum.Enum):
    """Where an interrupted operation goes."""

    FORWARD = "forward"
    BACK = "back"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """Direction, and why if it is back."""

    direction: Direction
    failure: AdminError | None = None


_TWO_PHASE = frozenset({AdminOperationKind.UPDATE_WEIGHTS, AdminOperationKind.RECONFIGURE_SERVING})


def plan_recovery(record: OperationRecord, steps: Sequence[StepRecord]) -> RecoveryPlan:
    """Decide from the journal alone.

    Steps are idempotent, so most kinds go on where they were. Two-phase kinds that did not pass the point of no return
    go back: what was staged in a process that may be gone is not to be trusted.
    """
    moves = record.moves
    if moves.state is AdminOperationState.ROLLING_BACK:
        return RecoveryPlan(direction=Direction.BACK, failure=moves.failure or _interrupted())
    if moves.committed:
        return RecoveryPlan(direction=Direction.FORWARD)
    if moves.cancel_requested:
        return RecoveryPlan(direction=Direction.BACK, failure=_interrupted())
    if record.spec.kind in _TWO_PHASE and steps:
        return RecoveryPlan(direction=Direction.BACK, failure=_interrupted())
    return RecoveryPlan(direction=Direction.FORWARD)


def _interrupted() -> AdminError:
    return AdminError(
        code=AdminErrorCode.INTERRUPTED,
        message="the server restarted before the point of no return",
        retryable=True,
    )
