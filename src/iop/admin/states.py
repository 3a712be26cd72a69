"""The operation's state machine, and what is legal in which participant state. Pure; both are tables.

Docs and tests are generated from `NEXT` and `LEGALITY`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from iop.admin.enums import AdminOperationKind, AdminOperationState, ParticipantState
from iop.core.errors import LocalProtocolError

__all__ = [
    "LEGALITY",
    "NEXT",
    "Input",
    "Legality",
    "legality_of",
    "participant_state",
    "step",
]


@enum.unique
class Input(enum.Enum):
    """What can happen to an operation."""

    STARTED = "started"
    CANCEL_REQUESTED = "cancel_requested"
    UNDO_STARTED = "undo_started"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


_S = AdminOperationState

NEXT: Final[Mapping[tuple[AdminOperationState, Input], AdminOperationState]] = MappingProxyType(
    {
        (_S.PENDING, Input.STARTED): _S.RUNNING,
        (_S.PENDING, Input.CANCEL_REQUESTED): _S.CANCELLING,
        (_S.PENDING, Input.FAILED): _S.FAILED,
        (_S.PENDING, Input.SUPERSEDED): _S.CANCELLED,
        (_S.RUNNING, Input.CANCEL_REQUESTED): _S.CANCELLING,
        (_S.RUNNING, Input.UNDO_STARTED): _S.ROLLING_BACK,
        (_S.RUNNING, Input.COMPLETED): _S.SUCCEEDED,
        (_S.RUNNING, Input.FAILED): _S.FAILED,
        (_S.RUNNING, Input.SUPERSEDED): _S.CANCELLED,
        (_S.CANCELLING, Input.UNDO_STARTED): _S.ROLLING_BACK,
        (_S.CANCELLING, Input.CANCELLED): _S.CANCELLED,
        (_S.CANCELLING, Input.SUPERSEDED): _S.CANCELLED,
        (_S.ROLLING_BACK, Input.FAILED): _S.FAILED,
        (_S.ROLLING_BACK, Input.CANCELLED): _S.CANCELLED,
        (_S.ROLLING_BACK, Input.SUPERSEDED): _S.CANCELLED,
    }
)


def step(state: AdminOperationState, event: Input) -> AdminOperationState:
    """The next state.

    Raises:
        LocalProtocolError: the move is not in the table; nothing changed.
    """
    try:
        return NEXT[state, event]
    except KeyError:
        raise LocalProtocolError(
            f"an operation that is {state.name} cannot take {event.name}", reason="INVALID_TRANSITION"
        ) from None


@enum.unique
class Legality(enum.Enum):
    """The one answer for a participant state and an operation (AD-48).

    Anything but LEGAL, LEGAL_WITH_PAUSE and SKIPPED is the reason of a FAILED_PRECONDITION.
    """

    LEGAL = "LEGAL"
    """Allowed, subject to its own rules (modes, kinds, epochs)."""
    LEGAL_WITH_PAUSE = "NOT_PAUSED"
    """Allowed when the request carries a pause of its own; else refused with this reason."""
    STALE_EPOCH = "STALE_EPOCH"
    """Refused: no live epoch covers such a participant."""
    RESOURCES_RELEASED = "RESOURCES_RELEASED"
    """Refused until the resources are restored."""
    SKIPPED = "PARTICIPANT_OFFLINE"
    """Left out when selected by `all` or by model; refused with this reason when named."""


_K = AdminOperationKind
_P = ParticipantState
_L = Legality

LEGALITY: Final[Mapping[tuple[ParticipantState, AdminOperationKind], Legality]] = MappingProxyType(
    {
        (_P.ACTIVE, _K.FLUSH_CACHES): _L.LEGAL,
        (_P.ACTIVE, _K.PAUSE): _L.LEGAL,
        (_P.ACTIVE, _K.RESUME): _L.STALE_EPOCH,
        (_P.ACTIVE, _K.RELEASE_RESOURCES): _L.LEGAL_WITH_PAUSE,
        (_P.ACTIVE, _K.RESTORE_RESOURCES): _L.STALE_EPOCH,
        (_P.ACTIVE, _K.UPDATE_WEIGHTS): _L.LEGAL_WITH_PAUSE,
        (_P.ACTIVE, _K.START_PROFILE): _L.LEGAL,
        (_P.ACTIVE, _K.STOP_PROFILE): _L.LEGAL,
        (_P.ACTIVE, _K.RECONFIGURE_SERVING): _L.LEGAL,
        (_P.PAUSED, _K.FLUSH_CACHES): _L.LEGAL,
        (_P.PAUSED, _K.PAUSE): _L.LEGAL,
        (_P.PAUSED, _K.RESUME): _L.LEGAL,
        (_P.PAUSED, _K.RELEASE_RESOURCES): _L.LEGAL,
        (_P.PAUSED, _K.RESTORE_RESOURCES): _L.STALE_EPOCH,
        (_P.PAUSED, _K.UPDATE_WEIGHTS): _L.LEGAL,
        (_P.PAUSED, _K.START_PROFILE): _L.LEGAL,
        (_P.PAUSED, _K.STOP_PROFILE): _L.LEGAL,
        (_P.PAUSED, _K.RECONFIGURE_SERVING): _L.LEGAL,
        (_P.RELEASED, _K.FLUSH_CACHES): _L.LEGAL,
        (_P.RELEASED, _K.PAUSE): _L.LEGAL,
        (_P.RELEASED, _K.RESUME): _L.RESOURCES_RELEASED,
        (_P.RELEASED, _K.RELEASE_RESOURCES): _L.LEGAL,
        (_P.RELEASED, _K.RESTORE_RESOURCES): _L.LEGAL,
        (_P.RELEASED, _K.UPDATE_WEIGHTS): _L.LEGAL,
        (_P.RELEASED, _K.START_PROFILE): _L.RESOURCES_RELEASED,
        (_P.RELEASED, _K.STOP_PROFILE): _L.LEGAL,
        (_P.RELEASED, _K.RECONFIGURE_SERVING): _L.RESOURCES_RELEASED,
        # Quarantine refuses nothing by itself: any operation may select it (AD-31). What the operation needs
        # (a live epoch, a pause) is then judged by what else holds of the participant.
        **{(_P.QUARANTINED, kind): _L.LEGAL for kind in _K},
        **{(_P.OFFLINE, kind): _L.SKIPPED for kind in _K},
    }
)


def legality_of(state: ParticipantState, kind: AdminOperationKind) -> Legality:
    """The table's answer; total over both enums."""
    return LEGALITY[state, kind]


def participant_state(
    *, connected: bool, quarantined: bool, released: bool, paused: bool
) -> ParticipantState:
    """The most restrictive state that holds (AD-50)."""
    if not connected:
        return ParticipantState.OFFLINE
    if quarantined:
        return ParticipantState.QUARANTINED
    if released:
        return ParticipantState.RELEASED
    if paused:
        return ParticipantState.PAUSED
    return ParticipantState.ACTIVE
