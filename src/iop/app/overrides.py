"""Reconfigured values beside the config that they stand over: for ``iop config check``, ``plan`` and ``show`` (AD-47).

The records are the journal's. Whether one still holds depends on the config that is looked at: a file that changes the
key ends the override, at the next reload or start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from iop.admin.desired import Desired, OverrideRecord
from iop.admin.enums import ReconfigurableField
from iop.admin.overrides import FileValues, following_file, in_force
from iop.admin.requests import ServingValue
from iop.app.listening import store_url
from iop.app.process import ProcessClock
from iop.config import EffectiveValue
from iop.config.tree import EdgeConfig, EngineConfig
from iop.config.values import StoreUrl
from iop.core.ids import ENGINE_GROUP, GroupId
from iop.store.journal import SqlJournal

__all__ = ["ShownOverride", "shown_overrides", "stored_overrides", "with_overrides"]

EDGE_FIELDS: Final[Mapping[ReconfigurableField, str]] = {
    ReconfigurableField.CAPACITY: "capacity",
    ReconfigurableField.LONG_CONTEXT_CAPACITY: "long_context_capacity",
    ReconfigurableField.ENABLED: "enabled",
}
"""Fields with a key in edge.yaml. The others are an engine's alone: nothing in the file ends their override."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOverride:
    """One reconfigured value, as people and programs read it.

    Attributes:
        key: of the config that it stands over, by the names of Node and adapter.
        place: the same by index, as `iop config check` lists keys; empty when the config has no such key.
        value: what was set.
        file_value: what the config says; empty when it has no such key.
        operation_id: which operation set it.
        holds: it is in force with this config; else the config changed the key and its own value is.
        note: what else is to be known; may be empty.
    """

    key: str
    place: str
    value: str
    file_value: str
    operation_id: str
    holds: bool
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """As programs get it."""
        shape = dataclasses.asdict(self)
        del shape["place"]
        return shape


def shown_overrides(
    records: Iterable[OverrideRecord], config: EdgeConfig | EngineConfig
) -> list[ShownOverride]:
    """Each reconfigured value beside what this config says of it."""
    said, places = _file_values(config), _places(config)
    shown = []
    for record in records:
        whole = Desired(overrides={record.group_id: record})
        held = in_force(following_file(whole, said) or whole).get(record.group_id, {})
        for change in record.changes:
            name = EDGE_FIELDS.get(change.field, change.field.name.lower())
            place = places.get((record.group_id, change.field), "")
            file_value = said.get(record.group_id, {}).get(change.field)
            holds = change.field in held
            note = "taken at the engine's next start" if change.field in record.waiting else ""
            shown.append(
                ShownOverride(
                    key=f"{record.group_id}: {name}" if isinstance(config, EdgeConfig) else place or name,
                    place=place,
                    value=_text(change.value),
                    file_value="" if file_value is None else _text(file_value),
                    operation_id=record.made_by.get(change.field, record.operation_id),
                    holds=holds,
                    note=note if holds else "the config changed this key, or has no such provider any more",
                )
            )
    return shown


def with_overrides(rows: Sequence[EffectiveValue], shown: Iterable[ShownOverride]) -> list[EffectiveValue]:
    """Effective values with those replaced that a reconfiguration holds over the file's."""
    held = {one.place: one for one in shown if one.holds and one.place}
    return [
        dataclasses.replace(
            row,
            value=held[row.key].value,
            origin=f"reconfigured by {held[row.key].operation_id}, over {row.value} from {row.origin}",
        )
        if row.key in held
        else row
        for row in rows
    ]


async def stored_overrides(store: StoreUrl, *, is_given: bool, home: Path) -> Sequence[OverrideRecord]:
    """The records in the store that a config names; none when no server has made that store yet.

    Reads only, also while the server that owns it runs.

    Raises:
        Unavailable: the store cannot be read.
    """
    url = store_url(store, is_given=is_given, home=lambda: home)
    path = StoreUrl(url=url).sqlite_path
    if path is not None and not path.exists():
        return []
    journal = SqlJournal(url, unix_nanos=ProcessClock().unix_nanos)
    try:
        snapshot = await journal.snapshot()
    finally:
        await journal.aclose()
    return [record for _, record in sorted(snapshot.desired.overrides.items()) if record.changes]


def _file_values(config: EdgeConfig | EngineConfig) -> FileValues:
    if isinstance(config, EngineConfig):
        return {ENGINE_GROUP: {ReconfigurableField.CAPACITY: config.slots}}
    return {
        GroupId(f"{node.id}/{adapter.provider_id}"): {
            field: getattr(adapter, name) for field, name in EDGE_FIELDS.items()
        }
        for node in config.nodes
        for adapter in node.adapters
    }


def _places(config: EdgeConfig | EngineConfig) -> Mapping[tuple[GroupId, ReconfigurableField], str]:
    if isinstance(config, EngineConfig):
        return {(ENGINE_GROUP, ReconfigurableField.CAPACITY): "slots"}
    return {
        (GroupId(f"{node.id}/{adapter.provider_id}"), field): f"nodes[{i}].adapters[{j}].{name}"
        for i, node in enumerate(config.nodes)
        for j, adapter in enumerate(node.adapters)
        for field, name in EDGE_FIELDS.items()
    }


def _text(value: ServingValue) -> str:
    """As `iop config check` prints values of its own."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value)
