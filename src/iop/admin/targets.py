"""From a selector to participants: who is meant, who is left out, who must not be split (AD-19). Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from iop.admin.profile import ParticipantInfo
from iop.admin.records import GroupMembers
from iop.admin.requests import AllTargets, ModelTargets, ParticipantTargets, Target
from iop.core.errors import NotFound, PreconditionFailed
from iop.core.ids import GroupId, ParticipantId

__all__ = [
    "Selection",
    "affected_models",
    "binding",
    "by_group",
    "check_participants",
    "group_members",
    "is_of_untold_group",
    "public_models",
    "select",
    "select_ids",
    "widened",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Who an operation acts on.

    Attributes:
        chosen: connected and selected, whole groups only.
        skipped: selected by `all`, by model or by epoch, but offline.
        offline: named one by one, but offline.
        split: named, while others of their group were not.
    """

    chosen: tuple[ParticipantInfo, ...]
    skipped: tuple[ParticipantId, ...] = ()
    offline: tuple[ParticipantId, ...] = ()
    split: tuple[ParticipantId, ...] = ()


def by_group(participants: Iterable[ParticipantInfo]) -> Mapping[GroupId, tuple[ParticipantInfo, ...]]:
    """Participants of each group, in their order."""
    groups: dict[GroupId, list[ParticipantInfo]] = {}
    for participant in participants:
        groups.setdefault(participant.group_id, []).append(participant)
    return {group: tuple(members) for group, members in groups.items()}


def group_members(chosen: Iterable[ParticipantInfo]) -> tuple[GroupMembers, ...]:
    """The groups of a selection, as an operation keeps them."""
    return tuple(
        GroupMembers(group_id=group, participant_ids=tuple(p.participant_id for p in members))
        for group, members in by_group(chosen).items()
    )


def select(target: Target, participants: Sequence[ParticipantInfo]) -> Selection:
    """Resolve a selector.

    A group counts as connected only when all its participants are: they act only together.

    Raises:
        NotFound: MODEL_NOT_FOUND or PARTICIPANT_NOT_FOUND, naming the unknown ones.
    """
    match target:
        case AllTargets():
            return _whole_groups(participants, participants)
        case ModelTargets():
            wanted = set(public_models(target.models, participants))
            return _whole_groups([p for p in participants if wanted & set(p.models)], participants)
        case ParticipantTargets():
            return _named(target.participant_ids, participants)


def select_ids(wanted: Iterable[ParticipantId], participants: Sequence[ParticipantInfo]) -> Selection:
    """Who an epoch covers: whole groups, offline ones skipped, unknown ones forgotten."""
    ids = set(wanted)
    return _whole_groups([p for p in participants if p.participant_id in ids], participants)


def public_models(names: Iterable[str], participants: Sequence[ParticipantInfo]) -> tuple[str, ...]:
    """Public ids of models named by id or alias (AD-15).

    Raises:
        NotFound: MODEL_NOT_FOUND, naming the unknown ones.
    """
    known = {model for p in participants for model in p.models}
    aliases = {alias: model for p in participants for alias, model in p.aliases}
    resolved = {name: name if name in known else aliases.get(name) for name in names}
    unknown = sorted(name for name, model in resolved.items() if model is None)
    if unknown:
        raise NotFound(
            f"no participant serves {', '.join(unknown)}",
            reason="MODEL_NOT_FOUND",
            details={"models": ",".join(unknown)},
        )
    return tuple(dict.fromkeys(model for model in resolved.values() if model is not None))


def binding(target: Target, participants: Sequence[ParticipantInfo]) -> Target | None:
    """The selector as it also holds for whoever joins later (AD-19); models by public id. None: it names its own.

    Raises:
        NotFound: MODEL_NOT_FOUND, naming the unknown ones.
    """
    match target:
        case AllTargets():
            return target
        case ModelTargets():
            return ModelTargets(models=public_models(target.models, participants))
        case _:
            return None


def widened(one: Target | None, other: Target | None) -> Target | None:
    """The binding that holds for everybody who joins under either."""
    if isinstance(one, ModelTargets) and isinstance(other, ModelTargets):
        return ModelTargets(models=tuple(dict.fromkeys((*one.models, *other.models))))
    if isinstance(other, AllTargets) or one is None:
        return other
    return one


def affected_models(chosen: Iterable[ParticipantInfo]) -> tuple[str, ...]:
    """Every model that the participants serve, since an operation on an engine touches them all (AD-19)."""
    return tuple(sorted({model for p in chosen for model in p.models}))


def _whole_groups(selected: Iterable[ParticipantInfo], everybody: Sequence[ParticipantInfo]) -> Selection:
    groups = by_group(everybody)
    wanted = dict.fromkeys(p.group_id for p in selected)
    chosen: list[ParticipantInfo] = []
    skipped: list[ParticipantId] = []
    for group in wanted:
        members = groups[group]
        if all(p.connected for p in members):
            chosen.extend(members)
        else:
            skipped.extend(p.participant_id for p in members)
    return Selection(chosen=tuple(chosen), skipped=tuple(skipped))


def _named(names: Iterable[str], participants: Sequence[ParticipantInfo]) -> Selection:
    known = {p.participant_id: p for p in participants}
    ids = [ParticipantId(name) for name in names]
    away = [name for name in ids if name not in known and is_of_untold_group(name, participants)]
    unknown = sorted(p for p in ids if p not in known and p not in away)
    if unknown:
        raise NotFound(
            f"no such participant: {', '.join(unknown)}",
            reason="PARTICIPANT_NOT_FOUND",
            details={"participants": ",".join(unknown)},
        )
    wanted = set(ids)
    chosen: list[ParticipantInfo] = []
    offline: list[ParticipantId] = list(away)
    split: list[ParticipantId] = []
    for members in by_group(participants).values():
        named = [p for p in members if p.participant_id in wanted]
        if not named:
            continue
        if len(named) < len(members):
            split.extend(p.participant_id for p in named)
        offline.extend(p.participant_id for p in members if not p.connected)
        chosen.extend(named)
    return Selection(chosen=tuple(chosen), offline=tuple(offline), split=tuple(split))


def is_of_untold_group(name: str, participants: Sequence[ParticipantInfo]) -> bool:
    """Whether a name may be a member of a group whose members nobody has told yet: it stands under its own id."""
    return any(
        not p.connected and str(p.participant_id) == p.group_id and name.startswith(f"{p.group_id}/")
        for p in participants
    )


def check_participants(selection: Selection) -> None:
    """Refuse a selection that cannot be acted on as a whole.

    Raises:
        PreconditionFailed: PARTIAL_GROUP, PARTICIPANT_OFFLINE or NO_PARTICIPANTS.
    """
    if selection.split:
        raise PreconditionFailed(
            "select all participants of a group or none; this selection splits the group of "
            + ", ".join(selection.split),
            reason="PARTIAL_GROUP",
            details={"participants": ",".join(selection.split)},
        )
    if selection.offline:
        raise PreconditionFailed(
            f"offline: {', '.join(selection.offline)}",
            reason="PARTICIPANT_OFFLINE",
            details={"participants": ",".join(selection.offline)},
        )
    if not selection.chosen:
        raise PreconditionFailed(
            "nothing that is connected was selected",
            reason="NO_PARTICIPANTS",
            details={"skipped": ",".join(selection.skipped)},
        )
