"""Reconfigured values over the file's: what holds, for how long, and what a participant lacks of it (AD-47). Pure.

A value that ReconfigureServing set holds until the config file changes the key that it stands over. So the record of
an override keeps what the file said at that time; whoever reads the file again, after a reload or at the next start,
compares. A key that changed takes its override along: from then on the file's value holds, and an engine that still
serves the old one is told once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from iop.admin.desired import Desired, OverrideRecord, with_item
from iop.admin.enums import ReconfigurableField
from iop.admin.profile import ParticipantInfo
from iop.admin.requests import ServingChange, ServingValue
from iop.admin.steps import ParticipantReadBack
from iop.core.ids import GroupId, OperationId, ParticipantId

__all__ = [
    "FileValues",
    "following_file",
    "in_force",
    "lacking",
    "overridden",
    "returned",
    "stale_values",
]

FileValues: TypeAlias = Mapping[GroupId, Mapping[ReconfigurableField, ServingValue]]
"""What the config file says for each group; a field that the file has no key for is absent."""


def overridden(
    desired: Desired,
    groups: Iterable[GroupId],
    changes: Sequence[ServingChange],
    *,
    operation_id: OperationId,
    waiting: Mapping[GroupId, frozenset[ReconfigurableField]],
    file_values: FileValues,
) -> Desired:
    """The desired state once these changes hold on these groups, over what the file says now.

    Args:
        waiting: fields that an engine takes only at its next start.
    """
    changed = {c.field for c in changes}
    overrides = dict(desired.overrides)
    for group in groups:
        before = overrides.get(group) or OverrideRecord(group_id=group, changes=(), operation_id=operation_id)
        said = file_values.get(group, {})
        kept = tuple(c for c in before.changes if c.field not in changed)
        file_kept = tuple(c for c in before.file_values if c.field not in changed)
        overrides[group] = OverrideRecord(
            group_id=group,
            changes=(*kept, *changes),
            operation_id=operation_id,
            file_values=(
                *file_kept,
                *(ServingChange(field=f, value=said[f]) for f in sorted(changed) if f in said),
            ),
            made_by={**before.made_by, **dict.fromkeys(changed, operation_id)},
            waiting=(before.waiting - changed) | waiting.get(group, frozenset()),
            returning=tuple(c for c in before.returning if c.field not in changed),
        )
    return dataclasses.replace(desired, overrides=overrides)


def following_file(desired: Desired, file_values: FileValues) -> Desired | None:
    """The desired state without overrides whose key the file has changed since; None when that changes nothing.

    A group that left the config takes all of its overrides along.
    """
    overrides = {}
    for group, record in desired.overrides.items():
        if group in file_values:
            followed = _followed(record, file_values[group])
            if followed.changes or followed.returning:
                overrides[group] = followed
    if overrides == dict(desired.overrides):
        return None
    return dataclasses.replace(desired, overrides=overrides)


def _followed(record: OverrideRecord, said: Mapping[ReconfigurableField, ServingValue]) -> OverrideRecord:
    over = {c.field: c.value for c in record.file_values}
    # A record from before the file's values were kept stands over the file as it is now.
    over |= {c.field: said[c.field] for c in record.changes if c.field not in over and c.field in said}
    gone = {f for f, value in over.items() if f not in said or said[f] != value}
    kept = tuple(c for c in record.changes if c.field not in gone)
    returning = {c.field: said.get(c.field, c.value) for c in record.returning}
    returning |= {c.field: said[c.field] for c in record.changes if c.field in gone and c.field in said}
    return dataclasses.replace(
        record,
        changes=kept,
        file_values=tuple(ServingChange(field=f, value=over[f]) for f in sorted(over) if f not in gone),
        made_by={f: op for f, op in record.made_by.items() if f not in gone},
        waiting=record.waiting - gone,
        returning=tuple(ServingChange(field=f, value=returning[f]) for f in sorted(returning)),
    )


def in_force(desired: Desired) -> FileValues:
    """The values that hold over the file's, by group."""
    return {
        group: {c.field: c.value for c in record.changes}
        for group, record in desired.overrides.items()
        if record.changes
    }


def lacking(
    desired: Desired, member: ParticipantInfo, seen: ParticipantReadBack
) -> tuple[ServingChange, ...]:
    """Overrides that a participant does not serve, or of which it cannot be told whether it does (AD-37).

    What an engine takes at its next start only is not asked of it again.
    """
    record = desired.overrides.get(member.group_id)
    if record is None:
        return ()
    effective = dict(seen.serving)
    return tuple(
        c
        for c in record.changes
        if c.field not in record.waiting
        and c.field in member.capabilities.reconfigurable_fields
        and (c.field not in effective or effective[c.field] != c.value)
    )


def stale_values(
    desired: Desired, members: Sequence[ParticipantInfo], seen: Mapping[ParticipantId, ParticipantReadBack]
) -> tuple[ServingChange, ...]:
    """Values of the file that the engine of a group is still to be told, since it serves another one."""
    record = desired.overrides.get(members[0].group_id)
    if record is None:
        return ()
    return tuple(
        c
        for c in record.returning
        if any(
            c.field in m.capabilities.reconfigurable_fields
            and dict(seen[m.participant_id].serving).get(c.field, c.value) != c.value
            for m in members
            if m.participant_id in seen
        )
    )


def returned(desired: Desired, group: GroupId, told: Sequence[ServingChange]) -> Desired | None:
    """The desired state once a group's engine was told the file's values; None when that changes nothing."""
    record = desired.overrides.get(group)
    if record is None or not record.returning:
        return None
    left = tuple(c for c in record.returning if c not in told)
    if not record.changes and not left:
        rest = {g: r for g, r in desired.overrides.items() if g != group}
        return dataclasses.replace(desired, overrides=rest)
    return dataclasses.replace(
        desired,
        overrides=with_item(desired.overrides, group, dataclasses.replace(record, returning=left)),
    )
