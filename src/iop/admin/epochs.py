"""Epochs of pauses and releases: which one a request gets, answers or is too late for (AD-14, AD-41). Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from iop.admin.desired import Desired, PauseRecord, ReleaseRecord
from iop.admin.enums import PauseMode, ResourceKind
from iop.admin.profile import ParticipantInfo
from iop.admin.requests import PauseSpec, Target
from iop.admin.targets import widened
from iop.core.errors import PreconditionFailed
from iop.core.ids import ParticipantId

__all__ = ["PauseClaim", "claim_pause", "find_pause", "find_release"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PauseClaim:
    """What a pause request gets.

    Attributes:
        existing_epoch: the caller's own equal pause, answered again; zero when it gets a new epoch.
        replaces: the caller's own softer pauses, which end when the new one completes.
    """

    existing_epoch: int = 0
    replaces: tuple[int, ...] = ()


def claim_pause(
    spec: PauseSpec,
    chosen: Sequence[ParticipantInfo],
    *,
    principal: str,
    desired: Desired,
    binds: Target | None,
) -> PauseClaim:
    """Judge a pause against those that hold already.

    Args:
        binds: the selector, when it also binds participants that join later.

    Raises:
        PreconditionFailed: PAUSE_MODE for a softer mode on one's own pause, and for DRAIN over frozen work.
    """
    ids = {p.participant_id for p in chosen}
    overlapping = [p for p in desired.pauses.values() if any(p.covers(info) for info in chosen)]
    replaces: list[int] = []
    for pause in overlapping:
        if pause.principal == principal:
            if _is_same(pause, spec, ids):
                return PauseClaim(existing_epoch=pause.epoch)
            _check_mode(pause, spec)
            # One that would bind fewer than the older does leaves it to hold the rest.
            covers = set(pause.participant_ids) <= ids and widened(binds, pause.binds) == binds
            if spec.mode is not pause.spec.mode and covers:
                replaces.append(pause.epoch)
        if spec.mode is PauseMode.DRAIN and has_frozen_work(pause):
            raise _pause_mode(pause, "work is frozen under it, and frozen work cannot drain")
    return PauseClaim(replaces=tuple(replaces))


def has_frozen_work(pause: PauseRecord) -> bool:
    """Whether a KEEP pause holds, or may hold, work."""
    return pause.spec.mode is PauseMode.KEEP and (pause.kept > 0 or not pause.settled)


def _is_same(pause: PauseRecord, spec: PauseSpec, ids: set[ParticipantId]) -> bool:
    return (
        set(pause.participant_ids) == ids
        and pause.spec.mode is spec.mode
        and pause.spec.admission is spec.admission
    )


def _check_mode(pause: PauseRecord, spec: PauseSpec) -> None:
    """On one's own pause the only other mode that means anything is ABORT."""
    if spec.mode is not pause.spec.mode and spec.mode is not PauseMode.ABORT:
        raise _pause_mode(pause, f"its mode is {pause.spec.mode.name}; only ABORT is harder")


def _pause_mode(pause: PauseRecord, why: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"pause epoch {pause.epoch} is in force: {why}",
        reason="PAUSE_MODE",
        details={"pause_epoch": str(pause.epoch), "mode": pause.spec.mode.name},
    )


def find_pause(desired: Desired, epoch: int) -> PauseRecord:
    """The pause of an epoch.

    Raises:
        PreconditionFailed: STALE_EPOCH, listing the active ones (AD-14).
    """
    pause = desired.pauses.get(epoch)
    if pause is None:
        raise _stale("pause", epoch, sorted(desired.pauses))
    return pause


def find_release(desired: Desired, epoch: int, kinds: Sequence[ResourceKind]) -> ReleaseRecord:
    """The release of an epoch, which must still hold all the kinds.

    Raises:
        PreconditionFailed: STALE_EPOCH, or RESOURCE_NOT_RELEASED.
    """
    release = desired.releases.get(epoch)
    if release is None:
        raise _stale("resource", epoch, sorted(desired.releases))
    held = frozenset().union(*release.remaining.values())
    missing = [k.name for k in kinds if k not in held]
    if missing:
        raise PreconditionFailed(
            f"not released under epoch {epoch}: {', '.join(missing)}",
            reason="RESOURCE_NOT_RELEASED",
            details={"resource_epoch": str(epoch), "kinds": ",".join(missing)},
        )
    return release


def _stale(what: str, epoch: int, active: Sequence[int]) -> PreconditionFailed:
    listed = ", ".join(map(str, active)) or "none"
    return PreconditionFailed(
        f"{what} epoch {epoch} is not active; active: {listed}",
        reason="STALE_EPOCH",
        details={f"{what}_epoch": str(epoch), "active_epochs": ",".join(map(str, active)) or "none"},
    )
